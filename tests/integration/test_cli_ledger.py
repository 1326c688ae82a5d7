"""``rlsandbox ledger``: as people and as programs call it."""

from __future__ import annotations

import contextlib
import csv
import errno
import io
import json
import os
import random
import sqlite3
import threading
import time
from pathlib import Path
from typing import Any

import pytest

from rlsandbox.cli import main
from rlsandbox.ledger import Ledger, lock, reading
from rlsandbox.ledger.elsewhere import write_dump
from rlsandbox.results import Failure
from rlsandbox.spec import Spec
from rlsandbox.task import Grader, Task

GRADER = Grader(command="true")


class Held:
    id, node, reset_mode, spec, times, ttfc_s = "sb1", "n1", "overlay", Spec(), {"queued": 0.5}, 0.75


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("RLSANDBOX_HOME", str(tmp_path))
    return tmp_path


def make(home: Path, run: str, *, leave_open: int = 0) -> Path:
    """A finished run; with *leave_open*, that of a process that was killed."""
    ledger = Ledger.open(run, home, facts={"backend": "fake"})
    for i in range(6):
        entry = ledger.request(Task(id=f"t[{i}]", grader=GRADER, metadata={"difficulty": "easy"}))
        attempt = entry.attempt()
        attempt.sandbox(Held())
        failure = (
            Failure("oom", "command", "too\tmuch", True, True, "E", "m", "Traceback: here")
            if i == 5
            else None
        )
        attempt.end(Held(), failure)
        if failure is None:
            entry.end("completed", reward=i / 4, passed=i == 4, value={"i": i})
        else:
            entry.end("failed", failure=failure)
    for i in range(leave_open):
        ledger.request(Task(id=f"open{i}", grader=GRADER))
    assert ledger.flush_blocking(10)
    if leave_open:
        ledger._store.close()  # as if killed: nothing more is said
        ledger._lock.release()
    ledger.close()
    return ledger.path


def call(capsys: pytest.CaptureFixture[str], *argv: str, status: int = 0) -> str:
    assert main(["ledger", *argv]) == status, capsys.readouterr()
    return capsys.readouterr().out


def call_json(capsys: pytest.CaptureFixture[str], *argv: str, status: int = 0) -> Any:
    return json.loads(call(capsys, *argv, "--json", status=status))


def test_show_runs_rollouts_and_one(home: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert "no runs yet" in call(capsys, "show")
    make(home, "first", leave_open=2)
    make(home, "second")
    (home / "other.db").write_bytes(b"not a ledger" * 100)
    text = call(capsys, "show")
    assert "to reconcile" in text
    assert "file is not a database" in text
    rows = {row["run"]: row for row in call_json(capsys, "show")["runs"]}
    assert (rows["first"]["requested"], rows["first"]["open"], rows["first"]["state"]) == (
        8,
        2,
        "to reconcile",
    )
    assert rows["second"]["state"] == "over"
    text = call(capsys, "show", "first")
    for expected in ("first/t[5]/0", "oom (command): too much", "open", "0.25", "0.750"):
        assert expected in text
    told = call_json(capsys, "show", "first", "--status", "open")
    assert [row["id"] for row in told["rollouts"]] == ["first/open0/0", "first/open1/0"]
    assert "1 of 8 rollouts" in call(capsys, "show", "first", "--limit", "1")
    text = call(capsys, "show", "first", "--rollout", "first/t[5]/0")
    assert "Traceback: here" in text
    assert '"sandbox": "sb1"' in text
    one = call_json(capsys, "show", "first", "--rollout", "first/t[5]/0")
    assert one["record"]["failure"]["traceback"] == "Traceback: here"
    assert one["attempts"][0]["times"] == {"queued": 0.5}
    assert main(["ledger", "show", "first", "--status", "opne"]) == 2
    assert main(["ledger", "show", "first", "--rollout", "first/t[4]/1"]) == 2
    err = capsys.readouterr().err
    assert "did you mean" in err or "first/t[4]/0" in err


def test_a_living_run_is_running(home: Path, capsys: pytest.CaptureFixture[str]) -> None:
    ledger = Ledger.open("alive", home)
    entry = ledger.request(Task(id="t"))
    ledger.flush_blocking(10)
    assert call_json(capsys, "show")["runs"][0]["state"] == "running"
    assert "its process is alive" in call(capsys, "reconcile", "alive")
    assert call_json(capsys, "gc", "--older-than", "0s", "--yes")["removed"] == []
    assert entry.record is None
    ledger.close()
    assert ledger.path.exists()


def test_report(home: Path, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    make(home, "first", leave_open=2)
    text = call(capsys, "report", "first")
    for expected in ("62.50%", "failures by kind", "oom", "too much", "2 rollouts have no end yet"):
        assert expected in text
    told = call_json(capsys, "report", "--bias")
    assert told["requested"] == 8
    assert told["reward_bounds"] == [2.5 / 8, 5.5 / 8]
    assert told["bias"]["missing"] == 3
    assert "verdict" in told["bias"]
    assert "missing:" in call(capsys, "report", "--bias")
    told = call_json(capsys, "report", "--reward-range", "-1", "2")
    assert told["reward_bounds"] == [(2.5 - 3) / 8, (2.5 + 6) / 8]
    call(capsys, "report", "first", "--plot", str(tmp_path / "p.png"))
    assert (tmp_path / "p.png").read_bytes().startswith(b"\x89PNG")


def test_report_of_a_file_and_its_dump(
    home: Path, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    path = make(home, "first", leave_open=1)
    end = json.dumps(
        {"task_id": "open0", "index": 0, "attempts": 1, "status": "completed", "reward": 1.0, "t": 0}
    )
    dump = tmp_path / "elsewhere.jsonl"
    write_dump(dump, [(1000, 5.0, "end", "first/open0/0", end)], path)
    assert call_json(capsys, "report", str(path))["completed"] == 5
    assert call_json(capsys, "report", str(path), str(dump))["completed"] == 6
    assert call_json(capsys, "reconcile", str(path), str(dump))["lost"] == 0


def test_reconcile(home: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = make(home, "first", leave_open=25)
    make(home, "second")
    assert call_json(capsys, "reconcile", "first", "--dry-run")["lost"] == 25
    assert len(reading.read([path]).open()) == 25
    text = call(capsys, "reconcile", "--all")
    assert "31 rollouts, 25 closed as lost" in text
    assert "and 5 more" in text
    assert call_json(capsys, "reconcile", "--all")["lost"] == 0
    assert call_json(capsys, "report", "first")["outcomes"]["lost"] == 25


def test_export(home: Path, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    make(home, "first", leave_open=1)
    lines = [json.loads(line) for line in call(capsys, "export", "first").splitlines()]
    assert len(lines) == 7
    assert lines[5]["record"]["failure"]["kind"] == "oom"
    assert lines[6]["status"] == "open"
    rows = list(csv.DictReader(io.StringIO(call(capsys, "export", "first", "--format", "csv"))))
    assert [row["reward"] for row in rows] == ["0.0", "0.25", "0.5", "0.75", "1.0", "", ""]
    assert json.loads(rows[1]["value"]) == {"i": 1}
    target = tmp_path / "out.jsonl"
    assert call(capsys, "export", "first", "-o", str(target)) == ""
    assert len(target.read_text().splitlines()) == 7
    assert main(["ledger", "export", "first", "-o", str(tmp_path / "no" / "x")]) == 2


def test_gc_says_what_it_may_not_remove(
    home: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another user's: as root nothing would be refused, so the refusal is the test's own."""
    theirs, mine = make(home, "theirs"), make(home, "mine")
    take = lock.take

    def refused(file: Path) -> lock.RunLock | None:
        if file == theirs:
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(file))
        return take(file)

    monkeypatch.setattr(lock, "take", refused)
    assert main(["ledger", "gc", "--older-than", "0s", "--yes", "--json"]) == 1
    out, err = capsys.readouterr()
    assert err == "theirs could not be removed: permission denied\n"
    said = json.loads(out)
    assert (said["removed"], said["kept"]) == (["mine"], ["theirs"])
    assert theirs.exists()
    assert not mine.exists()


def test_gc_removes_what_is_over_and_old(home: Path, capsys: pytest.CaptureFixture[str]) -> None:
    old, new = make(home, "old"), make(home, "new")
    long_ago = time.time() - 40 * 86400
    os.utime(old, (long_ago, long_ago))
    assert call_json(capsys, "gc", "--dry-run")["found"] == ["old"]
    assert old.exists()
    assert call_json(capsys, "gc", "--yes")["removed"] == ["old"]
    assert not old.exists()
    assert not (home / "old.db.lock").exists()
    assert new.exists()
    assert "nothing is old enough" in call(capsys, "gc", "--yes")


@pytest.mark.parametrize(
    ("argv", "said"),
    [
        (["report", "nonsense"], "there is no run and no ledger file 'nonsense'"),
        (["report"], "no runs yet"),
        (["report", "--ledger", "/nonexistent"], "there is no directory /nonexistent"),
        (["gc", "--older-than", "soon"], "must be a time"),
        (["nonsense"], "No such command 'nonsense'"),
    ],
)
def test_bad_input_is_one_line(
    home: Path, capsys: pytest.CaptureFixture[str], argv: list[str], said: str
) -> None:
    assert main(["ledger", *argv]) == 2
    err = capsys.readouterr().err
    assert said in err
    assert err.count("\n") == 1


def test_a_near_miss_is_named(home: Path, capsys: pytest.CaptureFixture[str]) -> None:
    make(home, "training")
    assert main(["ledger", "report", "trainin"]) == 2
    assert "training" in capsys.readouterr().err


def test_what_is_no_ledger_is_an_error_and_no_traceback(
    home: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (home / "x.db").write_bytes(b"no ledger" * 1000)
    assert main(["ledger", "report", "x"]) == 2
    err = capsys.readouterr().err
    assert "cannot be read" in err
    assert err.count("\n") == 1


def odd(home: Path, place: Path) -> list[Path]:
    """Files that are no ledgers, or no longer, or of a version to come."""
    good = make(home, "good").read_bytes()
    noise = random.Random(0)
    made = {
        "empty.db": b"",
        "junk.db": b"hello" * 1000,
        "cut.db": good[:5000],
        "cut-at-a-page.db": good[:-4096],
        "garbled.db": good[:4096] + noise.randbytes(4096) + good[8192:],
        "end-garbled.db": good[:-3000] + noise.randbytes(3000),
        "no-event.jsonl": b'{"n": 1}\n',
        "no-json.jsonl": b'{"dump_of": "x"}\n{oops\n',
        "no-text.jsonl": b"\xff\xfe\x00\n" * 10,
        "deep.jsonl": b"[" * 100_000,
    }
    place.mkdir()
    for name, data in made.items():
        (place / name).write_bytes(data)
    for name, pragma, table in (
        ("other.db", "", "CREATE TABLE x (a)"),
        ("other-application.sqlite3", "PRAGMA application_id = 12345", "CREATE TABLE events (a)"),
    ):
        with contextlib.closing(sqlite3.connect(place / name)) as db:
            db.execute("PRAGMA journal_mode = WAL")
            db.executescript(f"{pragma}; {table};")
    (place / "newer.db").write_bytes(good)
    with contextlib.closing(sqlite3.connect(place / "newer.db")) as db:
        db.execute("PRAGMA user_version = 99")
        db.commit()
    for name in ("newer.db-wal", "newer.db-shm"):
        (place / name).unlink(missing_ok=True)
    (place / "directory.db").mkdir()
    (place / "loop.db").symlink_to("loop.db")
    (place / "gone.db").symlink_to("nowhere")
    os.mkfifo(place / "fifo.db")
    return [*place.iterdir(), place / "missing.db", place / ("x" * 5000), Path("/dev/zero")]


def contents(place: Path) -> dict[str, bytes | None]:
    return {p.name: p.read_bytes() if p.is_file() else None for p in place.iterdir()}


def test_odd_files_are_one_line_and_nothing_is_made_of_them(
    home: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    place = home / "odd"
    files = odd(home, place)
    before = contents(place)
    commands = (
        ["show"],
        ["report"],
        ["report", "--bias"],
        ["reconcile"],
        ["reconcile", "--dry-run"],
        ["export"],
    )
    for file in files:
        for command, *options in commands:
            assert main(["ledger", command, str(file), *options]) == 2, file.name
            shown = capsys.readouterr()
            assert (shown.out, shown.err.count("\n")) == ("", 1), shown
            assert "internal" not in shown.err
            assert len(shown.err) < 1000
    assert contents(place) == before


def test_a_directory_with_others_files(home: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Runs among them are found, closed and removed; what is not ours is not shown and never removed."""
    place = home / "odd"
    odd(home, place)
    open_run = make(place, "killed", leave_open=2)
    before = contents(place)
    assert main(["ledger", "show", "--ledger", str(place), "--json"]) == 0
    rows = {row["run"]: row for row in json.loads(capsys.readouterr().out)["runs"]}
    ours = {"killed", "cut", "cut-at-a-page", "garbled", "end-garbled", "newer"}
    assert set(rows) == {*ours, "empty", "junk", "other", "other-application"}
    assert all(("error" in row) == (name != "killed") for name, row in rows.items())
    assert main(["ledger", "reconcile", "--all", "--ledger", str(place), "--json"]) == 1
    told = json.loads(capsys.readouterr().out)
    assert told["lost"] == 2
    assert {Path(row["file"]).stem for row in told["files"] if row["skipped"]} == ours - {"killed"}
    assert main(["ledger", "gc", "--ledger", str(place), "--older-than", "0s", "--yes"]) == 0
    assert not open_run.exists()
    left = contents(place)
    for name in (
        "empty.db",
        "junk.db",
        "other.db",
        "other-application.sqlite3",
        "no-text.jsonl",
        "directory.db",
    ):
        assert left[name] == before[name]


def test_reading_leaves_nothing_beside_a_ledger(home: Path, capsys: pytest.CaptureFixture[str]) -> None:
    make(home, "over")
    make(home, "killed", leave_open=1)
    before = set(os.listdir(home))
    for command in (
        ["show"],
        ["show", "over"],
        ["report", "over", "killed"],
        ["export", "over"],
        ["reconcile", "--dry-run"],
    ):
        assert main(["ledger", *command]) == 0
    assert set(os.listdir(home)) == before


def test_reading_while_it_is_written(home: Path) -> None:
    """A reader sees all that was committed, and whole, however it meets the writer, its checkpoints and its end."""
    ledger = Ledger.open("living", home)

    def write() -> None:
        for n in range(1500):
            entry = ledger.request(Task(id=f"t{n}", grader=GRADER))
            entry.end("completed", reward=1.0, value="x" * 2000)
            if n % 50 == 0:
                ledger.flush_blocking(10)
        ledger.close()

    writer = threading.Thread(target=write)
    writer.start()
    seen = [0]
    while writer.is_alive():
        seen.append(len(reading.read([ledger.path]).rollouts))
    writer.join()
    assert seen == sorted(seen)
    book = reading.read([ledger.path])
    assert (len(book.rollouts), book.open()) == (1500, [])


def test_a_run_that_has_asked_for_nothing_says_so(home: Path, capsys: pytest.CaptureFixture[str]) -> None:
    make(home, "worked")
    time.sleep(0.01)  # the latest is the one that was written last
    Ledger.open("nothing", home).close()
    assert main(["ledger", "report"]) == 0
    said = capsys.readouterr()
    assert "run nothing" in said.out
    assert "no rollout was asked for: there is nothing to report" in said.out
    assert said.err == "the latest run, nothing, has asked for no rollout; the last one that has: worked\n"
    assert main(["ledger", "report", str(home / "nothing.db")]) == 0
    said = capsys.readouterr()
    assert "run nothing" in said.out
    assert "nothing to report" in said.out
    assert said.err == ""
    told = call_json(capsys, "report", "nothing")
    assert (told["runs"], told["requested"]) == (["nothing"], 0)
    assert len(told["warnings"]) == 1
    assert call(capsys, "show", "nothing") == "no such rollouts\n"
    assert call(capsys, "show", "worked", "--status", "lost") == "no such rollouts\n"
    assert "nothing to report" not in call(capsys, "report", "worked")


def test_ledgers_of_another_user(
    home: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Who may read them sees whether they are in use; where even that is hidden, nothing is made up."""
    before = os.umask(0o022)
    try:
        path = make(home, "theirs", leave_open=1)
    finally:
        os.umask(before)
    lock = path.with_name(path.name + ".lock")
    assert lock.stat().st_mode & 0o777 == 0o644
    opened, access = os.open, os.access

    def forbidden(name: Any, *how: Any, **options: Any) -> int:
        if str(name).endswith(".lock"):
            raise PermissionError(13, "Permission denied", str(name))
        return opened(name, *how, **options)

    monkeypatch.setattr(os, "open", forbidden)
    monkeypatch.setattr(
        os, "access", lambda name, mode: not str(name).endswith(".lock") and access(name, mode)
    )
    assert "theirs" in call(capsys, "show")
    assert "asked for" in call(capsys, "report", "theirs")
    said = "left alone: its lock may not be read: run this as the user whose ledger it is"
    assert said in call(capsys, "reconcile", "theirs")
    assert said in call(capsys, "reconcile", "--all")
    os.utime(path, (0, 0))
    assert call_json(capsys, "gc", "--yes", "--older-than", "1s")["removed"] == []
    assert path.exists()
