"""A durable session carried to and from a socket whose other end another process holds."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .durable import Durable


class Pair(asyncio.Protocol):
    """Between a session and a socket whose other end somebody else holds. What is under way is bounded by the
    windows of the inner stream."""

    def __init__(self, session: Durable) -> None:
        self._session = session
        self._transport: Any = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = transport
        self._session.set_protocol(FromSession(self._transport))

    def data_received(self, data: bytes) -> None:
        self._session.write(data)

    def connection_lost(self, exc: BaseException | None) -> None:
        self._session.abort()


class FromSession(asyncio.Protocol):
    def __init__(self, transport: Any) -> None:
        self._transport = transport

    def data_received(self, data: bytes) -> None:
        self._transport.write(data)

    def pause_writing(self) -> None:
        self._transport.pause_reading()

    def resume_writing(self) -> None:
        self._transport.resume_reading()

    def connection_lost(self, exc: BaseException | None) -> None:
        self._transport.close()
