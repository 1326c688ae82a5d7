"""`keeper init` in namespaces as a container has them, for tests without a cluster. Needs root."""

from __future__ import annotations

import asyncio
import contextlib
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

from rlsandbox.keeper.build import keeper_binary

# What a pod with `hostUsers: false` has: a user namespace of its own, with all rights in it.
USERNS = """
import ctypes, os, sys
libc = ctypes.CDLL(None, use_errno=True)
to_child, to_parent = os.pipe(), os.pipe()
pid = os.fork()
if pid == 0:
    if libc.unshare(0x10000000):
        os._exit(9)
    os.write(to_parent[1], b"x")
    os.read(to_child[0], 1)
    os.execvp(sys.argv[1], sys.argv[1:])
os.read(to_parent[0], 1)
for name in ("uid_map", "gid_map"):
    open(f"/proc/{pid}/{name}", "w").write("0 0 65536")
os.write(to_child[1], b"x")
sys.exit(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))
"""
EMPTY = "mount -t tmpfs -o mode=1777 tmp /tmp"
UNSHARE = ["unshare", "--mount", "--pid", "--ipc", "--net", "--fork", "--kill-child", "--mount-proc"]
# What a container runtime leaves to root by default.
ORDINARY = "+chown,+dac_override,+fowner,+fsetid,+kill,+setgid,+setuid,+setpcap,+net_bind_service,+sys_chroot,+setfcap"


def why_not() -> str | None:
    if os.geteuid() != 0:
        return "needs root"
    for tool in ("unshare", "nsenter", "setpriv"):
        if shutil.which(tool) is None:
            return f"needs {tool} (util-linux)"
    return None


class Container:
    """One that runs. ``connect`` gives the arguments of a process that is executed in it."""

    def __init__(self, process: subprocess.Popen[bytes], place: Path, keeper: Path) -> None:
        self.process, self.place, self.keeper = process, place, keeper
        self.run = place / "run"

    @property
    def pid(self) -> int:
        """Of its first process, for this machine."""
        at = self.process.pid
        while True:
            children = Path(f"/proc/{at}/task/{at}/children").read_text().split()
            if not children:
                raise LookupError("it has not come so far")
            at = int(children[0])
            line = Path(f"/proc/{at}/cmdline").read_bytes().split(b"\0")
            if line[:2] == [str(self.keeper).encode(), b"init"]:
                return at

    def connect(self) -> list[str]:
        return ["nsenter", "-t", str(self.pid), "-m", "-p", str(self.keeper), "connect", str(self.run)]


@asynccontextmanager
async def listening(made: Container, socket: str, log: Path, within_s: float) -> AsyncIterator[None]:
    """From when its keeper listens at *socket* (below its /proc/PID) until its first process is gone."""
    process = made.process
    try:
        for _ in range(round(within_s / 0.02)):
            if process.poll() is not None:
                raise RuntimeError(log.read_text())
            with contextlib.suppress(LookupError, OSError):
                if Path(f"/proc/{made.pid}/{socket}").exists():
                    break
            await asyncio.sleep(0.02)
        else:
            raise RuntimeError(f"keeper init did not listen within {within_s:g} s")
        yield
    finally:
        with contextlib.suppress(LookupError, OSError):
            os.kill(made.pid, 9)
        for _ in range(100):
            if process.poll() is not None:
                break
            await asyncio.sleep(0.02)
        else:
            process.kill()
        process.wait()


@asynccontextmanager
async def container(kind: str, *options: str) -> AsyncIterator[Container]:
    """*kind*: ``own-users`` (hostUsers: false and SYS_ADMIN), ``plain``, ``node`` (SYS_ADMIN over the node)."""
    place = Path(tempfile.mkdtemp(prefix="rls-container-", dir="/var/tmp"))
    place.chmod(0o755)
    (place / "run").mkdir()
    keeper = place / "keeper"
    sanitized = os.environ.get("RLS_TEST_KEEPER") == "keeper-asan"
    shutil.copy(keeper_binary(variant="asan" if sanitized else "release"), keeper)
    # Its image is this machine, but for what others have left lying about.
    init = ["sh", "-c", f'{EMPTY} && mount -t tmpfs run "$0" && exec "$@"', str(place / "run")]
    if kind == "plain":
        # A mask over a part of /proc, as container runtimes make: it forbids a fresh one further in.
        init[2] = (
            f'{EMPTY} && mount -t tmpfs run "$0" && mount --bind /dev/null /proc/timer_list && exec "$@"'
        )
        init += ["setpriv", f"--bounding-set=-all,{ORDINARY}"]
    init += [str(keeper), "init", "--run", str(place / "run"), *options]
    start = [sys.executable, "-c", USERNS] if kind == "own-users" else []
    log = open(place / "log", "wb+")
    # From "/", as a runtime starts an image without a WORKDIR: where the tests run may be out of its sight.
    process = subprocess.Popen(
        [*start, *UNSHARE, *init], cwd="/", stdin=subprocess.DEVNULL, stdout=log, stderr=log
    )
    try:
        made = Container(process, place, keeper)
        async with listening(made, f"root{made.run}/s/keeper", place / "log", within_s=10):
            yield made
    finally:
        log.close()
        shutil.rmtree(place)


class Piped:
    """A bridge as a process with pipes: what an exec stream is on a cluster."""

    def __init__(self, process: asyncio.subprocess.Process) -> None:
        self.process = process
        self.why = ""

    async def send(self, data: bytes) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(data)
        await self.process.stdin.drain()

    async def recv(self) -> bytes:
        assert self.process.stdout is not None and self.process.stderr is not None
        data = await self.process.stdout.read(1 << 16)
        if not data:
            self.why = (await self.process.stderr.read()).decode().strip()
        return data

    async def close(self) -> None:
        if self.process.stdin is not None:
            self.process.stdin.close()
        await self.process.wait()


async def dial(made: Container) -> Piped:
    pipe = asyncio.subprocess.PIPE
    return Piped(await asyncio.create_subprocess_exec(*made.connect(), stdin=pipe, stdout=pipe, stderr=pipe))
