"""Claims for a whole batch at once, and the pool told which tasks come next while the model generates."""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Iterator
from itertools import islice
from typing import TYPE_CHECKING, Any

import rlsandbox as rls

from . import versions
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

    def __len__(self) -> int:
        return len(self.sampler)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.sampler, name)

    def __iter__(self) -> Iterator[int]:
        source = iter(self.sampler)
        read: deque[list[int]] = deque()
        self.blocks.clear()

        def more() -> bool:
            block = list(islice(source, self.size))
            if not block:
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

    def after(self, index: int) -> list[int]:
        """The generation batch that follows the one with *index*; nothing when it is not known."""
        for position, block in enumerate(self.blocks):
            if index in block:
                for _ in range(position):
                    self.blocks.popleft()
                return self.blocks[1] if len(self.blocks) > 1 else []
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

    def install(self, hooks: Hooks) -> None:
        hooks.wrap("_get_train_sampler", self._sampler)
        hooks.wrap("_generate_and_score_completions", self._batch)
        hooks.wrap("_generate", self._generate)

    def _sampler(self, original: Any, *args: Any, **kwargs: Any) -> Any:
        found, trainer = original(*args, **kwargs), self._trainer
        # Only where the rows are ours, in our order.
        if getattr(trainer.train_dataset, "column_names", None) != ["prompt", "task_id"]:
            return found
        self._peeking = Peeking(found, trainer.args.generation_batch_size)
        self._ids = list(trainer.train_dataset["task_id"])
        return self._peeking

    def _batch(self, original: Any, inputs: Any, *args: Any, **kwargs: Any) -> Any:
        mode = "" if self._trainer.model.training else "eval-"
        self._next = []
        if not mode and self._peeking is not None and inputs:
            task_id = inputs[0].get("task_id")
            index = self._ids.index(task_id) if task_id in self._training.tasks else -1
            following = [self._training.tasks.get(self._ids[i]) for i in self._peeking.after(index)]
            self._next = [task for task in following if task is not None]  # else the claim will say so
        try:
            self._training._begin_batch(inputs, f"{mode}{self._trainer.state.global_step}")
            return original(inputs, *args, **kwargs)
        finally:
            self._training._end_batch()

    def _generate(self, original: Any, *args: Any, **kwargs: Any) -> Any:
        # After the resets: each claim takes off one of what is expected.
        if self._expect and self._next and self._trainer.accelerator.is_main_process:
            self._training.pool.expect(self._next, replace=True)
        return original(*args, **kwargs)
