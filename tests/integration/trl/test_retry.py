"""A sandbox that breaks in the midst of a rollout: begun again where that is honest, missing otherwise.

Environments as the trainer holds them, real sandboxes, keepers killed or stopped by their pid.
"""

from __future__ import annotations

import asyncio
import itertools
import os
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any

import pytest

pytest.importorskip("trl", reason="the extra trl is not installed")

from rlsandbox_trl import SandboxEnvironment, SandboxTraining
from rlsandbox_trl.rollout import OVER, UNAVAILABLE

import rlsandbox as rls
from tests.support.keepers import keeper_of

GRADER = rls.Grader(command='test "$(cat answer.txt)" = right', timeout=20)
NAPS = itertools.count(71_000)


def task(name: str = "one", **options: Any) -> rls.Task:
    return rls.Task(**{"id": name, "prompt": "p", "workdir": "/work", "grader": GRADER, **options})


@pytest.fixture
def begin() -> Iterator[Callable[..., Any]]:
    """An environment in the midst of a rollout, and its training."""
    made = []

    def make(kind: type[SandboxEnvironment] = SandboxEnvironment, **options: Any) -> Any:
        tasks = options.pop("tasks", [task()])
        training = SandboxTraining(tasks, environment=kind, **{"size": 2, **options})
        made.append(training)
        environment = training()
        environment.reset(task_id=tasks[0].id)
        return environment, training

    yield make
    for training in made:
        training.pool.close()


def signal_keeper(environment: Any, number: signal.Signals) -> int:
    """The keeper of the environment's sandbox, found by a process that the journal does not know of."""
    nap = f"sleep {next(NAPS)}"
    held = environment._rollout.episode.sandbox  # the plain one
    held.run(f"{nap} >/dev/null 2>&1 & until grep -q sleep /proc/$!/comm; do :; done")
    keeper = keeper_of(nap)
    os.kill(keeper, number)
    return keeper


@contextmanager
def stopped_keeper(environment: Any) -> Iterator[None]:
    keeper = signal_keeper(environment, signal.SIGSTOP)
    try:
        yield
    finally:
        with suppress(ProcessLookupError):  # given up, and killed
            os.kill(keeper, signal.SIGCONT)


def record_of(training: Any) -> Any:
    (log,) = training.pool.report().logs
    return log


def test_what_was_done_is_done_again_and_the_rollout_goes_on(begin: Any) -> None:
    environment, training = begin()
    environment.write_file("answer.txt", "right")
    assert environment.shell("echo a >> log; cat log") == "a\n"
    assert environment.read_file("answer.txt") == "right"
    assert environment.shell("cat nothing").endswith("[exit 1]")
    assert environment.read_file("nothing").startswith("error: ")
    first = environment._sandbox.id
    signal_keeper(environment, signal.SIGKILL)
    assert environment.shell("echo b >> log; cat log answer.txt") == "a\nb\nright"
    assert environment._sandbox.id != first
    assert environment.get_reward() == 1.0
    log = record_of(training)
    assert log.record.status == "completed" and log.record.reward == 1.0
    assert [attempt.failure and attempt.failure.kind for attempt in log.attempts] == ["sandbox_died", None]


def test_a_sandbox_that_dies_before_it_is_graded_is_made_again_and_graded(begin: Any) -> None:
    environment, training = begin()
    environment.write_file("answer.txt", "right")
    signal_keeper(environment, signal.SIGKILL)
    assert environment.get_reward() == 1.0
    assert len(record_of(training).attempts) == 2


def test_another_answer_in_the_fresh_sandbox_makes_the_rollout_missing(begin: Any) -> None:
    environment, training = begin()
    environment.shell("cat /proc/sys/kernel/random/uuid")
    environment.write_file("answer.txt", "right")
    signal_keeper(environment, signal.SIGKILL)
    assert environment.shell("cat answer.txt") == UNAVAILABLE
    assert environment.write_file("answer.txt", "right") == UNAVAILABLE
    assert environment.get_reward() is None and environment._missing
    record = record_of(training).record
    assert record.status == "failed" and record.reward is None
    assert record.failure.kind == "replay_differs" and record.failure.infrastructure


class WithSession(SandboxEnvironment):
    def talk(self) -> str:
        """Talk.

        Returns:
            str: an answer.
        """
        with self._sandbox.session() as session:
            return session.run("echo hello").stdout


def test_what_cannot_be_done_again_alike_is_not_tried(begin: Any) -> None:
    environment, training = begin(WithSession)
    assert environment.talk() == "hello\n"
    signal_keeper(environment, signal.SIGKILL)
    assert environment.shell("true") == UNAVAILABLE
    log = record_of(training)
    assert log.record.failure.kind == "sandbox_died" and len(log.attempts) == 1


def test_without_retries_it_is_missing_at_once(begin: Any) -> None:
    environment, training = begin(retries=0)
    signal_keeper(environment, signal.SIGKILL)
    assert environment.shell("true") == UNAVAILABLE
    assert environment.get_reward() is None
    assert record_of(training).record.failure.kind == "sandbox_died"


class Counting(SandboxEnvironment):
    def count(self) -> str:
        """Count.

        Returns:
            str: how often.
        """
        self._n = getattr(self, "_n", 0) + 1
        return self._sandbox.run(f"echo {self._n} >> n; cat n").stdout


def test_a_tool_of_ones_own_is_not_called_again(begin: Any) -> None:
    environment, _ = begin(Counting)
    assert environment.count() == "1\n"
    signal_keeper(environment, signal.SIGKILL)
    assert environment.count() == "1\n2\n"


def test_a_stopped_keeper_holds_nobody_beyond_the_deadline(begin: Any) -> None:
    environment, training = begin(step_timeout=4.0, command_timeout=3600.0)
    with stopped_keeper(environment):
        assert environment.shell("true") == UNAVAILABLE
        assert environment.get_reward() is None
        record = record_of(training).record
        assert record.failure.kind == "step_timeout" and record.failure.infrastructure
        environment.reset(task_id="one")  # the environment's next rollout has a sandbox of its own
        environment.write_file("answer.txt", "right")
        assert environment.get_reward() == 1.0


def test_a_keeper_that_stops_before_it_is_graded_holds_nobody_either(begin: Any) -> None:
    environment, training = begin(step_timeout=4.0)
    environment.write_file("answer.txt", "right")
    signal_keeper(environment, signal.SIGSTOP)
    assert environment.get_reward() is None
    record = record_of(training).record
    assert record.failure.kind == "step_timeout" and record.failure.phase == "grade"


def test_a_slow_command_of_the_models_is_cut_in_time_to_be_graded(begin: Any) -> None:
    environment, training = begin(step_timeout=5.0)
    environment.write_file("answer.txt", "right")
    assert environment.shell("sleep 600").endswith("[timed out]")
    assert environment.shell("true") == OVER.format("step_timeout")
    assert environment.get_reward() == 1.0
    record = record_of(training).record
    assert record.status == "completed" and record.truncated == "step_timeout"


class OwnReward(SandboxEnvironment):
    """Its reward is what a command says."""

    def get_reward(self) -> float:
        return float(self._sandbox.run("cat answer.txt", timeout=3600).stdout)


class OwnLaterReward(SandboxEnvironment):
    async def get_reward(self) -> float:  # type: ignore[override]
        answer = self._sandbox.run("cat answer.txt").stdout
        if answer == "never":
            await asyncio.Event().wait()
        return float(answer)


def test_a_reward_of_ones_own_holds_nobody_either(begin: Any) -> None:
    """Of two that are asked one after the other, in a stopped sandbox and a sound one, the second is scored."""
    stopped, training = begin(OwnReward, step_timeout=10.0)
    sound = training()
    sound.reset(task_id="one")
    sound.write_file("answer.txt", "0.5")
    with stopped_keeper(stopped):
        assert stopped.get_reward() is None
        failures = [log.record.failure for log in training.pool.report().logs if log.record is not None]
        (failure,) = [failure for failure in failures if failure is not None]
        assert (failure.kind, failure.phase, failure.infrastructure) == ("step_timeout", "grade", True)
        assert sound.get_reward() == 0.5


def test_a_reward_that_is_awaited_ends_with_the_step(begin: Any) -> None:
    environment, _ = begin(OwnLaterReward, step_timeout=5.0)
    environment.write_file("answer.txt", "0.5")
    assert asyncio.run(environment.get_reward()) == 0.5
    environment.reset(task_id="one")
    environment.write_file("answer.txt", "never")
    assert asyncio.run(environment.get_reward()) is None and environment._missing


@pytest.mark.parametrize("options", [{}, {"step_timeout": 3600.0}])
def test_a_mistake_in_a_reward_of_ones_own_is_raised(begin: Any, options: dict[str, Any]) -> None:
    environment, _ = begin(OwnReward, **options)
    with pytest.raises(ValueError, match="could not convert"):
        environment.get_reward()


class Gated(SandboxEnvironment):
    gate = threading.Event()
    said: list[BaseException] = []  # noqa: RUF012
    left = threading.Event()

    def wait(self) -> str:
        """Wait.

        Returns:
            str: nothing.
        """
        self.gate.wait(60)
        try:
            return self._sandbox.run("touch leaked").text
        except BaseException as error:
            self.said.append(error)
            raise
        finally:
            self.left.set()


def test_a_call_that_is_stuck_never_touches_the_next_rollout(begin: Any) -> None:
    environment, _ = begin(Gated, step_timeout=2.0)
    assert environment.wait() == UNAVAILABLE
    environment.reset(task_id="one")
    Gated.gate.set()
    assert Gated.left.wait(30)
    assert len(Gated.said) == 1 and isinstance(Gated.said[0], rls.errors.SandboxError)
    assert environment.shell("ls") == ""
