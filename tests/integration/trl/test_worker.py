"""Rollouts and rewards in a spawned process, which uses the pool of the one that trains: TRL's own rollout worker."""

from __future__ import annotations

import multiprocessing
import pickle
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("trl", reason="the extra trl is not installed")

from rlsandbox_trl import SandboxCallback, SandboxTraining, leave_out_missing, sandbox_reward

import rlsandbox as rls
from rlsandbox.errors import UnsupportedError
from tests.support import trl_worker

EXAMPLES = Path(__file__).parents[3] / "examples"
TASKS = [
    rls.Task(
        id=name,
        prompt=f"Say {name}.",
        grader=rls.Grader(command=f"grep -q {name.upper()} answer.txt"),
    )
    for name in ("yes", "no")
]


@pytest.fixture
def pool() -> Iterator[rls.Pool]:
    with rls.Pool(size=2, max_size=2) as made:
        yield made


def test_a_reward_that_is_sent_to_a_spawned_process_uses_the_same_pool(pool: rls.Pool) -> None:
    reward = sandbox_reward(pool, TASKS, path="answer.txt", answer=trl_worker.upper, name="right")
    arrived = pickle.loads(pickle.dumps(reward))
    assert arrived.__name__ == "right" and arrived.missing == []
    spawning = multiprocessing.get_context("spawn")
    with spawning.Pool(1) as processes:
        row = {"task_id": ["yes", "yes", "no"]}
        found = processes.apply(trl_worker.score, (reward, ["yes", "no", ""]), row)
    assert found == ([1.0, 0.0, 0.0], [False] * 3)
    records = pool.report().records  # of the owner's ledger
    assert sorted(record.reward for record in records if record.reward is not None) == [0.0, 0.0, 1.0]
    assert pool.stats().created <= 2


def test_a_reward_keeps_its_options_and_one_connection_serves_all(pool: rls.Pool) -> None:
    options: dict[str, Any] = {"timeout": 3.0, "claim_timeout": 4.0, "retries": 5, "concurrency": 6}
    spec = rls.Spec(memory="64MiB")
    plain = sandbox_reward(pool, command="true", spec=spec, answer=trl_worker.upper, **options)
    other = sandbox_reward(pool, TASKS)
    arrived, second = pickle.loads(pickle.dumps([plain, other]))
    assert {name: getattr(arrived.how, name) for name in options} == options
    assert arrived.plain == plain.plain and arrived.plain.spec == spec
    assert arrived.pool is second.pool is not pool
    assert list(second.known) == ["yes", "no"]
    arrived.pool.close()


@pytest.mark.parametrize("kind", ["environment", "reward"])
def test_the_rollout_worker_of_async_grpo(kind: str, pool: rls.Pool, monkeypatch: pytest.MonkeyPatch) -> None:
    """TRL's worker and its child as they are; a server of ours answers in vLLM's place."""
    pytest.importorskip(
        "aiohttp", reason="aiohttp is not installed, which the worker talks to the server with"
    )
    monkeypatch.syspath_prepend(str(EXAMPLES))  # the child finds the tokenizer's class there
    import trl_grpo
    from accelerate import PartialState
    from datasets import Dataset
    from trl.experimental.async_grpo import async_rollout_worker as module

    PartialState(cpu=True)  # as a trainer makes it
    monkeypatch.setattr(module, "is_vllm_available", lambda *args, **kwargs: True)
    words = trl_grpo.tokenizer()
    given: dict[str, Any]
    if kind == "environment":
        tasks = trl_grpo.tasks(2)
        sandboxes = SandboxTraining(tasks, tools=["write_file"], environment=trl_worker.Worker, pool=pool)
        given = {"environment_factory": sandboxes, "dataset": sandboxes.dataset, "reward_funcs": []}
    else:
        rows = {"prompt": [[{"role": "user", "content": task.prompt}] for task in TASKS]}
        reward = sandbox_reward(pool, command="grep -q '[a-z]' answer.py", answer=trl_worker.whole)
        given = {"dataset": Dataset.from_dict(rows), "reward_funcs": [reward]}
    with trl_worker.model_server(words, ["abcd", "ab12", "1234", "abc1"]) as address:
        worker = module.AsyncRolloutWorker(
            model_name="none", processing_class=words, eos_token_ids=[words.eos_token_id], num_generations=2,
            max_inflight_tasks=2, vllm_server_url=address, max_tokens=8, max_tool_calling_iterations=1,
            queue_maxsize=4, **given,
        )  # fmt: skip
        worker.start()
        try:
            samples = [worker.rollout_buffer.get(timeout=120) for _ in range(4)]
            worker.check_health(stale_after_s=120)
        finally:
            worker.stop()
    rewards = [sample.metrics["reward"] for sample in samples]
    assert set(rewards) <= ({1.0, 0.5, 0.0, 0.75} if kind == "environment" else {0.0, 1.0})
    by_group: dict[int, list[float]] = {}
    for sample in samples:
        by_group.setdefault(sample.group_id, []).append(sample.metrics["reward"])
    assert [len(group) for group in by_group.values()] == [2, 2]
    assert pool.stats().created <= 2, "the worker has the pool of the trainer's process, and its ceiling"
    done = [record.reward for record in pool.report().records if record.status == "completed"]
    assert len(done) >= 4 and set(rewards) <= set(done)


def test_what_needs_the_trainers_own_rollouts_says_so(pool: rls.Pool) -> None:
    class AsyncGRPOTrainer(SimpleNamespace):
        """Of AsyncGRPO all that is looked at: it has none of these methods."""

    trainer = AsyncGRPOTrainer(args=SimpleNamespace())
    sandboxes = SandboxTraining(TASKS, pool=pool)
    for attach in (sandboxes.attach, leave_out_missing, lambda t: SandboxCallback(t, pool)):
        with pytest.raises(UnsupportedError, match="AsyncGRPOTrainer does not make its rollouts"):
            attach(trainer)


def test_async_grpo_has_none_of_what_is_needed() -> None:
    """What the error above rests on."""
    module = pytest.importorskip("trl.experimental.async_grpo.async_grpo_trainer")
    from rlsandbox_trl.versions import OWN_ROLLOUTS

    assert not any(hasattr(module.AsyncGRPOTrainer, name) for name in OWN_ROLLOUTS)
