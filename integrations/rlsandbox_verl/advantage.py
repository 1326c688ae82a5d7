"""``sandbox_grpo``: GRPO's advantage without the rows of rollouts that are missing.

Only verl's older trainers need it, whose agent loop worker wants a row for every rollout: in the v1 trainer a
rollout that is missing has no row.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from verl.trainer.ppo.core_algos import AdvantageEstimator, get_adv_estimator_fn, register_adv_est

from rlsandbox.errors import UnsupportedError

from .groups import ALONE

NAME = "sandbox_grpo"


@register_adv_est(NAME)  # type: ignore[untyped-decorator]
def compute_sandbox_grpo(
    token_level_rewards: torch.Tensor,
    response_mask: torch.Tensor,
    index: Any,
    config: Any = None,
    **kwargs: Any,
) -> tuple[torch.Tensor, torch.Tensor]:
    """verl's own GRPO advantage over the rows that hold something; 0 for the others.

    A group that has lost all but one of its rollouts has no baseline: 0 for that one too.
    """
    index = np.asarray(index)
    there = response_mask.sum(dim=-1).cpu().numpy() > 0
    kept = np.zeros(len(index), dtype=bool)
    for uid in set(index.tolist()):
        group = index == uid
        if group.sum() == 1 or (group & there).sum() > 1:
            kept |= group & there
    advantages = torch.zeros_like(token_level_rewards)
    if kept.any():
        rows = torch.as_tensor(np.flatnonzero(kept), device=token_level_rewards.device)
        by_std = True if config is None else config.get("norm_adv_by_std_in_grpo", True)
        found, _ = get_adv_estimator_fn(AdvantageEstimator.GRPO)(
            token_level_rewards=token_level_rewards[rows],
            response_mask=response_mask[rows],
            index=index[kept],
            norm_adv_by_std_in_grpo=by_std,
        )
        advantages[rows] = found
    return advantages, advantages


def require(config: Any) -> None:
    """Raise unless the estimator leaves out what is missing, in a trainer that wants a row for everything."""
    name = str(config.algorithm.adv_estimator)
    # In remax the greedy rollout is another's baseline: a missing one would be a baseline of 0.
    if name not in (NAME, *ALONE) or name == "remax":
        raise UnsupportedError(
            f"with this trainer a rollout that infrastructure broke would count as a reward of 0 in {name!r}",
            phase="config",
            hint=f"algorithm.adv_estimator={NAME}, or trainer.use_v1=True",
        )
