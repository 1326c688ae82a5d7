"""A batch of rollouts on the simulated backend: the production core and driver, in virtual time.

What it is for: asking how a pool would do (``rlsandbox simulate``), and holding the pool to its promises at a
size that no laptop has.
"""

from __future__ import annotations

import asyncio
import hashlib
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from random import Random
from typing import TYPE_CHECKING, Any

from ..metrics import Samples
from ..metrics.series import Summary
from ..spec import Spec
from ..task import Task
from .core import Core
from .driver import Driver
from .model import CoreConfig
from .operations import Deadlines
from .refusals import error_of

if TYPE_CHECKING:
    from ..backends.base import Member
    from ..backends.simulated import Simulated
    from .link import Link


@dataclass(frozen=True, kw_only=True)
class Workload:
    """What is asked of the pool.

    Args:
        specs: different images.
        siblings: rollouts of each.
        think: mean seconds that a rollout holds its sandbox; drawn with a tail.
        claim_timeout: seconds of a claim.
        retries: further attempts of a rollout that broke.
        ahead: whether the pool is told the demand before.
    """

    specs: int = 4578
    siblings: int = 4
    think: float = 60.0
    claim_timeout: float = 1800.0
    retries: int = 2
    ahead: bool = True


@dataclass
class Simulation:
    """How it went. Times are virtual seconds."""

    requested: int
    completed: int = 0
    failed: Counter[str] = field(default_factory=Counter)
    retried: int = 0
    waits: list[float] = field(default_factory=list)
    batch_s: float = 0.0
    members: int = 0
    peak: int = 0
    writes: int = 0
    throttled: int = 0
    counters: dict[str, int] = field(default_factory=dict)
    digest: str = ""
    """Of everything that happened, in order: equal exactly for equal histories."""
    left: int = 0
    """Members that were there after closing."""

    @property
    def records(self) -> int:
        return self.completed + sum(self.failed.values())

    @property
    def missing(self) -> int:
        return self.requested - self.records

    @property
    def ttfc(self) -> Summary:
        return Samples.of(self.waits).summary()

    def to_dict(self) -> dict[str, Any]:
        return {
            "requested": self.requested, "completed": self.completed, "failed": dict(self.failed),
            "missing": self.missing, "retried": self.retried, "batch_s": self.batch_s,
            "members": self.members, "peak": self.peak, "writes": self.writes, "throttled": self.throttled,
            "ttfc": self.ttfc.to_dict(), "counters": self.counters, "digest": self.digest,
        }  # fmt: skip


async def simulate(
    backend: Simulated,
    config: CoreConfig,
    work: Workload,
    *,
    deadlines: Deadlines | None = None,
    seed: int = 0,
    progress: Callable[[], object] = lambda: None,
) -> Simulation:
    """Run the workload; on a :class:`~rlsandbox.testing.VirtualClock`'s loop it takes no time.

    *progress* is called whenever a rollout has ended.
    """

    async def link(member: Member, spec: Spec) -> Link:
        return await backend.open_link(member)

    loop = asyncio.get_running_loop()
    core = Core(config, seed=seed, prefix="sim-")
    core.now = loop.time()
    driver = Driver(core, backend, link, labels={"run": "sim"}, deadlines=deadlines)
    tasks = [Task(id=f"t{i}", spec=Spec(image=f"image-{i}")) for i in range(work.specs)]
    specs = [task.spec_over(None) for task in tasks]
    driver.specs = {spec.digest: spec for spec in specs} | {Spec().digest: Spec()}
    result = Simulation(requested=work.specs * work.siblings)
    if work.ahead:
        driver.tell(core.expect, [(spec.digest, None, work.siblings) for spec in specs])
    driver.start()
    began, rng = loop.time(), Random(seed)
    holds = [rng.lognormvariate(0.0, 0.6) * work.think for _ in range(result.requested)]

    async def rollout(i: int) -> None:
        task, spec = tasks[i // work.siblings], specs[i // work.siblings]
        for attempt in range(work.retries + 1):
            asked = loop.time()
            claim = driver.ask(spec.digest, None, deadline=asked + work.claim_timeout, batch="batch")
            refusal = None if claim.member is not None else await driver.wait(claim)
            if refusal is not None:
                error: Exception = error_of(refusal, task)
            else:
                try:
                    await _attempt(driver, claim.member or "", task, spec, holds[i], asked, result)
                    result.completed += 1
                    driver.release(claim)
                    return
                except Exception as raised:
                    error = raised
                    driver.release(claim, discard=True)
            if not getattr(error, "retryable", False) or attempt == work.retries:
                result.failed[getattr(error, "kind", type(error).__name__)] += 1
                return
            result.retried += 1

    async with asyncio.TaskGroup() as group:
        for i in range(result.requested):
            group.create_task(rollout(i)).add_done_callback(lambda _: progress())
    result.batch_s = loop.time() - began
    cluster = backend.cluster
    await driver.close(600)
    result.left = len(cluster.pods)
    result.members, result.peak = core.counters.created, cluster.peak
    result.writes, result.throttled = core.counters.writes, core.counters.throttled
    result.counters = core.counters.to_dict()
    text = repr(cluster.history) + repr([round(w, 6) for w in result.waits])
    result.digest = hashlib.sha256(text.encode()).hexdigest()
    return result


async def _attempt(
    driver: Driver, member: str, task: Task, spec: Spec, hold: float, asked: float, result: Simulation
) -> None:
    held = driver.held[member]
    sandbox = held.link.sandbox(task, spec, _Started())  # type: ignore[attr-defined]
    await sandbox.run("true")
    result.waits.append(asyncio.get_running_loop().time() - asked)
    await sandbox.run(f"sleep {hold}")


class _Started:
    def command_started(self, sandbox: Any, waited_s: float) -> None:
        return None
