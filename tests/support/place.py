"""A sandbox for tests that look at it from both sides: its keeper's client, and commands in it.

Below the pool on purpose: what these tests are about is what the keeper and the backend make of an episode.
"""

from __future__ import annotations

import itertools
import os
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass

from rlsandbox.backends.base import Backend, Member
from rlsandbox.backends.local import Local
from rlsandbox.keeper.client import KeeperClient
from rlsandbox.spec import Spec

from .host import Ran

PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
_numbers = itertools.count()


@dataclass
class Place:
    backend: Backend
    member: Member
    client: KeeperClient

    @property
    def mode(self) -> str:
        return self.client.welcome.mode

    async def run(
        self,
        argv: list[str],
        *,
        user: str | None = None,
        env: Mapping[str, str] | None = None,
        cwd: str = "/",
        timeout_s: float = 120,
        stdin: bytes | None = None,
    ) -> Ran:
        streams: dict[int, bytearray] = {1: bytearray(), 2: bytearray()}

        def sink(stream: int, piece: bytes, tail: bool) -> None:
            streams[stream] += piece

        every = {"PATH": PATH, **(env or {})}
        channel = self.client.command(
            argv,
            env=[f"{key}={value}" for key, value in every.items()],
            sink=sink,
            user=user,
            cwd=cwd,
            timeout_ms=int(timeout_s * 1000),
            stdin=1 if stdin is not None else None,
        )
        if stdin is not None:
            channel.feed(0, stdin, eof=True)
        end = await channel.wait_exit()
        code = os.waitstatus_to_exitcode(end.status)
        return Ran(code, streams[1].decode("utf-8", "replace"), streams[2].decode("utf-8", "replace"))

    async def sh(self, script: str, **kw: object) -> Ran:
        return await self.run(["sh", "-c", script], **kw)  # type: ignore[arg-type]

    async def put(self, path: str, data: bytes, mode: int = 0o755) -> None:
        await self.client.write(path, data, mode=mode)


@asynccontextmanager
async def place(backend: Backend, spec: Spec | None = None) -> AsyncIterator[Place]:
    """A new sandbox of *backend*, disposed of at the end."""
    name = f"test-{os.getpid()}-{next(_numbers)}"
    member = await backend.provision(spec or Spec(), member=name, labels={}, deadline=60)
    try:
        client = await KeeperClient.open(*await backend.connect(member), member=name)
        try:
            yield Place(backend, member, client)
        finally:
            await client.aclose()
    finally:
        await backend.dispose(member)


@asynccontextmanager
async def local(mode: str = "", **kw: str) -> AsyncIterator[Local]:
    backend = Local(mode=mode, **kw)
    try:
        yield backend
    finally:
        await backend.close()
