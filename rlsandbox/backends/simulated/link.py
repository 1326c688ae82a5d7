"""What the pool does with a simulated member, and what a user holds of it."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, Self

from ...errors import CommandError, PrimeError, SandboxDiedError, SandboxStateError, UnsupportedError
from ...hooks import Credentials, Residue
from ...results import CommandResult, Outcome
from ...spec import Spec
from ...task import Grader, Task

if TYPE_CHECKING:
    from .cluster import Cluster, Pod


class SimulatedLink:
    """Primes, resets and verifies by waiting."""

    mode = "overlay"

    def __init__(self, cluster: Cluster, pod: Pod) -> None:
        self._cluster, self.pod = cluster, pod
        self.client = SimpleNamespace(seal=self._seal)

    def on_lost(self, tell: Callable[[BaseException], object]) -> None:
        self.pod.lost.append(tell)

    def check(self) -> None:
        if self.pod.dead:
            raise SandboxDiedError("the simulated sandbox is gone", sandbox=self.pod.name)

    async def set_up(self, task: Task) -> None:
        """Pods here can always be put back."""

    async def prime(self, task: Task, layer: str) -> int:
        self.check()
        await self._cluster.pause(self._cluster.place.prime)
        self.check()
        if self._cluster.chance(self._cluster.faults.prime):
            raise PrimeError("its setup exited with 1", task=task.id)
        self._cluster.note("primed", self.pod.name)
        return 1_000_000

    async def reset(
        self, layer: str | None, *, task: Task | None, credentials: Sequence[Credentials]
    ) -> None:
        self.check()
        await self._cluster.pause(self._cluster.place.reset)
        self.check()

    async def verify(
        self, layer: str | None, *, task: Task | None, credentials: Sequence[Credentials]
    ) -> list[Residue]:
        await self._cluster.pause(self._cluster.place.verify)
        self.check()
        if self._cluster.chance(self._cluster.faults.residue):
            return [Residue("file", "/tmp/simulated")]
        return []

    async def close(self) -> None:
        self.pod.lost.clear()

    def sandbox(self, task: Task, spec: Spec, host: Any) -> SimulatedSandbox:
        return SimulatedSandbox(self, task, spec, host)

    async def _seal(self, layer: str, *, kill: bool = False) -> int:
        self.check()
        return 1_000_000


class SimulatedSandbox:
    """Commands take the time they are said to take (``"sleep 3"``), print nothing and succeed."""

    def __init__(self, link: SimulatedLink, task: Task, spec: Spec, host: Any) -> None:
        pod = link.pod
        self.id, self.node, self.reset_mode = pod.name, pod.node.name if pod.node else None, link.mode
        self.task, self.spec = task, spec
        self.rollout: Any = None
        self.budget: Any = None
        self.outcome: Outcome | None = None
        self.times: dict[str, float] = {}
        self.ttfc_s: float | None = None
        self.client = link.client
        self._link, self._host = link, host
        self._cluster = link._cluster
        self._state = "ready"

    @property
    def state(self) -> str:
        return "dead" if self._state == "ready" and self._link.pod.dead else self._state

    async def run(
        self, cmd: Any, *, timeout: float | None = None, check: bool = False, **_: Any
    ) -> CommandResult:
        if self._state != "ready":
            raise SandboxStateError(f"the sandbox is {self._state}", sandbox=self.id)
        if self.budget is not None:
            self.budget.spend()
        self._link.check()
        loop = asyncio.get_running_loop()
        asked = loop.time()
        await self._cluster.pause(self._cluster.place.exec)
        self._link.check()
        self._host.command_started(self, loop.time() - asked)
        words = cmd.split() if isinstance(cmd, str) else [str(word) for word in cmd]
        takes = float(words[1]) if len(words) == 2 and words[0] == "sleep" else 0.0
        late = timeout is not None and takes > timeout
        await asyncio.sleep(min(takes, timeout) if timeout is not None else takes)
        self._link.check()
        code = 137 if late else 1 if words[:1] == ["false"] else 0
        result = CommandResult(exit_code=code, timed_out=late, duration_s=loop.time() - asked)
        if check and not result.ok:
            raise CommandError(f"command exited with {code}", sandbox=self.id)
        return result

    async def grade(self, grader: Grader | None = None) -> Outcome:
        result = await self.run("true")
        self._state = "graded"
        self.outcome = Outcome(1.0, True, result)
        return self.outcome

    async def snapshot(self, *, kill: bool = False, name: str | None = None) -> Any:
        return await self._host.snapshot(self, kill=kill, name=name)

    def part(self) -> None:
        """Nothing of it reaches a keeper."""

    async def release(self, *, discard: bool = False) -> None:
        if self._state != "released":
            self._state = "released"
            await self._host.release(self, discard=discard or self._link.pod.dead)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.release()

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(name)
        raise UnsupportedError(f"a simulated sandbox has no {name}()", phase="command")
