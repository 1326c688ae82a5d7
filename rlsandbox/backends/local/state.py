"""What a run leaves on this machine outside its processes, and its removal when the run is dead.

Processes, mounts and what lies on a tmpfs die with the run by themselves, also after a kill -9. A
directory of the run (``$RLSANDBOX_HOME/local/<run>``: upper layers on disk, a note) and its control
groups stay. Every run holds a lock on its directory for as long as its process lives; :func:`leftovers`
are those that nobody holds. A live run's are never touched, nor those of another machine that shares the
directory.

The lock is a POSIX one: a forked child of the trainer does not hold it, so it is free exactly when the
process that made it is gone.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import fcntl
import json
import logging
import os
import platform
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ... import _paths
from ...errors import ConfigError, SandboxError
from . import cgroups, worker
from .ids import IdMap
from .trees import remove_tree

log = logging.getLogger("rlsandbox.local")

# POSIX locks go when *any* descriptor of the file is closed: our own lock files are never opened again.
_OWN: set[str] = set()


@dataclass(frozen=True)
class Leftover:
    """What a dead run has left.

    Args:
        run: the name of its directory, or of its control group.
        path: that directory.
        pid: the process that it was.
        places: directories elsewhere that hold upper layers of it.
        group: whether it is a control group.
    """

    run: str
    path: Path
    pid: int
    places: tuple[Path, ...] = ()
    group: bool = False


class RunState:
    """The directory of this run. Made by :meth:`begin`, removed by :meth:`end`."""

    def __init__(self, path: Path, lock: int) -> None:
        self.path = path
        self.name = path.name
        self._lock = lock
        self._pid = os.getpid()
        self._places: list[Path] = []

    @classmethod
    def begin(cls, home: Path | None = None) -> RunState:
        """Raises ConfigError when the directory cannot be made or locked."""
        top = (home if home is not None else _paths.home()) / "local"
        path = top / f"{os.getpid()}-{os.urandom(4).hex()}"
        half = top / f".{path.name}"  # nobody looks at it before it is locked: a reaper would take the lock
        try:
            _paths.private_directory(half)
            lock = os.open(half / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
            fcntl.lockf(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            _OWN.add(str(path))
            half.rename(path)
        except OSError as error:
            raise ConfigError(
                f"the state directory {path} cannot be used: {error.strerror}",
                hint="set RLSANDBOX_HOME to a directory of yours on a local disk",
            ) from error
        self = cls(path, lock)
        self.note()
        return self

    def place(self, directory: str) -> Path:
        """A directory of this run for upper layers, in *directory* of the user's choice; noted first."""
        path = Path(directory).absolute() / f"rlsandbox-{self.name}"
        self.note(places=[str(path)])
        self._places.append(path)
        return _paths.private_directory(path)

    def note(self, *, places: Sequence[str] = ()) -> None:
        """Write down, before it is made, what has to be removed if this process dies."""
        data = {
            "pid": os.getpid(),
            "machine": machine_id(),
            "started": time.time(),
            "places": [*map(str, self._places), *places],
        }
        half = self.path / "note.new"
        half.write_text(json.dumps(data))
        half.rename(self.path / "note.json")

    def end(self) -> None:
        """Everything that was noted is gone: forget the run."""
        if os.getpid() != self._pid:
            return  # a forked child
        for path in [*self._places, self.path]:
            forget(path)
        os.close(self._lock)
        _OWN.discard(str(self.path))


def forget(path: Path) -> None:
    """Remove the directory *path* as far as that goes."""
    with contextlib.suppress(OSError):
        remove_tree(str(path))


def machine_id() -> str:
    """Tells machines and their restarts apart: what another one left cannot be judged from here."""
    with contextlib.suppress(OSError):
        return f"{platform.node()} {Path('/proc/sys/kernel/random/boot_id').read_text().strip()}"
    return platform.node()


def leftovers(home: Path | None = None) -> list[Leftover]:
    """What dead runs of this machine have left."""
    with contextlib.ExitStack() as locks:
        return list(_dead(home, locks))


async def reap(
    ids: IdMap, home: Path | None = None, *, older_s: float = 0.0
) -> tuple[list[Leftover], list[Leftover]]:
    """Remove what dead runs have left; (what was removed, what could not be).

    Only what was last written to more than *older_s* seconds ago. Files of foreign ids go from within their
    namespace.
    """
    removed: list[Leftover] = []
    kept: list[Leftover] = []
    with contextlib.ExitStack() as locks:
        found = await asyncio.to_thread(lambda: list(_dead(home, locks, older_s)))
        for dead in found:
            try:
                if dead.group:
                    await asyncio.to_thread(remove_group, dead.path)
                else:
                    for path in (*dead.places, dead.path):
                        await worker.call("remove", {"path": str(path)}, ids)
            except SandboxError as error:
                log.warning("what run %s has left could not be removed: %s", dead.run, error)
                kept.append(dead)
            else:
                (kept if dead.path.exists() else removed).append(dead)
    return removed, kept


def _dead(home: Path | None, locks: contextlib.ExitStack, older_s: float = 0.0) -> Iterator[Leftover]:
    """Dead runs, each locked by us until *locks* ends: two reapers never work on one."""
    for pid, group in cgroups.dead():
        if _untouched(group, older_s):
            yield Leftover(run=group.name, path=group, pid=pid, group=True)
    top = (home if home is not None else _paths.home()) / "local"
    try:
        names = sorted(os.listdir(top))
    except (FileNotFoundError, NotADirectoryError):
        return
    except OSError as error:
        raise _paths.unusable(top.parent, error.strerror or str(error)) from None
    for name in names:
        path = top / name
        if str(path) in _OWN or not path.is_dir() or not _untouched(path, older_s):
            continue
        if name.startswith("."):  # begun and not yet locked; a minute later, by one that was killed
            if _untouched(path, 60):
                forget(path)
            continue
        try:
            lock = os.open(path / "lock", os.O_RDWR | os.O_CLOEXEC)
        except FileNotFoundError:
            # In the middle of its removal; the young are left alone.
            if _untouched(path, 60):
                forget(path)
            continue
        except OSError:
            continue  # somebody else's
        locks.callback(os.close, lock)
        try:
            fcntl.lockf(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            if error.errno in (errno.EACCES, errno.EAGAIN):
                continue  # it lives
            raise
        note = _read(path / "note.json")
        # (a restart of this machine has ended the run as well)
        if str(note.get("machine", "")).rpartition(" ")[0] != machine_id().rpartition(" ")[0]:
            continue
        # Only directories that are named after the run: a note cannot lead us to anything else.
        places = [Path(place) for place in note.get("places", []) if Path(place).name == f"rlsandbox-{name}"]
        yield Leftover(
            run=name,
            path=path,
            pid=int(note.get("pid", 0)),
            places=tuple(place for place in places if place.is_dir() and not place.is_symlink()),
        )


def _untouched(path: Path, seconds: float) -> bool:
    """Whether it is there and was last written to that long ago: others remove theirs while we look."""
    try:
        return _paths.age_s(path) >= seconds
    except FileNotFoundError:
        return False


def _read(path: Path) -> dict[str, Any]:
    try:
        data = json.loads(path.read_text())
    except (OSError, ValueError):
        return {}
    return data if isinstance(data, dict) else {}


def remove_group(group: Path) -> None:
    """Remove a control group and those below it, unless processes are in one.

    A dead hub's have died with it; what lives there belongs to a hub whose process ids are not ours.
    """
    for top, _, _ in os.walk(group, topdown=False):
        with contextlib.suppress(OSError):
            os.rmdir(top)
