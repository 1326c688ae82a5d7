"""What exporters share: the handle that ends one, and whose numbers they carry."""

from __future__ import annotations

from collections.abc import Callable
from types import TracebackType
from typing import Any, Self

from ..errors import ConfigError
from .core import Metrics


class Exporter:
    """A running exporter. It ends with :meth:`close`, with its ``with`` block, or with the process."""

    def __init__(self, stop: Callable[[], None], *, address: str, port: int | None = None) -> None:
        self.address = address
        self.port = port
        self._stop: Callable[[], None] | None = stop

    def close(self) -> None:
        """Stop exporting; twice is fine."""
        stop, self._stop = self._stop, None
        if stop is not None:
            stop()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def __repr__(self) -> str:
        return f"<Exporter {self.address}{' (closed)' if self._stop is None else ''}>"


def metrics_of(pool: Any) -> Metrics | None:
    """The metrics of a Pool, an AsyncPool, or themselves; None stands for those of every pool."""
    if pool is None or isinstance(pool, Metrics):
        return pool
    metrics = getattr(pool, "metrics", None)
    if not isinstance(metrics, Metrics):
        raise ConfigError(f"a pool is needed, not {type(pool).__name__}")
    return metrics
