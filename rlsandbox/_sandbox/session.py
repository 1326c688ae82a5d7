r"""A shell that keeps its state from command to command.

How it is told what to do: its stdin is a pipe from us and holds, for each command, two lines::

    \command eval '<the command>' 0</dev/null 9>&-
    \command printf '\n%s %s %s\n' <nonce> "$?" "$-" >&9

and descriptor 9 is a pipe to us. The command itself never has either of them (its own 0 is /dev/null or what
it was given, 9 is closed), and while it runs the nonce lies unread in the pipe: nothing that it prints, to
whichever descriptor, is an answer. ``command`` keeps a syntax error from ending the shell; the backslashes
keep aliases out. The keeper sends an answer only after the output that was in the pipes before it, so output
is whole when the answer is here.

While ``set -x`` is on, the errors of our lines go to 9 too, which takes braces around them, and the tracing
begins with the command. Only then: bash 5.2, whose heap a command with an open ``$(`` has corrupted, dies of
braces more often. (They follow an empty line since bash knows no ``{`` right after bad syntax.)
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import re
import secrets
from collections.abc import Mapping
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self

from ..errors import ConfigError, SandboxDiedError, SandboxStateError, SessionDiedError, file_error
from ..keeper.channel import CONTROL_OUT, STDIN, CommandChannel, Exit
from ..keeper.connection import CANCEL_GRACE_S, KeeperFailure
from ..results import CommandResult
from .base import Deadline
from .command import Collector, beginning, content_bytes, script_bytes
from .host import Live

if TYPE_CHECKING:
    from .core import AsyncSandbox

SHELLS = ("sh", "dash", "bash", "ash", "ksh", "mksh")
CLOSE_GRACE_S = 2.0
_BETWEEN = 64 << 10  # bytes kept of what background jobs print between two commands
_ANSWER = 4096
_TRACES = re.compile(rb"\bset\b[^\n]*x|xtrace")  # may turn ``set -x`` on


class AsyncSession(Live):
    """One shell; commands of concurrent callers run one after the other."""

    def __init__(self, sandbox: AsyncSandbox) -> None:
        self._sandbox = sandbox
        self._channel: CommandChannel
        self._lock = asyncio.Lock()
        self._collector = Collector(_BETWEEN)
        self._answer = b""
        self._nonce = b""
        self._traced = False  # ``set -x`` is on
        self._waiter: asyncio.Future[int | None] | None = None
        self._died = ""
        self._closed = False

    @classmethod
    async def open(
        cls,
        sandbox: AsyncSandbox,
        *,
        shell: str,
        cwd: str | None,
        env: Mapping[str, str] | None,
        user: str | None,
    ) -> Self:
        if os.path.basename(shell) not in SHELLS:
            raise ConfigError(f"session(shell={shell!r}): it must be one of {', '.join(SHELLS)}")
        sandbox.require_ready()
        self = cls(sandbox)
        channel, argv = sandbox.command(
            [shell], cwd=cwd, env=env, user=user, stdin=True, control=True, sink=self._arrived
        )
        self._channel = channel
        channel.when_ended(self._ended)
        try:
            await channel.started()
        except KeeperFailure as error:
            raise sandbox.unstarted(error, argv) from None
        except BaseException:
            if not channel.ended:
                await channel.cancelled(CANCEL_GRACE_S)
            raise
        channel.feed(STDIN, b"exec 8<&-\n")
        return self

    def __repr__(self) -> str:
        state = "closed" if self._closed else "dead" if self._channel.ended else "open"
        return f"<{type(self).__name__} {state} in {self._sandbox.id}>"

    async def run(
        self,
        cmd: str,
        *,
        timeout: float | None = None,
        stdin: bytes | str | None = None,
        output_limit: str | int | None = None,
        check: bool = False,
    ) -> CommandResult:
        """Run a command in this shell. What it sets stays set.

        A timeout, or cancelling this call, ends the whole session: the shell cannot be cut off in the middle
        of a command and keep its state. A command that ends the shell (``exit 3``) gives its result; the
        next call raises SessionDiedError.
        """
        if not isinstance(cmd, str):
            raise ConfigError(f"a session's command is a string for its shell, not {cmd!r}")
        script = script_bytes(cmd)
        async with self._lock:
            self._check()
            timeout = self._sandbox.allow(timeout)
            limit = self._sandbox.output_limit(output_limit)
            source = b"/dev/null" if stdin is None else await self._put_stdin(stdin)
            try:
                self._check()  # the shell may have ended while its input was written
                result = await self._run(script, source, timeout, limit, beginning(cmd))
            finally:
                if stdin is not None:
                    await self._drop_stdin(source)
        return self._sandbox.checked(result) if check else result

    async def _run(
        self, script: bytes, source: bytes, timeout: float | None, limit: int, shown: str
    ) -> CommandResult:
        loop = asyncio.get_running_loop()
        start = loop.time()
        self._collector, between = Collector(limit, shown), self._collector
        between.replay(self._collector)
        self._nonce = secrets.token_hex(16).encode()
        self._waiter = waiter = loop.create_future()
        before = b""
        answer = b"\\command printf '\\n%s %s %s\\n' " + self._nonce + b' "$?" "$-" >&9\n'
        if self._traced or _TRACES.search(script):
            answer = b"\n{ " + answer.rstrip() + b"; } 2>&9\n"
        if self._traced:
            before = b"\n{ \\command set +x; } 2>&9\n"
            script = b"\\command set -x\n" + script
        lines = (before, b"\\command eval ", _quoted(script), b" 0<", source, b" 9>&-\n")
        self._channel.feed(STDIN, b"".join(lines) + answer)
        timer = None
        if timeout is not None:
            timer = Deadline(self._sandbox, timeout, lambda: self._too_late(timeout))
        try:
            status = await waiter
        except BaseException:
            self._died = self._died or "its last command was cancelled, and the shell was killed with it"
            if not self._channel.ended:
                await self._channel.cancelled(CANCEL_GRACE_S)
            raise
        finally:
            self._waiter = None
            if timer is not None:
                timer.cancel()
        collector, self._collector = self._collector, Collector(_BETWEEN)
        facts: dict[str, Any] = {"duration_s": loop.time() - start}
        if status is not None:
            signal = status - 128 if 128 < status <= 192 else None
            return collector.result(None, exit_code=status, signal=signal, **facts)
        end = self._channel.result()  # SandboxDiedError, when that is why
        assert isinstance(end, Exit)
        self._sandbox.check_held()
        if self._died:  # only a timeout says why before the shell has ended
            return collector.result(end, exit_code=137, timed_out=True, **facts)
        how = f"was killed by signal {end.signal}" if end.signal else f"exited with {end.exit_code}"
        self._died = f"the shell {how} in its last command"
        return collector.result(end, **facts)

    def _too_late(self, timeout: float) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._died = f"its last command took more than {timeout:g} s, and the shell was killed with it"
            self._sandbox.cancel_command(self._channel)

    async def close(self) -> None:
        """End the shell as the end of its input would; what hangs is killed. Twice is fine."""
        self._closed = True
        channel = self._channel
        if channel.ended:
            return
        try:
            if self._waiter is None:
                channel.feed(STDIN, b"", eof=True)
                async with asyncio.timeout(CLOSE_GRACE_S):
                    await channel.wait()
        except (TimeoutError, SandboxDiedError):
            pass
        finally:
            if not channel.ended:
                await channel.cancelled(CANCEL_GRACE_S)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        await self.close()

    def _check(self) -> None:
        if self._closed:
            raise self._sandbox.located(SessionDiedError("the session is closed"))
        self._sandbox.require_ready()
        if self._channel.ended:
            end = self._channel.result()  # SandboxDiedError, when that is why
            if not self._died and isinstance(end, Exit):
                how = f"signal {end.signal}" if end.signal else f"status {end.exit_code}"
                self._died = f"the shell ended between two commands ({how})"
            raise self._sandbox.located(
                SessionDiedError(f"the session is over: {self._died}", hint="open a new one with session()")
            )

    def _arrived(self, stream: int, data: bytes, tail: bool) -> None:
        if stream != CONTROL_OUT:
            self._collector.add(stream, data)
            return
        # Whatever else a command manages to write there, the answer is a line that begins with the nonce.
        self._answer += data
        waiter = self._waiter
        mark = b"\n" + self._nonce + b" "
        at = self._answer.find(mark) if self._nonce else -1
        stop = self._answer.find(b"\n", at + len(mark)) if at >= 0 else -1
        if stop >= 0:
            status, _, options = self._answer[at + len(mark) : stop].partition(b" ")
            self._answer, self._nonce = b"", b""
            self._traced = b"x" in options
            if waiter is not None and not waiter.done() and status.isdigit():
                waiter.set_result(int(status))
        elif at < 0 and len(self._answer) > _ANSWER:
            self._answer = self._answer[-64:]

    def _ended(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    async def _put_stdin(self, stdin: bytes | str) -> bytes:
        """The command's input as a file: a pipe could not be ended without ending the shell's."""
        raw = content_bytes(stdin, "stdin")
        name = f".rlsandbox-{secrets.token_hex(8)}"
        failed = 0
        for place in ("/dev/shm", "/tmp"):
            try:
                await self._sandbox.client.write(f"{place}/{name}", raw, mode=0o644, flags=4)
                return f"{place}/{name}".encode()
            except KeeperFailure as error:
                failed = error.errno
                await self._drop_stdin(f"{place}/{name}".encode())  # what of it there was room for
        told = f"no room for {len(raw)} bytes of stdin in /dev/shm or /tmp: {os.strerror(failed)}"
        raise file_error(failed, "/tmp", message=told, sandbox=self._sandbox.id)

    async def _drop_stdin(self, path: bytes) -> None:
        # It may have gone already: with the command, or with the sandbox.
        with contextlib.suppress(KeeperFailure, SandboxDiedError, SandboxStateError):
            await self._sandbox.client.remove(path.decode())


def _quoted(text: bytes) -> bytes:
    return b"'" + text.replace(b"'", b"'\"'\"'") + b"'"
