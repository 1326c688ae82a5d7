"""Looking at an episode from outside: facts, the exact list of changes, reading and restoring single paths."""

from __future__ import annotations

import errno
import os
import re
import struct
import time

import pytest
from rawclient import Hub, Keeper, KeeperError

from rlsandbox.keeper.wire import Op, Tag


def facts(keeper: Keeper) -> dict[str, list[list[str]]]:
    data = keeper.call(Op.INSPECT)[1].decode("ascii")
    out: dict[str, list[list[str]]] = {}
    for line in data.splitlines():
        kind, *rest = (re.sub(r"\\x(..)", lambda m: chr(int(m[1], 16)), part) for part in line.split("\t"))
        out.setdefault(kind, []).append(rest)
    return out


def changes(keeper: Keeper, path: str = "/", **options: int) -> list[tuple[str, str]]:
    fields, data = keeper.call(Op.CHANGES, (Tag.PATH, path), *((Tag[k.upper()], v) for k, v in options.items()))
    found, at = [], 0
    while at < len(data):
        kind, _mode, _uid, _gid, _size, _mtime, n = struct.unpack_from("<cIIIQQI", data, at)
        found.append((kind.decode(), data[at + 33 : at + 33 + n].decode("utf-8", "surrogateescape")))
        at += 33 + n
    if not options:
        assert fields[Tag.COUNT] == len(found)
    return sorted(found, key=lambda e: e[1])


@pytest.fixture
def rich(hub: Hub) -> Keeper:
    """A base with something to change."""
    root = hub.base()[0][1]
    for i in range(3):
        os.makedirs(f"{root}/data/d{i}/sub")
        for j in range(5):
            with open(f"{root}/data/d{i}/f{j}", "w") as f:
                f.write(f"{i} {j}\n")
        with open(f"{root}/data/d{i}/sub/deep", "w") as f:
            f.write("deep\n")
    os.symlink("d0", f"{root}/data/link")
    os.link(f"{root}/data/d0/f0", f"{root}/data/hard")
    for directory, _, _ in os.walk(root):
        os.chmod(directory, 0o755)
    if hub.user:
        os.system(f"chown -R {hub.user}:{hub.user} {root}")
    return hub.create()


def test_a_clean_sandbox_has_no_changes(rich: Keeper) -> None:
    assert changes(rich) == []
    rich.sh("ls -R / > /dev/null 2>&1; cat /data/d0/f0; find /data -type f | xargs cat")
    assert changes(rich) == []


def test_the_list_of_changes_is_exact(rich: Keeper) -> None:
    r = rich.sh(
        """
        cd /data; echo new > d0/new; echo more >> d0/f0; rm d0/f1; chmod 600 d0/f2; touch -d 2001-01-01 d0/f3
        mkdir -p n1/n2; echo x > n1/n2/x
        rm -r d1; mkdir d1; echo again > d1/f0
        rm -r d2/sub; echo file > d2/sub
        rm link; ln -s d2 link
        mkfifo fifo; echo hi > '/dev/shm/a b'; printf 'x' > "$(printf 'odd\\nname')"
        chmod 700 d2
        """
    )
    assert r.code == 0, r.stderr
    found = changes(rich)
    expected = [
        ("f", "/data/d0/new"), ("f", "/data/d0/f0"), ("x", "/data/d0/f1"), ("f", "/data/d0/f2"), ("f", "/data/d0/f3"),
        ("d", "/data/n1"), ("d", "/data/n1/n2"), ("f", "/data/n1/n2/x"),
        ("f", "/data/d1/f0"), *[("x", f"/data/d1/f{j}") for j in range(1, 5)], ("x", "/data/d1/sub"),
        ("d", "/data/d2"), ("f", "/data/d2/sub"), ("l", "/data/link"), ("o", "/data/fifo"),
        ("f", "/dev/shm/a b"), ("f", "/data/odd\nname"),
    ]  # fmt: skip
    assert found == sorted(expected, key=lambda e: e[1])
    assert changes(rich, "/data/d1") == [e for e in found if e[1].startswith("/data/d1/")]
    assert changes(rich, "/data/d0/f1") == [("x", "/data/d0/f1")]
    assert len(changes(rich, limit=3)) == 3
    rich.reset()
    assert changes(rich) == []


def test_what_was_put_back_is_no_change(rich: Keeper) -> None:
    back = "touch -r /tmp/ref f2; touch -r /tmp/dir ."
    rich.sh(f"cd /data/d0; touch -r f2 /tmp/ref; touch -r . /tmp/dir; chmod 600 f0; chmod 644 f0; mv f1 z; mv z f1; echo 0 2 > f2; {back}")
    assert changes(rich, "/data") == []
    rich.sh(f"cd /data/d0; printf 'X X\\n' > f2; {back}")
    assert changes(rich, "/data") == [("f", "/data/d0/f2")]
    rich.sh("touch -d 2001-01-01 /data/d1")
    assert ("d", "/data/d1") in changes(rich)


def test_outside_read(rich: Keeper) -> None:
    rich.sh("echo changed > /data/d0/f0; ln -s /etc/../../../data/d0/f0 /abs; mkfifo /fifo; ln -s /proc/self/environ /e")
    assert rich.call(Op.OUTSIDE_READ, (Tag.PATH, "/data/d0/f0"))[1] == b"changed\n"
    assert rich.call(Op.OUTSIDE_READ, (Tag.PATH, "/abs"))[1] == b"changed\n"
    assert rich.call(Op.OUTSIDE_READ, (Tag.PATH, "/data/d0/f0"), (Tag.FLAGS, 1))[1] == b"0 0\n"
    assert rich.call(Op.OUTSIDE_READ, (Tag.PATH, "/data/d0/f0"), (Tag.LENGTH, 3))[1] == b"cha"
    assert b"root" in rich.call(Op.OUTSIDE_READ, (Tag.PATH, "/etc/passwd"), (Tag.FLAGS, 1))[1]
    for path, flags, no in [
        ("/none", 0, errno.ENOENT), ("/abs", 1, errno.ENOENT), ("/fifo", 0, errno.EINVAL), ("/data", 0, errno.EISDIR),
        ("/proc/self/status", 0, None), ("/e", 0, None), ("/dev/null", 0, errno.EINVAL),
    ]:  # fmt: skip
        with pytest.raises(KeeperError) as caught:
            rich.call(Op.OUTSIDE_READ, (Tag.PATH, path), (Tag.FLAGS, flags))
        assert no is None or caught.value.errno == no, path


def test_outside_remove_puts_back(rich: Keeper) -> None:
    rich.sh(
        """
        cd /data; echo new > d0/new; echo more >> d0/f0; rm d0/f1; chmod 600 d0/f2; mkdir -p n1/n2; echo x > n1/n2/x
        rm -r d1; mkdir d1; echo again > d1/f0; rm -r d2/sub; echo file > d2/sub; rm link; ln -s d2 link; rm hard; touch /dev/shm/s
        """
    )
    for path in ["/data/d0/new", "/data/d0/f0", "/data/d0/f1", "/data/d0/f2", "/data/n1", "/data/d1", "/data/d2/sub",
                 "/data/link", "/data/hard", "/dev/shm/s"]:  # fmt: skip
        rich.call(Op.OUTSIDE_REMOVE, (Tag.PATH, path))
        assert not [e for e in changes(rich) if e[1] == path or e[1].startswith(path + "/")], path
    assert changes(rich) == []
    assert rich.sh("cat /data/d1/f3 /data/d0/f1 /data/d2/sub/deep /data/link/f4 /data/hard; ls /data /data/d1").stdout == (
        b"1 3\n0 1\ndeep\n0 4\n0 0\n/data:\nd0\nd1\nd2\nhard\nlink\n\n/data/d1:\nf0\nf1\nf2\nf3\nf4\nsub\n"
    )
    with pytest.raises(KeeperError) as caught:
        rich.call(Op.OUTSIDE_REMOVE, (Tag.PATH, "/data/none"))
    assert caught.value.errno == errno.ENOENT
    rich.call(Op.OUTSIDE_REMOVE, (Tag.PATH, "/data/d0/f4"))  # as it was: nothing to do
    for bad in ("/", "relative", "/data/../etc/passwd", "/data/"):
        with pytest.raises(KeeperError):
            rich.call(Op.OUTSIDE_REMOVE, (Tag.PATH, bad))


def test_facts_are_the_same_after_a_reset(keeper: Keeper) -> None:
    before = facts(keeper)
    for _ in range(5):
        keeper.sh("echo x > /tmp/x; sleep 100 & ulimit -n 50; cd /tmp; export A=b; ipcmk -M 1000 || true", env={"PATH": "/usr/bin", "S": "t"})
        keeper.reset()
    after = facts(keeper)
    assert before["episode"] == [["1"]] and after["episode"] == [["6"]]
    for moving in ("episode", "time", "ns", "key", "oom", "pids", "memory"):
        before.pop(moving, None)
        after.pop(moving, None)
    assert before == after
    assert "process" not in after and "env" not in after and "ipc" not in after
    assert {"/", "/usr", "/dev/shm", "/dev/mqueue"} <= {u[0] for u in after["upper"]} and {u[1] for u in after["upper"]} == {"0"}
    assert after["net"][0] == ["if", "lo"]


def test_every_namespace_is_new_in_every_episode(keeper: Keeper) -> None:
    first = {n[0]: n for n in facts(keeper)["ns"]}
    keeper.reset()
    second = {n[0]: n for n in facts(keeper)["ns"]}
    for name in ("pid", "mnt", "ipc", "net", "uts", "user"):
        assert first[name][1:] != second[name][1:] and second[name][2] == "2" and len(second[name]) == 3, name


PYTHON = """
import socket, time, mmap, os
s = socket.socket(); s.bind(("127.0.0.1", 4567)); s.listen()
u = socket.socket(socket.AF_INET, socket.SOCK_DGRAM); u.bind(("127.0.0.1", 4568))
x = socket.socket(socket.AF_INET6); x.bind(("::1", 4569)); x.listen()
a = socket.socket(socket.AF_UNIX); a.bind("\\0hidden"); a.listen()
f = socket.socket(socket.AF_UNIX); f.bind("/tmp/sock")
c = socket.create_connection(("127.0.0.1", 4567))
print("up", flush=True)
time.sleep(1000)
"""


def test_dirt_is_seen(keeper: Keeper) -> None:
    if keeper.sh("python3 -c ''", env={"PATH": "/usr/bin:/usr/local/bin"}).code:
        pytest.skip("no Python in the base")
    keeper.spawn("python3", "-c", PYTHON, env={"PATH": "/usr/bin:/usr/local/bin", "TOKEN": "s"}, cwd="/tmp")
    keeper.sh("ipcmk -M 1000; ipcmk -Q; ipcmk -S 3; echo x > /tmp/f; echo y > /usr/f; touch /dev/shm/q; sleep 77 &")
    for _ in range(200):
        found = facts(keeper)
        if "sleep" not in [p[4] for p in found.get("process", [])]:
            time.sleep(0.02)  # forked, and not yet that program
        elif ["tcp6", "[::1]:4569", "[::]:0", "listen"] in found.get("socket", []) and ["tcp", "127.0.0.1:4567", "0.0.0.0:0", "listen"] in found["socket"] and any(s[1].startswith("127.0.0.1:4567") and s[3] == "established" for s in found["socket"]):
            break
        time.sleep(0.05)
    sockets = found["socket"]
    assert ["udp", "127.0.0.1:4568", "0.0.0.0:0", "bound"] in sockets
    assert ["unix", "@hidden", "", "listen"] in sockets and ["unix", "/tmp/sock", "", "open"] in sockets
    assert sorted(i[0] for i in found["ipc"]) == ["msg", "sem", "shm"]
    shm = next(i for i in found["ipc"] if i[0] == "shm")
    assert shm[3] == "0" and shm[4] == "644" and shm[5] == "1000"
    processes = {p[4]: p for p in found["process"]}
    assert processes["sleep"][5] == "sleep\x0077\x00" and processes["sleep"][2] == "0"
    assert processes["python3"][7] == "/tmp" and "python" in processes["python3"][6]
    tmp = "/" if keeper.welcome[Tag.MODE] == "overlay" else "/tmp"
    dirty = {u[0]: u[1] for u in found["upper"] if u[1] != "0"}
    assert dirty == {tmp: "1" if tmp == "/" else "2", "/usr": "1", "/dev/shm": "1"}


def test_a_changed_base_is_seen(rich: Keeper, hub: Hub) -> None:
    before = facts(rich)["lower"]
    assert facts(rich)["lower"] == before
    open(f"{hub.base()[0][1]}/data/d0/sub/other", "w").close()
    assert facts(rich)["lower"] == before, "only the top is looked at"
    os.mkdir(f"{hub.base()[0][1]}/data/d9")
    changed = [line for line in facts(rich)["lower"] if line not in before]
    assert "/data" in [line[0] for line in changed]


def test_a_tree_that_is_too_deep_is_said(keeper: Keeper) -> None:
    """Nothing is left out without a word."""
    make = "import os\nos.chdir('/tmp')\nfor i in range(%d):\n    os.mkdir('d'); os.chdir('d')\nopen('f', 'w').close()"
    assert keeper.run("python3", "-c", make % 900).code == 0
    reply, data = keeper.call(Op.CHANGES, (Tag.PATH, "/tmp"))
    assert not reply.get(Tag.FLAGS) and b"/d/f" in data
    keeper.reset()
    assert keeper.run("python3", "-c", make % 5000).code == 0
    reply, data = keeper.call(Op.CHANGES, (Tag.PATH, "/tmp"))
    assert reply[Tag.FLAGS] == 1 and reply[Tag.COUNT] >= 1000 and b"/d/f" not in data
    with pytest.raises(KeeperError, match=r"100[01] deep"):
        keeper.call(Op.EXPORT)
    keeper.reset()
    assert keeper.sh("ls /tmp").stdout == b""


def test_user_tables_that_are_no_files(keeper: Keeper) -> None:
    """A pipe in the place of /etc/passwd, which nobody writes to, stops nobody."""
    keeper.sh("rm -f /etc/passwd /etc/group; mkfifo /etc/passwd /etc/group")
    for user in ("nobody", "1:tty"):
        with pytest.raises(KeeperError) as caught:
            keeper.run("true", user=user)
        assert caught.value.errno == errno.ENOENT
    keeper.sh("rm /etc/passwd; ln -s /dev/zero /etc/passwd")
    with pytest.raises(KeeperError):
        keeper.run("true", user="nobody")
    if not keeper_has_one_id(keeper):
        assert keeper.run("id", "-u", user="1000").stdout == b"1000\n"


def keeper_has_one_id(keeper: Keeper) -> bool:
    return "ids=one" in keeper.welcome[Tag.FACT]
