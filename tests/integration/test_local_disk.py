"""Pools whose episodes write to a disk: used sandboxes come back as from a tmpfs, and nothing stays there."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

import rlsandbox as rls
from rlsandbox.backends import Local
from rlsandbox.results import Record
from tests.support.small_disk import fill, small_disk, takes_uppers

LONG = 120


def test_a_shared_disk_that_others_filled_is_nobodys_bad_work(tmp_path: Path) -> None:
    """Without room neither the hidden files nor the task's own can be placed."""
    grader = rls.Grader(command="cat hidden", files={"hidden": "x" * 100_000})
    task = rls.Task(id="t", workdir="/work", setup="true", grader=grader)
    other = replace(task, id="other", files={"a": "y" * 100_000})
    with small_disk(tmp_path / "disk", "16m") as disk:
        takes_uppers(disk)
        with rls.Pool(Local(upper=str(disk)), size=1, config=False, ledger=tmp_path / "ledger") as pool:

            def record(task: rls.Task, policy: Callable[[], object]) -> Record:
                work = lambda sandbox, task: str(policy())  # noqa: E731
                return pool.run_rollouts([task], work, retries=0, timeout=LONG).records[0]

            ungraded = record(task, lambda: fill(disk))
            unprimed = record(other, lambda: None)
            (disk / "filler").unlink()
            for failed, phase in ((ungraded, "grade"), (unprimed, "prime")):
                assert (failed.status, failed.reward) == ("failed", None)
                assert failed.failure is not None
                assert (failed.failure.kind, failed.failure.phase) == ("disk_full", phase)
                assert failed.failure.infrastructure
                assert failed.failure.retryable
            assert record(task, lambda: None).reward == 1.0
            end = time.monotonic() + LONG
            while record(other, lambda: None).reward != 1.0:  # once its breaker lets it be tried again
                assert time.monotonic() < end
                time.sleep(0.1)


@pytest.mark.parametrize("mode", ["overlay", "userns"])
@pytest.mark.parametrize("setup", [None, "mkdir /work; echo primed > /work/file"])
def test_used_sandboxes_come_back(tmp_path: Path, mode: str, setup: str | None) -> None:
    takes_uppers(tmp_path)
    place = tmp_path / "uppers"
    place.mkdir()
    backend = Local(upper=str(place), mode=mode)
    with rls.Pool(backend, size=1, config=False, ledger=tmp_path / "ledger") as pool:
        for number in range(4):
            with pool.claim(rls.Task(id=f"t{number}", setup=setup), timeout=LONG) as sandbox:
                assert sandbox.run("cat /work/file").ok == (setup is not None)
                assert sandbox.run("ls -A /dev/shm /tmp | grep -c left").stdout == "0\n"
                assert sandbox.run("echo x > /dev/shm/left; echo x > /tmp/left; rm -rf /work; umask 0").ok
        pool.wait_ready(timeout=LONG)
        stats = pool.stats()
    assert (stats.quarantined, stats.residue, stats.created) == (0, [], 1), stats
    assert os.listdir(place) == []
