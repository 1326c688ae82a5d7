"""This side of copying: walking a local directory, finding holes, and writing only where we were told to."""

from __future__ import annotations

import contextlib
import errno
import fnmatch
import logging
import os
import stat
from collections.abc import Sequence
from dataclasses import dataclass

from ..errors import ConfigError

logger = logging.getLogger("rlsandbox")

CHUNK = 1 << 20


class Excluded:
    """Globs over relative paths; what matches is left out with all that is in it.

    One without a slash matches a name at any depth, one with a slash the path from the top, ``**`` any number
    of directories.
    """

    def __init__(self, patterns: Sequence[str]) -> None:
        if isinstance(patterns, str):
            patterns = (patterns,)
        for pattern in patterns:
            if not isinstance(pattern, str):
                raise ConfigError(f"exclude must be a list of globs, not one with {pattern!r}")
        self._names = [p.rstrip("/") for p in patterns if "/" not in p.rstrip("/")]
        self._paths = [p.strip("/").removeprefix("./").split("/") for p in patterns if "/" in p.rstrip("/")]

    def __call__(self, relative: str) -> bool:
        parts = relative.split("/")
        if any(fnmatch.fnmatchcase(parts[-1], name) for name in self._names):
            return True
        return any(_match(parts, pattern) for pattern in self._paths)


def _match(parts: Sequence[str], pattern: Sequence[str]) -> bool:
    if not pattern:
        return not parts
    if pattern[0] == "**":
        return any(_match(parts[i:], pattern[1:]) for i in range(len(parts) + 1))
    if not parts or not fnmatch.fnmatchcase(parts[0], pattern[0]):
        return False
    return _match(parts[1:], pattern[1:])


@dataclass(frozen=True)
class Local:
    path: str
    relative: str
    kind: str
    mode: int
    size: int
    target: bytes = b""


def walk(top: str, excluded: Excluded) -> list[Local]:
    """Everything under a local directory, parents first; never through a link."""
    found: list[Local] = []
    stack = [("", top)]
    while stack:
        relative, path = stack.pop()
        with os.scandir(path) as entries:
            rows = sorted(entries, key=lambda entry: entry.name)
        for entry in rows:
            name = f"{relative}/{entry.name}" if relative else entry.name
            if excluded(name):
                continue
            info = entry.stat(follow_symlinks=False)
            mode = stat.S_IMODE(info.st_mode)
            if stat.S_ISDIR(info.st_mode):
                found.append(Local(entry.path, name, "dir", mode, 0))
                stack.append((name, entry.path))
            elif stat.S_ISLNK(info.st_mode):
                target = os.readlink(os.fsencode(entry.path))
                found.append(Local(entry.path, name, "symlink", mode, 0, target))
            elif stat.S_ISREG(info.st_mode):
                found.append(Local(entry.path, name, "file", mode, info.st_size))
            else:
                logger.warning("upload: %s is no file, directory or link and was left out", entry.path)
    return found


def open_file(path: str) -> int:
    """A descriptor of a regular file; anything else would block (a fifo) or never end (a device).

    Raises:
        ConfigError: it is none, or no longer.
    """
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    if not stat.S_ISREG(os.fstat(fd).st_mode):
        os.close(fd)
        raise ConfigError(f"{path} is neither a file nor a directory and cannot be uploaded")
    return fd


def read_small(path: str, size: int) -> bytes:
    """The first *size* bytes: what it has grown by since is not part of it."""
    with open(open_file(path), "rb") as file:
        return file.read(size)


def extents_of(path: str, size: int) -> list[tuple[int, int]]:
    """Where a file's data lies; holes below a chunk are not worth a request."""
    found: list[tuple[int, int]] = []
    fd = open_file(path)
    try:
        at = 0
        while at < size:
            try:
                start = os.lseek(fd, at, os.SEEK_DATA)
                stop = min(os.lseek(fd, start, os.SEEK_HOLE), size)
            except OSError as error:
                if error.errno != errno.ENXIO:
                    raise
                break  # nothing but a hole up to the end
            if found and start - found[-1][1] < CHUNK:
                found[-1] = (found[-1][0], stop)
            else:
                found.append((start, stop))
            at = stop
    finally:
        os.close(fd)
    return found


class Tree:
    """A local directory that is written under, and never outside: no link below the top is followed."""

    def __init__(self, top: str) -> None:
        self._top = os.open(top, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)

    def close(self) -> None:
        os.close(self._top)

    def _parent(self, relative: str) -> tuple[int, str]:
        """A descriptor of the directory that holds *relative*, and the last name. What is in the way goes."""
        *parents, name = relative.split("/")
        fd = os.dup(self._top)
        try:
            for part in parents:
                self._dir(fd, part)
                inner = os.open(part, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=fd)
                os.close(fd)
                fd = inner
        except BaseException:
            os.close(fd)
            raise
        return fd, name

    def _dir(self, fd: int, name: str) -> None:
        try:
            os.mkdir(name, 0o700, dir_fd=fd)
        except FileExistsError:
            if not stat.S_ISDIR(os.stat(name, dir_fd=fd, follow_symlinks=False).st_mode):
                os.unlink(name, dir_fd=fd)
                os.mkdir(name, 0o700, dir_fd=fd)

    def make_dir(self, relative: str) -> None:
        fd, name = self._parent(relative)
        try:
            self._dir(fd, name)
        finally:
            os.close(fd)

    def set_mode(self, relative: str, mode: int) -> None:
        fd, name = self._parent(relative)
        try:
            inner = os.open(name, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=fd)
            try:
                os.fchmod(inner, mode)
            finally:
                os.close(inner)
        finally:
            os.close(fd)

    def create(self, relative: str) -> int:
        """A new file, in place of one that is there."""
        fd, name = self._parent(relative)
        try:
            with contextlib.suppress(FileNotFoundError):
                os.unlink(name, dir_fd=fd)
            flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
            return os.open(name, flags, 0o600, dir_fd=fd)
        finally:
            os.close(fd)

    def write(self, relative: str, data: bytes, mode: int) -> None:
        fd = self.create(relative)
        with open(fd, "wb") as file:
            file.write(data)
            os.fchmod(file.fileno(), mode)

    def make_link(self, relative: str, target: bytes) -> None:
        fd, name = self._parent(relative)
        try:
            with contextlib.suppress(FileNotFoundError):
                os.unlink(name, dir_fd=fd)
            os.symlink(target, os.fsencode(name), dir_fd=fd)
        finally:
            os.close(fd)
