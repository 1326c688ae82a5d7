"""Reports as tables for a terminal."""

from __future__ import annotations

import math
from typing import Any

from .bias import Bias, Factor
from .records import Process
from .report import BY, Report

MOST_ROWS = 20
MOST_CHARACTERS = 200


def _console(console: Any) -> Any:
    if console is not None:
        return console
    from rich.console import Console

    return Console()


def print_report(report: Report, console: Any = None) -> None:
    """Outcome, rewards, times; then failures by kind, phase, image, node and group."""
    from rich.markup import escape
    from rich.table import Table

    console = _console(console)
    table = Table(
        title=f"run {escape(', '.join(report.runs) or '-')}", title_justify="left", show_header=False
    )
    table.add_column("")
    table.add_column("", justify="right")
    table.add_row("rollouts asked for", f"{report.requested:,}")
    table.add_row("completed", f"{report.completed:,}")
    coverage = report.coverage
    table.add_row("coverage", "-" if math.isnan(coverage) else f"{coverage:.2%}")
    table.add_row("mean reward", number(report.mean_reward))
    bounds = report.reward_bounds
    text = "-" if bounds is None else f"{bounds[0]:.4f} to {bounds[1]:.4f}"
    table.add_row(f"... with the {len(report.missing)} missing ones", text)
    table.add_row("attempts", f"{sum(len(log.attempts) for log in report.logs):,}")
    batches = report.batches
    name = "batch completion" if len(batches) < 2 else f"batch completion, mean of {len(batches)}"
    done = report.batch_completion_s
    table.add_row(name, "-" if done is None else f"{done:.3f} s")
    for outcome, n in report.outcomes().items():
        table.add_row(f"  {outcome.replace('_', ' ')}", f"{n:,}")
    console.print(table)
    examples = report.examples()
    for by in BY:
        ended, tried = report.failures(by), report.failures(by, attempts=True)
        if ended or tried:
            console.print(_failures(by, ended, tried, examples if by == "kind" else {}))
    for process in report.processes:
        if process.closed_at is None and report.requested:
            console.print(f"[dim]{escape(_unclosed(process))}[/dim]", soft_wrap=True)
    if report.left_out:
        text = (
            f"{report.left_out:,} of {report.requested:,} rollouts had completed before: they were left out"
        )
        console.print(text, soft_wrap=True)
    for warning in report.warnings:
        console.print(f"[bold yellow]warning:[/] {escape(warning)}", soft_wrap=True)


def _unclosed(process: Process) -> str:
    return (
        f"process {process.pid} on {process.host} has not closed {process.source}: it runs, or it was killed"
    )


def _failures(by: str, ended: dict[str, int], tried: dict[str, int], examples: dict[str, str]) -> Any:
    from rich.markup import escape
    from rich.table import Table

    table = Table(title=f"failures by {by}", title_justify="left")
    table.add_column(by)
    table.add_column("rollouts", justify="right")
    table.add_column("attempts", justify="right")
    if examples:
        table.add_column("for example")
    names = sorted({*ended, *tried}, key=lambda name: (-ended.get(name, 0), -tried.get(name, 0), name))
    for name in names[:MOST_ROWS]:
        cells = [escape(" ".join(examples.get(name, "").split())[:MOST_CHARACTERS])] if examples else []
        table.add_row(escape(name), f"{ended.get(name, 0):,}", f"{tried.get(name, 0):,}", *cells)
    if len(names) > MOST_ROWS:
        rest = names[MOST_ROWS:]
        total = sum(ended.get(n, 0) for n in rest), sum(tried.get(n, 0) for n in rest)
        table.add_row(f"({len(rest)} more)", f"{total[0]:,}", f"{total[1]:,}")
    return table


def print_bias(bias: Bias, console: Any = None) -> None:
    """What is missing by group, difficulty and image, and the verdict."""
    from rich.markup import escape

    console = _console(console)
    for factor in bias.factors:
        console.print(_factor(factor))
        if factor.note:
            console.print(f"[dim]{factor.name}: {escape(factor.note)}[/dim]", soft_wrap=True)
    share = bias.missing / bias.requested if bias.requested else 0.0
    how = ", ".join(f"{n} {name.replace('_', ' ')}" for name, n in bias.by_outcome.items())
    console.print(
        f"missing: {bias.missing} of {bias.requested} rewards ({share:.1%}){': ' if how else ''}{how}"
    )
    if bias.reward_bounds is not None:
        low, high = bias.reward_bounds
        console.print(
            f"mean reward {number(bias.mean_reward)}; mean of the tasks' means {number(bias.mean_of_tasks)};"
            f" with the missing ones between {low:.4f} and {high:.4f}",
            soft_wrap=True,
        )
    style = "bold red" if bias.alarming else "bold"
    console.print(f"[{style}]{escape(bias.verdict)}[/]", soft_wrap=True)


def _factor(factor: Factor) -> Any:
    from rich.markup import escape
    from rich.table import Table

    p = (
        ""
        if factor.p is None
        else f" (by chance alone: p {'<' if factor.p < 1e-4 else '='} {max(factor.p, 1e-4):.4f})"
    )
    table = Table(title=f"missing by {factor.name}{p}", title_justify="left")
    table.add_column(factor.name)
    for name in ("asked for", "missing", "share", "mean reward", "with the missing ones"):
        table.add_column(name, justify="right")
    levels = list(factor.levels)
    if factor.name != "difficulty":
        levels.sort(key=lambda level: (-level.share, -level.requested, level.name))
    for level in levels[:MOST_ROWS]:
        low, high = level.reward_bounds
        bounds = f"{low:.3f} to {high:.3f}"
        cells = (
            f"{level.requested:,}",
            f"{level.missing:,}",
            f"{level.share:.1%}",
            number(level.mean_reward),
            bounds,
        )
        table.add_row(escape(level.name), *cells)
    if len(levels) > MOST_ROWS:
        rest = levels[MOST_ROWS:]
        asked, gone = sum(level.requested for level in rest), sum(level.missing for level in rest)
        table.add_row(f"({len(rest)} more)", f"{asked:,}", f"{gone:,}", f"{gone / asked:.1%}", "", "")
    return table


def number(value: float | None) -> str:
    return "-" if value is None else f"{value:.4f}"
