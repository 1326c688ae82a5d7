"""Isolation none: plain processes, asked for by that name only."""

from __future__ import annotations

import errno
import os
import time
from pathlib import Path

import pytest
from rawclient import Hub, Keeper, KeeperError

from rlsandbox.keeper.wire import ExitFlag, Op, Tag

MARK = f"7{os.getpid()}.00"  # seconds that nobody else sleeps
NONE = (Tag.ISOLATION, "none")


def processes(mark: str) -> int:
    """How many `sleep MARK` there are on this machine."""
    found = 0
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            found += path.read_bytes() == b"sleep\0" + mark.encode() + b"\0"
        except OSError:
            pass
    return found


def appears(mark: str) -> bool:
    for _ in range(200):
        if processes(mark):
            return True
        time.sleep(0.02)
    return False


def gone(mark: str) -> bool:
    for _ in range(200):
        if not processes(mark):
            return True
        time.sleep(0.02)
    return False


def test_commands_and_files(hub: Hub, scratch: Path) -> None:
    keeper = hub.create(NONE, (Tag.UPPER_BYTES, 1 << 20), base=[])
    assert keeper.welcome[Tag.MODE] == "replace" and "isolation=none" in keeper.welcome[Tag.FACT]
    assert "limit.disk=none" in keeper.welcome[Tag.FACT], "there is no upper layer that could hold one"
    r = keeper.sh("echo out; echo err >&2; id -u; exit 3")
    assert r.stdout.startswith(b"out\n") and r.stderr == b"err\n" and r.code == 3
    name = f"/tmp/rls-bare-{os.getpid()}"
    keeper.write(name, b"content")
    try:
        assert Path(name).read_bytes() == b"content" and keeper.read(name) == b"content"
    finally:
        os.unlink(name)
    for op in (Op.RESET, Op.INSPECT, Op.CHANGES, Op.SEAL, Op.EXPORT):
        with pytest.raises(KeeperError) as caught:
            keeper.call(op, (Tag.LAYER, "x"))
        assert caught.value.errno == errno.EOPNOTSUPP


def test_only_when_asked_for(hub: Hub) -> None:
    assert b"sandbox" in hub.create().sh("hostname").stdout


def test_trees_are_killed_and_nothing_outlives_the_sandbox(hub: Hub) -> None:
    keeper = hub.create(NONE, base=[])
    r = keeper.sh(f"setsid sh -c 'sleep {MARK}1 & sleep {MARK}1' & (sleep {MARK}1 &); sleep {MARK}1", timeout_ms=500)
    assert r.exit[Tag.FLAGS] == ExitFlag.TIMED_OUT and gone(f"{MARK}1")
    keeper.sh(f"(setsid sleep {MARK}2 &)")
    assert appears(f"{MARK}2")
    keeper.call(Op.PAUSE)
    keeper.call(Op.RESUME)
    hub.call(Op.HUB_DISPOSE, (Tag.MEMBER, "m1"))
    assert gone(f"{MARK}2")
    other = hub.create(NONE, base=[])
    other.sh(f"trap '' TERM; (setsid sleep {MARK}3 &)")
    hub.close()
    assert gone(f"{MARK}3")


def test_nothing_outlives_a_killed_hub(keeper_binary: Path, scratch: Path) -> None:
    for bare in (True, False):
        with Hub(keeper_binary, scratch=scratch) as hub:
            keeper = hub.create(NONE, base=[]) if bare else hub.create()
            keeper.sh(f"(setsid sleep {MARK}4 &)")
            assert appears(f"{MARK}4")
            hub.process.kill()
            assert gone(f"{MARK}4")


def test_a_hub_for_it_alone(keeper_binary: Path, scratch: Path) -> None:
    with Hub(keeper_binary, scratch=scratch, args=["--isolation", "none"]) as hub:
        keeper: Keeper = hub.create(NONE, base=[])
        assert keeper.sh("echo hi").stdout == b"hi\n"
        with pytest.raises(KeeperError) as caught:
            hub.create()
        assert caught.value.errno == errno.EOPNOTSUPP
