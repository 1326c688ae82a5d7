"""Numbers as JSON lines: one object a window, in the order of time."""

from __future__ import annotations

import errno
import json
import os
import threading
import time
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from ..errors import ConfigError
from .core import Snapshot
from .exporter import metrics_of


class JsonLines:
    """Appends what happened since the last line to a file.

    A line is whole or absent for a reader (one write each), and what it holds was never in another line. What
    could not be written (a full disk) is in the next line that can.

    Args:
        pool: a Pool, an AsyncPool, or Metrics.
        path: appended to; made when missing, its directory must exist.
    """

    def __init__(self, pool: Any, path: str | os.PathLike[str]) -> None:
        metrics = metrics_of(pool)
        if metrics is None:
            raise ConfigError("JsonLines needs a pool, not None")
        self.path = Path(path)
        self._window = metrics.window()
        self._owed = Snapshot()
        self._run = metrics.run
        self._lock = threading.Lock()
        try:
            self._file = self.path.open("ab", buffering=0)
        except OSError as error:
            raise ConfigError(f"cannot write {self.path}: {error.strerror}") from error

    def write(self, **fields: Any) -> dict[str, Any]:
        """Write a line with this window's numbers and *fields* (``step=3`` ...); returns what was written.

        Raises:
            ConfigError: a field is nothing that JSON can say, or the file was closed.
            OSError: it cannot be written; nothing of the line is in the file.
        """
        try:
            json.dumps(fields, allow_nan=False)
        except (TypeError, ValueError, RecursionError) as error:
            raise ConfigError(f"a line of {self.path} cannot hold {', '.join(fields)}: {error}") from None
        with self._lock:
            if self._file.closed:
                raise ConfigError(f"{self.path} was closed; no more lines can be written")
            self._owed = Snapshot.merge([self._owed, self._window.pop()])
            line = {"time": time.time(), "run": self._run, **fields, **self._owed.to_dict()}
            data = json.dumps(line, allow_nan=False).encode() + b"\n"
            done = self._file.write(data)
            if done != len(data):
                os.ftruncate(self._file.fileno(), os.fstat(self._file.fileno()).st_size - (done or 0))
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(self.path))
            self._owed = Snapshot()
        return line

    def close(self) -> None:
        """Twice is fine."""
        self._file.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()
