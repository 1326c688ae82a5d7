"""Processes: whatever an episode left running is ended, and whatever is alive afterwards is named."""

from __future__ import annotations

from collections.abc import Iterator

from rlsandbox.hooks import Inspector, Resetter, Residue, hookimpl


@hookimpl
def rlsandbox_reset(resetter: Resetter) -> None:
    if any(True for _ in resetter.processes()):
        resetter.kill_all()


@hookimpl
def rlsandbox_verify(inspector: Inspector) -> Iterator[Residue]:
    for process in inspector.processes():
        yield Residue(
            "process",
            " ".join(process.argv) or process.command,
            f"pid {process.pid}, parent {process.ppid}, uid {process.uid}, state {process.state}",
        )
