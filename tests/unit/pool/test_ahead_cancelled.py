"""Claims asked for ahead, whose users are cancelled at any turn of the loop, once or twice: their sandboxes go back."""

from __future__ import annotations

import asyncio
import gc
import warnings
import weakref
from pathlib import Path

import pytest

from rlsandbox import AsyncPool, Task
from rlsandbox.backends.simulated import Simulated
from rlsandbox.testing import VirtualClock

TASK = Task(id="t")
TURNS = 12


@pytest.mark.parametrize("again", [None, 0, 1, 2, 3])
@pytest.mark.parametrize("ready", [True, False])
def test_whoever_is_cancelled_gives_it_back(tmp_path: Path, again: int | None, ready: bool) -> None:
    async def main() -> None:
        async with AsyncPool(Simulated(seed=5), size=2, config=False, ledger=tmp_path) as pool:
            await pool.wait_ready(timeout=60)

            async def use() -> None:
                claim = pool.claim_ahead(TASK)
                try:
                    if ready:
                        await asyncio.sleep(0)
                        await asyncio.sleep(0)
                    async with await claim.result():
                        await asyncio.sleep(0)
                finally:
                    await claim.cancel()

            for turns in range(TURNS):
                using = asyncio.ensure_future(use())
                for _ in range(turns):
                    await asyncio.sleep(0)
                using.cancel()
                if again is not None:
                    for _ in range(again):
                        await asyncio.sleep(0)
                    using.cancel()
                await asyncio.wait({using})
                assert pool.stats().claimed == 0, f"after {turns} turns"
                await asyncio.sleep(60)  # virtual: they are put back
                assert pool.stats().ready == 2

    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        VirtualClock().run(main())
    assert [str(w.message) for w in caught if "never released" in str(w.message)] == []


async def test_the_pool_holds_nothing_that_was_asked_for_ahead(tmp_path: Path) -> None:
    """Else a sandbox that its user forgets would never be collected, and never come back."""
    async with AsyncPool(Simulated(seed=5), size=2, config=False, ledger=tmp_path) as pool:
        claim = pool.claim_ahead(TASK)
        sandbox = await claim.result()
        known = weakref.ref(sandbox), weakref.ref(claim)
        del sandbox, claim
        await asyncio.sleep(0)
        gc.collect()
        assert [ref() for ref in known] == [None, None]
