"""The agent loop worker of verl's older trainers, which wants a row for every rollout."""

from __future__ import annotations

from typing import Any

import pytest

pytest.importorskip("verl", reason="verl is not installed")
import keepers


def prompts(rig: Any, place: Any, plans: dict[str, Any], *names: str) -> Any:
    from verl.protocol import DataProto

    rows = {
        "raw_prompt": [[{"role": "user", "content": rig.plan(*plans[name])}] for name in names],
        "extra_info": [{"task_id": name, "task_source": str(place / "tasks.jsonl")} for name in names],
        "agent_name": ["sandboxes"] * len(names),
        "uid": [f"older-{name}" for name in names],
    }
    return DataProto(non_tensor_batch={name: rig.column(values) for name, values in rows.items()}).repeat(4)


async def test_what_is_missing_has_an_empty_row_that_verls_numbers_leave_out(
    training: Any, rig: Any, place: Any
) -> None:
    import asyncio

    import torch
    from rlsandbox_verl.owner import ask, disconnect, owners
    from verl.experimental.agent_loop.agent_loop import AgentLoopWorker
    from verl.trainer.ppo.metric_utils import compute_data_metrics
    from verl.trainer.ppo.ray_trainer import compute_advantage

    (owner,) = owners()
    pid = await ask(owner, "pid")
    config = rig.config(
        place / "model", place / "loops.yaml",
        **{"algorithm.adv_estimator": "sandbox_grpo", "actor_rollout_ref.rollout.response_length": 512},
    )  # fmt: skip
    worker = AgentLoopWorker(config, rig.Obedient(place / "model"))
    plans = training.plans

    def kill() -> None:
        for _ in range(2):  # the retry as well
            keepers.kill_keeper_of("sleep 87654", pid)

    killer = asyncio.create_task(asyncio.to_thread(kill))
    batch = prompts(rig, place, plans, "victim", "plain")
    out = await worker.generate_sequences(batch)
    await killer
    await disconnect()
    lengths = out.batch["attention_mask"][:, config.actor_rollout_ref.rollout.prompt_length :].sum(-1)
    (lost,) = (i for i, n in enumerate(lengths) if n == 0)
    assert lost < 4
    three = [i for i in range(4) if i != lost]
    told = list(out.non_tensor_batch["sandbox"])
    missing = told.pop(lost)
    assert missing["status"] == "failed" and missing["failure"] == "sandbox_died"
    assert missing["reward"] is None and missing["attempts"] == 2
    assert [t["status"] for t in told] == ["completed"] * 7
    scores = out.batch["rm_scores"].sum(-1)
    assert sorted(scores[three].tolist()) == [0.0, 0.0, 1.0]

    out.batch["token_level_rewards"] = out.batch["token_level_scores"] = out.batch["rm_scores"]
    out.non_tensor_batch["uid"] = batch.non_tensor_batch["uid"]
    done = compute_advantage(out, "sandbox_grpo", config=config.algorithm)
    advantage = done.batch["advantages"].sum(-1) / done.batch["response_mask"].sum(-1).clamp(min=1)
    kept = scores[three]
    assert torch.allclose(advantage[three], (kept - kept.mean()) / (kept.std() + 1e-6), atol=1e-4)
    assert advantage[lost] == 0
    log = compute_data_metrics(done, use_critic=False)
    assert log["critic/score/mean"] == pytest.approx(float(scores.sum()) / 7)
    assert log["response/aborted_ratio"] == pytest.approx(1 / 8)


@pytest.mark.parametrize("trainer", ["one-step-off", "fully async"])
async def test_the_managers_of_the_older_asynchronous_trainers(
    training: Any, rig: Any, place: Any, trainer: str
) -> None:
    """Their own manager classes, with workers in ray; an owner that the first rollout finds or makes."""
    from rlsandbox_verl.owner import disconnect
    from verl.experimental.agent_loop import AgentLoopManager
    from verl.protocol import DataProto

    config = rig.config(
        place / "model", place / "loops.yaml",
        **{"algorithm.adv_estimator": "sandbox_grpo", "actor_rollout_ref.rollout.response_length": 512},
    )  # fmt: skip
    options = {
        "config": config,
        "llm_client": rig.Obedient(place / "model"),
        "reward_loop_worker_handles": None,
    }
    rows = prompts(rig, place, training.plans, "plain", "raises")
    if trainer == "one-step-off":
        manager = await AgentLoopManager.create(**options)
        out = await manager.generate_sequences(rows)
    else:
        module = pytest.importorskip("verl.experimental.fully_async_policy.fully_async_rollouter")
        manager = await module.FullyAsyncAgentLoopManager.create(**options)
        singles = [manager.generate_sequences_single(rows[i : i + 4]) for i in (0, 4)]  # a prompt at a time
        out = DataProto.concat([await single for single in singles])
    await disconnect()
    told = list(out.non_tensor_batch["sandbox"])
    assert [one["status"] for one in told[:4]] == ["completed"] * 4
    assert sorted(one["status"] for one in told[4:]) == ["completed"] * 3 + ["failed"]
    lengths = out.batch["attention_mask"][:, config.actor_rollout_ref.rollout.prompt_length :].sum(-1)
    assert [n == 0 for n in lengths] == [one["status"] == "failed" for one in told]


def test_the_manager_is_for_the_trainer_with_a_queue(rig: Any, place: Any) -> None:
    from rlsandbox_verl import SandboxAgentLoopManager

    from rlsandbox.errors import UnsupportedError

    with pytest.raises(UnsupportedError, match="is for verl's v1 trainer"):
        SandboxAgentLoopManager(config=rig.config(place / "model", place / "loops.yaml"), llm_client=None)


async def test_an_estimator_that_would_count_a_zero_is_refused(training: Any, rig: Any, place: Any) -> None:
    from verl.experimental.agent_loop.agent_loop import AgentLoopWorker

    from rlsandbox.errors import UnsupportedError

    config = rig.config(place / "model", place / "loops.yaml")
    worker = AgentLoopWorker(config, rig.Obedient(place / "model"))
    with pytest.raises(UnsupportedError, match="would count as a reward of 0 in 'grpo'"):
        await worker.generate_sequences(prompts(rig, place, training.plans, "plain"))


async def test_a_shell_for_the_stock_agent_and_a_reward_for_code(training: Any, place: Any) -> None:
    from rlsandbox_verl import compute_score
    from rlsandbox_verl.owner import disconnect
    from verl.tools.tool_registry import initialize_tools_from_config

    where = place / "tools.yaml"
    where.write_text("tools:\n- class_name: rlsandbox_verl.tools.SandboxTool\n  config: {type: native}\n")
    (tool,) = initialize_tools_from_config(str(where))
    assert tool.name == "shell"
    for _ in range(2):
        instance, _ = await tool.create()
        answer, _, _ = await tool.execute(instance, {"command": "ls; echo $((6*7)); touch left; exit 3"})
        assert answer.text == "42\n\n[exit 3]"
        await tool.release(instance)
    row = {"task_id": "plain", "task_source": str(place / "tasks.jsonl")}
    said = "Here:\n```python\n4\n```\nnot 3"
    assert (await compute_score("x", said, "", row, file="out"))["score"] == 1.0
    assert (await compute_score("x", "3", "", row, file="out"))["score"] == 0.0
    await disconnect()
