"""Conformance: states, layers, the loss of a keeper, and the backend's own verbs."""

from __future__ import annotations

import asyncio
import gc
import pickle
import time
import warnings
from collections.abc import Callable

import pytest

from .. import errors
from .._portal import Portal
from ..backends.base import Backend
from ..sandbox import Sandbox
from ..task import Task
from ._commands import LONG
from ._fixtures import IN_PROC, Fixtures, gone, inner
from .lone import LoneHost


class Lifecycle(Fixtures):
    def test_facts(self, sandbox: Sandbox) -> None:
        assert sandbox.state == "ready"
        assert sandbox.id
        assert sandbox.reset_mode in ("overlay", "userns", "manifest", "replace")
        assert sandbox.id in repr(sandbox)
        assert "ready" in repr(sandbox)
        assert isinstance(sandbox.limits.means, dict)

    def test_first_command_is_told(self, host: LoneHost, sandbox: Sandbox) -> None:
        host.waited.clear()
        sandbox.run("true")
        sandbox.run("true")
        assert len(host.waited) == 1
        assert 0 < host.waited[0] < LONG

    def test_release(self, sandbox: Sandbox) -> None:
        sandbox.release()
        sandbox.release()
        assert sandbox.state == "released"
        for act in (
            lambda: sandbox.run("true"),
            lambda: sandbox.popen("true"),
            lambda: sandbox.read_file("/etc/passwd"),
            lambda: sandbox.pause(),
            lambda: sandbox.changes(),
        ):
            with pytest.raises(errors.SandboxStateError, match="released"):
                act()

    def test_release_while_a_command_runs(self, sandbox: Sandbox, portal: Portal) -> None:
        async def release() -> None:
            process = await inner(sandbox).popen("echo up; sleep 99")
            await process.next_chunk()
            task = asyncio.ensure_future(inner(sandbox).run("sleep 99"))
            await asyncio.sleep(0.05)
            await inner(sandbox).release()
            with pytest.raises((errors.SandboxStateError, errors.SandboxDiedError)):
                await task

        portal.call(release)

    def test_forgotten(self, host: LoneHost, portal: Portal) -> None:
        sandbox = portal.call(host.make, spec=self.spec)
        name = sandbox.id
        assert host.holds(name)
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            del sandbox
            gc.collect()
        assert any(issubclass(w.category, ResourceWarning) and name in str(w.message) for w in caught)
        deadline = time.monotonic() + 30
        while host.holds(name) and time.monotonic() < deadline:
            time.sleep(0.01)
        assert not host.holds(name)

    def test_keeper_killed(self, host: LoneHost, sandbox: Sandbox, portal: Portal) -> None:
        async def killed() -> None:
            sb = inner(sandbox)
            process = await sb.popen("cat")
            session = await sb.session()
            waiting = [
                asyncio.ensure_future(one)
                for one in (
                    sb.run(f"sleep {LONG}"),
                    sb.run(f"sleep {LONG}", timeout=LONG),
                    process.wait(),
                    session.run(f"sleep {LONG}"),
                    sb.client.ping(LONG),
                )
            ]
            await waiting.pop()
            await asyncio.sleep(0.1)
            start = time.monotonic()
            await asyncio.to_thread(self.kill_keeper, host, sandbox)
            ended = await asyncio.gather(*waiting, return_exceptions=True)
            assert time.monotonic() - start < 1.0
            for error in ended:
                assert isinstance(error, errors.SandboxDiedError), error
                assert error.infrastructure
                assert error.retryable
                assert error.sandbox == sb.id
                assert pickle.loads(pickle.dumps(error)).sandbox == sb.id

        portal.call(killed)
        assert sandbox.state == "dead"
        for act in (
            lambda: sandbox.run("true"),
            lambda: sandbox.read_file("/etc/passwd"),
            lambda: sandbox.grade(),
            lambda: sandbox.list_dir("/"),
        ):
            with pytest.raises((errors.SandboxDiedError, errors.ConfigError)):
                act()
        sandbox.release()
        assert _state(sandbox) == "released"

    def test_pause(self, sandbox: Sandbox) -> None:
        sandbox.run("(while :; do echo x >>/tmp/ticks; sleep 0.01; done) >/dev/null 2>&1 &")
        sandbox.run("while [ ! -s /tmp/ticks ]; do sleep 0.01; done", timeout=LONG)
        sandbox.pause()
        sandbox.pause()
        assert sandbox.state == "paused"
        with pytest.raises(errors.SandboxStateError, match="paused"):
            sandbox.run("true")
        sizes = []
        for _ in range(2):
            sizes.append([c.size for c in sandbox.changes("/tmp") if c.name == "/tmp/ticks"])
            time.sleep(0.2)
        assert sizes[0] == sizes[1] != []
        sandbox.resume()
        sandbox.resume()
        before = len(sandbox.read_file("/tmp/ticks"))
        deadline = time.monotonic() + 10
        while len(sandbox.read_file("/tmp/ticks")) == before and time.monotonic() < deadline:
            time.sleep(0.02)
        assert len(sandbox.read_file("/tmp/ticks")) > before

    def test_pause_remembers_who_was_stopped(self, sandbox: Sandbox) -> None:
        pid = sandbox.run(f"sleep {LONG} >/dev/null & kill -STOP $!; echo $!").stdout.strip()
        state = f"{IN_PROC} in_proc {pid}; read -r s <$d/stat; s=${{s##*) }}; s=${{s%% *}}"
        sandbox.run(f"{state}; while [ $s != T ]; do sleep 0.01; {state}; done", timeout=LONG)
        sandbox.pause()
        sandbox.resume()
        assert sandbox.run(f"{state}; echo $s").stdout == "T\n"

    def test_release_of_a_paused_one(self, sandbox: Sandbox) -> None:
        sandbox.run("sleep 99 >/dev/null &")
        sandbox.pause()
        sandbox.release()

    def test_reset_puts_it_back(self, sandbox: Sandbox, portal: Portal) -> None:
        sandbox.run("echo x >/tmp/x; echo y >>/etc/passwd; rm /etc/hosts; setsid sleep 99 >/dev/null &")
        portal.call(inner(sandbox).client.reset)
        assert not any(c.name.startswith(("/tmp/", "/etc/")) for c in sandbox.changes())
        r = sandbox.run("ls /tmp/x; tail -1 /etc/passwd; ls /etc/hosts; ls -d /proc/[0-9]* | wc -l")
        assert "\ny\n" not in r.stdout
        assert "No such file" in r.stderr

    def test_reset_of_a_paused_one(self, sandbox: Sandbox, portal: Portal) -> None:
        sandbox.run("echo x >/tmp/x; sleep 99 >/dev/null &")
        sandbox.pause()
        portal.call(inner(sandbox).client.reset)
        sandbox.resume()
        assert not sandbox.run("ls /tmp/x").ok

    def test_snapshot_and_fork(self, sandbox: Sandbox, make: Callable[..., Sandbox]) -> None:
        if _stays(sandbox):
            return
        sandbox.run("echo first >/tmp/f; rm -f /etc/passwd; chmod 700 /tmp/f", check=True)
        snapshot = sandbox.snapshot()
        sandbox.run("echo parent >/tmp/f")
        with snapshot.fork(3, timeout=LONG) as kids:
            assert [k.run("cat /tmp/f; ls /etc/passwd").stdout for k in kids] == ["first\n"] * 3
            for i, kid in enumerate(kids):
                kid.run(f"echo kid {i} >/tmp/f")
            assert [k.read_text("/tmp/f") for k in kids] == [f"kid {i}\n" for i in range(3)]
            assert sandbox.read_text("/tmp/f") == "parent\n"
        assert all(k.state == "released" for k in kids)
        snapshot.delete()
        assert sandbox.read_text("/tmp/f") == "parent\n"

    def test_snapshot_with_processes(self, sandbox: Sandbox) -> None:
        if _stays(sandbox):
            return
        pid = sandbox.run("echo x >/tmp/f; setsid sleep 99 >/dev/null 2>&1 & echo $!").stdout
        with pytest.raises(errors.ProcessesRunningError):
            sandbox.snapshot()
        assert not gone(sandbox, pid)
        snapshot = sandbox.snapshot(kill=True)
        assert snapshot.id
        assert gone(sandbox, pid)
        assert sandbox.read_text("/tmp/f") == "x\n"

    def test_snapshot_of_a_snapshot(self, sandbox: Sandbox) -> None:
        if _stays(sandbox):
            return
        for i in range(5):
            sandbox.run(f"echo {i} >/tmp/f{i}; echo {i} >/tmp/last")
            snapshot = sandbox.snapshot()
        with snapshot.fork(1) as kids:
            assert kids[0].run("cat /tmp/f? /tmp/last").stdout == "0\n1\n2\n3\n4\n4\n"

    def test_hibernate(self, sandbox: Sandbox) -> None:
        if _stays(sandbox):
            return
        sandbox.run("echo kept >/tmp/f; rm -f /etc/passwd; setsid sleep 99 >/dev/null &")
        sandbox.hibernate()
        assert sandbox.state == "hibernated"
        with pytest.raises(errors.SandboxStateError, match="hibernated"):
            sandbox.run("true")
        sandbox.restore(LONG)
        assert _state(sandbox) == "ready"
        assert sandbox.read_text("/tmp/f") == "kept\n"
        assert not sandbox.run("ls /etc/passwd").ok

    def test_backend_facts(self, backend: Backend, portal: Portal) -> None:
        capabilities = portal.call(backend.capabilities)
        assert capabilities.reset_modes
        assert capabilities.reset_modes <= {"overlay", "userns", "manifest", "replace"}

    def test_backend_list_and_dispose(self, backend: Backend, portal: Portal) -> None:
        async def go() -> None:
            mine = {"run": "conformance", "n": "1"}
            member = await backend.provision(self.spec, member="conf-1", labels=mine, deadline=LONG)
            other = await backend.provision(
                self.spec, member="conf-2", labels={"run": "conformance", "n": "2"}, deadline=LONG
            )
            assert {m.id for m in await backend.list({"run": "conformance"})} == {"conf-1", "conf-2"}
            assert [m.id for m in await backend.list(mine)] == ["conf-1"]
            assert await backend.list({"run": "another"}) == []
            await backend.dispose(member)
            await backend.dispose(member)
            assert [m.id for m in await backend.list({"run": "conformance"})] == ["conf-2"]
            await backend.dispose(other)
            assert await backend.list({"run": "conformance"}) == []

        portal.call(go)

    def test_sandboxes_see_nothing_of_each_other(self, make: Callable[..., Sandbox]) -> None:
        a, b = make(), make()
        pid = a.run(
            "echo secret-of-a >/tmp/f; echo x >/dev/shm/f; setsid sleep 4321 >/dev/null & echo $!"
        ).stdout
        r = b.run("cat /tmp/f /dev/shm/f; cat /proc/*/cmdline | tr '\\0' ' '; ls /tmp /dev/shm")
        assert "secret-of-a" not in r.text
        assert "sleep 4321" not in r.stdout
        assert not gone(a, pid)

    def test_task_files_and_setup(self, make: Callable[..., Sandbox]) -> None:
        task = Task(id="t", workdir="/tmp/w", files={"a/b": "x", "/tmp/abs": b"y"}, setup="cat a/b >made")
        assert make(task).run("cat made /tmp/abs").stdout == "xy"


def _stays(sandbox: Sandbox) -> bool:
    """Whether its files cannot leave their place. Then that is told, and it goes on as it is."""
    if sandbox.reset_mode not in ("manifest", "replace"):
        return False
    sandbox.run("echo x >/tmp/f; (sleep 99 >/dev/null 2>&1 &)")
    for act in (sandbox.snapshot, sandbox.hibernate):
        with pytest.raises(errors.UnsupportedError, match=f"mode {sandbox.reset_mode}"):
            act()
    assert sandbox.state == "ready"
    assert sandbox.run("cat /tmp/f; pidof sleep >/dev/null && echo runs").stdout == "x\nruns\n"
    return True


def _state(sandbox: Sandbox) -> str:
    return sandbox.state
