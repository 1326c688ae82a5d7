"""Rollouts that are begun ahead, driven from outside through the public Episode, on real sandboxes."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path

import pytest

import rlsandbox as rls
from rlsandbox.errors import SandboxStateError

TASK = rls.Task(id="t", grader=rls.Grader(command="test -e done"))


@pytest.fixture
def pool(tmp_path: Path) -> Iterator[rls.Pool]:
    with rls.Pool("local", size=2, config=False, ledger=tmp_path / "run.db") as made:
        yield made


def test_time_to_first_command_runs_from_begin_and_not_from_the_time_before(pool: rls.Pool) -> None:
    pool.wait_ready(timeout=60)
    episodes = [rls.Episode(pool, TASK, group="g") for _ in range(2)]
    for episode in episodes:
        episode.begin_ahead(timeout=60)
    while pool.stats().claimed < 2:
        time.sleep(0.01)
    began = time.monotonic()
    time.sleep(0.5)  # the trainer does something else
    took = []
    for episode in episodes:
        start = time.monotonic()
        episode.begin().run("touch done")
        took.append(time.monotonic() - start)
        assert episode.grade().reward == 1.0
        assert episode.complete().reward == 1.0
    assert time.monotonic() - began > 0.5
    assert len(pool.metrics.ttfc.values()) == 2
    assert all(ttfc <= spent for ttfc, spent in zip(pool.metrics.ttfc.values(), took, strict=True))


def test_one_that_is_dropped_gives_its_sandbox_back(pool: rls.Pool) -> None:
    episode = rls.Episode(pool, TASK)
    episode.begin_ahead()
    with pytest.raises(SandboxStateError, match="beginning already"):
        episode.begin_ahead()
    record = episode.cancel("not needed")
    assert (record or episode.record) is not None
    assert episode.record is not None and episode.record.status == "cancelled"
    # All of the pool is there again.
    sandboxes = [pool.claim(TASK, timeout=60) for _ in range(2)]
    for sandbox in sandboxes:
        sandbox.release()
