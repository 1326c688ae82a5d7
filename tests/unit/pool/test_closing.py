"""Closing, whoever is cancelled meanwhile: all others return, and nobody's error is taken for their own."""

from __future__ import annotations

import asyncio
import logging
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from rlsandbox import AsyncPool
from rlsandbox.errors import LedgerError
from rlsandbox.pool import closing
from rlsandbox.pool.remote import RemotePool


async def test_a_closing_that_is_broken_off_is_waited_for_and_other_closers_return(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(closing, "MORE_S", 0.01)
    ended = False

    async def hangs() -> None:
        nonlocal ended
        try:
            await asyncio.Event().wait()
        finally:
            for _ in range(5):
                await asyncio.sleep(0)
            ended = True

    task = asyncio.get_running_loop().create_task(hangs())
    first = asyncio.create_task(closing.seen_through(task))
    other = asyncio.create_task(closing.seen_through(task))
    await asyncio.sleep(0)
    first.cancel()
    with pytest.raises(asyncio.CancelledError):
        await first
    assert ended
    with caplog.at_level(logging.WARNING):
        await other
    assert "could not be closed in time" in caplog.text


@pytest.mark.parametrize("error", [asyncio.CancelledError, LedgerError])
async def test_the_ledger_is_closed_however_the_closing_ended(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: type[BaseException]
) -> None:
    pool = AsyncPool(size=1, config=False, ledger=tmp_path)
    end = AsyncPool._end

    async def fails(self: AsyncPool, timeout: float | None) -> None:
        await end(self, timeout)
        if error is asyncio.CancelledError:
            closer.cancel()
            await asyncio.sleep(0)
        else:
            raise LedgerError("no")

    monkeypatch.setattr(AsyncPool, "_end", fails)
    closer = asyncio.create_task(pool.close())
    with pytest.raises(error):
        await closer
    assert pool.ledger._store.closed
    await pool.close()


class Pool(SimpleNamespace):
    __hash__ = object.__hash__


async def test_an_owner_is_answered_even_if_the_ledger_cannot_be_written() -> None:
    async def fails() -> None:
        raise LedgerError("no")

    asked: list[Any] = []

    async def call(*what: Any) -> None:
        asked.append(what)

    ledger = SimpleNamespace(cancel_open=lambda: None, flush=fails)
    pool: Any = Pool(ledger=ledger, call=call)
    with pytest.raises(LedgerError):
        await RemotePool._close_with_owner(pool)
    assert asked == [("heard",)]
