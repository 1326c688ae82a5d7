"""Siblings: the rollouts of one prompt, whose rewards are each other's baseline.

verl runs all of a prompt's rollouts in one process and trains on the group when the last has ended, so
waiting for the siblings at the end costs nothing; it is what makes it possible to say of a group as a whole
that it cannot be trained on. A group that loses a member is trained on without it. One that has a single
member left has no baseline (verl would then take the bare reward for an advantage), and is left out.
"""

from __future__ import annotations

import asyncio

# Estimators in which a rollout's advantage does not depend on its siblings.
ALONE = ("gae", "reinforce_plus_plus", "remax")


class Group:
    """One prompt's rollouts in this process."""

    def __init__(self) -> None:
        self.size = 0
        self.ended = 0
        self.scored = 0
        self.told = False
        self.cause: BaseException | None = None
        self.whole = asyncio.Event()

    def verdict(self, *, least: int, all_or_none: bool) -> bool:
        """Whether it is trained on."""
        if all_or_none and self.scored < self.size:
            return False
        return self.scored >= min(least, self.size)


class Place:
    """A rollout's place in its group; taken before anything is awaited, so that the group's size is known."""

    def __init__(self, groups: dict[str, Group], key: str) -> None:
        self._groups, self._key = groups, key
        self.group = groups.setdefault(key, Group())
        self.group.size += 1
        self._ended = False

    def end(self, *, scored: bool, cause: BaseException | None = None) -> None:
        """This one has ended; twice is fine."""
        if self._ended:
            return
        self._ended = True
        group = self.group
        group.ended += 1
        group.scored += scored
        group.cause = group.cause or cause
        if group.ended == group.size:
            self._groups.pop(self._key, None)
            group.whole.set()

    async def settled(self) -> Group:
        """The group, once all of it has ended."""
        await self.group.whole.wait()
        return self.group

    def tells(self) -> bool:
        """True for one member of the group: the one that tells verl of a group that was lost."""
        first, self.group.told = not self.group.told, True
        return first
