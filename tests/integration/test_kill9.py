"""kill -9 at any instant: every rollout that was asked for is in the ledger, and what it promised holds."""

from __future__ import annotations

import itertools
import multiprocessing
import os
import random
import signal
import sqlite3
import time
from collections import Counter
from contextlib import closing
from pathlib import Path

import pytest

from rlsandbox.ledger import lock, reading, reconcile
from rlsandbox.results import Record
from tests.support import kill9_victim

KILLS = 200
RUNS = 8


@pytest.fixture(scope="module")
def forkserver() -> multiprocessing.context.ForkServerContext:
    """Children in milliseconds: they are forked from a process that has imported everything and has no thread."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["tests.support.kill9_victim"])
    return context


class Promised:
    """What a victim said before it died."""

    def __init__(self, text: str) -> None:
        whole = text[: text.rfind("\n") + 1].splitlines()
        self.work = {line.split()[1] for line in whole if line.startswith("work ")}
        self.records = {words[1]: words[2:] for line in whole if (words := line.split())[0] == "record"}
        self.opened = "open" in whole
        self.batches = whole.count("batch")
        self.calls = next((int(line.split()[1]) for line in whole if line.startswith("calls ")), None)


def victim(
    context: multiprocessing.context.ForkServerContext,
    where: Path, run: str, seed: int, after_s: float | None, die_at: int | None = None, batches: int | None = None,
) -> Promised:  # fmt: skip
    """Start one, kill it *after_s* (None: it ends by itself), return what it said."""
    said = where / f"said-{run}-{seed}-{next(_numbers)}"
    process = context.Process(
        target=kill9_victim.run, args=(str(where), run, seed, str(said), die_at, batches)
    )
    process.start()
    if after_s is not None:
        time.sleep(after_s)
        assert process.pid is not None
        os.kill(process.pid, signal.SIGKILL)
    process.join(60)
    assert process.exitcode is not None
    if after_s is None and die_at is None:
        assert process.exitcode == 0
    else:
        assert process.exitcode in (-signal.SIGKILL, 0)
    return Promised(said.read_text() if said.exists() else "")


_numbers = itertools.count()


def check(path: Path, promised: Promised) -> None:
    """The ledger of a killed process, before and after reconciling."""
    if not path.exists():
        assert not promised.opened
        return
    with closing(sqlite3.connect(path)) as db:
        assert db.execute("PRAGMA integrity_check").fetchone() == ("ok",)
    if not promised.opened:
        return
    book = reading.read([path])
    assert promised.work <= set(book.rollouts), "work on a rollout that was not on record"
    for id_, (status, reward) in promised.records.items():
        record = book.rollouts[id_].record
        assert record is not None, f"{id_}: a record was handed out and is not there"
        assert (record.status, str(record.reward)) == (status, reward)
    was_open = {log.id for log in book.open()}
    (found,) = reconcile([path])
    assert not found.skipped
    assert {record.id for record in found.lost} == was_open
    after = reading.read([path])
    assert not after.open()
    for id_ in was_open:
        lost = after.rollouts[id_].record
        assert isinstance(lost, Record)
        assert (lost.status, lost.reward) == ("lost", None)
        assert lost.failure is not None
        assert lost.failure.infrastructure
        assert lost.outcome == "lost"
    events = reading.events_of(path)
    requests = Counter(e.rollout for e in events if e.kind == "request")
    ends = Counter(e.rollout for e in events if e.kind == "end")
    assert requests == ends
    assert set(ends.values()) <= {1}
    assert lock.RunLock.alive(lock.lock_of(path)) is False


def test_killed_at_random_instants(
    tmp_path: Path, forkserver: multiprocessing.context.ForkServerContext
) -> None:
    rng = random.Random(20261130)
    whole = victim(forkserver, tmp_path, "measure", 0, None, batches=1)
    assert whole.batches == 1
    begin = time.monotonic()
    victim(forkserver, tmp_path, "measure2", 0, None, batches=2)
    span = time.monotonic() - begin
    phases: Counter[str] = Counter()
    for number in range(KILLS):
        run = f"run{number % RUNS}"
        promised = victim(forkserver, tmp_path, run, number, rng.uniform(0, 1.2 * span))
        phases["opening" if not promised.opened else "in a batch" if promised.records else "first work"] += 1
        span *= 0.97 if promised.opened else 1.05  # the machine is as fast as it is now, not as it was
        if number % 3:  # else the next start of the run finds it as it was left
            check(tmp_path / f"{run}.db", promised)
    assert phases["in a batch"] > KILLS / 10, phases
    assert phases["opening"] > 0, phases
    for run_file in sorted(tmp_path.glob("run?.db")):
        check(run_file, Promised("open\n"))


def test_killed_at_every_sqlite_call(
    tmp_path: Path, forkserver: multiprocessing.context.ForkServerContext
) -> None:
    whole = victim(forkserver, tmp_path, "count", 1, None, batches=1)
    assert whole.calls is not None
    assert whole.calls > 20
    for call in range(whole.calls):
        run = f"at{call}"
        promised = victim(forkserver, tmp_path, run, 1, None, die_at=call, batches=1)
        path = tmp_path / f"{run}.db"
        if path.exists() and path.stat().st_size == 0:
            assert not promised.opened
            continue
        check(path, promised)
        again = victim(forkserver, tmp_path, run, 2, None, batches=1)
        assert again.batches == 1, "the next start goes on"
