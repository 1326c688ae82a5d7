"""The hub's client: descriptors with their answers, cancelled creations, the hub's death; over a hub driven by hand
and over a real one."""

from __future__ import annotations

import array
import asyncio
import contextlib
import os
import signal
import socket
from pathlib import Path

import pytest

from rlsandbox.errors import ProvisionError, UnsupportedError
from rlsandbox.keeper.build import keeper_binary
from rlsandbox.keeper.connection import KeeperFailure
from rlsandbox.keeper.frames import encode_fields, encode_message
from rlsandbox.keeper.hubclient import HubClient
from rlsandbox.keeper.wire import Op, Tag, Type
from tests.unit.keeper.peer import Peer


def pair() -> tuple[HubClient, Peer]:
    mine, theirs = socket.socketpair()
    return HubClient(None, mine), Peer(theirs)


def made(peer: Peer, channel: int, name: bytes) -> None:
    """Answer a CREATE with a socket whose other end has *name* in it."""
    ours, theirs = socket.socketpair()
    ours.send(name)
    frame = encode_message(
        Type.REPLY, channel, encode_fields({"mode": "overlay", "fact": [f"n={name.decode()}"]})
    )
    rights = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", [theirs.fileno()]))]
    sent = peer.sock.sendmsg([frame[:1]], rights)
    assert sent == 1
    peer.sock.send(frame[1:])
    ours.close()
    theirs.close()


def fds() -> set[str]:
    """What is open, by number and object: others' may be closed meanwhile, when the collector comes by."""
    found = set()
    for fd in os.listdir("/proc/self/fd"):
        with contextlib.suppress(FileNotFoundError):  # the listing's own
            found.add(f"{fd} {os.readlink(f'/proc/self/fd/{fd}')}")
    return found


async def test_sockets_belong_to_their_answers() -> None:
    hub, peer = pair()
    tasks = [asyncio.create_task(hub.create(f"m{i}", pids=i)) for i in range(4)]
    channels = {}
    for _ in tasks:
        channel, fields = await peer.request()
        assert fields.int(Tag.OP) == Op.HUB_CREATE
        channels[fields.text(Tag.MEMBER)] = channel
    other = asyncio.create_task(hub.dispose("x"))
    channel, _ = await peer.request()
    await peer.say(Type.FAIL, channels["m2"], errno=12, what="make it")
    for name in ("m3", "m0", "m1"):
        made(peer, channels[name], name.encode())
    await peer.say(Type.REPLY, channel)
    await other
    for name, i in (("m0", 0), ("m1", 1), ("m3", 3)):
        sock, fields = await tasks[i]
        assert sock.recv(10) == name.encode()
        assert fields.text(Tag.MODE) == "overlay"
        sock.close()
    with pytest.raises(KeeperFailure, match="make it: Cannot allocate"):
        await tasks[2]
    await hub.aclose()


async def test_a_cancelled_creation_is_disposed_of() -> None:
    hub, peer = pair()
    before = fds()
    task = asyncio.create_task(hub.create("m"))
    channel, _ = await peer.request()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    made(peer, channel, b"m")
    channel, fields = await peer.request()
    assert (fields.int(Tag.OP), fields.text(Tag.MEMBER)) == (Op.HUB_DISPOSE, "m")
    await peer.say(Type.REPLY, channel)
    assert fds() <= before
    await hub.aclose()


async def test_a_cancelled_creation_that_fails_is_nothing() -> None:
    hub, peer = pair()
    task = asyncio.create_task(hub.create("m"))
    channel, _ = await peer.request()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    await peer.say(Type.FAIL, channel, errno=12)
    assert await peer.quiet()
    await hub.aclose()


async def test_death_ends_everything() -> None:
    hub, peer = pair()
    tasks = [asyncio.create_task(one) for one in (hub.create("m"), hub.members(), hub.probe(), hub.layers())]
    for _ in tasks:
        await peer.request()
    peer.close()
    for ended in await asyncio.wait_for(asyncio.gather(*tasks, return_exceptions=True), 1):
        assert isinstance(ended, ProvisionError)
        assert ended.kind == "hub_died"
    assert hub.lost.done()
    with pytest.raises(ProvisionError):
        await hub.sweep()
    await hub.aclose()


async def test_a_hub_that_cannot_says_so_for_all() -> None:
    hub, peer = pair()
    task = asyncio.create_task(hub.members())
    await peer.request()
    await peer.say(Type.FAIL, 0, errno=28, what="make a user namespace")
    with pytest.raises(ProvisionError, match="it cannot make a user namespace: No space left"):
        await task
    assert "protocol" not in str(hub.lost.result())
    await hub.aclose()


async def test_answers() -> None:
    hub, peer = pair()

    async def serve() -> None:
        for fields in (
            {"fact": ["overlay\tok", "userns\tEPERM"]},
            {"layer": ["a\t10\t1", "b\t20\t2"]},
            {"member": ["m1", "m2"]},
            {"count": 3},
        ):
            channel, _ = await peer.request()
            await peer.say(Type.REPLY, channel, **fields)

    serving = asyncio.create_task(serve())
    assert await hub.probe() == {"overlay": "ok", "userns": "EPERM"}
    assert await hub.layers() == {"a": (10, 1), "b": (20, 2)}
    assert await hub.members() == ["m1", "m2"]
    assert await hub.sweep() == 3
    await serving
    await hub.aclose()


async def test_a_large_request_does_not_block() -> None:
    hub, peer = pair()
    task = asyncio.create_task(hub.create("m", bind=[f"/{i}" * 50 + "=/x" for i in range(20_000)]))
    await asyncio.sleep(0.02)  # more than the socket holds: the loop is free all the same
    channel, fields = await peer.request()
    assert len(fields.texts(Tag.BIND)) == 20_000
    made(peer, channel, b"m")
    sock, _ = await task
    sock.close()
    await hub.aclose()


async def test_a_socket_that_does_not_come_is_a_lie() -> None:
    hub, peer = pair()
    task = asyncio.create_task(hub.create("m"))
    channel, _ = await peer.request()
    await peer.say(Type.REPLY, channel, mode="overlay")
    with pytest.raises(ProvisionError, match="broke the protocol"):
        await task
    await hub.aclose()


async def test_programs_that_are_no_hub(tmp_path: Path) -> None:
    with pytest.raises(ProvisionError, match="could not be started"):
        await HubClient.start(tmp_path / "missing")
    with pytest.raises(ProvisionError):
        await HubClient.start("/bin/false")
    silent = tmp_path / "silent"
    silent.write_text("#!/bin/sh\nexec sleep 60\n")
    silent.chmod(0o755)
    before = fds()
    with pytest.raises(ProvisionError, match="did not answer"):
        await HubClient.start(silent, timeout=0.2)
    assert fds() <= before


# -- a real hub -------------------------------------------------------------------------------------


async def test_real_hub() -> None:
    hub = await HubClient.start(keeper_binary())
    assert hub.process is not None
    pid = hub.process.pid
    assert await hub.members() == []
    assert isinstance(await hub.probe(), dict)
    await hub.dispose("no-such-member")
    if os.geteuid() == 0:
        sockets = [name for name in _open(pid) if name.startswith("socket:") and name in _open("self")]
        assert sockets == []  # none of ours but its own end, which we have closed
        env = Path(f"/proc/{pid}/environ").read_bytes()
        assert env.startswith(b"PATH=")
        assert env.count(b"\0") == 1
    else:  # it is not dumpable: not even its own user looks inside
        with pytest.raises(PermissionError):
            _open(pid)
    await hub.aclose()
    assert hub.process.returncode is not None
    await hub.aclose()


def _open(pid: int | str) -> set[str]:
    found = set()
    for number in os.listdir(f"/proc/{pid}/fd"):
        with contextlib.suppress(FileNotFoundError):
            found.add(os.readlink(f"/proc/{pid}/fd/{number}"))
    return found


async def test_real_hub_killed() -> None:
    hub = await HubClient.start(keeper_binary())
    assert hub.process is not None
    os.kill(hub.process.pid, signal.SIGKILL)
    error = await asyncio.wait_for(asyncio.shield(hub.lost), 1)
    assert isinstance(error, ProvisionError)
    with pytest.raises(ProvisionError):
        await hub.members()
    await hub.aclose()


async def test_version_of_another_hub(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("rlsandbox.keeper.hubclient.VERSION", 99)
    with pytest.raises((UnsupportedError, ProvisionError)):
        await HubClient.start(keeper_binary())
