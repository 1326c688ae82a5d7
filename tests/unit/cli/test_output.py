"""What a command writes and shows at the end of its work: plots, reports, tables, a bar meanwhile."""

from __future__ import annotations

import importlib
import os
import pty
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from rlsandbox.cli import common
from rlsandbox.errors import ConfigError
from rlsandbox.ledger import Ledger
from rlsandbox.ledger.report import Report
from rlsandbox.metrics import Metrics, counters_table
from rlsandbox.results import Failure
from rlsandbox.task import Grader, Task
from tests.support.small_disk import fill, small_disk

from .conftest import Cli


def a_run(where: Path, name: str) -> Path:
    """A run whose names look like markup."""
    ledger = Ledger.open(name, where)
    entry = ledger.request(Task(id="[/task]", grader=Grader(command="true")))
    entry.attempt()
    entry.end("failed", failure=Failure("[/kind]", "command", "[/cause]", False, False))
    ledger.close()
    return ledger.path


@pytest.mark.parametrize("name", ["out", "out.", "out.b", "out.pgf", "a.png/", ".png"])
@pytest.mark.parametrize("command", [["run", "--tasks", "demo"], ["ledger", "report", "first"]])
def test_a_plot_that_cannot_be_made_is_told_before_the_work(cli: Cli, command: list[str], name: str) -> None:
    pytest.importorskip("matplotlib")
    a_run(Path(os.environ["RLSANDBOX_HOME"]), "first")
    done = cli(*command, "--plot", name)
    assert (done.status, done.out) == (2, "")
    assert done.err.count("\n") == 1
    assert "its name must end in .png, .svg, .pdf" in done.err or "there is no directory" in done.err
    assert os.listdir() == []


def test_a_plot_as_asked_for_and_nowhere_else(cli: Cli) -> None:
    pytest.importorskip("matplotlib")
    a_run(Path(os.environ["RLSANDBOX_HOME"]), "first")
    names = {"é [b].PNG": b"\x89PNG", "x.pdf": b"%PDF", "x.svg": b"<?xml", "n\nl.png": b"\x89PNG"}
    for name, head in names.items():
        assert cli("ledger", "report", "first", "--plot", name).status == 0
        assert Path(name).read_bytes().startswith(head)
    assert set(os.listdir()) == set(names)


def test_what_cannot_be_written_at_the_end_costs_nothing_else(cli: Cli, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    a_run(Path(os.environ["RLSANDBOX_HOME"]), "first")
    with small_disk(tmp_path / "disk", "1m") as disk:
        fill(disk, leave=2048)
        done = cli("ledger", "report", "first", "--plot", str(disk / "x.png"))
    assert done.status == 1
    assert "rollouts asked for" in done.out
    assert "x.png could not be written: " in done.err
    assert done.err.count("\n") == 1


@pytest.mark.parametrize(
    ("error", "said"),
    [
        (OSError(28, "No space left on device"), "No space left on device"),
        (ConfigError("no such thing"), "no such"),
    ],
)
def test_written(tmp_path: Path, error: Exception, said: str) -> None:
    def fails(path: Path) -> None:
        raise error

    assert (
        common.written(tmp_path, "--output", fails)
        == f"--output: {tmp_path} could not be written: {error if isinstance(error, ConfigError) else said}"
    )
    assert common.written(tmp_path, "--output", lambda path: None) is None
    assert common.written(None, "--output", fails) is None


@pytest.mark.parametrize("bench", ["bench", "ttfc"])
def test_a_benchmark_whose_file_cannot_be_written_is_told_all_the_same(
    cli: Cli, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, bench: str
) -> None:
    module: Any = importlib.import_module(f"rlsandbox.cli.{bench}")
    monkeypatch.setattr(module, "writable_file", lambda path, option: Path("/dev/full") if path else None)
    argv = {
        "bench": ["bench", "local", "--rounds", "1", "--samples", "5"],
        "ttfc": ["bench", "ttfc", "--backend", "simulated", "--rounds", "1", "--rollouts", "2"],
    }[bench]
    if bench == "bench":
        from rlsandbox.bench.local import LocalReport

        monkeypatch.setattr(module, "run_local", lambda **how: LocalReport(1, 5, {}, [], {}))
    done = cli(*argv, "--output", "x.json", "--json")
    assert done.status == 1
    assert isinstance(done.json, dict)
    assert "--output: /dev/full could not be written: No space left on device" in done.err


def test_tables_show_names_as_they_are(cli: Cli, capsys: pytest.CaptureFixture[str]) -> None:
    """Whatever is a file's, a task's or a plugin's word is no markup of ours."""
    place = Path("[bold]") / "x]"
    place.mkdir(parents=True)
    a_run(place, "first")
    for argv in (["show"], ["show", "first"], ["report", "first"], ["report", "first", "--bias"]):
        done = cli("ledger", *argv, "--ledger", str(place))
        assert done.status == 0, done.err
    assert "[bold]/x]" in cli("ledger", "show", "--ledger", str(place)).out
    (place / "broken.db").write_bytes(b"SQLite format 3\0" + bytes(84))
    assert cli("ledger", "show", "--ledger", str(place)).status == 0
    shown = cli("ledger", "show", "first", "--ledger", str(place)).out
    assert "[/kind] (command): [/cause]" in shown
    assert "[/task]" in shown
    metrics = Metrics(run="r")
    metrics.failure("[/x]")
    console = Console(record=True, file=open(os.devnull, "w"))
    console.print(counters_table(metrics))
    assert "failures/[/x]" in console.export_text()


def test_the_headline_of_a_run_shows_names_as_they_are(cli: Cli, monkeypatch: pytest.MonkeyPatch) -> None:
    from rlsandbox.cli import run

    facts = {"table": "", "stats": {}, "metrics": {}}
    heading = {"rollouts": 1, "tasks": 1, "source": "[/x].jsonl", "policy": "[red]", "backend": "local",
               "run": "r", "plot": None}  # fmt: skip
    run._print(heading, Report([]), facts, [])
    assert cli("--version").out.startswith(
        "1 rollouts of 1 tasks ([/x].jsonl), policy [red], backend local, run r"
    )


def test_long_work_shows_a_bar_on_a_terminal(tmp_path: Path) -> None:
    ours, theirs = pty.openpty()
    child = subprocess.Popen(
        [sys.executable, "-m", "rlsandbox", "simulate", "--images", "40", "--group-size", "2", "--json"],
        stdout=subprocess.PIPE, stderr=theirs, stdin=subprocess.DEVNULL, cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(Path(__file__).parents[3]), "TERM": "xterm", "COLUMNS": "100"},
    )  # fmt: skip
    other = subprocess.Popen(
        [sys.executable, "-m", "rlsandbox", "simulate", "--images", "40", "--group-size", "2"],
        stdout=subprocess.DEVNULL, stderr=theirs, stdin=subprocess.DEVNULL, cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(Path(__file__).parents[3]), "TERM": "xterm", "COLUMNS": "100"},
    )  # fmt: skip
    os.close(theirs)
    seen = b""
    while True:
        try:
            piece = os.read(ours, 65536)
        except OSError:  # all who had it are gone
            break
        if not piece:
            break
        seen += piece
    os.close(ours)
    out, _ = child.communicate(timeout=120)
    assert child.returncode == 0 == other.wait(timeout=120)
    assert out.startswith(b"{")
    assert b"rollouts" in seen
    assert b"80/80" in seen
