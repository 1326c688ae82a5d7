"""The pool's side of a sandbox that is lent: its times, its credentials, snapshots, forks, hibernation.

:class:`Lender` is the :class:`~rlsandbox.sandbox.Host` of every sandbox of a pool.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from .._sandbox import files
from ..errors import ConfigError, ProcessesRunningError, SandboxError, SandboxStateError
from ..hooks import Credentials, Rollout
from ..keeper.connection import KeeperFailure
from ..ledger import redact
from ..metrics import TtfcSample
from ..spec import Spec
from ..task import Task
from .ahead import Need
from .forks import Forks
from .model import PoolClaim, PoolMember
from .operations import Held
from .policy import in_thread

if TYPE_CHECKING:
    from ..sandbox import AsyncSandbox, AsyncSnapshot
    from .pool import AsyncPool

log = logging.getLogger("rlsandbox.pool")

CREDENTIALS_S = 15.0
_EBUSY = 16
_PAST_CREDENTIALS = 16


@dataclass(eq=False)
class Lease:
    """One claim's sandbox, from hand-over to release."""

    claim: PoolClaim
    member: str
    task: Task
    spec: Spec
    rollout: Rollout | None
    needed: float
    handed: float
    parts: dict[str, float]
    counted: bool = True
    started: bool = False
    credentials: Credentials | None = None
    secret: int | None = None
    asleep: AsyncSnapshot | None = None
    """Where its files are while it hibernates."""
    over: bool = False
    ahead: Need | None = None


class Lender:
    """What sandboxes ask of the pool."""

    def __init__(self, pool: AsyncPool) -> None:
        self._pool = pool
        from ..sandbox import AsyncSandbox

        self._class: Any = AsyncSandbox
        self.leases: set[Lease] = set()
        self.snapshots: dict[str, AsyncSnapshot] = {}
        self._forks = Forks(pool)

    # -- handing over --------------------------------------------------------------------------------

    def parts(self, member: PoolMember, needed: float, now: float) -> dict[str, float]:
        """How the time from *needed* until *now* was spent."""
        waited = max(0.0, now - needed)
        made = _overlap(member.made_from, member.made_at, needed, now)
        prepared = _overlap(max(member.prepared_from, member.made_at), member.prepared_at, needed, now)
        return {
            "queued": max(0.0, waited - made - prepared),
            "provisioned": made,
            "reset": prepared,
            "connected": 0.0,
        }

    async def hand_over(self, lease: Lease, held: Held) -> AsyncSandbox:
        """A sandbox with credentials in it, for pools with a plugin that issues some."""
        credentials = await self._issue(lease)
        if credentials is None:
            return self.sandbox(lease, held)
        if not isinstance(credentials, Credentials):
            raise SandboxError(
                f"a plugin's rlsandbox_issue_credentials gave a {type(credentials).__name__}, "
                "not rlsandbox.hooks.Credentials",
                kind="credentials", phase="claim", task=lease.task.id,
            )  # fmt: skip
        lease.credentials = credentials
        lease.secret = redact.register(credentials.env, credentials.files)
        held.credentials = [*held.credentials[1 - _PAST_CREDENTIALS :], credentials]
        sandbox = self.sandbox(lease, held, credentials.env)
        await _place(sandbox, credentials)
        return sandbox

    def sandbox(self, lease: Lease, held: Held, env: Mapping[str, str] | None = None) -> AsyncSandbox:
        """The sandbox of a lease: the one at hand where that fits."""
        sandbox, held.at_hand = held.at_hand, None
        if sandbox is None or env or sandbox.task is not lease.task:
            sandbox = self._make(held, lease.task, env or {})
        else:
            sandbox._state = "ready"
        sandbox.rollout = lease.rollout
        sandbox.times = lease.parts
        sandbox._lease = lease
        held.task = lease.task
        self.leases.add(lease)
        return sandbox  # type: ignore[no-any-return]

    def lay_out(self, held: Held) -> None:
        """Make a ready member's next sandbox now, while nobody waits, on the guess that the task stays."""
        if held.task is not None:
            held.at_hand = sandbox = self._make(held, held.task, {})
            sandbox._state = "released"  # of nobody: nothing to give back when it is not used

    def _make(self, held: Held, task: Task, env: Mapping[str, str]) -> Any:
        make = getattr(held.link, "sandbox", None)
        if make is not None:  # a backend without keepers has sandboxes of its own
            return make(task, held.spec, self)
        return self._class(
            held.link.client, id=held.member.id, task=task, spec=held.spec, node=held.member.node,
            reset_mode=held.link.mode, host=self, facts=held.member.facts,
            base_env={**self._pool.backend.environment(held.spec), **env},
        )  # fmt: skip

    async def _issue(self, lease: Lease) -> Any:
        pool = self._pool
        rollout = lease.rollout or Rollout(pool.run, lease.task, 0, "", 1)
        try:
            return await in_thread(
                lambda: pool.plugins.hook.rlsandbox_issue_credentials(rollout=rollout), CREDENTIALS_S
            )
        except Exception as error:
            said = (
                f"did not end within {CREDENTIALS_S:g} s" if isinstance(error, TimeoutError) else str(error)
            )
            raise SandboxError(
                f"no credentials were issued: {said}",
                kind="credentials",
                phase="claim",
                retryable=not isinstance(error, ConfigError),
                task=lease.task.id,
            ) from error

    async def revoke(self, lease: Lease) -> None:
        """Take an episode's credentials back; a failure is on record and stops nothing."""
        credentials, lease.credentials = lease.credentials, None
        if credentials is None:
            return
        pool = self._pool
        try:
            await in_thread(
                lambda: pool.plugins.hook.rlsandbox_revoke_credentials(credentials=credentials), CREDENTIALS_S
            )
        except Exception as error:
            said = (
                f"no end within {CREDENTIALS_S:g} s"
                if isinstance(error, TimeoutError)
                else f"{type(error).__name__}: {error}"
            )
            cause = redact.text(f"credentials {credentials.id} could not be revoked: {said}")
            log.error("%s", cause)
            pool.metrics.failure("revoke")
            rollout = lease.rollout
            pool.ledger.note(
                "revoke_failed", cause, credentials=credentials.id, sandbox=lease.member, task=lease.task.id,
                rollout=rollout.id if rollout is not None else "",
            )  # fmt: skip
        else:
            if lease.secret is not None:
                redact.retire(lease.secret)

    # -- Host ----------------------------------------------------------------------------------------

    def command_started(self, sandbox: AsyncSandbox, waited_s: float) -> None:
        lease = _lease_of(sandbox)
        if lease is None or lease.started or not lease.counted:
            return
        lease.started = True
        idle = max(0.0, self._pool.now() - waited_s - lease.handed)
        parts = lease.parts
        sample = sample_of(parts, started_s=waited_s, idle_s=idle)
        parts["started"], parts["idle"] = waited_s, idle
        sandbox.ttfc_s = sample.ttfc_s
        metrics = self._pool.metrics
        metrics.record_ttfc_late(sample)  # whoever waits for the command comes first
        asyncio.get_running_loop().call_soon(metrics.settle)

    async def release(self, sandbox: AsyncSandbox, *, discard: bool) -> None:
        lease = _lease_of(sandbox)
        if lease is None or lease.over:
            return
        lease.over = True
        self.leases.discard(lease)
        self._unless_started(lease)
        try:
            if lease.credentials is not None:
                await self.revoke(lease)
        finally:
            if lease.asleep is not None:
                self._drop(lease.asleep)
            elif not self._pool.closed:
                self._pool.driver.release(lease.claim, discard=discard)

    async def abandon(self, lease: Lease) -> None:
        """A hand-over that broke off: what it had got so far goes back."""
        lease.over = True
        self.leases.discard(lease)
        try:
            await self.revoke(lease)
        finally:
            if not self._pool.closed:
                self._pool.driver.release(lease.claim)

    async def closing(self, lease: Lease) -> None:
        """The pool is closed while somebody holds this one."""
        self._unless_started(lease)
        lease.counted = False  # a release that comes later counts it no more
        await self.revoke(lease)

    def _unless_started(self, lease: Lease) -> None:
        if lease.counted and not lease.started and Need.there(lease.ahead):
            self._pool.metrics.record_ttfc(sample_of(lease.parts, never_started=True))

    async def snapshot(self, sandbox: AsyncSandbox, *, kill: bool, name: str | None) -> AsyncSnapshot:
        _held(sandbox)
        if name is not None and name in self.snapshots:
            raise ConfigError(
                f"a snapshot is called {name!r} already", hint="delete() it, or choose another name"
            )
        layer = f"s{secrets.token_hex(8)}"
        # What one episode may hold is no part of a state that others are started from.
        credentials = _held(sandbox).credentials
        for path in credentials.files if credentials is not None else ():
            await sandbox.client.outside_remove(sandbox.path(path))
        try:
            size = await seal(sandbox, layer, kill=kill)
        except asyncio.CancelledError:
            self._unwanted(sandbox, layer)
            raise
        finally:
            if credentials is not None:
                await _place(sandbox, credentials)
        snapshot = self.sealed(sandbox, layer, size, name)
        held = self._pool.driver.held.get(_held(sandbox).member)
        try:
            await self._keep(snapshot, held)
        except BaseException:
            self._drop(snapshot)
            raise
        return snapshot

    def _unwanted(self, sandbox: AsyncSandbox, layer: str) -> None:
        """The sealing of *layer* was cancelled and has ended: perhaps there is one that nobody knows."""
        driver = self._pool.driver
        held = driver.held.get(_held(sandbox).member)
        holds = getattr(held.link, "holds", None) if held is not None else None
        if holds is not None:
            holds(layer)
            driver.forget(layer)

    async def _keep(self, snapshot: AsyncSnapshot, held: Held | None) -> None:
        """Have its layer kept outside, where the backend does that; one that cannot be written is told of."""
        keep = getattr(held.link, "keep", None) if held is not None else None
        if keep is None:
            return
        try:
            await keep(snapshot.layer)  # type: ignore[attr-defined]
        except SandboxError as error:
            if error.kind != "layer_copy":
                raise
            log.warning("snapshot %s lives only as long as its sandbox's place: %s", snapshot.id, error)
            self._pool.ledger.note("copy_failed", str(error), snapshot=snapshot.id)

    async def catch_up(self, lease: Lease) -> None:
        """Have kept what another process sealed while it had the keeper's stream."""
        held = self._pool.driver.held.get(lease.member)
        for snapshot in list(self.snapshots.values()):
            if snapshot.parent is lease:  # type: ignore[attr-defined]
                await self._keep(snapshot, held)

    def sealed(self, sandbox: AsyncSandbox, layer: str, size: int, name: str | None) -> AsyncSnapshot:
        """The sandbox's upper layer was sealed as *layer*: a snapshot from now on."""
        from ..sandbox import AsyncSnapshot

        lease = _held(sandbox)
        driver = self._pool.driver
        member = driver.core.members.get(lease.member)
        parent = member.layer if member is not None else None
        driver.tell(
            lambda now: driver.core.keep_layer(
                layer, lease.spec.digest, size, now, member=lease.member, parent=parent
            )
        )
        snapshot = AsyncSnapshot(self, id=name or layer, bytes=size, task=lease.task, spec=lease.spec)
        snapshot.layer = layer  # type: ignore[attr-defined]
        held = driver.held.get(lease.member)
        holds = getattr(held.link, "holds", None) if held is not None else None
        if holds is not None:
            holds(layer)
        snapshot.parent = lease  # type: ignore[attr-defined]
        self.snapshots[snapshot.id] = snapshot
        return snapshot

    async def fork(
        self, snapshot: AsyncSnapshot, n: int, timeout: float | None, *, counted: bool = True
    ) -> list[AsyncSandbox]:
        return await self._forks.make(snapshot, n, timeout, counted)

    async def renew(self, sandbox: AsyncSandbox) -> None:
        lease = _held(sandbox)
        _, spec, layer = self._pool._resolve(lease.task)
        # Given back first: were it held while it waits for another, graders could wait for each other.
        sandbox.part()
        self._pool.driver.release(lease.claim)
        await self._moved(sandbox, lease, *await self._pool._obtain(layer, spec, None, task=lease.task))

    async def hibernate(self, sandbox: AsyncSandbox) -> None:
        lease = _held(sandbox)
        # Sealing needs processes gone, and a paused episode cannot end by itself.
        snapshot = await self.snapshot(sandbox, kill=True, name=None)
        held = self._pool.driver.held.get(lease.member)
        if held is not None and not getattr(held.link, "keeps", lambda _: True)(snapshot.layer):  # type: ignore[attr-defined]
            self._drop(snapshot)
            raise SandboxError(
                "its files could not be saved: it goes on as it is", kind="layer_copy", phase="command",
                hint="the warning before says why", sandbox=sandbox.id, task=sandbox.task.id,
            )  # fmt: skip
        if lease.over:  # released while its files were saved: nobody else knows of them
            self._drop(snapshot)
            raise SandboxStateError("the sandbox was released meanwhile", sandbox=sandbox.id)
        lease.asleep = snapshot
        sandbox.part()
        self._pool.driver.release(lease.claim)

    async def restore(self, sandbox: AsyncSandbox, timeout: float | None) -> None:
        lease = _lease_of(sandbox)
        if lease is None or lease.over or lease.asleep is None:
            raise SandboxStateError("the sandbox does not hibernate", sandbox=sandbox.id)
        claim, held = await self._pool._obtain(lease.asleep.layer, lease.spec, timeout, task=lease.task)  # type: ignore[attr-defined]
        snapshot, lease.asleep = lease.asleep, None
        try:
            await self._moved(sandbox, lease, claim, held)
        finally:
            self._drop(snapshot)

    async def _moved(self, sandbox: AsyncSandbox, lease: Lease, claim: PoolClaim, held: Held) -> None:
        """The sandbox lives in another member from now on."""
        if lease.over:  # released while it waited: nobody else knows of what it was given since
            self._pool.driver.release(claim)
            raise SandboxStateError("the sandbox was released meanwhile", sandbox=sandbox.id)
        lease.claim, lease.member = claim, claim.member or ""
        held.task = lease.task
        sandbox.id = held.member.id
        sandbox.attach(held.link.client, node=held.member.node)
        if lease.credentials is not None:
            held.credentials = [*held.credentials[1 - _PAST_CREDENTIALS :], lease.credentials]
            await _place(sandbox, lease.credentials)

    async def delete_snapshot(self, snapshot: AsyncSnapshot) -> None:
        self._drop(snapshot)

    def _drop(self, snapshot: AsyncSnapshot) -> None:
        if self.snapshots.get(snapshot.id) is snapshot:
            del self.snapshots[snapshot.id]
        if not self._pool.closed:
            driver = self._pool.driver
            driver.tell(driver.core.drop_layer, snapshot.layer)  # type: ignore[attr-defined]


async def seal(sandbox: AsyncSandbox, layer: str, *, kill: bool) -> int:
    """Seal the sandbox's upper layer as *layer*; its bytes.

    Raises:
        ProcessesRunningError: processes run in it, and *kill* is not set; nothing has changed.
    """
    try:
        return await sandbox.client.seal(layer, kill=kill)
    except KeeperFailure as error:
        if error.errno != _EBUSY:
            raise
        raise ProcessesRunningError(
            "processes run in the sandbox", hint="end them, or snapshot(kill=True)", sandbox=sandbox.id,
            task=sandbox.task.id,
        ) from None  # fmt: skip


async def _place(sandbox: AsyncSandbox, credentials: Credentials) -> None:
    for path, data in credentials.files.items():
        await files.write(sandbox, path, data, 0o600, None)


def sample_of(parts: Mapping[str, float], **rest: Any) -> TtfcSample:
    return TtfcSample(
        queued_s=parts["queued"], provisioned_s=parts["provisioned"], reset_s=parts["reset"],
        connected_s=parts["connected"], **rest,
    )  # fmt: skip


def _overlap(a: float, b: float, c: float, d: float) -> float:
    return max(0.0, min(b, d) - max(a, c))


def _lease_of(sandbox: AsyncSandbox) -> Lease | None:
    return getattr(sandbox, "_lease", None)


def _held(sandbox: AsyncSandbox) -> Lease:
    lease = _lease_of(sandbox)
    if lease is None or lease.over:
        raise SandboxStateError("the sandbox was given back", sandbox=sandbox.id)
    return lease
