"""A snapshot that is cancelled at any moment leaves no layer that nobody could ever delete. Real sandboxes."""

from __future__ import annotations

import asyncio
from pathlib import Path

import rlsandbox as rls


async def test_no_layer_stays(tmp_path: Path) -> None:
    task = rls.Task(id="t", setup="echo primed >/tmp/primed")
    async with rls.AsyncPool(size=1, max_size=2, config=False, ledger=tmp_path / "l.db") as pool:
        async with pool.claim(task, timeout=60) as sandbox:
            hub = pool.backend._hub  # type: ignore[attr-defined]
            before, cut = set(await hub.layers()), 0
            for moment in range(40):
                await sandbox.write_file("/tmp/f", "x" * 10_000)
                sealing = asyncio.ensure_future(sandbox.snapshot(kill=True))
                await asyncio.wait({sealing}, timeout=moment / 5000)
                sealing.cancel()
                await asyncio.wait({sealing})
                if sealing.cancelled():
                    cut += 1
                else:
                    await sealing.result().delete()
            assert cut > 3, "some were cut off"
            assert (await sandbox.run("cat /tmp/primed; head -c 3 /tmp/f")).stdout == "primed\nxxx"
        async with asyncio.timeout(30):
            while set(await hub.layers()) != before:  # on them the sandbox stood
                await asyncio.sleep(0.02)
