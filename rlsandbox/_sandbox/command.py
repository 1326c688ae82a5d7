"""From what a caller asks for to a SPAWN, and from what a keeper tells to a CommandResult."""

from __future__ import annotations

import codecs
import errno
import math
import numbers
import os
from array import array
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from ..errors import CommandStartError, ConfigError, SandboxDiedError, SandboxError
from ..keeper.channel import STDERR, STDOUT, Exit
from ..keeper.connection import KeeperFailure
from ..keeper.wire import ExitFlag
from ..results import CommandResult

Cmd = str | Sequence[str]
SHELL = "/bin/sh"
SCRIPT_FD = "/proc/self/fd/9"
LONGEST_S = 1e9  # 31 years; beyond it clocks and counters of milliseconds overflow
_NAMED = 200
MOST_RUNS = 1 << 14  # remembered of the order in which two streams arrived before they are looked through
MOST_ASKED = 64 << 20  # the keeper holds that much of a stream's end, no more
MAX_ARGUMENT = 131072  # the kernel's limit for one argument, its NUL included
DEFAULT_ENV = {
    "PATH": "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin",
    # Not LANG: that makes glibc open a dozen files at the start of every program, and UTF-8 is all we want.
    "LC_CTYPE": "C.UTF-8",
}
_TIMED_OUT, _OOM = int(ExitFlag.TIMED_OUT), int(ExitFlag.OOM)
_NAMES = {STDOUT: "stdout", STDERR: "stderr"}
_START = {"enter the working directory": "bad_cwd", "find ": "bad_user", "become ": "bad_user"}


def argv_of(cmd: Cmd) -> tuple[list[bytes], bytes | None]:
    """The program's arguments, and the script for descriptor 9 when it is too long for one."""
    if isinstance(cmd, str):
        script = script_bytes(cmd)
        if len(script) >= MAX_ARGUMENT:
            return [SHELL.encode(), SCRIPT_FD.encode()], script
        return [SHELL.encode(), b"-c", script], None
    if isinstance(cmd, bytes) or not isinstance(cmd, Sequence):
        raise ConfigError(f"a command is a string for the shell or a list of strings, not {cmd!r}")
    if not cmd:
        raise ConfigError("a command must not be an empty list")
    return [text_bytes(part, "an argument") for part in cmd], None


def script_bytes(cmd: str) -> bytes:
    """A command for a shell, which must not take one that begins with a dash for its own option."""
    script = text_bytes(cmd, "the command")
    return b" " + script if script[:1] in (b"-", b"+") else script


def beginning(cmd: Cmd) -> str:
    """What errors name *cmd* by, whatever it is; of a script of 200 KB no more is kept."""
    if isinstance(cmd, str):
        return cmd[:_NAMED]
    parts = cmd[:_NAMED] if isinstance(cmd, Sequence) else [cmd]
    return " ".join(str(part)[:_NAMED] for part in parts)[:_NAMED]


def text_bytes(text: str, what: str) -> bytes:
    if not isinstance(text, str):
        raise ConfigError(f"{what} must be a string, not {text!r}")
    raw = utf8(text, what)
    if b"\0" in raw:
        raise ConfigError(f"{what} must not contain NUL bytes: no program can be given one")
    return raw


def utf8(text: str, what: str) -> bytes:
    """*text* as bytes; ConfigError for half of a surrogate pair, as a model's JSON may hold it."""
    try:
        return text.encode("utf-8", "surrogateescape")
    except UnicodeEncodeError as error:
        half = text[error.start]
        raise ConfigError(
            f"{what} must be text that UTF-8 can say, not one with the lone surrogate {half!r}"
        ) from None


def content_bytes(data: bytes | str, what: str) -> bytes:
    """What goes to a program or into a file, checked before anything is begun."""
    if isinstance(data, str):
        return utf8(data, what)
    if not isinstance(data, (bytes, bytearray, memoryview)):
        raise ConfigError(f"{what} must be bytes or a string, not {type(data).__name__}")
    return bytes(data)


def callback(function: object, what: str) -> None:
    """Check it before anything is begun: what has nothing to tell would never call it."""
    if function is not None and not callable(function):
        raise ConfigError(f"{what} must be a function, not {type(function).__name__}")


def env_pairs(*maps: Mapping[str, str]) -> list[str]:
    """``K=V`` of all maps, the last one winning."""
    merged: dict[str, str] = {}
    for one in maps:
        if not isinstance(one, Mapping):
            raise ConfigError(f"env must map names to strings, not {type(one).__name__}")
        merged.update(one)
    for key, value in merged.items():
        bad = not isinstance(key, str) or not key or "=" in key or "\0" in key
        if bad or not isinstance(value, str) or "\0" in value:
            raise ConfigError(f"env: {key!r}={value!r} must be strings without NUL, the name without '='")
        if not (key.isascii() and value.isascii()):
            utf8(key + value, f"env: {key!r}")
    return [f"{key}={value}" for key, value in merged.items()]


def seconds(timeout: float | None, what: str = "timeout") -> float | None:
    """A timeout that makes sense; None, infinity, and what nobody lives to see, are none."""
    if timeout is None:
        return None
    if isinstance(timeout, bool) or not isinstance(timeout, numbers.Real) or not timeout > 0:
        raise ConfigError(f"{what} must be a number of seconds above 0, not {timeout!r}")
    return None if timeout > LONGEST_S else float(timeout)


def deadline_ms(timeout: float) -> int:
    return max(1, math.ceil(timeout * 1000))


def start_error(error: KeeperFailure, argv: Sequence[bytes], **where: Any) -> SandboxError:
    """What a FAIL of a SPAWN means to the caller."""
    program = argv[0].decode("utf-8", "replace")
    reason = os.strerror(error.errno)
    if error.errno == errno.ESRCH:
        return SandboxDiedError(f"{program!r} could not be started: {error.message}", **where)
    if error.what.startswith("start "):
        return CommandStartError(f"{program!r} could not be started: {reason}", **where)
    text = f"{program!r} could not be started: {error.message}"
    for beginning, kind in _START.items():
        if error.what.startswith(beginning):
            return CommandStartError(text, kind=kind, **where)
    return CommandStartError(text, kind="command_spawn", retryable=True, **where)


def keepers_limit(limit: int) -> int:
    """The ``output_limit`` of a SPAWN whose caller keeps *limit* bytes of each stream; 0: all is sent.

    Twice as much: then what fits comes as it is printed, and nobody has to guess in which order.
    """
    return 2 * max(limit, 1) if limit <= MOST_ASKED else 0


class Collector:
    """Head and tail of what a command prints, and in which order the two streams arrived.

    *limit* bytes of each stream are kept: the first half, and the last half.
    """

    def __init__(self, limit: int, command: str = "") -> None:
        self.command = command
        self._first = {STDOUT: limit // 2, STDERR: limit // 2}
        self._last = limit - limit // 2
        self._head = {STDOUT: bytearray(), STDERR: bytearray()}
        self._tail = {STDOUT: bytearray(), STDERR: bytearray()}
        self._runs = array("Q", [0])  # bytes of stdout, of stderr, of stdout ... as they arrived
        self._at = STDOUT  # the stream of the last run
        self._most_runs = MOST_RUNS
        self.seen = {STDOUT: 0, STDERR: 0}

    def add(self, stream: int, data: bytes, tail: bool = False) -> None:
        if stream not in self._head:
            return
        size = len(data)
        self.seen[stream] += size
        if stream == self._at:
            self._runs[-1] += size
        else:
            if len(self._runs) >= self._most_runs:
                self._forget()
            self._runs.append(size)
            self._at = stream
        if not tail:
            head = self._head[stream]
            room = self._first[stream] - len(head)
            if room >= size:
                head += data
                return
            if room > 0:
                head += data[:room]
                data = data[room:]
        kept = self._tail[stream]
        kept += data
        if len(kept) > self._last + 65536:
            del kept[: len(kept) - self._last]

    def lost(self, stream: int, size: int) -> None:
        """*size* bytes were printed here that nobody kept."""
        self.seen[stream] += size
        self._first[stream] = len(self._head[stream])
        self._tail[stream].clear()  # what is left must be in one piece

    def replay(self, other: Collector) -> None:
        """Give what was collected here to *other*, which has nothing yet."""
        missing = {s: seen - len(self._head[s]) - len(self._tail[s]) for s, seen in self.seen.items()}
        for stream, late, data in self._pieces({s: len(kept) for s, kept in self._tail.items()}):
            if late and missing[stream]:
                other.lost(stream, missing[stream])
                missing[stream] = 0
            other.add(stream, data)
        for stream, size in missing.items():
            if size:
                other.lost(stream, size)

    def _pieces(self, tails: Mapping[int, int]) -> Iterator[tuple[int, bool, bytes]]:
        """What is kept, as it arrived: stream, whether it is of the tail, bytes.

        *tails*: how many bytes of the end of each stream.
        """
        total = {STDOUT: sum(self._runs[0::2]), STDERR: sum(self._runs[1::2])}
        at = {STDOUT: 0, STDERR: 0}
        for number, size in enumerate(self._runs):
            stream = STDERR if number % 2 else STDOUT
            begin, end = at[stream], at[stream] + size
            at[stream] = end
            head, kept = self._head[stream], self._tail[stream]
            if begin < len(head):
                yield stream, False, bytes(head[begin : min(end, len(head))])
            begin = max(begin, total[stream] - tails[stream])
            if begin < end:
                after = len(kept) - total[stream]
                yield stream, True, bytes(kept[begin + after : end + after])

    def _forget(self) -> None:
        """Runs of what is not kept any more: the list of them must not grow for ever."""
        runs, at = array("Q", [0]), STDOUT
        for stream, _, data in self._pieces({s: len(kept) for s, kept in self._tail.items()}):
            if stream == at:
                runs[-1] += len(data)
            else:
                runs.append(len(data))
                at = stream
        if at != self._at:
            runs.append(0)
        self._runs = runs
        self._most_runs = max(MOST_RUNS, 2 * len(runs))

    def result(self, end: Exit | None, *, duration_s: float | None = None, **changes: Any) -> CommandResult:
        """The result.

        *end* tells the true sizes when it is this command's own. In a session it is the shell's, or None
        while the shell lives; *duration_s* and *changes* tell the rest, and all that was printed was seen.
        """
        told = end if duration_s is None else None
        out, out_cut, out_size = self._stream(STDOUT, told.stdout_size if told else None)
        err, err_cut, err_size = self._stream(STDERR, told.stderr_size if told else None)
        stdout, stderr = out.text(), err.text()
        facts: dict[str, Any] = {"exit_code": 0}
        if end is not None:
            facts = {
                "exit_code": end.exit_code,
                "signal": end.signal,
                "timed_out": bool(end.flags & _TIMED_OUT),
                "oom_killed": bool(end.flags & _OOM),
                "duration_s": end.duration_ns / 1e9,
            }
        if duration_s is not None:
            facts["duration_s"] = duration_s
        facts.update(changes)
        return CommandResult(
            stdout=stdout,
            stderr=stderr,
            stdout_bytes=out.bytes(),
            stderr_bytes=err.bytes(),
            stdout_size=out_size,
            stderr_size=err_size,
            truncated=out_cut or err_cut,
            merged=self._merged(out, err) if stdout and stderr else stdout or stderr,
            command=self.command,
            **facts,
        )

    def _stream(self, stream: int, told: int | None) -> tuple[_Kept, bool, int]:
        if not self.seen[stream] and not told:
            return _NOTHING, False, 0
        kept = self._tail[stream]
        tail = bytes(kept[max(0, len(kept) - self._last) :])
        size = max(self.seen[stream], told or 0)
        head = bytes(self._head[stream])
        omitted = size - len(head) - len(tail)
        return _Kept(head, tail, omitted), omitted > 0, size

    def _merged(self, out: _Kept, err: _Kept) -> str:
        """Both, as they arrived; what came while the middle of the other stream passed, before its marker."""
        kept = {STDOUT: out, STDERR: err}
        cut = {s: one for s, one in kept.items() if one.omitted > 0}
        decoders = {s: codecs.getincrementaldecoder("utf-8")("replace") for s in kept}
        tails = {s: len(_skip_partial(one.tail) if s in cut else one.tail) for s, one in kept.items()}
        parts: list[str] = []
        for stream, late, data in self._pieces(tails):
            if late and stream in cut:
                parts.append(cut.pop(stream).marker)
                decoders[stream].reset()
            parts.append(decoders[stream].decode(data))
        for stream in kept:
            parts.append(cut[stream].marker if stream in cut else decoders[stream].decode(b"", True))
        return "".join(parts)


class _Kept:
    """What is kept of one stream."""

    __slots__ = ("head", "marker", "omitted", "tail")

    def __init__(self, head: bytes, tail: bytes, omitted: int) -> None:
        self.head = head
        self.tail = tail
        self.omitted = omitted
        self.marker = f"\n[... {omitted} bytes left out ...]\n" if omitted > 0 else ""

    def bytes(self) -> bytes:
        if self.omitted <= 0:
            return self.head + self.tail
        return self.head + self.marker.encode() + self.tail

    def text(self) -> str:
        if self.omitted <= 0:
            return (self.head + self.tail).decode("utf-8", "replace")
        # A character that the cut went through is left out, not shown as damage that was never printed.
        head = codecs.getincrementaldecoder("utf-8")("replace").decode(self.head)
        return head + self.marker + _skip_partial(self.tail).decode("utf-8", "replace")


_NOTHING = _Kept(b"", b"", 0)


def _skip_partial(data: bytes) -> bytes:
    skip = 0
    while skip < min(3, len(data)) and data[skip] & 0xC0 == 0x80:
        skip += 1
    return data[skip:]


def stream_name(stream: int) -> Any:
    """``"stdout"`` or ``"stderr"``."""
    return _NAMES[stream]
