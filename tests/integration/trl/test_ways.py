"""Scripts that are not the example's: data of one's own, environments of several kinds, a step that is left."""

from __future__ import annotations

import json
from typing import Any

import pytest

pytest.importorskip("trl", reason="the extra trl is not installed")

from rlsandbox_trl import SandboxEnvironment, SandboxTraining, sandbox_reward

import rlsandbox as rls
from rlsandbox.errors import ConfigError


def logs(trainer: Any) -> list[dict[str, Any]]:
    return [entry for entry in trainer.state.log_history if "reward" in entry]


def rows(ids: list[Any], **columns: list[Any]) -> Any:
    from datasets import Dataset

    prompts = [[{"role": "user", "content": f"Write {i}"}] for i, _ in enumerate(ids)]
    return Dataset.from_dict({"prompt": prompts, "task_id": ids, **columns})


def others(n: int) -> list[rls.Task]:
    return [
        rls.Task(id=f"other-{i}", workdir="/work", grader=rls.Grader(command="test -f answer.txt"))
        for i in range(n)
    ]


@pytest.mark.parametrize("kind", ["more columns", "the same task in several rows"])
def test_what_comes_next_is_known_of_any_data_with_task_ids(
    example: Any, make_trainer: Any, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    ids = [f"letters-{i}" for i in (range(6) if kind == "more columns" else [0, 1, 2, 0, 1, 3])]
    monkeypatch.setattr(SandboxTraining, "dataset", rows(ids, level=list(range(6))))
    sandboxes = SandboxTraining(example.tasks(6), tools=["write_file"], size=4)
    trainer = make_trainer(sandboxes, max_steps=5)  # an epoch has three
    expected: list[list[str]] = []
    taken: list[list[str]] = []
    plain, begin = sandboxes.pool.expect, sandboxes._begin_batch

    def expect(tasks: Any, **options: Any) -> None:
        expected.append(sorted(task.id for task in tasks))
        plain(tasks, **options)

    def began(given: Any, label: str) -> None:
        taken.append(sorted(row["task_id"] for row in given))
        begin(given, label)

    monkeypatch.setattr(sandboxes.pool, "expect", expect)
    monkeypatch.setattr(sandboxes, "_begin_batch", began)
    trainer.train()
    assert len(taken) == 5 and expected == taken[1:]  # and nothing after the last


class Game:
    """An environment that is none of ours."""

    def reset(self, **row: Any) -> str:
        return "guess"

    def guess(self, n: int) -> str:
        """Guess.

        Args:
            n: A number.

        Returns:
            str: An answer.
        """
        return "no"

    def get_reward(self) -> float:
        return 0.25


def train_on_several_kinds(
    example: Any, kinds: dict[str, Any], first: Any, ids: list[Any], place: Any
) -> Any:
    from trl import GRPOConfig, GRPOTrainer

    words = example.tokenizer()
    names = list(kinds)
    trainer = GRPOTrainer(
        model=example.model(words), processing_class=words, environment_factory=kinds,
        train_dataset=rows(ids, environment=[names[i % 2] for i, _ in enumerate(ids)]),
        args=GRPOConfig(
            output_dir=str(place), max_steps=2, per_device_train_batch_size=4, num_generations=2, report_to=[],
            logging_steps=1, max_completion_length=12, max_tool_calling_iterations=1, save_strategy="no",
            use_cpu=True, bf16=False, disable_tqdm=True, seed=1, shuffle_dataset=False,
        ),
    )  # fmt: skip
    for kind in kinds.values():
        if isinstance(kind, SandboxTraining):
            kind.attach(trainer)
    trainer.train()
    return trainer


def test_beside_environments_of_another_kind(example: Any, tmp_path: Any) -> None:
    sandboxes = SandboxTraining(example.tasks(2), tools=["write_file"], size=4)
    kinds = {"sandbox": sandboxes, "game": Game}
    # The second game's row has a task's id too: it is no rollout of ours.
    trainer = train_on_several_kinds(
        example, kinds, sandboxes, ["letters-0", None, "letters-1", "letters-1"], tmp_path
    )
    assert [entry["sandbox/claims"] for entry in logs(trainer)] == [2, 2]
    assert sandboxes._pool is not None and sandboxes._pool.report().requested == 4
    assert sandboxes._pool.report().completed == 4


def test_two_trainings_of_one_trainer_share_a_pool(example: Any, tmp_path: Any) -> None:
    with rls.Pool(size=4) as pool:
        letters = SandboxTraining(example.tasks(2), tools=["write_file"], pool=pool)
        files = SandboxTraining(others(2), tools=["write_file", "shell"], pool=pool)
        ids = ["letters-0", "other-0", "letters-1", "other-1"]
        trainer = train_on_several_kinds(example, {"a": letters, "b": files}, letters, ids, tmp_path)
        assert [entry["sandbox/claims"] for entry in logs(trainer)] == [4, 4]
        assert [entry["sandbox/coverage"] for entry in logs(trainer)] == [1.0, 1.0]
        assert pool.report().requested == pool.report().completed == 8
        assert {r.task_id for r in pool.report().records} == set(ids)


def test_two_trainings_with_pools_of_their_own_are_refused(example: Any, tmp_path: Any) -> None:
    kinds = {"a": SandboxTraining(example.tasks(1)), "b": SandboxTraining(others(1))}
    with pytest.raises(ConfigError, match="several trainings"):
        train_on_several_kinds(example, kinds, None, ["letters-0", "other-0"] * 2, tmp_path)


class Chooses(SandboxEnvironment):
    """Its reset says which task it is, whatever is in the row."""

    def reset(self, **row: Any) -> str:
        super().reset(task_id="letters-3")
        return "Write."


@pytest.mark.parametrize("ids", [["none of ours"] * 4, ["letters-0", "letters-1"] * 2])
def test_a_reset_of_ones_own_chooses_the_task(
    example: Any, make_trainer: Any, monkeypatch: pytest.MonkeyPatch, ids: list[str]
) -> None:
    """What was claimed for the rows is not in the way: the pool has no sandbox more than rollouts."""
    monkeypatch.setattr(SandboxTraining, "dataset", rows(ids))
    sandboxes = SandboxTraining(example.tasks(4), tools=["write_file"], environment=Chooses, size=4)
    trainer = make_trainer(sandboxes, max_steps=1)
    trainer.train()
    assert logs(trainer)[0]["sandbox/coverage"] == 1.0
    assert sandboxes._pool is not None
    done = [r.task_id for r in sandboxes._pool.report().records if r.status == "completed"]
    assert done == ["letters-3"] * 4


def test_an_evaluation_that_has_no_room_says_so_at_once(example: Any, make_trainer: Any) -> None:
    sandboxes = SandboxTraining(example.tasks(4), tools=["write_file"], size=4)
    trainer = make_trainer(sandboxes, per_device_eval_batch_size=8, num_generations_eval=2)
    with pytest.raises(ConfigError, match="8 rollouts are generated at once, the pool may have 4"):
        trainer.evaluate(eval_dataset=sandboxes.dataset)
    sandboxes.pool.close()


@pytest.mark.parametrize("where", ["_generate_single_turn", "_calculate_rewards"])
@pytest.mark.parametrize("error", [RuntimeError, KeyboardInterrupt])
def test_a_step_that_is_left_gives_back_the_sandboxes_of_a_pool_that_stays(
    example: Any, make_trainer: Any, monkeypatch: pytest.MonkeyPatch, where: str, error: type[BaseException]
) -> None:
    def broken(*args: Any, **kwargs: Any) -> Any:
        raise error("of the user")

    with rls.Pool(size=4) as pool:
        sandboxes = SandboxTraining(example.tasks(4), tools=["write_file"], pool=pool)
        trainer = make_trainer(sandboxes, attach=False)
        monkeypatch.setattr(trainer, where, broken)
        sandboxes.attach(trainer)
        with pytest.raises(error, match="of the user"):
            trainer.train()
        assert pool.stats().claimed == 0
        ends = [(r.status, r.failure and r.failure.cause) for r in pool.report().records]
        assert ends == [("cancelled", "the batch was left by an exception")] * 4
        monkeypatch.undo()
        trainer.train()
        assert [entry["sandbox/coverage"] for entry in logs(trainer)] == [1.0, 1.0]


class Unasked(SandboxEnvironment):
    """Scored by other functions alone."""

    get_reward = None  # type: ignore[assignment]


def test_rollouts_that_others_score_are_completed(example: Any, make_trainer: Any) -> None:
    def written(environments: Any, **row: Any) -> list[float]:
        return [float(e._sandbox.run(["test", "-f", "answer.txt"]).ok) for e in environments]

    sandboxes = SandboxTraining(example.tasks(4), tools=["write_file"], environment=Unasked, size=4)
    trainer = make_trainer(sandboxes, reward_funcs=[written])
    trainer.train()
    for entry in logs(trainer):
        assert entry["reward"] == 1.0 and entry["sandbox/coverage"] == 1.0
        assert "sandbox/reward_bound_low" not in entry  # we know of no reward
    assert sandboxes._pool is not None
    assert [r.status for r in sandboxes._pool.report().records] == ["completed"] * 8


class Tensor(SandboxEnvironment):
    """Its rewards are what a model of the user's gives."""

    value = 0.5

    def get_reward(self) -> Any:
        import torch

        return torch.tensor(self.value)


def test_a_reward_of_ones_own_is_logged_as_a_number(
    example: Any, make_trainer: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    sandboxes = SandboxTraining(example.tasks(4), tools=["write_file"], environment=Tensor, size=4)
    trainer = make_trainer(sandboxes, max_steps=1)
    trainer.train()
    (entry,) = logs(trainer)
    assert json.loads(json.dumps(entry))["sandbox/reward_bound_low"] == 0.5  # as in a checkpoint
    monkeypatch.setattr(Tensor, "value", float("nan"))
    with pytest.raises(ValueError, match="must be a finite number or None, not nan"):
        trainer.train()


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"retries": "2"}, "retries must be a whole number of at least 0, not '2'"),
        ({"retries": -1}, "retries must be a whole number"),
        ({"claim_timeout": 0}, "claim_timeout must be a number of seconds above 0"),
        ({"claim_timeout": None}, "claim_timeout must be a number of seconds above 0"),
        ({"command_timeout": None}, "command_timeout must be a number of seconds above 0"),
        ({"step_timeout": float("nan")}, "step_timeout must be a number of seconds above 0"),
        ({"output": None}, "output must be a whole number of at least 2"),
        ({"output": 0}, "output must be a whole number of at least 2"),
        ({"tools": "shell"}, "tools must be a list of names, not 'shell'"),
        ({"tools": ["shel"]}, "no tool called 'shel'"),
        ({"environment": int}, "environment must be a subclass of SandboxEnvironment"),
        ({"pool": 3}, "pool must be a Pool, not 3"),
        ({"tasks": [{"id": "a"}]}, "tasks must be a list of Task, or where they are, not of dict"),
        ({"tasks": None}, "not of NoneType"),
    ],
)
def test_a_wrong_option_is_told_where_it_is_given(options: dict[str, Any], said: str) -> None:
    """Not by a tool, to the model, and not by a batch of which all is missing."""
    tasks = options.pop("tasks", [rls.Task(id="a")])
    with pytest.raises(ConfigError, match=said):
        SandboxTraining(tasks, **options)


def test_an_option_that_neither_we_nor_a_pool_have() -> None:
    with pytest.raises(TypeError, match="unexpected keyword argument 'sise'"):
        SandboxTraining([rls.Task(id="a")], sise=4)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"timeout": "3"}, "timeout must be a number of seconds above 0, not '3'"),
        ({"claim_timeout": -1}, "claim_timeout must be a number of seconds"),
        ({"retries": None}, "retries must be a whole number"),
        ({"concurrency": 0}, "concurrency must be a whole number of at least 1"),
        ({"path": ""}, "path must name a file"),
        ({"answer": 3}, "answer must be a function"),
        ({"tasks": [1]}, "not of int"),
    ],
)
def test_a_wrong_option_of_a_reward(options: dict[str, Any], said: str) -> None:
    with rls.Pool(size=1) as pool, pytest.raises(ConfigError, match=said):
        sandbox_reward(pool, **options)


def test_a_pool_has_room_for_all_environments_of_a_trainer_that_nothing_is_attached_to(
    example: Any, make_trainer: Any
) -> None:
    """A rollout keeps its sandbox until its batch is graded: with fewer, the rest would wait for ever."""
    sandboxes = SandboxTraining(example.tasks(24), claim_timeout=60)
    trainer = make_trainer(sandboxes, attach=False, max_steps=1, per_device_train_batch_size=24)
    try:
        trainer.train()
        assert len(sandboxes._environments) == 24 <= sandboxes.pool.max_size
        assert sandboxes.pool.report().coverage == 1.0
    finally:
        sandboxes.pool.close()
