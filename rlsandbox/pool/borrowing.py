"""A connected process's side of a sandbox that another process's pool has lent it.

:class:`Borrower` is there what :class:`~.lending.Lender` is in the owner: commands go straight to the
keeper, all else is asked of the owner.
"""

from __future__ import annotations

import asyncio
import secrets
import socket
import weakref
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

from ..errors import SandboxStateError
from ..keeper.client import KeeperClient
from ..metrics import TtfcSample
from .ahead import Need
from .forks import check
from .lending import sample_of, seal
from .owner import QUIET_S, detached

if TYPE_CHECKING:
    from ..sandbox import AsyncSandbox, AsyncSnapshot
    from .remote import RemotePool


class Borrower:
    """The Host of sandboxes whose pool is elsewhere."""

    def __init__(self, pool: RemotePool) -> None:
        self._pool = pool
        self.held: weakref.WeakSet[AsyncSandbox] = weakref.WeakSet()

    async def take(self, about: dict[str, Any], fds: list[int]) -> AsyncSandbox:
        """A sandbox of what the owner sent."""
        from ..sandbox import AsyncSandbox

        client = await _client(about, fds)
        sandbox = AsyncSandbox(
            client, id=about["id"], task=about["task"], spec=about["spec"], node=about["node"],
            reset_mode=about["mode"], host=self, facts=about["facts"], base_env=about["env"],
        )  # fmt: skip
        sandbox._lease = SimpleNamespace(number=about["lease"], sample=None, started=True, ahead=None)  # type: ignore[attr-defined]
        return sandbox

    def count(
        self, sandbox: AsyncSandbox, parts: dict[str, float], needed: float, rollout: Any, counted: bool
    ) -> None:
        lease: Any = sandbox._lease  # type: ignore[attr-defined]
        now = self._pool.now()
        waited, told = max(0.0, now - needed), sum(parts.values())
        if told > waited:  # it was asked for ahead
            parts = {name: seconds * waited / told for name, seconds in parts.items()}
        parts["connected"] += max(0.0, waited - sum(parts.values()))
        lease.parts, lease.handed, lease.started = parts, now, not counted
        sandbox.times, sandbox.rollout = parts, rollout

    def command_started(self, sandbox: AsyncSandbox, waited_s: float) -> None:
        lease: Any = sandbox._lease  # type: ignore[attr-defined]
        if lease.started:
            return
        lease.started = True
        idle = max(0.0, self._pool.now() - waited_s - lease.handed)
        sample = sample_of(lease.parts, started_s=waited_s, idle_s=idle)
        lease.parts["started"], lease.parts["idle"] = waited_s, idle
        sandbox.ttfc_s = sample.ttfc_s
        self._pool.metrics.record_ttfc(sample)
        lease.sample = sample  # the owner learns of it with the release

    async def release(self, sandbox: AsyncSandbox, *, discard: bool) -> None:
        lease: Any = sandbox._lease  # type: ignore[attr-defined]
        number, lease.number = lease.number, None
        if number is None:
            asleep = getattr(lease, "asleep", None)
            if asleep is not None:
                await self.delete_snapshot(asleep)
            return
        if not lease.started and Need.there(lease.ahead):
            lease.started, lease.sample = True, sample_of(lease.parts, never_started=True)
            self._pool.metrics.record_ttfc(lease.sample)
        stream = None if discard else await detached(sandbox.client, QUIET_S)
        await self._give_back(sandbox, number, lease.sample, stream)

    async def _give_back(
        self, sandbox: AsyncSandbox, number: int, sample: TtfcSample | None, stream: socket.socket | None
    ) -> None:
        try:
            fds = () if stream is None else (stream.fileno(),)
            await self._pool.call("release", number, stream is None, sample, fds=fds)
        finally:
            if stream is not None:
                stream.close()
            await sandbox.client.aclose()

    async def snapshot(self, sandbox: AsyncSandbox, *, kill: bool, name: str | None) -> AsyncSnapshot:
        lease: Any = sandbox._lease  # type: ignore[attr-defined]
        layer = f"s{secrets.token_hex(8)}"
        size = await seal(sandbox, layer, kill=kill)
        id = (await self._pool.call("sealed", lease.number, layer, size, name))[0]
        return self.snapshot_of(id, size, sandbox.task, sandbox.spec)

    def snapshot_of(self, id: str, size: int, task: Any, spec: Any) -> AsyncSnapshot:
        from ..sandbox import AsyncSnapshot

        return AsyncSnapshot(self, id=id, bytes=size, task=task, spec=spec)

    async def fork(self, snapshot: AsyncSnapshot, n: int, timeout: float | None) -> list[AsyncSandbox]:
        pool = self._pool
        check(n, pool.max_size)
        needed = pool.now()
        forks: list[AsyncSandbox] = []
        lent: list[dict[str, Any]] = []
        try:
            lent = (await pool.call("fork", snapshot.id, n, timeout))[0]
            for about in lent:
                sandbox = await self.take(about, (await pool.call("stream", about["lease"]))[1])
                self.held.add(sandbox)
                self.count(sandbox, about["parts"], needed, None, True)
                forks.append(sandbox)
        except BaseException:
            for about in lent[len(forks) :]:
                pool._tell("release", about["lease"], True, None)
            for _ in range(n - len(forks)):
                pool._censored(needed)
            for sandbox in forks:
                await sandbox.release()
            raise
        return forks

    async def renew(self, sandbox: AsyncSandbox) -> None:
        lease: Any = sandbox._lease  # type: ignore[attr-defined]
        number, lease.number = lease.number, None
        sandbox.part()
        await self._give_back(sandbox, number, None, await detached(sandbox.client, QUIET_S))
        await self._move(sandbox, sandbox.task, None)

    async def hibernate(self, sandbox: AsyncSandbox) -> None:
        lease: Any = sandbox._lease  # type: ignore[attr-defined]
        lease.asleep = await self.snapshot(sandbox, kill=True, name=None)
        number, lease.number = lease.number, None
        sandbox.part()
        await self._give_back(sandbox, number, None, await detached(sandbox.client, QUIET_S))

    async def restore(self, sandbox: AsyncSandbox, timeout: float | None) -> None:
        lease: Any = sandbox._lease  # type: ignore[attr-defined]
        asleep = getattr(lease, "asleep", None)
        if asleep is None:
            raise SandboxStateError("the sandbox does not hibernate", sandbox=sandbox.id)
        await self._move(sandbox, asleep.id, timeout)
        lease.asleep = None
        await self.delete_snapshot(asleep)

    async def _move(self, sandbox: AsyncSandbox, asked: Any, timeout: float | None) -> None:
        """The sandbox lives in another member from now on."""
        about, fds = await self._pool.call("claim", asked, timeout, None)
        sandbox.attach(await _client(about, fds), node=about["node"])
        sandbox.id = about["id"]
        sandbox._lease.number = about["lease"]  # type: ignore[attr-defined]

    async def delete_snapshot(self, snapshot: AsyncSnapshot) -> None:
        await self._pool.call("delete_snapshot", snapshot.id)


async def _client(about: dict[str, Any], fds: list[int]) -> KeeperClient:
    stream = socket.socket(fileno=fds[0])
    reader, writer = await asyncio.open_connection(sock=stream, limit=1 << 18)
    return await KeeperClient.open(reader, writer, member=about["id"], welcome=about["welcome"])
