"""Scenarios of our own pool, on any backend."""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from ..backends.base import Backend
from ..errors import SandboxError, UnsupportedError
from ..pool.pool import AsyncPool
from ..spec import Spec
from ..task import Task
from .ttfc import Batch, Plan, in_turn

log = logging.getLogger("rlsandbox.bench")

FILL_S = 300.0


class PoolBench:
    """Measures what a backend's pools do; each batch has a pool of its own, filled before."""

    scenarios = frozenset({"cold", "warm", "recycled", "high-cardinality"})

    def __init__(self, make: Callable[[], Backend], *, spec: Spec | None = None, **pool: Any) -> None:
        self._make, self._spec, self._pool = make, spec or Spec(), pool
        self._modes: set[str] = set()

    async def facts(self) -> dict[str, Any]:
        import os
        import platform

        return {
            "client": {
                "cpus": os.cpu_count(), "kernel": platform.release(), "python": platform.python_version(),
                "load": [round(value, 1) for value in os.getloadavg()],
            },
            "reset modes": sorted(self._modes),
        }  # fmt: skip

    async def check(self, plan: Plan) -> None:
        for scenario in plan.scenarios:
            if scenario not in self.scenarios:
                raise UnsupportedError(f"scenario {scenario!r} needs a cluster", phase="config")

    async def close(self) -> None:
        return None

    async def batch(self, scenario: str, image: str | None, plan: Plan) -> Batch:
        image = plan.many[0] if scenario == "high-cardinality" else image
        spec = self._spec if image is None else replace(self._spec, image=image)
        backend = self._make()
        filled = scenario in ("warm", "recycled")
        size = plan.pool_size if filled else 1
        with TemporaryDirectory(prefix="rlsandbox-bench-") as place:
            pool = AsyncPool(
                backend, size=size, max_size=plan.pool_size, spec=spec, config=False, ledger=Path(place),
                **self._pool,
            )  # fmt: skip
            batch = Batch()
            loop = asyncio.get_running_loop()
            try:
                before = loop.time()
                if filled and await pool.wait_ready(size, timeout=FILL_S) < size:
                    raise SandboxError(f"fewer than {size} sandboxes became ready", kind="bench")
                batch.fill_s = loop.time() - before if filled else 0.0
                counted = Counter(_requests(backend))
                begun = loop.time()
                await getattr(self, "_" + scenario.replace("-", "_"))(pool, plan, batch)
                batch.batch_s = batch.batch_s or loop.time() - begun
                batch.requests_during = Counter(_requests(backend)) - counted
                batch.sandboxes = pool.stats().created
                if scenario == "recycled":
                    await self._commands(pool, plan, batch)
            finally:
                await pool.close(timeout=120)
            batch.requests = Counter(_requests(backend))
        return batch

    def _policy(self, plan: Plan, batch: Batch) -> Any:
        async def policy(sandbox: Any, task: Task) -> None:
            (await sandbox.run(list(plan.command))).check()
            self._modes.add(sandbox.reset_mode)
            if plan.think:
                await asyncio.sleep(plan.think)

        return policy

    async def _rollouts(
        self, pool: AsyncPool, plan: Plan, batch: Batch, tasks: list[Task], group: int
    ) -> None:
        loop = asyncio.get_running_loop()
        begun = loop.time()
        report = await pool.run_rollouts(
            tasks, self._policy(plan, batch), group_size=group, concurrency=plan.concurrency, retries=0,
            progress=False,
        )  # fmt: skip
        batch.batch_s = loop.time() - begun
        for record in report.records:
            if record.failure is not None or record.ttfc_s is None:
                batch.failures[record.failure.kind if record.failure is not None else record.status] += 1
            else:
                batch.ttfc_s.append(record.ttfc_s)

    async def _recycled(self, pool: AsyncPool, plan: Plan, batch: Batch) -> None:
        tasks = [Task(id=f"t{i}") for i in range(plan.rollouts)]
        await self._rollouts(pool, plan, batch, tasks, 1)

    async def _high_cardinality(self, pool: AsyncPool, plan: Plan, batch: Batch) -> None:
        tasks = [Task(id=f"t{i}", image=image) for i, image in enumerate(plan.many)]
        await self._rollouts(pool, plan, batch, tasks, plan.group)

    async def _warm(self, pool: AsyncPool, plan: Plan, batch: Batch) -> None:
        """In waves: the pool is full again before the next."""
        left, spent = plan.rollouts, 0.0
        while left:
            wave = min(left, plan.concurrency, plan.pool_size)
            await pool.wait_ready(wave, timeout=FILL_S)
            spent += await self._once_each(pool, plan, batch, wave)
            left -= wave
        batch.batch_s = spent
        batch.notes.append("batch: without the time in which the pool was filled again")

    async def _cold(self, pool: AsyncPool, plan: Plan, batch: Batch) -> None:
        await self._once_each(pool, plan, batch, plan.batch("cold"))

    async def _once_each(self, pool: AsyncPool, plan: Plan, batch: Batch, n: int) -> float:
        """*n* rollouts at once, each in a sandbox that is thrown away after; the seconds it took."""
        loop = asyncio.get_running_loop()
        policy, begun, ended = self._policy(plan, batch), loop.time(), [0.0]

        async def one(i: int) -> None:
            try:
                sandbox = await pool.claim(Task(id=f"t{i}"))
                try:
                    await policy(sandbox, sandbox.task)
                    batch.ttfc_s.append(sandbox.ttfc_s or 0.0)
                finally:
                    ended[0] = loop.time()
                    await sandbox.release(discard=True)
            except SandboxError as error:
                batch.failures[error.kind] += 1
                log.warning("rollout %d: %s", i, error)

        await in_turn(n, n, one)
        return ended[0] - begun

    async def _commands(self, pool: AsyncPool, plan: Plan, batch: Batch) -> None:
        loop = asyncio.get_running_loop()
        async with pool.claim(Task(id="commands")) as sandbox:
            for number in range(plan.commands + 1):
                begun = loop.time()
                (await sandbox.run(list(plan.command))).check()
                if number:  # the first one also makes what the others find
                    batch.command_s.append(loop.time() - begun)


def _requests(backend: Backend) -> Mapping[str, int]:
    found: Mapping[str, int] = getattr(backend, "requests", {})
    return found
