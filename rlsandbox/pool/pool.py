"""AsyncPool: sandboxes that are ready before they are asked for.

Promises: a claim gets a verified sandbox or a typed error that says why; making the pool starts nothing but
what checks its arguments and opens its ledger (members are made from the first await on); closing disposes
of everything; a closed or forked pool says so at once.
"""

from __future__ import annotations

import asyncio
import logging
import os
import secrets
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Mapping, Sequence
from types import TracebackType
from typing import TYPE_CHECKING, Any, Literal, Self

from ..backends.registry import load_backend
from ..config import load_config
from ..errors import PoolClosedError
from ..hooks import plugin_manager
from ..ledger import Ledger, new_run_name
from ..metrics import Metrics, start_exporters
from ..results import Record
from ..spec import Spec
from ..task import Task
from . import settings
from .claiming import Claiming
from .closing import refuse_inside_policy, seen_through
from .core import Core
from .driver import Driver
from .lending import Lender
from .link import KeeperLink, Link
from .model import CoreConfig, Note, State
from .operations import Deadlines
from .policy import in_thread
from .stats import PoolStats, stats_of

if TYPE_CHECKING:
    from os import PathLike

    from ..backends.base import Backend, Member
    from ..ledger.report import Report
    from ..sandbox import AsyncSandbox, AsyncSnapshot
    from .owner import Owner, PoolRef

log = logging.getLogger("rlsandbox.pool")

AsyncPolicy = Callable[["AsyncSandbox", Task], Awaitable[Any]]
CLOSE_S = 30.0
PLACE_S = 10.0


class AsyncPool(Claiming):
    """A pool of warm sandboxes.

    Args:
        backend: a name (``local``, ``kubernetes``, ``simulated``, or one that a package brings) or a Backend.
        size: sandboxes kept ready.
        max_size: sandboxes that may exist at once, in whatever state; default *size*.
        spec: what sandboxes are made of unless a task says otherwise.
        when_empty: what a claim does that finds none ready: ``create`` one, ``wait`` for one, or ``fail``.
        max_creating: creations in flight at once.
        write_rate: creations and removals a second, together; default what the backend stands.
        run: name of the run, in the ledger and on everything that is made.
        ledger: where records go: a ``.db`` file or a directory; default ``$RLSANDBOX_HOME``.
        plugins: further plugins, before the installed ones.
        block: built-in or installed plugins to leave out, by name.
        config: a file instead of ``rlsandbox.toml``; False ignores files and variables.
        profile: section ``[profiles.NAME]`` of the configuration.

    Raises:
        ConfigError: an argument, variable or file is wrong, or the pool can never fit the machine.
    """

    def __init__(
        self,
        backend: str | Backend | None = None,
        *,
        size: int | None = None,
        max_size: int | None = None,
        spec: Spec | None = None,
        when_empty: Literal["create", "wait", "fail"] | None = None,
        max_creating: int | None = None,
        write_rate: float | None = None,
        run: str | None = None,
        ledger: str | PathLike[str] | None = None,
        plugins: Sequence[object] = (),
        block: Sequence[str] = (),
        config: str | PathLike[str] | Literal[False] | None = None,
        profile: str | None = None,
    ) -> None:
        given = {
            "backend": backend, "size": size, "max_size": max_size, "spec": spec, "when_empty": when_empty,
            "max_creating": max_creating, "write_rate": write_rate, "run": run, "ledger": ledger,
            "block": block if isinstance(block, str) else tuple(block),
        }  # fmt: skip
        self.config = load_config(config, profile, given)
        choice = self.config.backend
        self.backend = choice.instance or load_backend(choice.name, choice.options)
        self._numbers = settings.numbers_of(self.config, self.backend)
        self.spec = self.config.spec
        self.plugins = plugin_manager(plugins, block=self.config.pool.block)
        self.manager = self.plugins
        self.run = self.config.pool.run or new_run_name()
        self.metrics = Metrics(run=self.run, gauges=self._gauges, totals=self._totals)
        self._issues = bool(self.plugins.hook.rlsandbox_issue_credentials.get_hookimpls())
        self._places = bool(self.plugins.hook.rlsandbox_place.get_hookimpls())
        self.closed = False
        self._pid = os.getpid()
        self._driver: Driver | None = None
        self._starting: asyncio.Lock | None = None
        self._lender = Lender(self)
        self._owner: Owner | None = None
        self._latest = {}
        self._specs: dict[tuple[str | None, Spec | None], Spec] = {}
        self._early: list[tuple[list[tuple[str, str | None, int]], bool]] = []
        self._known: dict[str, Spec] = {}
        self._layer_tasks: dict[str, Task] = {}
        self._residue: deque[str] = deque(maxlen=20)
        facts = {"backend": self.backend.name, "size": self.size, "max_size": self.max_size}
        facts["isolation"] = self.spec.isolation
        self.ledger = Ledger.open(self.run, self.config.pool.ledger, facts=facts)
        try:
            wished = self.config.metrics
            self._exporters = start_exporters(
                self.metrics,
                prometheus_port=wished.prometheus_port,
                prometheus_host=wished.prometheus_host,
                otlp_endpoint=wished.otlp_endpoint,
            )
        except BaseException:
            self.ledger.close()
            raise

    # -- what it is ----------------------------------------------------------------------------------

    @property
    def size(self) -> int:
        return self._numbers.size

    @property
    def max_size(self) -> int:
        return self._numbers.max_size

    _ending: asyncio.Task[None] | None = None

    deadlines = Deadlines()
    """Seconds that operations may take; set it before the pool is started."""

    def __repr__(self) -> str:
        if self.closed:
            state = "closed"
        elif self._driver is None:
            state = "not started"
        else:
            core = self._driver.core
            state = f"{core.n[State.IDLE]} ready, {core.n[State.CLAIMED]} claimed, {core.waiting} waiting"
        return f"<{type(self).__name__} {self.backend.name} {self.run}: {state}>"

    def __copy__(self) -> Self:
        return self

    def __deepcopy__(self, memo: object) -> Self:
        return self

    def __reduce__(self) -> Any:
        raise TypeError(
            "a pool cannot be pickled; hand pool.ref to another process and use Pool.connect(ref)"
        )

    @property
    def driver(self) -> Driver:
        if self._driver is None:
            raise PoolClosedError("the pool was not started", hint="await something of it first")
        return self._driver

    def now(self) -> float:
        return self.driver.now()

    @property
    def ref(self) -> PoolRef:
        """How other processes of this machine find the pool; it pickles. Ask for it on the event loop.

        Hand it to ranks, ray workers or spawned processes, which use ``connect``: one ceiling, one refill,
        owned by this process.
        """
        self._check()
        if self._owner is None:
            from .owner import Owner

            self._owner = Owner(self)
        return self._owner.ref

    @classmethod
    def connect(cls, ref: PoolRef) -> AsyncPool:
        """The pool of another process. Closing it gives back what this process holds, and no more."""
        from .remote import RemotePool

        return RemotePool(ref)

    # -- starting ------------------------------------------------------------------------------------

    async def start(self) -> Driver:
        """Begin to fill the pool. Claims do it by themselves.

        Raises:
            UnsupportedError: the backend cannot work here.
        """
        self._check()
        if self._driver is not None and not self._driver.is_here():
            raise PoolClosedError(
                "this pool runs on another event loop than this one, or on one that has ended",
                kind="other_loop",
                hint="make one AsyncPool in each asyncio.run(), or a Pool, which threads and loops may share",
            )
        if self._starting is None:
            self._starting = asyncio.Lock()
        async with self._starting:
            if self._driver is None:
                self._driver = await self._start()
        return self._driver

    async def _start(self) -> Driver:
        capabilities = await self.backend.capabilities()
        numbers, pool = self._numbers, self.config.pool
        core = Core(
            CoreConfig(
                size=numbers.size,
                ceiling=numbers.max_size,
                when_empty=pool.when_empty,
                max_creating=numbers.max_creating,
                write_rate=settings.write_rate(self.config, capabilities),
                home=self.spec.digest,
                shared_layers=capabilities.shared_layers,
                layer_budget=numbers.layer_budget,
            ),
            seed=secrets.randbits(32),
            prefix=f"rls-{secrets.token_hex(3)}-",
        )
        labels = {"rlsandbox.run": self.run, "rlsandbox.owner": secrets.token_hex(8)}
        driver = Driver(
            core, self.backend, self._link, labels=labels, metrics=self.metrics, note=self._noted,
            deadlines=self.deadlines,
            adopt=capabilities.adopt,
        )  # fmt: skip
        driver.rested = self._lender.lay_out
        if self._places:
            driver.choose = self._choose
        driver.specs = self._known
        driver.tasks = self._layer_tasks
        self._known[self.spec.digest] = self.spec
        core.now = driver.now()
        for demand, replace in self._early:
            driver.tell(core.expect, demand, replace=replace)
        self._early.clear()
        driver.start()
        return driver

    async def _link(self, member: Member, spec: Spec) -> Link:
        own = getattr(self.backend, "open_link", None)
        if own is not None:
            link: Link = await own(member)
            return link
        return await KeeperLink.open(self.backend, member, spec, self.plugins)

    async def _choose(self, spec: Spec) -> dict[str, Any]:
        """The node that a plugin wishes for a sandbox of *spec*, as an argument of provision()."""
        task, nodes = self._latest.get(spec.digest), list(self.backend.nodes())
        if task is None or not nodes:
            return {}
        try:
            node = await in_thread(
                lambda: self.plugins.hook.rlsandbox_place(task=task, nodes=tuple(nodes)), PLACE_S
            )
        except Exception as error:
            said = f"no answer within {PLACE_S:g} s" if isinstance(error, TimeoutError) else repr(error)
            log.warning("a plugin's rlsandbox_place failed for task %s: %s", task.id, said)
            return {}
        if node is not None and node not in nodes:
            log.warning("a plugin's rlsandbox_place chose %r for task %s: no such node", node, task.id)
            return {}
        return {} if node is None else {"node": node}

    def _noted(self, note: Note) -> None:
        if note.kind == "quarantined":
            self._residue.append(f"{note.member}: {note.detail}")
        elif note.kind == "lost" and "closing" in note.detail:
            return
        spec = self._known.get(note.spec or "")
        image = spec.image if spec is not None else None
        self.ledger.note(note.kind, note.detail, sandbox=note.member, image=image)

    def _check(self) -> None:
        if os.getpid() != self._pid:
            raise PoolClosedError(
                "this pool belongs to another process: it was made before a fork",
                kind="forked",
                hint="make the pool in the child, or hand it pool.ref and use Pool.connect(ref)",
            )
        if self.closed:
            raise PoolClosedError("the pool is closed")

    # -- rollouts ------------------------------------------------------------------------------------

    def rollouts(
        self,
        tasks: Iterable[Task],
        policy: AsyncPolicy,
        *,
        group_size: int = 1,
        concurrency: int | None = None,
        retries: int = 2,
        timeout: float | None = None,
        resume: bool = False,
    ) -> AsyncIterator[Record]:
        """Run *policy* on every task, *group_size* times each, and give records as rollouts end.

        See :func:`rlsandbox.pool.rollouts.rollouts`.
        """
        from .rollouts import rollouts

        return rollouts(
            self, tasks, policy, group_size=group_size, concurrency=concurrency, retries=retries,
            timeout=timeout, resume=resume,
        )  # fmt: skip

    async def run_rollouts(
        self,
        tasks: Iterable[Task],
        policy: AsyncPolicy,
        *,
        group_size: int = 1,
        concurrency: int | None = None,
        retries: int = 2,
        timeout: float | None = None,
        resume: bool = False,
        progress: bool | None = None,
    ) -> Report:
        """:meth:`rollouts` to the end, as a report."""
        from .rollouts import run_rollouts

        return await run_rollouts(
            self, tasks, policy, group_size=group_size, concurrency=concurrency, retries=retries,
            timeout=timeout, resume=resume, progress=progress,
        )  # fmt: skip

    async def _recorded(self, record: Record) -> None:
        """A rollout that somebody else drove has ended: tell the plugins."""
        await self.ledger.flush()
        hook = self.plugins.hook.rlsandbox_record
        if hook.get_hookimpls():
            try:
                await in_thread(lambda: hook(record=record), 10.0)
            except Exception:
                log.warning("a plugin's rlsandbox_record failed for %s", record.id, exc_info=True)

    def report(self) -> Report:
        """The whole run so far."""
        return self.ledger.report()

    # -- looking at it -------------------------------------------------------------------------------

    def stats(self) -> PoolStats:
        """What is so now, every counter, and advice on size and refill."""
        driver = self.driver
        names = {d: s.image or ("default" if d == self.spec.digest else d) for d, s in self._known.items()}
        requests = getattr(self.backend, "requests", None)
        return stats_of(driver.core, driver.bursts, driver.now(), list(self._residue), names, requests)

    async def stats_now(self) -> PoolStats:
        """:meth:`stats`, also where they are another process's."""
        return self.stats()

    async def snapshots_now(self) -> list[AsyncSnapshot]:
        """:meth:`snapshots`, also where they are another process's."""
        return self.snapshots()

    def snapshots(self) -> list[AsyncSnapshot]:
        """Those that were not deleted."""
        asleep = {id(lease.asleep) for lease in self._lender.leases if lease.asleep is not None}
        return [s for s in self._lender.snapshots.values() if id(s) not in asleep]

    def _gauges(self) -> Mapping[str, float]:
        if self._driver is None or self.closed:
            return {}
        core = self._driver.core
        gauges = {state.value: float(core.n[state]) for state in State}
        return {
            **gauges,
            "waiting": float(core.waiting),
            "size": float(self.size),
            "max_size": float(self.max_size),
        }

    def _totals(self) -> Mapping[str, int]:
        return {} if self._driver is None else self._driver.core.counters.to_dict()

    # -- closing -------------------------------------------------------------------------------------

    async def close(self, timeout: float | None = CLOSE_S) -> None:
        """Stop what runs, dispose of every sandbox, close the ledger. Twice is fine.

        Args:
            timeout: seconds; what is not gone by then is left to ``rlsandbox reap``, and a warning says so.
        """
        refuse_inside_policy(self)
        if os.getpid() != self._pid:
            return
        try:
            if not (self.closed and self._ended):
                await self.end(timeout)
        finally:
            if self._ended:  # (else the closing goes on, and still has to tell)
                try:
                    await in_thread(self.ledger.close, 30.0)
                except RuntimeError:  # the interpreter ends: no thread can be started any more
                    self.ledger.close()

    @property
    def _ended(self) -> bool:
        return self._ending is None or self._ending.done()

    async def end(self, timeout: float | None = CLOSE_S) -> None:
        """:meth:`close` but for the ledger; for all who close it at once, and seen through."""
        if self._driver is not None and not self._driver.is_here():
            self.closed = True  # nothing can be awaited that belongs to another loop
            log.warning("the event loop of pool %s has ended before it; its sandboxes end with it", self.run)
            for exporter in self._exporters:
                exporter.close()
            return
        if self._ending is None:
            self._ending = asyncio.get_running_loop().create_task(self._end(timeout), name="rlsandbox-close")
        await seen_through(self._ending)

    async def _end(self, timeout: float | None) -> None:
        from .rollouts import stop_batches

        await stop_batches(self)
        self.closed = True
        if self._owner is not None:
            await self._owner.close(timeout)
        for lease in list(self._lender.leases):
            await self._lender.closing(lease)
        self._lender.leases.clear()
        try:
            if self._driver is not None:
                await self._driver.close(timeout)
        finally:
            await self.backend.close()
            for exporter in self._exporters:
                exporter.close()

    async def __aenter__(self) -> Self:
        await self.start()
        return self

    async def __aexit__(
        self, exc_type: type[BaseException] | None, exc: BaseException | None, tb: TracebackType | None
    ) -> None:
        await self.close()
