"""Who is alive: a file that a living process holds locked.

The lock goes with the process, however it ends. A forked child (a DataLoader worker) closes its copy at
once: the lock would otherwise outlive the process that took it.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import os
import tempfile
import time
import weakref
from pathlib import Path

try:
    import fcntl
except ImportError:  # pragma: no cover - not on POSIX
    fcntl = None  # type: ignore[assignment]

NO_LOCKS = frozenset({errno.ENOSYS, errno.ENOTSUP, errno.ENOLCK, errno.EOPNOTSUPP, errno.EINVAL})
"""What a filesystem without locks (Lustre mounted without ``flock``, some FUSE ones) answers."""

_held: weakref.WeakSet[RunLock] = weakref.WeakSet()


class RunLock:
    """An exclusive lock on *path*, held until :meth:`release` or the end of the process."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._fd: int | None = None
        self.supported = True

    def __repr__(self) -> str:
        return f"RunLock({self.path}, {'held' if self.held else 'free'})"

    @property
    def held(self) -> bool:
        return self._fd is not None

    def acquire(self, *, patience_s: float = 0.1) -> bool:
        """Take the lock; False when another one holds it.

        A prober (:meth:`alive`) holds it for microseconds: hence the patience. Where the filesystem has no
        locks the answer is True and ``supported`` is False.
        """
        if self._fd is not None:
            return True
        until = time.monotonic() + patience_s
        while True:
            # Others may look whether it is held, as they may read the ledger: what the umask leaves.
            fd = os.open(self.path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
            try:
                _flock(fd)
            except BlockingIOError:
                os.close(fd)
                if time.monotonic() >= until:
                    return False
                time.sleep(0.01)
                continue
            except OSError as error:
                if error.errno not in NO_LOCKS:
                    os.close(fd)
                    raise
                self.supported = False
            except BaseException:
                os.close(fd)
                raise
            self._fd = fd
            _held.add(self)
            # For people who look; nothing reads it back. The disk may be full: the lock counts all the same.
            with contextlib.suppress(OSError):
                os.ftruncate(fd, 0)
                os.pwrite(fd, f"pid {os.getpid()} on {os.uname().nodename}\n".encode(), 0)
            return True

    def release(self) -> None:
        fd, self._fd = self._fd, None
        _held.discard(self)
        if fd is not None:
            os.close(fd)

    @staticmethod
    def alive(path: Path) -> bool | None:
        """Whether a living process holds the lock at *path*; None where that cannot be told."""
        try:
            fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        except FileNotFoundError:
            return False
        except PermissionError:
            return None
        try:
            _flock(fd, shared=True)
        except BlockingIOError:
            return True
        except OSError as error:
            if error.errno in NO_LOCKS:
                return None
            raise
        finally:
            os.close(fd)
        return False


def lock_of(file: Path) -> Path:
    """The lock that guards a ledger *file*."""
    return file.with_name(file.name + ".lock")


def take(file: Path) -> RunLock | None:
    """The lock of a ledger *file*, held by us; None when another process holds it.

    Where the filesystem has no locks, one in this machine's temporary directory stands in: it keeps
    processes of one machine apart, not those of two.
    """
    lock = RunLock(lock_of(file))
    if not lock.acquire():
        return None
    if lock.supported:
        return lock
    lock.release()
    local = RunLock(_stand_in(file))
    if not local.acquire():
        return None
    local.supported = False
    return local


def alive(file: Path, *, host: str = "") -> bool | None:
    """Whether a living process writes the ledger *file*; None when that cannot be told from here.

    *host* is where its last writer ran; it matters only where the filesystem has no locks.
    """
    known = RunLock.alive(lock_of(file))
    if known is not None or is_hidden(file):
        return known
    if RunLock.alive(_stand_in(file)):
        return True
    return False if host == os.uname().nodename else None


def is_hidden(file: Path) -> bool:
    """Whether the lock of the ledger *file* is another user's, who lets nobody look at it."""
    lock = lock_of(file)
    return lock.exists() and not os.access(lock, os.R_OK)


def _stand_in(file: Path) -> Path:
    digest = hashlib.sha256(os.fsencode(os.path.realpath(file))).hexdigest()[:24]
    return Path(tempfile.gettempdir()) / f"rlsandbox-{os.getuid()}-{digest}.lock"


def _flock(fd: int, *, shared: bool = False) -> None:
    if fcntl is None:  # pragma: no cover - not on POSIX
        raise OSError(errno.ENOSYS, "no flock here")
    fcntl.flock(fd, (fcntl.LOCK_SH if shared else fcntl.LOCK_EX) | fcntl.LOCK_NB)


def _forget_in_child() -> None:
    for lock in list(_held):
        lock.release()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forget_in_child)
