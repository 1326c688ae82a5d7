"""SandboxCallback: the pool's numbers in the trainer's own log, and a pool that is always closed."""

from __future__ import annotations

import logging
import weakref
from collections.abc import Callable
from typing import Any

from transformers import TrainerCallback

import rlsandbox as rls
from rlsandbox.metrics import Snapshot

from . import ranks, versions
from ._hooks import Hooks, Part, attach
from .tally import Tally, counter_of

log = logging.getLogger("rlsandbox.trl")
COUNTERS = ("claims", "resets", "recycled", "quarantined", "never_started")


class SandboxCallback(TrainerCallback, Part):  # type: ignore[misc]
    """Logs what the pool did since the last log, under ``sandbox/``; evaluation has numbers of its own.

    A log covers everything since the one before, so numbers are right with any number of accumulation steps,
    iterations and steps per generation: a step that generated nothing claimed nothing. Percentiles are exact,
    over the samples of all processes.

    Args:
        trainer: a GRPOTrainer.
        pool: what its environments, tools or rewards use; a function is asked at each beginning of training.
        close: close the pool when training ends, by an exception too; with several trainers, when the last
            of them has trained. (Signals and the interpreter's exit close every pool anyway.)
    """

    def __init__(self, trainer: Any, pool: rls.Pool | Callable[[], rls.Pool], *, close: bool = True) -> None:
        versions.require()
        versions.require_own_rollouts(trainer)
        self._trainer, self._find, self._close = trainer, pool, close
        self._pool: rls.Pool | None = None
        self._found: dict[str, tuple[Snapshot, Tally]] = {}
        self._mode = "train"
        self._watch()
        attach(trainer, self)

    # ------------------------------------------------------------------ its time

    def install(self, hooks: Hooks) -> None:
        hooks.wrap("_generate_and_score_completions", self._generating)
        for name in ("_generate_single_turn", "compute_loss"):
            hooks.wrap(name, self._working)

    def retire(self) -> None:
        super().retire()
        if self._pool is not None:
            _users.get(self._pool, set()).discard(id(self))

    def begin(self) -> None:
        self._watch()

    def end(self) -> None:
        pool, self._pool = self._pool, None
        if pool is None:
            return
        users = _users.get(pool, set())
        users.discard(id(self))
        if self._close and not users:
            pool.close()

    def _watch(self) -> None:
        """From now on."""
        pool = self._find() if callable(self._find) else self._find
        self._pool = pool
        _users.setdefault(pool, set()).add(id(self))
        self._window = pool.metrics.window()
        self._counter = counter_of(pool)
        self._counter.pop()
        self._found.clear()
        self._mode = "train"

    # ------------------------------------------------------------------ around the trainer's methods

    def _generating(self, original: Any, *args: Any, **kwargs: Any) -> Any:
        self._take()
        self._mode = "train" if self._trainer.model.training else "eval"
        if self._mode == "eval" and self._trainer.accelerator.num_processes > 1:
            # The owner counts the others' claims: none is asked for before it has put away what was trained.
            self._trainer.accelerator.wait_for_everyone()
        try:
            return original(*args, **kwargs)
        finally:
            self._take()
            self._mode = "train"

    def _working(self, original: Any, *args: Any, **kwargs: Any) -> Any:
        assert self._pool is not None
        with self._pool.metrics.idle.busy():
            return original(*args, **kwargs)

    # ------------------------------------------------------------------ events

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        last = state.max_steps and state.global_step >= state.max_steps
        if self.retired:
            return
        if control.should_log or last:  # else the trainer would average windows, and percentiles with them
            self._take()
            self._tell("train")

    def on_prediction_step(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if not self.retired:
            self._tell("eval", keep=True)

    def on_evaluate(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self._found.pop("eval", None)

    # ------------------------------------------------------------------ numbers

    def _take(self) -> None:
        """What happened since the last look belongs to the present mode."""
        snapshot, tally = self._window.pop(), self._counter.pop()
        before = self._found.get(self._mode)
        if before is not None:
            snapshot, tally = Snapshot.merge([before[0], snapshot]), Tally.merge([before[1], tally])
        self._found[self._mode] = snapshot, tally

    def _tell(self, mode: str, *, keep: bool = False) -> None:
        found = self._found.get(mode) if keep else self._found.pop(mode, None)
        if found is None:
            found = Snapshot(), Tally()
        snapshot, tally = self._all(found)
        for name, value in numbers(snapshot, tally).items():
            self._trainer._metrics[mode][f"sandbox/{name}"] = [value]

    def _all(self, found: tuple[Snapshot, Tally]) -> tuple[Snapshot, Tally]:
        """Of all processes."""
        if self._trainer.accelerator.num_processes == 1:
            return found
        from accelerate.utils import gather_object

        return ranks.of_all(gather_object([(ranks.owns_pool(), *found)]))


_users: weakref.WeakKeyDictionary[rls.Pool, set[int]] = weakref.WeakKeyDictionary()
"""Callbacks by the pool that they watch: the last one's training closes it."""


def numbers(snapshot: Snapshot, tally: Tally) -> dict[str, float]:
    """The log's names and numbers; what did not happen has none."""
    flat: dict[str, float] = {}
    for name, series in (("ttfc/", "ttfc"), ("reset/", "reset"), ("verify/", "verify")):
        if series in snapshot.samples:
            flat.update(snapshot.samples[series].summary().to_dict(name))
    batches = snapshot.samples.get("batch")
    if batches is not None and len(batches):
        flat["batch_completion_s"] = sum(batches.values) / len(batches)
    counters = snapshot.counters
    flat.update({name: float(counters.get(name, 0)) for name in COUNTERS})
    flat.update({name: float(n) for name, n in counters.items() if name.startswith("failures/") and n})
    if snapshot.idle is not None:
        flat["blocked_s"] = snapshot.idle.blocked_s
        if snapshot.idle.ratio is not None:
            flat["idle_ratio"] = snapshot.idle.ratio
    flat.update(tally.to_dict())
    return flat
