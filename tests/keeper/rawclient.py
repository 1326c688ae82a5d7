"""The keeper's protocol spoken by hand, blocking, for tests of the C side: no part of the product's client is used."""

from __future__ import annotations

import array
import os
import shutil
import socket
import struct
import subprocess
import sys
from pathlib import Path
from types import TracebackType
from typing import Any

import pytest

from rlsandbox.keeper.build import keeper_binary
from rlsandbox.keeper.wire import VERSION, WINDOW, Op, Tag, Type

SRC = Path(__file__).resolve().parents[2] / "rlsandbox" / "keeper" / "src"
U64 = {Tag.OUTPUT_LIMIT, Tag.TIMEOUT_MS, Tag.OFFSET, Tag.LENGTH, Tag.LIMIT, Tag.UPPER_BYTES, Tag.UPPER_INODES, Tag.MEMORY_BYTES}
TEXT = {Tag.HASH, Tag.MODE, Tag.MEMBER, Tag.FACT, Tag.WHAT, Tag.TEXT, Tag.KIND, Tag.LAYER}
REPEATED = {Tag.FACT, Tag.MEMBER, Tag.LAYER}


def build(target: str = "keeper") -> Path:
    """The keeper that fits the sources; compiled when there is none.

    ``RLS_TEST_KEEPER=keeper-asan`` runs all tests of this directory against the sanitizer build.
    """
    if target.startswith("/"):
        return Path(target)
    if target == "keeper":
        return keeper_binary()
    make_sanitized("asan")
    return SRC / target


def make_sanitized(target: str, source: Path = SRC) -> None:
    """``make`` *target* with sanitizers; the test is skipped where the compiler has none."""
    probe = ["gcc", "-fsanitize=address,undefined", "-x", "c", "-o", "/dev/null", "-"]
    try:
        subprocess.run(probe, input=b"int main(void) { return 0; }", check=True, capture_output=True)
    except (OSError, subprocess.CalledProcessError):
        pytest.skip("no gcc with sanitizers (Debian: apt-get install gcc libc6-dev)")
    subprocess.run(["make", "-s", "-C", str(source), f"BUILD={SRC.parent / 'build.py'}", target], check=True)


def tlv(*fields: tuple[Tag, Any]) -> bytes:
    out = []
    for tag, value in fields:
        if isinstance(value, int):
            value = value.to_bytes(8 if tag in U64 else 4, "little")
        elif isinstance(value, str):
            value = os.fsencode(value)
        out.append(struct.pack("<HI", tag, len(value)) + value)
    return b"".join(out)


def untlv(data: bytes) -> dict[Tag, Any]:
    out: dict[Tag, Any] = {}
    at = 0
    while at < len(data):
        tag, n = struct.unpack_from("<HI", data, at)
        raw = data[at + 6 : at + 6 + n]
        at += 6 + n
        value: Any = raw.decode() if tag in TEXT else int.from_bytes(raw, "little")
        if tag in REPEATED:
            out.setdefault(Tag(tag), []).append(value)
        else:
            out[Tag(tag)] = value
    return out


class KeeperError(Exception):
    def __init__(self, fields: dict[Tag, Any]) -> None:
        super().__init__(f"{fields[Tag.WHAT]}: {fields[Tag.TEXT]}")
        self.errno = fields[Tag.ERRNO]


class Frames:
    """Frames over one socket. Answers are kept per channel until asked for."""

    def __init__(self, sock: socket.socket) -> None:
        self.sock, self.buf, self.at, self.channel, self.fds = sock, bytearray(), 0, 0, array.array("i")
        self.waiting: dict[int, list[tuple[int, int, int, bytes]]] = {}
        sock.settimeout(60)

    def send(self, kind: int, channel: int, payload: bytes = b"", stream: int = 0, flags: int = 0) -> None:
        self.sock.sendall(struct.pack("<IBBHII", len(payload) + 12, kind, flags, stream, channel, 0) + payload)

    def _fill(self) -> None:
        data, anc, _, _ = self.sock.recvmsg(1 << 17, 1024)
        for level, kind, raw in anc:
            if level == socket.SOL_SOCKET and kind == socket.SCM_RIGHTS:
                self.fds.frombytes(raw[: len(raw) // 4 * 4])
        if not data:
            raise EOFError("the keeper closed its stream")
        del self.buf[: self.at]
        self.at = 0
        self.buf += data

    def frame(self) -> tuple[int, int, int, int, bytes]:
        while len(self.buf) - self.at < 16:
            self._fill()
        n, kind, flags, stream, channel, _ = struct.unpack_from("<IBBHII", self.buf, self.at)
        while len(self.buf) - self.at < n + 4:
            self._fill()
        payload = bytes(self.buf[self.at + 16 : self.at + n + 4])
        self.at += n + 4
        return kind, flags, stream, channel, payload

    def next(self, channel: int) -> tuple[int, int, int, bytes]:
        while not self.waiting.get(channel):
            kind, flags, stream, ch, payload = self.frame()
            self.waiting.setdefault(ch, []).append((kind, flags, stream, payload))
        return self.waiting[channel].pop(0)

    def request(self, op: Op, *fields: tuple[Tag, Any]) -> int:
        self.channel += 1
        body = tlv((Tag.OP, int(op)), *fields)
        while len(body) > 32000:
            self.send(Type.REQ, self.channel, body[:32000], flags=1)
            body = body[32000:]
        self.send(Type.REQ, self.channel, body)
        return self.channel

    def reply(self, channel: int) -> tuple[dict[Tag, Any], bytes]:
        data, message = bytearray(), b""
        while True:
            kind, flags, stream, payload = self.next(channel)
            if kind == Type.DATA:
                data += payload
                self.send(Type.CREDIT, channel, struct.pack("<I", len(payload)), stream)
            elif kind == Type.REPLY:
                message += payload
                if not flags & 1:
                    return untlv(message), bytes(data)
            elif kind == Type.FAIL:
                raise KeeperError(untlv(payload))

    def call(self, op: Op, *fields: tuple[Tag, Any]) -> tuple[dict[Tag, Any], bytes]:
        return self.reply(self.request(op, *fields))


class Result:
    def __init__(self) -> None:
        self.out = {stream: bytearray() for stream in (1, 2, 4)}
        self.tail = {stream: bytearray() for stream in (1, 2, 4)}
        self.exit: dict[Tag, Any] = {}
        self.pid = 0

    @property
    def stdout(self) -> bytes:
        return bytes(self.out[1])

    @property
    def stderr(self) -> bytes:
        return bytes(self.out[2])

    @property
    def code(self) -> int:
        return os.waitstatus_to_exitcode(self.exit[Tag.STATUS])


class Keeper(Frames):
    """One sandbox."""

    def __init__(self, sock: socket.socket) -> None:
        super().__init__(sock)
        self.send(Type.HELLO, 0, tlv((Tag.VERSION, VERSION)))
        kind, _, _, payload = self.next(0)
        assert kind == Type.WELCOME
        self.welcome = untlv(payload)

    def spawn(self, *argv: str, env: dict[str, str] | None = None, **options: Any) -> int:
        env = {"PATH": "/usr/local/bin:/usr/bin:/bin:/usr/sbin:/sbin"} if env is None else env
        fields = [(Tag.ARG, a) for a in argv] + [(Tag.ENV, f"{k}={v}") for k, v in env.items()]
        fields += [(Tag[name.upper()], value) for name, value in options.items()]
        return self.request(Op.SPAWN, *fields)

    def finish(self, channel: int) -> Result:
        result = Result()
        while True:
            kind, flags, stream, payload = self.next(channel)
            if kind == Type.DATA:
                (result.tail if flags & 2 else result.out)[stream] += payload
                self.send(Type.CREDIT, channel, struct.pack("<I", len(payload)), stream)
            elif kind == Type.STARTED:
                result.pid = untlv(payload)[Tag.PID]
            elif kind == Type.EXIT:
                result.exit = untlv(payload)
                return result
            elif kind == Type.FAIL:
                raise KeeperError(untlv(payload))

    def run(self, *argv: str, **options: Any) -> Result:
        return self.finish(self.spawn(*argv, **options))

    def sh(self, script: str, **options: Any) -> Result:
        return self.run("sh", "-c", script, **options)

    def read(self, path: str, **options: Any) -> bytes:
        return self.call(Op.READ, (Tag.PATH, path), *((Tag[k.upper()], v) for k, v in options.items()))[1]

    def write(self, path: str, data: bytes, **options: Any) -> dict[Tag, Any]:
        ch = self.request(Op.WRITE, (Tag.PATH, path), *((Tag[k.upper()], v) for k, v in options.items()))
        room = WINDOW
        while data:
            while not room:
                kind, flags, stream, payload = self.next(ch)
                if kind != Type.CREDIT:
                    self.waiting.setdefault(ch, []).insert(0, (kind, flags, stream, payload))
                    return self.reply(ch)[0]
                room += struct.unpack("<I", payload)[0]
            piece, data = data[: min(room, 32000)], data[min(room, 32000) :]
            room -= len(piece)
            self.send(Type.DATA, ch, piece)
        self.send(Type.EOF, ch)
        return self.reply(ch)[0]

    def reset(self) -> None:
        self.call(Op.RESET)


class Hub(Frames):
    """A hub process, and the base of the machine that most tests want."""

    def __init__(self, keeper: Path | None = None, user: str | None = None, scratch: Path | None = None, stderr: Any = None,
                 args: list[str] | None = None, mode: str = "") -> None:  # fmt: skip
        ours, theirs = socket.socketpair()
        argv = [str(keeper or build()), "hub", "--fd", str(theirs.fileno()), "--client", str(os.getpid()), *(args or [])]
        self.process = subprocess.Popen(argv, pass_fds=[theirs.fileno()], user=user, group=user, extra_groups=[] if user else None, stderr=stderr)
        theirs.close()
        super().__init__(ours)
        self.count = 0
        self.creating: set[int] = set()
        self.streams: dict[int, int] = {}
        self.user = user
        self.mode = mode
        self.scratch = scratch

    def __enter__(self) -> Hub:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()

    def close(self) -> None:
        self.sock.close()
        try:
            self.process.wait(10)
        finally:
            self.process.kill()
            self.process.wait()

    def base(self) -> list[tuple[Tag, Any]]:
        """`/` a skeleton with links and a small /etc, /usr the machine's own."""
        assert self.scratch is not None
        root = self.scratch / "base"
        if not root.exists():
            for name in ("etc", "usr", "root", "home", "var/tmp", "run"):
                (root / name).mkdir(parents=True)
            (root / "var/tmp").chmod(0o1777)
            for name in ("bin", "sbin", "lib", "lib64", "lib32"):
                if os.path.islink("/" + name):
                    (root / name).symlink_to(os.readlink("/" + name))
            for name in ("passwd", "group", "ld.so.cache", "nsswitch.conf", "alternatives"):
                source = Path("/etc") / name
                if source.is_dir():
                    shutil.copytree(source, root / "etc" / name, symlinks=True)
                elif source.exists():
                    shutil.copy(source, root / "etc" / name)
            if self.user:
                subprocess.run(["chown", "-R", f"{self.user}:{self.user}", root], check=True)
        fields: list[tuple[Tag, Any]] = [(Tag.ROOT, str(root)), (Tag.OVERLAY, "/usr=/usr")]
        prefix = os.path.realpath(sys.base_prefix)
        if not prefix.startswith("/usr") and self.user is None:
            fields.append((Tag.BIND, f"{prefix}={prefix}"))
        return fields

    def create_begin(self, *more: tuple[Tag, Any], name: str | None = None, base: list[tuple[Tag, Any]] | None = None) -> int:
        self.count += 1
        fields = self.base() if base is None else base
        channel = self.request(Op.HUB_CREATE, (Tag.MEMBER, name or f"m{self.count}"), (Tag.HOSTNAME, "sandbox"), (Tag.MODE, self.mode), *fields, *more)
        self.creating.add(channel)
        return channel

    def frame(self) -> tuple[int, int, int, int, bytes]:
        got = super().frame()
        if got[0] == Type.REPLY and got[3] in self.creating:  # descriptors come in the order of these answers
            self.streams[got[3]] = self.fds.pop(0)
        return got

    def create_end(self, channel: int) -> Keeper:
        self.created, _ = self.reply(channel)
        self.creating.remove(channel)
        return Keeper(socket.socket(fileno=self.streams.pop(channel)))

    def create(self, *more: tuple[Tag, Any], **options: Any) -> Keeper:
        return self.create_end(self.create_begin(*more, **options))
