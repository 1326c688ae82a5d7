"""A pool without sandboxes: what it lends behaves as told, so that rollouts can be tried by the thousand."""

from __future__ import annotations

import asyncio
import itertools
from collections import Counter
from collections.abc import Awaitable, Callable, Iterable
from pathlib import Path
from typing import Any

from rlsandbox.errors import PoolClosedError, SandboxDiedError, SandboxStateError
from rlsandbox.hooks import plugin_manager
from rlsandbox.ledger import Ledger
from rlsandbox.metrics import Metrics
from rlsandbox.pool import rollouts
from rlsandbox.results import CommandResult, Outcome
from rlsandbox.spec import Spec
from rlsandbox.task import Task


class FakeSnapshot:
    def __init__(self, pool: FakePool, id: str, files: dict[str, str]) -> None:
        self.pool, self.id, self.files = pool, id, files
        self.bytes = sum(map(len, files.values()))
        self.deleted = False

    async def delete(self) -> None:
        assert not self.deleted, "deleted twice"
        self.deleted = True


class FakeSandbox:
    """Commands: ``put NAME TEXT``, ``get NAME``, ``sleep SECONDS``, ``die``, anything else echoes."""

    def __init__(self, pool: FakePool, task: Task, files: dict[str, str]) -> None:
        self.id = f"sb{next(pool.numbers)}"
        self.pool, self.task, self.files = pool, task, dict(files)
        self.spec = pool.spec
        self.node: str | None = pool.node
        self.reset_mode = "overlay"
        self.state = "ready"
        self.rollout: Any = None
        self.budget: Any = None
        self.outcome: Outcome | None = None
        self.times: dict[str, float] = {"queued": 0.001, "started": 0.002}
        self.ttfc_s: float | None = None
        self.gone = asyncio.Event()

    def _need(self) -> None:
        if self.state == "dead":
            raise SandboxDiedError("its keeper was killed", sandbox=self.id)
        if self.state != "ready":
            raise SandboxStateError(f"the sandbox is {self.state}", sandbox=self.id)

    async def run(self, cmd: str, **_: Any) -> CommandResult:
        self._need()
        if self.budget is not None:
            self.budget.spend()
        self.ttfc_s = 0.003 if self.ttfc_s is None else self.ttfc_s
        words = cmd.split(" ", 2)
        out = cmd
        if words[0] == "put":
            self.files[words[1]] = words[2]
        elif words[0] == "get":
            out = self.files.get(words[1], "")
        elif words[0] == "sleep":
            sleeping = asyncio.ensure_future(self.gone.wait())
            await asyncio.wait({sleeping}, timeout=float(words[1]))
            sleeping.cancel()
            self._need()
        elif words[0] == "die":
            self.die()
            self._need()
        return CommandResult(exit_code=0, stdout=out, stdout_bytes=out.encode(), merged=out)

    def die(self) -> None:
        self.state = "dead"
        self.gone.set()

    async def grade(self) -> Outcome:
        self._need()
        self.state = "graded"
        self.gone.set()
        answer = self.pool.grader(self)
        self.outcome = await answer if asyncio.iscoroutine(answer) else answer
        assert self.outcome is not None
        return self.outcome

    async def snapshot(self, *, kill: bool = False, name: str | None = None) -> FakeSnapshot:
        self._need()
        snapshot = FakeSnapshot(self.pool, f"snap{next(self.pool.numbers)}", dict(self.files))
        self.pool.snapshots.append(snapshot)
        return snapshot

    async def release(self, *, discard: bool = False) -> None:
        if self.state == "released":
            return
        self.state = "released"
        self.gone.set()
        self.pool.live.discard(self)
        self.pool.released[("discard" if discard else "release")] += 1
        await asyncio.sleep(0)


class FakePool:
    """*claim* may be replaced: ``async (task or snapshot) -> FakeSandbox``."""

    def __init__(
        self, path: Path, *, run: str = "run", max_size: int | None = 4, plugins: Iterable[object] = ()
    ) -> None:
        self.run = run
        self.ledger = Ledger.open(run, path)
        self.manager = plugin_manager(plugins, entry_points=False)
        self.metrics = Metrics(run=run)
        self.max_size = max_size
        self.numbers = itertools.count(1)
        self.spec = Spec(image="img")
        self.node: str | None = "node-1"
        self.live: set[FakeSandbox] = set()
        self.most = 0
        self.claims = 0
        self.expected: Counter[str] = Counter()
        self.released: Counter[str] = Counter()
        self.snapshots: list[FakeSnapshot] = []
        self.closed = False
        self.grader: Callable[[FakeSandbox], Any] = lambda sandbox: Outcome(1.0, True)
        self.before_claim: Callable[[Any], Awaitable[None]] | None = None
        self.rollouts_seen: list[Any] = []

    def expect(self, tasks: Iterable[Task], *, group_size: int = 1, replace: bool = False) -> None:
        self.expected.update(task.id for task in tasks)

    async def claim(self, task: Any, *, timeout: float | None = None, rollout: Any = None) -> FakeSandbox:
        if self.closed:
            raise PoolClosedError("the pool is closed")
        self.claims += 1
        self.rollouts_seen.append(rollout)
        if self.before_claim is not None:
            await self.before_claim(task)
        await asyncio.sleep(0)
        files = task.files if isinstance(task, FakeSnapshot) else {}
        sandbox = FakeSandbox(self, rollout.task, files)
        sandbox.rollout = rollout
        self.live.add(sandbox)
        self.most = max(self.most, len(self.live))
        return sandbox

    async def close(self) -> None:
        self.closed = True
        await rollouts.stop_batches(self)
        await self.ledger.aclose()

    async def __aenter__(self) -> FakePool:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()


class Blocking:
    """The synchronous face of a FakeSandbox."""

    def __init__(self, sandbox: FakeSandbox, portal: Any) -> None:
        self.sandbox, self.portal = sandbox, portal
        self.rollout: Any = None

    def run(self, cmd: str) -> CommandResult:
        return self.portal.call(self.sandbox.run, cmd)

    def grade(self) -> Outcome:
        return self.portal.call(self.sandbox.grade)

    @property
    def state(self) -> str:
        return self.sandbox.state


class FakeSync:
    """What a synchronous Pool gives the runner."""

    def __init__(self, portal: Any) -> None:
        self.portal = portal

    def sandbox(self, sandbox: Any) -> Blocking:
        return Blocking(sandbox, self.portal)

    def snapshot(self, snapshot: Any) -> Any:
        return snapshot
