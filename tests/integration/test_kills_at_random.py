"""kill -9 of hubs, keepers, first processes and commands at random instants of a batch: every rollout has its record,
and after close() nothing is left."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import threading
from pathlib import Path

import pytest

import rlsandbox as rls
from rlsandbox.backends import Local
from rlsandbox.backends.local import cgroups

OURS = {
    "rls-hub",
    "rls-zygote",
    "rls-keeper",
    "rls-ahead",
    "rls-init",
    "rls-standby",
    "rls-helper",
    "rls-remover",
}


def below(pid: int) -> list[tuple[int, str]]:
    rows = subprocess.run(["ps", "-eo", "pid=,ppid=,comm="], capture_output=True, text=True).stdout
    children: dict[int, list[tuple[int, str]]] = {}
    for row in rows.splitlines():
        child, parent, name = row.split(None, 2)
        children.setdefault(int(parent), []).append((int(child), name.strip()))
    found, todo = [], [pid]
    while todo:
        here = children.get(todo.pop(), [])
        found += here
        todo += [child for child, _ in here]
    return found


@pytest.mark.parametrize("upper", ["tmpfs", "disk"])
def test_a_batch_is_whole_and_nothing_is_left(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, upper: str
) -> None:
    monkeypatch.setenv("RLSANDBOX_HOME", str(tmp_path / "home"))
    place = tmp_path / "uppers"
    place.mkdir()
    rng = random.Random(7)
    over = threading.Event()
    kills: list[str] = []
    hubs: set[int] = set()
    mounts = Path("/proc/self/mountinfo").read_text().count("\n")

    def killer() -> None:
        while not over.wait(rng.expovariate(4)):
            mine = [(pid, name) for pid, name in below(os.getpid()) if name in OURS or name == "sleep"]
            hubs.update(pid for pid, name in mine if name == "rls-hub")
            name = rng.choice(sorted({name for _, name in mine}) or [""])
            if name in ("rls-hub", "rls-zygote") and kills.count(name) >= 2:
                continue  # each takes all sandboxes along
            for pid in [pid for pid, other in mine if other == name][-1:]:
                try:
                    os.kill(pid, signal.SIGKILL)
                except ProcessLookupError:
                    continue
                kills.append(name)

    def policy(sandbox: rls.Sandbox, task: rls.Task) -> str:
        sandbox.run("echo x > /tmp/x; echo x > /dev/shm/x; setsid sleep 50 > /dev/null 2>&1 &")
        return sandbox.run("sleep 0.2; cat /tmp/x").stdout

    backend = Local() if upper == "tmpfs" else Local(upper=str(place))
    tasks = [rls.Task(id=f"t{n}", setup="echo primed > /opt/file" if n % 2 else None) for n in range(12)]
    spec = rls.Spec(memory="256MiB", pids=100)
    with rls.Pool(backend, size=3, config=False, spec=spec, run=f"kills-{upper}") as pool:
        thread = threading.Thread(target=killer)
        thread.start()
        try:
            records = list(pool.rollouts(tasks, policy, group_size=2, concurrency=4, retries=40))
        finally:
            over.set()
            thread.join()
    assert sorted((record.task_id, record.index) for record in records) == sorted(
        (task.id, index) for task in tasks for index in range(2)
    )
    assert all(record.status == "completed" or record.failure.infrastructure for record in records)
    assert len(kills) > 2
    # What is told to end ends in its own time, but it does.
    for _ in range(500):
        left = [name for _, name in below(os.getpid()) if name in OURS or name == "sleep"]
        if not left:
            break
        over.clear()
        over.wait(0.02)
    assert left == []
    assert hubs
    assert [group for pid, group in cgroups.dead() if pid in hubs] == []
    assert Path("/proc/self/mountinfo").read_text().count("\n") == mounts
    assert os.listdir(place) == []
    assert os.listdir(tmp_path / "home/local") == []
