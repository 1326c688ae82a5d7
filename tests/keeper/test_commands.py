"""Commands against the C side: streams, limits, trees, byte-exactness."""

from __future__ import annotations

import hashlib
import os
import signal
import struct
import time

import pytest
from rawclient import Hub, Keeper, KeeperError

from rlsandbox.keeper.wire import WINDOW, ExitFlag, Op, Tag, Type


def alive(keeper: Keeper, mark: str) -> int:
    return int(keeper.sh(f"cat /proc/[0-9]*/cmdline 2>/dev/null | tr '\\0' ' ' | grep -o '{mark[0]}[{mark[1:]}]' | wc -l").stdout)


def test_bytes_are_bytes(keeper: Keeper) -> None:
    assert keeper.sh(r"printf '\377\n\000x'").stdout == b"\xff\n\0x"


def test_large_output_is_exact(keeper: Keeper) -> None:
    r = keeper.sh("head -c 20000000 /dev/zero; seq 1 300000 >&2")
    assert len(r.stdout) == 20_000_000 and set(r.stdout) == {0}
    assert r.stderr == b"".join(b"%d\n" % i for i in range(1, 300_001))


@pytest.mark.parametrize("limit", [1, 2, 1000, 65536, 1 << 20, 4 << 20])
def test_output_limit_keeps_head_and_tail(keeper: Keeper, limit: int) -> None:
    whole = b"".join(b"%d\n" % i for i in range(1, 300_001))
    r = keeper.sh("seq 1 300000", output_limit=limit)
    assert r.exit[Tag.STDOUT_SIZE] == len(whole)
    if limit >= len(whole):
        assert r.stdout + r.tail[1] == whole
    else:
        assert r.stdout == whole[: limit // 2]
        assert r.tail[1] == whole[len(whole) - (limit - limit // 2) :]


def test_output_limit_does_not_wait_for_the_client(keeper: Keeper) -> None:
    t = time.monotonic()
    r = keeper.sh("head -c 300000000 /dev/zero | tr '\\0' x; echo end", output_limit=1 << 20)
    assert r.exit[Tag.STDOUT_SIZE] == 300_000_004 and r.tail[1].endswith(b"xend\n")
    assert time.monotonic() - t < 50


def test_credit_holds_a_command_back(keeper: Keeper) -> None:
    ch = keeper.spawn("head", "-c", "2000000", "/dev/zero")
    other = keeper.sh("echo other").stdout
    assert other == b"other\n"
    got = 0
    while keeper.waiting.get(ch):
        kind, _, _, payload = keeper.next(ch)
        got += len(payload) if kind == Type.DATA else 0
    assert got <= WINDOW
    keeper.send(Type.CREDIT, ch, struct.pack("<I", got), 1)
    r = keeper.finish(ch)
    assert got + len(r.stdout) == 2_000_000


def test_stdin_both_ways_100_mb(keeper: Keeper) -> None:
    ch = keeper.spawn("cat", stdin=1)
    chunk, total = os.urandom(32000), 100_000_000
    sent, room, out = hashlib.sha256(), WINDOW, hashlib.sha256()
    left, size = total, 0
    while True:
        while left and room:
            piece = chunk[: min(room, left, 32000)]
            keeper.send(Type.DATA, ch, piece)
            sent.update(piece)
            left -= len(piece)
            room -= len(piece)
            if not left:
                keeper.send(Type.EOF, ch)
        kind, _, stream, payload = keeper.next(ch)
        if kind == Type.DATA:
            out.update(payload)
            size += len(payload)
            keeper.send(Type.CREDIT, ch, struct.pack("<I", len(payload)), stream)
        elif kind == Type.CREDIT:
            room += struct.unpack("<I", payload)[0]
        elif kind == Type.EXIT:
            break
    assert size == total and out.digest() == sent.digest()


def test_stdin_that_nobody_reads(keeper: Keeper) -> None:
    ch = keeper.spawn("sh", "-c", "exec 0<&-; sleep 0.2; echo done", stdin=1)
    room = WINDOW
    while room:
        keeper.send(Type.DATA, ch, b"x" * min(room, 32000))
        room -= min(room, 32000)
    assert keeper.finish(ch).stdout == b"done\n"


def test_no_stdin_is_empty(keeper: Keeper) -> None:
    assert keeper.sh("read x; echo $?").stdout == b"1\n"


def test_merge(keeper: Keeper) -> None:
    r = keeper.sh("echo a; echo b >&2; echo c", merge=1)
    assert r.stdout == b"a\nb\nc\n" and r.stderr == b""


def test_many_and_long_arguments(keeper: Keeper) -> None:
    args = [f"argument-{i}-" + "x" * 100 for i in range(10_000)]
    r = keeper.run("printf", "%s\\n", *args)
    assert r.stdout.decode().split() == args


def test_script_of_200_kb(keeper: Keeper) -> None:
    script = "".join(f"a={i}\n" for i in range(30_000)) + "echo $a $#\n"
    assert len(script) > 200_000
    r = keeper.run("sh", "/dev/fd/9", "x", "y", script=script)
    assert r.stdout == b"29999 2\n"


def test_an_argument_that_is_too_long_is_said(keeper: Keeper) -> None:
    with pytest.raises(KeeperError, match="Argument list too long"):
        keeper.run("echo", "x" * 200_000)


def test_control_pipes(keeper: Keeper) -> None:
    ch = keeper.spawn("sh", "-c", "read x <&8; echo got $x >&9; echo out", control=1)
    keeper.send(Type.DATA, ch, b"hello\n", 3)
    r = keeper.finish(ch)
    assert r.out[4] == b"got hello\n" and r.stdout == b"out\n"


def test_rlimits_and_umask(keeper: Keeper) -> None:
    r = keeper.sh("ulimit -n; umask", rlimit="nofile=77", umask=0o27)
    assert r.stdout == b"77\n0027\n"


def test_working_directory(keeper: Keeper) -> None:
    assert keeper.sh("pwd", cwd="/usr").stdout == b"/usr\n"
    with pytest.raises(KeeperError, match="/none"):
        keeper.sh("pwd", cwd="/none")


def test_users(keeper: Keeper) -> None:
    if "ids=one" in keeper.welcome[Tag.FACT]:
        pytest.skip("one id only")
    r = keeper.sh("id -u; id -g; echo $HOME $USER; echo x > /dev/stdout; touch /x", user="daemon")
    assert r.stdout == b"1\n1\n/usr/sbin daemon\nx\n" and b"denied" in r.stderr
    assert keeper.sh("id -u; id -g", user="1234:5").stdout == b"1234\n5\n"
    with pytest.raises(KeeperError, match="no-such-user"):
        keeper.sh("id", user="no-such-user")


def test_background_child_neither_blocks_nor_dies(keeper: Keeper) -> None:
    t = time.monotonic()
    r = keeper.sh("sleep 31.5 & echo hi", timeout_ms=5000)
    assert r.stdout == b"hi\n" and time.monotonic() - t < 4 and not r.exit[Tag.FLAGS]
    assert alive(keeper, "sleep 31.5") == 1


def test_background_output_goes_nowhere_and_breaks_nothing(keeper: Keeper) -> None:
    keeper.sh("(sleep 0.1; i=0; while [ $i -lt 50000 ]; do echo line; i=$((i+1)); done; echo $? > /tmp/end) & echo hi")
    for _ in range(200):
        if b"0" in keeper.sh("cat /tmp/end 2>/dev/null").stdout:
            break
        time.sleep(0.05)
    assert keeper.read("/tmp/end") == b"0\n"


TREE = """
trap '' TERM INT HUP
setsid sh -c 'sleep 41.5 & sleep 41.5' &
( (sleep 41.5 &) ; (setsid sleep 41.5 &) )
sh -c 'trap "" TERM; sleep 41.5; sleep 41.5' &
sleep 41.5 & kill -STOP $!
sleep 41.5
"""


def test_timeout_kills_the_whole_tree(keeper: Keeper) -> None:
    t = time.monotonic()
    r = keeper.sh(TREE, timeout_ms=700)
    assert r.exit[Tag.FLAGS] == ExitFlag.TIMED_OUT and r.code == -signal.SIGKILL
    assert 0.6 < time.monotonic() - t < 10
    assert alive(keeper, "sleep 41.5") == 0


def test_cancel_kills_the_whole_tree(keeper: Keeper) -> None:
    ch = keeper.spawn("sh", "-c", TREE)
    while alive(keeper, "sleep 41.5") < 7:
        time.sleep(0.02)
    keeper.send(Type.CANCEL, ch)
    r = keeper.finish(ch)
    assert r.exit[Tag.FLAGS] == ExitFlag.CANCELLED
    assert alive(keeper, "sleep 41.5") == 0


def test_cancel_kills_a_fork_storm(keeper: Keeper) -> None:
    ch = keeper.spawn("sh", "-c", "ulimit -u 300; f() { f | f & }; f; sleep 51.5", rlimit="nproc=300")
    time.sleep(0.5)
    keeper.send(Type.CANCEL, ch)
    keeper.finish(ch)
    assert int(keeper.sh("ls -d /proc/[0-9]* | wc -l").stdout) < 8


def test_signals(keeper: Keeper) -> None:
    ch = keeper.spawn("sh", "-c", "trap 'echo got; exit 4' USR1; echo up; while :; do sleep 0.05; done")
    while keeper.next(ch)[0] != Type.DATA:
        pass
    keeper.send(Type.SIGNAL, ch, bytes([signal.SIGUSR1]))
    r = keeper.finish(ch)
    assert r.stdout == b"got\n" and r.code == 4
    ch = keeper.spawn("sh", "-c", "sleep 61.5 & sleep 61.5")
    while alive(keeper, "sleep 61.5") < 2:
        time.sleep(0.02)
    keeper.send(Type.SIGNAL, ch, bytes([signal.SIGTERM, 1]))
    # the shell may see its child's end before its own signal comes
    assert keeper.finish(ch).code in (-signal.SIGTERM, 128 + signal.SIGTERM)
    deadline = time.monotonic() + 10
    while alive(keeper, "sleep 61.5") and time.monotonic() < deadline:  # each ends by a signal of its own
        time.sleep(0.02)
    assert alive(keeper, "sleep 61.5") == 0


def test_a_command_that_kills_everybody(keeper: Keeper) -> None:
    other = keeper.spawn("sleep", "1000")
    assert keeper.next(other)[0] == Type.STARTED  # one that has not begun is begun after it
    r = keeper.sh("kill -9 -1; echo never")
    assert r.code == -signal.SIGKILL or b"never" in r.stdout
    assert keeper.finish(other).code == -signal.SIGKILL
    assert keeper.sh("echo still").stdout == b"still\n"


def test_kill_all(keeper: Keeper) -> None:
    keeper.sh("sleep 1000 & setsid sleep 1000 &")
    running = keeper.spawn("sleep", "1000")
    keeper.call(Op.KILL_ALL)
    assert keeper.finish(running).code == -signal.SIGKILL
    assert int(keeper.sh("ls -d /proc/[0-9]* | wc -l").stdout) <= 5  # the first, one that waits for a command, and these


def test_reset_ends_running_commands(keeper: Keeper) -> None:
    ch = keeper.spawn("sleep", "1000")
    assert keeper.next(ch)[0] == Type.STARTED
    keeper.reset()
    assert keeper.finish(ch).exit[Tag.FLAGS] == ExitFlag.CANCELLED
    assert keeper.sh("echo on").stdout == b"on\n"


def test_200_commands_at_once(keeper: Keeper) -> None:
    channels = [keeper.spawn("sh", "-c", f"echo start {i}; head -c {i * 1000} /dev/zero; echo err {i} >&2; exit {i}") for i in range(200)]
    for i, ch in enumerate(channels):
        r = keeper.finish(ch)
        assert r.stdout == b"start %d\n" % i + b"\0" * (i * 1000)
        assert r.stderr == b"err %d\n" % i and r.code == i


def test_200_sandboxes_at_once(hub: Hub) -> None:
    keepers = []
    begun = [hub.create_begin() for _ in range(200)]
    for ch in begun:
        keepers.append(hub.create_end(ch))
    names = [k.welcome[Tag.MEMBER][0] for k in keepers]
    assert names == [f"m{i}" for i in range(1, 201)]
    running = [k.spawn("sh", "-c", f"echo {i} > /tmp/f; sleep 0.1; cat /tmp/f; hostname") for i, k in enumerate(keepers)]
    for i, (k, ch) in enumerate(zip(keepers, running, strict=True)):
        assert k.finish(ch).stdout == b"%d\nsandbox\n" % i


def test_no_descriptor_leaks(hub: Hub) -> None:
    keeper = hub.create()

    def under(pid: int, name: str) -> list[int]:
        return [int(p) for p in os.popen(f"pgrep -P {pid} {name}").read().split()]

    # not the one that waits for the next sandbox, which has no episode
    (mine,) = [pid for pid in under(hub.process.pid, "rls-keeper") if under(pid, "rls-init")]

    def at_rest() -> tuple[int, int]:
        """Descriptors of the hub and the keeper once they have made ahead, and taken apart, what they do when nobody waits."""
        seen: list[tuple[int, int]] = []
        for _ in range(200):
            seen.append((len(os.listdir(f"/proc/{hub.process.pid}/fd")), len(os.listdir(f"/proc/{mine}/fd"))))
            if len(seen) >= 15 and len(set(seen[-15:])) == 1:
                break
            time.sleep(0.02)
        return seen[-1]

    keeper.sh("echo x")
    before = at_rest()
    for _ in range(20):
        keeper.sh("echo x; sleep 0.01 &")
        keeper.write("/tmp/x", b"x")
        keeper.read("/tmp/x")
        with pytest.raises(KeeperError):
            keeper.run("none")
        keeper.reset()
    keeper.sh("echo x")
    assert at_rest() == before


def test_control_comes_after_what_was_printed(keeper: Keeper) -> None:
    ch = keeper.spawn("sh", "-c", "while read x <&8; do seq 1 20000; seq 1 5000 >&2; echo $x >&9; done", control=1)
    out, err = b"".join(b"%d\n" % i for i in range(1, 20_001)), b"".join(b"%d\n" % i for i in range(1, 5_001))
    for i in range(20):
        keeper.send(Type.DATA, ch, b"%d\n" % i, 3)
        got = {1: b"", 2: b"", 4: b""}
        while not got[4]:
            kind, _, stream, payload = keeper.next(ch)
            if kind == Type.DATA:
                got[stream] += payload
                keeper.send(Type.CREDIT, ch, struct.pack("<I", len(payload)), stream)
        assert got == {1: out, 2: err, 4: b"%d\n" % i}
    keeper.send(Type.CANCEL, ch)
    keeper.finish(ch)


STORM = "import os, time\nwhile True:\n    try:\n        os.fork()\n    except OSError:\n        time.sleep(0.01)\n"


def test_a_fork_storm_leaves_the_keeper_room(hub: Hub) -> None:
    keeper = hub.create((Tag.PIDS, 40))
    script = "i=0; while :; do sleep 1000 & i=$((i+1)); done"
    storms = [keeper.spawn("python3", "-c", STORM) if i else keeper.spawn("sh", "-c", f"{script}; sleep 1000") for i in range(2)]
    time.sleep(0.5)
    for _ in range(10):
        assert keeper.run("echo", "still here").stdout == b"still here\n"
        assert keeper.read("/etc/passwd").startswith(b"root")
    processes = int(keeper.run("ls", "/proc").stdout.count(b"\n"))
    assert processes > 30
    for ch in storms:
        keeper.send(Type.CANCEL, ch)
        try:
            keeper.finish(ch)
        except KeeperError:
            pass
    keeper.call(Op.KILL_ALL)
    assert len([p for p in keeper.sh("ls /proc").stdout.split() if p.isdigit()]) <= 5  # the first, one that waits for a command, and these


def test_nothing_is_left_when_the_end_is_told(keeper: Keeper) -> None:
    """Also not as a zombie, and also on a machine with no time for the dying."""
    for i in range(40):
        ch = keeper.spawn("sh", "-c", "for i in 1 2 3 4 5 6; do sleep 1000 & done; echo $! $$; wait")
        line = b""
        while not line.endswith(b"\n"):
            kind, _, _, payload = keeper.next(ch)
            line += payload if kind == Type.DATA else b""
        keeper.send(Type.CANCEL, ch)
        keeper.finish(ch)
        pids = line.decode().split()
        assert keeper.sh(f"kill -0 {pids[0]} || kill -0 {pids[1]}").code != 0, i


def test_no_command_is_lost_to_a_killed_standby(keeper: Keeper) -> None:
    """The process that waits for the next command is killed with all others; what it was given is done all the same, once."""
    for i in range(60):
        first = keeper.spawn("sh", "-c", "kill -9 -1")
        last = keeper.spawn("sh", "-c", f"cat; echo {i} >> /tmp/done", stdin=1)
        keeper.send(Type.DATA, last, b"x" * 1000, 0)
        keeper.send(Type.EOF, last, b"", 0)
        keeper.finish(first)
        r = keeper.finish(last)
        if r.code == 0:
            assert r.stdout == b"x" * 1000
        else:
            assert r.code == -signal.SIGKILL  # it was running when everybody was killed
    for i in range(60):
        keeper.sh("kill -9 -1")
        assert keeper.run("sh", "-c", f"echo {i}; echo {i} >> /tmp/more").stdout == b"%d\n" % i
        time.sleep(0.003 * (i % 3))
    assert keeper.sh("sort -n /tmp/more").stdout == b"".join(b"%d\n" % i for i in range(60))
    assert b"".join(sorted(set(keeper.sh("cat /tmp/done").stdout.splitlines(True)))) == b"".join(sorted(keeper.sh("cat /tmp/done").stdout.splitlines(True)))


def test_a_stopped_standby_starts_commands(keeper: Keeper) -> None:
    for _ in range(5):
        time.sleep(0.02)
        keeper.sh("kill -STOP -1")
        time.sleep(0.02)
        assert keeper.sh("echo on").stdout == b"on\n"
