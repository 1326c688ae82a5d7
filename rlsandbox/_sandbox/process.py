"""A running command: its output as it comes, its input, its end."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from types import TracebackType
from typing import TYPE_CHECKING, Self

from ..errors import CommandTimeoutError, SandboxStateError
from ..keeper.channel import STDERR, STDIN, STDOUT, CommandChannel, Exit
from ..keeper.connection import CANCEL_GRACE_S
from ..results import CommandResult, Stream, brief
from .base import Deadline, late_facts
from .command import Collector, content_bytes, seconds, stream_name
from .host import Live

if TYPE_CHECKING:
    from .core import AsyncSandbox


class AsyncProcess(Live):
    """A command that was started with ``popen``.

    Iterating gives ``(stream, bytes)`` as they come. What is not taken waits in the sandbox: a program that
    prints more than about 256 KiB stops until it is iterated or waited for. Leaving the block kills it.
    """

    def __init__(
        self, sandbox: AsyncSandbox, channel: CommandChannel, collector: Collector, backup: Deadline | None
    ) -> None:
        self.pid: int = channel.pid or 0
        self._sandbox = sandbox
        self._channel = channel
        self._backup = backup
        self._collector = collector
        self._result: CommandResult | None = None
        self._stdin_open = True

    def __repr__(self) -> str:
        state = "running"
        if self._channel.ended:
            state = "lost" if self._channel.lost else f"exit {self.exit_code}"
        return f"<{type(self).__name__} {self.pid} {state} in {self._sandbox.id}>"

    @property
    def exit_code(self) -> int | None:
        """As a shell tells it; None while it runs."""
        if not self._channel.ended:
            return None
        return self._end().exit_code

    def poll(self) -> int | None:
        """The exit code, or None while it runs. SandboxDiedError when the sandbox died meanwhile."""
        return self.exit_code

    def __aiter__(self) -> AsyncIterator[tuple[Stream, bytes]]:
        return self._chunks()

    async def _chunks(self) -> AsyncIterator[tuple[Stream, bytes]]:
        while (item := await self.next_chunk()) is not None:
            yield item

    async def next_chunk(self) -> tuple[Stream, bytes] | None:
        """The next piece of output; None at the end."""
        while (item := await self._channel.recv()) is not None:
            stream, data, _ = item
            if stream in (STDOUT, STDERR) and data:
                self._collector.add(stream, data)
                return stream_name(stream), data
        return None

    async def write(self, data: bytes | str) -> None:
        """Write to the program's stdin; waits while it does not read.

        Raises:
            BrokenPipeError: the program has ended.
        """
        if not self._stdin_open:
            raise SandboxStateError("stdin is closed", sandbox=self._sandbox.id)
        raw = content_bytes(data, "stdin")
        await self._channel.send(STDIN, raw)

    def feed(self, data: bytes | str) -> None:
        """All of the program's input, sent as it reads; nobody waits for it."""
        self._stdin_open = False
        raw = content_bytes(data, "stdin")
        self._channel.feed(STDIN, raw, eof=True)

    async def close_stdin(self) -> None:
        """End of the program's input. Twice is fine."""
        if self._stdin_open:
            self._stdin_open = False
            self._channel.feed(STDIN, b"", eof=True)

    async def wait(self, timeout: float | None = None) -> CommandResult:
        """Wait for the end. stdin is left as it is; output that nobody iterated is kept up to the limit.

        Raises:
            CommandTimeoutError: it still runs after *timeout* seconds (it is not killed).
        """
        if timeout is not None and timeout != 0:
            timeout = seconds(timeout)
        if self._result is None:
            try:
                async with asyncio.timeout(timeout):
                    while (item := await self._channel.recv()) is not None:
                        self._collector.add(item[0], item[1])
            except TimeoutError as error:
                if timeout is None or self._channel.ended:
                    raise
                raise CommandTimeoutError(
                    f"command {brief(self._collector.command)} still runs after {timeout:g} s",
                    hint="kill() ends it",
                    sandbox=self._sandbox.id,
                ) from error
            self._result = self._collector.result(self._end(), **late_facts(self._backup))
        return self._result

    async def kill(self, signal: int = 9) -> None:
        """Send a signal; 9 ends the command's whole tree, any other goes to its main process."""
        if not isinstance(signal, int) or not 1 <= signal <= 64:
            raise ValueError(f"{signal!r} is no signal number: 15, say, or signal.SIGTERM")
        self._channel.signal(signal, tree=signal == 9)

    async def end(self) -> None:
        """Kill it if it still runs, and wait until its tree is gone."""
        if not self._channel.ended:
            await self._channel.cancelled(CANCEL_GRACE_S)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        await self.end()

    def _end(self) -> Exit:
        end = self._channel.result()
        assert isinstance(end, Exit)
        return end
