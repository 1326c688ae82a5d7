"""Groups: who is waited for, and when a group is trained on."""

from __future__ import annotations

import asyncio

import pytest
from rlsandbox_verl.groups import Group, Place


@pytest.mark.parametrize(
    ("size", "scored", "least", "all_or_none", "kept"),
    [
        (4, 4, 2, False, True),
        (4, 2, 2, False, True),
        (4, 1, 2, False, False),
        (4, 0, 2, False, False),
        (1, 1, 2, False, True),
        (1, 0, 2, False, False),
        (4, 1, 1, False, True),
        (4, 3, 2, True, False),
        (4, 4, 2, True, True),
    ],
)
def test_verdict(size: int, scored: int, least: int, all_or_none: bool, kept: bool) -> None:
    group = Group()
    group.size, group.scored = size, scored
    assert group.verdict(least=least, all_or_none=all_or_none) is kept


async def test_siblings_are_waited_for_and_one_of_them_tells() -> None:
    groups: dict[str, Group] = {}
    places = [Place(groups, "a") for _ in range(3)]
    other = Place(groups, "b")
    waiting = asyncio.ensure_future(places[0].settled())
    places[0].end(scored=True)
    places[0].end(scored=True)  # twice is fine
    places[1].end(scored=False, cause=ValueError("x"))
    await asyncio.sleep(0)
    assert not waiting.done()
    places[2].end(scored=False, cause=ValueError("y"))
    group = await waiting
    assert (group.size, group.ended, group.scored, str(group.cause)) == (3, 3, 1, "x")
    assert [place.tells() for place in places] == [True, False, False]
    assert list(groups) == ["b"], "a group that has ended is forgotten"
    other.end(scored=True)
    assert groups == {}
