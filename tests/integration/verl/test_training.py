"""verl's real workers, manager, queue and replay buffer; real sandboxes; faults by pid."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

pytest.importorskip("verl", reason="verl is not installed")
import keepers
import torch

import rlsandbox as rls
from rlsandbox.errors import ConfigError, PoolClosedError, SandboxError


def owner_pid() -> int:
    from rlsandbox_verl.owner import ask_blocking, owners

    (owner,) = owners()
    return int(ask_blocking(owner, "pid"))


def ref() -> rls.PoolRef:
    from rlsandbox_verl.owner import ask_blocking, owners

    (owner,) = owners()
    found = ask_blocking(owner, "ref")
    assert isinstance(found, rls.PoolRef)
    return found


def numbers() -> dict[str, float]:
    from rlsandbox_verl import hooks

    return hooks.numbers()


def rewards(rows: Any) -> list[float]:
    return rows["rm_scores"].to_padded_tensor(0.0).sum(-1).tolist()  # type: ignore[no-any-return]


class Beside:
    """Work on a thread; what it raises is raised by :meth:`join`."""

    def __init__(self, work: Callable[[], None]) -> None:
        self._threads = ThreadPoolExecutor(1)
        self._future = self._threads.submit(work)

    def join(self) -> None:
        self._future.result(120)
        self._threads.shutdown()


def kill_keepers(times: int) -> Callable[[], None]:
    def work() -> None:
        owner = owner_pid()
        for _ in range(times):
            keepers.kill_keeper_of("sleep 87654", owner)

    return work


def test_a_batch_over_four_workers_shares_one_pool(job: Any) -> None:
    job.submit("plain", "plain-2", "plain", "plain-2")
    rows = job.rows(job.sample(4), "rm_scores", "response_mask", "extra_fields", "uid")
    assert len(rows) == 16
    assert sorted(rewards(rows)) == [0.0] * 8 + [1.0] * 8
    for row in rows["extra_fields"]:
        told = row["sandbox"]
        assert told["status"] == "completed" and told["attempts"] == 1 and told["ttfc_s"] > 0
        assert row["reward_extra_info"] == {"acc": told["reward"]}
    step = numbers()
    assert step["sandbox/coverage"] == 1 and step["sandbox/rollouts"] == 16
    assert step["sandbox/missing"] == step["sandbox/groups_partial"] == step["sandbox/groups_lost"] == 0
    assert step["sandbox/claims"] == 16
    assert 0 < step["sandbox/ttfc/mean"] <= step["sandbox/ttfc/p50"] * 16
    assert (
        step["sandbox/ttfc/p50"]
        <= step["sandbox/ttfc/p95"]
        <= step["sandbox/ttfc/p99"]
        <= step["sandbox/ttfc/max"]
    )
    assert 0 <= step["sandbox/idle_ratio"] <= 1 and step["sandbox/blocked_s"] > 0
    assert step["sandbox/batch_completion_s"] > 0
    assert step["sandbox/reward_bound_low"] == step["sandbox/reward_bound_high"] == 0.5
    with rls.Pool.connect(ref()) as pool:
        stats = pool.stats()
        assert stats.created - stats.disposed <= 8, "one ceiling for four workers"


def test_the_work_is_graded_out_of_the_models_reach(job: Any) -> None:
    job.submit("cheat")
    batch = job.sample(1)
    rows = job.rows(batch, "responses", "extra_fields")
    from transformers import AutoTokenizer

    words = AutoTokenizer.from_pretrained(job.place / "model")
    for ids in rows["responses"]:
        said = words.decode(ids)
        assert "No such file" in said, "the hidden file was there while the model worked"
        assert "Submitted." in said and "date" not in said.partition("Submitted.")[2], (
            "submit ends the rollout"
        )


def test_whatever_a_model_calls_is_answered_and_scored(job: Any) -> None:
    job.submit("garbage")
    rows = job.rows(job.sample(1), "rm_scores", "extra_fields")
    assert rewards(rows) == [1.0] * 4
    assert {row["sandbox"]["status"] for row in rows["extra_fields"]} == {"completed"}
    assert job.refills == []


def test_a_sandbox_that_dies_in_a_tool_leaves_its_rollout_out_of_the_group(job: Any) -> None:
    from verl.protocol import DataProto
    from verl.trainer.ppo.core_algos import compute_grpo_outcome_advantage
    from verl.trainer.ppo.v1.utils import compute_advantage_for_multi_trajectories

    killer = Beside(kill_keepers(2))  # the retry as well
    (uid, _) = job.submit("victim", "plain")
    batch = job.sample(2)
    killer.join()
    mine = [key for key in batch.keys if key.startswith(uid)]
    assert len(mine) == 3 and len(batch.keys) == 7
    rows = job.rows(batch, "rm_scores", "response_mask", "uid", "extra_fields")
    scores = dict(zip(batch.keys, rewards(rows), strict=True))
    assert sorted(scores[key] for key in mine) == [0.0, 0.0, 1.0]

    padded = rows.select("rm_scores", "response_mask").to_padded_tensor(0)
    data = DataProto.from_dict(
        {"token_level_rewards": padded["rm_scores"], "response_mask": padded["response_mask"]},
        {"uid": list(rows["uid"])},
    )
    compute_advantage_for_multi_trajectories(data, list(batch.keys), "grpo", config={})
    three = [i for i, key in enumerate(batch.keys) if key in mine]
    alone, _ = compute_grpo_outcome_advantage(
        torch.tensor([[scores[key]] for key in mine]), torch.ones(3, 1), [uid] * 3
    )
    found = data.batch["advantages"][three].max(-1).values + data.batch["advantages"][three].min(-1).values
    assert torch.allclose(found, alone[:, 0], atol=1e-4), "the baseline is that of the three"

    step = numbers()
    assert step["sandbox/coverage"] == 7 / 8 and step["sandbox/missing"] == 1
    assert step["sandbox/groups_partial"] == 1 and step["sandbox/failures/sandbox_died"] == 1
    assert step["sandbox/reward_bound_high"] - step["sandbox/reward_bound_low"] == pytest.approx(1 / 8)
    assert job.refills == []


def test_a_rollout_is_tried_again_from_the_start_in_a_fresh_sandbox(job: Any) -> None:
    killer = Beside(kill_keepers(1))
    job.submit("once")
    rows = job.rows(job.sample(1), "rm_scores", "extra_fields")
    killer.join()
    told = [row["sandbox"] for row in rows["extra_fields"]]
    assert sorted(t["attempts"] for t in told) == [1, 1, 1, 2]
    assert sorted(rewards(rows)) == [0.0, 0.0, 1.0, 1.0]  # 1, 2, 3 and then 4
    step = numbers()
    assert step["sandbox/coverage"] == 1 and step["sandbox/retried"] == 1


def test_a_group_with_one_rollout_left_has_no_baseline_and_is_replaced(job: Any) -> None:
    killer = Beside(kill_keepers(6))
    (uid,) = job.submit("lone")
    batch = job.sample(1)
    killer.join()
    assert job.refills == [1], "verl took another prompt in the lost one's place"
    assert not any(key.startswith(uid) for key in batch.keys)
    assert len(job.rows(batch, "rm_scores")) == 4


def test_a_group_that_lost_one_can_be_left_out_as_a_whole(job: Any) -> None:
    (uid,) = job.submit("raises", loop="whole")
    batch = job.sample(1)
    assert job.refills == [1]
    assert not any(key.startswith(uid) for key in batch.keys)
    assert len(job.rows(batch, "rm_scores")) == 4


def test_one_rollout_that_raises_does_not_take_its_group_with_it(job: Any) -> None:
    (uid,) = job.submit("raises")
    batch = job.sample(1)
    assert len(batch.keys) == 3 and all(key.startswith(uid) for key in batch.keys)
    rows = job.rows(batch, "extra_fields")
    assert {row["sandbox"]["status"] for row in rows["extra_fields"]} == {"completed"}
    step = numbers()
    assert step["sandbox/missing"] == 1 and step["sandbox/groups_partial"] == 1
    assert [n for name, n in step.items() if name.startswith("sandbox/failures/")] == [1]


def test_when_all_claims_time_out_the_batch_is_missing_and_training_goes_on(job: Any) -> None:
    pool = rls.Pool.connect(ref())
    held = [pool.claim(rls.Task(id=f"held-{i}"), timeout=60) for i in range(8)]
    (uid,) = job.submit("plain-2")

    def give_back() -> None:
        deadline = time.monotonic() + 60
        while not job.refills and time.monotonic() < deadline:
            time.sleep(0.05)
        for sandbox in held:
            sandbox.release()

    giver = Beside(give_back)
    try:
        batch = job.sample(1)
    finally:
        giver.join()
        pool.close()
    assert job.refills[0] == 1
    assert not any(key.startswith(uid) for key in batch.keys)
    assert len(job.rows(batch, "rm_scores")) == 4, "the next prompt's rollouts are whole"
    step = numbers()
    assert step["sandbox/groups_lost"] >= 1 and step["sandbox/failures/claim_timeout"] >= 4
    assert step["sandbox/never_started"] >= 0


def test_a_killed_owner_is_started_anew_and_what_it_had_is_missing(job: Any) -> None:
    before = owner_pid()
    (uid,) = job.submit("asleep")
    keepers.keeper_of("sleep 87653", owner=before, wait_s=60)
    os.kill(before, signal.SIGKILL)
    batch = job.sample(1)
    assert job.refills == [1]
    assert not any(key.startswith(uid) for key in batch.keys)
    rows = job.rows(batch, "rm_scores", "extra_fields")
    assert len(rows) == 4
    assert owner_pid() != before
    keepers.until_gone("sleep 87653")
    job.submit("plain", "plain-2")
    assert len(job.rows(job.sample(2), "rm_scores")) == 8
    assert numbers()["sandbox/coverage"] < 1


def test_validation_has_numbers_of_its_own(job: Any) -> None:
    job.submit("plain", validate=True)
    batch = job.sample(1, "val")
    assert len(job.rows(batch, "rm_scores")) == 1
    step = numbers()
    assert step["val_sandbox/coverage"] == 1 and step["val_sandbox/rollouts"] == 1
    assert "sandbox/rollouts" not in step


def test_every_rollout_has_its_record(job: Any) -> None:
    with rls.Pool.connect(ref()) as pool:
        before = len(pool.report().records)
        job.submit("raises", "plain")
        job.rows(job.sample(2), "uid")
        mine = pool.report().records[before:]
    assert len(mine) == 8
    assert sorted(r.status for r in mine) == ["completed"] * 7 + ["failed"]
    (lost,) = [r for r in mine if r.status == "failed"]
    assert lost.failure is not None and lost.reward is None
    assert "bad day" in lost.failure.cause and lost.failure.phase == "policy"
    assert {r.reward for r in mine if r.status == "completed"} == {0.0, 1.0}


def test_settings_that_are_wrong_are_told_when_the_manager_is_made(job: Any, rig: Any) -> None:
    from rlsandbox_verl.settings import settings_in

    wrong = job.place / "wrong.yaml"
    wrong.write_text("- name: sandboxes\n  _target_: rlsandbox_verl.SandboxAgentLoop\n  retrys: 1\n")
    config = rig.config(job.place / "model", wrong)
    with pytest.raises(ConfigError, match="did you mean retries"):
        settings_in(config)


def test_a_pool_that_cannot_be_made_is_told_as_what_it_is(cluster: None) -> None:
    import ray
    from rlsandbox_verl import owner as module
    from rlsandbox_verl.settings import Settings

    settings = Settings(pool={"size": "four", "config": False})
    owner: Any = ray.remote(module.PoolOwner).options(num_cpus=0, max_restarts=1).remote(settings, "wrong")
    with pytest.raises(ConfigError, match="size must be a whole number of at least 1, not 'four'"):
        module.ask_blocking(owner, "pid", within=30)


def test_the_pool_is_not_started_again_for_ever(cluster: None) -> None:
    import ray
    from rlsandbox_verl import owner as module
    from rlsandbox_verl.settings import Settings

    actor: Any = ray.remote(module.PoolOwner)
    settings = Settings(pool={"size": 1, "config": False}, restarts=0)
    mortal = actor.options(num_cpus=0, max_restarts=0, max_concurrency=4).remote(settings, "mortal")
    os.kill(module.ask_blocking(mortal, "pid"), signal.SIGKILL)
    with pytest.raises(PoolClosedError, match="not started again") as raised:
        module.ask_blocking(mortal, "pid", within=30)
    assert raised.value.kind == "owner_gone"


def test_a_job_in_which_everything_breaks_is_told(job: Any) -> None:
    job.refill_with = "all-raise"
    job.submit("all-raise")
    with pytest.raises(SandboxError, match="rollouts all broke") as raised:
        job.sample(1)
    assert raised.value.kind == "all_lost"
    assert len(job.refills) < 20
    job.buffer._clear_groups("train", set(job.buffer.failure_keys["train"]))
