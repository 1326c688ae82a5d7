"""A ledger from the side of those who record: ids, ends, further processes, what was left open."""

from __future__ import annotations

import contextlib
import json
import multiprocessing
import os
import pickle
import time
from pathlib import Path
from typing import Any

import pytest

from rlsandbox.errors import ConfigError, LedgerError, SandboxStateError
from rlsandbox.ledger import Ledger, reading, reconcile
from rlsandbox.ledger.records import failure_from, fold, record_from, to_dict
from rlsandbox.results import Failure, Record
from rlsandbox.spec import Spec
from rlsandbox.task import Grader, Task
from tests.support.faulty_sqlite import faulty
from tests.support.small_disk import fill, small_disk
from tests.support.together import all_at_once

TASK = Task(id="HumanEval/0", grader=Grader(command="true"), image="img", metadata={"difficulty": "hard"})


class Held:
    """A sandbox as an attempt sees it."""

    id, node, reset_mode, spec = "sb1", "n1", "overlay", Spec(image="used", isolation="none")
    times, ttfc_s = {"queued": 0.5, "started": None}, 0.75


def test_a_rollouts_life(tmp_path: Path) -> None:
    ledger = Ledger.open("run", tmp_path, facts={"backend": "fake"})
    entry = ledger.request(TASK, batch=ledger.new_batch())
    assert entry.id == "run/HumanEval/0/0"
    assert entry.log.group == "HumanEval/0@0"
    first = entry.attempt()
    first.end(failure=Failure("claim_timeout", "claim", "none free", True, True))
    second = entry.attempt()
    second.sandbox(Held())
    second.checkpoint("snap1", 10)
    second.end(Held())
    second.end(Held(), Failure("late", "policy", "ignored", False, False))
    record = entry.end("completed", reward=0.5, passed=False, value={"a": 1})
    assert ledger.flush_blocking(10)
    book = reading.read([ledger.path])
    (log,) = book.rollouts.values()
    assert log == entry.log
    assert log.record == record
    assert (log.expects_reward, log.metadata, log.batch) == (True, {"difficulty": "hard"}, "run#1")
    one, two = log.attempts
    assert one.failure is not None
    assert (one.n, one.handed_at, one.failure.kind) == (1, None, "claim_timeout")
    assert (two.n, two.sandbox, two.node, two.image) == (2, "sb1", "n1", "used")
    assert (two.reset_mode, two.isolation, two.checkpoint) == ("overlay", "none", "snap1")
    assert (two.times, two.ttfc_s, two.failure) == ({"queued": 0.5}, 0.75, None)
    assert one.asked_at <= two.asked_at <= (two.handed_at or 0) <= (two.ended_at or 0) <= record.ended_at
    (process,) = book.processes
    assert (process.pid, process.facts, process.closed_at) == (os.getpid(), {"backend": "fake"}, None)
    ledger.close()
    ledger.close()
    assert reading.read([ledger.path]).processes[0].closed_at is not None


def test_exactly_one_end(tmp_path: Path) -> None:
    ledger = Ledger.open("run", tmp_path)
    entry = ledger.request(TASK)
    with pytest.raises(TypeError, match="value is of type set"):
        entry.end("completed", value={1})
    for bad in (float("nan"), float("inf")):
        with pytest.raises(ValueError, match="finite number"):
            entry.end("completed", reward=bad)
    assert entry.record is None, "refused, so not ended"
    entry.end("completed")
    with pytest.raises(SandboxStateError, match="has ended already: completed"):
        entry.end("failed")
    assert entry.cancel("x") is None
    ledger.close()
    assert [e.kind for e in reading.events_of(ledger.path) if e.rollout] == ["request", "end"]


def test_closing_ends_what_is_open_as_cancelled(tmp_path: Path) -> None:
    ledger = Ledger.open("run", tmp_path)
    ran, never = ledger.request(TASK), ledger.request(TASK)
    ran.attempt().sandbox(Held())
    ledger.close()
    assert {r.id: (r.status, r.outcome) for r in (ran.record, never.record) if r} == {
        ran.id: ("cancelled", "cancelled"),
        never.id: ("cancelled", "never_ran"),
    }
    assert not reading.read([ledger.path]).open()


def test_numbers_go_on_where_the_run_goes_on(tmp_path: Path) -> None:
    for expected in (0, 1, 2):
        ledger = Ledger.open("run", tmp_path)
        entry = ledger.request(TASK)
        assert entry.log.index == expected
        entry.end("completed")
        ledger.close()


def test_asking_twice_for_the_same_rollout(tmp_path: Path) -> None:
    ledger = Ledger.open("run", tmp_path)
    entry = ledger.request(TASK, index=7)
    with pytest.raises(SandboxStateError, match="asked for already"):
        ledger.request(TASK, index=7)
    entry.end("completed")
    assert ledger.request(TASK).log.index == 8
    ledger.close()


def test_records_and_failures_through_json_and_back() -> None:
    failure = Failure("oom", "command", "too much", True, False, "a.B", "text \ud800", "Traceback ...")
    full = Record(
        "t", 3, 2, "failed", None, None, {"a": [1]}, failure, 0.5, "g", "run", "run/t/3", 1.5, 2.5, "n", "i",
        "wall", False,
    )  # fmt: skip
    bare = Record("t", 0, 0, "completed", reward=0.0, value="")
    for record in (full, bare):
        again = record_from(json.loads(json.dumps(to_dict(record))))
        assert again == record
        assert pickle.loads(pickle.dumps(record)) == record
    assert failure_from({**to_dict(failure), "from_a_later_version": 1}) == failure
    assert (
        record_from({"task_id": "t", "index": 1, "attempts": 1, "status": "lost", "later": 1}).status
        == "lost"
    )


@pytest.mark.parametrize(
    ("record", "outcome"),
    [
        (Record("t", 0, 1, "completed", 0.0), "rewarded"),
        (Record("t", 0, 1, "completed"), "unrewarded"),
        (Record("t", 0, 1, "failed", failure=Failure("x", "policy", "", False, False)), "failed_by_task"),
        (
            Record("t", 0, 1, "failed", failure=Failure("x", "claim", "", False, True)),
            "failed_by_infrastructure",
        ),
        (Record("t", 0, 1, "failed", failure=Failure("x", "claim", "", False, True), ran=False), "never_ran"),
        (Record("t", 0, 1, "lost"), "lost"),
        (Record("t", 0, 1, "cancelled"), "cancelled"),
        (Record("t", 0, 0, "cancelled", ran=False), "never_ran"),
    ],
)
def test_outcomes(record: Record, outcome: str) -> None:
    assert record.outcome == outcome


def test_a_ledger_that_cannot_be_opened_leaves_nothing_behind(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="run must be a name"):
        Ledger.open("a/b", tmp_path)
    assert list(tmp_path.iterdir()) == []
    (tmp_path / "file").touch()
    with pytest.raises(LedgerError, match="cannot be opened for writing: not a directory"):
        Ledger.open("run", tmp_path / "file" / "x")
    full = faulty(lambda n, what: "full" if "INSERT" in what else None)
    with full, pytest.raises(LedgerError, match="cannot be written: the disk is full"):
        Ledger.open("run", tmp_path)
    ledger = Ledger.open("run", tmp_path)
    assert ledger.number == 0, "the lock of the failed one is free"
    ledger.close()


def test_notes(tmp_path: Path) -> None:
    ledger = Ledger.open("run", tmp_path)
    ledger.note("residue", "a file was left", sandbox="sb1", path="/tmp/x", odd={1})
    ledger.close()
    ledger.note("late", "nobody listens, and nothing is raised")
    (note,) = reading.read([ledger.path]).notes
    assert (note.kind, note.cause, note.data) == (
        "residue", "a file was left", {"sandbox": "sb1", "path": "/tmp/x", "odd": "{1}"}
    )  # fmt: skip


def test_reports_know_what_could_not_be_written_yet(tmp_path: Path) -> None:
    with small_disk(tmp_path / "disk", "4m") as disk:
        ledger = Ledger.open("run", disk)
        ledger.request(TASK).end("completed", reward=1.0)
        assert ledger.flush_blocking(10)
        filler = fill(disk)
        entry = ledger.request(Task(id="later", metadata={"x": "y" * 100_000}))
        with pytest.warns(RuntimeWarning, match="the disk is full"):
            assert not ledger.flush_blocking(10)
        entry.end("failed", failure=Failure("x", "policy", "y", False, False))
        assert ledger.trouble == "the disk is full"
        assert {r.task_id: r.status for r in ledger.records()} == {
            "HumanEval/0": "completed",
            "later": "failed",
        }
        assert ledger.report().requested == 2
        filler.unlink()
        ledger.close(timeout=10)
        assert {r.status for log in reading.read([ledger.path]).rollouts.values() if (r := log.record)} == {
            "completed", "failed"
        }  # fmt: skip


# ---------------------------------------------------------------------- several processes


def other_process(where: str, pipe: Any, task: Task) -> None:
    ledger = Ledger.open("run", where)
    entry = ledger.request(task)
    entry.attempt().sandbox(Held())
    ledger.flush_blocking(10)
    pipe.send((ledger.path.name, entry.id, entry.log.group))
    if pipe.recv() == "end":
        entry.end("completed", reward=1.0)
        ledger.close()


def test_further_processes_write_beside_and_are_merged(tmp_path: Path) -> None:
    ledger = Ledger.open("run", tmp_path)
    mine = ledger.request(TASK)
    context = multiprocessing.get_context("spawn")
    pairs = [context.Pipe() for _ in range(2)]
    processes = [
        context.Process(target=other_process, args=(str(tmp_path), theirs, TASK)) for _, theirs in pairs
    ]
    for process in processes:
        process.start()
    told = [pipe.recv() for pipe, _ in pairs]
    assert {name for name, _, _ in told} == {"run+1.db", "run+2.db"}
    ids = {mine.id, *(id_ for _, id_, _ in told)}
    assert len(ids) == 3, "the same task and number, and yet three rollouts"
    assert len({mine.log.group, *(group for _, _, group in told)}) == 3
    assert {log.id for log in ledger.book().open()} == ids
    pairs[0][0].send("end")
    processes[0].join(30)
    processes[1].kill()
    processes[1].join(30)
    mine.end("completed", reward=0.0)
    assert {r.id: r.reward for r in ledger.records()} == {mine.id: 0.0, told[0][1]: 1.0}

    found = reconcile(reading.run_files(ledger.path))
    by_name = {r.path.name: r for r in found}
    assert by_name["run.db"].skipped == "its process is alive"
    assert by_name[told[0][0]].lost == []
    (lost,) = by_name[told[1][0]].lost
    assert (lost.id, lost.status, lost.ran, lost.node) == (told[1][1], "lost", True, "n1")
    assert lost.failure is not None
    assert (lost.failure.kind, lost.failure.phase, lost.failure.retryable) == ("lost", "policy", True)
    assert lost.failure.infrastructure
    assert f"process {processes[1].pid} on {os.uname().nodename} ended without a word" in lost.failure.cause
    assert reconcile(reading.run_files(ledger.path))[2].lost == [], "once is enough"
    assert len(ledger.report().logs) == 3
    ledger.close()


def test_opening_a_dead_runs_ledger_closes_what_it_left_open(tmp_path: Path) -> None:
    context = multiprocessing.get_context("spawn")
    mine, theirs = context.Pipe()
    process = context.Process(target=other_process, args=(str(tmp_path), theirs, TASK))
    process.start()
    name, id_, _ = mine.recv()
    process.kill()
    process.join(30)
    assert name == "run.db"
    assert [log.id for log in reading.read([tmp_path / name]).open()] == [id_]
    (before,) = reconcile([tmp_path / name], dry_run=True)
    assert [r.id for r in before.lost] == [id_]
    assert reading.read([tmp_path / name]).open(), "a dry run changes nothing"
    ledger = Ledger.open("run", tmp_path)
    assert ledger.path.name == name
    assert {r.id: r.status for r in ledger.records()} == {id_: "lost"}
    assert ledger.request(TASK).log.index == 1
    ledger.close()


def test_reconcile_believes_a_dump(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RLSANDBOX_HOME", str(tmp_path / "home"))
    with small_disk(tmp_path / "disk", "4m") as disk:
        ledger = Ledger.open("run", disk)
        one, two = ledger.request(TASK), ledger.request(TASK)
        assert ledger.flush_blocking(10)
        fill(disk)

        def work() -> None:
            one.end("completed", reward=1.0, value="x" * 100_000)
            assert not ledger.flush_blocking(10)

        with pytest.warns(RuntimeWarning, match="the disk is full"):
            work()
        with pytest.warns(RuntimeWarning, match="rlsandbox ledger report"):
            ledger.close(timeout=0.2)
        (disk / "filler").unlink()
        (dump,) = (tmp_path / "home").glob("run-*.jsonl")
        assert len(reading.read([ledger.path]).open()) == 2
        book = reading.read([ledger.path, dump])
        assert {log.record.status for log in book.rollouts.values() if log.record} == {
            "completed",
            "cancelled",
        }
        (found,) = reconcile([ledger.path, dump])
        assert found.lost == [], "its end is known"
        (found,) = reconcile([ledger.path])
        assert [r.id for r in found.lost] == [one.id, two.id]
        book = reading.read([ledger.path, dump])
        assert len(book.rollouts) == 2


def test_a_reader_without_write_permission(tmp_path: Path) -> None:
    """The directory of a killed run, on a disk that is read-only now: its WAL has to be read all the same."""
    with small_disk(tmp_path / "disk", "8m") as disk:
        context = multiprocessing.get_context("spawn")
        mine, theirs = context.Pipe()
        process = context.Process(target=other_process, args=(str(disk), theirs, TASK))
        process.start()
        mine.recv()
        process.kill()
        process.join(30)
        import subprocess

        subprocess.run(["mount", "-o", "remount,ro", disk], check=True)
        assert len(reading.read([disk / "run.db"]).open()) == 1
        (found,) = reconcile([disk / "run.db"], dry_run=True)
        assert found.requested == 1


def test_many_close_at_once(tmp_path: Path) -> None:
    """What the last of them adds when the writer has ended is no record that could not be written."""
    for n in range(20):
        ledger = Ledger.open(f"run{n}", tmp_path)
        ledger.request(TASK, batch=ledger.new_batch())
        assert all_at_once(8, lambda _, ledger=ledger: ledger.close()) == []
        kinds = [event.kind for event in reading.events_of(ledger.path)]
        assert (kinds.count("end"), kinds.count("close")) == (1, 1)
    assert not list(tmp_path.glob("*.jsonl"))


def test_what_is_no_ledger(tmp_path: Path) -> None:
    with pytest.raises(LedgerError, match="there is no ledger"):
        reading.events_of(tmp_path / "none.db")
    (tmp_path / "text.db").write_text("hello " * 1000)
    with pytest.raises(LedgerError, match=r"text\.db cannot be read: file is not a database"):
        reading.events_of(tmp_path / "text.db")
    import sqlite3

    db = sqlite3.connect(tmp_path / "other.db")
    db.execute("CREATE TABLE t (x)")
    db.close()
    with pytest.raises(LedgerError, match=r"other\.db cannot be read: it is no rlsandbox ledger"):
        reading.events_of(tmp_path / "other.db")


@pytest.mark.parametrize("so_far", ["nothing", "WAL"])
def test_a_part_of_the_run_that_another_process_is_just_making(tmp_path: Path, so_far: str) -> None:
    import sqlite3

    with contextlib.closing(Ledger.open("run", tmp_path)) as first:
        first.request(TASK).end("completed")
        being_made = tmp_path / "run+5.db"
        with contextlib.closing(sqlite3.connect(being_made)) as db:
            if so_far == "WAL":
                db.execute("PRAGMA journal_mode=WAL")
            being_made.touch()
            with contextlib.closing(Ledger.open("run", tmp_path)) as other:
                assert other.path not in (first.path, being_made)
                assert other.request(TASK).log.index == 1
            assert len(reading.read(reading.run_files(first.path)).rollouts) == 2
    with pytest.raises(LedgerError, match="it is no rlsandbox ledger"):
        reading.read([being_made])


def test_events_in_any_order_of_files() -> None:
    from rlsandbox.ledger.records import Event

    request = Event(1, 1.0, "request", "r/t/0", {"task": "t", "index": 0, "t": 0}, "a")
    end = Event(
        2, 2.0, "end", "r/t/0", {"task_id": "t", "index": 0, "attempts": 0, "status": "lost", "t": 0}, "a"
    )
    again = Event(3, 3.0, "request", "r/t/0", {"task": "t", "index": 0, "t": 1}, "b")
    done = Event(
        4, 4.0, "end", "r/t/0", {"task_id": "t", "index": 0, "attempts": 1, "status": "completed", "t": 1}
    )
    import itertools

    for order in itertools.permutations([request, end, again, done]):
        (log,) = fold(order).rollouts.values()
        assert log.record is not None
        assert (log.record.status, log.resumed) == ("completed", 1)


def test_recording_is_cheap(tmp_path: Path) -> None:
    """Not a benchmark: an alarm for something quadratic or synchronous."""
    ledger = Ledger.open("run", tmp_path)
    begin = time.perf_counter()
    for i in range(3000):
        entry = ledger.request(Task(id=str(i)))
        attempt = entry.attempt()
        attempt.sandbox(Held())
        attempt.end(Held())
        entry.end("completed", value="x")
    assert ledger.flush_blocking(60)
    assert time.perf_counter() - begin < 30
    assert len(ledger.records()) == 3000
    ledger.close()
