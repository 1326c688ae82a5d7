"""A progress bar for long batches."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator
from typing import Any

from ..results import Record


class Tell:
    """Takes records; without a bar it only counts."""

    def __init__(self, bar: Any = None, task: Any = None) -> None:
        self._bar = bar
        self._task = task
        self._rewards = 0.0
        self._rewarded = self._broken = 0

    def skipped(self, n: int) -> None:
        if self._bar is not None and n:
            self._bar.update(self._task, completed=n)

    def record(self, record: Record) -> None:
        if record.reward is not None:
            self._rewards += record.reward
            self._rewarded += 1
        self._broken += record.status != "completed"
        if self._bar is not None:
            mean = f"{self._rewards / self._rewarded:.3f}" if self._rewarded else "-"
            broken = f"[red]{self._broken}[/red]" if self._broken else "0"
            self._bar.update(self._task, advance=1, mean=mean, broken=broken)


@contextlib.contextmanager
def progress_bar(show: bool | None, total: int) -> Iterator[Tell]:
    """A bar on stderr; *show* None means: where stderr is a terminal."""
    # A process without stderr (a daemon that closed it) has None there.
    if not ((sys.stderr is not None and sys.stderr.isatty()) if show is None else show):
        yield Tell()
        return
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
    from rich.progress import TimeRemainingColumn as Remaining

    columns = (
        TextColumn("rollouts"),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("mean reward {task.fields[mean]}  missing {task.fields[broken]}"),
        TimeElapsedColumn(),
        Remaining(),
    )
    with Progress(*columns, console=Console(stderr=True)) as bar:
        yield Tell(bar, bar.add_task("rollouts", total=total, mean="-", broken="0"))
