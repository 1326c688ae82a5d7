"""The pool: decisions in :mod:`.core`, effects in :mod:`.driver`; held as :mod:`.pool` or :mod:`.sync`."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .ahead import AsyncClaim
    from .driving import AsyncEpisode, Episode
    from .owner import PoolRef
    from .pool import AsyncPool
    from .stats import PoolStats
    from .sync import Claim, Pool

_LAZY = {
    "AsyncClaim": "ahead",
    "AsyncEpisode": "driving",
    "AsyncPool": "pool",
    "Claim": "sync",
    "Episode": "driving",
    "Pool": "sync",
    "PoolRef": "owner",
    "PoolStats": "stats",
}

__all__ = ["AsyncClaim", "AsyncEpisode", "AsyncPool", "Claim", "Episode", "Pool", "PoolRef", "PoolStats"]


def __getattr__(name: str) -> Any:
    # The core is usable (and tested) without the rooms that the pool stands on.
    if name not in _LAZY:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(import_module(f".{_LAZY[name]}", __name__), name)
    globals()[name] = value
    return value
