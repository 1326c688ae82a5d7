"""The real trainer with real sandboxes: numbers, failures, the end of the pool."""

from __future__ import annotations

import inspect
import os
import pickle
import signal
import subprocess
import sys
import time
from typing import Any

import pytest

pytest.importorskip("trl", reason="the extra trl is not installed")

from rlsandbox_trl import SandboxEnvironment, SandboxTraining, versions

import rlsandbox as rls
from rlsandbox.errors import ConfigError, UnsupportedError
from tests.support.keepers import keeper_of

NUMBERS = [
    "ttfc/mean",
    "ttfc/p50",
    "ttfc/p95",
    "ttfc/p99",
    "ttfc/max",
    "batch_completion_s",
    "idle_ratio",
    "blocked_s",
    "claims",
    "resets",
    "recycled",
    "quarantined",
    "coverage",
    "reward_bound_low",
    "reward_bound_high",
]


def logs(trainer: Any) -> list[dict[str, Any]]:
    return [entry for entry in trainer.state.log_history if "reward" in entry]


def test_every_number_is_logged_and_the_pool_is_closed(example: Any, make_trainer: Any) -> None:
    sandboxes = SandboxTraining(example.tasks(4), tools=["write_file"], size=4)
    trainer = make_trainer(sandboxes)
    pool = sandboxes.pool
    original = type(trainer)._generate_single_turn
    trainer.train()
    steps = logs(trainer)
    assert len(steps) == 2
    for entry in steps:
        assert [name for name in NUMBERS if f"sandbox/{name}" not in entry] == []
        assert entry["sandbox/claims"] == 4 and entry["sandbox/coverage"] == 1.0
        assert entry["sandbox/reward_bound_low"] == pytest.approx(entry["reward"], abs=1e-5)
        assert 0 <= entry["sandbox/idle_ratio"] <= 1
    assert pool.closed
    assert trainer._generate_single_turn.__func__ is original  # hooks are gone
    report = pool.report()
    assert report.requested == report.completed == 8
    assert {log.group for log in report.logs if log.group} and all(log.batch for log in report.logs)
    groups = [log.group for log in report.logs]
    assert all(groups.count(group) == 2 for group in groups)  # siblings share a group


def test_numbers_cover_all_steps_since_the_last_log(example: Any, make_trainer: Any) -> None:
    """With accumulation, reused generations and logs every third step nothing is lost, averaged or doubled."""
    sandboxes = SandboxTraining(example.tasks(4), tools=["write_file"], size=4)
    trainer = make_trainer(
        sandboxes, max_steps=8, per_device_train_batch_size=2, gradient_accumulation_steps=2, num_iterations=2,
        logging_steps=3,
    )  # fmt: skip
    trainer.train()
    # 8 steps of one generation batch of 4, each used for two steps: 16 rollouts.
    assert sandboxes._pool is not None and sandboxes._pool.report().requested == 16
    assert sum(e.get("sandbox/claims", 0) for e in trainer.state.log_history) == 16


def test_evaluation_has_numbers_of_its_own(example: Any, make_trainer: Any) -> None:
    sandboxes = SandboxTraining(example.tasks(2), tools=["write_file"], size=4)
    trainer = make_trainer(
        sandboxes, eval_strategy="steps", eval_steps=1, per_device_eval_batch_size=4, num_generations_eval=2
    )
    trainer.train()
    evaluated = [e for e in trainer.state.log_history if "eval_sandbox/claims" in e]
    assert [e["eval_sandbox/claims"] for e in evaluated] == [4, 4]
    assert all("eval_sandbox/batch_completion_s" in e for e in evaluated)
    assert [e["sandbox/claims"] for e in logs(trainer)] == [4, 4]


class Fragile(SandboxEnvironment):
    """Its tool kills the keeper of its sandbox, once."""

    killed: list[int] = []  # noqa: RUF012

    def write(self, path: str, content: str) -> str:
        """Write.

        Args:
            path: The file.
            content: The text.

        Returns:
            str: A confirmation.
        """
        if not self.killed:
            self.killed.append(1)
            self._sandbox.run("sleep 87654 >/dev/null 2>&1 & until grep -q sleep /proc/$!/comm; do :; done")
            os.kill(keeper_of("sleep 87654"), signal.SIGKILL)
        self._sandbox.write_file(path, content)
        return "written"

    write_file = None  # type: ignore[assignment]


def test_a_sandbox_that_dies_in_a_tool_has_no_reward_and_the_ledger_says_so(
    example: Any, make_trainer: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    plain = example.Bytes.parse_response

    def parse(self: Any, ids: Any, **kwargs: Any) -> Any:
        message = plain(self, ids, **kwargs)
        message["tool_calls"][0]["function"]["name"] = "write"
        return message

    monkeypatch.setattr(example.Bytes, "parse_response", parse)
    Fragile.killed = []
    sandboxes = SandboxTraining(example.tasks(4), tools=[], environment=Fragile, size=4, retries=0)
    trainer = make_trainer(sandboxes)
    seen: list[Any] = []
    original = trainer._calculate_rewards
    trainer._calculate_rewards = lambda *a: seen.append(original(*a)) or seen[-1]
    trainer.train()
    first, second = logs(trainer)
    assert int(seen[0].isnan().sum()) == 1
    assert not seen[1].isnan().any()
    assert first["sandbox/coverage"] == 0.75 and second["sandbox/coverage"] == 1.0
    assert first["sandbox/failures/sandbox_died"] == 1
    low, high = first["sandbox/reward_bound_low"], first["sandbox/reward_bound_high"]
    assert high - low == pytest.approx(0.25)
    assert sandboxes._pool is not None
    broken = [r for r in sandboxes._pool.report().records if r.status == "failed"]
    assert len(broken) == 1 and broken[0].reward is None
    assert broken[0].failure is not None and broken[0].failure.infrastructure


def test_tools_and_documentation_are_what_the_trainer_reads(example: Any) -> None:
    from transformers.utils import get_json_schema

    sandboxes = SandboxTraining(example.tasks(1), tools=["shell", "submit"], environment=Fragile)
    environment = sandboxes()
    names = [
        name
        for name, _ in inspect.getmembers(type(environment), inspect.isfunction)
        if not name.startswith("_")
    ]
    assert names == ["get_reward", "reset", "shell", "submit", "write"]
    for name in ("shell", "submit", "write"):
        assert get_json_schema(getattr(environment, name))["function"]["description"]
    assert type(environment).__name__ == "Fragile"


def test_unknown_tools_and_rooms_too_small_are_told(example: Any, make_trainer: Any) -> None:
    with pytest.raises(ConfigError, match="no tool called 'edit'"):
        SandboxTraining(example.tasks(2), tools=["edit"])
    small = SandboxTraining(example.tasks(2), tools=["write_file"], size=2)
    with pytest.raises(ConfigError, match="4 rollouts are generated at once"):
        make_trainer(small)
    small.pool.close()


def test_an_exception_closes_the_pool(example: Any, make_trainer: Any) -> None:
    sandboxes = SandboxTraining(example.tasks(4), tools=["write_file"], size=4)
    trainer = make_trainer(sandboxes)
    pool = sandboxes.pool

    def broken(*args: Any, **kwargs: Any) -> Any:
        raise RuntimeError("out of memory")

    trainer._generate_single_turn = broken
    with pytest.raises(RuntimeError, match="out of memory"):
        trainer.train()
    assert pool.closed
    assert {log.record.status for log in pool.report().logs if log.record} == {"cancelled"}


def test_another_version_is_one_clear_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(versions, "version", lambda name: "0.9.0")
    with pytest.raises(UnsupportedError, match=r"supports trl>=1.12,<1.17, not trl 0.9.0"):
        SandboxTraining([rls.Task(id="a")])


WORKER = """
import pickle, sys
training = pickle.load(sys.stdin.buffer)
environment = training()
environment.reset(task_id="letters-0")
print(environment.write_file("answer.txt", "abc1"), environment.get_reward())
training.pool.close()
"""


def test_a_factory_that_is_sent_to_another_process_uses_the_same_pool(example: Any) -> None:
    sandboxes = SandboxTraining(example.tasks(1), tools=["write_file"], size=1)
    with sandboxes.pool as pool:
        done = subprocess.run(
            [sys.executable, "-W", "ignore", "-c", WORKER],
            input=pickle.dumps(sandboxes), capture_output=True, timeout=120, check=False,
        )  # fmt: skip
        assert done.stdout.decode().split()[-1:] == ["0.75"], done.stderr.decode()
        assert [record.reward for record in pool.report().records] == [0.75]
        assert pool.stats().live <= 1


def test_a_rollout_that_ends_leaves_the_others_alone(example: Any) -> None:
    """A rollout worker's rollouts end one by one, not in batches."""
    sandboxes = SandboxTraining(example.tasks(2), tools=["write_file"], size=2)
    with sandboxes.pool:
        first, second = sandboxes(), sandboxes()
        first.reset(task_id="letters-0")
        second.reset(task_id="letters-1")
        first.write_file("answer.txt", "abcd")
        second.write_file("answer.txt", "ab12")
        assert first.get_reward() == 1.0
        second.write_file("answer.txt", "abc1")
        assert second.get_reward() == 0.75


class Worker(SandboxEnvironment):
    def more(self) -> str:
        """More.

        Returns:
            str: a word.
        """
        return self._sandbox.run("echo more").text


def test_a_factory_arrives_as_it_was_sent(example: Any) -> None:
    options = {"retries": 3, "claim_timeout": 7.0, "step_timeout": 9.0, "command_timeout": 5.0, "output": 100}
    sandboxes = SandboxTraining(
        example.tasks(2), tools=["submit"], environment=_importable(Worker), size=1, **options
    )
    with sandboxes.pool as pool:
        arrived = pickle.loads(pickle.dumps(sandboxes))
        assert list(arrived.tasks) == list(sandboxes.tasks)
        assert {name: getattr(arrived, f"_{name}") for name in options} == options
        environment = arrived()
        environment.reset(task_id="letters-1")
        assert environment.more() == "more\n" and environment.submit() == "Submitted."
        assert not callable(environment.shell)
        assert environment.get_reward() == 0.0
        arrived.pool.close()
        assert [record.reward for record in pool.report().records] == [0.0]


def _importable(kind: type) -> type:
    """Tests are no modules that pickle could import by their name."""
    module = sys.modules.setdefault("rls_test_worker", type(sys)("rls_test_worker"))
    setattr(module, kind.__name__, kind)
    kind.__module__, kind.__qualname__ = module.__name__, kind.__name__
    return kind


def lasting(trainer: Any, name: str, pool: Any) -> list[int]:
    """Make a method of the trainer last until what comes next is primed; claims that had missed by then."""
    plain, missed = getattr(trainer, name), list[int]()

    def long_one(*args: Any, **kwargs: Any) -> Any:
        ready = min(6, 2 * (trainer.state.global_step + 2))  # two prompts a step, and the two that come next
        until = time.monotonic() + 60
        while pool.stats().primed < ready:
            assert time.monotonic() < until, pool.stats()
            time.sleep(0.01)
        missed.append(pool.stats().layer_misses)
        return plain(*args, **kwargs)

    setattr(trainer, name, long_one)
    return missed


def test_claims_of_the_next_step_find_their_sandbox_ready(example: Any, make_trainer: Any) -> None:
    """Where a generation takes longer than making ready, nobody waits for a setup again."""
    sandboxes = SandboxTraining(example.tasks(6, setup="true"), tools=["write_file"], size=8)
    trainer = make_trainer(sandboxes, max_steps=3)
    pool = sandboxes.pool
    missed = lasting(trainer, "_generate_single_turn", pool)
    trainer.train()
    assert missed[0] > 0 and missed[-1] == missed[0]  # the claims of steps two and three have missed nothing
    assert pool.report().completed == 12
    # Put back is what was used: not what was primed, nor what was moved to another layer.
    assert sum(entry["sandbox/resets"] for entry in logs(trainer)) == 12


def test_a_full_pool_makes_ready_while_the_model_is_trained(example: Any, make_trainer: Any) -> None:
    """No sandbox is free while a batch is generated; what comes next is primed as soon as they come back."""
    tasks = example.tasks(6, setup="true")
    sandboxes = SandboxTraining(tasks, tools=["write_file"], size=4, max_size=4)
    trainer = make_trainer(sandboxes, max_steps=3)
    pool = sandboxes.pool
    missed = lasting(trainer, "compute_loss", pool)
    trainer.train()
    assert missed[0] > 0 and missed[-1] == missed[0]
    assert pool.report().completed == 12


SIZES = [
    ({}, {}, 16, 18),  # two more, for the setups of what comes next
    ({"setup": None}, {}, 16, 16),
    ({"size": 20}, {}, 20, 20),
    ({"max_size": 24}, {}, 16, 24),
    ({"max_size": 9}, {}, 9, 9),
    ({}, {"SIZE": "20"}, 20, 20),
    ({}, {"MAX_SIZE": "24"}, 16, 24),
    ({}, {"SIZE": "8", "MAX_SIZE": "24"}, 8, 24),
    ({"size": 20}, {"SIZE": "8"}, 20, 20),
    ({"config": False}, {"SIZE": "8"}, 16, 18),
]


@pytest.mark.parametrize(("given", "variables", "size", "most"), SIZES)
def test_the_size_is_what_was_said_by_whoever_comes_first(
    example: Any, monkeypatch: pytest.MonkeyPatch, given: Any, variables: Any, size: int, most: int
) -> None:
    """Arguments before variables before files, as for every pool; the batch's only where nobody said one."""
    for name, value in variables.items():
        monkeypatch.setenv(f"RLSANDBOX_POOL_{name}", value)
    options = {"setup": "true", **given}
    tasks = example.tasks(1, setup=options.pop("setup"))
    sandboxes = SandboxTraining(tasks, **options)
    sandboxes._pool_kwargs |= sandboxes._sizes(16)
    with sandboxes.pool as pool:
        assert (pool.size, pool.max_size) == (size, most)


def test_a_size_from_a_file_holds_under_the_trainer(
    example: Any, make_trainer: Any, tmp_path: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "team.toml"
    file.write_text("[pool]\nsize = 6\n")
    monkeypatch.setenv("RLSANDBOX_CONFIG", str(file))
    sandboxes = SandboxTraining(example.tasks(2), tools=["write_file"])
    make_trainer(sandboxes, max_steps=1)
    with sandboxes.pool as pool:
        assert (pool.size, pool.max_size) == (6, 6)
    monkeypatch.setenv("RLSANDBOX_POOL_SIZE", "3")
    small = SandboxTraining(example.tasks(2), tools=["write_file"])
    with pytest.raises(ConfigError, match="4 rollouts are generated at once, the pool may have 3"):
        make_trainer(small)
    small.pool.close()
