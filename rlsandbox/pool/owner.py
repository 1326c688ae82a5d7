"""The owner's side of a pool that several processes share: one ceiling, one refill, one owner.

The owner serves a unix socket in a directory that only its user can enter. A claim of another process is an
ordinary claim here; its keeper's stream is then handed to that process, which speaks to the sandbox without
us, and hands the stream back to release it. What a process that ends has not given back is disposed of. A
pool that is closed says so first: what the others have under way then ends as cancelled, not as broken.
"""

from __future__ import annotations

import asyncio
import contextlib
import hmac
import itertools
import logging
import os
import secrets
import shutil
import socket
import tempfile
import time
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from ..errors import SandboxDiedError, SandboxError, UnsupportedError
from ..metrics import TtfcSample
from .channel import Channel, ChannelClosedError
from .refusals import deleted

if TYPE_CHECKING:
    from ..sandbox import AsyncSandbox, AsyncSnapshot
    from .pool import AsyncPool

log = logging.getLogger("rlsandbox.pool")

TOKEN_BYTES = 32
CLOSING = "closing"
"""What the owner says, unasked, before it disposes of everything."""
_HANDSHAKE_S = 10.0
_HEARD_S = 5.0
QUIET_S = 5.0
_POLL_S = 0.002
_WAITS = frozenset({"claim", "fork", "wait_ready"})
"""What may be taken back while it is under way. Everything else is short, and half of it would be a leak."""


@dataclass(frozen=True)
class PoolRef:
    """How another process finds a pool: hand it over (it pickles) and use :meth:`Pool.connect`."""

    path: str
    token: str
    host: str
    run: str
    pid: int

    def __repr__(self) -> str:
        return f"PoolRef(run={self.run!r}, pid={self.pid}, host={self.host!r})"


class Owner:
    """Serves a pool to other processes. Lives on the pool's event loop."""

    def __init__(self, pool: AsyncPool) -> None:
        self._pool = pool
        self._directory = tempfile.mkdtemp(prefix="rlsandbox-pool-")  # mode 0700
        path = os.path.join(self._directory, "owner")
        token = secrets.token_hex(TOKEN_BYTES // 2)
        self.ref = PoolRef(path, token, os.uname().nodename, pool.run, os.getpid())
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._listener.setblocking(False)
        self._listener.bind(path)
        self._listener.listen(128)
        self._tasks: set[asyncio.Task[None]] = set()
        self._peers: set[_Peer] = set()
        self._spawn(self._accept())

    def _spawn(self, coro: Any) -> asyncio.Task[None]:
        task: asyncio.Task[None] = asyncio.get_running_loop().create_task(coro)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    async def _accept(self) -> None:
        loop = asyncio.get_running_loop()
        while True:
            sock, _ = await loop.sock_accept(self._listener)
            self._spawn(self._serve(sock))

    async def _serve(self, sock: socket.socket) -> None:
        channel = Channel(sock)
        peer = _Peer(self._pool, channel)
        try:
            async with asyncio.timeout(_HANDSHAKE_S):
                token = await channel.shown(TOKEN_BYTES)
            if not hmac.compare_digest(token, self.ref.token.encode()):
                log.warning("a process without the pool's token was turned away")
                return
            self._peers.add(peer)
            await peer.serve()
        except (ChannelClosedError, TimeoutError, OSError) as error:
            log.debug("a connected process is gone: %s", error)
        except Exception:
            log.exception("serving a connected process failed: an error of rlsandbox itself")
        finally:
            self._peers.discard(peer)
            peer.gone.set()
            channel.close()
            await peer.end()

    async def close(self, timeout: float | None = None) -> None:
        """Tell the others; when they have heard it, or are too busy to hear, turn everybody away."""
        telling = [self._spawn(peer.tell_closing()) for peer in self._peers]
        if telling:
            await asyncio.wait(telling, timeout=_HEARD_S if timeout is None else min(timeout, _HEARD_S))
        for task in list(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        self._listener.close()
        shutil.rmtree(self._directory, ignore_errors=True)


class _Peer:
    """One connected process: what it asked for and what it holds."""

    def __init__(self, pool: AsyncPool, channel: Channel) -> None:
        self._pool, self._channel = pool, channel
        self._held: dict[int, AsyncSandbox] = {}
        self._numbers = itertools.count(1)
        self._asked: dict[int, asyncio.Task[None]] = {}
        self._heard = asyncio.Event()
        self._reads = False
        """Whether it has a loop that hears us: saying hello does not need one."""
        self.gone = asyncio.Event()

    async def tell_closing(self) -> None:
        """Say that the pool is closing, and wait until the process has ended what it had under way."""
        if not self._reads:
            return
        try:
            await self._channel.send((0, CLOSING, None))
        except ChannelClosedError:
            return
        async with asyncio.TaskGroup() as group:
            waits = [group.create_task(event.wait()) for event in (self._heard, self.gone)]
            await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
            for wait in waits:
                wait.cancel()

    async def serve(self) -> None:
        while (message := await self._channel.recv()) is not None:
            (number, what, arguments), fds = message
            self._reads = self._reads or what != "hello"
            if what == "cancel":
                asked = self._asked.get(arguments[0])
                if asked is not None and asked.get_name() in _WAITS:
                    asked.cancel()
                continue
            answer = self._answer(number, what, arguments, fds)
            task = asyncio.get_running_loop().create_task(answer, name=what)
            self._asked[number] = task
            task.add_done_callback(lambda _, number=number: self._asked.pop(number, None))  # type: ignore[misc]

    async def _answer(self, number: int, what: str, arguments: Any, fds: list[int]) -> None:
        answer: Any = None
        error: BaseException | None = None
        passed: socket.socket | None = None
        try:
            if what == "claim":
                answer, passed = await self._claim(*arguments)
            elif what == "stream":
                passed = await self._stream(*arguments)
            elif what == "release":
                await self._release(*arguments, fds=fds)
            else:
                answer = await getattr(self, "_do_" + what)(*arguments)
        except asyncio.CancelledError:
            error = SandboxError("cancelled", kind="cancelled")
        except Exception as raised:
            error = raised
        finally:
            for fd in fds:
                os.close(fd)
        try:
            await self._channel.send((number, answer, error), (passed.fileno(),) if passed else ())
        except ChannelClosedError:
            pass  # end() gives back what it held
        finally:
            if passed is not None:
                passed.close()

    async def _claim(self, task: Any, timeout: float | None, rollout: Any) -> tuple[Any, socket.socket]:
        pool = self._pool
        if isinstance(task, str):
            task = self._snapshot(task)
        sandbox = await pool._claim(task, timeout=timeout, rollout=rollout, counted=False)
        (about,) = await self._lend([sandbox])
        return about, await self._stream(about["lease"])

    async def _lend(self, sandboxes: list[AsyncSandbox]) -> list[dict[str, Any]]:
        """They are the process's from now on; what it needs to know of them."""
        pool = self._pool
        if not all(hasattr(self._link(sandbox), "detach") for sandbox in sandboxes):
            for sandbox in sandboxes:
                await sandbox.release()
            raise UnsupportedError(f"backend {pool.backend.name!r} has no streams to hand to another process")
        return [self._lent(sandbox) for sandbox in sandboxes]

    def _lent(self, sandbox: AsyncSandbox) -> dict[str, Any]:
        pool, lease = self._pool, sandbox._lease  # type: ignore[attr-defined]
        held = pool.driver.held[lease.member]
        link: Any = held.link
        env = dict(lease.credentials.env) if lease.credentials is not None else {}
        number = next(self._numbers)
        self._held[number] = sandbox
        return {
            "lease": number, "id": sandbox.id, "task": lease.task, "spec": lease.spec, "node": sandbox.node,
            "mode": link.mode, "facts": dict(held.member.facts), "welcome": link.client.welcome,
            "parts": dict(lease.parts), "env": {**pool.backend.environment(lease.spec), **env},
        }  # fmt: skip

    def _link(self, sandbox: AsyncSandbox) -> Any:
        lease: Any = sandbox._lease  # type: ignore[attr-defined]
        return self._pool.driver.held[lease.member].link

    async def _stream(self, number: int) -> socket.socket:
        """The keeper's stream of a sandbox that was lent."""
        sandbox = self._held[number]
        try:
            stream = await detached(self._link(sandbox), QUIET_S)
            if stream is None:
                raise SandboxDiedError("its stream does not come to rest", phase="claim", sandbox=sandbox.id)
        except BaseException:
            if self._held.pop(number, None) is not None:
                await sandbox.release(discard=True)
            raise
        return stream

    async def _do_fork(self, id: str, n: int, timeout: float | None) -> list[dict[str, Any]]:
        """All of them or none, and no wait that nothing can end: decided here, where all forks are known."""
        forked = self._pool._lender.fork(self._snapshot(id), n, timeout, counted=False)
        return await self._lend(await forked)

    def _snapshot(self, id: str) -> AsyncSnapshot:
        snapshot = self._pool._lender.snapshots.get(id)
        if snapshot is None:
            raise deleted(id)
        return snapshot

    async def _release(
        self, number: int, discard: bool, sample: TtfcSample | None, *, fds: list[int]
    ) -> None:
        if sample is not None:
            self._pool.metrics.record_ttfc(sample)
        sandbox = self._held.pop(number, None)
        if sandbox is None:
            return
        await self._back(sandbox, discard, fds)

    async def _back(self, sandbox: AsyncSandbox, discard: bool, fds: list[int]) -> None:
        lease: Any = sandbox._lease  # type: ignore[attr-defined]
        held = self._pool._driver.held.get(lease.member) if self._pool._driver is not None else None
        if fds and held is not None:
            link: Any = held.link
            await link.reattach(socket.socket(fileno=os.dup(fds[0])))
            try:
                await self._pool._lender.catch_up(lease)
            except SandboxError as error:
                log.warning("what sandbox %s had sealed is gone with it: %s", sandbox.id, error)
        else:
            discard = True
        await sandbox.release(discard=discard)

    async def _do_hello(self) -> dict[str, Any]:
        pool = self._pool
        return {
            "size": pool.size, "max_size": pool.max_size, "spec": pool.spec, "backend": pool.backend.name,
            "ledger": str(pool.ledger.path), "block": pool.config.pool.block,
        }  # fmt: skip

    async def _do_heard(self) -> None:
        self._heard.set()

    async def _do_started(self, sample: TtfcSample) -> None:
        self._pool.metrics.record_ttfc(sample)

    async def _do_expect(self, tasks: Any, group_size: int, replace_: bool) -> None:
        self._pool.expect(tasks, group_size=group_size, replace=replace_)

    async def _do_wait_ready(self, n: int | None, timeout: float | None) -> int:
        return await self._pool.wait_ready(n, timeout=timeout)

    async def _do_stats(self) -> Any:
        return self._pool.stats()

    async def _do_sealed(self, number: int, layer: str, size: int, name: str | None) -> str:
        """The process has sealed its sandbox's upper layer: from now on it is a snapshot of the pool."""
        return self._pool._lender.sealed(self._held[number], layer, size, name).id

    async def _do_delete_snapshot(self, id: str) -> None:
        snapshot = self._pool._lender.snapshots.get(id)
        if snapshot is not None:
            await self._pool._lender.delete_snapshot(snapshot)

    async def _do_snapshots(self) -> list[tuple[str, int, Any, Any]]:
        return [(s.id, s.bytes, s.task, s.spec) for s in self._pool.snapshots()]

    async def end(self) -> None:
        """The process is gone: nothing it held is used again."""
        for task in list(self._asked.values()):
            task.cancel()
        await asyncio.gather(*self._asked.values(), return_exceptions=True)
        held, self._held = self._held, {}
        for sandbox in held.values():
            with contextlib.suppress(SandboxError):
                await sandbox.release(discard=True)


async def detached(holder: Any, within_s: float) -> socket.socket | None:
    """The keeper's stream of a link or client, once nothing is in flight on it; None when that does not
    come true: an answer to somebody who was cut off may still be on its way."""
    client = getattr(holder, "client", holder)
    end = time.monotonic() + within_s
    while not client.lost.done():
        try:
            stream: socket.socket = holder.detach()
            return stream
        except RuntimeError:
            if time.monotonic() >= end:
                return None
            await asyncio.sleep(_POLL_S)
    return None


def plain(rollout: Any) -> Any:
    """A rollout as it can travel: without its state and its way back."""
    return None if rollout is None else replace(rollout, state=None, _checkpoint=None)
