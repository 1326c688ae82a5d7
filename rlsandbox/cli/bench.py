"""``rlsandbox bench``."""

from __future__ import annotations

import statistics
from pathlib import Path

import click

from ..bench.local import LocalReport, run_local
from . import ttfc
from .common import console, json_option, print_json, writable_file, written


@click.group()
def command() -> None:
    """Measure this machine, or a cluster: TTFC, resets, memory, beside what others do, in one run."""


command.add_command(ttfc.command)


@command.command()
@click.option("--rounds", default=5, show_default=True, type=click.IntRange(1, 100))
@click.option(
    "--samples",
    default=50,
    show_default=True,
    type=click.IntRange(5, 10_000),
    help="Of each figure, a round.",
)
@click.option(
    "--hold",
    multiple=True,
    type=click.IntRange(1, 100_000),
    metavar="N",
    help="Hold N idle sandboxes; may be repeated.",
)
@click.option("--output", metavar="FILE", help="Write the JSON report there too.")
@click.option("--gate", is_flag=True, help="Exit with 1 when a goal is missed.")
@json_option
def local(
    rounds: int, samples: int, hold: tuple[int, ...], output: str | None, gate: bool, as_json: bool
) -> int:
    """Claims, commands and resets on this machine against subprocess and git."""
    file = writable_file(output, "--output")
    screen = console()
    report = run_local(
        rounds=rounds,
        samples=samples,
        hold=hold,
        progress=lambda text: None if as_json else click.echo(f"  {text}", err=True),
    )
    unwritten = written(file, "--output", lambda path: _write(path, report))
    if as_json:
        print_json(report.to_dict())
    else:
        _print(report, screen)
    if unwritten:
        click.echo(f"rlsandbox: {unwritten}", err=True)
    return int(bool(unwritten) or (gate and not all(verdict.ok for verdict in report.verdicts())))


def _write(file: Path, report: LocalReport) -> None:
    import json

    file.write_text(json.dumps(report.to_dict(), indent=2) + "\n")


def _print(report: LocalReport, screen: object) -> None:
    from rich.table import Table

    table = Table(title=f"This machine, {report.rounds} interleaved rounds (ms)")
    for name in ("figure", "median", "P99", "median of each round"):
        table.add_column(name, justify="left" if name == "figure" else "right")
    for figure in report.figures.values():
        rounds = "  ".join(f"{value:.2f}" for value in figure.medians())
        table.add_row(figure.label, f"{figure.median:.2f}", f"{figure.p99:.2f}", rounds)
    screen.print(table)  # type: ignore[attr-defined]
    for held in report.held:
        click.echo(
            f"{held.n} idle sandboxes: filled in {held.fill_s:.1f} s, {held.mib_each:.2f} MiB each; "
            f"claim and run median {statistics.median(held.claim_ms):.2f} ms"
        )
    goals = Table(title="Goals")
    for name in ("what", "reached", "at most", "", "each round"):
        goals.add_column(name, justify="left" if name in ("what", "") else "right")
    for verdict in report.verdicts():
        goals.add_row(
            verdict.label,
            f"{verdict.reached:.3g} {verdict.unit}",
            f"{verdict.most:.3g} {verdict.unit}",
            "ok" if verdict.ok else "missed",
            "  ".join(f"{value:.3g}" for value in verdict.rounds),
        )
    screen.print(goals)  # type: ignore[attr-defined]
