"""sandbox_reward: answers of a batch run as code, by itself and under the real trainer."""

from __future__ import annotations

import asyncio
import itertools
import math
import os
import signal
from collections.abc import Iterator
from typing import Any

import pytest

pytest.importorskip("trl", reason="the extra trl is not installed")

from rlsandbox_trl import SandboxCallback, leave_out_missing, sandbox_reward
from rlsandbox_trl.rewards import code_of, text_of

import rlsandbox as rls
from rlsandbox.errors import ConfigError
from tests.support.keepers import keeper_of

TASKS = [
    rls.Task(
        id=f"sum-{n}",
        workdir="/work",
        files={"given.txt": str(n)},
        grader=rls.Grader(
            command=f'test "$(sh answer.sh < given.txt)" = {n + n} && echo 1 > /tmp/r || echo 0 > /tmp/r',
            reward="file:/tmp/r",
        ),
    )
    for n in (1, 2)
]


@pytest.fixture
def pool() -> Iterator[rls.Pool]:
    with rls.Pool(size=2, max_size=2) as made:
        yield made


def ask(function: Any, completions: list[Any], **row: Any) -> Any:
    return asyncio.run(function(prompts=["p"] * len(completions), completions=completions, **row))


def test_code_is_taken_from_its_fence() -> None:
    assert code_of("Look:\n```python\nprint(1)\n```\nor\n```\nprint(2)\n```\n") == "print(2)\n"
    assert code_of("print(3)") == "print(3)"
    assert code_of("  \n") is None
    said = [{"role": "assistant", "content": "a"}, {"role": "tool", "content": "b"}, {"role": "assistant"}]
    assert text_of(said) == "a"
    assert text_of([{"role": "assistant", "content": [{"type": "text", "text": "c"}]}]) == "c"


def test_each_answer_runs_in_a_clean_sandbox_and_is_on_record(pool: rls.Pool) -> None:
    reward = sandbox_reward(pool, TASKS, path="answer.sh")
    right = "```sh\nread n; echo $((n + n)); touch /work/left-behind\n```"
    nosy = "test -e left-behind && echo yes || { read n; echo $((n + n)); }"
    answers = [right, "exit 3", "", nosy, right, "echo 4"]
    ids = ["sum-1", "sum-1", "sum-1", "sum-2", "sum-2", "sum-2"]
    assert ask(reward, answers, task_id=ids) == [1.0, 0.0, 0.0, 1.0, 1.0, 1.0]
    report = pool.report()
    assert report.requested == report.completed == 6
    assert report.mean_reward == pytest.approx(4 / 6)
    assert {log.batch for log in report.logs} == {"sandbox_reward-1"}


def test_whatever_a_model_says_is_scored(pool: rls.Pool) -> None:
    reward = sandbox_reward(pool, command="grep -q x answer.py")
    said = ["x", "\0", "\ud800 x", [], [{"role": "assistant", "content": None}], "x" * 3_000_000]
    assert ask(reward, said) == [1.0, 0.0, 1.0, 0.0, 0.0, 1.0]
    assert ask(reward, []) == []


def test_without_tasks_a_command_decides(pool: rls.Pool) -> None:
    reward = sandbox_reward(
        pool, command="sh answer.py", timeout=2.0, spec=rls.Spec(memory="64MiB"), name="passes"
    )
    assert reward.__name__ == "passes" and asyncio.iscoroutinefunction(reward)
    assert ask(reward, ["true", "false", "sleep 600"]) == [1.0, 0.0, 0.0]  # each with its own limit
    assert reward.missing == [False, False, False]


def test_what_infrastructure_breaks_is_tried_again_and_else_missing(pool: rls.Pool) -> None:
    naps = itertools.count(75_000)

    def answer(retries: int, kills: int) -> Any:
        nap = f"sleep {next(naps)}"
        reward = sandbox_reward(pool, command=f"{nap} & sleep 2", retries=retries)

        async def both() -> Any:
            asked = asyncio.ensure_future(reward(prompts=["p"], completions=["x"]))
            for _ in range(kills):
                keeper = await asyncio.to_thread(keeper_of, nap)
                os.kill(keeper, signal.SIGKILL)
                while os.path.exists(f"/proc/{keeper}"):
                    await asyncio.sleep(0.01)
            return await asked, reward.missing

        return asyncio.run(both())

    assert answer(retries=0, kills=1) == ([None], [True])
    assert answer(retries=1, kills=2) == ([None], [True])
    assert answer(retries=1, kills=1) == ([1.0], [False])
    found = pool.report()
    assert sorted(len(log.attempts) for log in found.logs) == [1, 2, 2]
    assert {record.failure.kind for record in found.records if record.failure} == {"sandbox_died"}


def test_mistakes_of_the_caller_are_raised(pool: rls.Pool) -> None:
    with pytest.raises(ConfigError, match="no grader"):
        sandbox_reward(pool, [rls.Task(id="a")])
    with pytest.raises(ConfigError, match="no task is called 'b'"):
        ask(sandbox_reward(pool, TASKS), ["x"], task_id=["b"])
    with pytest.raises(ConfigError, match="above 0"):
        sandbox_reward(pool, timeout=0)


def test_the_trainer_takes_it_as_it_is(example: Any, tmp_path: Any, pool: rls.Pool) -> None:
    from datasets import Dataset
    from trl import GRPOConfig, GRPOTrainer

    words = example.tokenizer()
    words.response_template = None
    reward = sandbox_reward(pool, command="grep -q '[a-z]' answer.txt", path="answer.txt")
    trainer = GRPOTrainer(
        model=example.model(words),
        processing_class=words,
        train_dataset=Dataset.from_dict({"prompt": ["letters", "more"]}),
        reward_funcs=[reward],
        args=GRPOConfig(
            output_dir=str(tmp_path), max_steps=2, per_device_train_batch_size=4, num_generations=2,
            max_completion_length=12, logging_steps=1, save_strategy="no", report_to=[], use_cpu=True,
            bf16=False, disable_tqdm=True,
        ),
    )  # fmt: skip
    trainer.add_callback(SandboxCallback(trainer, pool))
    leave_out_missing(trainer)
    trainer.train()
    steps = [entry for entry in trainer.state.log_history if "reward" in entry]
    assert len(steps) == 2
    for entry in steps:
        assert entry["reward"] == entry["rewards/sandbox_reward/mean"] == entry["sandbox/reward_bound_low"]
        assert entry["sandbox/coverage"] == 1.0 and entry["sandbox/claims"] == 4
        assert entry["sandbox/blocked_s"] > 0
    assert pool.closed


class Broken:
    """A reward function of which infrastructure broke the first rollout."""

    __name__ = "broken"
    missing: list[bool] = []  # noqa: RUF012

    def __call__(self, completions: Any, **row: Any) -> list[float | None]:
        self.missing = [i == 0 for i, _ in enumerate(completions)]
        return [None if gone else float(i) for i, gone in enumerate(self.missing)]


def test_rloo_with_code_as_an_answer(example: Any, tmp_path: Any) -> None:
    import torch
    from datasets import Dataset
    from trl import RLOOConfig, RLOOTrainer

    def also(completions: Any, **row: Any) -> list[float]:
        return [float(i) for i, _ in enumerate(completions)]

    words = example.tokenizer()
    pool = rls.Pool(size=2)
    code = sandbox_reward(pool, command="test -f answer.py", answer=lambda text: text or "x")
    trainer = RLOOTrainer(
        model=example.model(words), processing_class=words, reward_funcs=[code, Broken(), also],
        train_dataset=Dataset.from_dict({"prompt": ["write", "more"] * 4}),
        args=RLOOConfig(
            output_dir=str(tmp_path / "out"), max_steps=3, per_device_train_batch_size=4, num_generations=2,
            num_iterations=2, max_completion_length=40, save_strategy="no", report_to=[], use_cpu=True, beta=0.0,
            bf16=False, disable_tqdm=True, logging_steps=1, learning_rate=1e-2, seed=1,
        ),
    )  # fmt: skip
    trainer.add_callback(SandboxCallback(trainer, pool))
    leave_out_missing(trainer)
    seen: list[Any] = []
    losses: list[float] = []
    plain = trainer.compute_loss

    def compute_loss(*args: Any, **kwargs: Any) -> Any:  # the log takes a loss that is NaN for 0
        loss = plain(*args, **kwargs)
        losses.append(float(loss))
        return loss

    trainer.compute_loss = compute_loss
    score = trainer._calculate_rewards
    trainer._calculate_rewards = lambda *a: seen.append(score(*a)) or seen[-1]
    trainer.train()
    assert pool.closed
    first, *_ = trainer.state.log_history
    assert first["sandbox/claims"] == 4 and first["sandbox/coverage"] == 1.0
    assert len(seen) == 2  # generated twice for three steps
    assert all(rewards[0].isnan().all() and not rewards[1:].isnan().any() for rewards in seen)
    assert all(torch.isfinite(weights).all() for weights in trainer.model.parameters())
    assert len(losses) == 3 and all(math.isfinite(loss) for loss in losses)
