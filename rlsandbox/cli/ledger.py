"""``rlsandbox ledger``: what became of every rollout that was asked for, in living runs and in old ones."""

from __future__ import annotations

import contextlib
import csv
import dataclasses
import json
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any, TextIO

import click

from .._settings import nearest
from ..errors import ConfigError, LedgerError
from .common import console, json_option, plot_file, print_json, writable_file, written
from .reap import parse_duration
from .runs import NO_RUNS, alive, book_of, directory_of, files_of, ledgers_in, remove

if TYPE_CHECKING:
    from ..ledger.records import Book, RolloutLog

_runs = click.argument("runs", nargs=-1, metavar="[RUN|FILE]...")
_where = click.option(
    "--ledger", "directory", metavar="DIR", help="Where RUNs are looked for; default $RLSANDBOX_HOME."
)


@click.group()
def command() -> None:
    """Every rollout that was asked for, and how it ended.

    RUN is the name of a run, FILE a ledger file or what could not be written to one (.jsonl). Without any,
    the latest run is meant.
    """


@command.command()
@_runs
@_where
@click.option("--rollout", metavar="ID", help="All about one rollout: attempts, times, traceback.")
@click.option("--status", metavar="STATUS", help="Only completed, failed, lost, cancelled or open ones.")
@click.option("--limit", type=int, default=50, show_default=True, metavar="N", help="Rows at most; 0: all.")
@json_option
def show(
    runs: tuple[str, ...],
    directory: str | None,
    rollout: str | None,
    status: str | None,
    limit: int,
    as_json: bool,
) -> None:
    """The runs there are; with RUN its rollouts."""
    if not runs and rollout is None and status is None:
        rows = [_run_row(path) for path in ledgers_in(directory_of(directory))]
        if as_json:
            print_json({"directory": str(directory_of(directory)), "runs": rows})
        else:
            _print_runs(directory_of(directory), rows)
        return
    known = ("completed", "failed", "lost", "cancelled", "open")
    if status is not None and status not in known:
        raise ConfigError(f"--status: {status!r} is none of {', '.join(known)}{nearest(status, known)}")
    book = book_of(runs, directory)
    if rollout is not None:
        _show_one(book, rollout, as_json)
        return
    logs = [log for log in book.rollouts.values() if status in (None, _status(log))]
    shown = logs[:limit] if limit > 0 else logs
    if as_json:
        print_json({"rollouts": [_log_dict(log) for log in shown], "count": len(logs)})
    else:
        _print_rollouts(shown, len(logs))


@command.command()
@_runs
@_where
@click.option("--bias", is_flag=True, help="Does what is missing go with group, difficulty or image?")
@click.option("--plot", metavar="FILE", help="TTFC distribution and timeline (.png, .svg, .pdf).")
@click.option(
    "--reward-range", nargs=2, type=float, default=(0.0, 1.0), metavar="LOW HIGH",
    help="Between which values a reward may lie; default 0 1.",
)  # fmt: skip
@json_option
def report(
    runs: tuple[str, ...],
    directory: str | None,
    bias: bool,
    plot: str | None,
    reward_range: tuple[float, float],
    as_json: bool,
) -> int:
    """Coverage, rewards, failures.

    Rewards come with the bounds that the missing ones leave; failures by kind, phase, image, node and group.
    """
    from ..ledger.report import Report

    target = plot_file(plot)
    made = Report.of(book_of(runs, directory), reward_range=reward_range)
    found = made.bias() if bias else None
    if as_json:
        told = made.to_dict()
        print_json(told if found is None else {**told, "bias": found.to_dict()})
    else:
        made.print(console())
        if found is not None:
            found.print(console())
    unplotted = written(target, "--plot", made.plot)
    if unplotted:
        click.echo(f"rlsandbox: {unplotted}", err=True)
    return int(bool(unplotted))


@command.command()
@_runs
@_where
@click.option("--all", "every", is_flag=True, help="Every run there is.")
@click.option("--dry-run", is_flag=True, help="Only say what would be closed.")
@json_option
def reconcile(runs: tuple[str, ...], directory: str | None, every: bool, dry_run: bool, as_json: bool) -> int:
    """Close as lost what dead processes left without an end. Living ones are left alone.

    Exit status 1: with --all, some files cannot be read.
    """
    from ..ledger import Reconciled, reading
    from ..ledger import reconcile as close

    if every:
        every_run = filter(reading.is_ours, ledgers_in(directory_of(directory)))
        files = [file for path in every_run for file in reading.run_files(path)]
    else:
        files = files_of(runs, directory)
    broken: list[Reconciled] = []
    if every:  # one that cannot be read keeps nobody from closing the others
        found = []
        for file in files:
            try:
                found += close([file], dry_run=dry_run)
            except LedgerError as error:
                broken.append(Reconciled(file, skipped=error.message))
        found += broken
    else:
        found = close(files, dry_run=dry_run)
    if as_json:
        rows = [
            {
                "file": str(item.path),
                "requested": item.requested,
                "lost": [record.id for record in item.lost],
                "skipped": item.skipped,
            }
            for item in found
        ]
        print_json({"files": rows, "lost": sum(len(item.lost) for item in found), "dry_run": dry_run})
        return int(bool(broken))
    if not found:
        click.echo("no ledger file among them: nothing to close")
    for item in found:
        verb = "would be closed as lost" if dry_run else "closed as lost"
        said = f"left alone: {item.skipped}" if item.skipped else f"{len(item.lost)} {verb}"
        click.echo(f"{item.path}: {item.requested} rollouts, {said}")
        for record in item.lost[:20]:
            click.echo(f"  {record.id}")
        if len(item.lost) > 20:
            click.echo(f"  and {len(item.lost) - 20} more")
    return int(bool(broken))


@command.command()
@_runs
@_where
@click.option("--format", "kind", type=click.Choice(["jsonl", "csv"]), default="jsonl", show_default=True)
@click.option("-o", "--output", metavar="FILE", help="Default: stdout.")
@click.option("--json", "as_json", is_flag=True, help="The same as --format jsonl.")
def export(
    runs: tuple[str, ...], directory: str | None, kind: str, output: str | None, as_json: bool
) -> None:
    """One line a rollout: with its attempts as JSON, or flat as CSV."""
    from ..ledger.report import COLUMNS, Report

    target = writable_file(output, "--output")
    book = book_of(runs, directory)
    with _writing(target) as out:
        if kind == "csv" and not as_json:
            writer = csv.DictWriter(out, COLUMNS)
            writer.writeheader()
            for row in Report.of(book).rows():
                value = row["value"]
                row["value"] = value if value is None or isinstance(value, str) else json.dumps(value)
                writer.writerow({name: _printable(item) for name, item in row.items()})
        else:
            for log in book.rollouts.values():
                out.write(json.dumps(_log_dict(log)) + "\n")
    if target is not None:
        click.echo(f"{len(book.rollouts)} rollouts in {target}", err=True)


@command.command()
@_where
@click.option("--older-than", default="30d", show_default=True, metavar="TIME", help="90s, 30m, 1h, 2d.")
@click.option("--dry-run", is_flag=True, help="Only say what would be removed.")
@click.option("--yes", is_flag=True, help="Do not ask.")
@json_option
def gc(directory: str | None, older_than: str, dry_run: bool, yes: bool, as_json: bool) -> int:
    """Remove ledgers of runs that are over and old. Nothing of a living run is touched."""
    from ..ledger import reading

    age = parse_duration(older_than, "--older-than")
    now = time.time()
    old: list[tuple[Path, list[Path]]] = []
    for path in filter(reading.is_ours, ledgers_in(directory_of(directory))):
        files = reading.run_files(path)
        try:
            if any(alive(file) is not False for file in files):
                continue
        except LedgerError:  # who wrote it cannot be told
            continue
        if all(now - file.stat().st_mtime >= age for file in files):
            old.append((path, files))
    size = sum(file.stat().st_size for _, files in old for file in files)
    removed: list[str] = []
    kept: list[str] = []
    if not as_json:
        for path, files in old:
            click.echo(f"{path.stem}: {len(files)} files")
        click.echo(f"{len(old)} runs, {size / 2**20:.1f} MiB" if old else "nothing is old enough")
    if old and not dry_run:
        if not yes and not click.confirm(f"Remove {len(old)} runs?", err=True):
            return 1
        for path, files in old:
            why = remove(files)
            (removed if why is None else kept).append(path.stem)
            if why is not None:
                click.echo(f"{path.stem} could not be removed: {why}", err=True)
    if as_json:
        found = [path.stem for path, _ in old]
        print_json({"found": found, "bytes": size, "removed": removed, "kept": kept, "dry_run": dry_run})
    return int(bool(kept))


@contextlib.contextmanager
def _writing(target: Path | None) -> Iterator[TextIO]:
    if target is None:
        yield sys.stdout
        return
    with open(target, "w", encoding="utf-8", newline="") as file:
        yield file


# ---------------------------------------------------------------------- what is shown


def _status(log: RolloutLog) -> str:
    return "open" if log.record is None else log.record.status


def _run_row(path: Path) -> dict[str, Any]:
    from ..ledger import reading

    files = reading.run_files(path)
    row: dict[str, Any] = {"run": path.stem, "files": len(files)}
    try:
        book = reading.read(files)
    except LedgerError as error:
        return {**row, "error": error.message}
    logs = book.rollouts.values()
    done = sum(_status(log) == "completed" for log in logs)
    living = any(alive(file) for file in files)
    return {
        **row,
        "started_at": min((p.started_at for p in book.processes), default=path.stat().st_mtime),
        "requested": len(logs),
        "completed": done,
        "open": len(book.open()),
        "state": "running" if living else "to reconcile" if book.open() else "over",
    }


def _print_runs(directory: Path, rows: list[dict[str, Any]]) -> None:
    from rich.markup import escape
    from rich.table import Table

    if not rows:
        click.echo(f"{NO_RUNS} in {directory}")
        return
    table = Table("run", "started", title=f"runs in {escape(str(directory))}", title_justify="left")
    for name in ("files", "asked for", "completed", "open"):
        table.add_column(name, justify="right")
    table.add_column("state")
    for row in rows:
        if "error" in row:
            said = f"[red]{escape(row['error'])}[/red]"
            table.add_row(escape(row["run"]), "", str(row["files"]), "", "", "", said)
            continue
        started = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(row["started_at"]))
        numbers = [f"{row[name]:,}" for name in ("files", "requested", "completed", "open")]
        table.add_row(escape(row["run"]), started, *numbers, row["state"])
    console().print(table)


def _print_rollouts(logs: list[RolloutLog], count: int) -> None:
    from rich.markup import escape
    from rich.table import Table

    table = Table("rollout", "status")
    for name in ("reward", "attempts", "TTFC s", "took s"):
        table.add_column(name, justify="right")
    table.add_column("what happened")
    for log in logs:
        record = log.record
        if record is None:
            table.add_row(
                escape(log.id), "open", "-", str(len(log.attempts)), "-", "-", f"in its {log.phase}"
            )
            continue
        failure = record.failure
        why = f"{failure.kind} ({failure.phase}): {failure.cause}" if failure else ""
        if record.truncated:
            why = f"reached its limit of {record.truncated}. {why}"
        numbers = (
            "-" if record.reward is None else f"{record.reward:g}",
            str(record.attempts),
            "-" if record.ttfc_s is None else f"{record.ttfc_s:.3f}",
            f"{record.ended_at - record.started_at:.3f}",
        )
        style = None if record.status == "completed" else "red" if record.status == "failed" else "yellow"
        table.add_row(
            escape(log.id), record.status, *numbers, escape(" ".join(why.split())[:300]), style=style
        )
    if count:
        console().print(table)
    else:
        click.echo("no such rollouts")
    if len(logs) < count:
        click.echo(f"{len(logs)} of {count} rollouts (--limit 0 shows all)")


def _show_one(book: Book, rollout: str, as_json: bool) -> None:
    log = book.rollouts.get(rollout)
    if log is None:
        raise ConfigError(f"there is no rollout {rollout!r}{nearest(rollout, list(book.rollouts))}")
    told = _log_dict(log)
    if as_json:
        print_json(told)
        return
    failure = log.record.failure if log.record else None
    out = console()
    out.print_json(json.dumps({k: v for k, v in told.items() if k != "record" or failure is None}))
    if failure is not None:
        out.print_json(
            json.dumps({**told["record"], "failure": {**told["record"]["failure"], "traceback": "below"}})
        )
        out.print(failure.traceback or "(no traceback)", markup=False, style="dim")


def _log_dict(log: RolloutLog) -> dict[str, Any]:
    """A rollout as plain data; what says nothing is left out."""
    from ..ledger.records import to_dict

    told: dict[str, Any] = {}
    for field in dataclasses.fields(log):
        told[field.name] = getattr(log, field.name)
    told["status"] = _status(log)
    told["record"] = None if log.record is None else {**to_dict(log.record), "outcome": log.record.outcome}
    told["attempts"] = [
        {
            **{f.name: getattr(attempt, f.name) for f in dataclasses.fields(attempt)},
            "failure": None if attempt.failure is None else to_dict(attempt.failure),
        }
        for attempt in log.attempts
    ]
    return told


def _printable(value: Any) -> Any:
    """CSV is UTF-8: what no UTF-8 can hold is escaped."""
    return value.encode("utf-8", "backslashreplace").decode() if isinstance(value, str) else value
