"""AsyncSandbox: state, commands, and the door to files, sessions, grading and snapshots."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import os
import warnings
from collections.abc import Callable, Mapping, Sequence
from types import TracebackType
from typing import Self

from .._portal import AwaitableCM
from ..errors import SandboxError, UnsupportedError
from ..keeper.channel import STDIN
from ..keeper.client import Changes
from ..keeper.connection import CANCEL_GRACE_S, KeeperFailure
from ..results import CommandResult, FileInfo, Outcome
from ..task import Grader
from . import files, grading, session
from .base import OnOutput, Path_, SandboxBase
from .command import (
    Cmd,
    Collector,
    beginning,
    callback,
    content_bytes,
    keepers_limit,
)
from .host import AsyncSnapshot
from .process import AsyncProcess

Progress = Callable[[int, int], object]


class AsyncSandbox(SandboxBase):
    """A ready sandbox, held for one attempt. Its own context manager: leaving it releases."""

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

        A string goes to the sandbox's ``/bin/sh``, a list is run as it is. A timeout, or cancelling this
        call, kills the command's whole tree before the call is over.

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
        raw = None if stdin is None else content_bytes(stdin, "stdin")
        callback(on_output, "on_output")
        timeout = self.allow(timeout)
        limit = self.output_limit(output_limit)
        collector = Collector(limit, beginning(cmd))
        channel, argv = self.command(
            cmd,
            timeout=timeout,
            cwd=cwd,
            env=env,
            user=user,
            stdin=raw is not None,
            output_limit=0 if on_output is not None else keepers_limit(limit),
            sink=None if on_output is not None else collector.add,
        )
        if raw is not None:
            channel.feed(STDIN, raw, eof=True)
        result = await self._ended(channel, argv, collector, timeout, on_output)
        return self.checked(result) if check else result

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
            allowed = self.allow(timeout)
            limit = self.output_limit(output_limit)
            channel, argv = self.command(cmd, timeout=allowed, cwd=cwd, env=env, user=user, stdin=stdin)
            backup = self.backup(channel, allowed)
            if backup is not None:
                channel.when_ended(backup.cancel)
            try:
                await channel.started()
            except KeeperFailure as error:
                raise self.unstarted(error, argv) from None
            except BaseException:
                if not channel.ended:
                    await channel.cancelled(CANCEL_GRACE_S)
                raise
            return AsyncProcess(self, channel, Collector(limit, beginning(cmd)), backup)

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
        callback(progress, "progress")
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
        callback(progress, "progress")
        await files.download(self, remote, local, exclude, user, progress)

    async def changes(self, path: Path_ = "/") -> list[FileInfo]:
        """Every path that differs from the state the episode began with; seen from outside it.

        What it gives has ``truncated`` set when there is more in directories over 1,000 deep.

        Raises:
            UnsupportedError: in mode ``replace`` there is no outside.
        """
        self._require("ready", "paused", "graded")
        if self.reset_mode == "replace":
            raise UnsupportedError(
                "mode replace: nobody knows how its files were, so nobody knows what has changed",
                phase="command", sandbox=self.id, task=self.task.id,
            )  # fmt: skip
        return await self.changed(self.path(path))

    async def changed(self, path: str = "/") -> Changes:
        """What differs from the task's primed state, whatever snapshots were sealed since."""
        if self.primed is not None:
            try:
                return await self._client.changes(path, since=self.primed)
            except KeeperFailure as error:
                if error.errno != errno.ENOENT:
                    raise
                self.primed = None  # no layer here: what lies below is all there is
        return await self._client.changes(path)

    # -- grading, snapshots, state ------------------------------------------------------------------

    async def grade(self, grader: Grader | None = None) -> Outcome:
        """Grade the work, once and finally: the acting agent's processes are gone before hidden files come.

        Raises:
            ConfigError: neither the task nor the call has a grader.
        """
        self._require("ready")
        try:
            self.outcome = await grading.grade(self, grader)
        except SandboxError as error:
            if error.phase == "command":
                error.phase = "grade"
            raise
        return self.outcome

    async def renew(self) -> None:
        """Go on in another place at the task's primed state, for the grader; this one is given back first."""
        await self._host.renew(self)

    async def snapshot(self, *, kill: bool = False, name: str | None = None) -> AsyncSnapshot:
        """Keep the files as they are now, to fork from.

        Raises:
            ProcessesRunningError: processes live and *kill* is false; nothing changed.
            UnsupportedError: in modes in which files cannot leave their place.
        """
        self._require("ready")
        self._movable()
        return await self._host.snapshot(self, kill=kill, name=name)

    def _movable(self) -> None:
        if self.reset_mode in ("manifest", "replace"):
            raise UnsupportedError(
                f"mode {self.reset_mode}: a sandbox's files cannot leave their place, so there are no "
                "snapshots, forks and checkpoints of it, and it does not hibernate",
                phase="command", hint="they need mode overlay or userns", sandbox=self.id, task=self.task.id,
            )  # fmt: skip

    async def pause(self) -> None:
        """Stop every process; all state stays. Twice is fine."""
        if self._state == "paused":
            return
        self._require("ready")
        await self._client.pause()
        if self._state == "ready":
            self.paused(True)

    async def resume(self) -> None:
        """Let the processes go on. Twice is fine."""
        if self._state == "ready":
            return
        self._require("paused")
        await self._client.resume()
        if self._state == "paused":
            self.paused(False)

    async def hibernate(self) -> None:
        """Save the files, end the processes, give the place up.

        Raises:
            UnsupportedError: as of :meth:`snapshot`.
        """
        self._require("ready", "paused")
        self._movable()
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
        self.part()
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
        if self._client.lost.done():
            return  # dead, or its pool is closed: there is nothing that could go back
        with contextlib.suppress(Exception):
            warnings.warn(
                f"{self!r} was never released; it goes back now", ResourceWarning, source=self, stacklevel=2
            )
        with contextlib.suppress(
            RuntimeError
        ):  # the loop is closed: so is the pool, it disposed of everything
            self.loop.call_soon_threadsafe(_forgotten, self)


def _forgotten(sandbox: AsyncSandbox) -> None:
    task = sandbox.loop.create_task(sandbox.release())
    _returning.add(task)
    task.add_done_callback(_returning.discard)


_returning: set[asyncio.Task[None]] = set()
