"""The same for callers that do not await: each method runs its asynchronous namesake on the pool's portal.

There is nothing here but that; whatever can be decided is decided there.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self

from .._mirror import mirrors
from .._portal import Portal
from ..results import CommandResult, FileInfo, Outcome, Stream
from ..spec import Spec
from ..task import Grader, Task
from .base import OnOutput, Path_, State
from .command import Cmd, callback, content_bytes
from .core import AsyncSandbox, Progress
from .host import AsyncSnapshot, Live, SandboxLimits
from .process import AsyncProcess
from .session import AsyncSession

if TYPE_CHECKING:
    from ..hooks import Rollout


class _CM(Live):
    """Leaving the block calls ``_leave``."""

    def _leave(self) -> None:
        raise NotImplementedError

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._leave()


@mirrors(AsyncProcess)
class Process(_CM):
    """A running command: see :class:`AsyncProcess`. Leaving the block kills it."""

    def __init__(self, process: AsyncProcess, portal: Portal) -> None:
        self._async = process
        self._portal = portal

    def __repr__(self) -> str:
        return repr(self._async).replace("AsyncProcess", "Process", 1)

    @property
    def pid(self) -> int:
        return self._async.pid

    @property
    def exit_code(self) -> int | None:
        return self._async.exit_code

    def poll(self) -> int | None:
        return self._async.poll()

    def __iter__(self) -> Iterator[tuple[Stream, bytes]]:
        while (item := self._portal.call(self._async.next_chunk)) is not None:
            yield item

    def write(self, data: bytes | str) -> None:
        self._portal.call(self._async.write, data)

    def close_stdin(self) -> None:
        self._portal.call(self._async.close_stdin)

    def wait(self, timeout: float | None = None) -> CommandResult:
        return self._portal.call(self._async.wait, timeout)

    def kill(self, signal: int = 9) -> None:
        self._portal.call(self._async.kill, signal)

    def _leave(self) -> None:
        self._portal.call(self._async.end)


@mirrors(AsyncSession)
class Session(_CM):
    """A shell that keeps its state: see :class:`AsyncSession`."""

    def __init__(self, session: AsyncSession, portal: Portal) -> None:
        self._async = session
        self._portal = portal

    def __repr__(self) -> str:
        return repr(self._async).replace("AsyncSession", "Session", 1)

    def run(
        self,
        cmd: str,
        *,
        timeout: float | None = None,
        stdin: bytes | str | None = None,
        output_limit: str | int | None = None,
        check: bool = False,
    ) -> CommandResult:
        async def run() -> CommandResult:
            return await self._async.run(
                cmd, timeout=timeout, stdin=stdin, output_limit=output_limit, check=check
            )

        return self._portal.call(run)

    def close(self) -> None:
        self._portal.call(self._async.close)

    def _leave(self) -> None:
        self.close()


@mirrors(AsyncSnapshot)
class Snapshot(Live):
    """A sandbox's files at one moment: see :class:`AsyncSnapshot`."""

    def __init__(self, snapshot: AsyncSnapshot, portal: Portal) -> None:
        self._async = snapshot
        self._portal = portal

    def __repr__(self) -> str:
        return repr(self._async).replace("AsyncSnapshot", "Snapshot", 1)

    @property
    def id(self) -> str:
        return self._async.id

    @property
    def bytes(self) -> int:
        return self._async.bytes

    def fork(self, n: int, *, timeout: float | None = None) -> Sandboxes:
        """*n* sandboxes with this state, all or none; a list that is a context manager."""

        async def fork() -> list[AsyncSandbox]:
            return await self._async.fork(n, timeout=timeout)

        return Sandboxes(Sandbox(one, self._portal) for one in self._portal.call(fork))

    def delete(self) -> None:
        self._portal.call(self._async.delete)


@mirrors(AsyncSandbox)
class Sandbox(_CM):
    """A ready sandbox, held for one attempt: see :class:`AsyncSandbox`. Leaving the block releases it."""

    def __init__(self, sandbox: AsyncSandbox, portal: Portal, rollout: Rollout | None = None) -> None:
        self._async = sandbox
        sandbox.shown_as = "Sandbox"
        self._portal = portal
        self.rollout: Rollout | None = rollout
        """Which attempt of what this is; None outside rollouts."""

    def __repr__(self) -> str:
        return repr(self._async)

    @property
    def id(self) -> str:
        return self._async.id

    @property
    def task(self) -> Task:
        return self._async.task

    @property
    def spec(self) -> Spec:
        return self._async.spec

    @property
    def limits(self) -> SandboxLimits:
        return self._async.limits

    @property
    def reset_mode(self) -> str:
        return self._async.reset_mode

    @property
    def node(self) -> str | None:
        return self._async.node

    @property
    def state(self) -> State:
        return self._async.state

    @property
    def workdir(self) -> str:
        return self._async.workdir

    def run(
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
        """See :meth:`AsyncSandbox.run`. *on_output* is called on this thread."""
        if on_output is not None:
            return self._run_shown(
                cmd,
                on_output,
                check,
                timeout=timeout,
                cwd=cwd,
                env=env,
                user=user,
                output_limit=output_limit,
                stdin=stdin,
            )

        async def run() -> CommandResult:
            return await self._async.run(
                cmd,
                timeout=timeout,
                cwd=cwd,
                env=env,
                stdin=stdin,
                user=user,
                output_limit=output_limit,
                check=check,
            )

        return self._portal.call(run)

    def _run_shown(
        self, cmd: Cmd, on_output: OnOutput, check: bool, *, stdin: bytes | str | None, **how: Any
    ) -> CommandResult:
        callback(on_output, "on_output")
        raw = None if stdin is None else content_bytes(stdin, "stdin")

        async def start() -> AsyncProcess:
            process = await self._async.popen(cmd, stdin=raw is not None, **how)
            if raw is not None:
                process.feed(raw)
            return process

        with Process(self._portal.call(start), self._portal) as process:
            for stream, data in process:
                on_output(stream, data)
            result = process.wait()
        self._async.check_held()
        return self._async.checked(result) if check else result

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
    ) -> Process:
        async def start() -> AsyncProcess:
            return await self._async.popen(
                cmd, timeout=timeout, cwd=cwd, env=env, user=user, stdin=stdin, output_limit=output_limit
            )

        return Process(self._portal.call(start), self._portal)

    def session(
        self,
        *,
        shell: str = "sh",
        cwd: str | None = None,
        env: Mapping[str, str] | None = None,
        user: str | None = None,
    ) -> Session:
        async def start() -> AsyncSession:
            return await self._async.session(shell=shell, cwd=cwd, env=env, user=user)

        return Session(self._portal.call(start), self._portal)

    def read_file(self, path: Path_, *, user: str | None = None) -> bytes:
        return self._portal.call(self._async.read_file, path, user=user)

    def read_text(self, path: Path_, *, user: str | None = None) -> str:
        return self._portal.call(self._async.read_text, path, user=user)

    def write_file(
        self, path: Path_, data: bytes | str, *, mode: int | None = None, user: str | None = None
    ) -> None:
        self._portal.call(self._async.write_file, path, data, mode=mode, user=user)

    def list_dir(self, path: Path_ = ".", *, user: str | None = None) -> list[FileInfo]:
        return self._portal.call(self._async.list_dir, path, user=user)

    def upload(
        self,
        local: Path_,
        remote: Path_,
        *,
        exclude: Sequence[str] = (),
        user: str | None = None,
        progress: Progress | None = None,
    ) -> None:
        """See :meth:`AsyncSandbox.upload`. *progress* is called on the pool's thread: it must not wait."""
        self._portal.call(self._async.upload, local, remote, exclude=exclude, user=user, progress=progress)

    def download(
        self,
        remote: Path_,
        local: Path_,
        *,
        exclude: Sequence[str] = (),
        user: str | None = None,
        progress: Progress | None = None,
    ) -> None:
        """See :meth:`AsyncSandbox.download`. *progress* is called on the pool's thread: it must not wait."""
        self._portal.call(self._async.download, remote, local, exclude=exclude, user=user, progress=progress)

    def changes(self, path: Path_ = "/") -> list[FileInfo]:
        return self._portal.call(self._async.changes, path)

    def grade(self, grader: Grader | None = None) -> Outcome:
        return self._portal.call(self._async.grade, grader)

    def snapshot(self, *, kill: bool = False, name: str | None = None) -> Snapshot:
        return Snapshot(self._portal.call(self._async.snapshot, kill=kill, name=name), self._portal)

    def pause(self) -> None:
        self._portal.call(self._async.pause)

    def resume(self) -> None:
        self._portal.call(self._async.resume)

    def hibernate(self) -> None:
        self._portal.call(self._async.hibernate)

    def restore(self, timeout: float | None = None) -> None:
        self._portal.call(self._async.restore, timeout)

    def release(self, *, discard: bool = False) -> None:
        # The second time, and after the pool is closed, there is nothing to do and nothing to complain of.
        if self._async.state != "released" and not self._portal.closed:
            self._portal.call(self._async.release, discard=discard)

    def _leave(self) -> None:
        self.release()


for _cls in (Process, Session, Sandbox):
    for _name, _member in vars(_cls).items():
        if callable(_member) and not _name.startswith("_") and not _member.__doc__:
            _twin: Callable[..., Any] | None = getattr(
                {Process: AsyncProcess, Session: AsyncSession, Sandbox: AsyncSandbox}[_cls], _name, None
            )
            _member.__doc__ = _twin.__doc__ if _twin is not None else None


class Sandboxes(list[Sandbox]):
    """Sandboxes that are released together."""

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.release()

    def release(self, *, discard: bool = False) -> None:
        """Release all; the first error is raised after every one was tried."""
        first: BaseException | None = None
        for sandbox in self:
            try:
                sandbox.release(discard=discard)
            except BaseException as error:
                first = first or error
        if first is not None:
            raise first
