"""A pytest plugin for verl's own tests: runs their coroutines, and sees that our plugin was there meanwhile."""

from __future__ import annotations

import asyncio
import inspect
import sys

import pytest


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "asyncio: a coroutine")


@pytest.hookimpl(tryfirst=True)
def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> bool | None:
    if not inspect.iscoroutinefunction(pyfuncitem.obj):
        return None
    names = pyfuncitem._fixtureinfo.argnames
    asyncio.run(pyfuncitem.obj(**{name: pyfuncitem.funcargs[name] for name in names}))
    return True


def pytest_sessionfinish(session: pytest.Session) -> None:
    from verl.experimental.agent_loop.agent_loop import _agent_loop_registry

    print("ours:", "rlsandbox_verl" in sys.modules, sorted(_agent_loop_registry))
