"""kill -9 of a process with real sandboxes: nothing of it is left, and a living run notices nothing."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

import rlsandbox as rls
from rlsandbox.errors import UnsupportedError
from rlsandbox.keeper.build import keeper_binary
from rlsandbox.ledger import reading, reconcile

KILLS = 10
ROOT = Path(__file__).parents[2]

VICTIM = """
import sys
import rlsandbox as rls

grader = rls.Grader(command="test -e b")
tasks = [rls.Task(id=f"t{i}", files={"a": "b"}, workdir="/w", grader=grader) for i in range(4)]

def policy(sandbox, task):
    sandbox.popen("sleep 1000")
    return sandbox.run("touch b; echo done").stdout

with rls.Pool(size=2, config=False, run="killed", spec=rls.Spec(memory="64MiB", disk="16MiB")) as pool:
    print("open", flush=True)
    while True:
        for record in pool.rollouts(tasks, policy, group_size=2):
            print(record.id, record.status, flush=True)
"""


def keepers() -> dict[int, int]:
    """Processes that run our keeper, with their parents."""
    binary = os.path.realpath(keeper_binary())
    found = {}
    for entry in os.listdir("/proc"):
        if entry.isdigit():
            try:
                if os.readlink(f"/proc/{entry}/exe").removesuffix(" (deleted)") == binary:
                    stat = Path(f"/proc/{entry}/stat").read_text()
                    found[int(entry)] = int(stat.rpartition(")")[2].split()[1])
            except OSError:
                continue
    return found


def others() -> set[int]:
    """Those that are not of this process's pools, which make more of them ahead at any time."""
    parents = keepers()
    found = set()
    for pid in parents:
        above = pid
        while above in parents:
            above = parents[above]
        if above != os.getpid():
            found.add(pid)
    return found


def until(true: Callable[[], bool], what: str, seconds: float = 20.0) -> None:
    end = time.monotonic() + seconds
    while not true():
        assert time.monotonic() < end, what
        time.sleep(0.02)


def test_killed_with_real_sandboxes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RLSANDBOX_HOME", str(tmp_path))
    task = rls.Task(id="alive")
    try:
        living = rls.Pool(size=1, config=False, run="living", spec=rls.Spec(memory="64MiB"))
    except UnsupportedError as error:
        pytest.skip(str(error))
    rng = random.Random(1)
    try:
        sandbox = living.claim(task, timeout=60)
        sandbox.write_file("/tmp/mine", "still here")
        sleeper = sandbox.popen("sleep 100000")
        before, strangers = set(keepers()), others()
        mounts = Path("/proc/self/mountinfo").read_text().count("\n")
        environment = {
            **os.environ,
            "PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")]),
        }
        handed_out: set[str] = set()
        for number in range(KILLS):
            victim = subprocess.Popen(
                [sys.executable, "-c", VICTIM], stdout=subprocess.PIPE, text=True, env=environment, cwd=ROOT
            )
            assert victim.stdout is not None
            try:
                if number:  # else: while it opens
                    assert victim.stdout.readline() == "open\n"
                for _ in range(
                    number % 3
                ):  # some only once records have been handed out, however slow we are
                    line = victim.stdout.readline()
                    assert line.endswith(" completed\n"), line
                    handed_out.add(line.split()[0])
                time.sleep(rng.uniform(0, 0.6))
            finally:
                victim.send_signal(signal.SIGKILL)
                said, _ = victim.communicate(timeout=60)
            whole = said[: said.rfind("\n") + 1].splitlines()
            handed_out |= {line.split()[0] for line in whole if line.endswith(" completed")}
            until(lambda: others() <= strangers, "processes of the killed run are left")
            if number % 2:
                found = reconcile(reading.run_files(tmp_path / "killed.db"))
                assert not any(item.skipped for item in found)
        assert before <= set(keepers()), "the living run's processes are all there"
        assert Path("/proc/self/mountinfo").read_text().count("\n") == mounts
        assert len(list((tmp_path / "local").iterdir())) > 1, (
            "a kill leaves a directory; else this shows nothing"
        )

        with rls.Pool(size=1, config=False, run="next") as pool:
            assert pool.claim(task, timeout=60).run("echo hi").stdout == "hi\n"
            left = {path.name for path in (tmp_path / "local").iterdir() if path.is_dir()}
            assert len(left) == 2, f"the living run's and the new one's: {left}"

        assert sandbox.read_text("/tmp/mine") == "still here"
        assert sleeper.poll() is None
        reconcile([tmp_path / "killed.db"])
        book = reading.read([tmp_path / "killed.db"])
        assert not book.open()
        statuses = {id_: log.record.status for id_, log in book.rollouts.items() if log.record}
        assert handed_out <= {id_ for id_, status in statuses.items() if status == "completed"}
        assert handed_out, "no victim lived long enough to show anything"
        assert {"completed", "lost"} <= set(statuses.values())
    finally:
        living.close()
