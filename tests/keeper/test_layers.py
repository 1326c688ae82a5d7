"""Sealed upper layers: primed states, forks, chains."""

from __future__ import annotations

import errno
import os
import signal
import time

import pytest
from rawclient import Hub, Keeper, KeeperError
from test_outside import changes, facts

from rlsandbox.keeper.wire import Op, Tag, Type


def seal(keeper: Keeper, name: str, kill: bool = False) -> int:
    fields, _ = keeper.call(Op.SEAL, (Tag.LAYER, name), (Tag.FLAGS, int(kill)))
    return int(fields[Tag.BYTES])


def stand_on(keeper: Keeper, name: str) -> None:
    keeper.call(Op.RESET, (Tag.LAYER, name))


def give(hub: Hub, name: str, member: str) -> None:
    hub.call(Op.HUB_GIVE_LAYER, (Tag.LAYER, name), (Tag.MEMBER, member))


def test_a_reset_returns_to_the_primed_state(keeper: Keeper) -> None:
    keeper.sh("echo primed > /etc/primed; rm /etc/group; mkdir -p /opt/x; chmod 711 /; echo u > /usr/u")
    size = seal(keeper, "primed")
    assert 0 < size < 1 << 20
    assert changes(keeper) == []
    state = "cat /etc/primed /usr/u; ls /etc/group; stat -c %a /"
    primed = keeper.sh(state)
    assert primed.stdout == b"primed\nu\n711\n" and b"No such file" in primed.stderr
    keeper.sh("echo dirt > /etc/primed; rm /usr/u; echo x > /etc/group; rm -r /opt/x")
    assert changes(keeper) == [("f", "/etc/group"), ("f", "/etc/primed"), ("x", "/opt/x"), ("x", "/usr/u")]
    stand_on(keeper, "primed")
    assert (keeper.sh(state).stdout, changes(keeper)) == (primed.stdout, [])
    assert facts(keeper)["layer"] == [["primed"]]
    stand_on(keeper, "")
    assert keeper.sh("ls /etc/primed").code != 0 and keeper.sh("head -c 4 /etc/group").stdout == b"root"
    assert "layer" not in facts(keeper)
    with pytest.raises(KeeperError) as caught:
        stand_on(keeper, "none")
    assert caught.value.errno == errno.ENOENT


def since(keeper: Keeper, layer: str) -> dict[str, str]:
    """Kind by path; what several layers have is told by the topmost."""
    found, data = {}, keeper.call(Op.CHANGES, (Tag.PATH, "/"), (Tag.LAYER, layer))[1]
    at = 0
    while at < len(data):
        n = int.from_bytes(data[at + 29 : at + 33], "little")
        found.setdefault(data[at + 33 : at + 33 + n].decode("utf-8", "surrogateescape"), chr(data[at]))
        at += 33 + n
    return found


def test_compared_with_a_layer_further_down(keeper: Keeper) -> None:
    keeper.sh("mkdir -p /opt/tool /opt/gone; echo primed >/opt/tool/a; echo b >/opt/tool/b; echo p >/opt/gone/p")
    seal(keeper, "primed")
    keeper.sh("echo fake >/opt/tool/a; rm /opt/tool/b; rm -r /opt/gone; mkdir /opt/gone; echo n >/opt/gone/new; echo s >/tmp/s; mkdir /tmp/d; echo in >/tmp/d/in")
    seal(keeper, "one")
    keeper.sh("rm /tmp/s; echo t >/tmp/t; rm -r /tmp/d; ln -s /etc /tmp/d; echo n >/opt/tool/new")
    seal(keeper, "two")
    keeper.sh("echo live >/tmp/live")
    whole = since(keeper, "primed")
    expected = {"/opt/tool/a": "f", "/opt/tool/b": "x", "/opt/tool/new": "f", "/opt/gone/p": "x", "/opt/gone/new": "f", "/tmp/t": "f",
                "/tmp/d": "l", "/tmp/live": "f"}
    assert {name: kind for name, kind in whole.items() if kind != "d"} == expected, "neither what is gone nor what lies behind a link"
    assert {name for name, kind in since(keeper, "two").items() if kind != "d"} == {"/tmp/live"}
    assert set(expected) - {"/opt/tool/b", "/opt/gone/p"} <= set(since(keeper, ""))

    def read(path: str) -> bytes:
        return keeper.call(Op.OUTSIDE_READ, (Tag.PATH, path), (Tag.FLAGS, 1), (Tag.LAYER, "primed"))[1]

    assert (read("/opt/tool/a"), read("/opt/tool/b")) == (b"primed\n", b"b\n")
    with pytest.raises(KeeperError) as caught:
        read("/tmp/t")
    assert caught.value.errno == errno.ENOENT
    for path in ("/opt", "/tmp/t", "/tmp/d"):
        keeper.call(Op.OUTSIDE_REMOVE, (Tag.PATH, path), (Tag.LAYER, "primed"))
    assert keeper.sh("cat /opt/tool/*; ls /opt/tool /opt/gone /tmp").stdout == b"primed\nb\n/opt/gone:\np\n\n/opt/tool:\na\nb\n\n/tmp:\nlive\n"
    assert {name for name, kind in since(keeper, "primed").items() if kind != "d" and name.startswith("/tmp")} == {"/tmp/live"}
    with pytest.raises(KeeperError) as caught:
        keeper.call(Op.OUTSIDE_REMOVE, (Tag.PATH, "/tmp/never"), (Tag.LAYER, "primed"))
    assert caught.value.errno == errno.ENOENT
    for op in (Op.CHANGES, Op.OUTSIDE_REMOVE):
        with pytest.raises(KeeperError) as caught:
            keeper.call(op, (Tag.PATH, "/tmp/live"), (Tag.LAYER, "nobody"))
        assert caught.value.errno == errno.ENOENT
    assert since(keeper, "two").keys() >= {"/tmp/live"}, "the keeper itself stands where it stood"
    assert [name for name, in facts(keeper)["layer"]] == ["two", "one", "primed"]


def test_sealing_while_processes_run(keeper: Keeper) -> None:
    keeper.sh("echo x > /tmp/x; sleep 1000 & exit 0")
    with pytest.raises(KeeperError) as caught:
        seal(keeper, "a")
    assert caught.value.errno == errno.EBUSY
    assert keeper.sh("cat /tmp/x; pgrep sleep || ls /proc/[0-9]*/comm | wc -l").stdout.startswith(b"x\n")
    seal(keeper, "a", kill=True)
    assert keeper.sh("cat /tmp/x").stdout == b"x\n" and "process" not in facts(keeper)
    with pytest.raises(KeeperError) as caught:
        seal(keeper, "a")
    assert caught.value.errno == errno.EEXIST


def test_parent_and_eight_forks_see_only_their_own(hub: Hub) -> None:
    parent = hub.create()
    parent.write("/tmp/f", b"start\n")
    seal(parent, "snap")
    forks = []
    for i in range(8):
        fork = hub.create(name=f"fork{i}")
        give(hub, "snap", f"fork{i}")
        stand_on(fork, "snap")
        forks.append(fork)
    everyone = [parent, *forks]
    for i, keeper in enumerate(everyone):
        assert keeper.sh(f"cat /tmp/f; echo {i} >> /tmp/f").stdout == b"start\n"
    for i, keeper in enumerate(everyone):
        assert keeper.sh("cat /tmp/f").stdout == b"start\n%d\n" % i
    hub.call(Op.HUB_DROP_LAYER, (Tag.LAYER, "snap"))
    hub.call(Op.HUB_DISPOSE, (Tag.MEMBER, "m1"))
    assert forks[3].sh("cat /tmp/f").stdout == b"start\n4\n"
    stand_on(forks[3], "snap")
    assert forks[3].sh("cat /tmp/f").stdout == b"start\n"
    assert Tag.LAYER not in hub.call(Op.HUB_LAYERS)[0]
    with pytest.raises(KeeperError) as caught:
        give(hub, "snap", "fork1")
    assert caught.value.errno == errno.ENOENT


def test_a_chain_of_200(hub: Hub) -> None:
    keeper = hub.create()
    for i in range(200):
        r = keeper.sh(
            f"echo {i} > /tmp/n{i}; echo {i} >> /tmp/log; rm -rf /tmp/n{i - 3} /usr/d{i - 2}; mkdir -p /usr/d{i}/sub; echo {i} > /usr/d{i}/sub/f"
            f"; if [ {i % 7} = 0 ]; then rm -rf /var/dir; mkdir -p /var/dir; fi; echo {i} > /var/dir/f{i}; ln /tmp/n{i} /tmp/hard{i}"
        )
        assert r.code == 0, r.stderr
        seal(keeper, f"s{i}")
    layers = hub.call(Op.HUB_LAYERS)[0][Tag.LAYER]
    assert len(layers) == 200 and max(int(line.split("\t")[2]) for line in layers) <= 32
    assert keeper.read("/tmp/log") == b"".join(b"%d\n" % i for i in range(200))
    names = sorted(n for n in keeper.sh("ls /tmp").stdout.decode().split() if n.startswith("n"))
    assert names == ["n197", "n198", "n199"]
    assert sorted(keeper.sh("cd /usr; echo d[0-9]*").stdout.decode().split()) == ["d198", "d199"]
    assert sorted(keeper.sh("ls /var/dir").stdout.decode().split()) == ["f196", "f197", "f198", "f199"]
    fork = hub.create(name="fork")
    for at in (0, 31, 32, 33, 100, 199):
        give(hub, f"s{at}", "fork")
        stand_on(fork, f"s{at}")
        assert fork.read("/tmp/log") == b"".join(b"%d\n" % i for i in range(at + 1))
        assert fork.sh(f"cat /usr/d{at}/sub/f /tmp/hard{at}; ls /tmp/n{at - 3} 2>/dev/null").stdout == b"%d\n%d\n" % (at, at)
        assert len(facts(fork)["layer"]) <= 32
    t = time.perf_counter()
    fork.sh("i=0; while [ $i -lt 2000 ]; do [ -e /tmp/none$i ]; i=$((i+1)); done")
    assert time.perf_counter() - t < 5
    hub.call(Op.HUB_DROP_LAYER, (Tag.LAYER, "s198"))
    stand_on(fork, "s199")


def test_deletions_survive_flattening(hub: Hub) -> None:
    keeper = hub.create()
    keeper.sh("rm /etc/group; rm -r /var/tmp; mkdir /var/tmp; echo x > /var/tmp/x; echo a > /tmp/a")
    for i in range(40):
        keeper.sh(f"echo {i} > /tmp/i")
        seal(keeper, f"s{i}")
    assert len(facts(keeper)["layer"]) < 32
    assert keeper.sh("ls /etc/group").code != 0
    assert keeper.sh("ls /var/tmp; cat /tmp/a /tmp/i").stdout == b"x\na\n39\n"
    assert changes(keeper) == []


def test_freed_uppers_do_not_stay(hub: Hub) -> None:
    keeper = hub.create((Tag.UPPER_BYTES, 300 << 20))

    def shmem() -> int:
        with open("/proc/meminfo") as f:
            return next(int(line.split()[1]) >> 10 for line in f if line.startswith("Shmem:"))

    before = shmem()
    for _ in range(10):
        keeper.sh("head -c 100000000 /dev/zero > /tmp/big")
        keeper.reset()
    for _ in range(100):
        if shmem() < before + 250:
            break
        time.sleep(0.05)
    assert shmem() < before + 250


@pytest.mark.parametrize("op", [Op.HUB_GIVE_LAYER, Op.HUB_LAYERS, Op.HUB_DROP_LAYER])
def test_what_a_keeper_has_sealed_is_known_to_the_hub(hub: Hub, op: Op) -> None:
    """Whoever heard from the keeper that a layer is sealed may ask the hub for it, whatever the hub hears first."""
    keeper, other = hub.create(), hub.create(name="other")
    keeper.write("/tmp/f", b"1")
    os.kill(hub.process.pid, signal.SIGSTOP)
    hub.send(Type.PING, 0, b"first")  # our stream is the first that it finds ready; all of it is read at once
    seal(keeper, "sealed")
    channel = hub.request(op, (Tag.LAYER, "sealed"), (Tag.MEMBER, "other"))
    os.kill(hub.process.pid, signal.SIGCONT)
    fields, _ = hub.reply(channel)
    if op == Op.HUB_GIVE_LAYER:
        stand_on(other, "sealed")
        assert other.read("/tmp/f") == b"1"
    elif op == Op.HUB_LAYERS:
        assert [row.split("\t")[0] for row in fields[Tag.LAYER]] == ["sealed"]
    else:
        assert Tag.LAYER not in hub.call(Op.HUB_LAYERS)[0]
