"""Coroutine test functions run on an event loop of their own; nothing may be left running on it."""

from __future__ import annotations

import asyncio
import inspect
from typing import Any

import pytest


@pytest.hookimpl(tryfirst=True)
def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> bool | None:
    test = pyfuncitem.obj
    if not inspect.iscoroutinefunction(test):
        return None
    arguments = {name: pyfuncitem.funcargs[name] for name in pyfuncitem._fixtureinfo.argnames}

    async def body() -> None:
        await test(**arguments)
        left: set[asyncio.Task[Any]] = asyncio.all_tasks() - {asyncio.current_task()}  # type: ignore[arg-type]
        assert not left, f"tasks outlive the test: {left}"

    asyncio.run(body())
    return True
