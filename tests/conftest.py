"""Coroutine test functions run on an event loop of their own; nothing may be left running on it."""

from __future__ import annotations

import asyncio
import inspect
import signal
from collections import Counter
from typing import Any

import pytest

try:
    from hypothesis import HealthCheck, settings
except ImportError:  # an environment for other tests
    pass
else:  # How fast an example runs says something of the machine, and nothing of what is tested.
    settings.register_profile("any machine", deadline=None, suppress_health_check=[HealthCheck.too_slow])
    settings.load_profile("any machine")

# Started in the background by a shell, SIGINT is ignored, here and in every child: then no Ctrl-C could be tested.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)
# So is SIGHUP under nohup. A handler becomes the default in what is started; the tests themselves go on.
if signal.getsignal(signal.SIGHUP) is signal.SIG_IGN:
    signal.signal(signal.SIGHUP, lambda *_: None)


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


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """What was skipped, by reason: a line a test would hide how many there are of what kind."""
    counts = Counter(
        str(report.longrepr[2] if isinstance(report.longrepr, tuple) else report.longrepr)
        for report in terminalreporter.stats.get("skipped", [])
    )
    if counts:
        terminalreporter.section(f"{counts.total()} skipped, by reason", sep="-")
    for reason, count in counts.most_common():
        terminalreporter.line(f"{count:5} {reason.removeprefix('Skipped: ')}")
