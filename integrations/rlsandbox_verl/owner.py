"""One pool a job: a named ray actor owns it, everybody else claims from it.

The actor hands out the pool's reference (:attr:`rlsandbox.Pool.ref`); from then on sandboxes travel between
processes of one machine without ray. A job on several machines has an owner on each, with that machine's
share. An owner that dies takes its sandboxes with it; ray starts it anew (``restarts`` times), after which
everybody who asks gets a PoolClosedError of kind ``owner_gone``.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import time
import weakref
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import rlsandbox as rls
from rlsandbox.errors import ConfigError, PoolClosedError, SandboxError

from .numbers import Ended, Numbers, Window
from .settings import Settings, tasks_of

log = logging.getLogger("rlsandbox.verl")

NAME = "rlsandbox-pool-"
RESTART_S = 60.0
_PAUSE_S = 0.2


@dataclass(frozen=True)
class Begun:
    """What a rollout needs to begin: its task, where the pool is, and which batch it belongs to."""

    task: rls.Task
    ref: rls.PoolRef
    mode: str


class PoolOwner:
    """Runs as a ray actor. Every method is short or waits on the pool's own thread."""

    def __init__(self, settings: Settings, run: str) -> None:
        self._settings = settings
        self._made: tuple[rls.Pool, Numbers] | Exception
        try:
            pool = settings.make_pool(run)
            self._made = pool, Numbers(pool.metrics)
        except Exception as error:  # raised here, ray would only say that the process has died
            self._made = error
        self._batch_size = 1
        self._validating: set[str] = set()

    def _owned(self) -> tuple[rls.Pool, Numbers]:
        if isinstance(self._made, Exception):
            raise self._made
        return self._made

    @property
    def _pool(self) -> rls.Pool:
        return self._owned()[0]

    @property
    def _numbers(self) -> Numbers:
        return self._owned()[1]

    def pid(self) -> int:
        """Of its process.

        Raises:
            SandboxError: there is no pool.
        """
        self._owned()
        return os.getpid()

    def begin(self, task_id: str, source: str | None, uid: str) -> Begun:
        """For a rollout that begins."""
        mode = "val" if uid in self._validating else "train"
        try:
            return Begun(self._task(task_id, source), self._pool.ref, mode)
        except SandboxError as error:
            self.refused(str(error))
            raise

    def refused(self, why: str) -> None:
        """A rollout could not even begin; verl goes on whatever it raises, so somebody has to count."""
        self._numbers.refused(why)

    def ref(self) -> rls.PoolRef:
        return self._pool.ref

    def ended(self, *ends: Ended) -> None:
        for end in ends:
            self._numbers.add(end)

    def begin_batch(self, mode: str, uids: list[str], rollouts: int) -> None:
        """Rollouts of these prompts are about to begin.

        Raises:
            SandboxError: nothing has come to its end for so long that training makes no sense.
        """
        self._numbers.begin(mode)
        self._batch_size = max(self._batch_size, rollouts)
        if mode == "val":
            self._validating = set(uids)
        lost, most = self._numbers.missing_in_row, self._settings.give_up * self._batch_size
        if lost >= most:
            raise SandboxError(
                f"the last {lost} rollouts all broke (the last one: {self._numbers.last_failure})",
                kind="all_lost",
                hint="give_up says how many batches in a row may be lost",
            )

    def expect(self, rows: list[tuple[str, str | None]], group_size: int) -> None:
        """What is claimed next, in place of what was said before."""
        self._pool.expect([self._task(*row) for row in rows], group_size=group_size, replace=True)

    def wait_ready(self, timeout: float | None = None) -> int:
        return self._pool.wait_ready(timeout=timeout)

    def pop(self) -> dict[str, Window]:
        return self._numbers.pop()

    def close(self) -> None:
        if not isinstance(self._made, Exception):
            self._pool.close()

    def _task(self, task_id: str, source: str | None) -> rls.Task:
        source = self._settings.tasks or source
        if not source:
            raise ConfigError(
                f"nothing says where task {task_id!r} is",
                hint="write the data set with rlsandbox_verl.to_parquet, or give tasks= to the agent loop",
            )
        task = tasks_of(source).get(task_id)
        if task is None:
            raise ConfigError(f"no task of {source} is called {task_id!r}")
        return task


# ---------------------------------------------------------------------- where the owner is


def owner_on(node: str, settings: Settings) -> Any:
    """The owner on a machine of the cluster; made when there is none. It lives as long as who made it
    first."""
    import ray
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

    run = f"verl-{ray.get_runtime_context().get_job_id()}"
    actor: Any = ray.remote(PoolOwner)
    return actor.options(
        name=NAME + node,
        get_if_exists=True,
        num_cpus=0,
        max_restarts=settings.restarts,
        max_concurrency=64,
        scheduling_strategy=NodeAffinitySchedulingStrategy(node, soft=False),
    ).remote(settings, run)


def owner_here(settings: Settings) -> Any:
    """The owner on this machine."""
    import ray

    return owner_on(ray.get_runtime_context().get_node_id(), settings)


def owners() -> list[Any]:
    """All of this job's owners that are there."""
    import ray

    if not ray.is_initialized():
        return []
    found = []
    for name in ray.util.list_named_actors():
        if name.startswith(NAME):
            with contextlib.suppress(ValueError):  # it has died since
                found.append(ray.get_actor(name))
    return found


async def ask(owner: Any, what: str, *arguments: Any, within: float = RESTART_S) -> Any:
    """Call a method of the owner; one that is being started anew is waited for.

    Raises:
        PoolClosedError: it is gone for good.
    """
    import ray.exceptions

    deadline = time.monotonic() + within
    while True:
        try:
            return await getattr(owner, what).remote(*arguments)
        except ray.exceptions.RayActorError as error:
            _wait_or_raise(error, deadline)
            await asyncio.sleep(_PAUSE_S)
        except ray.exceptions.RayTaskError as error:
            raise _cause(error) from None


def ask_blocking(owner: Any, what: str, *arguments: Any, within: float = RESTART_S) -> Any:
    """The same for who does not await."""
    import ray
    import ray.exceptions

    deadline = time.monotonic() + within
    while True:
        try:
            return ray.get(getattr(owner, what).remote(*arguments))
        except ray.exceptions.RayActorError as error:
            _wait_or_raise(error, deadline)
            time.sleep(_PAUSE_S)
        except ray.exceptions.RayTaskError as error:
            raise _cause(error) from None


def _wait_or_raise(error: Any, deadline: float) -> None:
    import ray.exceptions

    if isinstance(error, ray.exceptions.ActorUnavailableError) and time.monotonic() < deadline:
        return
    raise PoolClosedError(
        "the process that owned the job's pool has died and is not started again",
        kind="owner_gone",
        hint="its log is among ray's; restarts= says how often it is started anew",
    ) from error


def _cause(error: Any) -> Any:
    cause = getattr(error, "cause", None)
    return cause if isinstance(cause, SandboxError) else error


# ---------------------------------------------------------------------- for a process that runs rollouts


class Job:
    """This process's share of the job's pool. One an event loop."""

    def __init__(self, settings: Settings) -> None:
        self.settings = settings
        self._owner: Any = None
        self._pool: rls.AsyncPool | None = None
        self._ref: rls.PoolRef | None = None
        self._lock = asyncio.Lock()
        self._asked: dict[tuple[str, str | None, str], asyncio.Task[Begun]] = {}
        self._ends: list[Ended] = []
        self._telling: asyncio.Task[None] | None = None
        """Takes ends to the owner."""
        self._next: asyncio.Task[None] | None = None
        """Takes the next ones there, after it."""

    @property
    def owner(self) -> Any:
        if self._owner is None:
            self._owner = owner_here(self.settings)
        return self._owner

    async def begin(self, task_id: str, source: str | None, uid: str) -> tuple[Begun, rls.AsyncPool]:
        """The task, and the pool of the owner that lives now."""
        begun = await self._begun(task_id, source, uid)
        return begun, await self._connected(begun.ref)

    async def _begun(self, task_id: str, source: str | None, uid: str) -> Begun:
        """Siblings begin together, and the answer is the same: it is asked for once."""
        key = task_id, source, uid
        asked = self._asked.get(key)
        if asked is None:
            asked = asyncio.get_running_loop().create_task(ask(self.owner, "begin", *key))
            self._asked[key] = asked
            asked.add_done_callback(lambda _: self._asked.pop(key, None))
        return await asyncio.shield(asked)

    async def task(self, task_id: str, source: str | None) -> rls.Task:
        begun: Begun = await ask(self.owner, "begin", task_id, source, "")
        return begun.task

    async def pool(self) -> rls.AsyncPool:
        """The pool of the owner that lives now."""
        return await self._connected(await ask(self.owner, "ref"))

    async def _connected(self, ref: rls.PoolRef) -> rls.AsyncPool:
        async with self._lock:
            if self._pool is None or self._ref != ref:
                old, self._pool = self._pool, await asyncio.to_thread(rls.AsyncPool.connect, ref)
                self._ref = ref
                if old is not None:
                    log.warning("the pool's owner was started anew: process %d is gone", old.ref.pid)
                    await old.close()
            return self._pool

    async def close(self) -> None:
        """Give back what this process holds."""
        last = self._next or self._telling
        if last is not None:
            await asyncio.wait({last})
        pool, self._pool = self._pool, None
        if pool is not None:
            await pool.close()

    async def refused(self, error: Exception) -> None:
        await ask(self.owner, "refused", str(error))

    async def ended(self, end: Ended) -> None:
        """Tell the owner; those that end while it is being told of others are told together.

        Whoever is cancelled meanwhile, the others' ends go on their way, and so does this one.
        """
        self._ends.append(end)
        if self._next is None:
            self._next = asyncio.get_running_loop().create_task(self._tell(self._telling))
        await asyncio.shield(self._next)

    async def _tell(self, before: asyncio.Task[None] | None) -> None:
        if before is not None:
            await asyncio.wait({before})
        self._telling, self._next = self._next, None
        ends, self._ends = self._ends, []
        try:
            await ask(self.owner, "ended", *ends)
        except SandboxError as error:
            log.warning("the end of %d rollouts is in the ledger only: %s", len(ends), error)


_jobs: weakref.WeakKeyDictionary[asyncio.AbstractEventLoop, Job] = weakref.WeakKeyDictionary()


def job_of(settings: Settings) -> Job:
    """This process's, for the event loop that runs."""
    loop = asyncio.get_running_loop()
    job = _jobs.get(loop)
    if job is None:
        job = _jobs[loop] = Job(settings)
    return job


async def disconnect() -> None:
    """Leave the job's pool, for who used it on an event loop that ends."""
    job = _jobs.pop(asyncio.get_running_loop(), None)
    if job is not None:
        await job.close()


def pop_all(found: Iterable[Any]) -> dict[str, Window]:
    """What all owners have to tell, by mode."""
    parts: dict[str, list[Window]] = {}
    for owner in found:
        try:
            told = ask_blocking(owner, "pop")
        except PoolClosedError as error:
            log.warning("numbers of a pool are lost: %s", error)
            continue
        for mode, window in told.items():
            parts.setdefault(mode, []).append(window)
    return {mode: Window.merge(windows) for mode, windows in parts.items()}
