"""Which ledger files a command line means."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path
from typing import TYPE_CHECKING

import click

from .._paths import home
from .._settings import nearest
from ..errors import ConfigError, LedgerError

if TYPE_CHECKING:
    from ..ledger.records import Book

_NAMED = 5
NO_RUNS = "no runs yet"


def directory_of(given: str | None) -> Path:
    path = home() if given is None else Path(given)
    if given is not None and not os.path.isdir(path):
        raise ConfigError(f"--ledger: there is no directory {path}")
    return path


def ledgers_in(directory: Path) -> list[Path]:
    """First files of the runs in *directory*, oldest first."""
    from ..ledger import reading

    return reading.ledgers_in(directory) if os.path.isdir(directory) else []


def files_of(runs: tuple[str, ...], directory: str | None) -> list[Path]:
    """Files of the runs that are meant."""
    from ..ledger import places, reading

    place = directory_of(directory)
    if not runs:
        latest = [path for path in ledgers_in(place) if reading.is_ours(path)][-1:]
        if not latest:
            raise ConfigError(f"{NO_RUNS} in {place}", hint="name a ledger file, or --ledger DIR")
        return reading.run_files(latest[0])
    files: list[Path] = []
    for run in runs:
        path = Path(run)
        if path.suffix in (*places.SUFFIXES, ".jsonl") and os.path.isfile(path):
            files += reading.run_files(path.absolute())
            continue
        found = [place / f"{run}{end}" for end in places.SUFFIXES if os.path.isfile(place / f"{run}{end}")]
        if not found:
            names = [ledger.stem for ledger in ledgers_in(place)]
            if os.path.isfile(path):
                known = ", ".join((*places.SUFFIXES, ".jsonl"))
                raise ConfigError(f"{run} is no ledger file: those end in {known}")
            near = nearest(run, names)
            if near.startswith("; known") and len(names) > _NAMED:
                near = f"; the last: {', '.join(names[-_NAMED:])} (of {len(names)})"
            raise ConfigError(f"there is no run and no ledger file {run!r:.300} (in {place}){near}")
        files += reading.run_files(found[0])
    return list(dict.fromkeys(files))


def book_of(runs: tuple[str, ...], directory: str | None) -> Book:
    from ..ledger import reading

    files = files_of(runs, directory)
    book = reading.read(files)
    if not runs and not book.rollouts:
        told = f"the latest run, {files[0].stem}, has asked for no rollout"
        before = _last_with_rollouts(directory_of(directory))
        click.echo(f"{told}; the last one that has: {before}" if before else told, err=True)
    return book


def _last_with_rollouts(place: Path) -> str | None:
    from ..ledger import reading

    for path in reversed(ledgers_in(place)):
        with contextlib.suppress(LedgerError):  # what cannot be read is no answer
            if reading.read(reading.run_files(path)).rollouts:
                return path.stem
    return None


def alive(file: Path) -> bool | None:
    from ..ledger import lock, reading
    from ..ledger.records import fold

    known = lock.RunLock.alive(lock.lock_of(file))
    if known is not None:
        return known
    processes = fold(reading.stream(file)).processes
    return lock.alive(file, host=processes[-1].host if processes else "")


def remove(files: list[Path]) -> str | None:
    """The run's files with their locks held, so that none comes to life meanwhile; why they stay."""
    from ..ledger import lock

    with contextlib.ExitStack() as held:
        try:
            for file in files:
                taken = lock.take(file)
                if taken is None:
                    return "it has come to life"
                held.callback(taken.release)
            for file in files:
                for end in ("", "-wal", "-shm", ".lock"):
                    file.with_name(file.name + end).unlink(missing_ok=True)
        except OSError as error:
            return (error.strerror or str(error)).lower()
    return None
