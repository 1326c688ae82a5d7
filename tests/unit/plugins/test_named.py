"""Each built-in plugin names what it is for, and nothing else is called dirty."""

from __future__ import annotations

import struct
from typing import Any

import pytest
from rlsandbox_plugins.git import hidden_entries

from rlsandbox.hooks import Credentials, Residue, plugin_manager
from rlsandbox.reset.baseline import take_baseline
from rlsandbox.reset.runner import run_reset, run_verify
from rlsandbox.task import Task
from tests.support.fake_keeper import FakeKeeper, names

TASK = Task(id="t", workdir="/work/repo")

PATHS = [
    ("/tmp/.hidden", "tmp"),
    ("/var/tmp/x", "tmp"),
    ("/run/lock/x", "tmp"),
    ("/dev/shm/.x", "shared memory"),
    ("/dev/mqueue/q", "message queue"),
    ("/work/repo/a.py", "workdir"),
    ("/work/repo/__pycache__/a.cpython-311.pyc", "python"),
    ("/work/repo/.git/hooks/pre-commit", "git"),
    ("/srv/bare.git/refs/heads/x", "git"),
    ("/root/.gitconfig", "git"),
    ("/home/u/.config/git/attributes", "git"),
    ("/work/repo/.gitattributes", "git"),
    ("/etc/hosts", "network"),
    ("/home/u/.curlrc", "network"),
    ("/root/.bashrc", "shell"),
    ("/home/u/.zshenv", "shell"),
    ("/etc/profile.d/x.sh", "shell"),
    ("/etc/ld.so.preload", "loader"),
    ("/usr/local/bin/git", "path"),
    ("/home/u/.local/bin/ls", "path"),
    ("/var/spool/cron/crontabs/root", "schedule"),
    ("/var/spool/at/a0001", "schedule"),
    ("/etc/sudoers.d/x", "rights"),
    ("/etc/passwd", "rights"),
    ("/home/u/.config/systemd/user/x.service", "service"),
    ("/home/u/.local/lib/python3.11/site-packages/sitecustomize.py", "python"),
    ("/usr/lib/python3/dist-packages/x.pth", "python"),
    ("/usr/lib/python3.11/json/__init__.py", "python"),
    ("/etc/pip.conf", "python"),
    ("/root/.ssh/authorized_keys", "credential"),
    ("/home/u/.aws/credentials", "credential"),
    ("/home/u/.config/gh/hosts.yml", "credential"),
    ("/tmp/ssh-XXab12/agent.77", "credential"),
    ("/root/.gnupg/S.gpg-agent", "credential"),
    ("/opt/anything", "file"),
    ("/usr/share/doc/x", "file"),
]


async def found(keeper: FakeKeeper, change: Any = None, **kw: Any) -> list[Residue]:
    base = await take_baseline(keeper, mode="overlay")
    if change is not None:
        change(keeper)
    manager = plugin_manager(entry_points=False, block=kw.pop("block", ()))
    return await run_verify(keeper, manager, task=TASK, baseline=base, deadline_s=20, **kw)


@pytest.mark.parametrize(("path", "kind"), PATHS)
async def test_a_changed_path_is_named_by_the_plugin_that_knows_it(path: str, kind: str) -> None:
    told = await found(FakeKeeper(), lambda k: k.put(path))
    assert (kind, path) in names(told)
    assert all(item.what == path for item in told)
    assert ("file" in {item.kind for item in told}) == (kind == "file")


@pytest.mark.parametrize(("path", "kind"), PATHS)
async def test_a_deletion_is_named_as_such(path: str, kind: str) -> None:
    told = await found(FakeKeeper(), lambda k: k.put(path, b"", kind="deleted"))
    assert any(item.kind == kind and "deleted" in item.detail for item in told)


@pytest.mark.parametrize("path", [path for path, kind in PATHS if kind != "file"])
async def test_the_policies_alone_put_the_path_back(path: str) -> None:
    keeper = FakeKeeper()
    base = await take_baseline(keeper, mode="manifest")
    keeper.put(path)
    manager = plugin_manager(entry_points=False)
    await run_reset(keeper, manager, task=TASK, layer="", baseline=base, deadline_s=20)
    assert await run_verify(keeper, manager, task=TASK, baseline=base.on(None), deadline_s=20) == []


FACTS = [
    ("extra", "mount\t/mnt\ttmpfs\trw\t/\t-", "mount", "/mnt"),
    ("extra", "ipc\tshm\t0x1\t5\t0\t0600\t4096", "ipc", "shm 5"),
    ("extra", "env\tSECRET_TOKEN=abc", "credential", "SECRET_TOKEN"),
    ("extra", "env\tFOO=abc", "environment", "FOO"),
    ("extra", "env\tLD_PRELOAD=/x.so", "shell", "LD_PRELOAD"),
    ("extra", "env\tPYTHONPATH=/x", "python", "PYTHONPATH"),
    ("extra", "fd\t7\t/old (foreign)", "descriptor", "7"),
    ("extra", "key\tother\tuser: token", "keyring", "user: token"),
    ("extra", "socket\ttcp\t0.0.0.0:8000\t\tLISTEN", "socket", "tcp 0.0.0.0:8000"),
    ("extra", "socket\tunix\t@evil\t\tLISTEN", "socket", "unix @evil"),
    ("extra", "socket\tunix\t/tmp/ssh-aaaaaaaa/agent.1\t\tLISTEN", "credential", "/tmp/ssh-aaaaaaaa/agent.1"),
    ("extra", "net\tif\ttap0\tup", "network", "if tap0 up"),
    ("extra", "process\t9\t1\t0\tZ\tdefunct\t", "process", "defunct"),
    ("extra", "process\t9\t1\t0\tS\tssh-agent\tssh-agent\\x00", "credential", "ssh-agent"),
    ("cwd\t/\tcurrent", "cwd\t/\tforeign", "directory", "working directory"),
    ("root\t/\tcurrent", "root\t/\tforeign", "directory", "root directory"),
    ("limit\tMax open files\t1024", "limit\tMax open files\t64", "limit", "Max open files"),
    ("status\tNoNewPrivs\t1", "status\tNoNewPrivs\t0", "process state", "NoNewPrivs"),
    ("uts\tsandbox", "uts\tevil", "hostname", "hostname"),
    ("cgroup\t/\n", "cgroup\t/x\n", "cgroup", "/x"),
    ("net\tif\tlo\tup", "net\tif\tlo\tdown", "network", "if lo down"),
    ("upper\t/\t0\t0755", "upper\t/\t0\t0777", "file", "/"),
    ("lower\t/usr\t2049\t11\t100\t100", "lower\t/usr\t2049\t11\t100\t222", "base", "/usr"),
    ("mount\t/proc\tproc", "mount\t/proc\ttmpfs", "mount", "/proc"),
]


@pytest.mark.parametrize(("old", "new", "kind", "what"), FACTS)
async def test_a_differing_fact_is_named(old: str, new: str, kind: str, what: str) -> None:
    def change(keeper: FakeKeeper) -> None:
        if old == "extra":
            keeper.extra.append(new)
        else:
            keeper.replace[old] = new

    told = await found(FakeKeeper(), change)
    assert (kind, what) in names(told), told


async def test_missing_facts_are_named_too() -> None:
    told = await found(FakeKeeper(), lambda k: k.replace.update({"env\tPATH=/usr/bin:/bin\n": ""}))
    assert ("environment", "PATH") in names(told)


@pytest.mark.parametrize("name", ["pid", "mnt", "ipc", "net"])
async def test_a_namespace_of_an_earlier_episode_is_named(name: str) -> None:
    number = {"pid": "01", "mnt": "02", "ipc": "03", "net": "04"}[name]

    def change(keeper: FakeKeeper) -> None:
        keeper.episode = 2
        fact = f"ns\t{name}\t40265322{number}\t"
        keeper.replace[fact + "2"] = fact + "1"

    assert names(await found(FakeKeeper(), change)) == {("namespace", name)}


async def test_a_session_keyring_of_an_earlier_episode_is_named() -> None:
    def change(keeper: FakeKeeper) -> None:
        keeper.episode = 2
        keeper.replace["key\tsession\t277\t2"] = "key\tsession\t277\t1"

    assert names(await found(FakeKeeper(), change)) == {("keyring", "session")}


async def test_environment_values_are_never_told() -> None:
    told = await found(FakeKeeper(), lambda k: k.extra.append("env\tACME_TOKEN=topsecret"))
    assert told
    assert "topsecret" not in repr(told)


async def test_values_of_earlier_episodes_are_found_wherever_they_lie() -> None:
    def change(keeper: FakeKeeper) -> None:
        keeper.put("/opt/cache.bin", b"\0\0tok-123456\0")
        keeper.extra.append("env\tINNOCENT=xtok-123456")
        keeper.extra.append("process\t9\t1\t0\tS\tx\tx\\x00tok-123456\\x00")

    held = Credentials(
        "lease-9", env={"ACME": "tok-123456", "REGION": "eu"}, files={"/r/k": b"pem-pem-pem\n"}
    )
    told = await found(FakeKeeper(), change, credentials=[held])
    places = {item.what for item in told if item.kind == "credential"}
    assert places == {"/opt/cache.bin", "INNOCENT", "x"}
    assert "tok-123456" not in repr(told)


def index(entries: list[tuple[str, int, int]], version: int = 2) -> bytes:
    raw = struct.pack(">4sII", b"DIRC", version, len(entries))
    before = b""
    for text, flags, extended in entries:
        name = text.encode()
        flags |= min(len(name), 0xFFF) | (0x4000 if extended else 0)
        entry = bytes(40) + bytes(range(20)) + struct.pack(">H", flags)
        entry += struct.pack(">H", extended) if extended else b""
        if version == 4:
            same = 0
            while same < min(len(name), len(before)) and name[same] == before[same]:
                same += 1
            entry += bytes([len(before) - same]) + name[same:] + b"\0"
            before = name
        else:
            entry += name + b"\0"
            entry += b"\0" * (-len(entry) % 8)
        raw += entry
    return raw + bytes(20)


ENTRIES = [("a.py", 0, 0), ("dir/b.py", 0, 0x4000), ("dir/c.py", 0x8000, 0), ("dir/long" * 9, 0, 0x2000)]


@pytest.mark.parametrize("version", [3, 4])
def test_hidden_edits_are_read_from_an_index(version: int) -> None:
    assert hidden_entries(index(ENTRIES, version)) == {
        "dir/b.py": "skip-worktree",
        "dir/c.py": "assume-unchanged",
    }


def test_an_index_that_is_cut_off_anywhere_is_said_to_be_broken() -> None:
    raw = index(ENTRIES, 3)
    for cut in range(1, len(raw) - 20):
        with pytest.raises(ValueError, match=r"\w"):
            hidden_entries(raw[:cut])
    assert hidden_entries(b"") == {}


async def test_git_names_hidden_edits_that_the_baseline_did_not_have() -> None:
    keeper = FakeKeeper(below={"/work/repo/.git/index": index([("a", 0x8000, 0)])})
    told = await found(
        keeper, lambda k: k.put("/work/repo/.git/index", index([("a", 0x8000, 0), ("b", 0, 0x4000)], 3))
    )
    assert {item.what for item in told if "hidden" in item.detail} == {"/work/repo/.git/index: b"}
    told = await found(FakeKeeper(), lambda k: k.put("/work/repo/.git/index", b"DIRCjunk"))
    assert any("cannot be read" in item.detail for item in told)
