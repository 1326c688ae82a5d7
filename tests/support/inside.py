"""A member of the local backend and commands in it, without the pool and the sandbox's facade."""

from __future__ import annotations

import os
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

from rlsandbox.backends.base import Member
from rlsandbox.backends.local import Local
from rlsandbox.keeper.client import KeeperClient
from rlsandbox.spec import Spec


@dataclass
class Inside:
    """One sandbox."""

    backend: Local
    member: Member
    client: KeeperClient
    env: Mapping[str, str]

    async def sh(self, script: str, **fields: Any) -> tuple[int, str]:
        """Run *script* with sh; its exit code (128 + signal) and all that it printed."""
        out = bytearray()

        def sink(stream: int, data: bytes, tail: bool) -> None:
            out.extend(data)

        env = [f"{name}={value}" for name, value in self.env.items()]
        channel = await self.client.spawn(["/bin/sh", "-c", script], env=env, sink=sink, **fields)
        end = await channel.wait_exit()
        code = os.waitstatus_to_exitcode(end.status)
        return (code if code >= 0 else 128 - code), out.decode(errors="replace")

    async def out(self, script: str, **fields: Any) -> str:
        """What *script* prints; it has to succeed."""
        code, text = await self.sh(script, **fields)
        assert code == 0, f"{script!r} ended with {code}: {text}"
        return text.rstrip("\n")


@asynccontextmanager
async def inside(backend: Local, spec: Spec | None = None, name: str = "m1") -> AsyncIterator[Inside]:
    """A new member of *spec*, disposed of at the end. The backend stays open."""
    spec = spec if spec is not None else Spec()
    member = await backend.provision(spec, member=name, labels={}, deadline=60)
    try:
        reader, writer = await backend.connect(member)
        client = await KeeperClient.open(reader, writer)
        try:
            yield Inside(backend, member, client, {**backend.environment(spec), **spec.env})
        finally:
            await client.aclose()
    finally:
        await backend.dispose(member)
