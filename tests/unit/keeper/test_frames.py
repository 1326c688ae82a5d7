"""The protocol's bytes: recorded ones, round trips, any cut, and what must be refused."""

from __future__ import annotations

import contextlib
import struct
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rlsandbox.keeper.channel import Exit
from rlsandbox.keeper.frames import (
    MAX_PAYLOAD,
    U32_TAGS,
    U64_TAGS,
    Decoder,
    Entry,
    Fields,
    Frame,
    ProtocolError,
    decode_credit,
    decode_entries,
    encode,
    encode_credit,
    encode_data,
    encode_fields,
    encode_message,
)
from rlsandbox.keeper.wire import MAX_FRAME, MAX_MESSAGE, VERSION, ExitFlag, Flag, Op, Tag, Type
from tests.unit.keeper import recorded

PING = bytes.fromhex("1000000003000000000000000000000061626364")
REQ = bytes.fromhex(
    "1c000000"
    "10"
    "00"
    "0000"
    "07000000"
    "00000000"  # 28 bytes follow; REQ on channel 7
    "0100"
    "04000000"
    "02000000"  # op READ
    "2800"
    "00000000"  # path, empty
)
EXIT = bytes.fromhex(
    "20000000"
    "24"
    "00"
    "0000"
    "05000000"
    "00000000"  # EXIT on channel 5
    "0c00"
    "04000000"
    "00030000"  # status 0x300
    "0d00"
    "04000000"
    "01000000"  # timed out
)


def test_bytes_by_hand() -> None:
    assert encode(Type.PING, 0, b"abcd") == PING
    assert encode_message(Type.REQ, 7, encode_fields({"op": Op.READ, "path": ""})) == REQ
    frame = Decoder().feed(EXIT)[0]
    assert (frame.type, frame.channel) == (Type.EXIT, 5)
    end = Exit.decode(frame.payload)
    assert (end.status, end.flags, end.exit_code) == (0x300, ExitFlag.TIMED_OUT, 137)


def test_recorded_conversation() -> None:
    """What a keeper said is understood, and what we said is what we would say today."""
    said = [(f.type, f.channel, f.payload) for f in Decoder().feed(recorded.KEEPER)]
    by_type = {(t, c): Fields.decode(p) for t, c, p in said if t in (Type.WELCOME, Type.REPLY, Type.FAIL)}
    assert by_type[Type.WELCOME, 0].text(Tag.MEMBER) == "recorded"
    assert [p for t, c, p in said if (t, c) == (Type.DATA, 1)] == [b"hello \xff\n", b"err\n"]
    end = next(Exit.decode(p) for t, c, p in said if (t, c) == (Type.EXIT, 1))
    assert (end.exit_code, end.stdout_size, end.stderr_size) == (3, 8, 4)
    assert by_type[Type.FAIL, 2].int(Tag.ERRNO) == 2
    entry = next(iter(decode_entries([p for t, c, p in said if (t, c) == (Type.DATA, 4)])))
    assert (entry.kind, entry.mode & 0o7777, entry.size) == ("f", 0o640, 7)
    spawn = {
        "op": Op.SPAWN,
        "arg": ["/bin/sh", "-c", "cat; echo err >&2; exit 3"],
        "cwd": "/",
        "stdin": 1,
        "output_limit": 1024,
        "timeout_ms": 5000,
    }
    asked = Decoder().feed(recorded.CLIENT)
    assert asked[0].payload == encode_fields({"version": VERSION, "token": "t0ken"})
    assert asked[1].payload == encode_fields(spawn) + encode_fields({"env": ["PATH=/usr/bin:/bin"]})


@pytest.mark.parametrize(
    ("status", "flags", "code", "signal"),
    [
        (0, 0, 0, None),
        (0x300, 0, 3, None),
        (9, 0, 137, 9),
        (0x8B, 0, 139, 11),
        (9, 1, 137, 9),
        (0x100, 2, 137, None),
    ],
)
def test_exit_codes(status: int, flags: int, code: int, signal: int | None) -> None:
    end = Exit(status, ExitFlag(flags), 0, 0, 0)
    assert (end.exit_code, end.signal) == (code, signal)


FRAMES = st.builds(
    Frame,
    type=st.sampled_from([int(t) for t in Type]),
    flags=st.sampled_from([0, int(Flag.TAIL)]),
    stream=st.integers(0, 4),
    channel=st.integers(0, 2**32 - 1),
    payload=st.binary(max_size=300) | st.just(b"x" * MAX_PAYLOAD),
)


def _bytes(frame: Frame) -> bytes:
    return encode(frame.type, frame.channel, frame.payload, stream=frame.stream, flags=frame.flags)


@given(st.lists(FRAMES, max_size=8), st.data())
def test_any_cut_gives_the_same_frames(frames: list[Frame], data: st.DataObject) -> None:
    stream = b"".join(map(_bytes, frames))
    cuts = sorted(data.draw(st.lists(st.integers(0, len(stream)), max_size=12)))
    decoder, got = Decoder(), []
    for start, stop in zip([0, *cuts], [*cuts, len(stream)], strict=True):
        got += decoder.feed(stream[start:stop])
    assert got == frames
    assert decoder.at_boundary
    assert decoder.broken is None


def test_byte_by_byte() -> None:
    decoder = Decoder()
    assert [f for b in PING + EXIT for f in decoder.feed(bytes([b]))] == Decoder().feed(PING + EXIT)


@given(st.binary(max_size=200_000), st.integers(1, 9))
def test_messages_of_several_frames(payload: bytes, channel: int) -> None:
    raw = encode_message(Type.REPLY, channel, payload)
    other = encode(Type.DATA, channel + 1, b"between", stream=1)
    first, rest = raw[: MAX_FRAME + 4], raw[MAX_FRAME + 4 :]
    decoder = Decoder()
    got = decoder.feed(first + other + rest)
    assert [f.payload for f in got if f.type == Type.REPLY] == [payload]
    assert [f.payload for f in got if f.type == Type.DATA] == [b"between"]


def test_messages_of_several_channels_interleave() -> None:
    a = encode(Type.REPLY, 1, b"a1", flags=1), encode(Type.REPLY, 1, b"a2")
    b = encode(Type.REPLY, 2, b"b1", flags=1), encode(Type.FAIL, 1, b"own"), encode(Type.REPLY, 2, b"b2")
    got = Decoder().feed(a[0] + b[0] + b[1] + a[1] + b[2])
    assert [(f.channel, f.payload) for f in got] == [(1, b"own"), (1, b"a1a2"), (2, b"b1b2")]


@pytest.mark.parametrize(
    "raw",
    [
        struct.pack("<IBBHII", 11, 3, 0, 0, 0, 0),
        struct.pack("<IBBHII", 0, 3, 0, 0, 0, 0),
        struct.pack("<IBBHII", MAX_FRAME + 1, 3, 0, 0, 0, 0),
        struct.pack("<IBBHII", 2**32 - 1, 3, 0, 0, 0, 0),
        struct.pack("<IBBHII", 12, 0x7F, 0, 0, 0, 0),
        struct.pack("<I", MAX_FRAME + 1),  # seen before the rest of the header
    ],
)
def test_broken_frames(raw: bytes) -> None:
    decoder = Decoder()
    assert len(decoder.feed(PING + raw)) == 1  # what came before is still given
    assert isinstance(decoder.broken, ProtocolError)
    with pytest.raises(ProtocolError):
        decoder.feed(PING)


def test_half_messages_are_bounded_together() -> None:
    decoder = Decoder()
    channels = MAX_MESSAGE // MAX_PAYLOAD + 2
    for channel in range(channels):
        assert decoder.broken is None
        decoder.feed(encode(Type.REPLY, channel, b"x" * MAX_PAYLOAD, flags=1))
        if decoder.broken is not None:
            break
    assert decoder.broken is not None


@given(st.binary(max_size=400))
def test_any_bytes_end_in_frames_or_an_error(raw: bytes) -> None:
    decoder = Decoder()
    for frame in decoder.feed(raw):
        for parse in (Fields.decode, Exit.decode, decode_credit, lambda p: list(decode_entries([p]))):
            with contextlib.suppress(ProtocolError):
                parse(frame.payload)


@given(st.binary(max_size=100))
def test_any_bytes_as_fields(raw: bytes) -> None:
    try:
        fields = Fields.decode(raw)
    except ProtocolError:
        return
    for tag in Tag:
        fields.texts(tag)
        try:
            fields.int(tag)
        except ProtocolError:
            assert len(fields[tag][0]) not in (4, 8)


def _values(tag: Tag) -> st.SearchStrategy[Any]:
    if tag in U32_TAGS:
        return st.integers(0, 2**32 - 1)
    if tag in U64_TAGS:
        return st.integers(0, 2**64 - 1)
    return st.text(max_size=20) | st.lists(st.text(max_size=9), min_size=1, max_size=3)


@given(st.fixed_dictionaries({}, optional={tag.name.lower(): _values(tag) for tag in Tag}))
@settings(max_examples=50)
def test_fields_round_trip(values: dict[str, Any]) -> None:
    fields = Fields.decode(encode_fields(values))
    assert len(fields) == len(values)
    for name, value in values.items():
        tag = Tag[name.upper()]
        if isinstance(value, int):
            assert fields.int(tag) == value
        else:
            assert fields.texts(tag) == ([value] if isinstance(value, str) else value)


def test_fields() -> None:
    assert encode_fields({"path": None}) == b""
    odd = b"\xff/x".decode("utf-8", "surrogateescape")
    assert Fields.decode(encode_fields({"path": odd})).text(Tag.PATH) == odd
    assert Fields.decode(b"\x99\x99\x00\x00\x00\x00").text(Tag.PATH, "none") == "none"  # unknown tags
    with pytest.raises(KeyError):
        encode_fields({"no_such_field": 1})
    with pytest.raises(ValueError, match="takes text"):
        encode_fields({"path": 1})


def test_data_and_credit() -> None:
    frames = Decoder().feed(b"".join(encode_data(3, 1, memoryview(b"x" * (MAX_PAYLOAD + 5)))))
    assert [(f.stream, len(f.payload)) for f in frames] == [(1, MAX_PAYLOAD), (1, 5)]
    assert decode_credit(Decoder().feed(encode_credit(3, 1, 70000))[0].payload) == 70000
    with pytest.raises(ValueError, match="do not fit"):
        encode(Type.DATA, 1, b"x" * (MAX_PAYLOAD + 1))
    with pytest.raises(ValueError, match="over the protocol"):
        encode_message(Type.REQ, 1, bytes(MAX_MESSAGE + 1))


ENTRIES = st.builds(
    Entry,
    kind=st.sampled_from("fdlox"),
    mode=st.integers(0, 0o7777),
    uid=st.integers(0, 2**32 - 1),
    gid=st.integers(0, 2**32 - 1),
    size=st.integers(0, 2**64 - 1),
    mtime_ns=st.integers(0, 2**64 - 1),
    name=st.binary(max_size=300),
)


@given(st.lists(ENTRIES, max_size=6), st.integers(1, 50))
def test_entries_round_trip_at_any_cut(entries: list[Entry], step: int) -> None:
    raw = b"".join(e.encode() for e in entries)
    assert list(decode_entries(raw[i : i + step] for i in range(0, len(raw), step))) == entries
    if raw:
        with pytest.raises(ProtocolError):
            list(decode_entries([raw[:-1]]))
