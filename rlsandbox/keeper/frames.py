"""Frames of the keeper's protocol as bytes, and back. No I/O, no clock: see docs/protocol.md.

What comes from the other side is never trusted: a length out of bounds, a type nobody knows, a message
that grows past :data:`~.wire.MAX_MESSAGE` or a field list that does not add up is a
:class:`ProtocolError`, and the stream ends there.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

from .wire import HEADER, MAX_FRAME, MAX_MESSAGE, Flag, Tag, Type

MAX_PAYLOAD = MAX_FRAME - (HEADER - 4)
_HEAD = struct.Struct("<IBBHII")
_FIELD = struct.Struct("<HI")
_U32 = struct.Struct("<I")
_U64 = struct.Struct("<Q")
_ENTRY = struct.Struct("<cIIIQQI")
_TYPES = frozenset(int(t) for t in Type)
_MORE = int(Flag.MORE)

U64_TAGS = frozenset(
    {
        Tag.DURATION_NS,
        Tag.STDOUT_SIZE,
        Tag.STDERR_SIZE,
        Tag.OUTPUT_LIMIT,
        Tag.TIMEOUT_MS,
        Tag.OFFSET,
        Tag.LENGTH,
        Tag.SIZE,
        Tag.COUNT,
        Tag.BYTES,
        Tag.LIMIT,
        Tag.UPPER_BYTES,
        Tag.UPPER_INODES,
        Tag.MEMORY_BYTES,
    }
)
U32_TAGS = frozenset(
    {
        Tag.OP,
        Tag.VERSION,
        Tag.ERRNO,
        Tag.PID,
        Tag.STATUS,
        Tag.FLAGS,
        Tag.STDIN,
        Tag.CONTROL,
        Tag.UMASK,
        Tag.FILE_MODE,
        Tag.CPU_MILLI,
        Tag.PIDS,
        Tag.NOFILE,
    }
)


class ProtocolError(Exception):
    """The other side broke the protocol; its stream cannot be read on."""


class Frame(NamedTuple):
    type: int
    flags: int
    stream: int
    channel: int
    payload: bytes


_new = tuple.__new__  # what Frame(...) comes to, without a call of Python's for each frame


def encode(type_: int, channel: int, payload: bytes = b"", *, stream: int = 0, flags: int = 0) -> bytes:
    """One frame. *payload* must fit."""
    if len(payload) > MAX_PAYLOAD:
        raise ValueError(f"{len(payload)} bytes do not fit one frame")
    return _HEAD.pack(HEADER - 4 + len(payload), type_, flags, stream, channel, 0) + payload


def encode_message(type_: int, channel: int, payload: bytes) -> bytes:
    """A message of any allowed size, as one frame or several with MORE."""
    if len(payload) <= MAX_PAYLOAD:
        return _HEAD.pack(HEADER - 4 + len(payload), type_, 0, 0, channel, 0) + payload
    if len(payload) > MAX_MESSAGE:
        raise ValueError(f"a message of {len(payload)} bytes is over the protocol's {MAX_MESSAGE}")
    cuts = range(0, len(payload), MAX_PAYLOAD)
    return b"".join(
        encode(
            type_,
            channel,
            payload[at : at + MAX_PAYLOAD],
            flags=_MORE if at + MAX_PAYLOAD < len(payload) else 0,
        )
        for at in cuts
    )


def encode_data(channel: int, stream: int, data: memoryview) -> list[bytes]:
    """DATA frames for *data*."""
    return [
        encode(Type.DATA, channel, bytes(data[at : at + MAX_PAYLOAD]), stream=stream)
        for at in range(0, len(data), MAX_PAYLOAD)
    ]


def encode_credit(channel: int, stream: int, amount: int) -> bytes:
    return encode(Type.CREDIT, channel, _U32.pack(amount), stream=stream)


def decode_credit(payload: bytes) -> int:
    if len(payload) != 4:
        raise ProtocolError(f"a CREDIT of {len(payload)} bytes")
    value: int = _U32.unpack(payload)[0]
    return value


class Decoder:
    """Bytes in, frames out, however the bytes were cut.

    Messages that came as several frames with MORE are given as one; DATA is given as it comes. When the
    stream is broken, :attr:`broken` says how; the frames before the break are still given.
    """

    def __init__(self) -> None:
        self.broken: ProtocolError | None = None
        self._buffer = b""
        self._parts: dict[tuple[int, int], list[bytes]] = {}
        self._held = 0

    @property
    def at_boundary(self) -> bool:
        """Whether every byte that was fed belongs to a frame that was given."""
        return not self._buffer and not self._parts

    def feed(self, data: bytes) -> list[Frame]:
        if self.broken is not None:
            raise self.broken
        frames: list[Frame] = []
        try:
            self._feed(data, frames)
        except ProtocolError as error:
            self.broken = error
        return frames

    def _feed(self, data: bytes, frames: list[Frame]) -> None:
        if self._buffer:
            data = self._buffer + data
            self._buffer = b""
        at, end = 0, len(data)
        unpack = _HEAD.unpack_from
        while end - at >= HEADER:
            length, type_, flags, stream, channel, _ = unpack(data, at)
            if not HEADER - 4 <= length <= MAX_FRAME:
                raise ProtocolError(f"a frame of {length} bytes")
            if type_ not in _TYPES:
                raise ProtocolError(f"a frame of unknown type {type_:#x}")
            stop = at + 4 + length
            if stop > end:
                break
            payload = data[at + HEADER : stop]
            at = stop
            if type_ == 0x21:
                frames.append(_new(Frame, (type_, flags, stream, channel, payload)))
            elif flags & _MORE or (type_, channel) in self._parts:
                whole = self._gather(type_, flags, channel, payload)
                if whole is not None:
                    frames.append(Frame(type_, flags, stream, channel, whole))
            else:
                frames.append(_new(Frame, (type_, flags, stream, channel, payload)))
        if at < end:
            if at + 4 <= end and not HEADER - 4 <= _U32.unpack_from(data, at)[0] <= MAX_FRAME:
                raise ProtocolError(f"a frame of {_U32.unpack_from(data, at)[0]} bytes")
            self._buffer = data[at:]

    def _gather(self, type_: int, flags: int, channel: int, payload: bytes) -> bytes | None:
        parts = self._parts.setdefault((type_, channel), [])
        parts.append(payload)
        self._held += len(payload)
        # One bound for all that is half-received: many channels cannot add up to more.
        if self._held > MAX_MESSAGE:
            raise ProtocolError(f"messages of more than {MAX_MESSAGE} bytes")
        if flags & _MORE:
            return None
        del self._parts[(type_, channel)]
        whole = b"".join(parts)
        self._held -= len(whole)
        return whole


class Fields(dict[int, list[bytes]]):
    """The fields of a message; unknown tags are kept and ignored."""

    @classmethod
    def decode(cls, payload: bytes) -> Fields:
        fields = cls()
        at, end = 0, len(payload)
        while at < end:
            if end - at < 6:
                raise ProtocolError("a field is cut off")
            tag, length = _FIELD.unpack_from(payload, at)
            at += 6
            if length > end - at:
                raise ProtocolError(f"a field of {length} bytes where {end - at} are left")
            fields.setdefault(tag, []).append(payload[at : at + length])
            at += length
        return fields

    def int(self, tag: Tag, default: int = 0) -> int:
        values = self.get(tag)
        if not values:
            return default
        if len(values[0]) not in (4, 8):
            raise ProtocolError(f"{tag.name} of {len(values[0])} bytes is no integer")
        return int.from_bytes(values[0], "little")

    def text(self, tag: Tag, default: str = "") -> str:
        values = self.get(tag)
        return values[0].decode("utf-8", "surrogateescape") if values else default

    def texts(self, tag: Tag) -> list[str]:
        return [value.decode("utf-8", "surrogateescape") for value in self.get(tag, ())]


def field(tag: int, value: bytes) -> bytes:
    return _FIELD.pack(tag, len(value)) + value


def encode_fields(fields: Mapping[str, Any]) -> bytes:
    """Fields by the lower-case names of :class:`~.wire.Tag`.

    Integers become u32 or u64 by tag; strings and paths UTF-8 (surrogates escaped); lists repeat the tag;
    None is left out.
    """
    out: list[bytes] = []
    for name, value in fields.items():
        if value is None:
            continue
        tag = _BY_NAME[name]
        if isinstance(value, (str, bytes, int)):
            out.append(field(tag, _value(tag, value)))
        else:
            out.extend(field(tag, _value(tag, item)) for item in value)
    return b"".join(out)


_BY_NAME: dict[str, Tag] = {tag.name.lower(): tag for tag in Tag}


def _value(tag: Tag, value: str | bytes | int) -> bytes:
    if isinstance(value, str):
        return value.encode("utf-8", "surrogateescape")
    if isinstance(value, bytes):
        return value
    if tag in U64_TAGS:
        return _U64.pack(value)
    if tag in U32_TAGS:
        return _U32.pack(value)
    raise ValueError(f"{tag.name} takes text, not {value!r}")


@dataclass(frozen=True)
class Entry:
    """One path as LIST, STAT and CHANGES tell it. *kind*: ``f d l o``, or ``x`` for a deletion."""

    kind: str
    mode: int
    uid: int
    gid: int
    size: int
    mtime_ns: int
    name: bytes

    def encode(self) -> bytes:
        head = (self.kind.encode(), self.mode, self.uid, self.gid, self.size, self.mtime_ns, len(self.name))
        return _ENTRY.pack(*head) + self.name


def decode_entries(chunks: Iterable[bytes]) -> Iterator[Entry]:
    """Entries from DATA that may be cut anywhere."""
    rest = b""
    for chunk in chunks:
        data = rest + chunk
        at = 0
        while len(data) - at >= _ENTRY.size:
            kind, mode, uid, gid, size, mtime, length = _ENTRY.unpack_from(data, at)
            if kind not in (b"f", b"d", b"l", b"o", b"x") or length > MAX_FRAME * 4:
                raise ProtocolError(f"an entry of kind {kind!r} with a name of {length} bytes")
            stop = at + _ENTRY.size + length
            if stop > len(data):
                break
            yield Entry(kind.decode(), mode, uid, gid, size, mtime, data[at + _ENTRY.size : stop])
            at = stop
        rest = data[at:]
    if rest:
        raise ProtocolError("an entry is cut off")
