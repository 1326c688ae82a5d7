"""What an episode tries and must not manage, single system calls and files, each with its positive control.

An attempt counts only when the very same call gets through without the isolation: plainly on this machine
(``plain``; ``root`` where only root can), or in plain namespaces made by unshare(1) (``userns``). One
whose control does not get through fails, unless a reason stands beside it; those are printed at the end.
"""

from __future__ import annotations

import asyncio
import os
import shlex
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from rlsandbox.spec import Spec
from tests.support import looks
from tests.support.host import Ran, compiled, on_host
from tests.support.isolation import CALLS, NO_PEER, OPENS, Attempt, judge, process_attempts
from tests.support.place import local, place

AS_ROOT = os.geteuid() == 0
WRAP = {
    "plain": "{}",
    "root": "{}",
    "userns": "unshare -Ur -m -u -i -n -p -f -- sh -c {quoted}",
}


class Report:
    """Attempts without a control, told once at the end."""

    def __init__(self) -> None:
        self.without: dict[str, str] = {}


@pytest.fixture(scope="module")
def report(request: pytest.FixtureRequest) -> Iterator[Report]:
    held = Report()
    yield held
    capture = request.config.pluginmanager.getplugin("capturemanager")
    with capture.global_and_fixture_disabled():
        print(f"\nisolation attempts without a positive control here: {len(held.without)}")
        for name, why in sorted(held.without.items()):
            print(f"  {name}: {why}")


@pytest.fixture(scope="module")
def program(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = compiled("trysyscall", tmp_path_factory.mktemp("trysyscall"))
    if made is None:
        pytest.skip("no C compiler that can link statically (Debian: apt-get install gcc libc6-dev)")
    made.parent.chmod(0o755)
    return made


def control_of(attempt: Attempt, program: Path) -> str | None:
    """What the control run says; None when it cannot even be tried here."""
    if attempt.how == "root" and not AS_ROOT:
        return None
    text = (attempt.control or f"$T {attempt.inside}").replace("$T", shlex.quote(str(program)))
    command = WRAP[attempt.how].format(text, quoted=shlex.quote(text))
    done = on_host(["sh", "-c", command])
    return done.said.splitlines()[-1] if done.said else "nothing"


def why_no_control(attempt: Attempt) -> str:
    if attempt.how == "root" and not AS_ROOT:
        return "only root has a control: run the suite as root, too"
    words = attempt.inside.split()
    if words[0] in ("open", "read") and not os.path.exists(words[1]):
        return "this machine has no such file"
    if words[0] in ("open", "read") and words[1].startswith("/dev/"):
        return "the device is not for this machine's root either"
    return attempt.without


def modes() -> list[str]:
    return ["overlay", "userns"]


@pytest.mark.parametrize("attempt", CALLS + OPENS, ids=lambda a: a.name)
def test_the_control_gets_through_or_a_reason_is_told(
    attempt: Attempt, program: Path, report: Report
) -> None:
    said = control_of(attempt, program)
    if said is not None and said not in attempt.refused and said != "nothing":
        return
    reason = why_no_control(attempt)
    assert reason, f"the control of {attempt.name!r} does not get through ({said}): the attempt shows nothing"
    report.without[attempt.name] = f"{reason} ({said})" if said else reason


@pytest.mark.parametrize("mode", modes())
@pytest.mark.parametrize("user", [None, "1000"], ids=["as root", "as another user"])
async def test_calls_and_files_are_refused(mode: str, user: str | None, program: Path) -> None:
    async with local(mode) as backend, place(backend) as where:
        if user is not None and where.client.welcome.facts.get("ids") == "one":
            pytest.skip("one uid only here: there is no other user")
        assert where.mode == mode
        await where.put("/try", program.read_bytes())
        assert await judge(where, CALLS + OPENS, user) == []


class Host:
    """What this machine has that no episode may reach."""

    def __init__(self, tmp_path: Path) -> None:
        self.sleeper = subprocess.Popen(["sleep", "600"])
        self.directory = tmp_path

    def close(self) -> None:
        self.sleeper.kill()
        self.sleeper.wait()


@pytest.fixture
def host(tmp_path: Path) -> Iterator[Host]:
    made = Host(tmp_path)
    yield made
    made.close()


@pytest.mark.parametrize("mode", modes())
async def test_processes_of_the_machine_are_out_of_reach(mode: str, program: Path, host: Host) -> None:
    attempts = process_attempts(host.sleeper.pid)
    for attempt in attempts:
        said = control_of(attempt, program)
        assert said not in attempt.refused, f"no control for {attempt.name}: {said}"
    async with local(mode) as backend, place(backend) as where:
        await where.put("/try", program.read_bytes())
        for pid in (host.sleeper.pid, os.getpid(), os.getppid()):
            # a process of the episode may have this very number in the episode's own numbering
            if (await where.sh(f"test -e /proc/{pid}")).code == 0 and pid < 1000:
                continue
            assert await judge(where, process_attempts(pid), None) == []
        await where.sh("kill -9 -1")
        assert host.sleeper.poll() is None
        assert (await where.sh("echo alive")).out == "alive\n"
        seen = (await where.sh("cat /proc/[0-9]*/cmdline | tr '\\0' ' '")).out
        assert "sleep 600" not in seen
        assert "pytest" not in seen
        assert "sleep 600" in on_host(["sh", "-c", "cat /proc/[0-9]*/cmdline | tr '\\0' ' '"]).out


@pytest.mark.parametrize("mode", modes())
async def test_sockets_of_the_machine_are_out_of_reach(mode: str, program: Path, tmp_path: Path) -> None:
    async def greet(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.close()

    import socket

    inet = await asyncio.start_server(greet, "127.0.0.1", 0)
    port = inet.sockets[0].getsockname()[1]
    abstract = socket.socket(socket.AF_UNIX)
    abstract.bind(f"\0rls-isolation-{os.getpid()}")
    abstract.listen()
    file = Path(f"/tmp/rls-isolation-{os.getpid()}.sock")
    by_path = socket.socket(socket.AF_UNIX)
    by_path.bind(str(file))
    by_path.listen()
    attempts = [
        Attempt("host loopback", f"connect 127.0.0.1 {port}", "plain", refused=NO_PEER),
        Attempt("abstract socket", f"unix @rls-isolation-{os.getpid()}", "plain", refused=NO_PEER),
        Attempt("file socket", f"unix {file}", "plain", refused=NO_PEER),
    ]
    far = Attempt("network", "connect 192.0.2.1 80", "plain", refused=NO_PEER)
    try:
        for attempt in attempts:
            said = await asyncio.to_thread(control_of, attempt, program)
            assert said == "ok", f"no control for {attempt.name}: {said}"
        async with local(mode) as backend, place(backend) as where:
            await where.put("/try", program.read_bytes())
            assert await judge(where, [*attempts, far], None) == []
        async with local(mode) as backend, place(backend, Spec(network="host")) as where:
            await where.put("/try", program.read_bytes())
            # its control from the other side: with the host's network the loopback is the host's
            assert (await where.run(["/try", *attempts[0].inside.split()])).said == "ok"
    finally:
        inet.close()
        abstract.close()
        by_path.close()
        file.unlink()


@pytest.mark.parametrize("mode", modes())
async def test_a_setuid_program_gains_nothing(mode: str, program: Path, tmp_path: Path) -> None:
    async with local(mode) as backend, place(backend) as where:
        if where.client.welcome.facts.get("ids") == "one":
            pytest.skip("one uid only here: there is no other user")
        await looks.setuid_gains_nothing(where, program.read_bytes())
    if AS_ROOT:
        # control: on a file system that honours setuid the same file gains root
        copy = Path("/var/tmp") / f"rls-setuid-{os.getpid()}"
        copy.write_bytes(program.read_bytes())
        try:
            copy.chmod(0o4755)
            gained: Ran = on_host([str(copy), "euid0"], user=65534, group=65534, extra_groups=[])
            assert gained.said == "ok", f"no control: {gained}"
        finally:
            copy.unlink()
