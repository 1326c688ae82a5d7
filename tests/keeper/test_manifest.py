"""Mode ``manifest``: a keeper with six capabilities and no namespaces puts back what another uid's commands did."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from rlsandbox.backends.base import Member
from rlsandbox.errors import SandboxDiedError
from rlsandbox.keeper.client import AS_KEEPER, KeeperClient, KeeperFailure
from rlsandbox.keeper.wire import Op
from rlsandbox.reset.facts import Facts
from tests.keeper.test_container import Seat, seat
from tests.support import dirt
from tests.support.container import why_not
from tests.support.make_image import NO_BUSYBOX, agents_layer, busybox, f, layer
from tests.support.place import Place
from tests.support.residue import Told, every_kind, primed
from tests.support.rightless import image_root, rightless

WHY = why_not() or (None if busybox() else NO_BUSYBOX)
pytestmark = pytest.mark.skipif(WHY is not None, reason=str(WHY))


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A pod's root; each test leaves it as it was, which is what these tests are about."""
    top = tmp_path_factory.mktemp("pod")
    for directory in (top, *top.parents[:2]):
        directory.chmod(0o755)
    extra = layer(
        [
            f("home/agent/.profile", "umask 022\n", 0o644, 1000, 1000),
            f("srv/open", "anybody may write here\n", 0o666),
        ]
    )
    return image_root(top / "root", [agents_layer(), extra])


@asynccontextmanager
async def pod(root: Path, *options: str) -> AsyncIterator[Seat]:
    async with rightless(root, *options) as made, seat(made) as seated:
        yield seated


async def facts(client: KeeperClient) -> Facts:
    return Facts.of_lines(await client.inspect())


async def clean(client: KeeperClient) -> bool:
    told = await facts(client)
    return told.files_clean and not told.of("process") and not told.of("ipc")


async def test_what_commands_are(root: Path) -> None:
    async with pod(root) as sandbox:
        welcome = sandbox.client.welcome
        assert welcome.mode == welcome.facts["reset_mode"] == "manifest"
        code, said = await sandbox.sh(
            "id -u; grep -e CapEff -e NoNewPrivs -e Seccomp: /proc/self/status; ls /.rlsandbox-pristine 2>/dev/null;"
            " ls /.rlsandbox-run/s 2>/dev/null; kill -9 1 2>/dev/null; /usr/bin/setuid-busybox; true"
        )
        lines = said.decode().split("\n")
        assert code == 0 and lines[:4] == ["1000", "CapEff:\t0000000000000000", "NoNewPrivs:\t1", "Seccomp:\t2"]
        assert lines[4] == "1000", "a setuid program gives nothing"
        with pytest.raises(KeeperFailure, match="all commands are user 1000's"):
            await sandbox.sh("id", user="0")
        with pytest.raises(KeeperFailure, match="user 1000's"):
            await sandbox.client.read("/etc/passwd", user="root")
        assert (await sandbox.sh("id -u", user="agent"))[1] == b"1000\n"
        assert await clean(sandbox.client)


DIRT = """
cd /home/agent
echo more >> .profile; chmod 600 .profile; mkdir -p a/b/c; echo x > a/b/c/d; mkfifo pipe; ln -s /etc/passwd link
echo gone > /srv/open
echo y > /tmp/y; echo z > /dev/shm/z; rm -rf /work/repo; mkdir /work/new
(setsid sleep 1000 &) ; (trap '' TERM HUP; sleep 1001 &) ; sleep 1002 &
"""


async def test_a_reset_puts_everything_back(root: Path) -> None:
    async with pod(root) as sandbox:
        before = (await sandbox.sh("ls -laRn /home/agent /work /tmp /srv; cat /srv/open"))[1]
        for _ in range(3):
            assert (await sandbox.sh(DIRT))[0] == 0
            told = await facts(sandbox.client)
            assert not told.files_clean and len(told.of("process")) == 3
            names = {change.name for change in await sandbox.client.changes("/")}
            assert names == {
                "/home/agent/.profile", "/home/agent/a", "/home/agent/a/b", "/home/agent/a/b/c", "/home/agent/a/b/c/d",
                "/home/agent/pipe", "/home/agent/link", "/srv/open", "/tmp/y", "/dev/shm/z", "/work/repo", "/work/new",
            }  # fmt: skip
            await sandbox.client.reset("")
            assert await clean(sandbox.client) and not await sandbox.client.changes("/")
            assert (await sandbox.sh("ls -laRn /home/agent /work /tmp /srv; cat /srv/open"))[1] == before


async def test_a_layer_is_a_state_of_its_own(root: Path) -> None:
    async with pod(root) as sandbox:
        await sandbox.sh("echo one > /work/repo/one; sleep 1000 &")
        with pytest.raises(KeeperFailure, match="processes of the episode are running"):
            await sandbox.client.seal("first")
        await sandbox.client.seal("first", kill=True)
        assert await clean(sandbox.client) and (await facts(sandbox.client)).of("layer") == ("first",)
        await sandbox.sh("echo two > /work/repo/one; echo two > /work/repo/two")
        assert await sandbox.client.outside_read("/work/repo/one", baseline=True) == b"one\n"
        assert await sandbox.client.outside_read("/work/repo/one") == b"two\n"
        await sandbox.client.outside_remove("/work/repo/one")
        assert [change.name for change in await sandbox.client.changes("/")] == ["/work/repo/two"]
        await sandbox.client.reset("first")
        assert await clean(sandbox.client) and (await sandbox.sh("cat /work/repo/*"))[1] == b"one\n"
        await sandbox.client.reset("")
        assert await clean(sandbox.client) and (await sandbox.sh("ls /work/repo"))[1] == b""
        await sandbox.client.reset("first")
        assert await clean(sandbox.client) and (await sandbox.sh("cat /work/repo/*"))[1] == b"one\n"
        await sandbox.client.reset("")
        await sandbox.client.drop_layer("first")
        with pytest.raises(KeeperFailure, match="it is not here"):
            await sandbox.client.reset("first")


HIDDEN = {
    "written with its old times": "touch -r .profile /tmp/t; echo X >> .profile; truncate -s 10 .profile; touch -r /tmp/t .profile; rm /tmp/t",
    "same size and times": "touch -r .profile /tmp/t; printf 'UMASK 077\\n' | dd of=.profile conv=notrunc 2>/dev/null; touch -r /tmp/t .profile; rm /tmp/t",
    "replaced by its copy": "cp -p .profile p; mv p .profile",
    "a hard link made and removed": "ln .profile p; rm p",
    "a hard link that stays": "ln .profile /tmp/p",
    "mode to and fro": "chmod 600 .profile; chmod 644 .profile",
    "a directory moved away and back": "mv /work/repo /work/r; mv /work/r /work/repo",
}


@pytest.mark.parametrize("how", HIDDEN)
async def test_nothing_is_hidden_by_times(root: Path, how: str) -> None:
    async with pod(root) as sandbox:
        assert (await sandbox.sh("cd /home/agent; " + HIDDEN[how]))[0] == 0
        assert not (await facts(sandbox.client)).files_clean
        await sandbox.client.reset("")
        assert await clean(sandbox.client)
        assert (await sandbox.sh("cat /home/agent/.profile; ls -A /home/agent /tmp"))[1].startswith(b"umask 022\n")


MAPPED = """
import mmap
with open("/dev/shm/m", "r+b") as f, mmap.mmap(f.fileno(), 0) as m:
    m[0], m[:1] = m[0], b"X"
"""


async def test_what_is_written_through_a_map_in_memory_is_found_though_no_time_says_so(root: Path) -> None:
    async with pod(root) as sandbox:
        await sandbox.sh("echo one > /dev/shm/m; stat -c '%y %z' /dev/shm/m > /tmp/times")
        await sandbox.client.seal("first")
        code, said = await sandbox.sh(
            f"python3 -c '{MAPPED}' && cat /dev/shm/m && stat -c '%y %z' /dev/shm/m | cmp - /tmp/times"
        )
        assert (code, said) == (0, b"Xne\n"), "the kernel tells the time of such a write now"
        assert [change.name for change in await sandbox.client.changes("/")] == ["/dev/shm/m"]
        await sandbox.client.reset("first")
        assert await clean(sandbox.client) and (await sandbox.sh("cat /dev/shm/m"))[1] == b"one\n"


FLAGS = """
import fcntl, os, struct, sys
for name, more in ((".profile", 0x40), (".", 0x80)):  # nodump, noatime: their owner may
    fd = os.open(name, os.O_RDONLY)
    flags, = struct.unpack("l", fcntl.ioctl(fd, 0x80086601, bytes(8)))
    print(flags & 0xC0)
    if sys.argv[1:]:
        fcntl.ioctl(fd, 0x40086602, struct.pack("l", flags | more))
"""


async def test_flags_of_files_go(root: Path) -> None:
    async with pod(root) as sandbox:

        async def flags(more: str = "") -> tuple[int, bytes]:
            return await sandbox.sh(f"python3 -c '{FLAGS}' {more} 2>&1", cwd="/home/agent")

        code, said = await flags("set")
        if code:
            pytest.skip(f"no such flags on this disk: {said.splitlines()[-1]!r}")
        assert (await flags(), said) == ((0, b"64\n128\n"), b"0\n0\n")
        await sandbox.client.reset("")
        assert await clean(sandbox.client) and await flags() == (0, b"0\n0\n")


async def test_what_the_keeper_does_itself(root: Path) -> None:
    """Over all rights, and through no link that an episode may have made."""
    async with pod(root) as sandbox:
        client, above = sandbox.client, AS_KEEPER
        await sandbox.sh(
            "cd /work/repo; mkdir -p shut/deep; echo x > shut/deep/x; chmod 000 shut/deep shut; ln -s /etc etc; ln -s /etc/passwd p;"
            "ln -s /.rlsandbox-pristine mine"
        )
        await client.write("/work/repo/shut/new/file", b"hidden", flags=2 | 4 | above)
        assert (await client.stat("/work/repo/shut/deep/x", flags=above)).kind == "file"
        await client.remove("/work/repo/shut/deep", tree=True, flags=above)
        await client.write("/grader/check", b"too", mode=0o755, flags=2 | 4 | above)
        assert (await sandbox.sh("cat /grader/check"))[1] == b"too"
        assert (await client.stat("/grader/check", flags=above)).uid == 0
        for path in ("/work/repo/etc/new", "/work/repo/p", "/work/repo/mine/1/x", "/.rlsandbox-pristine/1/x", "/work/../etc/new", "/"):
            with pytest.raises(KeeperFailure):
                await client.write(path, b"x", flags=2 | above)
        with pytest.raises(KeeperFailure):
            await client.write("/work/repo/etc", b"", mode=0o777, flags=8 | above)
        with pytest.raises(KeeperFailure):
            await client.collect(Op.READ, path="/work/repo/p", flags=above)
        with pytest.raises(KeeperFailure, match="user 1000's"):
            await client.write("/etc/new", b"x", user="root", flags=above)
        assert await client.read_link("/work/repo/p", flags=above) == b"/etc/passwd"
        assert not {"/etc", "/etc/new", "/etc/passwd"} & {change.name for change in await client.changes("/")}
        await client.reset("")
        assert await clean(client) and not (root / "grader").exists()


async def test_who_kills_all_it_can_reach_ends_nothing_but_itself(root: Path) -> None:
    async with pod(root) as sandbox:
        await sandbox.sh("(setsid sh -c 'while :; do kill -9 -1; done' &)")
        code, _ = await sandbox.sh("sleep 5")
        assert code == 137
        await sandbox.sh("(setsid sh -c ':(){ :|:& }; :' &)", timeout_ms=2000)
        await sandbox.client.reset("")
        assert await clean(sandbox.client) and await sandbox.sh("echo fine") == (0, b"fine\n")


async def test_what_a_session_left_is_nobodys_start(root: Path) -> None:
    """A second session may not have the container: a list that is made then would bless what lies there."""
    async with rightless(root) as made:
        async with seat(made) as first:
            await first.sh("echo x > /tmp/left")
        with pytest.raises(SandboxDiedError, match="files are as the last one left them"):
            async with seat(made, timeout=5):
                pass
    (root / "tmp/left").unlink()


async def test_it_needs_another_user(root: Path) -> None:
    with pytest.raises(RuntimeError, match="--user somebody else"):
        async with rightless(root, user="root"):
            pass


async def test_every_kind_of_dirt(root: Path, capsys: Any) -> None:
    told = Told()
    async with pod(root, "--memory", str(2 << 30), "--pids", "400") as sandbox:
        where = Place(None, Member("pod", None, {"base": "image"}), sandbox.client)  # type: ignore[arg-type]
        suite = await primed(where, dirt.USER, setup=dirt.SETUP_OF_USER, shared=True)
        await every_kind(suite, told, whole=True)
    with capsys.disabled():
        print("\n" + told.lines("manifest"))
    assert not told.failures, "\n".join(told.failures)
    assert told.planted >= 50
