"""A pool of nobody: the least that a sandbox needs to live, over any backend. For tests and conformance."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import secrets
from collections.abc import Mapping
from typing import TYPE_CHECKING

from ..errors import ProcessesRunningError
from ..keeper.client import KeeperClient, KeeperFailure
from ..sandbox import AsyncSandbox, AsyncSnapshot
from ..spec import Spec
from ..task import Task

if TYPE_CHECKING:
    from ..backends.base import Backend, Member

_EBUSY = 16


class LoneHost:
    """Lends sandboxes straight from a backend: no warmth, no verification, one member a sandbox.

    A task's setup and files are put in place when the sandbox is made, and sealed into a layer.
    """

    def __init__(self, backend: Backend) -> None:
        self.backend = backend
        self.waited: list[float] = []
        self._members: dict[str, Member] = {}
        self._saved: dict[str, bytes] = {}
        self._sealed: dict[str, KeeperClient] = {}
        """Whose keeper has a snapshot's layer."""
        self._numbers = itertools.count(1)
        self._run = secrets.token_hex(4)

    async def make(
        self,
        task: Task | None = None,
        *,
        spec: Spec | None = None,
        env: Mapping[str, str] | None = None,
        layer: str = "",
        timeout: float = 120.0,
    ) -> AsyncSandbox:
        """A sandbox of its own for *task*."""
        task = task or Task(id="conformance")
        spec = task.spec_over(spec)
        name = f"{self._run}-{next(self._numbers)}"
        client = await self._client(name, spec, timeout)
        try:
            if layer:
                if not await self.backend.give_layer(layer, self._members[name]):
                    await client.bring_layer(layer, self._sealed[layer])
                await client.reset(layer)
            base = {**self.backend.environment(spec), **(env or {})}
            member = self._members[name]
            sandbox = AsyncSandbox(
                client,
                id=name,
                task=task,
                spec=spec,
                node=member.node,
                host=self,
                base_env=base,
                facts=member.facts,
            )
        except BaseException:
            await self._dispose(name, client)
            raise
        try:
            if not layer and task.layer_key is not None:
                await _prime(sandbox, task)
                await _settle(client, f"primed-{name}")
        except BaseException:
            await sandbox.release()
            raise
        return sandbox

    async def _client(self, name: str, spec: Spec, timeout: float) -> KeeperClient:
        labels = {"run": self._run}
        member = await self.backend.provision(spec, member=name, labels=labels, deadline=timeout)
        self._members[name] = member
        try:
            return await KeeperClient.open(*await self.backend.connect(member), member=name)
        except BaseException:
            await self.backend.dispose(member)
            raise

    async def _dispose(self, name: str, client: KeeperClient) -> None:
        await client.aclose()
        member = self._members.pop(name, None)
        if member is not None:
            await self.backend.dispose(member)

    async def close(self) -> None:
        for name in list(self._members):
            await self.backend.dispose(self._members.pop(name))

    def holds(self, name: str) -> bool:
        """Whether the member of this name has not been disposed of."""
        return name in self._members

    def member(self, sandbox: AsyncSandbox) -> Member:
        return self._members[sandbox.id]

    # -- Host -----------------------------------------------------------------------------------

    async def release(self, sandbox: AsyncSandbox, *, discard: bool) -> None:
        await asyncio.shield(asyncio.ensure_future(self._dispose(sandbox.id, sandbox.client)))

    async def snapshot(self, sandbox: AsyncSandbox, *, kill: bool, name: str | None) -> AsyncSnapshot:
        layer = name or f"snap-{self._run}-{next(self._numbers)}"
        try:
            size = await sandbox.client.seal(layer, kill=kill)
        except KeeperFailure as error:
            if error.errno == _EBUSY:
                raise ProcessesRunningError(
                    "processes run in the sandbox", hint="snapshot(kill=True)", sandbox=sandbox.id
                ) from None
            raise
        self._sealed[layer] = sandbox.client
        return AsyncSnapshot(self, id=layer, bytes=size, task=sandbox.task, spec=sandbox.spec)

    async def fork(self, snapshot: AsyncSnapshot, n: int, timeout: float | None) -> list[AsyncSandbox]:
        made: list[AsyncSandbox] = []
        try:
            for _ in range(n):
                assert isinstance(snapshot.task, Task)
                made.append(await self.make(snapshot.task, layer=snapshot.id, timeout=timeout or 120.0))
        except BaseException:
            for one in made:
                await one.release()
            raise
        return made

    async def renew(self, sandbox: AsyncSandbox) -> None:
        await self._dispose(sandbox.id, sandbox.client)
        client = await self._client(sandbox.id, sandbox.spec, 120.0)
        sandbox.attach(client)
        if sandbox.task.layer_key is not None:
            primed = AsyncSandbox(
                client, id=sandbox.id, task=sandbox.task, spec=sandbox.spec, host=self,
                base_env=self.backend.environment(sandbox.spec), facts=self._members[sandbox.id].facts,
            )  # fmt: skip
            try:
                await _prime(primed, sandbox.task)
            finally:
                primed._state = "released"
            await _settle(client, f"primed-{sandbox.id}-{next(self._numbers)}")

    async def hibernate(self, sandbox: AsyncSandbox) -> None:
        await sandbox.client.kill_all()
        self._saved[sandbox.id] = b"".join([chunk async for chunk in sandbox.client.export()])
        await self._dispose(sandbox.id, sandbox.client)

    async def restore(self, sandbox: AsyncSandbox, timeout: float | None) -> None:
        client = await self._client(sandbox.id, sandbox.spec, timeout or 120.0)
        await client.import_layer("restored", self._saved.pop(sandbox.id))
        await client.reset("restored")
        sandbox.attach(client)

    def command_started(self, sandbox: AsyncSandbox, waited_s: float) -> None:
        self.waited.append(waited_s)

    async def delete_snapshot(self, snapshot: AsyncSnapshot) -> None:
        with contextlib.suppress(KeeperFailure):
            await self.backend.drop_layer(snapshot.id)


async def _settle(client: KeeperClient, layer: str) -> None:
    """An episode begins with files, not with processes: on a layer, where there are any."""
    if client.welcome.mode == "replace":
        await client.kill_all()
    else:
        await client.seal(layer, kill=True)


async def _prime(sandbox: AsyncSandbox, task: Task) -> None:
    if task.workdir:
        await sandbox.run(["mkdir", "-p", task.workdir], cwd="/", check=True)
    for path, data in task.files.items():
        await sandbox.write_file(path, data)
    if task.setup:
        await sandbox.run(task.setup, check=True)
