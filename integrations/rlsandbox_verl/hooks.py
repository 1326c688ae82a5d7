"""What is put around verl's own functions: numbers into its log, claims told ahead.

Classes are wrapped, once a process, and do nothing in a job without a pool of ours.
"""

from __future__ import annotations

import functools
import logging
import sys
from collections import deque
from collections.abc import Callable
from typing import Any

from rlsandbox.errors import SandboxError

from .owner import ask_blocking, owners, pop_all

log = logging.getLogger("rlsandbox.verl")

CLOSE_S = 30.0


def wrap(cls: type, name: str, around: Callable[..., Any]) -> None:
    """``around(original, self, *args, **kwargs)`` in place of a method; once."""
    original = getattr(cls, name)
    if getattr(original, "_rlsandbox", False):
        return

    @functools.wraps(original)
    def wrapper(self: Any, *args: Any, **kwargs: Any) -> Any:
        return around(original, self, *args, **kwargs)

    wrapper._rlsandbox = True  # type: ignore[attr-defined]
    setattr(cls, name, wrapper)


# ---------------------------------------------------------------------- the log


def track() -> None:
    """Numbers in every log of verl's Tracking; the pool is closed when the log is."""
    from verl.utils.tracking import Tracking

    wrap(Tracking, "log", _log)
    wrap(Tracking, "finish", _finish)


def numbers() -> dict[str, float]:
    """What happened since the last call, under ``sandbox/`` (``val_sandbox/`` for validation)."""
    flat: dict[str, float] = {}
    for mode, window in pop_all(owners()).items():
        if window.requested or mode == "train":
            flat.update(window.to_dict("sandbox/" if mode == "train" else f"{mode}_sandbox/"))
    return flat


def _log(original: Any, tracking: Any, data: Any, step: Any, *args: Any, **kwargs: Any) -> Any:
    return original(tracking, {**data, **numbers()}, step, *args, **kwargs)


def _finish(original: Any, tracking: Any, *args: Any, **kwargs: Any) -> Any:
    # By Tracking.__del__, at the very end of the interpreter, nothing can be done: ray's processes are gone.
    if not getattr(tracking, "_finished", False) and not sys.is_finalizing():
        close()
    return original(tracking, *args, **kwargs)


def close() -> None:
    """Close the job's pools: every sandbox is disposed of."""
    import ray

    for actor in owners():
        try:
            ask_blocking(actor, "close", within=CLOSE_S)
        except SandboxError as error:
            log.debug("a pool's owner was gone before it was closed: %s", error)
        ray.kill(actor)


# ---------------------------------------------------------------------- the next batch


class Ahead:
    """Reads a batch further than the trainer asks for. A checkpoint's state is that of what was given.

    Args:
        trainer: verl's v1 trainer.
    """

    def __init__(self, trainer: Any) -> None:
        self._trainer = trainer
        self.held: deque[tuple[Any, Any]] = deque()
        """Chunks of the data loader, and its state after each."""

    def fetch(self, original: Any) -> Any:
        loader = self._trainer.train_dataloader
        self._fill(original, loader, least=1)
        chunk, state = self.held.popleft()
        if self._trainer.global_steps < self._trainer.total_training_steps:
            self._fill(original, loader, least=self._trainer.config.data.train_batch_size)
        loader.state_dict = lambda: state
        return chunk

    def _fill(self, original: Any, loader: Any, *, least: int) -> None:
        while sum(len(chunk) for chunk, _ in self.held) < least:
            vars(loader).pop("state_dict", None)  # what we put there: the real one is asked
            chunk = original(self._trainer)
            self.held.append((chunk, loader.state_dict()))


def look_ahead() -> None:
    """Tell the pool which tasks the v1 trainer samples next, as soon as it begins with those before."""
    from verl.trainer.ppo.v1.trainer_base import PPOTrainer

    def fetch(original: Any, trainer: Any) -> Any:
        ahead = vars(trainer).get("_rlsandbox_ahead")
        if ahead is None:
            ahead = trainer._rlsandbox_ahead = Ahead(trainer)
        return ahead.fetch(original)

    def batch(original: Any, trainer: Any, *args: Any, **kwargs: Any) -> Any:
        found = original(trainer, *args, **kwargs)
        expect([found, *(chunk for chunk, _ in trainer._rlsandbox_ahead.held)], rollouts_of(trainer.config))
        return found

    wrap(PPOTrainer, "_fetch_one_gen_batch", fetch)
    wrap(PPOTrainer, "_next_train_batch", batch)


def rollouts_of(config: Any) -> int:
    return int(config.actor_rollout_ref.rollout.n)


def expect(batches: list[Any], n: int) -> None:
    """Tell the owners what is claimed next, a share to each."""
    found = owners()
    rows = [row for batch in batches for row in rows_of(batch)]
    for i, actor in enumerate(found):
        try:
            ask_blocking(actor, "expect", rows[i :: len(found)], n)
        except SandboxError as error:
            log.warning("the pool could not be told what comes next: %s", error)


def rows_of(batch: Any) -> list[tuple[str, str | None]]:
    """Task id and source of a batch's rows; of those that have one."""
    infos = batch.get("extra_info", [])
    found = []
    for info in infos:
        info = getattr(info, "data", info)
        if isinstance(info, dict) and info.get("task_id"):
            found.append((str(info["task_id"]), info.get("task_source")))
    return found
