"""What a reward function may give, and what becomes of whatever it raises."""

from __future__ import annotations

import asyncio
import errno
from fractions import Fraction
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from rlsandbox._sandbox.grading import _foreign, _full, finite
from rlsandbox._sandbox.host import SandboxLimits
from rlsandbox.errors import SandboxFileError, file_error
from rlsandbox.spec import Limits


class Tensor:
    """As torch has them: ``item`` gives the one number, or raises."""

    def __init__(self, *values: float) -> None:
        self.values = values

    def item(self) -> float:
        if len(self.values) != 1:
            raise RuntimeError("a Tensor with 2 elements cannot be converted to Scalar")
        return self.values[0]


@pytest.mark.parametrize(
    ("value", "number"),
    [
        *((np.float32(0.5), 0.5), (np.float16(0.5), 0.5), (np.int64(1), 1.0), (np.bool_(True), 1.0)),
        *((np.array(0.5), 0.5), (np.array([0.5]), 0.5), (Tensor(0.5), 0.5), (Fraction(1, 2), 0.5)),
        *((True, 1.0), (3, 3.0), (-0.5, -0.5)),
        *((np.zeros(2), None), (Tensor(1.0, 2.0), None), (10**400, None), (1j, None), ("1", None)),
        *((b"1", None), ([1], None), (np.float32("nan"), None), (float("inf"), None), (object(), None)),
        (np.array("1"), None),
    ],
    ids=repr,
)
def test_numbers(value: Any, number: float | None) -> None:
    assert finite(value) == number


@pytest.mark.parametrize(
    ("shared", "wrote", "at_fault"),
    [(False, 1, True), (True, 1 << 30, False), (True, (1 << 30) + 1, True)],
)
async def test_whose_fault_a_full_disk_is(shared: bool, wrote: int, at_fault: bool) -> None:
    async def changed() -> Any:
        return SimpleNamespace(bytes=wrote)

    limits = SandboxLimits(attempt=Limits())
    sandbox: Any = SimpleNamespace(shares_disk=shared, limits=limits, changed=changed)
    error = file_error(errno.ENOSPC, "/work/hidden")
    if at_fault:
        assert (await _full(sandbox, error)).reward == 0.0
        return
    with pytest.raises(SandboxFileError) as caught:
        await _full(sandbox, error)
    assert (caught.value.kind, caught.value.infrastructure) == ("disk_full", True)


ERRORS = [ValueError("x"), SystemExit(3), KeyboardInterrupt(), asyncio.CancelledError(), GeneratorExit()]


@pytest.mark.parametrize("error", ERRORS, ids=lambda error: type(error).__name__)
@pytest.mark.parametrize("kind", ["plain", "async"])
async def test_whatever_it_raises_is_an_answer(error: BaseException, kind: str) -> None:
    def plain() -> float:
        raise error

    async def coroutine() -> float:
        raise error

    value, raised = await _foreign(plain if kind == "plain" else coroutine)
    assert value is None
    assert type(raised) is type(error)


async def test_its_own_cancellation_is_not_swallowed() -> None:
    began, ended = asyncio.Event(), asyncio.Event()

    async def slow() -> float:
        began.set()
        try:
            await asyncio.Event().wait()
        finally:
            ended.set()
        return 1.0

    task = asyncio.create_task(_foreign(slow))
    await began.wait()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    await asyncio.wait_for(ended.wait(), 5)
