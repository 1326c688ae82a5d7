"""Rollouts that infrastructure broke are left out of the update altogether.

TRL takes a reward of None as "this function has nothing to say": it leaves the rollout out of its group's
baseline and gives it no advantage. That is not all. With another reward function beside the environment's, a
broken rollout would be scored by that one alone, as if the sandbox had said 0; and its tokens still count in
the loss's normalizer, in the KL term and in the entropy bonus. So all rewards of such a rollout become
missing, and none of its tokens has a part in the loss.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

from . import versions
from ._hooks import Hooks, Part, attach
from .tally import Counter

log = logging.getLogger("rlsandbox.trl")


def leave_out_missing(trainer: Any, counter: Callable[[], Counter] | None = None) -> None:
    """From now on *trainer* leaves rollouts that infrastructure broke out of its updates.

    Whether one is broken is asked of the environments of this package and of :func:`sandbox_reward`.
    """
    versions.require()
    versions.require_own_rollouts(trainer)
    attach(trainer, _LeaveOut(trainer, counter))


class _LeaveOut(Part):
    def __init__(self, trainer: Any, counter: Callable[[], Counter] | None) -> None:
        self._trainer, self._counter = trainer, counter
        self._flags: list[bool] = []
        self._any = False

    def install(self, hooks: Hooks) -> None:
        hooks.wrap("_calculate_rewards", self._rewards)
        hooks.wrap("_generate_and_score_completions", self._batch)

    def _rewards(self, original: Any, inputs: Any, *args: Any, **kwargs: Any) -> Any:
        import torch

        rewards = original(inputs, *args, **kwargs)  # of all processes
        self._flags = missing(self._trainer, len(inputs))
        accelerator = self._trainer.accelerator
        mine = torch.tensor(self._flags, device=rewards.device)
        gone = accelerator.gather(mine)
        self._any = bool(gone.any())
        if self._any:
            rewards[gone] = torch.nan
            self._skipped(gone)
        return rewards

    def _skipped(self, gone: Any) -> None:
        trainer = self._trainer
        size = trainer.num_generations if trainer.model.training else trainer.num_generations_eval
        groups = int(gone.view(-1, size).all(dim=1).sum())
        if groups and trainer.accelerator.is_main_process:
            log.warning("%d of %d groups have no scored rollout and are skipped", groups, len(gone) // size)
            if self._counter is not None:
                self._counter().skipped(groups)

    def _batch(self, original: Any, *args: Any, **kwargs: Any) -> Any:
        self._any = False
        batch = original(*args, **kwargs)
        # RLOO's loss is one of whole sequences: without an advantage they have no part in it, and without
        # their tokens their ratio to the old policy overflows.
        if self._any and "num_items_in_batch" in batch:
            self._silence(batch)
        return batch

    def _silence(self, batch: dict[str, Any]) -> None:
        """No token of a broken rollout in the loss. The attention stays as it was."""
        import torch

        name = "tool_mask" if "tool_mask" in batch else "completion_mask"
        there = torch.tensor([not flag for flag in self._flags], device=batch[name].device)
        batch[name] = batch[name] * there.unsqueeze(1).to(batch[name].dtype)
        mask = batch["completion_mask"]
        if "tool_mask" in batch:
            mask = mask * batch["tool_mask"]
        batch["num_items_in_batch"] = self._trainer.accelerator.gather(mask.sum()).sum()


def missing(trainer: Any, n: int) -> list[bool]:
    """Which of the *n* rollouts of this process infrastructure broke."""
    flags = [False] * n
    for i, environment in enumerate(getattr(trainer, "environments", None) or []):
        flags[i] |= bool(getattr(environment, "_missing", False))
    for function in trainer.reward_funcs:
        for i, flag in enumerate(getattr(function, "missing", ())):
            flags[i] |= flag
    return flags
