"""A pool as small as an environment can do with: commands run in a plain directory, nothing is isolated."""

from __future__ import annotations

import asyncio
import itertools
import shutil
import tempfile
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from rlsandbox._portal import Portal
from rlsandbox.errors import SandboxDiedError, SandboxStateError
from rlsandbox.hooks import Rollout, plugin_manager
from rlsandbox.ledger import Ledger
from rlsandbox.metrics import Metrics
from rlsandbox.pool import AsyncPool
from rlsandbox.results import CommandResult, Outcome
from rlsandbox.sandbox import Sandbox
from rlsandbox.spec import Spec
from rlsandbox.task import Grader, Limits, Task


def task(id: str, *, prompt: str = "", grader: str | None = "test -e done", **limits: Any) -> Task:
    return Task(
        id=id,
        prompt=prompt or f"make the file done ({id})",
        grader=Grader(command=grader) if grader else None,
        limits=Limits(**limits),
    )


def tasks(n: int) -> list[Task]:
    return [task(f"t{i}") for i in range(n)]


class DoubleSandbox:
    """Runs commands with sh. ``die`` kills it, ``stall`` never answers."""

    def __init__(self, id: str, task: Task, pool: DoublePool) -> None:
        self.id, self.task, self.spec, self.node = id, task, Spec(), "here"
        self.state = "ready"
        self.times: dict[str, float] = {"queued": 0.0}
        self.ttfc_s = 0.001
        self.discarded: bool | None = None
        self.directory = Path(tempfile.mkdtemp(prefix="rls-double-"))
        self._pool = pool

    async def run(self, cmd: Any, *, timeout: float | None = None, **_: Any) -> CommandResult:
        if self.state != "ready":
            raise SandboxStateError(f"the sandbox is {self.state}")
        self._pool.running += 1
        self._pool.most_running = max(self._pool.most_running, self._pool.running)
        try:
            if cmd == "die":
                self.state = "dead"
                raise SandboxDiedError("the keeper was killed", sandbox=self.id)
            if cmd == "stall":
                await asyncio.Event().wait()
            if cmd == "together":
                await asyncio.wait_for(self._pool.meet(), 30)
                cmd = "true"
            process = await asyncio.create_subprocess_exec(
                "sh", "-c", cmd, cwd=self.directory, stdin=asyncio.subprocess.DEVNULL,
                stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE,
            )  # fmt: skip
            try:
                async with asyncio.timeout(timeout):
                    out, err = await process.communicate()
            except TimeoutError:
                process.kill()
                await process.wait()
                return CommandResult(exit_code=137, timed_out=True, duration_s=timeout or 0)
            code = process.returncode or 0
        finally:
            self._pool.running -= 1
        return CommandResult(
            exit_code=code if code >= 0 else 128 - code,
            stdout=out.decode("utf-8", "replace"), stderr=err.decode("utf-8", "replace"),
            stdout_bytes=out, stderr_bytes=err, stdout_size=len(out), stderr_size=len(err),
            merged=(out + err).decode("utf-8", "replace"), duration_s=0.01,
        )  # fmt: skip

    async def grade(self, grader: Grader | None = None) -> Outcome:
        grader = grader or self.task.grader
        assert grader is not None
        if grader.command == "unmeasured":
            return Outcome(None, None, None)
        result = await self.run(grader.command)
        self.state = "graded"
        return Outcome(float(result.ok), result.ok, result)

    async def release(self, *, discard: bool = False) -> None:
        if self.discarded is None:
            self.discarded = discard
            self.state = "released"
            self._pool.held.discard(self)
            shutil.rmtree(self.directory)


class DoubleAsyncPool:
    def __init__(self, home: Path) -> None:
        self.ledger = Ledger.open("double", home / "double.db")
        self.metrics = Metrics(run="double")
        self.manager = self.plugins = plugin_manager(entry_points=False)
        self.run = "double"
        self.max_size = 64


class DoublePool(DoubleAsyncPool):
    """The asynchronous and the synchronous side in one. *broken*: errors that the next claims meet."""

    def __init__(self, home: Path) -> None:
        super().__init__(home)
        self.broken: list[BaseException] = []
        self.claimed: list[str] = []
        self.held: set[DoubleSandbox] = set()
        self.all: list[DoubleSandbox] = []
        self.running = self.most_running = 0
        self.party = 0
        self.closed = False
        self._met: asyncio.Event | None = None
        self._ids = itertools.count()
        self._portal = Portal("double")
        self._pool = self
        self.rollouts: list[Rollout | None] = []

    def __deepcopy__(self, memo: object) -> DoublePool:
        return self

    async def claim(self, task: Task, *, timeout: float | None = None, rollout: Any = None) -> DoubleSandbox:
        self.claimed.append(task.id)
        self.rollouts.append(rollout)
        if self.broken:
            raise self.broken.pop(0)
        sandbox = DoubleSandbox(f"s{next(self._ids)}", task, self)
        self.held.add(sandbox)
        self.all.append(sandbox)
        return sandbox

    async def meet(self) -> None:
        """Return once *party* callers are here: they must be here at the same time."""
        if self._met is None:
            self._met = asyncio.Event()
        if self.running >= self.party:
            self._met.set()
        await self._met.wait()

    async def _recorded(self, record: Any) -> None:
        await AsyncPool._recorded(self, record)  # type: ignore[arg-type]

    def _facade(self, sandbox: DoubleSandbox) -> Any:
        return Sandbox(sandbox, self._portal)  # type: ignore[arg-type]

    def records(self) -> list[Any]:
        return self.ledger.records()

    def close(self) -> None:
        if not self.closed:
            self.closed = True
            self.ledger.close()
            self._portal.close()


def statuses(records: Iterable[Any]) -> list[str]:
    return [record.outcome for record in records]
