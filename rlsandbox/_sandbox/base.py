"""What every part of a sandbox stands on: its state, and commands from SPAWN to result."""

from __future__ import annotations

import contextlib
import errno
import inspect
import os
import posixpath
from collections.abc import AsyncIterator, Callable, Mapping
from os import PathLike
from typing import TYPE_CHECKING, Any, Literal, cast

from ..errors import CommandError, ConfigError, SandboxStateError, UnsupportedError, file_error
from ..keeper.channel import CommandChannel, Exit, Sink
from ..keeper.client import HeldClient, KeeperClient
from ..keeper.connection import CANCEL_GRACE_S, KeeperFailure
from ..keeper.frames import encode_fields, field
from ..keeper.liveness import ANSWER_S
from ..keeper.wire import Tag
from ..results import CommandResult, Outcome, Stream
from ..spec import Spec, parse_size
from ..task import Task, layer_name
from .command import (
    DEFAULT_ENV,
    Cmd,
    Collector,
    argv_of,
    beginning,
    deadline_ms,
    env_pairs,
    keepers_limit,
    seconds,
    start_error,
    stream_name,
    text_bytes,
)
from .host import Budget, Host, Live, SandboxLimits

if TYPE_CHECKING:
    from ..pool.policy import AsyncRollout
    from .core import AsyncSandbox

State = Literal["ready", "paused", "hibernated", "graded", "released", "dead"]
Path_ = str | PathLike[str]
OnOutput = Callable[[Stream, bytes], object]

MOST = 1 << 62  # bytes; more than a counter of the keeper's holds is as good as no limit
MAX_PATH = 4096  # the kernel's, its NUL included
_STDIN = encode_fields({"stdin": 1})
_CONTROL = encode_fields({"control": 1})
BACKUP_S = 1.0  # how long past a command's timeout the keeper may be silent before we act ourselves


class Deadline:
    """So many seconds of the sandbox's own time from now: it stands still while the sandbox is paused."""

    def __init__(self, sandbox: SandboxBase, seconds_: float, act: Callable[[], object]) -> None:
        self.acted = False
        self._sandbox = sandbox
        self._act = act
        self._paused_s = sandbox.paused_s
        self._handle = sandbox.loop.call_later(seconds_, self._due)

    def _due(self) -> None:
        paused = self._sandbox.paused_s
        missed, self._paused_s = paused - self._paused_s, paused
        if missed > 0:
            self._handle = self._sandbox.loop.call_later(max(missed, 0.05), self._due)
        else:
            self.acted = True
            self._act()

    def cancel(self) -> None:
        self._handle.cancel()


class SandboxBase(Live):
    """State and commands; :class:`~.core.AsyncSandbox` is what a user holds."""

    shown_as = "AsyncSandbox"
    """What its holder knows it as; the synchronous facade says so."""

    def __init__(
        self,
        client: KeeperClient,
        *,
        id: str,
        task: Task,
        spec: Spec,
        node: str | None = None,
        reset_mode: str = "",
        host: Host,
        base_env: Mapping[str, str] | None = None,
        workdir: str | None = None,
        rollout: AsyncRollout | None = None,
        facts: Mapping[str, str] | None = None,
    ) -> None:
        self.id = id
        self.task = task
        self.spec = spec
        self.node = node
        self.reset_mode = reset_mode or client.welcome.mode
        self.rollout: AsyncRollout | None = rollout
        """Which attempt of what this is; None outside rollouts."""
        self.budget: Budget | None = None
        self.outcome: Outcome | None = None
        """Of :meth:`grade`, once it has given one."""
        self.times: dict[str, float] = {}
        """Seconds of this claim by part of its TTFC; the pool fills them in."""
        self.ttfc_s: float | None = None
        """Time to first command, once a command has started."""
        self.workdir = task.workdir or workdir or (facts or {}).get("workdir") or "/"
        self._host = host
        self._state: State = "ready"
        self._base_env = dict(base_env or {})
        self._facts = dict(facts or {})
        self._commands: set[CommandChannel] = set()
        self._paused_s = 0.0
        self._paused_since: float | None = None
        self._first = True
        self.primed: str | None = layer_name(task, spec) or ""
        """The layer that the task's episodes begin on (``""``: the base); None where there are none."""
        self._output_limit = min(task.limits.output_bytes, MOST)
        self._pid = os.getpid()
        self.loop = client.loop
        self.attach(client, node=node)

    @property
    def shares_disk(self) -> bool:
        """Whether its files lie on a disk with others', with no limit of its own: those may fill it."""
        return self.reset_mode in ("overlay", "userns") and self.limits.means.get("disk", "none") == "none"

    def attach(self, client: KeeperClient, *, node: str | None = None) -> None:
        """The keeper this sandbox speaks to from now on (after a restore, another one)."""
        self._client = HeldClient(client)
        client.label(self.id, self.task.id)
        if node is not None:
            self.node = node
        facts = {**client.welcome.facts, **self._facts}
        means = {k[6:]: v for k, v in facts.items() if k.startswith("limit.")}
        self.keeper_uid = facts.get("uid", "0")
        only = facts.get("only_user", "")
        self._only = tuple(only.split(",")) if only else ("root", "0") if facts.get("ids") == "one" else ()
        self.one_uid = bool(self._only)
        self._user = facts.get("user") or None
        self.limits = SandboxLimits(
            attempt=self.task.limits,
            memory=_number(facts, "memory_bytes", self.spec.memory_bytes),
            disk=_number(facts, "disk_bytes", self.spec.disk_bytes),
            cpu=self.spec.cpu,
            pids=_number(facts, "pids", self.spec.pids),
            means=means,
        )
        self._place = b""
        self._env = encode_fields({"env": env_pairs(DEFAULT_ENV, self._base_env, self.spec.env)})
        if self._state == "hibernated":
            self._state = "ready"

    def __repr__(self) -> str:
        where = f" on {self.node}" if self.node else ""
        return f"<{self.shown_as} {self.id} {self.state}{where} task {self.task.id!r}>"

    @property
    def client(self) -> KeeperClient:
        """The keeper's client, for the pool."""
        return self._client

    def part(self) -> None:
        """Its place is given back: whatever is still done with this handle must not reach who has it next."""
        sandbox, task = self.id, self.task.id
        self._client.part(
            lambda: SandboxStateError("the sandbox was given back meanwhile", sandbox=sandbox, task=task)
        )

    @property
    def state(self) -> State:
        if self._state in ("ready", "paused", "graded") and self._client.lost.done():
            return "dead"
        return self._state

    @property
    def base_env(self) -> Mapping[str, str]:
        """What the backend, and credentials, add to the environment of every command."""
        return self._base_env

    @property
    def processes(self) -> int:
        """Commands of this handle that still run."""
        return len(self._commands)

    def allow(self, timeout: float | None) -> float | None:
        """Whether a command may run now, and the seconds it may take: its own, the task's, the attempt's."""
        self._require("ready")
        timeout = seconds(timeout)
        if timeout is None:
            timeout = seconds(self.task.limits.command)
        if self.budget is not None:
            left = self.budget.spend()
            if left is not None:
                timeout = left if timeout is None else min(left, timeout)
        return timeout

    def command(
        self,
        cmd: Cmd,
        *,
        timeout: float | None = None,
        cwd: str | None = None,
        env: Mapping[str, str] | None = None,
        user: str | None = None,
        stdin: bool = False,
        output_limit: int = 0,
        control: bool = False,
        sink: Sink | None = None,
    ) -> tuple[CommandChannel, list[bytes]]:
        """Send a SPAWN, whatever the state: its channel and argv. For the parts of this package."""
        argv, script = argv_of(cmd)
        if cwd is None and user is None:
            parts = self._place = self._place or self._place_of(None, None)
        else:
            parts = self._place_of(cwd, user)
        if script is not None:
            parts += field(Tag.SCRIPT, script)
        if stdin:
            parts += _STDIN
        if control:
            parts += _CONTROL
        if output_limit:
            parts += field(Tag.OUTPUT_LIMIT, output_limit.to_bytes(8, "little"))
        if timeout is not None:
            parts += field(Tag.TIMEOUT_MS, deadline_ms(timeout).to_bytes(8, "little"))
        channel = self._client.command(
            argv,
            env=self._env if not env else self._env_with(env),
            encoded=parts,
            sink=sink,
            on_started=self._started() if self._first else None,
        )
        self._commands.add(channel)
        channel.when_ended(lambda: self._commands.discard(channel))
        return channel, argv

    def _started(self) -> Callable[[int], None]:
        asked = self.loop.time()

        def started(pid: int) -> None:
            if self._first:
                self._first = False
                self._host.command_started(cast("AsyncSandbox", self), self.loop.time() - asked)

        return started

    def backup(self, channel: CommandChannel, timeout: float | None) -> Deadline | None:
        """The keeper enforces timeouts; should it be silent long after, we do."""
        if timeout is None:
            return None
        return Deadline(self, timeout + BACKUP_S, lambda: self.cancel_command(channel))

    @property
    def paused_s(self) -> float:
        """Seconds that this sandbox has been paused, all told."""
        since = self._paused_since
        return self._paused_s + (self.loop.time() - since if since is not None else 0.0)

    def paused(self, now: bool) -> None:
        """The sandbox is paused from now on, or no more."""
        self._paused_s, self._paused_since = self.paused_s, self.loop.time() if now else None
        self._state = "paused" if now else "ready"

    def cancel_command(self, channel: CommandChannel) -> None:
        """End a command; a keeper that does not do it, or does not even answer a ping, is given up."""
        channel.cancel()
        answer = channel.client.knock()

        def look(within: float, why: str) -> None:
            if not channel.ended and channel.client.away:  # its transport says when it gives up
                self.loop.call_later(within, look, within, why)
            elif not channel.ended and (within == CANCEL_GRACE_S or not answer.done()):
                channel.client.give_up(f"the keeper {why} within {within:g} s")

        self.loop.call_later(ANSWER_S, look, ANSWER_S, "has not answered")
        self.loop.call_later(CANCEL_GRACE_S, look, CANCEL_GRACE_S, "did not end a command")

    def _env_with(self, env: Mapping[str, str]) -> bytes:
        return encode_fields({"env": env_pairs(DEFAULT_ENV, self._base_env, self.spec.env, env)})

    def output_limit(self, output_limit: str | int | None) -> int:
        if output_limit is None:
            return self._output_limit
        return min(parse_size(output_limit, "output_limit"), MOST)

    def _place_of(self, cwd: str | None, user: str | None) -> bytes:
        """The encoded fields that say where, and as whom, a command runs."""
        where = text_bytes(self.workdir if cwd is None else self.path(cwd), "cwd")
        return encode_fields({"cwd": where, "user": self.user(user)})

    def path(self, path: Path_) -> str:
        """An absolute path: relative ones are under the workdir."""
        if not isinstance(path, (str, PathLike)) or not isinstance(text := os.fspath(path), str):
            raise ConfigError(f"a path must be text or a path object, not {path!r}")
        if not text:
            raise file_error(errno.ENOENT, text, message="an empty path names no file", sandbox=self.id)
        full = posixpath.join(self.workdir, text)
        if len(text_bytes(full, "a path")) >= MAX_PATH:
            raise file_error(errno.ENAMETOOLONG, f"{full[:100]}...", sandbox=self.id)
        return full

    def user(self, user: str | None) -> bytes | None:
        who = user if user is not None else self.spec.user if self.spec.user is not None else self._user
        if who is None:
            return None
        if isinstance(who, int) and not isinstance(who, bool):  # as in Spec
            who = str(who)
        if not isinstance(who, str) or not who or who.startswith("-"):
            raise ConfigError(f"user must be a name, a uid or uid:gid, not {who!r}")
        name, _, group = who.partition(":")
        name = (
            name or "root"
        )  # as images and container runtimes have it: "1000:" is 1000, ":5" is root in group 5
        who = f"{name}:{group}" if group else name
        if self.one_uid and (name not in self._only or (group not in ("", "0") and "0" in self._only)):
            here = self._only[0] in ("root", "0")
            raise UnsupportedError(
                f"user={who!r}: this machine gives the sandbox one uid only"
                if here
                else f"user={who!r}: in mode {self.reset_mode} commands have one uid only, {self._only[0]}",
                phase="command",
                hint="a range in /etc/subuid and newuidmap (package uidmap) make more; rlsandbox doctor"
                if here
                else "Spec(user=...) says whose it is",
                sandbox=self.id,
            )
        return text_bytes(who, "user")

    def located(self, error: Any) -> Any:
        error.sandbox, error.task = self.id, self.task.id
        return error

    def checked(self, result: CommandResult) -> CommandResult:
        """The result, or its CommandError with this sandbox's name on it."""
        try:
            return result.check()
        except CommandError as error:
            raise self.located(error) from None

    def check_held(self) -> None:
        """After a command ended: its end means nothing when the sandbox was given back meanwhile."""
        if self._state == "released":
            raise self.located(SandboxStateError("the sandbox was released while the command ran"))

    def unstarted(self, error: KeeperFailure, argv: list[bytes]) -> Exception:
        """A command that did not start: what it says, unless the sandbox was given back meanwhile."""
        self.check_held()
        return cast(Exception, self.located(start_error(error, argv)))

    def require_ready(self) -> None:
        self._require("ready")

    def _require(self, *states: State) -> None:
        if self._state in states:
            return
        hint = {
            "paused": "resume() it first",
            "hibernated": "restore() it first",
            "graded": "grading is final; to grade in mid-episode, grade a fork of a snapshot",
        }.get(self._state, "")
        raise SandboxStateError(
            f"the sandbox is {self._state}", hint=hint, sandbox=self.id, task=self.task.id
        )

    async def _ended(
        self,
        channel: CommandChannel,
        argv: list[bytes],
        collector: Collector,
        timeout: float | None,
        on_output: OnOutput | None = None,
    ) -> CommandResult:
        """Wait for a command's end. Left early, for whatever reason, the command's tree is gone first."""
        backup = self.backup(channel, timeout)
        try:
            while on_output is not None and (item := await channel.recv()) is not None:
                collector.add(item[0], item[1])
                answer = on_output(stream_name(item[0]), item[1])
                if inspect.isawaitable(answer):
                    await answer
            end = await channel.wait()
        except KeeperFailure as error:
            raise self.unstarted(error, argv) from None
        except BaseException:
            if not channel.ended:
                await channel.cancelled(CANCEL_GRACE_S)
            raise
        finally:
            if backup is not None:
                backup.cancel()
        assert isinstance(end, Exit)
        self.check_held()
        return collector.result(end, **late_facts(backup))

    @contextlib.asynccontextmanager
    async def grading(self) -> AsyncIterator[None]:
        """From here on there are only the grader's commands: final, however the grading ends."""
        self._require("ready")
        self._state = "graded"
        yield

    async def run_grader(self, cmd: Cmd, *, timeout: float | None) -> CommandResult:
        limit = self.output_limit(None)
        timeout = seconds(timeout)
        collector = Collector(limit, beginning(cmd))
        channel, argv = self.command(
            cmd, timeout=timeout, output_limit=keepers_limit(limit), sink=collector.add
        )
        return await self._ended(channel, argv, collector, timeout)


def _number(facts: Mapping[str, str], name: str, otherwise: int | None) -> int | None:
    value = facts.get(name, "")
    return int(value) if value.isdigit() else otherwise


def late_facts(backup: Deadline | None) -> dict[str, Any]:
    """What a result says when we had to end the command ourselves."""
    return {"exit_code": 137, "timed_out": True} if backup is not None and backup.acted else {}
