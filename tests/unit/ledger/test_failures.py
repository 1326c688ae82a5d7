"""Whose fault it is: the classifier, with and without plugins; what is kept of an exception."""

from __future__ import annotations

import asyncio
import errno
from pathlib import Path
from typing import Any

import pytest

from rlsandbox.errors import (
    ClaimTimeoutError,
    CommandError,
    ConfigError,
    LimitReachedError,
    PrimeError,
    SandboxDiedError,
    SandboxError,
    SandboxStateError,
    file_error,
)
from rlsandbox.hooks import hookimpl, plugin_manager
from rlsandbox.ledger.failures import KEPT, cause_of, failure_of, jsonable
from rlsandbox.results import CommandResult, Failure, Outcome

BUILT_IN = plugin_manager(entry_points=False)


def caught(error: BaseException, cause: BaseException | None = None) -> BaseException:
    try:
        raise error from cause
    except BaseException as raised:
        return raised


CASES: list[tuple[BaseException, str, tuple[str, str, bool, bool]]] = [
    (SandboxDiedError("gone"), "policy", ("sandbox_died", "command", True, True)),
    (ClaimTimeoutError("late"), "claim", ("claim_timeout", "claim", True, True)),
    (PrimeError("setup failed"), "claim", ("prime", "prime", False, False)),
    (CommandError("exit 1"), "policy", ("command", "command", False, False)),
    (ConfigError("no grader"), "grade", ("config", "config", False, False)),
    (SandboxStateError("released"), "policy", ("sandbox_state", "claim", False, False)),
    (LimitReachedError("all used", limit="steps"), "policy", ("limit_steps", "command", False, False)),
    (file_error(errno.ENOENT, "/x"), "policy", ("file", "command", False, False)),
    (ValueError("x"), "policy", ("policy_error", "policy", False, False)),
    (ValueError("x"), "grade", ("grade_error", "grade", False, False)),
    (ValueError("x"), "claim", ("internal", "claim", False, True)),
    (MemoryError(), "claim", ("machine_exhausted", "claim", True, True)),
    (MemoryError(), "policy", ("policy_error", "policy", False, False)),
    (OSError(errno.EMFILE, "too many"), "provision", ("machine_exhausted", "provision", True, True)),
    (SystemExit(1), "policy", ("system_exit", "policy", False, False)),
    (KeyboardInterrupt(), "policy", ("keyboard_interrupt", "policy", False, False)),
    (asyncio.CancelledError(), "policy", ("cancelled_error", "policy", False, False)),
    (caught(RuntimeError("wrap"), SandboxDiedError("g")), "policy", ("sandbox_died", "command", True, True)),
    (caught(file_error(errno.ENOENT, "/x"), SandboxDiedError("g")), "policy", ("file", "command", False, False)),
    (ExceptionGroup("g", [ValueError(), ExceptionGroup("h", [SandboxDiedError("g")])]), "policy",
     ("sandbox_died", "command", True, True)),
]  # fmt: skip


@pytest.mark.parametrize(
    ("error", "phase", "expected"),
    CASES,
    ids=lambda v: type(v).__name__ if isinstance(v, BaseException) else None,
)
def test_the_built_in_classifier(
    error: BaseException, phase: str, expected: tuple[str, str, bool, bool]
) -> None:
    failure = failure_of(error, phase, None, BUILT_IN)
    assert (failure.kind, failure.phase, failure.retryable, failure.infrastructure) == expected
    assert "\n" not in failure.cause
    assert type(error).__name__ in failure.error
    assert failure.traceback


def test_a_circle_of_causes_ends() -> None:
    one, two = ValueError("one"), ValueError("two")
    one.__cause__, two.__cause__ = two, one
    assert failure_of(one, "policy", None, BUILT_IN).kind == "policy_error"


def test_the_original_is_kept() -> None:
    def deep() -> None:
        raise ValueError("line one\nline two\tü")

    error: BaseException = ValueError()
    try:
        deep()
    except ValueError as raised:
        error = raised
    failure = failure_of(error, "policy", None, BUILT_IN)
    assert failure.cause == "ValueError: line one line two ü"
    assert failure.error == "ValueError"
    assert failure.message == "line one\nline two\tü"
    assert "in deep" in failure.traceback
    assert failure.traceback.endswith("ValueError: line one\nline two\tü\n")


def test_long_texts_are_clipped_in_the_middle() -> None:
    failure = failure_of(ValueError("a" * KEPT + "b" * KEPT), "policy", None, BUILT_IN)
    assert failure.message.startswith("aaa")
    assert failure.message.endswith("bbb")
    assert f"{KEPT} characters left out" in failure.message
    assert len(failure.message) < KEPT + 100
    assert len(failure.cause) <= 500


def test_the_hint_is_part_of_the_cause() -> None:
    error = SandboxError("it broke", hint="do this", sandbox="s1")
    assert cause_of(error) == "it broke [sandbox s1] (do this)"


@pytest.mark.parametrize(
    "answer", [RuntimeError("broken"), SystemExit(3), GeneratorExit(), "not a failure", 3]
)
def test_a_plugin_that_answers_nonsense_is_passed_over(answer: Any, caplog: pytest.LogCaptureFixture) -> None:
    class Bad:
        @hookimpl
        def rlsandbox_classify_failure(self, error: BaseException) -> Any:
            if isinstance(answer, BaseException):
                raise answer
            return answer

    manager = plugin_manager([Bad()], entry_points=False)
    assert failure_of(SystemExit(1), "policy", None, manager).kind == "system_exit"
    assert "rlsandbox_classify_failure" in caplog.text
    wrapped = caught(ValueError("it broke"), SandboxDiedError("gone"))  # as the built-in one judges it
    assert failure_of(wrapped, "policy", None, manager).infrastructure
    assert failure_of(wrapped, "policy", None, manager, builtin=True).kind == "sandbox_died"


def test_an_error_that_cannot_be_told_is_told_all_the_same() -> None:
    class Silent(Exception):
        def __str__(self) -> str:
            raise SystemExit(3)

    failure = failure_of(Silent(), "policy", None, BUILT_IN)
    assert (failure.kind, failure.cause) == (
        "policy_error",
        "Silent: <its __str__ raised SystemExit>",
    )


def test_a_plugin_comes_before_the_built_in_and_keeps_the_original() -> None:
    class Mine:
        @hookimpl
        def rlsandbox_classify_failure(self, error: BaseException, phase: str) -> Failure | None:
            return Failure("mine", phase, "my\ncause", True, True) if "quota" in str(error) else None

    manager = plugin_manager([Mine()], entry_points=False)
    failure = failure_of(ValueError("quota"), "policy", None, manager)
    assert (failure.kind, failure.cause, failure.error, failure.message) == (
        "mine",
        "my cause",
        "ValueError",
        "quota",
    )
    assert failure_of(ValueError("other"), "policy", None, manager).kind == "policy_error"


def test_without_the_built_in_the_errors_speak_for_themselves() -> None:
    manager = plugin_manager(block=["classify"], entry_points=False)
    assert failure_of(SandboxDiedError("x"), "policy", None, manager).infrastructure
    assert failure_of(ValueError("x"), "policy", None, manager).kind == "policy_error"
    assert failure_of(ValueError("x"), "policy").kind == "policy_error"


def test_jsonable_values() -> None:
    import numpy as np

    result = CommandResult(exit_code=3, stdout="é", stdout_bytes=b"\xff", merged="é")
    value = jsonable({"r": result, "o": Outcome(0.5, None, result), "t": (1, np.float64(0.5)), 2: None})
    assert value["r"]["exit_code"] == 3
    assert value["o"]["result"]["stdout"] == "é"
    assert value["t"] == [1, 0.5]
    assert value["2"] is None
    for bad, where in [
        ({"a": [Path("/x")]}, r"value\['a'\]\[0\] is of type pathlib\.PosixPath"),
        (np.int64(3), "value is of type numpy.int64"),
        ({(1, 2): 3}, "value has a key of type tuple"),
        (float("inf"), "not JSON compliant"),
    ]:
        with pytest.raises(TypeError, match=where):
            jsonable(bad)
