"""Claims for a whole batch at once, and the pool told which tasks come next while the model generates."""

from __future__ import annotations

import copy
import logging
from collections import Counter, deque
from collections.abc import Iterator, Sequence
from itertools import islice
from typing import TYPE_CHECKING, Any

import rlsandbox as rls

from . import ranks, versions
from ._hooks import Hooks, Part, attach

if TYPE_CHECKING:
    from .training import SandboxTraining

log = logging.getLogger("rlsandbox.trl")
NEEDED = ("_generate_and_score_completions", "_generate", "_get_train_sampler")


class Peeking:
    """A sampler that reads one generation batch further than it gives, in order and nothing else changed.

    Args:
        sampler: the trainer's.
        size: indices of one generation batch, over all processes.
    """

    def __init__(self, sampler: Any, size: int) -> None:
        self.sampler, self.size = sampler, size
        self.blocks: deque[list[int]] = deque()
        """Generation batches from the one being generated on, repeats of the same one left out."""
        self.found = False
        """The first of them is the one that was asked about last."""
        self._then: list[int] | None = None  # what the next time through begins with, when this one is read

    def __len__(self) -> int:
        return len(self.sampler)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.sampler, name)

    def __iter__(self) -> Iterator[int]:
        source = iter(self.sampler)
        read: deque[list[int]] = deque()
        self.blocks.clear()
        self.found, self._then = False, None

        def more() -> bool:
            block = list(islice(source, self.size))
            if not block:
                self._then = self._next_time() if self._then is None else self._then
                return False
            read.append(block)
            if not self.blocks or self.blocks[-1] != block:
                self.blocks.append(block)
            return True

        while read or more():
            block = read.popleft()
            # Until another batch is there: what follows may be the present one's repeat.
            while (not read or read[-1] == block) and more():
                pass
            yield from block

    def _next_time(self) -> list[int]:
        """The first generation batch of the next time through, where that is known beforehand."""
        from trl.trainer.utils import RepeatSampler

        if type(self.sampler) is not RepeatSampler:
            return []
        twin = copy.copy(self.sampler)
        drawn = getattr(self.sampler, "generator", None)
        if drawn is not None:
            twin.generator = drawn.clone_state()
        return list(islice(twin, self.size))

    def after(self, ids: Sequence[str], names: Sequence[str]) -> list[int]:
        """The generation batch that follows the one of which *ids* are rows, also that of the next epoch.

        Nothing when it is not known.

        Rows are known by their names alone, *names* in the order of the indices; several may have the same.
        """
        wanted = Counter(ids)
        # The batch that was found before is over: one with the same names that follows is meant. Except where
        # nothing else fits: it is generated again.
        for position in [*range(int(self.found), len(self.blocks)), 0]:
            if position < len(self.blocks) and wanted <= Counter(names[i] for i in self.blocks[position]):
                for _ in range(position):
                    self.blocks.popleft()
                self.found = True
                return self.blocks[1] if len(self.blocks) > 1 else self._then or []
        return []


def look_ahead(trainer: Any, training: SandboxTraining, *, expect: bool = True) -> None:
    """Begin a batch's claims together, and expect the next batch while this one is generated.

    Args:
        expect: False: only the claims; the pool is not told what comes next.
    """
    versions.require()
    missing = [name for name in NEEDED if not callable(getattr(trainer, name, None))]
    if missing:
        log.warning("the trainer has no %s: sandboxes are claimed one after the other", missing[0])
        return
    attach(trainer, _LookAhead(trainer, training, expect))


class _LookAhead(Part):
    def __init__(self, trainer: Any, training: SandboxTraining, expect: bool) -> None:
        self._trainer, self._training, self._expect = trainer, training, expect
        self._peeking: Peeking | None = None
        self._ids: list[str] = []
        self._next: list[rls.Task] = []

    def replaces(self, other: Part) -> bool:
        """Environments of several kinds may come from several trainings; each looks ahead for its own."""
        return super().replaces(other) and not (
            getattr(self._trainer, "_multi_environment", False)
            and isinstance(other, _LookAhead)
            and other._training is not self._training
        )

    def install(self, hooks: Hooks) -> None:
        hooks.wrap("_get_train_sampler", self._sampler)
        hooks.wrap("_generate_and_score_completions", self._batch)
        hooks.wrap("_generate", self._generate)

    def _sampler(self, original: Any, *args: Any, **kwargs: Any) -> Any:
        found, trainer = original(*args, **kwargs), self._trainer
        rows = next((given for given in (*args, kwargs.get("dataset")) if given is not None), None)
        rows = trainer.train_dataset if rows is None else rows
        self._peeking = None
        if "task_id" not in (getattr(rows, "column_names", None) or ()):
            return found
        self._peeking = Peeking(found, trainer.args.generation_batch_size)
        self._ids = [str(name) for name in rows["task_id"]]
        return self._peeking

    def _batch(self, original: Any, inputs: Any, *args: Any, **kwargs: Any) -> Any:
        mode = "" if self._trainer.model.training else "eval-"
        self._next = []
        if not mode and self._peeking is not None and inputs and not self._last():
            following = self._peeking.after([str(row.get("task_id")) for row in inputs], self._ids)
            found = [self._training.tasks.get(self._ids[i]) for i in ranks.share(following)]
            self._next = [task for task in found if task is not None]  # else the claim will say so
        whole = False
        try:
            label = f"{mode}{self._trainer.state.global_step}"
            self._training._begin_batch([row for row in inputs if self._ours(row)], label)
            batch = original(inputs, *args, **kwargs)
            whole = True
            return batch
        finally:
            self._training._end_batch(whole=whole)

    def _last(self) -> bool:
        """No other generation batch follows: training ends on the present one."""
        args, state = self._trainer.args, self._trainer.state
        left = (state.max_steps - state.global_step) * args.gradient_accumulation_steps
        return bool(state.max_steps > 0 and left <= args.steps_per_generation * self._trainer.num_iterations)

    def _ours(self, row: dict[str, Any]) -> bool:
        """Whether the row's environment is made by our training: a trainer may have several kinds."""
        if not getattr(self._trainer, "_multi_environment", False):
            return True
        factories = getattr(self._trainer, "environment_factories", None) or {}
        return factories.get(row.get("environment")) is self._training

    def _generate(self, original: Any, *args: Any, **kwargs: Any) -> Any:
        # After the resets: each claim takes off one of what is expected.
        if self._expect and self._next and ranks.owns_pool():
            self._training.pool.expect(self._next, replace=True)
        return original(*args, **kwargs)
