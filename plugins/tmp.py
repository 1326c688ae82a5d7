"""Scratch places: /tmp, /var/tmp, /run, shared memory and POSIX message queues, hidden files included."""

from __future__ import annotations

from collections.abc import Iterator

from rlsandbox.hooks import Inspector, Resetter, Residue, hookimpl

from ._common import named, undo, within

PLACES = {
    "/tmp": "tmp",
    "/var/tmp": "tmp",
    "/run": "tmp",
    "/var/run": "tmp",
    "/var/lock": "tmp",
    "/dev/shm": "shared memory",
    "/dev/mqueue": "message queue",
}


@hookimpl
def rlsandbox_reset(resetter: Resetter) -> None:
    undo(resetter, lambda path: within(path, *PLACES) and path not in PLACES)
    undo(resetter, lambda path: path in PLACES)


@hookimpl
def rlsandbox_verify(inspector: Inspector) -> Iterator[Residue]:
    for place, kind in PLACES.items():
        yield from named(inspector, kind, lambda path: "", place)
