"""What an episode tries and must not manage, on real pods in each mode. Attempts and looks are those of the other backends."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest

from rlsandbox.keeper.frames import encode_fields, encode_message
from rlsandbox.keeper.wire import Type
from rlsandbox.spec import Spec
from tests.cluster.test_backend import TEST, Kubernetes
from tests.support import looks
from tests.support.host import compiled
from tests.support.isolation import CALLS, OPENS, judge, process_attempts
from tests.support.place import Place, place


@dataclass(frozen=True)
class Where:
    """A mode, the level of its namespace, and whose the commands are."""

    mode: str
    level: str
    user: str | None = None
    """Of a command; None: the sandbox's own."""
    rights: bool = True
    """Whether the sandbox's commands are root's."""
    gvisor: bool = False

    @property
    def spec(self) -> Spec:
        if self.gvisor:
            return Spec(memory="512MiB", isolation="gvisor")
        if self.rights:
            return Spec(memory="512MiB")
        return Spec(memory="512MiB", network="host", user="1000" if self.mode == "manifest" else None)

    def __str__(self) -> str:
        return (
            f"{'gVisor, ' * self.gvisor}{self.mode}, as {self.user or ('root' if self.rights else 'a user')}"
        )


GVISOR = Where("overlay", "privileged", gvisor=True)
ROOTS = [Where("overlay", "privileged"), Where("userns", "baseline"), GVISOR]
BOTH = [*ROOTS, *(replace(at, user="1000") for at in ROOTS)]
RIGHTLESS = [Where("manifest", "baseline", rights=False), Where("replace", "restricted", rights=False)]

Body = Callable[[Place], Awaitable[None]]


@pytest.fixture(scope="module")
def program(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    made = compiled("trysyscall", tmp_path_factory.mktemp("trysyscall"))
    if made is None:
        pytest.skip("no C compiler that can link statically (Debian: apt-get install gcc libc6-dev)")
    return made.read_bytes()


@pytest.fixture
def inside(any_kubeconfig: Path, make_namespace: Callable[..., str], at: Where) -> Callable[[Body], None]:
    """Runs the body in a sandbox of a pod."""
    how: dict[str, Any] = {"kubeconfig": str(any_kubeconfig), "image": TEST, "mode": at.mode}
    how |= {"gvisor_class": "gvisor"}
    namespace = make_namespace(at.level)

    async def main(body: Body) -> None:
        backend = Kubernetes(**how, namespace=namespace)
        try:
            async with asyncio.timeout(240), place(backend, at.spec) as where:
                assert where.mode == at.mode
                await body(where)
        finally:
            await backend.close()

    return lambda body: asyncio.run(main(body))


RUNTIMES = {"read /proc/key-users: ok", "read /sys/kernel/notes: ok", "read /sys/kernel/vmcoreinfo: ok"}
"""Where the keeper may mount nothing, what of /proc and /sys is covered is the container runtime's choice."""
NO_FILTER = {"TIOCSTI: ok", "32-bit system calls: ok", "x32 system calls: ok"}
"""A filter of the keeper's would not come off again, and is not set where it isolates nothing: there is the pod's own."""
IN_OTHER_WORDS = {
    "configure the loopback: ENOTTY", "realtime scheduling: EINVAL", "setns: ENOENT", "setns to the first process: ENOENT",
    "negative nice: ok", "32-bit system calls: ok",
}  # fmt: skip
"""gVisor has none of the first four and says so; schedules by no niceness; and takes a 32-bit call for a 64-bit one of that
number, which the filter sees (below)."""
READ = ("environ", "maps", "auxv", "io")
"""Of an episode's first process, under an old gVisor."""


@pytest.mark.parametrize("at", [*BOTH, *RIGHTLESS], ids=str)
def test_calls_and_files_are_refused(at: Where, inside: Callable[[Body], None], program: bytes) -> None:
    allowed = (
        (IN_OTHER_WORDS if at.gvisor else set())
        if at.rights
        else RUNTIMES | (NO_FILTER if at.mode == "replace" else set())
    )

    async def body(where: Place) -> None:
        await where.put("/tmp/try", program)
        managed = await judge(where, CALLS + OPENS, at.user, "/tmp/try")
        assert set(managed) - allowed == set()
        assert (await where.run(["/tmp/try", "open", "/dev/null", "1"], user=at.user)).said == "ok", "control"

    inside(body)


@pytest.mark.parametrize("at", [*BOTH, *RIGHTLESS], ids=str)
def test_what_it_looks_for_is_not_there(at: Where, inside: Callable[[Body], None], program: bytes) -> None:
    async def body(where: Place) -> None:
        await looks.frames_reach_no_keeper(where)
        await looks.ways_out_lead_back(where, "/inside-mark" if at.rights else "/tmp/inside-mark")
        if not at.rights:
            return
        await looks.keepers_socket_is_nowhere(where, mounted=at.mode == "overlay", listed=at.gvisor)
        await where.put("/tmp/try", program)
        await looks.first_process_is_shut(where, at.user, "/tmp/try", read=READ if at.gvisor else ())
        if at.mode == "userns":
            await looks.no_file_in_proc_is_opened(where, at.user)
        await looks.setuid_gains_nothing(where, program)

    inside(body)


@pytest.mark.parametrize("at", [*ROOTS, *RIGHTLESS], ids=str)
def test_two_sandboxes_share_nothing(at: Where, inside: Callable[[Body], None]) -> None:
    async def body(where: Place) -> None:
        async with place(where.backend, at.spec) as other:
            await looks.two_share_nothing(where, other, abstract=not at.gvisor)

    inside(body)


@pytest.mark.parametrize("at", [GVISOR], ids=str)
def test_a_32_bit_call_meets_the_filter(at: Where, inside: Callable[[Body], None], program: bytes) -> None:
    async def body(where: Place) -> None:
        await where.put("/tmp/try", program)
        assert (await where.run(["/tmp/try", "int80", "83", "/tmp/made"])).said == "ok", (
            "control: 83 is mkdir"
        )
        assert (await where.sh("ls -d /tmp/made")).code == 0
        for number in ("272", "161 /", "165 /tmp", "166 /proc"):  # unshare nothing, chroot, mount, umount2
            assert (await where.run(["/tmp/try", "int80", *number.split()])).said == "EPERM", number

    inside(body)


@pytest.mark.parametrize("at", RIGHTLESS[:1], ids=str)
def test_what_stands_beside_the_commands(at: Where, inside: Callable[[Body], None], program: bytes) -> None:
    """In mode manifest the keeper is in plain sight, and another user."""

    async def body(where: Place) -> None:
        await where.put("/tmp/try", program)
        await looks.keepers_processes_are_shut(where, "/tmp/try")
        await looks.keepers_places_are_shut(where, "/tmp/try")
        await looks.files_of_root_are_out_of_reach(where)

    inside(body)


@pytest.mark.parametrize("at", RIGHTLESS[1:], ids=str)
def test_what_has_the_commands_own_uid(at: Where, inside: Callable[[Body], None], program: bytes) -> None:
    """In mode replace a command may end the keeper, and with it its own sandbox; it may not read it, nor speak for it."""

    async def body(where: Place) -> None:
        await where.put("/tmp/try", program)
        names = (await where.sh("grep -l rls- /proc/[0-9]*/comm")).out.split()
        assert "/proc/1/comm" in names and len(names) >= 3, "control: they are seen"
        for pid in (int(name.split("/")[2]) for name in names):
            await looks.nothing_is_read_in_proc(where, pid, None)
            held = [one for one in process_attempts(pid) if not one.name.startswith("kill")]
            assert await judge(where, held, None, "/tmp/try") == []
        await looks.files_of_root_are_out_of_reach(where)
        hello = encode_message(Type.HELLO, 0, encode_fields({"version": 1, "token": ""}))
        said = await where.run(["python3", "-c", SPEAK.format(hello=hello)])
        assert said.out == "b''\n", said

    inside(body)


SPEAK = """
import socket
s = socket.socket(socket.AF_UNIX)
s.connect("/.rlsandbox-run/s/keeper")
s.sendall({hello!r})
s.settimeout(20)
print(s.recv(1000))
"""
