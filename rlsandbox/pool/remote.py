"""A pool that belongs to another process of this machine: ranks, ray workers, spawned processes.

Claims go to the owner, sandboxes come with their keeper's stream, and from then on commands take no detour.
Records are kept in a ledger beside the owner's, numbers here and there.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import os
import socket
from collections.abc import Iterable, Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

from ..config import load_config
from ..errors import ConfigError, PoolClosedError, UnsupportedError
from ..hooks import Rollout, plugin_manager
from ..ledger import Ledger
from ..metrics import Metrics
from ..task import Task
from .ahead import Need
from .borrowing import Borrower
from .channel import Channel, ChannelClosedError, ask_blocking
from .owner import CLOSING, PoolRef, plain
from .pool import AsyncPool

if TYPE_CHECKING:
    from ..sandbox import AsyncSandbox, AsyncSnapshot
    from .stats import PoolStats

log = logging.getLogger("rlsandbox.pool")

_QUIET_S = 5.0
_KNOCK_S = 30.0


class RemotePool(AsyncPool):
    """The same methods as the owner's pool; made by ``connect``. Closing it gives back what it holds."""

    def __init__(self, ref: PoolRef) -> None:
        if not isinstance(ref, PoolRef):
            raise ConfigError(f"connect() takes a PoolRef (pool.ref), not {type(ref).__name__}")
        if ref.host != os.uname().nodename:
            raise UnsupportedError(
                f"the pool's owner runs on {ref.host}, this process on {os.uname().nodename}",
                phase="config",
                hint="a pool is shared within a machine; give each machine a pool of its own, by number",
            )
        self.reference = ref
        self.run = ref.run
        self.closed = False
        self.metrics = Metrics(run=ref.run)
        self._pid = os.getpid()
        self._starting = None
        self._driver = None
        self._exporters = []
        self._channel: Channel | None = None
        self._reader: asyncio.Task[None] | None = None
        self._answers: dict[int, asyncio.Future[tuple[Any, list[int]]]] = {}
        self._closing = False
        """The owner has said that it closes the pool."""
        self._asks = itertools.count(1)
        self._remote = Borrower(self)
        self._told: set[asyncio.Task[Any]] = set()
        self.config = load_config(False)
        self._sock, about = _knock(ref)
        self._numbers_of = (about["size"], about["max_size"])
        self.spec = about["spec"]
        self.backend: Any = SimpleNamespace(name=about["backend"])
        self.plugins = plugin_manager(block=about["block"])
        self.manager = self.plugins
        self.ledger = Ledger.open(ref.run, Path(about["ledger"]), facts={"owner": ref.pid})

    @property
    def size(self) -> int:
        return int(self._numbers_of[0])

    @property
    def max_size(self) -> int:
        return int(self._numbers_of[1])

    def __repr__(self) -> str:
        state = "closed" if self.closed else f"of process {self.reference.pid}, {len(self._remote.held)} held"
        return f"<{type(self).__name__} {self.backend.name} {self.run}: {state}>"

    def now(self) -> float:
        return asyncio.get_running_loop().time()

    @property
    def ref(self) -> PoolRef:
        return self.reference

    # -- the connection ------------------------------------------------------------------------------

    async def start(self) -> Any:
        self._check()
        if self._channel is None:
            self._channel = Channel(self._sock)
            self._reader = asyncio.get_running_loop().create_task(self._read(self._channel))
        return None

    async def _read(self, channel: Channel) -> None:
        try:
            while (message := await channel.recv()) is not None:
                (number, answer, error), fds = message
                if not number and answer == CLOSING:
                    self._closing = True
                    self._later(self._close_with_owner())
                    continue
                future = self._answers.pop(number, None)
                if future is None or future.done():
                    await self._unwanted(answer, fds)
                elif error is not None:
                    future.set_exception(error)
                else:
                    future.set_result((answer, fds))
        except ChannelClosedError as error:
            log.warning("the pool's owner cannot be understood: %s", error)
        finally:
            channel.close()
            for future in self._answers.values():
                if not future.done():
                    future.set_exception(self._gone())
            self._answers.clear()

    async def _close_with_owner(self) -> None:
        """What is under way ends as cancelled, as in the owner: nothing of it broke."""
        from .rollouts import stop_batches

        try:
            try:
                await stop_batches(self)
            finally:
                self.ledger.cancel_open()
            await self.ledger.flush()
        finally:  # whatever became of it, the owner waits for this
            try:
                await self.call("heard")
            except PoolClosedError as error:
                log.debug("the owner did not wait for us: %s", error)

    def _gone(self) -> PoolClosedError:
        if not self._closing:
            return _owner_gone(self.reference)
        return PoolClosedError(
            f"the pool is closed: process {self.reference.pid}, which owns run {self.run!r}'s, has closed it"
        )

    async def _unwanted(self, answer: Any, fds: list[int]) -> None:
        """The answer to somebody who was cancelled meanwhile: a sandbox goes back as it came."""
        for fd in fds:
            os.close(fd)
        for about in answer if isinstance(answer, list) else [answer]:
            if isinstance(about, dict) and "lease" in about:
                self._tell("release", about["lease"], True, None)

    async def call(self, what: str, *arguments: Any, fds: tuple[int, ...] = ()) -> tuple[Any, list[int]]:
        """Ask the owner; its answer and the descriptors that came along."""
        await self.start()
        channel = self._channel
        assert channel is not None
        number = next(self._asks)
        future: asyncio.Future[tuple[Any, list[int]]] = asyncio.get_running_loop().create_future()
        self._answers[number] = future
        try:
            await channel.send((number, what, arguments), fds)
            return await future
        except ChannelClosedError:
            raise self._gone() from None
        except asyncio.CancelledError:
            if future.done() and not future.cancelled() and future.exception() is None:
                await self._unwanted(*future.result())
            self._tell("cancel", number)
            raise
        finally:
            if future.done():
                self._answers.pop(number, None)

    def _tell(self, what: str, *arguments: Any) -> None:
        """Ask without waiting for an answer."""

        async def tell() -> None:
            assert self._channel is not None
            try:
                await self._channel.send((0, what, arguments))
            except ChannelClosedError:
                log.debug("the owner is gone: %s is moot", what)

        self._later(tell())

    def _later(self, coro: Any) -> None:
        task = asyncio.get_running_loop().create_task(coro)
        self._told.add(task)
        task.add_done_callback(self._told.discard)

    # -- what differs from a pool of one's own -------------------------------------------------------

    async def _claim(
        self,
        task: Task | AsyncSnapshot,
        *,
        timeout: float | None = None,
        rollout: Rollout | None = None,
        counted: bool = True,
        ahead: Need | None = None,
    ) -> AsyncSandbox:
        self._check()
        if self._closing:
            raise self._gone()
        needed = self.now()
        asked: Any = task if isinstance(task, Task) else getattr(task, "id", task)
        if not isinstance(asked, (Task, str)):
            raise ConfigError(f"claim() takes a Task or a Snapshot, not {type(task).__name__}")
        try:
            about, fds = await self.call("claim", asked, timeout, plain(rollout))
        except BaseException:
            if counted:
                self._censored(needed if ahead is None else ahead.needed)
            raise
        sandbox = await self._remote.take(about, fds)
        self._remote.held.add(sandbox)
        if ahead is not None:
            needed = self.now() if ahead.needed is None else ahead.needed
        self._remote.count(sandbox, about["parts"], needed, rollout, counted)
        sandbox._lease.ahead = ahead  # type: ignore[attr-defined]
        return sandbox

    def demand(self, tasks: Iterable[Task], group_size: int) -> Any:
        tasks = list(tasks)
        super().demand(tasks, group_size)  # it checks them
        return tasks, group_size

    def tell_expected(self, demand: Any, replace: bool) -> None:
        tasks, group_size = demand
        self._later(self._tell_expected(tasks, group_size, replace))

    async def _tell_expected(self, tasks: list[Task], group_size: int, replace: bool) -> None:
        try:
            await self.call("expect", tasks, group_size, replace)
        except PoolClosedError as error:
            log.debug("what is expected could not be told: %s", error)

    def _place(self, task: Task) -> Any:
        return task.spec_over(self.spec), task.layer_key

    async def wait_ready(self, n: int | None = None, *, timeout: float | None = None) -> int:
        return int((await self.call("wait_ready", n, timeout))[0])

    async def stats_now(self) -> PoolStats:
        stats: PoolStats = (await self.call("stats"))[0]
        return stats

    def stats(self) -> PoolStats:
        raise UnsupportedError("another process has them: they have to be waited for", hint="stats_now()")

    async def snapshots_now(self) -> list[AsyncSnapshot]:
        rows = (await self.call("snapshots"))[0]
        return [self._remote.snapshot_of(*row) for row in rows]

    def snapshots(self) -> list[AsyncSnapshot]:
        raise UnsupportedError("another process has them: they have to be waited for", hint="snapshots_now()")

    def _gauges(self) -> Mapping[str, float]:
        return {}

    async def _end(self, timeout: float | None) -> None:
        from .rollouts import stop_batches

        await stop_batches(self)
        if self._channel is not None:
            for sandbox in list(self._remote.held):
                try:
                    await sandbox.release()
                except PoolClosedError:
                    break
        self.closed = True
        if self._told:
            await asyncio.wait(self._told, timeout=_QUIET_S)
        if self._reader is not None:
            self._reader.cancel()
            await asyncio.gather(self._reader, return_exceptions=True)
        elif self._channel is None:
            self._sock.close()


def _knock(ref: PoolRef) -> tuple[socket.socket, dict[str, Any]]:
    """A connection to the owner, and what it says of the pool."""
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        sock.settimeout(_KNOCK_S)
        sock.connect(ref.path)
        sock.sendall(ref.token.encode())
        _, about, error = ask_blocking(sock, (0, "hello", ()))
    except OSError as error:
        sock.close()
        raise _owner_gone(ref) from error
    if error is not None:
        sock.close()
        raise error
    return sock, about


def _owner_gone(ref: PoolRef) -> PoolClosedError:
    return PoolClosedError(
        f"the process {ref.pid} that owns the pool of run {ref.run!r} has closed it or is gone",
        kind="owner_gone",
    )
