"""What is attached to a trainer: gone when training ends, there again when it trains again."""

from __future__ import annotations

from typing import Any

import pytest

pytest.importorskip("trl", reason="the extra trl is not installed")

from rlsandbox_trl import SandboxCallback, SandboxTraining, parallel_tools
from trl import GRPOTrainer

import rlsandbox as rls
from rlsandbox.errors import ConfigError, PoolClosedError

WRAPPED = (
    "_tool_call_loop", "_generate_single_turn", "_generate_and_score_completions", "_generate",
    "_calculate_rewards", "compute_loss", "_get_train_sampler",
)  # fmt: skip


def logs(trainer: Any) -> list[dict[str, Any]]:
    return [entry for entry in trainer.state.log_history if "reward" in entry]


def untouched(trainer: Any) -> bool:
    return not set(WRAPPED) & set(vars(trainer)) and isinstance(trainer, GRPOTrainer)


def test_a_second_train_works_and_logs(example: Any, make_trainer: Any) -> None:
    sandboxes = SandboxTraining(example.tasks(4), tools=["write_file"], size=4)
    trainer = make_trainer(sandboxes)
    pools = []
    for _ in range(2):
        assert not untouched(trainer) or pools
        trainer.train()
        pools.append(sandboxes._pool)
        assert untouched(trainer) and pools[-1].closed
        assert [entry["sandbox/claims"] for entry in logs(trainer)] == [4, 4]
        assert all("sandbox/idle_ratio" in entry for entry in logs(trainer))
        assert pools[-1].report().completed == 8
    assert pools[0] is not pools[1]


def test_evaluation_before_and_after_training(example: Any, make_trainer: Any) -> None:
    sandboxes = SandboxTraining(example.tasks(2), tools=["write_file"], size=4)
    trainer = make_trainer(
        sandboxes, max_steps=1, eval_strategy="steps", eval_steps=99, per_device_eval_batch_size=4,
        num_generations_eval=2,
    )  # fmt: skip
    assert trainer.evaluate()["eval_sandbox/claims"] == 4
    trainer.train()
    assert trainer.evaluate()["eval_sandbox/claims"] == 4
    assert untouched(trainer) and sandboxes._pool is not None and sandboxes._pool.closed


def test_trainers_that_share_a_pool_close_it_when_the_last_has_trained(
    example: Any, make_trainer: Any
) -> None:
    pool = rls.Pool(size=4)
    trainings = [SandboxTraining(example.tasks(4), tools=["write_file"], pool=pool) for _ in range(2)]
    trainers = [make_trainer(training, attach=False, max_steps=1) for training in trainings]
    for trainer in trainers:
        trainer.add_callback(SandboxCallback(trainer, pool))  # alone: numbers, and the closing
    trainers[0].train()
    assert not pool.closed
    trainers[1].train()
    assert pool.closed
    for trainer in trainers:
        (entry,) = logs(trainer)
        assert entry["sandbox/claims"] == 4 and entry["sandbox/coverage"] == 1.0
        assert untouched(trainer)
    with pytest.raises(PoolClosedError):
        trainers[0].train()


def test_two_trainers_by_turns(example: Any, make_trainer: Any) -> None:
    trainings = [SandboxTraining(example.tasks(4), tools=["write_file"], size=4) for _ in range(2)]
    trainers = [make_trainer(training, max_steps=1) for training in trainings]
    for n in (0, 1, 0):
        trainers[n].train()
        (entry,) = logs(trainers[n])
        assert entry["sandbox/claims"] == 4 and entry["sandbox/coverage"] == 1.0


def test_parallel_tools_alone_leave_the_trainer_when_it_has_trained(example: Any, make_trainer: Any) -> None:
    sandboxes = SandboxTraining(example.tasks(4), tools=["write_file"], size=4)
    trainer = make_trainer(sandboxes, attach=False, max_steps=1)
    parallel_tools(trainer)
    assert not untouched(trainer)
    with sandboxes.pool:
        trainer.train()
        assert untouched(trainer)
    assert "sandbox/claims" not in logs(trainer)[0]


def test_numbers_of_reused_generations_and_of_accumulation_add_up(example: Any, make_trainer: Any) -> None:
    """Three steps a generation batch, two iterations, two micro-batches a step: each claim is logged once."""
    sandboxes = SandboxTraining(example.tasks(6), tools=["write_file"], size=6)
    trainer = make_trainer(
        sandboxes, max_steps=6, per_device_train_batch_size=2, gradient_accumulation_steps=1,
        steps_per_generation=3, num_iterations=2,
    )  # fmt: skip
    pool = sandboxes.pool
    trainer.train()
    steps = [entry for entry in trainer.state.log_history if "sandbox/claims" in entry]
    assert [entry["sandbox/claims"] for entry in steps] == [
        6,
        0,
        0,
        0,
        0,
        0,
    ]  # generated once, and used for six steps
    first, *rest = steps
    assert "sandbox/ttfc/p99" in first and all("sandbox/ttfc/p99" not in entry for entry in rest)
    assert all("sandbox/coverage" not in entry for entry in rest)  # what did not happen has no number
    values = sorted(pool.metrics.ttfc.values())
    assert first["sandbox/ttfc/max"] == pytest.approx(values[-1], rel=1e-3)
    assert first["sandbox/ttfc/p50"] == pytest.approx(values[2], rel=1e-3)  # nearest rank of six


def test_what_is_attached_twice_works_once(example: Any, make_trainer: Any) -> None:
    sandboxes = SandboxTraining(example.tasks(4), tools=["write_file"], size=4)
    trainer = make_trainer(sandboxes)
    trainer.add_callback(SandboxCallback(trainer, lambda: sandboxes.pool))
    parallel_tools(trainer)
    sandboxes.attach(trainer)
    trainer.train()
    assert [entry["sandbox/claims"] for entry in logs(trainer)] == [4, 4]
    assert [entry["sandbox/coverage"] for entry in logs(trainer)] == [1.0, 1.0]
    assert untouched(trainer) and sandboxes._pool is not None and sandboxes._pool.closed
    assert sandboxes._pool.report().requested == 8


@pytest.mark.parametrize(
    ("ids", "said"),
    [(None, "the dataset has no column task_id"), (["letters-0", None] * 4, "no task is called None")],
)
def test_rows_without_a_task_are_one_clear_error(
    example: Any, make_trainer: Any, monkeypatch: pytest.MonkeyPatch, ids: Any, said: str
) -> None:
    from datasets import Dataset

    rows: dict[str, Any] = {"prompt": [[{"role": "user", "content": "x"}]] * 8}
    monkeypatch.setattr(
        SandboxTraining, "dataset", Dataset.from_dict(rows | ({"task_id": ids} if ids else {}))
    )
    sandboxes = SandboxTraining(example.tasks(2), tools=["write_file"], size=4)
    trainer = make_trainer(sandboxes)
    pool = sandboxes.pool
    with pytest.raises(ConfigError, match=said):
        trainer.train()
    assert pool.closed
