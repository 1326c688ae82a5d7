"""AsyncSandbox: state, commands, and the door to files, sessions, grading and snapshots."""

from __future__ import annotations

import asyncio
import contextlib
import inspect
import os
import posixpath
import warnings
from collections.abc import Callable, Mapping, Sequence
from os import PathLike
from types import TracebackType
from typing import Any, Literal, Self

from .._portal import AwaitableCM
from ..errors import CommandError, SandboxError, SandboxStateError, UnsupportedError
from ..keeper.channel import STDIN, CommandChannel, Exit
from ..keeper.client import KeeperClient
from ..keeper.connection import CANCEL_GRACE_S, KeeperFailure
from ..keeper.frames import encode_fields
from ..results import CommandResult, FileInfo, Outcome, Stream
from ..spec import Limits, Spec, parse_size
from ..task import Grader, Task
from . import files, grading, session
from .command import DEFAULT_ENV, Cmd, Collector, argv_of, env_pairs, seconds, start_error, text_bytes
from .host import AsyncSnapshot, Budget, Host, SandboxLimits
from .process import AsyncProcess, deadline_ms

State = Literal["ready", "paused", "hibernated", "graded", "released", "dead"]
Path_ = str | PathLike[str]
OnOutput = Callable[[Stream, bytes], object]
Progress = Callable[[int, int], object]

BACKUP_S = 10.0  # how long past a command's timeout the keeper may be silent before we act ourselves
RELEASE_GRACE_S = 10.0


class AsyncSandbox:
    """A ready sandbox, held for one attempt. Its own context manager: leaving it releases."""

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
        rollout: Any = None,
        facts: Mapping[str, str] | None = None,
    ) -> None:
        self.id = id
        self.task = task
        self.spec = spec
        self.node = node
        self.reset_mode = reset_mode or client.welcome.mode
        self.rollout = rollout
        self.budget: Budget | None = None
        self.workdir = task.workdir or workdir or "/"
        self._host = host
        self._state: State = "ready"
        self._base_env = dict(base_env or {})
        self._facts = dict(facts or {})
        self._commands: set[CommandChannel] = set()
        self._first = True
        self._pid = os.getpid()
        self._loop = client.loop
        self.attach(client, node=node)

    def attach(self, client: KeeperClient, *, node: str | None = None) -> None:
        """The keeper this sandbox speaks to from now on (after a restore, another one)."""
        self._client = client
        client.label(self.id, self.task.id)
        if node is not None:
            self.node = node
        facts = {**client.welcome.facts, **self._facts}
        means = {k[6:]: v for k, v in facts.items() if k.startswith("limit.")}
        self._ids = facts.get("ids", "")
        self.limits = SandboxLimits(
            attempt=self.task.limits,
            memory=self.spec.memory_bytes,
            disk=self.spec.disk_bytes,
            cpu=self.spec.cpu,
            pids=self.spec.pids,
            means=means,
        )
        self._env = encode_fields({"env": env_pairs(DEFAULT_ENV, self._base_env, self.spec.env)})
        if self._state == "hibernated":
            self._state = "ready"

    def __repr__(self) -> str:
        where = f" on {self.node}" if self.node else ""
        return f"<{type(self).__name__} {self.id} {self.state}{where} task {self.task.id!r}>"

    @property
    def client(self) -> KeeperClient:
        """The keeper's client, for the pool."""
        return self._client

    @property
    def state(self) -> State:
        if self._state in ("ready", "paused", "graded") and self._client.lost.done():
            return "dead"
        return self._state

    @property
    def processes(self) -> int:
        """Commands of this handle that still run."""
        return len(self._commands)

    # -- commands -----------------------------------------------------------------------------------

    async def run(
        self,
        cmd: Cmd,
        *,
        timeout: float | None = None,
        cwd: str | None = None,
        env: Mapping[str, str] | None = None,
        stdin: bytes | str | None = None,
        user: str | None = None,
        output_limit: str | int | None = None,
        check: bool = False,
        on_output: OnOutput | None = None,
    ) -> CommandResult:
        """Run a command to its end.

        A string goes to the sandbox's ``/bin/sh``, a list is run as it is. A timeout, or cancelling this call,
        kills the command's whole tree before the call is over.

        Args:
            timeout: seconds; without one the task's ``limits.command``, else none at all.
            stdin: what it reads; empty when left out.
            output_limit: bytes kept of each of stdout and stderr: head and tail.
            check: raise CommandError or CommandTimeoutError unless it went well.
            on_output: called with (stream, bytes) as output comes; awaited when it gives an awaitable.

        Raises:
            CommandStartError: the program cannot be started.
            SandboxDiedError: the sandbox is gone; whether the command was done is not known.
            SandboxStateError: the sandbox is paused, graded, released ...
        """
        limit = self._limit(output_limit)
        collector = Collector(limit)
        channel, argv, timeout = self._command(
            cmd,
            timeout=timeout,
            cwd=cwd,
            env=env,
            user=user,
            stdin=stdin is not None,
            output_limit=0 if on_output is not None else max(limit, 1),
            sink=None if on_output is not None else collector.add,
        )
        if stdin is not None:
            raw = stdin.encode("utf-8", "surrogateescape") if isinstance(stdin, str) else stdin
            channel.feed(STDIN, raw, eof=True)
        backup = self._backup(channel, timeout)
        try:
            if on_output is not None:
                process = AsyncProcess(self, channel, limit)
                while (chunk := await process.next_chunk()) is not None:
                    collector.add(1 if chunk[0] == "stdout" else 2, chunk[1])
                    answer = on_output(*chunk)
                    if inspect.isawaitable(answer):
                        await answer
            end = await channel.wait()
        except KeeperFailure as error:
            raise self._located(start_error(error, argv)) from None
        except BaseException:
            if not channel.ended:
                await channel.cancelled(CANCEL_GRACE_S)
            raise
        finally:
            self._commands.discard(channel)
            if backup is not None:
                backup.cancel()
        assert isinstance(end, Exit)
        if self._state == "released":
            raise self._located(SandboxStateError("the sandbox was released while the command ran"))
        result = collector.result(end)
        if check and not result.ok:
            try:
                result.check()
            except CommandError as error:
                raise self._located(error) from None
        return result

    def popen(
        self,
        cmd: Cmd,
        *,
        timeout: float | None = None,
        cwd: str | None = None,
        env: Mapping[str, str] | None = None,
        user: str | None = None,
        stdin: bool = True,
        output_limit: str | int | None = None,
    ) -> AwaitableCM[AsyncProcess]:
        """Start a command and talk to it while it runs. With ``async with``, leaving the block kills it.

        *stdin*: whether it has one to write to; close_stdin() ends it.
        """

        async def make() -> AsyncProcess:
            limit = self._limit(output_limit)
            channel, argv, seconds_ = self._command(
                cmd, timeout=timeout, cwd=cwd, env=env, user=user, stdin=stdin, output_limit=0
            )
            backup = self._backup(channel, seconds_)
            if backup is not None:
                channel.when_ended(backup.cancel)
            channel.when_ended(lambda: self._commands.discard(channel))
            try:
                await channel.started()
            except KeeperFailure as error:
                raise self._located(start_error(error, argv)) from None
            except BaseException:
                if not channel.ended:
                    await channel.cancelled(CANCEL_GRACE_S)
                raise
            return AsyncProcess(self, channel, limit)

        return AwaitableCM(make, AsyncProcess.end)

    def session(
        self,
        *,
        shell: str = "sh",
        cwd: str | None = None,
        env: Mapping[str, str] | None = None,
        user: str | None = None,
    ) -> AwaitableCM[session.AsyncSession]:
        """A shell that keeps its state from command to command: directory, variables, functions, options."""

        async def make() -> session.AsyncSession:
            return await session.AsyncSession.open(self, shell=shell, cwd=cwd, env=env, user=user)

        return AwaitableCM(make, session.AsyncSession.close)

    def _command(
        self,
        cmd: Cmd,
        *,
        timeout: float | None,
        cwd: str | None,
        env: Mapping[str, str] | None,
        user: str | None,
        stdin: bool,
        output_limit: int,
        control: bool = False,
        sink: Any = None,
        graded: bool = False,
    ) -> tuple[CommandChannel, list[bytes], float | None]:
        """Send a SPAWN: its channel, argv, and the timeout that holds."""
        if not (graded and self._state == "graded"):
            self._require("ready")
        argv, script = argv_of(cmd)
        timeout = seconds(timeout)
        if timeout is None:
            timeout = self.task.limits.command
        if self.budget is not None and not graded:
            left = self.budget.spend()
            if left is not None:
                timeout = left if timeout is None else min(left, timeout)
        fields: dict[str, Any] = {"cwd": self._cwd(cwd)}
        who = self._user(user)
        if who is not None:
            fields["user"] = who
        if script is not None:
            fields["script"] = script
        if stdin:
            fields["stdin"] = 1
        if control:
            fields["control"] = 1
        if output_limit:
            fields["output_limit"] = output_limit
        if timeout is not None:
            fields["timeout_ms"] = deadline_ms(timeout)
        encoded = self._env if not env else self._env_with(env)
        channel = self._client.command(
            argv, env=encoded, sink=sink, on_started=self._started() if self._first else None, **fields
        )
        self._commands.add(channel)
        return channel, argv, timeout

    def _started(self) -> Callable[[int], None]:
        asked = self._loop.time()

        def started(pid: int) -> None:
            if self._first:
                self._first = False
                self._host.command_started(self, self._loop.time() - asked)

        return started

    def _backup(self, channel: CommandChannel, timeout: float | None) -> asyncio.TimerHandle | None:
        """The keeper enforces timeouts; should it be silent long after, we do."""
        if timeout is None:
            return None
        client = self._client

        def late() -> None:
            if channel.ended or client is not self._client:
                return
            channel.cancel()
            why = f"it did not end a command {2 * BACKUP_S:g} s after its timeout"
            self._loop.call_later(BACKUP_S, lambda: None if channel.ended else client.give_up(why))

        return self._loop.call_later(timeout + BACKUP_S, late)

    def _env_with(self, env: Mapping[str, str]) -> bytes:
        return encode_fields({"env": env_pairs(DEFAULT_ENV, self._base_env, self.spec.env, env)})

    def _limit(self, output_limit: str | int | None) -> int:
        if output_limit is None:
            return self.task.limits.output_bytes
        return parse_size(output_limit, "output_limit")

    def _cwd(self, cwd: str | None) -> bytes:
        return text_bytes(self.workdir if cwd is None else self.path(cwd), "cwd")

    def path(self, path: Path_) -> str:
        """An absolute path: relative ones are under the workdir."""
        text = os.fspath(path)
        text_bytes(text, "a path")
        if not text:
            raise files.error_of(2, text, self.id)
        return posixpath.join(self.workdir, text)

    def _user(self, user: str | None) -> bytes | None:
        who = user if user is not None else self.spec.user
        if who is None:
            return None
        if self._ids == "one" and who not in ("root", "0", "0:0"):
            raise UnsupportedError(
                f"user={who!r}: this machine gives the sandbox one uid only",
                phase="command",
                hint="a range in /etc/subuid and newuidmap (package uidmap) make more; rlsandbox doctor",
                sandbox=self.id,
            )
        return text_bytes(who, "user")

    def _located(self, error: Any) -> Any:
        error.sandbox, error.task = self.id, self.task.id
        return error

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

    # -- files --------------------------------------------------------------------------------------

    async def read_file(self, path: Path_, *, user: str | None = None) -> bytes:
        """A file's bytes. Raises SandboxFileError, which is also FileNotFoundError and the like."""
        self._require("ready", "graded")
        return await files.read(self, path, user)

    async def read_text(self, path: Path_, *, user: str | None = None) -> str:
        """A file as text; what is not UTF-8 is replaced."""
        return (await self.read_file(path, user=user)).decode("utf-8", "replace")

    async def write_file(
        self, path: Path_, data: bytes | str, *, mode: int | None = None, user: str | None = None
    ) -> None:
        """Write a whole file; directories that are missing are made."""
        self._require("ready")
        await files.write(self, path, data, mode, user)

    async def list_dir(self, path: Path_ = ".", *, user: str | None = None) -> list[FileInfo]:
        """What is in a directory, by name."""
        self._require("ready", "graded")
        return await files.list_dir(self, path, user)

    async def upload(
        self,
        local: Path_,
        remote: Path_,
        *,
        exclude: Sequence[str] = (),
        user: str | None = None,
        progress: Progress | None = None,
    ) -> None:
        """Copy a local file or directory in: modes, links and holes are kept.

        A directory's content goes into *remote*; a file goes to *remote*, or into it when that is a directory
        or ends with a slash. *exclude*: globs over paths relative to *local*. *progress*: called with
        (bytes done, bytes in all).
        """
        self._require("ready")
        await files.upload(self, local, remote, exclude, user, progress)

    async def download(
        self,
        remote: Path_,
        local: Path_,
        *,
        exclude: Sequence[str] = (),
        user: str | None = None,
        progress: Progress | None = None,
    ) -> None:
        """Copy a file or directory out; the same rules as :meth:`upload`. Never writes outside *local*."""
        self._require("ready", "graded")
        await files.download(self, remote, local, exclude, user, progress)

    async def changes(self, path: Path_ = "/") -> list[FileInfo]:
        """Every path that differs from the state the episode began with; seen from outside it."""
        self._require("ready", "paused", "graded")
        return await self._client.changes(self.path(path))

    # -- grading, snapshots, state ------------------------------------------------------------------

    async def grade(self, grader: Grader | None = None) -> Outcome:
        """Grade the work, once and finally: the acting agent's processes are gone before hidden files come.

        Raises:
            ConfigError: neither the task nor the call has a grader.
        """
        self._require("ready")
        return await grading.grade(self, grader)

    async def snapshot(self, *, kill: bool = False, name: str | None = None) -> AsyncSnapshot:
        """Keep the files as they are now, to fork from.

        Raises:
            ProcessesRunningError: processes live and *kill* is false; nothing changed.
        """
        self._require("ready")
        return await self._host.snapshot(self, kill=kill, name=name)

    async def pause(self) -> None:
        """Stop every process; all state stays. Twice is fine."""
        if self._state == "paused":
            return
        self._require("ready")
        await self._client.pause()
        if self._state == "ready":
            self._state = "paused"

    async def resume(self) -> None:
        """Let the processes go on. Twice is fine."""
        if self._state == "ready":
            return
        self._require("paused")
        await self._client.resume()
        if self._state == "paused":
            self._state = "ready"

    async def hibernate(self) -> None:
        """Save the files, end the processes, give the place up."""
        self._require("ready", "paused")
        await self._host.hibernate(self)
        self._state = "hibernated"

    async def restore(self, timeout: float | None = None) -> None:
        """Come back from hibernation, perhaps elsewhere. Twice is fine."""
        if self._state == "ready":
            return
        self._require("hibernated")
        await self._host.restore(self, timeout)
        self._state = "ready"

    async def release(self, *, discard: bool = False) -> None:
        """Give the sandbox back. Twice is fine. *discard*: it is not used again."""
        if self._state == "released":
            return
        self._state = "released"
        for channel in list(self._commands):
            channel.cancel()  # their callers are told; what they left is the reset's business
        await self._host.release(self, discard=discard)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        await self.release()

    def __del__(self) -> None:
        if getattr(self, "_state", "released") == "released" or os.getpid() != self._pid:
            return
        with contextlib.suppress(Exception):
            warnings.warn(
                f"{self!r} was never released; it goes back now", ResourceWarning, source=self, stacklevel=2
            )
        with contextlib.suppress(RuntimeError):  # the loop is closed: so is the pool, it disposed of everything
            self._loop.call_soon_threadsafe(_forgotten, self)


def _forgotten(sandbox: AsyncSandbox) -> None:
    task = sandbox._loop.create_task(sandbox.release())
    _returning.add(task)
    task.add_done_callback(_returning.discard)


_returning: set[asyncio.Task[None]] = set()

__all__ = ["AsyncSandbox", "SandboxError"]
