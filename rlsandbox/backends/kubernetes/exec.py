"""An exec stream as a transport for a keeper's session: v4.channel.k8s.io over a websocket."""

from __future__ import annotations

import contextlib
import json
from typing import Any
from urllib.parse import urlencode

import aiohttp

from ...errors import SandboxDiedError, SandboxError
from .api import Api, ApiError

_STDIN, _STDOUT, _STDERR, _STATUS = 0, 1, 2, 3
_KEPT = 2000
_AT_ONCE = 16 << 10
"""Bytes read from a stream's socket at once: a TLS record."""


def read_less_at_once(ws: aiohttp.ClientWebSocketResponse) -> bool:
    """Have a TLS stream's memory fit what it carries; whether that was possible.

    asyncio keeps 256 KiB for each TLS connection to read into, four fifths of all that one takes. The size is
    an attribute without a public name; where there is no such thing, all stays as it is.
    """
    transport = getattr(getattr(ws, "_conn", None), "transport", None)
    protocol: Any = getattr(transport, "_ssl_protocol", None)
    if not isinstance(getattr(protocol, "_ssl_buffer", None), bytearray) or not hasattr(protocol, "max_size"):
        return False
    protocol.max_size = _AT_ONCE
    protocol._ssl_buffer = bytearray(_AT_ONCE)
    protocol._ssl_buffer_view = memoryview(protocol._ssl_buffer)
    return True


class ExecStream:
    """One of them, open. Its end is the transport's end, whatever code it was closed with."""

    def __init__(self, ws: aiohttp.ClientWebSocketResponse) -> None:
        self.why = ""
        self._ws = ws

    @classmethod
    async def open(cls, api: Api, pod: str, container: str, command: list[str]) -> ExecStream:
        """Execute *command* in the pod.

        Raises:
            SandboxDiedError: there is no such pod.
            SandboxError: it is forbidden; OSError: not now.
        """
        query = [
            ("container", container),
            ("stdin", "true"),
            ("stdout", "true"),
            ("stderr", "true"),
            ("tty", "false"),
        ]
        query += [("command", part) for part in command]
        path = f"/api/v1/namespaces/{api.namespace}/pods/{pod}/exec"
        try:
            ws = await api.websocket(path, urlencode(query))
        except ApiError as error:
            if error.status == 404:
                raise SandboxDiedError("its pod is gone", kind="pod_gone", sandbox=pod) from error
            if error.status in (401, 403):
                raise SandboxError(
                    f"no exec stream to pod {pod}: {error.message}",
                    kind=error.kind, phase="provision", retryable=False,
                    hint="the right is: create (and get) on pods/exec",
                ) from error  # fmt: skip
            raise OSError(f"exec in pod {pod}: {error.message}") from error
        except aiohttp.ClientError as error:
            raise OSError(f"exec in pod {pod}: {error}") from error
        read_less_at_once(ws)
        return cls(ws)

    async def send(self, data: bytes) -> None:
        try:
            await self._ws.send_bytes(b"\0" + data)
        except (aiohttp.ClientError, RuntimeError) as error:
            raise OSError(str(error)) from error

    async def recv(self) -> bytes:
        while True:
            message = await self._ws.receive()
            if message.type != aiohttp.WSMsgType.BINARY:
                if message.type != aiohttp.WSMsgType.TEXT:
                    return b""  # closed (1000 and 1006 mean the same here), or broken
                continue
            data: bytes = message.data
            if not data:
                continue
            if data[0] == _STDOUT and len(data) > 1:
                return data[1:]
            if data[0] == _STDERR:
                self.why = (self.why + data[1:].decode(errors="replace"))[-_KEPT:].strip()
            elif data[0] == _STATUS:
                with contextlib.suppress(ValueError):
                    told = json.loads(data[1:])
                    if told.get("status") != "Success" and not self.why:
                        self.why = str(told.get("message") or "")

    async def close(self) -> None:
        with contextlib.suppress(aiohttp.ClientError, RuntimeError, OSError):
            await self._ws.close()
