"""What the pool asks of a member it is connected to: prime, reset, verify, close.

:class:`KeeperLink` does it with a keeper; a backend that has none (the simulated one) brings links of its
own by a method ``open_link(member)``. A link belongs to one member and to the pool's event loop, and is used
for one thing at a time.
"""

from __future__ import annotations

import asyncio
import errno
import logging
import os
import socket
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Protocol

from ..errors import NO_ROOM, ConfigError, PrimeError, SandboxDiedError, SandboxError, shared_disk_full
from ..hooks import Credentials, Residue
from ..keeper.client import AS_KEEPER, KeeperClient, KeeperFailure, Look
from ..reset.baseline import Baseline, baseline_of
from ..reset.facts import Facts
from ..reset.inspector import inspect
from ..reset.runner import run_reset, run_verify
from ..results import CommandResult
from ..spec import Spec
from ..task import Task
from .bringing import bring
from .policy import in_thread

if TYPE_CHECKING:
    import pluggy

    from ..backends.base import Backend, Member
    from ..reset.facts import Facts

log = logging.getLogger("rlsandbox.pool")

RESET_S = 30.0
VERIFY_S = 30.0
PRIME_HOOK_S = 120.0
_MAKE_DIR = 8 | 2
_MAKE_PARENTS = 2


class Link(Protocol):
    """A member's other end."""

    client: Any
    mode: str

    async def prime(self, task: Task, layer: str) -> int:
        """Put the task's files in place, run its setup, seal the result as *layer*; its bytes.

        Raises:
            PrimeError: the task's setup does not work.
        """
        ...

    async def set_up(self, task: Task) -> None:
        """What *prime* does, for the one episode of a member in mode ``replace``: it holds no layers."""
        ...

    async def reset(
        self, layer: str | None, *, task: Task | None, credentials: Sequence[Credentials]
    ) -> None:
        """End the episode and begin the next one on *layer* (None: the bare spec)."""
        ...

    async def verify(
        self, layer: str | None, *, task: Task | None, credentials: Sequence[Credentials]
    ) -> list[Residue]:
        """What is left of earlier episodes; empty when there is nothing."""
        ...

    async def close(self) -> None: ...

    def on_lost(self, tell: Callable[[BaseException], object]) -> None:
        """Call *tell* once when the member is gone."""
        ...


class KeeperLink:
    """A member with a keeper in it."""

    def __init__(
        self,
        backend: Backend,
        member: Member,
        spec: Spec,
        client: KeeperClient,
        baseline: Baseline,
        plugins: pluggy.PluginManager,
    ) -> None:
        self.client = client
        self.mode = client.welcome.mode
        self._backend, self._member, self._spec = backend, member, spec
        self._baseline, self._plugins = baseline, plugins
        self._given: set[str] = set()
        self._kept: set[str] = set()
        """Layers sealed here that the backend keeps outside."""
        self._stale: set[str] = set()
        """Layers that the keeper may still have though the pool has dropped them."""
        self._look: Look | None = None
        """What the reset that was has asked the keeper on the verification's behalf."""
        self._away = False
        self._tell_lost: Callable[[BaseException], object] | None = None
        self.lost_layer: Callable[[str], bool] = lambda _: False
        """Whether no member has the layer any more."""
        self.sources: Callable[[str], list[KeeperLink]] = lambda _: []
        """The links of members that have a layer, where the backend cannot carry layers itself."""
        self.arriving: Callable[[], object] = lambda: None
        """Called while a layer is on its way here."""
        self.below: Callable[[str], str | None] = lambda _: None
        """The task's primed layer on which a snapshot's was sealed: graders compare with it."""

    @classmethod
    async def open(
        cls, backend: Backend, member: Member, spec: Spec, plugins: pluggy.PluginManager
    ) -> KeeperLink:
        """Connect, shake hands, take the baseline."""
        reader, writer = await backend.connect(member)
        token = member.facts.get("token", "")
        asked: list[asyncio.Task[Facts]] = []  # the baseline's facts, on the way together with the handshake

        def early(client: KeeperClient) -> None:
            asked.append(asyncio.get_running_loop().create_task(inspect(client)))

        try:
            client = await KeeperClient.open(reader, writer, member=member.id, token=token, early=early)
            try:
                if client.welcome.mode == "replace":  # never put back, so never compared; it knows no facts
                    await asyncio.gather(*asked, return_exceptions=True)
                    baseline = Baseline(Facts(), "replace", "")
                else:
                    baseline = baseline_of(await asked[0], mode=client.welcome.mode, layer="")
            except BaseException:
                await client.aclose()
                raise
        finally:
            for task in asked:
                task.cancel()
            await asyncio.gather(*asked, return_exceptions=True)
        return cls(backend, member, spec, client, baseline, plugins)

    def on_lost(self, tell: Callable[[BaseException], object]) -> None:
        self._tell_lost = tell
        client = self.client
        client.lost.add_done_callback(lambda lost: self._is_lost(client, lost))

    def _is_lost(self, client: KeeperClient, lost: Any) -> None:
        # A client that was put aside for another process's is not the member's end.
        if client is self.client and not self._away and not lost.cancelled() and self._tell_lost is not None:
            self._tell_lost(lost.result())

    def detach(self) -> socket.socket:
        """Give the keeper's stream to another process; until :meth:`reattach` nothing works here."""
        self._away = True
        try:
            return self.client.detach()
        except BaseException:
            self._away = False
            raise

    async def reattach(self, stream: socket.socket) -> None:
        """Take the stream back from the other process."""
        reader, writer = await asyncio.open_connection(sock=stream, limit=1 << 18)
        welcome = self.client.welcome
        self.client = await KeeperClient.open(reader, writer, member=self._member.id, welcome=welcome)
        self._away = False
        if self._tell_lost is not None:
            self.on_lost(self._tell_lost)

    async def set_up(self, task: Task) -> None:
        """Files, workdir and setup of the one episode of a member in mode replace: it has no layers.

        Raises:
            ConfigError: it is not isolated: they would be the machine's.
            PrimeError: the task's setup does not work.
        """
        if self._member.facts.get("files") == "machine":
            raise ConfigError(
                f"task {task.id} has a workdir, files or a setup, which isolation='none' would put into this "
                "machine's own files",
                hint="let the policy do it, or isolate the sandbox",
            )
        await self._fill(task)
        await self.client.kill_all()  # as when a layer is sealed: an episode begins with files

    async def prime(self, task: Task, layer: str) -> int:
        if self.mode == "replace":  # set up when it is handed over
            return 0
        await self._drop_stale()
        await self.client.reset("")
        await self._fill(task)
        try:
            size = await self.client.seal(layer, kill=True)
        except KeeperFailure as error:
            raise SandboxError(
                f"the primed layer could not be sealed: {error.message}",
                kind="seal", phase="prime", retryable=True, sandbox=self._member.id, task=task.id,
            ) from error  # fmt: skip
        self._given.add(layer)
        return size

    async def _fill(self, task: Task) -> None:
        sandbox = _priming_sandbox(self, task)
        try:
            if task.workdir is not None:
                await self._make_workdir(sandbox, task.workdir)
            for path, data in task.files.items():
                await sandbox.write_file(path, data)
            if task.setup is not None:
                result = await sandbox.run(task.setup)
                if not result.ok:
                    raise _setup_failed(task, result)
            if self._plugins.hook.rlsandbox_prime.get_hookimpls():
                await self._hooks(task, sandbox)
            if task.workdir is not None:
                await self._has_workdir(task.workdir)
        except (SandboxDiedError, PrimeError):
            raise
        except (SandboxError, OSError) as error:
            failed = PrimeError(
                f"its files or workdir could not be put in place: {getattr(error, 'message', error)}",
                task=task.id,
            )
            full = getattr(error, "errno", 0) in NO_ROOM
            if full and sandbox.shares_disk:
                shared_disk_full(failed)
            raise failed from error
        finally:
            sandbox._state = "released"  # it has no host to go back to
            sandbox.part()

    async def _make_workdir(self, sandbox: Any, workdir: str) -> None:
        raw = sandbox.user(None)
        user = None if raw is None else raw.decode("utf-8", "surrogateescape")
        try:
            await self.client.write(workdir, b"", user=user, flags=_MAKE_DIR)
        except KeeperFailure as error:
            raise PrimeError(
                f"its workdir {workdir} is not there and cannot be made: {os.strerror(error.errno)}",
                kind="workdir",
            ) from error

    async def _has_workdir(self, workdir: str) -> None:
        """A setup or plugin that leaves none is at fault: later the agent would be graded for it."""
        # Where the keeper has no view of its own it follows no links: there only the name is looked at.
        followed = self.mode not in ("manifest", "replace")
        code = 0
        try:
            there = await self.client.stat(f"{workdir}/." if followed else workdir, flags=AS_KEEPER)
            code = 0 if there.kind in ("dir", "symlink") else errno.ENOTDIR
        except KeeperFailure as error:
            code = error.errno
        if code:
            raise PrimeError(
                f"after its setup there is no directory at its workdir {workdir}: {os.strerror(code)}",
                kind="workdir",
            )

    async def _hooks(self, task: Task, sandbox: Any) -> None:
        from ..sandbox import Sandbox

        facade = Sandbox(sandbox, LoopPortal(asyncio.get_running_loop()))  # type: ignore[arg-type]
        try:
            await in_thread(
                lambda: self._plugins.hook.rlsandbox_prime(task=task, sandbox=facade), PRIME_HOOK_S
            )
        except TimeoutError:
            raise PrimeError(
                f"a plugin's rlsandbox_prime took over {PRIME_HOOK_S:g} s", task=task.id
            ) from None
        except SandboxDiedError:
            raise
        except Exception as error:
            said = f"{type(error).__name__}: {getattr(error, 'message', error)}"
            raise PrimeError(f"a plugin's rlsandbox_prime raised {said}", task=task.id) from error

    async def reset(
        self, layer: str | None, *, task: Task | None, credentials: Sequence[Credentials]
    ) -> None:
        if self.mode == "replace":  # never used: its episode is its only one
            return
        try:
            await self._reset(layer, task, credentials)
        except KeeperFailure as error:  # of this sandbox; another one may do better
            raise SandboxError(
                f"its keeper could not reset it: {error.message}",
                kind="keeper", phase="reset", retryable=True, sandbox=self._member.id,
            ) from error  # fmt: skip

    async def _reset(self, layer: str | None, task: Task | None, credentials: Sequence[Credentials]) -> None:
        await self._drop_stale()
        if layer is not None and layer not in self._given:
            if not await self._backend.give_layer(layer, self._member) and not await self._brought(layer):
                if not self.sources(layer) and self.lost_layer(layer):
                    raise SandboxError(
                        f"layer {layer} is lost: the sandbox that had it is gone",
                        kind="layer_gone", phase="reset", retryable=True, sandbox=self._member.id,
                    )  # fmt: skip
                raise SandboxError(
                    f"layer {layer} could not be brought to the sandbox",
                    kind="layer", phase="reset", retryable=True, sandbox=self._member.id,
                )  # fmt: skip
            self._given.add(layer)
        self._look = await run_reset(
            self.client, self._plugins, task=task, layer=layer or "", baseline=self._baseline,
            deadline_s=RESET_S, credentials=credentials, trusted=lambda argv: self._trusted(task, argv),
        )  # fmt: skip

    async def _brought(self, layer: str) -> bool:
        primed = self.below(layer)
        if primed is not None and primed not in self._given and await self._brought(primed):
            self._given.add(primed)
        kept = self._backend.kept_layer(layer)
        return await bring(layer, self.client, kept, self.sources, self.lost_layer, lambda: self.arriving())

    async def keep(self, layer: str) -> None:
        """Have a layer that was sealed here kept outside, where the backend does that."""
        if self._backend.keeps_layers and layer not in self._kept:
            tar = self.client.export(layer)
            try:
                await self._backend.keep_layer(layer, tar)
            finally:
                await tar.aclose()
            self._kept.add(layer)

    def keeps(self, layer: str) -> bool:
        """Whether the layer outlives this member as far as it shall: kept, or the backend keeps none."""
        return not self._backend.keeps_layers or layer in self._kept

    def owns(self, layer: str) -> bool:
        """Whether the layer is here, though perhaps not to be had now."""
        return layer in self._given and not self.client.lost.done()

    def holds(self, layer: str) -> None:
        """A layer was sealed here by who has the sandbox."""
        self._given.add(layer)

    def has(self, layer: str) -> bool:
        """Whether the layer can be had from here now."""
        return layer in self._given and not self._away and not self.client.lost.done()

    async def _trusted(self, task: Task | None, argv: list[str]) -> CommandResult:
        """Run a program for a reset policy, in the sandbox as RESET has left it."""
        sandbox = _priming_sandbox(self, task if task is not None else Task(id="reset"))
        try:
            result: CommandResult = await sandbox.run(argv)
        finally:
            sandbox._state = "released"  # it has no host to go back to
            sandbox.part()
        return result

    async def verify(
        self, layer: str | None, *, task: Task | None, credentials: Sequence[Credentials]
    ) -> list[Residue]:
        if self.mode == "replace":
            return []
        look, self._look = self._look, None
        return await run_verify(
            self.client, self._plugins, task=task, baseline=self._baseline.on(layer or ""),
            deadline_s=VERIFY_S, credentials=credentials, asked=look,
        )  # fmt: skip

    async def forget_layer(self, layer: str) -> None:
        """The pool has dropped it: the keeper shall not hold its memory, nor its name, any longer."""
        if layer in self._given:
            self._given.discard(layer)
            self._stale.add(layer)
            if not self._away:  # else once the stream is back
                await self._drop_stale()

    async def _drop_stale(self) -> None:
        while self._stale:
            await self.client.drop_layer(self._stale.pop())

    async def close(self) -> None:
        await self.client.aclose()

    def environment(self) -> Mapping[str, str]:
        return self._backend.environment(self._spec)


class LoopPortal:
    """A running event loop as the portal of a synchronous facade, for hooks on threads of their own."""

    closed = False

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop

    def call(
        self, fn: Callable[..., Awaitable[Any]], *args: Any, within: float | None = None, **kw: Any
    ) -> Any:
        async def run() -> Any:
            return await fn(*args, **kw)

        return asyncio.run_coroutine_threadsafe(run(), self._loop).result(within)


def _priming_sandbox(link: KeeperLink, task: Task) -> Any:
    from ..sandbox import AsyncSandbox

    member = link._member
    return AsyncSandbox(
        link.client, id=member.id, task=task, spec=link._spec, node=member.node, reset_mode=link.mode,
        host=_NoHost(), base_env=link.environment(), facts=member.facts,
    )  # fmt: skip


class _NoHost:
    """A sandbox that is being primed belongs to nobody: it cannot be released, forked or hibernated."""

    def command_started(self, sandbox: Any, waited_s: float) -> None:
        return None

    def __getattr__(self, name: str) -> Any:
        raise PrimeError(f"{name}() is not possible while a sandbox is being primed")


def _setup_failed(task: Task, result: Any) -> PrimeError:
    lines = (result.stderr.strip() or result.stdout.strip()).splitlines()
    said = f": {lines[-1][:300]}" if lines else ""
    how = "timed out" if result.timed_out else f"exited with {result.exit_code}"
    if result.oom_killed:
        how = "was over the sandbox's limit of memory"
    return PrimeError(f"its setup {how}{said}", task=task.id)
