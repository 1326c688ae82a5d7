"""Leftovers of dead runs go, everything else stays."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

import rlsandbox as rls
from rlsandbox.backends.local import state
from rlsandbox.backends.local.ids import detect
from rlsandbox.backends.local.state import RunState, leftovers, reap
from rlsandbox.errors import ConfigError

RUN = """
import os, sys
from pathlib import Path
from rlsandbox.backends.local.state import RunState
run = RunState.begin(Path(sys.argv[1]))
place = run.place(sys.argv[2]) if len(sys.argv) > 2 else None
if place:
    (place / "upper").mkdir()
    (place / "upper/file").write_text("x" * 1000)
(run.path / "something").write_text("x")
child = os.fork() if "fork" in sys.argv else None
if child == 0:
    import time
    time.sleep(600)
print(run.path, child, flush=True)
sys.stdin.read()
"""


def other_run(home: Path, *arguments: str) -> tuple[subprocess.Popen[str], Path, str]:
    tree = Path(__file__).resolve().parents[3]
    process = subprocess.Popen(
        [sys.executable, "-c", RUN, str(home), *arguments],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        cwd=tree,
    )
    assert process.stdout is not None
    path, child = process.stdout.readline().split()
    return process, Path(path), child


def kill(process: subprocess.Popen[str]) -> None:
    process.kill()
    process.communicate()


async def test_a_killed_run_goes_and_live_ones_stay(tmp_path: Path) -> None:
    elsewhere = tmp_path / "disk"
    elsewhere.mkdir()
    own = RunState.begin(tmp_path)
    dead, dead_path, _ = other_run(tmp_path, str(elsewhere))
    alive, alive_path, _ = other_run(tmp_path, str(elsewhere))
    try:
        kill(dead)
        (found,) = [left for left in leftovers(tmp_path) if not left.group]  # (of other hubs: theirs)
        assert (found.path, found.pid) == (dead_path, dead.pid)
        assert [place.name for place in found.places] == [f"rlsandbox-{dead_path.name}"]
        assert dead_path.exists(), "looking removes nothing"
        removed, _ = await reap(detect(), tmp_path)
        assert [gone.path for gone in removed if not gone.group] == [dead_path]
        assert sorted(path.name for path in (tmp_path / "local").iterdir()) == sorted(
            [own.name, alive_path.name]
        )
        assert [path.name for path in elsewhere.iterdir()] == [f"rlsandbox-{alive_path.name}"]
        assert leftovers(tmp_path) == []
    finally:
        kill(alive)
        own.end()
    assert [gone.path for gone in (await reap(detect(), tmp_path))[0]] == [alive_path]
    assert list((tmp_path / "local").iterdir()) == []


async def test_a_forked_child_of_the_trainer_keeps_nothing_alive(tmp_path: Path) -> None:
    dead, dead_path, child = other_run(tmp_path, str(tmp_path), "fork")
    try:
        dead.kill()
        dead.wait()
        assert os.path.exists(f"/proc/{child}")
        removed, _ = await reap(detect(), tmp_path)
        assert [gone.path for gone in removed if not gone.group] == [dead_path]
    finally:
        os.kill(int(child), signal.SIGKILL)
        dead.communicate()


async def test_what_another_machine_left_is_not_judged(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    dead, path, _ = other_run(tmp_path)
    kill(dead)
    note = json.loads((path / "note.json").read_text())
    note["machine"] = "elsewhere " + note["machine"].split()[1]
    (path / "note.json").write_text(json.dumps(note))
    gone, kept = await reap(detect(), tmp_path)
    assert [found for found in (*gone, *kept) if not found.group] == []  # this machine may have dead groups
    note["machine"] = state.machine_id().split()[0] + " an-earlier-start"
    (path / "note.json").write_text(json.dumps(note))
    gone, _ = await reap(detect(), tmp_path)
    assert path in [found.path for found in gone], "a restart of this machine has ended it"
    assert not path.exists()


async def test_a_note_leads_to_nothing_of_others(tmp_path: Path) -> None:
    precious = tmp_path / "precious"
    precious.mkdir()
    (precious / "file").write_text("keep")
    dead, path, _ = other_run(tmp_path)
    kill(dead)
    (tmp_path / f"rlsandbox-{path.name}").symlink_to(precious)
    note = json.loads((path / "note.json").read_text())
    note["places"] = [str(precious), str(tmp_path / f"rlsandbox-{path.name}"), "/"]
    (path / "note.json").write_text(json.dumps(note))
    ((found,), _) = await reap(detect(), tmp_path)
    assert found.places == ()
    assert (precious / "file").read_text() == "keep"


async def test_what_a_run_left_goes_although_the_clock_was_set_back_since(tmp_path: Path) -> None:
    process, path, _ = other_run(tmp_path)
    kill(process)
    later = time.time() + 3 * 3600
    os.utime(path, (later, later))
    gone, kept = await reap(detect(), home=tmp_path)
    assert ([item.path for item in gone], kept) == ([path], [])
    assert not path.exists()


async def test_a_directory_without_a_lock_is_left_alone_while_young(tmp_path: Path) -> None:
    young = tmp_path / "local" / "1-young"
    young.mkdir(parents=True)
    assert leftovers(tmp_path) == []
    assert young.exists()
    old = time.time() - 120
    os.utime(young, (old, old))
    assert leftovers(tmp_path) == []
    assert not young.exists()


def test_our_own_lock_survives_a_look_at_it(tmp_path: Path) -> None:
    own = RunState.begin(tmp_path)
    assert leftovers(tmp_path) == []
    code = (
        "import sys; from pathlib import Path; from rlsandbox.backends.local.state import leftovers;"
        "print(len(leftovers(Path(sys.argv[1]))))"
    )
    tree = Path(__file__).resolve().parents[3]
    seen = subprocess.run(
        [sys.executable, "-c", code, str(tmp_path)], capture_output=True, text=True, cwd=tree
    )
    assert seen.stdout == "0\n", seen.stderr
    own.end()
    own_again = RunState.begin(tmp_path)
    assert own_again.path != own.path
    own_again.end()


def test_a_home_that_cannot_be_used_is_told(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match="cannot be used") as caught:
        RunState.begin(tmp_path / "file")
    assert "RLSANDBOX_HOME" in caught.value.hint


@pytest.mark.skipif(os.geteuid() != 0, reason="making control groups needs root")
async def test_control_groups_of_the_dead_go_with_what_is_in_them(tmp_path: Path) -> None:
    from rlsandbox.backends.local import cgroups

    mounts, own = cgroups._mounts(Path("/proc/self/mountinfo")), cgroups._own(Path("/proc/self/cgroup"))
    kind = "pids" if "pids" in mounts else ""
    if (
        kind not in mounts
        or kind not in own
        or not os.access(cgroups._below(mounts[kind], own[kind]), os.W_OK)
    ):
        pytest.skip("no control groups can be made here")
    place = cgroups._below(mounts[kind], own[kind])
    space = cgroups.pid_namespace()
    process = subprocess.Popen(["sleep", "600"])
    group = (
        place / f"rlsandbox.{process.pid}.1.{space}"
    )  # that process began at another time: it is not the hub
    alive = place / f"rlsandbox.{os.getpid()}.{cgroups._born('/proc', str(os.getpid()))}.{space}"
    try:
        (group / "inner").mkdir(parents=True)
        alive.mkdir()
        (group / "inner/cgroup.procs").write_text(str(process.pid))
        found = [item for item in leftovers(tmp_path) if item.path in (group, alive)]
        assert [(item.path, item.pid, item.group) for item in found] == [(group, process.pid, True)]
        _, kept = await reap(detect(), tmp_path)
        assert group in [item.path for item in kept], "what is in use is somebody's, whatever its name says"
        assert process.poll() is None
        process.kill()
        process.wait()
        removed, _ = await reap(detect(), tmp_path)
        assert group in [item.path for item in removed]
        assert not group.exists()
        assert alive.exists()
    finally:
        process.kill()
        process.wait()
        for left in (group / "inner", group, alive):
            if left.exists():
                left.rmdir()


@pytest.mark.skipif(os.geteuid() != 0, reason="making control groups and pid namespaces needs root")
def test_a_reaper_in_a_container_takes_no_live_hub_for_dead(tmp_path: Path) -> None:
    """It shares our control groups and sees none of our processes."""
    inside = (
        "import asyncio, rlsandbox as rls\n"
        "from rlsandbox.backends.local import cgroups\n"
        "print([str(path) for _, path in cgroups.dead()])\n"
        "with rls.Pool(size=1, config=False) as pool:\n"
        "    pool.wait_ready(timeout=60)\n"
    )
    with rls.Pool(size=1, config=False, ledger=tmp_path / "ledger") as pool:
        pool.wait_ready(timeout=60)
        hub = pool._pool.backend._hub.process.pid  # type: ignore[attr-defined]
        mine = set(Path("/sys/fs/cgroup").glob(f"**/rlsandbox.{hub}.*"))
        if not mine:
            pytest.skip("no control groups can be made here")
        done = subprocess.run(
            ["unshare", "--pid", "--fork", "--mount-proc", sys.executable, "-c", inside],
            capture_output=True, text=True, timeout=120,
            env={**os.environ, "RLSANDBOX_HOME": str(tmp_path / "inside")},
        )  # fmt: skip
        assert done.returncode == 0, done.stderr
        assert not [group for group in mine if str(group) in done.stdout]
        assert {group for group in mine if group.exists()} == mine


async def test_a_run_that_ends_while_a_reaper_looks_disturbs_nobody(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    gone = tmp_path / "group-of-a-run-that-has-just-ended"
    monkeypatch.setattr(state.cgroups, "dead", lambda: [(1, gone)])
    (tmp_path / "local").mkdir()
    real = os.listdir
    monkeypatch.setattr(os, "listdir", lambda path: [*real(path), "1-ended"])
    monkeypatch.setattr(Path, "is_dir", lambda path: True)  # it was, a moment ago
    assert leftovers(tmp_path) == []


async def test_a_reaper_leaves_a_run_alone_that_is_just_beginning(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = state.fcntl.lockf
    code = (
        "import contextlib, sys; from pathlib import Path; from rlsandbox.backends.local import state\n"
        "with contextlib.ExitStack() as locks:\n"
        "    print(list(state._dead(Path(sys.argv[1]), locks)), flush=True)\n"
        "    sys.stdin.read()\n"
    )
    reapers: list[subprocess.Popen[str]] = []

    def lockf(descriptor: int, how: int) -> None:
        if not reapers:  # the directory and the lock's file are there, the lock is not held yet
            reaper = subprocess.Popen(
                [sys.executable, "-c", code, str(tmp_path)], stdin=subprocess.PIPE, stdout=subprocess.PIPE,
                text=True, cwd=Path(__file__).resolve().parents[3],
            )  # fmt: skip
            reapers.append(reaper)
            assert reaper.stdout is not None
            assert reaper.stdout.readline() == "[]\n"
        real(descriptor, how)

    monkeypatch.setattr(state.cgroups, "dead", list)
    monkeypatch.setattr(state.fcntl, "lockf", lockf)
    run = RunState.begin(tmp_path)
    assert sorted(path.name for path in (tmp_path / "local").iterdir()) == [run.name]
    run.end()
    reapers[0].communicate()


async def test_what_a_run_left_that_was_killed_while_beginning_goes_after_a_minute(tmp_path: Path) -> None:
    half = tmp_path / "local" / ".123-abc"
    half.mkdir(parents=True)
    (half / "lock").touch()
    assert leftovers(tmp_path) == []
    assert half.exists()
    os.utime(half, (time.time() - 120, time.time() - 120))
    assert leftovers(tmp_path) == []
    assert not half.exists()
