"""What an episode tries and must not manage in mode ``manifest``, where only its user and the kernel's rules stand between
it and the keeper. The attempts and their positive controls are those of tests/integration/test_isolation*.py."""

from __future__ import annotations

import secrets
import shutil
import subprocess
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from rlsandbox.backends.base import Member
from rlsandbox.keeper.frames import encode_fields, encode_message
from rlsandbox.keeper.wire import Op, Type
from tests.integration.test_isolation import CALLS, NO_PEER, OPENS, Attempt, judge, process_attempts
from tests.integration.test_isolation_view import PROC_FILES
from tests.keeper.test_container import seat
from tests.keeper.test_manifest import clean, pytestmark  # noqa: F401
from tests.support.host import compiled, on_host
from tests.support.place import Place
from tests.support.rightless import image_root, rightless


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    program = compiled("trysyscall", tmp_path_factory.mktemp("trysyscall"))
    if program is None:
        pytest.skip("no C compiler that can link statically (Debian: apt-get install gcc libc6-dev)")
    top = tmp_path_factory.mktemp("pod")
    for directory in (top, *top.parents[:2]):
        directory.chmod(0o755)
    made = image_root(top / "root", count=100)
    for name, mode in (("try", 0o755), ("try-setuid", 0o4755)):
        shutil.copy(program, made / name)
        (made / name).chmod(mode)
    return made


@asynccontextmanager
async def pod(root: Path, *options: str) -> AsyncIterator[Place]:
    async with rightless(root, *options) as made, seat(made) as sandbox:
        yield Place(None, Member("pod", None, {"base": "image"}), sandbox.client)  # type: ignore[arg-type]


async def keepers(where: Place) -> list[int]:
    """The container's processes of root: the keeper's."""
    script = "for p in /proc/[0-9]*; do [ $(stat -c %u $p) = 0 ] && echo ${p#/proc/}; done 2>/dev/null"
    return [int(pid) for pid in (await where.sh(script)).out.split()]


async def test_calls_and_files_are_refused(root: Path) -> None:
    async with pod(root, "--nofile", "1000") as where:
        managed = await judge(where, CALLS + OPENS, None)
        # This one is for everybody, and which files of /proc are masked is the container runtime's.
        assert [line for line in managed if line != "read /proc/key-users: ok"] == []
        assert (await where.run(["/try", "open", "/dev/null", "1"])).said == "ok", "control: what it may do is done"
        assert (await where.run(["/try-setuid", "euid0"])).said == "EPERM"
        await where.client.reset("")
        assert await clean(where.client)


async def test_the_keeper_s_processes(root: Path) -> None:
    """They are in plain sight, and that is all."""
    async with pod(root) as where:
        pids = await keepers(where)
        assert 1 in pids and len(pids) >= 3, pids  # the first, the hub, the sandbox's keeper, the episode's init
        for pid in pids:
            assert await judge(where, process_attempts(pid), None) == []
            opened = []
            for name in PROC_FILES:
                for flags in (1, 2):
                    if (await where.run(["/try", "open", f"/proc/{pid}/{name}", str(flags)])).said == "ok":
                        opened.append(name)
            # Anybody may open these few; the kernel asks when they are written.
            assert await judge(where, [Attempt(n, f"write /proc/{pid}/{n} 1", "plain") for n in set(opened)], None) == []
            for name in ("environ", "mem", "maps", "auxv", "syscall", "stack", "io"):
                assert (await where.sh(f"head -c 1 /proc/{pid}/{name}")).out == "", name
            for way in ("root/.rlsandbox-run", "cwd/", "fd/", "map_files/", "task/1/root/"):
                assert (await where.sh(f"ls /proc/{pid}/{way}")).out == "", way
            said = (await where.run(["/try", "kill", str(pid), "9"])).said
            assert said == "EPERM"
        # control: the same of a process of its own
        own = (await where.sh("sleep 100 >/dev/null 2>&1 & echo $!")).out.strip()
        for attempt in ("ptrace", "kill", "vm_read"):
            more = "0" if attempt == "kill" else ""
            assert (await where.run(["/try", attempt, own, *more])).said in ("ok", "EFAULT"), attempt
        await where.sh("kill -9 -1")
        assert (await where.sh("echo alive")).out == "alive\n"


async def test_the_keeper_s_places(root: Path) -> None:
    async with pod(root) as where:
        await where.sh("echo mine > /work/repo/file")
        await where.client.seal("first")
        for path in ("/.rlsandbox-run", "/.rlsandbox-pristine"):
            for attempt in (f"ls {path}/s", f"ls {path}/1", f"find {path} -mindepth 2", f"echo x > {path}/x", f"mv {path} /tmp/x", f"chmod 777 {path}"):
                assert (await where.sh(f"{attempt} 2>/dev/null")).out == "", attempt
            assert not (await where.sh(f"touch {path}/x || rm -rf {path}/* && ls -d {path}/1")).out
        attempts = [
            Attempt("file socket", "unix /.rlsandbox-run/s/keeper", "plain", refused=NO_PEER),
            Attempt("through /proc", "unix /proc/1/root/.rlsandbox-run/s/keeper", "plain", refused=NO_PEER),
        ]
        assert await judge(where, attempts, None) == []
        named = [line.split()[7] for line in (await where.sh("cat /proc/net/unix")).out.splitlines()[1:] if len(line.split()) > 7]
        assert not [name for name in named if name.startswith("@")], "a keeper listens on no abstract name"
        for attempt in ("> /.rlsandbox/keeper", "rm -f /.rlsandbox/keeper", "mv /.rlsandbox /tmp/x"):
            assert (await where.sh(attempt)).code != 0, attempt
        await where.client.reset("first")
        assert await clean(where.client) and (await where.sh("cat /work/repo/file")).out == "mine\n"


async def test_files_of_root_are_out_of_reach(root: Path) -> None:
    async with pod(root) as where:
        for attempt in (
            "echo x >> /etc/passwd", "rm /etc/passwd", "mv /etc /tmp/etc", "chmod 666 /etc/passwd", "touch /usr/bin/x",
            "ln /etc/passwd /tmp/p && echo x >> /tmp/p", "ln -s /etc/passwd /tmp/l && echo x >> /tmp/l", "cat /etc/shadow-of-nobody",
            "chown 0 /tmp", "mknod /tmp/null c 1 3", "mount -t tmpfs x /tmp",
        ):  # fmt: skip
            assert (await where.sh(attempt)).code != 0, attempt
        await where.client.reset("")
        assert await clean(where.client)


async def test_frames_written_to_every_descriptor_reach_no_keeper(root: Path) -> None:
    frames = encode_message(Type.HELLO, 0, encode_fields({"version": 1, "token": ""}))
    frames += encode_message(Type.REQ, 7, encode_fields({"op": Op.KILL_ALL}))
    script = (
        f"import os\nfor fd in range(0, 256):\n    try: os.write(fd, {frames!r})\n    except OSError: pass\n"
    )
    async with pod(root) as where:
        await where.sh("sleep 600 >/dev/null 2>&1 &")
        ran = await where.run(["python3", "-c", script])
        assert ran.code == 0
        assert ran.out.encode() == frames.decode("utf-8", "replace").encode()
        assert "sleep" in (await where.sh("cat /proc/[0-9]*/comm")).out
        links = "import os; print(sorted(map(int, os.listdir('/proc/self/fd')))[:-1])"
        assert (await where.run(["python3", "-c", links])).out.strip() == "[0, 1, 2]"


async def test_the_machine_is_out_of_reach(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What a container hides anyway; here against a keeper that would hand it on."""
    word = "secret-" + secrets.token_hex(8)
    monkeypatch.setenv("RLS_TEST_SECRET", word)
    sleeper = subprocess.Popen(["sleep", "600"])
    try:
        assert word in on_host(["sh", "-c", "env"]).out
        async with pod(root) as where:
            assert word not in (await where.sh("env; cat /proc/[0-9]*/environ 2>/dev/null")).out
            await where.sh("kill -9 -1")
        assert sleeper.poll() is None
    finally:
        sleeper.kill()
        sleeper.wait()
