"""From the arguments of :class:`~rlsandbox.Pool` and the configuration to the pool's numbers and backend."""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import TYPE_CHECKING

from ..backends.base import Backend
from ..config import Config
from ..spec import parse_size

if TYPE_CHECKING:
    from ..backends.base import Capabilities


@dataclass(frozen=True)
class Numbers:
    """How large the pool is."""

    size: int
    max_size: int
    max_creating: int
    layer_budget: int


def numbers_of(config: Config, backend: Backend) -> Numbers:
    """Checked against what the place can hold.

    Raises:
        ConfigError: it can never fit.
    """
    pool = config.pool
    size, max_size = pool.size, pool.max_size
    if size is None:
        size = max_size if max_size is not None else _default_size()
    if max_size is None:
        max_size = max(size, 1)
    check = getattr(backend, "check_size", None)
    if check is not None:
        check(max_size, config.spec)
    creating = pool.max_creating
    if creating is None:
        creating = int(getattr(backend, "max_creating", 8))
    return Numbers(size, max_size, creating, layer_budget())


def write_rate(config: Config, capabilities: Capabilities) -> float | None:
    return config.pool.write_rate if config.pool.write_rate is not None else capabilities.max_writes_per_s


def layer_budget() -> int:
    """Bytes of layers to keep: a quarter of the memory, or what ``RLSANDBOX_LAYER_BUDGET`` says."""
    said = os.environ.get("RLSANDBOX_LAYER_BUDGET")
    if said:
        return parse_size(said, "RLSANDBOX_LAYER_BUDGET")
    try:
        memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    except (ValueError, OSError):
        memory = 4 << 30
    return memory // 4


def _default_size() -> int:
    return max(2, min(8, os.cpu_count() or 2))
