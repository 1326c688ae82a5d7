"""What an episode tries and must not manage in mode ``manifest``, where only its user and the kernel's rules stand between
it and the keeper. The attempts and their positive controls are those of tests/support/isolation.py."""

from __future__ import annotations

import secrets
import shutil
import subprocess
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from rlsandbox.backends.base import Member
from tests.keeper.test_container import seat
from tests.keeper.test_manifest import clean, pytestmark  # noqa: F401
from tests.support import looks
from tests.support.host import compiled, on_host
from tests.support.isolation import CALLS, OPENS, judge
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
    async with pod(root) as where:
        await looks.keepers_processes_are_shut(where, "/try")


async def test_the_keeper_s_places(root: Path) -> None:
    async with pod(root) as where:
        await where.sh("echo mine > /work/repo/file")
        await where.client.seal("first")
        await looks.keepers_places_are_shut(where, "/try")
        await where.client.reset("first")
        assert await clean(where.client) and (await where.sh("cat /work/repo/file")).out == "mine\n"


async def test_files_of_root_are_out_of_reach(root: Path) -> None:
    async with pod(root) as where:
        await looks.files_of_root_are_out_of_reach(where)
        await where.client.reset("")
        assert await clean(where.client)


async def test_frames_written_to_every_descriptor_reach_no_keeper(root: Path) -> None:
    async with pod(root) as where:
        await looks.frames_reach_no_keeper(where)


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
