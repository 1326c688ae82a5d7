"""Pool and Claim: the same for callers that do not await, over a portal of their own."""

from __future__ import annotations

import atexit
import logging
import os
import signal
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from types import FrameType, TracebackType
from typing import TYPE_CHECKING, Any, Literal, Self

from .._mirror import mirrors
from .._portal import Portal
from .._sandbox.host import Live
from ..errors import PoolClosedError
from ..results import Record
from ..task import Task
from .ahead import AsyncClaim
from .closing import refuse_inside_policy
from .pool import CLOSE_S, AsyncPool

if TYPE_CHECKING:
    from os import PathLike

    from ..backends.base import Backend
    from ..ledger.report import Report
    from ..metrics import Metrics
    from ..sandbox import Sandbox, Snapshot
    from ..spec import Spec
    from .owner import PoolRef
    from .stats import PoolStats

log = logging.getLogger("rlsandbox.pool")

Policy = Callable[["Sandbox", Task], Any]
AT_EXIT_S = 5.0


@mirrors(AsyncPool)
class Pool:
    """A pool of warm sandboxes; with or without ``with``. Arguments: see :class:`AsyncPool`."""

    def __init__(
        self,
        backend: str | Backend | None = None,
        *,
        size: int | None = None,
        max_size: int | None = None,
        spec: Spec | None = None,
        when_empty: Literal["create", "wait", "fail"] | None = None,
        max_creating: int | None = None,
        write_rate: float | None = None,
        run: str | None = None,
        ledger: str | PathLike[str] | None = None,
        plugins: Sequence[object] = (),
        block: Sequence[str] = (),
        config: str | PathLike[str] | Literal[False] | None = None,
        profile: str | None = None,
    ) -> None:
        pool = AsyncPool(
            backend, size=size, max_size=max_size, spec=spec, when_empty=when_empty,
            max_creating=max_creating, write_rate=write_rate, run=run, ledger=ledger,
            plugins=plugins, block=block, config=config, profile=profile,
        )  # fmt: skip
        self._begin(pool)

    def _begin(self, pool: AsyncPool) -> None:
        self._pool = pool
        self._pid = os.getpid()
        self._portal = Portal("rlsandbox-pool")
        try:
            self._portal.call(pool.start)
        except BaseException:
            try:
                self._portal.call(pool.end, 5.0)
            finally:
                pool.ledger.close()
                self._portal.close()
            raise
        self._side = _Side(self._portal)
        _open[id(pool)] = (pool, self._portal)
        _chain_signals()

    def __repr__(self) -> str:
        return repr(self._pool).replace("AsyncPool", "Pool", 1)

    def __copy__(self) -> Self:
        return self

    def __deepcopy__(self, memo: object) -> Self:
        return self

    def __reduce__(self) -> Any:
        return self._pool.__reduce__()

    @property
    def run(self) -> str:
        return self._pool.run

    @property
    def size(self) -> int:
        return self._pool.size

    @property
    def max_size(self) -> int:
        return self._pool.max_size

    @property
    def metrics(self) -> Metrics:
        return self._pool.metrics

    @property
    def closed(self) -> bool:
        return self._portal.closed

    @property
    def ref(self) -> PoolRef:
        """How other processes of this machine find the pool: see :meth:`AsyncPool.ref`."""

        async def ref() -> PoolRef:
            return self._pool.ref

        return self._portal.call(ref)

    @classmethod
    def connect(cls, ref: PoolRef) -> Pool:
        """The pool of another process: see :meth:`AsyncPool.connect`."""
        pool = cls.__new__(cls)
        pool._begin(AsyncPool.connect(ref))
        return pool

    # -- claiming ------------------------------------------------------------------------------------

    def claim(self, task: Task | Snapshot, *, timeout: float | None = None) -> Sandbox:
        """See :meth:`AsyncPool.claim`. The sandbox is its own context manager."""
        return self._side.sandbox(self._portal.call(self._pool._claim_within, _async(task), timeout))

    def claim_ahead(self, task: Task | Snapshot) -> Claim:
        """See :meth:`AsyncPool.claim_ahead`."""
        asked = _async(task)

        async def ask() -> AsyncClaim:
            return self._pool.claim_ahead(asked)

        return Claim(self, self._portal.call(ask))

    def expect(self, tasks: Iterable[Task], *, group_size: int = 1, replace: bool = False) -> None:
        """See :meth:`AsyncPool.expect`. Never waits, not even for the pool's own thread."""
        self._portal.check()
        demand = self._pool.demand(tasks, group_size)
        self._portal.post(self._pool.tell_expected, demand, replace)

    def wait_ready(self, n: int | None = None, *, timeout: float | None = None) -> int:
        """See :meth:`AsyncPool.wait_ready`."""

        async def wait() -> int:
            return await self._pool.wait_ready(n, timeout=timeout)

        return self._portal.call(wait)

    def _facade(self, sandbox: Any) -> Sandbox:
        return self._side.sandbox(sandbox)

    # -- rollouts ------------------------------------------------------------------------------------

    def rollouts(
        self,
        tasks: Iterable[Task],
        policy: Policy,
        *,
        group_size: int = 1,
        concurrency: int | None = None,
        retries: int = 2,
        timeout: float | None = None,
        resume: bool = False,
    ) -> Iterator[Record]:
        """See :meth:`AsyncPool.rollouts`; each policy runs on a thread of its own."""
        from .rollouts import sync_rollouts

        self._portal.check()
        return sync_rollouts(
            self._pool, self._side, tasks, policy, group_size=group_size, concurrency=concurrency,
            retries=retries, timeout=timeout, resume=resume,
        )  # fmt: skip

    def run_rollouts(
        self,
        tasks: Iterable[Task],
        policy: Policy,
        *,
        group_size: int = 1,
        concurrency: int | None = None,
        retries: int = 2,
        timeout: float | None = None,
        resume: bool = False,
        progress: bool | None = None,
    ) -> Report:
        """:meth:`rollouts` to the end, as a report."""
        from .rollouts import sync_run_rollouts

        self._portal.check()
        return sync_run_rollouts(
            self._pool, self._side, tasks, policy, group_size=group_size, concurrency=concurrency,
            retries=retries, timeout=timeout, resume=resume, progress=progress,
        )  # fmt: skip

    def report(self) -> Report:
        """The whole run so far."""
        return self._pool.report()

    # -- looking at it -------------------------------------------------------------------------------

    def stats(self) -> PoolStats:
        """See :meth:`AsyncPool.stats`."""

        return self._portal.call(self._pool.stats_now)

    def snapshots(self) -> list[Snapshot]:
        """Those that were not deleted."""
        return [self._side.snapshot(s) for s in self._portal.call(self._pool.snapshots_now)]

    # -- closing -------------------------------------------------------------------------------------

    def close(self, timeout: float | None = CLOSE_S) -> None:
        """See :meth:`AsyncPool.close`."""
        refuse_inside_policy(self._pool)
        if os.getpid() == self._pid:
            _close(self._pool, self._portal, timeout)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, exc_type: type[BaseException] | None, exc: BaseException | None, tb: TracebackType | None
    ) -> None:
        self.close()


@mirrors(AsyncClaim)
class Claim(Live):
    """See :class:`AsyncClaim`."""

    def __init__(self, pool: Pool, claim: AsyncClaim) -> None:
        self._pool, self._async = pool, claim

    def done(self) -> bool:
        return self._async.done()

    def result(self, timeout: float | None = None) -> Sandbox:
        """The sandbox; time to first command runs from here."""

        async def result() -> Any:
            return await self._async.result(timeout)

        return self._pool._facade(self._pool._portal.call(result))

    def cancel(self) -> bool:
        """Give it up; True unless its sandbox was taken by result()."""
        return self._pool._portal.call(self._async.cancel)


class _Side:
    """From asynchronous to synchronous handles."""

    def __init__(self, portal: Portal) -> None:
        self.portal = portal

    def sandbox(self, sandbox: Any) -> Sandbox:
        from ..sandbox import Sandbox

        return Sandbox(sandbox, self.portal)

    def snapshot(self, snapshot: Any) -> Snapshot:
        from ..sandbox import Snapshot

        return Snapshot(snapshot, self.portal)


def _async(task: Any) -> Any:
    """A Task as it is, a Snapshot's asynchronous twin."""
    return task if isinstance(task, Task) else getattr(task, "_async", task)


_open: dict[int, tuple[AsyncPool, Portal]] = {}
"""Pools that somebody has to close: sandboxes of one that was forgotten may still be in use."""


def _close(pool: AsyncPool, portal: Portal, timeout: float | None) -> None:
    open_ = _open.pop(id(pool), None) is not None
    if portal.closed and not (portal.broken and open_):
        return
    try:
        portal.call(pool.end, timeout)
    except PoolClosedError:
        if not portal.closed or portal.broken:  # else another thread has closed it at the same time
            raise
    finally:
        try:
            pool.ledger.close()
        finally:
            portal.close()


def close_all(timeout: float = AT_EXIT_S) -> None:
    """Close every pool of this process."""
    for pool, portal in list(_open.values()):
        try:
            _close(pool, portal, timeout)
        except Exception:
            log.exception("pool %s could not be closed", pool.run)


atexit.register(close_all)


def _chain_signals() -> None:
    """Signals that would end the process without a word close the pools first.

    Only where nobody has a handler: a handler that ends the process does it by an exception, and then atexit
    closes the pools; one that does not is none of our business.
    """
    if threading.current_thread() is not threading.main_thread():
        return
    for number in (signal.SIGTERM, signal.SIGHUP, signal.SIGINT):
        if signal.getsignal(number) is signal.SIG_DFL:
            signal.signal(number, _terminate)


def _terminate(number: int, frame: FrameType | None) -> None:
    # The main thread may hold any lock: another one closes, and then the signal does what it would have done.
    # It waits here meanwhile, within bounds: else it would go on with pools that are closed, and fail.
    # The closing ends the process itself: the bounds are only for one that hangs.
    signal.signal(number, signal.SIG_DFL)
    pid = os.getpid()

    def end() -> None:
        close_all()
        os.kill(pid, number)

    closing = threading.Thread(target=end, name="rlsandbox-terminate")
    closing.start()
    closing.join(CLOSE_S)


__all__ = ["Claim", "Pool", "close_all"]
