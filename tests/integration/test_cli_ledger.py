"""``rlsandbox ledger``: as people and as programs call it."""

from __future__ import annotations

import csv
import io
import json
import os
import time
from pathlib import Path
from typing import Any

import pytest

from rlsandbox.cli import main
from rlsandbox.ledger import Ledger, reading
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
