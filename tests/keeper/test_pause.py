"""Pausing keeps processes; what was stopped before stays stopped; reset and dispose work on a paused sandbox."""

from __future__ import annotations

import errno
import glob
import time
from pathlib import Path

import pytest
from rawclient import Hub, Keeper, KeeperError

from rlsandbox.keeper.wire import ExitFlag, Op, Tag, Type

TICK = "trap '' TERM; i=0; while :; do i=$((i+1)); echo $i > /tmp/tick; sleep 0.02; done"


def count(keeper: Keeper, path: str = "/tmp/tick") -> int:
    try:
        return int(keeper.call(Op.OUTSIDE_READ, (Tag.PATH, path))[1] or b"0")
    except KeeperError:
        return 0


def wait_for_ticks(keeper: Keeper, path: str = "/tmp/tick") -> int:
    begin = count(keeper, path)
    for _ in range(500):
        if count(keeper, path) > begin + 2:
            return count(keeper, path)
        time.sleep(0.01)
    raise AssertionError("it does not run")


def test_pause_and_resume(keeper: Keeper) -> None:
    running = keeper.spawn("sh", "-c", TICK)
    keeper.sh(f"(setsid sh -c '{TICK.replace(chr(39), chr(34)).replace('tick', 'tock')}' &) ; sleep 500 & kill -STOP $!")
    wait_for_ticks(keeper)
    wait_for_ticks(keeper, "/tmp/tock")
    keeper.call(Op.PAUSE)
    keeper.call(Op.PAUSE)
    stood = count(keeper), count(keeper, "/tmp/tock")
    time.sleep(0.3)
    assert (count(keeper), count(keeper, "/tmp/tock")) == stood
    keeper.write("/tmp/file", b"files can be read and written meanwhile")
    with pytest.raises(KeeperError) as caught:
        keeper.sh("true")
    assert caught.value.errno == errno.EBUSY
    keeper.call(Op.RESUME)
    keeper.call(Op.RESUME)
    wait_for_ticks(keeper)
    wait_for_ticks(keeper, "/tmp/tock")
    states = keeper.sh("for p in /proc/[0-9]*; do grep -q 500 $p/cmdline && grep State $p/status; done").stdout
    assert b"T (stopped)" in states
    keeper.send(Type.CANCEL, running)
    assert keeper.finish(running).exit[Tag.FLAGS] == ExitFlag.CANCELLED


def test_cancel_while_paused(keeper: Keeper) -> None:
    running = keeper.spawn("sh", "-c", TICK)
    wait_for_ticks(keeper)
    keeper.call(Op.PAUSE)
    keeper.send(Type.CANCEL, running)
    assert keeper.finish(running).exit[Tag.FLAGS] == ExitFlag.CANCELLED
    keeper.call(Op.RESUME)


def test_a_deadline_stands_still_too(keeper: Keeper) -> None:
    running = keeper.spawn("sh", "-c", "sleep 0.5; echo done", timeout_ms=1500)
    assert keeper.next(running)[0] == Type.STARTED
    keeper.call(Op.PAUSE)
    time.sleep(1.7)
    keeper.call(Op.RESUME)
    r = keeper.finish(running)
    assert (r.stdout, r.exit[Tag.FLAGS]) == (b"done\n", 0)


def test_reset_seal_and_dispose_of_a_paused_one(hub: Hub) -> None:
    keeper = hub.create()
    for way in ("reset", "seal", "kill", "dispose"):
        keeper.spawn("sh", "-c", TICK)
        wait_for_ticks(keeper)
        keeper.call(Op.PAUSE)
        if way == "reset":
            keeper.reset()
            assert keeper.sh("ls /tmp").stdout == b""
        elif way == "seal":
            keeper.call(Op.SEAL, (Tag.LAYER, "a"), (Tag.FLAGS, 1))
            assert keeper.sh("ls /tmp").stdout == b"tick\n"
        elif way == "kill":
            keeper.call(Op.KILL_ALL)
            keeper.call(Op.RESUME)
            assert keeper.sh("echo on").stdout == b"on\n"
        else:
            hub.call(Op.HUB_DISPOSE, (Tag.MEMBER, "m1"))
            assert Tag.MEMBER not in hub.call(Op.HUB_LIST)[0]


def test_a_killed_hub_leaves_no_group(keeper_binary: Path, scratch: Path) -> None:
    def groups(hub: Hub) -> list[Path]:
        # Not by pathlib: its glob raises where somebody's group goes while it looks.
        return [Path(at) for at in glob.glob(f"/sys/fs/cgroup/**/rlsandbox.{hub.process.pid}.*", recursive=True)]

    with Hub(keeper_binary, scratch=scratch) as hub:
        keeper = hub.create((Tag.PIDS, 100))
        keeper.spawn("sh", "-c", TICK)
        wait_for_ticks(keeper)
        keeper.call(Op.PAUSE)
        before = groups(hub)
        hub.process.kill()
        hub.process.wait()
        time.sleep(0.3)
    with Hub(keeper_binary, scratch=scratch) as after:
        after.create()
        assert not groups(hub), before
        mine = groups(after)
    assert not groups(after), mine
