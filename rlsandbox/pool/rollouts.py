"""Rollouts: a policy at work on tasks, each rollout in a sandbox of its own, each with exactly one record.

Promises:

- every rollout of a batch is on record as asked for before the first one starts, and ends in one record,
  however it ends; one that raises (SystemExit, KeyboardInterrupt, CancelledError too) takes no other with it;
- a retry is a fresh sandbox; it starts from the last checkpoint when the policy made one, files and state;
- what infrastructure broke is told as missing and is never scored; a limit that was reached is ``truncated``,
  and the work is graded as it stands;
- a batch that is stopped (Ctrl-C, ``break``, the pool closing) records the rest as cancelled before it ends;
- a record is on disk before it is handed out (or the ledger has said that it cannot be).
"""

from __future__ import annotations

import asyncio
import contextlib
import inspect
import logging
import numbers
import weakref
from collections import deque
from collections.abc import AsyncIterator, Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Protocol

from .._sandbox.command import seconds
from ..errors import ConfigError, PoolClosedError
from ..ledger import Entry, Ledger, RolloutLog
from ..metrics.batch import BatchClock
from ..results import Record
from ..task import Task
from .attempts import Chain, Stopped
from .policy import SyncSide, in_thread

if TYPE_CHECKING:
    import pluggy

    from ..ledger.report import Report

log = logging.getLogger("rlsandbox.pool.rollouts")

RECORD_HOOK_S = 10.0
_YIELD_EVERY = 200
MOST_ROLLOUTS = 10_000_000


class Host(Protocol):
    """What is needed of the pool (:class:`~rlsandbox.AsyncPool`)."""

    run: str
    ledger: Ledger
    manager: pluggy.PluginManager
    metrics: Any

    @property
    def max_size(self) -> int | None: ...
    def expect(self, tasks: Iterable[Task], *, group_size: int = 1, replace: bool = False) -> None: ...
    def claim(self, task: Any, *, timeout: float | None = None, rollout: Any = None) -> Any:
        """An awaitable of a sandbox; *rollout* (:class:`rlsandbox.hooks.Rollout`) is for credential hooks."""
        ...


@dataclass(frozen=True)
class Plan:
    """A batch as it was asked for, checked."""

    tasks: tuple[Task, ...]
    policy: Callable[..., Any]
    group_size: int = 1
    concurrency: int | None = None
    retries: int = 2
    timeout: float | None = None
    resume: bool = False

    @staticmethod
    def of(tasks: Iterable[Task], policy: Callable[..., Any], *, sync: bool, **options: Any) -> Plan:
        """Raises ConfigError for what cannot be meant."""
        if isinstance(tasks, Task):
            raise ConfigError("tasks must be a list of tasks, not one task", hint="put it into a list")
        if isinstance(tasks, str):
            raise ConfigError(
                f"tasks must be Task objects, not {tasks!r}", hint="rlsandbox.load_tasks() reads them"
            )
        if not isinstance(tasks, Iterable):
            raise ConfigError(f"tasks must be a list of tasks, not {type(tasks).__name__}")
        plan = Plan(tuple(tasks), policy, **options)
        known: dict[str, Task] = {}
        for task in plan.tasks:
            if not isinstance(task, Task):
                raise ConfigError(f"tasks must be Task objects, not {type(task).__name__}")
            if known.setdefault(task.id, task) != task:
                raise ConfigError(f"two different tasks have the id {task.id!r}", task=task.id)
        if not callable(policy):
            raise ConfigError(f"policy must be callable: policy(sandbox, task), not {type(policy).__name__}")
        call = policy if inspect.isroutine(policy) else getattr(policy, "__call__", policy)  # noqa: B004
        if sync and (inspect.iscoroutinefunction(policy) or inspect.iscoroutinefunction(call)):
            raise ConfigError(
                "the policy is async, the pool is not", hint="use AsyncPool, or a plain function"
            )
        for name, least in (("group_size", 1), ("concurrency", 1), ("retries", 0)):
            value = getattr(plan, name)
            if value is None and name == "concurrency":
                continue
            if not isinstance(value, numbers.Integral) or isinstance(value, bool) or value < least:
                raise ConfigError(f"{name} must be a whole number of at least {least}, not {value!r}")
        asked = len(plan.tasks) * int(plan.group_size)
        if asked > MOST_ROLLOUTS:
            raise ConfigError(
                f"{len(plan.tasks):,} tasks in groups of {plan.group_size:,} are {asked:,} rollouts;"
                f" a batch holds {MOST_ROLLOUTS:,} at most, each of them in memory"
            )
        return replace(
            plan,
            group_size=int(plan.group_size),
            retries=int(plan.retries),
            concurrency=None if plan.concurrency is None else int(plan.concurrency),
            timeout=seconds(plan.timeout),
        )


class Batch:
    """The rollouts that were asked for together. One use: start, take records, stop."""

    def __init__(self, pool: Host, plan: Plan, sync: SyncSide | None = None) -> None:
        self.pool = pool
        self.plan = plan
        self.sync = sync
        self.logs: list[RolloutLog] = []
        """Of every rollout, those that an earlier run completed too, in the order of the tasks."""
        self.left_out = 0
        """How many those are."""
        self.interrupt: BaseException | None = None
        self._todo: deque[tuple[Entry, Task]] = deque()
        self._records: asyncio.Queue[Record | None] = asyncio.Queue()
        self._supervisor: asyncio.Task[None] | None = None
        self._clock: BatchClock | None = None
        self._taken: set[str] = set()

    async def start(self) -> None:
        """Record every rollout as asked for, tell the pool ahead, begin."""
        _batches.setdefault(self.pool, set()).add(self)
        await self._request()
        if not await self.pool.ledger.flush():
            log.warning("%d rollouts start with their requests held in memory", len(self._todo))
        if not self._todo:
            self._records.put_nowait(None)
            return
        self.pool.expect([task for _, task in self._todo])
        self._clock = BatchClock(self.pool.metrics.batch)
        self._supervisor = asyncio.create_task(self._run(), name="rlsandbox-batch")

    async def records(self) -> AsyncIterator[Record]:
        """Records as they come, until every rollout has one."""
        while (record := await self._records.get()) is not None:
            yield record
        self.check()

    def check(self) -> None:
        """Raise what ended the batch before its time: Ctrl-C, the pool's closing, or an error of our own."""
        if self.interrupt is not None:
            raise self.interrupt
        task = self._supervisor
        if task is not None and task.done() and not task.cancelled():
            broken = task.exception()
            if broken is not None:
                raise broken

    @property
    def running(self) -> bool:
        return self._supervisor is not None and not self._supervisor.done()

    async def stop(self) -> None:
        """End what runs; what has no record yet is recorded as cancelled. Twice is fine."""
        if self._supervisor is not None and self.running:
            self._supervisor.cancel()
            # Not through await: a second cancellation of the caller must not abandon the clean-up.
            await asyncio.wait({self._supervisor})
        self._cancel_rest()
        await self.pool.ledger.flush()
        _batches.get(self.pool, set()).discard(self)

    # ------------------------------------------------------------------

    async def _request(self) -> None:
        plan, ledger = self.plan, self.pool.ledger
        batch = ledger.new_batch()
        earlier: dict[tuple[str, int], RolloutLog] = {}
        if plan.resume:
            book = await asyncio.to_thread(ledger.book)
            earlier = {(entry.task_id, entry.index): entry for entry in book.rollouts.values()}
        used: dict[str, int] = {}
        for task in plan.tasks:
            first = used.get(task.id, 0)
            used[task.id] = first + plan.group_size
            group = f"{task.id}@{first}" if plan.resume else ledger.new_group(task)
            for index in range(first, first + plan.group_size):
                before = earlier.get((task.id, index))
                if before is not None and before.record is not None and before.record.status == "completed":
                    self.logs.append(before)
                    self.left_out += 1
                    continue
                entry = ledger.request(
                    task, group=group, index=index if plan.resume else None, batch=batch, again=before
                )
                self.logs.append(entry.log)
                self._todo.append((entry, task))
                if len(self._todo) % _YIELD_EVERY == 0:
                    await asyncio.sleep(0)
        if self.left_out:
            log.info(
                "run %s: %d of %d rollouts have completed before and are left out",
                ledger.run, self.left_out, len(self.logs),
            )  # fmt: skip

    async def _run(self) -> None:
        workers = self.plan.concurrency or self.pool.max_size or len(self._todo)
        try:
            async with asyncio.TaskGroup() as group:
                for _ in range(min(workers, len(self._todo))):
                    group.create_task(self._work())
        finally:
            self._cancel_rest()
            if self._clock is not None:
                self._clock.close()
            self._records.put_nowait(None)

    async def _work(self) -> None:
        while self._todo:
            entry, task = self._todo.popleft()
            chain = Chain(self.pool, self.plan, entry, task, self.sync, self._publish, self._clock)
            try:
                await chain.run()
            except Stopped as stop:
                self.interrupt = stop.error
                entry.cancel("the batch was interrupted")
                self._hand_out(entry)
                assert self._supervisor is not None
                self._supervisor.cancel()
                return
            except asyncio.CancelledError:
                entry.cancel("the batch was stopped while it ran")
                self._hand_out(entry)
                raise

    async def _publish(self, entry: Entry) -> None:
        """The rollout has its end: on disk, told to plugins, handed out."""
        await self.pool.ledger.flush()
        self._hand_out(entry)
        if self.pool.manager.hook.rlsandbox_record.get_hookimpls():
            call = self.pool.manager.hook.rlsandbox_record
            try:
                await in_thread(lambda: call(record=entry.record), RECORD_HOOK_S)
            except Exception:
                log.warning("a plugin's rlsandbox_record failed for %s", entry.id, exc_info=True)

    def _hand_out(self, entry: Entry) -> None:
        """Give the record to whoever iterates, once."""
        if entry.record is None or entry.id in self._taken:
            return
        self._taken.add(entry.id)
        if self._clock is not None and entry.log.attempts:
            self._clock.recorded()
        self._records.put_nowait(entry.record)

    def _cancel_rest(self) -> None:
        while self._todo:
            entry, _ = self._todo.popleft()
            entry.cancel("the batch was stopped before its turn")
            self._hand_out(entry)


_batches: weakref.WeakKeyDictionary[Host, set[Batch]] = weakref.WeakKeyDictionary()


async def stop_batches(pool: Host) -> None:
    """Stop every batch of *pool*: the first thing that closing it does."""
    for batch in list(_batches.get(pool, ())):
        if batch.running:
            batch.interrupt = PoolClosedError("the pool was closed while its rollouts ran")
        await batch.stop()


def rollouts(
    pool: Host,
    tasks: Iterable[Task],
    policy: Callable[..., Any],
    *,
    group_size: int = 1,
    concurrency: int | None = None,
    retries: int = 2,
    timeout: float | None = None,
    resume: bool = False,
    sync: SyncSide | None = None,
) -> AsyncIterator[Record]:
    """Run *policy* on *tasks* and give records as rollouts end; see :meth:`rlsandbox.Pool.rollouts`.

    Args:
        policy: ``await policy(sandbox, task)`` gives a JSON-able value or text, kept in the record.
        group_size: rollouts a task.
        concurrency: rollouts at once; default the pool's ceiling.
        retries: further attempts, in fresh sandboxes, of a rollout that broke in a way that may not repeat.
        timeout: seconds for one rollout with all its attempts and its waiting for sandboxes.
        resume: go on with this run: rollouts that its ledger has as completed are skipped.

    Raises:
        ConfigError: an argument cannot be meant; at once, before anything is recorded.
        PoolClosedError: somebody closed the pool meanwhile; every record has been given before.
    """
    plan = Plan.of(
        tasks,
        policy,
        sync=sync is not None,
        group_size=group_size,
        concurrency=concurrency,
        retries=retries,
        timeout=timeout,
        resume=resume,
    )
    return _iterate(Batch(pool, plan, sync))


async def _iterate(batch: Batch) -> AsyncIterator[Record]:
    try:
        await batch.start()
        async for record in batch.records():
            yield record
    finally:
        await batch.stop()


async def run_rollouts(
    pool: Host,
    tasks: Iterable[Task],
    policy: Callable[..., Any],
    *,
    progress: bool | None = None,
    sync: SyncSide | None = None,
    **options: Any,
) -> Report:
    """:func:`rollouts` to the end, as a :class:`~rlsandbox.Report` of the batch.

    Args:
        progress: a progress bar on stderr; None shows one where stderr is a terminal.
    """
    from ..ledger.report import Report
    from .progress import progress_bar

    batch = Batch(pool, Plan.of(tasks, policy, sync=sync is not None, **options), sync)
    total = len(batch.plan.tasks) * batch.plan.group_size
    with progress_bar(progress, total) as tell:
        try:
            await batch.start()
            tell.skipped(batch.left_out)
            async for record in batch.records():
                tell.record(record)
        finally:
            await batch.stop()
    return Report(batch.logs, left_out=batch.left_out)


def sync_rollouts(
    pool: Host, sync: SyncSide, tasks: Iterable[Task], policy: Callable[..., Any], **options: Any
) -> Iterator[Record]:
    """:func:`rollouts` for the synchronous Pool; *pool* is the AsyncPool behind it; policies get threads."""
    plan = Plan.of(tasks, policy, sync=True, **options)
    return _iterate_sync(Batch(pool, plan, sync), sync)


def _iterate_sync(batch: Batch, sync: SyncSide) -> Iterator[Record]:
    async def following() -> Record | None:
        return await batch._records.get()

    call = sync.portal.call
    try:
        call(batch.start)
        while (record := call(following)) is not None:
            yield record
        batch.check()
    finally:
        # A pool that was closed meanwhile has stopped the batch itself.
        with contextlib.suppress(PoolClosedError):
            call(batch.stop)


def sync_run_rollouts(
    pool: Host, sync: SyncSide, tasks: Iterable[Task], policy: Callable[..., Any], **options: Any
) -> Report:
    """:func:`run_rollouts` for the synchronous Pool."""
    report: Report = sync.portal.call(run_rollouts, pool, tasks, policy, sync=sync, **options)
    return report
