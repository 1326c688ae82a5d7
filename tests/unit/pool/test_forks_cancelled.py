"""Forks that are cancelled at any turn of the loop give back what they had got, without waiting to be collected."""

from __future__ import annotations

import asyncio
import warnings
from pathlib import Path

import pytest

from rlsandbox import AsyncPool, Task
from rlsandbox.backends.simulated import Simulated
from rlsandbox.testing import VirtualClock

TASK = Task(id="t")
TURNS = 40


@pytest.mark.parametrize("again", [None, 1, 2])
def test_a_fork_cancelled_at_any_turn_gives_all_of_it_back(tmp_path: Path, again: int | None) -> None:
    ends = []

    async def main() -> None:
        async with AsyncPool(Simulated(seed=5), size=4, config=False, ledger=tmp_path) as pool:
            await pool.wait_ready(timeout=60)
            async with pool.claim(TASK) as parent:
                snapshot = await parent.snapshot(kill=True)
                for turns in range(TURNS):
                    forking = asyncio.ensure_future(snapshot.fork(2).__aenter__())
                    for _ in range(turns):
                        await asyncio.sleep(0)
                    forking.cancel()
                    if again is not None:
                        for _ in range(again):
                            await asyncio.sleep(0)
                        forking.cancel()
                    await asyncio.wait({forking})
                    ends.append(forking.cancelled())
                    if not forking.cancelled():
                        await forking.result().release()
                    assert pool.stats().claimed == 1, f"after {turns} turns"
                    await asyncio.sleep(60)  # virtual: they are put back
                    assert pool.stats().ready == 3

    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        VirtualClock().run(main())
    assert [str(w.message) for w in caught if "never released" in str(w.message)] == []
    assert ends[0] and not ends[-1], "cancelled before, in and after it"
