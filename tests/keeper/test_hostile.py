"""A client that speaks the protocol to do harm: wrong lengths, wrong order, counts, descriptors. Its own stream ends at
worst; the hub and its other sandboxes go on, and nothing stays of what it had."""

from __future__ import annotations

import array
import os
import socket
import struct
import time
from typing import Any

import pytest
from rawclient import Hub, Keeper, KeeperError, tlv
from test_fuzz import at_rest, settles

from rlsandbox.keeper.wire import Op, Tag, Type


def frame(kind: int, payload: bytes = b"", flags: int = 0, stream: int = 0, channel: int = 0, length: int | None = None, reserved: int = 0) -> bytes:
    return struct.pack("<IBBHII", len(payload) + 12 if length is None else length, kind, flags, stream, channel, reserved) + payload


def request(*fields: tuple[Tag, Any], channel: int = 1) -> bytes:
    return frame(Type.REQ, tlv(*fields), channel=channel)


def sleep(channel: int) -> bytes:
    return request((Tag.OP, int(Op.SPAWN)), (Tag.ARG, "sleep"), (Tag.ARG, "100"), (Tag.ENV, "PATH=/usr/bin:/bin"), channel=channel)


LONG = 120
HUGE = b"\xff" * 4
# What is sent, and whether the keeper has to close the stream.
ATTACKS: dict[str, tuple[bytes, bool]] = {
    "length 0": (frame(Type.REQ, length=0), True),
    "length 11": (frame(Type.REQ, length=11), True),
    "length over the limit": (frame(Type.REQ, length=32769), True),
    "length 4 GiB": (frame(Type.REQ, length=0xFFFFFFFF), True),
    "an unknown type": (frame(0x77), True),
    "the keeper's own type": (frame(Type.REPLY, channel=3), True),
    "reserved bits": (frame(Type.PING, reserved=9), True),
    "a second hello": (frame(Type.HELLO), True),
    "channel 0": (request((Tag.OP, int(Op.SPAWN)), channel=0), True),
    "a channel in use": (sleep(1) + sleep(1), True),
    "credit without end": (sleep(1) + frame(Type.CREDIT, HUGE, stream=1, channel=1) * 9, True),
    "signal 200": (sleep(1) + frame(Type.SIGNAL, b"\xc8", channel=1), True),
    "a message without end": (frame(Type.REQ, b"\0" * 32756, flags=1, channel=1) * 600, True),
    "a field longer than its message": (request() + frame(Type.REQ, struct.pack("<HI", Tag.OP, 0xFFFFFFFF) + b"abcd", channel=2), True),
    "data of no channel": (frame(Type.DATA, b"x", channel=5), False),
    "credit of no channel": (frame(Type.CREDIT, HUGE, stream=1, channel=5), False),
    "nothing to spawn": (request((Tag.OP, int(Op.SPAWN))), False),
    "2000 channels": (b"".join(sleep(n) for n in range(1, 2001)), False),
    "20000 pings": (frame(Type.PING, b"p" * 64) * 20000, False),
    "4000 arguments": (request((Tag.OP, int(Op.SPAWN)), *[(Tag.ARG, "x")] * 4000), False),
    "an offset of 2^63": (request((Tag.OP, int(Op.WRITE)), (Tag.PATH, "/tmp/x"), (Tag.OFFSET, (1 << 63) + 5)) + frame(Type.EOF, channel=1), False),
    "an offset of 2^64 - 1": (request((Tag.OP, int(Op.READ)), (Tag.PATH, "/usr/bin/env"), (Tag.OFFSET, (1 << 64) - 1), (Tag.LENGTH, (1 << 64) - 1)), False),
}


def settled(hub: Hub) -> tuple[Keeper, int]:
    """A bystander, and how many descriptors the hub has once one more sandbox like it stands ready."""
    for name in ("first", "second"):
        hub.create(name=name)
        hub.call(Op.HUB_DISPOSE, (Tag.MEMBER, name))
    return hub.create(name="m1"), at_rest(hub)


def ends(victim: Keeper, closed: bool) -> bool:
    """Whether the keeper closes the stream, as it has to if *closed*; what it says before is taken."""
    victim.sock.settimeout(LONG if closed else 0.3)
    try:
        while victim.sock.recv(1 << 16):
            pass
    except TimeoutError:
        return False
    except OSError:
        pass
    return True


def only_the_first_is_left(hub: Hub) -> None:
    for _ in range(LONG * 50):
        if hub.call(Op.HUB_LIST)[0][Tag.MEMBER] == ["m1"]:
            return
        time.sleep(0.02)
    raise AssertionError(hub.call(Op.HUB_LIST)[0])


def test_a_client_of_a_keeper(hub: Hub) -> None:
    bystander, before = settled(hub)
    for name, (data, closed) in ATTACKS.items():
        victim = hub.create()
        victim.sock.settimeout(LONG)
        try:
            victim.sock.sendall(data)
        except OSError:
            assert closed, name
        assert ends(victim, closed) or not closed, name
        victim.sock.close()
        assert bystander.sh("echo on").stdout == b"on\n", name
        only_the_first_is_left(hub)
    settles(hub, before)


def test_descriptors_that_nobody_asked_for(hub: Hub) -> None:
    keeper, before = settled(hub)
    read, write = os.pipe()
    sent = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", [read, write] * 50))]
    for sock in (keeper.sock, hub.sock):
        for _ in range(20):
            sock.sendmsg([frame(Type.PING)], sent)
    os.close(write)
    assert keeper.sh("echo on").stdout == b"on\n"
    hub.call(Op.HUB_LIST)
    settles(hub, before)
    assert os.read(read, 1) == b"", "somebody holds the other end of the pipe"
    os.close(read)


def test_a_client_of_the_hub(hub: Hub) -> None:
    bystander, before = settled(hub)
    base = hub.base()
    for fields in (
        [(Tag.MEMBER, "../../x"), *base],
        [(Tag.MEMBER, "m1"), *base],
        [(Tag.MEMBER, "a" * 200), *base],
        [(Tag.MEMBER, "q"), (Tag.ROOT, "/none")],
        [(Tag.MEMBER, "q"), *[(Tag.ROOT, "/")] * 300],
        [(Tag.MEMBER, "q"), *base, *[(Tag.OVERLAY, f"/x{n}=/usr") for n in range(200)]],
        [(Tag.MEMBER, "q"), *base, (Tag.UPPER, "x" * 5000)],
        [(Tag.MEMBER, "q"), *base, (Tag.UPPER, "disk:/proc/self/fd")],
    ):
        with pytest.raises(KeeperError):
            hub.call(Op.HUB_CREATE, *fields)
    for op, more in ((Op.HUB_GIVE_LAYER, [(Tag.MEMBER, "m1")]), (Op.HUB_GIVE_LAYER, [(Tag.MEMBER, "no")])):
        with pytest.raises(KeeperError):
            hub.call(op, (Tag.LAYER, "none"), *more)
    with pytest.raises(KeeperError):
        hub.call(Op.SPAWN, (Tag.ARG, "true"))
    only_the_first_is_left(hub)
    assert bystander.sh("echo on").stdout == b"on\n"
    settles(hub, before)
