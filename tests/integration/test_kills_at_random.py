"""kill -9 of hubs, keepers, first processes and commands at random instants of a batch: every rollout has its record,
and after close() nothing is left."""

from __future__ import annotations

import contextlib
import os
import random
import signal
import threading
from pathlib import Path

import pytest

import rlsandbox as rls
from rlsandbox.backends import Local
from rlsandbox.backends.local import cgroups
from tests.support.small_disk import takes_uppers

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


LONG = 300


def below(pid: int) -> list[tuple[int, str]]:
    children: dict[int, list[tuple[int, str]]] = {}
    for entry in os.listdir("/proc"):
        with contextlib.suppress(OSError, ValueError):  # it is no process, or has ended meanwhile
            name, _, rest = Path(f"/proc/{int(entry)}/stat").read_text().partition("(")[2].rpartition(") ")
            children.setdefault(int(rest.split()[1]), []).append((int(entry), name))
    found, todo = [], [pid]
    while todo:
        here = children.get(todo.pop(), [])
        found += here
        todo += [child for child, _ in here]
    return found


@pytest.mark.timeout(900)
@pytest.mark.parametrize("upper", ["tmpfs", "disk"])
def test_a_batch_is_whole_and_nothing_is_left(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, upper: str
) -> None:
    monkeypatch.setenv("RLSANDBOX_HOME", str(tmp_path / "home"))
    place = tmp_path / "uppers"
    place.mkdir()
    if upper == "disk":
        takes_uppers(tmp_path)

    def mounted() -> list[str]:
        """Of what is mounted here only that: others mount and unmount too."""
        lines = Path("/proc/self/mountinfo").read_text().splitlines()
        return [line for line in lines if str(tmp_path) in line or "rlsandbox" in line]

    rng = random.Random(7)
    over, enough = threading.Event(), threading.Event()
    kills: list[str] = []
    hubs: set[int] = set()
    mounts = mounted()

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
                if len(kills) > 2:
                    enough.set()

    def policy(sandbox: rls.Sandbox, task: rls.Task) -> str:
        sandbox.run("echo x > /tmp/x; echo x > /dev/shm/x; setsid sleep 50 > /dev/null 2>&1 &")
        enough.wait(LONG)
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
    assert all(record.status in ("completed", "lost") or record.failure.infrastructure for record in records)
    assert len(kills) > 2
    # What is told to end ends in its own time, but it does.
    for _ in range(LONG * 50):
        left = [name for _, name in below(os.getpid()) if name in OURS or name == "sleep"]
        if not left:
            break
        over.clear()
        over.wait(0.02)
    assert left == []
    assert hubs
    assert [group for pid, group in cgroups.dead() if pid in hubs] == []
    assert mounted() == mounts
    assert os.listdir(place) == []
    assert os.listdir(tmp_path / "home/local") == []
