"""Records of a link to a keeper (``src/link.h``), and what of a stream the other side has not confirmed."""

from __future__ import annotations

import struct
from collections import deque
from enum import IntEnum

from ..errors import SandboxDiedError

HEAD = struct.Struct("<IB3xQ")
MAX_RECORD = 32768


class Kind(IntEnum):
    """Of records."""

    ATTACH = 1
    ATTACHED = 2
    REFUSED = 3
    BYTES = 4
    CONFIRM = 5
    PING = 6
    PONG = 7
    LEAVE = 8
    ENDED = 9


def record(kind: int, payload: bytes, confirmed: int) -> bytes:
    return HEAD.pack(len(payload), kind, confirmed) + payload


def take(buffer: bytearray) -> tuple[int, int, bytes] | None:
    """The first whole record, taken off: its kind, what it confirms, its payload.

    Raises:
        SandboxDiedError: what is there is no record.
    """
    if len(buffer) < HEAD.size:
        return None
    length, kind, confirmed = HEAD.unpack_from(buffer)
    if length > MAX_RECORD:
        raise SandboxDiedError(f"its keeper broke the protocol: a record of {length} bytes")
    if len(buffer) < HEAD.size + length:
        return None
    payload = bytes(buffer[HEAD.size : HEAD.size + length])
    del buffer[: HEAD.size + length]
    return kind, confirmed, payload


class Outbox:
    """Bytes for the other side, kept until it confirms them. Offsets count from the begin of the stream."""

    def __init__(self) -> None:
        self.base = self.sent = self.end = 0
        """All before ``base`` is confirmed; all before ``sent`` has been sent on the present transport."""
        self.unsent = 0
        """How many records have not been sent on it."""
        self._kept: deque[bytes] = deque()
        """Records' payloads from ``base`` to ``end``; each was or will be one record."""

    def __bool__(self) -> bool:
        """Whether anything is kept."""
        return bool(self._kept)

    @property
    def size(self) -> int:
        """Bytes that are not confirmed."""
        return self.end - self.base

    def put(self, data: bytes) -> None:
        for at in range(0, len(data), MAX_RECORD):
            self._kept.append(data[at : at + MAX_RECORD])
            self.unsent += 1
        self.end += len(data)

    def pop(self, limit: int) -> list[bytes]:
        """The next payloads to be sent, of *limit* bytes or little more."""
        out: list[bytes] = []
        size = 0
        while self.unsent and size < limit:
            payload = self._kept[len(self._kept) - self.unsent]
            self.unsent -= 1
            size += len(payload)
            out.append(payload)
        self.sent += size
        return out

    def confirm(self, to: int) -> None:
        """The other side has all up to here. A record may have been taken in part: the rest stays."""
        while self.base < to:
            first = self._kept[0]
            step = min(len(first), to - self.base)
            if step == len(first):
                self._kept.popleft()
            else:
                self._kept[0] = first[step:]
            self.base += step

    def rewind(self, taken: int) -> None:
        """Another transport: the other side has *taken* so much, and all else is sent again."""
        self.confirm(taken)
        self.sent, self.unsent = self.base, len(self._kept)

    def clear(self) -> None:
        self._kept.clear()
        self.unsent = 0
