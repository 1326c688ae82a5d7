"""Exec streams over TLS: how much memory each takes, and that what it carries comes whole."""

from __future__ import annotations

import asyncio
import os
import shutil
import ssl
import subprocess
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("aiohttp", reason="needs the extra: pip install 'rlsandbox-pool[kubernetes]'")
import aiohttp
from aiohttp import web

from rlsandbox.backends.kubernetes.exec import read_less_at_once


@pytest.fixture
def contexts(tmp_path: Path) -> tuple[ssl.SSLContext, ssl.SSLContext]:
    if shutil.which("openssl") is None:
        pytest.skip("needs openssl to make a certificate")
    key, certificate = tmp_path / "key.pem", tmp_path / "certificate.pem"
    wanted = (
        "req -x509 -newkey rsa:2048 -nodes -days 2 -subj /CN=localhost -addext subjectAltName=DNS:localhost"
    )
    command = ["openssl", *wanted.split(), "-keyout", str(key), "-out", str(certificate)]
    subprocess.run(command, check=True, capture_output=True)
    server = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    server.load_cert_chain(certificate, key)
    return server, ssl.create_default_context(cafile=str(certificate))


async def _echo(request: web.Request) -> web.WebSocketResponse:
    ws = web.WebSocketResponse(max_msg_size=0)
    await ws.prepare(request)
    async for message in ws:
        await ws.send_bytes(message.data)
    return ws


def test_a_stream_takes_what_it_carries(contexts: tuple[ssl.SSLContext, ssl.SSLContext]) -> None:
    async def main() -> None:
        app = web.Application()
        app.router.add_get("/", _echo)
        runner = web.AppRunner(app)
        await runner.setup()
        site = web.TCPSite(runner, "localhost", 0, ssl_context=contexts[0])
        await site.start()
        port = site._server.sockets[0].getsockname()[1]  # type: ignore[union-attr]
        connector = aiohttp.TCPConnector(ssl=contexts[1], limit=0)
        async with aiohttp.ClientSession(connector=connector) as session:
            streams: list[Any] = []
            for _ in range(20):
                streams.append(await session.ws_connect(f"https://localhost:{port}/", max_msg_size=0))
            assert all(read_less_at_once(ws) for ws in streams), "asyncio has changed inside"
            data = os.urandom(1_000_000)
            for ws in streams[:3]:  # more than fits at once, both ways, several times
                for size in (1, 16_384, 16_385, 1_000_000):
                    await ws.send_bytes(data[:size])
                    assert (await ws.receive()).data == data[:size]
            for ws in streams:
                held = ws._conn.transport._ssl_protocol
                assert len(held._ssl_buffer) <= 1 << 14 and len(held.get_buffer(-1)) <= 1 << 14
            for ws in streams:
                await ws.close()
        await runner.cleanup()

    asyncio.run(main())


@pytest.mark.parametrize("ws", [object(), type("Plain", (), {"_conn": None})()])
def test_what_is_not_as_it_was_is_left_alone(ws: Any) -> None:
    assert read_less_at_once(ws) is False
