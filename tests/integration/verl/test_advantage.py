"""What is missing changes nothing in the update: verl's own estimators, losses and gradients."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

pytest.importorskip("verl", reason="verl is not installed")
import torch
from omegaconf import OmegaConf
from verl.protocol import DataProto
from verl.trainer.ppo.core_algos import compute_policy_loss_vanilla
from verl.trainer.ppo.ray_trainer import compute_advantage
from verl.workers.config import ActorConfig

from rlsandbox.errors import UnsupportedError

LENGTH = 6


def batch(rewards: list[float | None], uids: list[str]) -> Any:
    """As the older agent loop worker makes it: a row for everybody, empty where the rollout is missing."""
    mask = torch.zeros(len(rewards), LENGTH)
    scores = torch.zeros(len(rewards), LENGTH)
    for i, reward in enumerate(rewards):
        if reward is not None:
            mask[i, : 2 + i % 3] = 1
            scores[i, 1 + i % 3] = reward
    return DataProto.from_dict(
        {"token_level_rewards": scores, "response_mask": mask}, {"uid": np.array(uids, dtype=object)}
    )


def advantages(data: Any, estimator: str, by_std: bool = True) -> torch.Tensor:
    config = OmegaConf.create({"norm_adv_by_std_in_grpo": by_std})
    done = compute_advantage(data, estimator, norm_adv_by_std_in_grpo=by_std, config=config)
    return done.batch["advantages"]  # type: ignore[no-any-return]


def gradient(data: Any, advantage: torch.Tensor, features: torch.Tensor, mode: str) -> torch.Tensor:
    """Of verl's policy loss, for a policy with one weight a feature."""
    weight = torch.zeros(features.shape[-1], requires_grad=True)
    log_prob = features @ weight
    loss, _ = compute_policy_loss_vanilla(
        torch.zeros_like(log_prob), log_prob, advantage, data.batch["response_mask"], loss_agg_mode=mode,
        config=ActorConfig(strategy="fsdp", rollout_n=1, ppo_micro_batch_size_per_gpu=1),
    )  # fmt: skip
    loss.backward()
    assert weight.grad is not None
    return weight.grad


@pytest.mark.parametrize("mode", ["token-mean", "seq-mean-token-sum", "seq-mean-token-mean"])
@pytest.mark.parametrize("by_std", [True, False])
def test_the_gradient_is_that_of_a_batch_without_the_rollout(mode: str, by_std: bool) -> None:
    import rlsandbox_verl.advantage  # noqa: F401

    torch.manual_seed(0)
    rewards: list[float | None] = [1.0, None, 0.0, 1.0, 0.5, 0.25]
    uids = ["a", "a", "a", "a", "b", "b"]
    features = torch.randn(6, LENGTH, 5)
    kept = [0, 2, 3, 4, 5]
    whole = batch(rewards, uids)
    without = whole.select_idxs(kept)
    expected = gradient(without, advantages(without, "grpo", by_std), features[kept], mode)
    found = gradient(whole, advantages(whole, "sandbox_grpo", by_std), features, mode)
    assert torch.allclose(found, expected, atol=1e-6)
    fake = gradient(whole, advantages(whole, "grpo", by_std), features, mode)
    assert not torch.allclose(fake, expected, atol=1e-3), "a 0 in its place would have changed the update"


def test_a_group_with_one_rollout_left_teaches_nothing() -> None:
    import rlsandbox_verl.advantage  # noqa: F401

    data = batch([None, None, 1.0, 1.0], ["a", "a", "a", "b"])
    found = advantages(data, "sandbox_grpo").abs().sum(-1)
    assert found[:3].tolist() == [0, 0, 0]
    assert found[3] > 0, "a prompt with one rollout (n=1) is verl's own business"
    assert advantages(batch([None, None], ["a", "a"]), "sandbox_grpo").abs().sum() == 0


@pytest.mark.parametrize("other", ["rloo", "remax"])
def test_another_estimator_is_refused_where_everything_needs_a_row(other: str) -> None:
    from rlsandbox_verl.advantage import require

    for name in ("sandbox_grpo", "gae", "reinforce_plus_plus"):
        require(OmegaConf.create({"algorithm": {"adv_estimator": name}}))
    with pytest.raises(UnsupportedError, match=f"would count as a reward of 0 in '{other}'"):
        require(OmegaConf.create({"algorithm": {"adv_estimator": other}}))
