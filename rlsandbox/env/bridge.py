"""From an environment's caller to the pool: opened when it is first needed, closed when it is our own."""

from __future__ import annotations

import inspect
import os
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar

from .._settings import nearest
from ..errors import ConfigError, PoolClosedError

T = TypeVar("T")


class Bridge:
    """A pool given by the caller, or one of the environment's own, for *size* sandboxes at once.

    An environment's own pool is made at its first reset: environments are made to be looked at, copied and
    counted (``gym.make_vec`` with processes makes one more than it uses), and a pool costs something.
    """

    def __init__(self, pool: Any, pool_kwargs: dict[str, Any], *, size: int) -> None:
        if pool is not None and pool_kwargs:
            name = sorted(pool_kwargs)[0]
            raise ConfigError(f"{name}= belongs to a pool of the environment's own, but pool= is given")
        if pool is not None:
            if not hasattr(pool, "_portal"):
                hint = "an AsyncPool cannot be used here" if hasattr(pool, "claim") else "rlsandbox.Pool(...)"
                raise ConfigError(f"pool= takes a Pool, not {type(pool).__name__}", hint=hint)
            if pool.max_size < size:
                raise ConfigError(
                    f"{size} environments need {size} sandboxes at once, the pool may have {pool.max_size}",
                    hint=f"Pool(size=...) or max_size={size} and more",
                )
        self._own = pool is None
        self._pool = pool
        if pool_kwargs:
            from .. import Pool

            known = [name for name in inspect.signature(Pool).parameters if name != "self"]
            for name in pool_kwargs:
                if name not in known:
                    raise ConfigError(f"an environment's pool takes no {name}={nearest(name, known)}")
        self._kwargs = {"size": size, **pool_kwargs}
        self._closed = False
        self._pid = os.getpid()

    def check(self) -> None:
        """Raise if the environment is closed; opens nothing."""
        if self._closed:
            raise PoolClosedError("this environment is closed", hint="make a new one")

    @property
    def pool(self) -> Any:
        self.check()
        if self._pool is None:
            from .. import Pool

            self._pool = Pool(**self._kwargs)
        return self._pool

    def call(self, fn: Callable[..., Coroutine[Any, Any, T]], *args: Any) -> T:
        """Run a coroutine function on the pool's event loop; meanwhile the caller is blocked on sandboxes."""
        pool = self.pool
        with pool.metrics.idle.blocked():
            result: T = pool._portal.call(fn, *args)
        return result

    @property
    def asynchronous(self) -> Any:
        """The AsyncPool behind the pool."""
        return self.pool._pool

    def facade(self, sandbox: Any) -> Any:
        """The synchronous Sandbox over an AsyncSandbox."""
        return self.pool._facade(sandbox)

    @property
    def closed(self) -> bool:
        return self._closed

    @property
    def started(self) -> bool:
        """Whether there is a pool to talk to: episodes may be under way."""
        return self._pool is not None and not self._closed

    def close(self) -> None:
        """Close the pool if it is our own. Twice is fine."""
        if self._closed:
            return
        self._closed = True
        pool, self._pool = self._pool, None
        if self._own and pool is not None and os.getpid() == self._pid:
            pool.close()
