"""Processes that neither answer nor die: deadlines hold all the same."""

from __future__ import annotations

import contextlib
import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

import rlsandbox as rls
from rlsandbox.errors import SandboxDiedError
from tests.conformance.test_local import children

LONG = 60


@pytest.fixture
def pool(tmp_path: Path) -> Iterator[rls.Pool]:
    with rls.Pool(size=2, config=False, ledger=tmp_path / "ledger") as pool:
        pool.wait_ready(timeout=LONG)
        yield pool


def hub_of(pool: rls.Pool) -> int:
    hub: int = pool._pool.backend._hub.process.pid  # type: ignore[attr-defined]
    return hub


def keeper_of(pool: rls.Pool, sandbox: rls.Sandbox) -> int:
    """The keeper above a process of this sandbox."""
    with sandbox.popen("sleep 1000") as process:
        mark = sandbox.run("readlink /proc/self/ns/pid").stdout.strip()
        assert process.pid
        for keeper in children(hub_of(pool)):
            with contextlib.suppress(FileNotFoundError):  # what is made ahead comes and goes
                for inside in children(keeper):
                    for below in [inside, *children(inside)]:
                        if os.readlink(f"/proc/{below}/ns/pid") == mark:
                            return keeper
    raise AssertionError("no keeper found")


def test_a_command_s_timeout_holds_when_the_keeper_is_stopped(pool: rls.Pool) -> None:
    sandbox = pool.claim(rls.Task(id="s"), timeout=LONG)
    keeper = keeper_of(pool, sandbox)
    os.kill(keeper, signal.SIGSTOP)
    try:
        with pytest.raises(SandboxDiedError, match="has not answered within 4 s"):
            sandbox.run("true", timeout=0.5)
    finally:
        with contextlib.suppress(ProcessLookupError):  # removed by then, as it should be
            os.kill(keeper, signal.SIGCONT)
    sandbox.release()
    with pool.claim(rls.Task(id="next"), timeout=LONG) as other:
        assert other.run("true").ok


def test_close_holds_its_deadline_when_the_hub_is_stopped(tmp_path: Path) -> None:
    pool = rls.Pool(size=2, config=False, ledger=tmp_path / "ledger")
    pool.wait_ready(timeout=LONG)
    held = pool.claim(rls.Task(id="held"), timeout=LONG)
    hub = hub_of(pool)
    client = pool._pool.backend._hub  # type: ignore[attr-defined]
    os.kill(hub, signal.SIGSTOP)
    pool.close()
    assert "it does not answer" in str(client.lost.result())
    assert client.process.returncode == -signal.SIGKILL
    assert held.state in ("dead", "released")
    assert not Path(f"/proc/{hub}").exists()


def test_close_within_a_second(tmp_path: Path) -> None:
    pool = rls.Pool(size=2, config=False, ledger=tmp_path / "ledger")
    pool.wait_ready(timeout=LONG)
    hub, client = hub_of(pool), pool._pool.backend._hub  # type: ignore[attr-defined]
    os.kill(hub, signal.SIGSTOP)
    pool.close(timeout=0.5)
    assert client.process.returncode == -signal.SIGKILL
    assert not Path(f"/proc/{hub}").exists()
