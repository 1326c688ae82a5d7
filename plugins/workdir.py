"""The task's working directory, whatever git thinks of it: ignored files, modes and times count too."""

from __future__ import annotations

from collections.abc import Iterator

from rlsandbox.hooks import Inspector, Resetter, Residue, hookimpl

from ._common import named, undo


@hookimpl
def rlsandbox_reset(resetter: Resetter) -> None:
    workdir = _workdir(resetter)
    if workdir is not None:
        undo(resetter, lambda path: True, workdir)


@hookimpl
def rlsandbox_verify(inspector: Inspector) -> Iterator[Residue]:
    workdir = _workdir(inspector)
    if workdir is not None:
        yield from named(inspector, "workdir", lambda path: "", workdir)


def _workdir(inspector: Inspector) -> str | None:
    """None for a task without one, and for ``/``, which is everybody's."""
    workdir = inspector.task.workdir if inspector.task is not None else None
    return (workdir.rstrip("/") or None) if workdir else None
