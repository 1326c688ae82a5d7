"""Numbers as JSON lines: one object a window, in the order of time."""

from __future__ import annotations

import json
import os
import threading
import time
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from ..errors import ConfigError
from .exporter import metrics_of


class JsonLines:
    """Appends what happened since the last line to a file.

    A line is whole or absent for a reader (one write each), and what it holds was never in another line.

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
        self._run = metrics.run
        self._lock = threading.Lock()
        try:
            self._file = self.path.open("ab", buffering=0)
        except OSError as error:
            raise ConfigError(f"cannot write {self.path}: {error.strerror}") from error

    def write(self, **fields: Any) -> dict[str, Any]:
        """Write a line with this window's numbers and *fields* (``step=3`` ...); returns what was written."""
        with self._lock:
            if self._file.closed:
                raise ConfigError(f"{self.path} was closed; no more lines can be written")
            line = {"time": time.time(), "run": self._run, **fields, **self._window.pop().to_dict()}
            data = json.dumps(line, allow_nan=False).encode() + b"\n"
            self._file.write(data)
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
