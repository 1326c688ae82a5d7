"""Episodes in a chroot, as under an old gVisor, on this kernel: what does not depend on that one. Needs root."""

from __future__ import annotations

import errno
import os
from collections.abc import Iterator
from pathlib import Path

import pytest
from rawclient import Hub, Keeper, KeeperError

from rlsandbox.keeper.wire import Op, Tag, Type

CHROOT = (Tag.ISOLATION, "chroot")


@pytest.fixture
def keeper(keeper_binary: Path, scratch: Path) -> Iterator[Keeper]:
    """With a volume that is mounted after one inside it, and two deep in that; the keeper's own place is none."""
    if os.geteuid() != 0:
        pytest.skip("only root may mount without a user namespace")
    volume = scratch / "volume"
    (volume / "inner").mkdir(parents=True)
    (volume / "below").touch()
    within = scratch / "within"  # mounts are shared by all in there, and by nobody else
    mounts = " && ".join(
        [
            f"mount -t tmpfs rls {volume}/inner",
            f"mount --rbind {volume} {volume}",
            f"mkdir -p {volume}/inner/deep/one {volume}/inner/deep/two",
            f"mount -t tmpfs rls {volume}/inner/deep/one",
            f"mount -t tmpfs rls {volume}/inner/deep/two",
        ]
    )
    inner = f'{mounts} && exec {keeper_binary} "$@"'
    within.write_text(f"#!/bin/sh\nexec unshare --mount --propagation private sh -c '{inner}' sh \"$@\"\n")
    within.chmod(0o755)
    (scratch / "run").mkdir()
    with Hub(within, args=["--isolation", "none", "--cgroups", "none"], mode="overlay", scratch=scratch) as hub:
        made = (CHROOT, (Tag.PATH, str(scratch / "run")), (Tag.UPPER_BYTES, 64 << 20), (Tag.NETWORK, "none"))
        try:
            yield hub.create(*made, base=[])
        except KeeperError as error:
            if "mount an overlay" not in str(error):
                raise
            pytest.skip(f"no overlay over this machine's root: {error}")


def changed(keeper: Keeper) -> bytes:
    return keeper.call(Op.CHANGES, (Tag.PATH, "/"))[1]


def test_an_episode_is_put_back(keeper: Keeper, scratch: Path) -> None:
    assert "isolation=chroot" in keeper.welcome[Tag.FACT]
    assert changed(keeper) == b""
    left = "echo x > /tmp/left; rm /etc/passwd; mkdir /dev/shm/left; (setsid sleep 100 >/dev/null 2>&1 &)"
    assert keeper.sh(left).code == 0
    assert b"/etc/passwd" in (told := changed(keeper)) and b"/tmp/left" in told and b"/dev/shm/left" in told
    for _ in range(5):
        keeper.reset()
        assert changed(keeper) == b""
        seen = keeper.sh("cat /proc/[0-9]*/comm; ls /tmp /dev/shm; cat /etc/passwd; cut -d' ' -f5 /proc/self/mountinfo")
        assert b"sleep" not in seen.stdout and b"left" not in seen.stdout and b"root:" in seen.stdout
        assert {*seen.stdout.split(b"\n")} >= {b"/", b"/dev", b"/dev/null", b"/proc"}
        assert str(scratch).encode() not in seen.stdout
        assert keeper.sh(left).code == 0


def test_volumes_are_hidden(keeper: Keeper, scratch: Path) -> None:
    """Where this machine's scratch directories lie on a mount of their own, so are all of them."""
    assert keeper.sh(f"ls -A {scratch}/volume").stdout in (b"inner\n", b"")
    assert keeper.sh(f"ls -A {scratch}/run {scratch}/volume/inner | grep -v :").stdout.strip() == b""
    there = keeper.sh(f"ls {scratch}").stdout
    assert there == b"" or {*there.split()} == {b"run", b"volume", b"within"}, "control"


def test_layers(keeper: Keeper) -> None:
    assert keeper.sh("echo one > /tmp/one; rm -r /etc; mkdir /etc").code == 0
    keeper.call(Op.SEAL, (Tag.LAYER, "one"))
    assert keeper.sh("rm /tmp/one; echo two > /etc/two").code == 0
    tar = keeper.call(Op.EXPORT, (Tag.FLAGS, 1))[1]
    keeper.call(Op.SEAL, (Tag.LAYER, "two"))
    assert b".wh.one" in tar and b"etc/two" in tar
    for layer, files, etc in (("one", "one\n", ""), ("two", "", "two\n"), ("", "", None)):
        keeper.call(Op.RESET, (Tag.LAYER, layer))
        assert keeper.sh("ls /tmp | grep -x one").stdout.decode() == files
        if etc is not None:
            assert keeper.sh("ls /etc").stdout.decode() == etc
    # by the client and back
    keeper.call(Op.RESET)
    channel = keeper.request(Op.IMPORT, (Tag.LAYER, "back"))
    keeper.send(Type.DATA, channel, tar)
    keeper.send(Type.EOF, channel)
    keeper.reply(channel)
    keeper.call(Op.RESET, (Tag.LAYER, "back"))
    assert keeper.sh("ls /etc").stdout == b"two\n"


def test_looks_from_outside(keeper: Keeper) -> None:
    assert keeper.sh("ln -s /etc/hostname /tmp/link; ln -s ../../../etc/passwd /tmp/up; rm /etc/hostname").code == 0
    passwd = Path("/etc/passwd").read_bytes()
    assert keeper.call(Op.OUTSIDE_READ, (Tag.PATH, "/tmp/up"))[1] == passwd
    with pytest.raises(KeeperError) as gone:
        keeper.call(Op.OUTSIDE_READ, (Tag.PATH, "/tmp/link"))
    assert gone.value.errno == errno.ENOENT
    keeper.call(Op.OUTSIDE_REMOVE, (Tag.PATH, "/etc/hostname"))
    assert keeper.call(Op.OUTSIDE_READ, (Tag.PATH, "/tmp/link"))[1] == Path("/etc/hostname").read_bytes()


def test_what_it_has_no_right_to(keeper: Keeper) -> None:
    for attempt in ("chroot / true", "mount -t tmpfs x /mnt", "umount /proc", "unshare -r true", "touch /dev/x", "echo 1 > /proc/sys/kernel/sysrq"):
        assert keeper.sh(attempt).code != 0, attempt
    assert keeper.sh("kill -9 1; echo alive").stdout == b"alive\n"
    script = "; ".join(
        [
            "import fcntl, os, signal, socket, time",
            "a, b = socket.socketpair()",
            "fcntl.fcntl(a, fcntl.F_SETOWN, 1)",
            "fcntl.fcntl(a, fcntl.F_SETFL, os.O_ASYNC)",
            "b.send(b'x')",
            "time.sleep(0.1)",
            "print(signal.getsignal(signal.SIGIO) == signal.SIG_DFL)",
            "fcntl.fcntl(a, 10, signal.SIGKILL)",  # F_SETSIG
        ]
    )
    tried = keeper.sh(f'/usr/bin/python3 -c "{script}"')
    assert tried.stdout == b"True\n" and b"PermissionError" in tried.stderr
    assert b"status\tSigIgn\t0000000010000000\n" in keeper.call(Op.INSPECT)[1], "SIGIO, by the first process"
    assert b"CapEff:\t00000000000005fb" in keeper.sh("cat /proc/self/status").stdout
    assert keeper.sh("ls -A /proc/self/fd | wc -l").stdout.strip() in (b"4", b"3")


def test_terminals_are_put_back(keeper: Keeper) -> None:
    """They are the whole container's: an episode that took them away took them from all that follow."""
    if not os.path.exists("/dev/pts/ptmx"):
        pytest.skip("no /dev/pts/ptmx here")
    before = os.stat("/dev/pts/ptmx").st_mode
    assert keeper.sh("chmod o+x /dev/pts/ptmx").code == 0
    try:
        assert os.stat("/dev/pts/ptmx").st_mode == before | 0o001, "control: it is this machine's"
        keeper.reset()
        assert os.stat("/dev/pts/ptmx").st_mode == before
    finally:
        os.chmod("/dev/pts/ptmx", before & 0o7777)


def test_it_is_for_containers_only(keeper_binary: Path, scratch: Path) -> None:
    (scratch / "run").mkdir()
    with Hub(keeper_binary, mode="overlay", scratch=scratch) as hub, pytest.raises(KeeperError) as refused:
        hub.create(CHROOT, (Tag.PATH, str(scratch / "run")))
    assert refused.value.errno == errno.EOPNOTSUPP
    assert list((scratch / "run").iterdir()) == []
    bare = Hub(keeper_binary, args=["--isolation", "none", "--cgroups", "none"], mode="overlay", scratch=scratch)
    with bare as hub:
        for _ in range(30):  # its keeper says why and ends: of both either is heard first
            with pytest.raises(KeeperError, match="needs a place") as refused:
                hub.create(CHROOT, (Tag.PATH, "relative"), base=[])
            assert refused.value.errno == errno.EINVAL
