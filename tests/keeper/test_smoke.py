"""The thin whole path: a hub, a sandbox, commands, files, a reset, an end."""

from __future__ import annotations

import contextlib
import errno
import os
import select
import signal
import time
from collections.abc import Collection
from pathlib import Path

import pytest
from rawclient import Hub, Keeper, KeeperError

from rlsandbox.keeper.wire import Op, Tag, Type


def test_command(keeper: Keeper) -> None:
    r = keeper.sh("echo out; echo err >&2; exit 3")
    assert (r.stdout, r.stderr, r.code) == (b"out\n", b"err\n", 3)
    assert r.pid > 1
    assert r.exit[Tag.STDOUT_SIZE] == 4


def test_program_that_does_not_exist(keeper: Keeper) -> None:
    with pytest.raises(KeeperError) as caught:
        keeper.run("no-such-program")
    assert caught.value.errno == errno.ENOENT


def test_environment_and_descriptors_are_the_commands_own(keeper: Keeper) -> None:
    r = keeper.sh("tr '\\0' '\\n' < /proc/self/environ; echo --; ls /proc/self/fd", env={"PATH": "/usr/bin:/bin", "X": "1"})
    environ, fds = r.stdout.decode().split("--")
    roots = {"HOME=/root", "USER=root", "LOGNAME=root", "SHELL=/bin/sh"}
    assert set(environ.split()) - {"PWD=/"} == {"PATH=/usr/bin:/bin", "X=1"} | roots
    assert fds.split() == ["0", "1", "2", "3"]


def test_files(keeper: Keeper) -> None:
    data = os.urandom(1_000_000)
    keeper.write("/tmp/a/b", data, file_mode=0o640, flags=2)
    assert keeper.read("/tmp/a/b") == data
    assert keeper.read("/tmp/a/b", offset=10, length=5) == data[10:15]
    assert keeper.sh("stat -c %a /tmp/a/b").stdout == b"640\n"
    fields, entries = keeper.call(Op.LIST, (Tag.PATH, "/tmp/a"))
    assert fields[Tag.COUNT] == 1 and entries.endswith(b"b") and entries[:1] == b"f"
    with pytest.raises(KeeperError) as caught:
        keeper.read("/tmp/none")
    assert caught.value.errno == errno.ENOENT


def test_reset_puts_everything_back(keeper: Keeper) -> None:
    keeper.sh("echo x > /tmp/x; echo y > /etc/y; rm /etc/group; sleep 1000 & echo z > /dev/shm/z")
    keeper.reset()
    r = keeper.sh("ls /tmp /dev/shm; ls /etc/y; cat /etc/group | head -1; ls /proc | grep -c '^[0-9]'")
    assert b"root:" in r.stdout and b"x\n" not in r.stdout and b"z\n" not in r.stdout
    assert b"/etc/y" in r.stderr


def test_two_sandboxes_see_nothing_of_each_other(hub: Hub) -> None:
    a, b = hub.create(), hub.create()
    a.write("/tmp/secret", b"a")
    assert b.sh("ls /tmp").stdout == b""


def test_everything_ends_with_the_client(hub: Hub) -> None:
    hub.create().spawn("sleep", "1000")
    fields, _ = hub.call(Op.HUB_LIST)
    assert fields[Tag.MEMBER] == ["m1"]
    hub.sock.close()
    assert hub.process.wait(5) == 0


def test_dispose(hub: Hub) -> None:
    keeper = hub.create()
    keeper.spawn("sleep", "1000")
    hub.call(Op.HUB_DISPOSE, (Tag.MEMBER, "m1"))
    assert Tag.MEMBER not in hub.call(Op.HUB_LIST)[0]
    with pytest.raises((EOFError, ConnectionError)):
        while True:
            keeper.frame()


def test_create_names_what_failed(hub: Hub, tmp_path: Path) -> None:
    with pytest.raises(KeeperError, match="no-such-directory"):
        hub.create(base=[(Tag.ROOT, str(tmp_path / "no-such-directory"))])


def test_latencies(hub: Hub, capsys: pytest.CaptureFixture[str]) -> None:
    """Printed, not asserted: this machine is shared."""
    import subprocess

    def clock(what: str, n: int, fn: object) -> None:
        samples = []
        for _ in range(n):
            t = time.perf_counter()
            fn()  # type: ignore[operator]
            samples.append((time.perf_counter() - t) * 1e3)
        samples.sort()
        with capsys.disabled():
            print(f"  {what}: median {samples[n // 2]:.2f} ms, best {samples[0]:.2f}, worst {samples[-1]:.2f}")

    clock("create", 20, hub.create)
    keeper = hub.create()
    clock("reset, nothing done", 100, keeper.reset)

    def dirty() -> None:
        keeper.write("/tmp/x", b"x" * 1000)

    def both() -> None:
        dirty()
        t = time.perf_counter()
        keeper.reset()
        dirt.append((time.perf_counter() - t) * 1e3)

    dirt: list[float] = []
    for _ in range(100):
        both()
    dirt.sort()
    with capsys.disabled():
        print(f"  reset, small dirt: median {dirt[50]:.2f} ms")
    clock("keeper /bin/true", 200, lambda: keeper.run("/bin/true"))
    clock("subprocess /bin/true", 200, lambda: subprocess.run(["/bin/true"], capture_output=True))


def test_more_about_files(keeper: Keeper) -> None:
    keeper.write("/tmp/d", b"", flags=8 | 2, file_mode=0o700)
    keeper.write("/tmp/d", b"", flags=8)
    assert keeper.sh("stat -c %a /tmp/d").stdout == b"700\n"
    keeper.write("/tmp/d/l", b"/etc/passwd", flags=16)
    keeper.write("/tmp/d/l", b"/etc/group", flags=16)
    assert keeper.read("/tmp/d/l", flags=1) == b"/etc/group"
    keeper.write("/tmp/d/s", b"middle", offset=5 << 20, size=1 << 30)
    fields, data = keeper.call(Op.READ, (Tag.PATH, "/tmp/d/s"), (Tag.FLAGS, 2))
    assert fields[Tag.OFFSET] == 5 << 20 and data.startswith(b"middle") and len(data) <= 4096 and fields[Tag.SIZE] == 1 << 30
    fields, data = keeper.call(Op.READ, (Tag.PATH, "/tmp/d/s"), (Tag.FLAGS, 2), (Tag.OFFSET, 6 << 20))
    assert fields[Tag.OFFSET] == 1 << 30 and data == b""
    assert keeper.call(Op.READ, (Tag.PATH, "/proc/version"), (Tag.FLAGS, 2))[1] == keeper.read("/proc/version") != b""
    with pytest.raises(KeeperError, match="Directory not empty"):
        keeper.call(Op.REMOVE, (Tag.PATH, "/tmp/d"))
    keeper.sh("mkdir -p /tmp/d/1/2/3; echo x > /tmp/d/1/2/3/f; ln -s /usr /tmp/d/1/usr")
    keeper.call(Op.REMOVE, (Tag.PATH, "/tmp/d"), (Tag.FLAGS, 1))
    assert keeper.sh("ls /tmp; ls -d /usr").stdout == b"/usr\n"
    keeper.sh("mkfifo /tmp/fifo")
    with pytest.raises(KeeperError) as caught:
        keeper.read("/tmp/fifo")
    assert caught.value.errno == errno.EINVAL
    keeper.sh("head -c 3 /dev/zero > /tmp/f; chmod 604 /tmp/f")
    keeper.write("/tmp/f", b"abcdef")
    keeper.write("/tmp/f", b"X", offset=1)
    assert keeper.read("/tmp/f") == b"aXcdef" and keeper.sh("stat -c %a /tmp/f").stdout == b"604\n"


def initial(hub: Hub) -> list[int]:
    """First processes of episodes of all sandboxes, the oldest first (pids wrap)."""
    keepers = ",".join(os.popen(f"pgrep -P {hub.process.pid} rls-keeper").read().split())
    found = []
    for pid in map(int, os.popen(f"pgrep -P {keepers} rls-init").read().split()):
        with contextlib.suppress(OSError):
            stat = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
            found.append((int(stat[19]), pid))
    return [pid for _, pid in sorted(found)]


def test_an_episode_made_ahead_that_died(hub: Hub) -> None:
    """After a command the keeper makes the next episode ahead; without it a reset makes another."""
    keeper = hub.create()
    for how in (9, 0):
        keeper.write("/tmp/x", b"x")
        inits: list[int] = []
        for _ in range(200):
            inits = initial(hub)
            if len(inits) == 2:
                break
            time.sleep(0.01)
        assert len(inits) == 2
        if how == 9:
            os.kill(inits[-1], 9)
            time.sleep(0.1)
        keeper.reset()
        assert keeper.sh("ls /tmp").stdout == b""
    time.sleep(0.1)
    keeper.reset()
    assert len(initial(hub)) <= 2


def test_an_init_that_is_killed_while_it_starts_is_replaced(hub: Hub) -> None:
    """As by the machine's out-of-memory killer."""
    keeper = hub.create()
    pid = Path(f"/proc/{initial(hub)[0]}/stat").read_text().rpartition(")")[2].split()[1]
    children = Path(f"/proc/{pid}/task/{pid}/children")
    if not children.exists():
        pytest.skip("the kernel does not tell a process's children")
    killed = number = 0
    while killed < 3 and number < 300:  # each is a race that it may win
        number += 1
        before = set(children.read_text().split())
        channel = keeper.request(Op.SEAL, (Tag.LAYER, f"s{number}"), (Tag.FLAGS, 1))
        while not select.select([keeper.sock], [], [], 0)[0]:
            new = set(children.read_text().split()) - before
            if new:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(int(new.pop()), 9)
                    killed += 1
                break
        keeper.reply(channel)  # whether it was ready by then or not
        keeper.reset()
        assert keeper.sh("echo on").stdout == b"on\n"
    assert killed > 2


def switches(hub: Hub) -> int:
    """How often the keepers of a hub have gone to sleep so far."""
    total = 0
    for pid in os.popen(f"pgrep -P {hub.process.pid} rls-keeper").read().split():
        total += int(Path("/proc", pid, "status").read_text().split("\nvoluntary_ctxt_switches:")[1].split()[0])
    return total


@pytest.mark.parametrize("kind", ["used", "bare", "paused", "dead", "near its limit"])
def test_a_keeper_at_rest_does_not_wake(hub: Hub, kind: str) -> None:
    fields = {"bare": [(Tag.ISOLATION, "none")], "near its limit": [(Tag.MEMORY_BYTES, 8 << 20)]}.get(kind, [])
    keeper = hub.create(*fields, **({"base": []} if kind == "bare" else {}))
    assert keeper.sh("true").code == 0
    if kind == "paused":
        keeper.call(Op.PAUSE)
    if kind == "dead":
        os.kill(initial(hub)[0], 9)
        assert keeper.next(0)[0] == Type.EVENT
    time.sleep(0.2)
    before = switches(hub)
    time.sleep(0.5)
    assert switches(hub) - before < 25  # a look every 2 ms would be 250


def test_names_of_the_hub_are_refused(hub: Hub) -> None:
    with pytest.raises(KeeperError) as caught:
        hub.create(name="spare.1")
    assert caught.value.errno == errno.EINVAL


def below(pid: int, name: str = "") -> set[int]:
    """Children of a process: those of that name, or all."""
    found = set()
    for entry in os.listdir("/proc"):
        with contextlib.suppress(OSError, ValueError):  # it is no process, or has ended meanwhile
            comm, _, rest = Path(f"/proc/{int(entry)}/stat").read_text().partition("(")[2].rpartition(") ")
            if int(rest.split()[1]) == pid and name in ("", comm):
                found.add(int(entry))
    return found


def children(hub: Hub, name: str = "") -> set[int]:
    return below(hub.process.pid, name)


def a_spare(hub: Hub, *, after: Collection[int] = ()) -> int:
    """The keeper that stands ready, whole but for its name, and is none of *after*."""
    for _ in range(6000):
        if found := children(hub, "rls-ahead") - set(after):
            return found.pop()
        time.sleep(0.01)
    raise AssertionError("nothing was made ahead")


def is_gone(hub: Hub, spare: int) -> None:
    for _ in range(6000):
        if spare not in children(hub):
            return
        time.sleep(0.01)
    raise AssertionError("it lives on")


def test_what_two_in_a_row_wanted_stands_ready(hub: Hub) -> None:
    """The third is handed over: the same sandbox as any other, under its own name, and another one is made ahead."""
    made = [hub.create(), hub.create()]
    spare = a_spare(hub)
    third = hub.create(name="third")
    assert spare in children(hub, "rls-keeper")
    assert third.welcome[Tag.MEMBER] == ["third"]
    assert third.sh("hostname; id -u; ls /tmp | wc -l").stdout == b"sandbox\n0\n0\n"
    for keeper in (*made, third):
        keeper.write("/tmp/x", b"x")
    third.reset()
    assert third.sh("ls /tmp").stdout == b""
    assert made[0].sh("ls /tmp").stdout == b"x\n"
    assert sorted(hub.call(Op.HUB_LIST)[0][Tag.MEMBER]) == ["m1", "m2", "third"]
    second = a_spare(hub, after={spare})
    hub.call(Op.HUB_DISPOSE, (Tag.MEMBER, "third"))
    assert spare not in children(hub, "rls-keeper")
    os.kill(second, signal.SIGKILL)  # one that died is not handed over
    is_gone(hub, second)
    fourth = hub.create()
    assert fourth.sh("echo fine").stdout == b"fine\n"


def test_only_the_like_is_handed_over(hub: Hub) -> None:
    hub.create()
    hub.create()
    spare = a_spare(hub)
    other = hub.create((Tag.PIDS, 50))
    assert spare not in children(hub, "rls-keeper")
    assert other.sh("echo fine").stdout == b"fine\n"
    again = hub.create((Tag.PIDS, 50))  # now this is what is made ahead
    assert again.sh("echo fine").stdout == b"fine\n"
    following = a_spare(hub, after={spare})
    handed = hub.create((Tag.PIDS, 50))
    assert handed.sh("echo fine").stdout == b"fine\n"
    assert following in children(hub, "rls-keeper")


def test_one_whose_episode_died_while_it_waited_is_made_anew(hub: Hub) -> None:
    hub.create()
    hub.create()
    spare = a_spare(hub)
    (init,) = below(spare, "rls-init")
    os.kill(init, signal.SIGKILL)
    is_gone(hub, spare)
    for _ in range(2):  # one that dies is not tried again at once: perhaps something here kills it
        keeper = hub.create()
        assert keeper.sh("echo fine").stdout == b"fine\n"
    assert a_spare(hub, after={spare})


def test_what_stands_ready_stands_on_what_is_there_now(hub: Hub, scratch: Path) -> None:
    shown = scratch / "shown"
    shown.mkdir()
    (shown / "f").write_text("old")
    wish = (Tag.BIND, f"/mnt={shown}")
    made = [hub.create(wish), hub.create(wish)]
    spare = a_spare(hub)
    shown.rename(scratch / "before")
    shown.mkdir()
    (shown / "f").write_text("new")
    keeper = hub.create(wish)
    assert keeper.sh("cat /mnt/f").stdout == b"new"
    assert spare not in children(hub, "rls-keeper")
    assert made[0].sh("cat /mnt/f").stdout == b"old"
    (shown / "f").write_text("newer")  # seen through the bind: another one may have been ready
    after = a_spare(hub, after={spare})
    again = hub.create(wish)
    assert again.sh("cat /mnt/f").stdout == b"newer"
    assert after in children(hub, "rls-keeper")


def test_what_cannot_be_made_cannot_be_made_ahead(hub: Hub) -> None:
    for wish in ((Tag.UPPER, "elsewhere"), (Tag.UPPER, "disk:"), (Tag.KIND, "ahead"), (Tag.KIND, "join")):
        for _ in range(4):
            with pytest.raises(KeeperError) as caught:
                hub.create(wish)
            assert caught.value.errno == errno.EINVAL
    assert not children(hub, "rls-ahead")


def test_no_look_outlives_its_episode(hub: Hub) -> None:
    """The first look is made before it is asked for; when the episode is gone meanwhile there is nothing to look at."""
    keeper = hub.create()
    (mine,) = [pid for pid in children(hub, "rls-keeper") if below(pid, "rls-init")]
    (init,) = below(mine, "rls-init")
    os.kill(init, signal.SIGKILL)
    for _ in range(1000):
        if not below(mine, "rls-init"):
            break
        time.sleep(0.01)
    with pytest.raises(KeeperError):
        keeper.call(Op.INSPECT)
    keeper.reset()
    assert keeper.sh("echo fine").stdout == b"fine\n"
