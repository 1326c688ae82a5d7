"""Mutated and cut-off frames: no crash, no hang, no descriptor left open."""

from __future__ import annotations

import os
import random
import shutil
import struct
import subprocess
import time
from pathlib import Path

import pytest
from rawclient import SRC, Hub, build, make_sanitized, tlv
from test_smoke import a_spare

from rlsandbox.keeper.wire import Op, Tag, Type

FRAMES = int(os.environ.get("RLS_FUZZ_FRAMES", "100000"))


@pytest.fixture(scope="module")
def fuzzer() -> Path:
    make_sanitized("fuzz")
    return SRC / "fuzz"


@pytest.mark.parametrize("seed", [1, 20261130])
def test_mutated_frames(fuzzer: Path, seed: int) -> None:
    done = subprocess.run([fuzzer, str(seed), str(FRAMES)], capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr[-4000:]
    frames, streams = int(done.stdout.split()[0]), int(done.stdout.split()[3])
    assert frames >= FRAMES and streams > 10


def test_the_fuzzer_would_notice(tmp_path: Path) -> None:
    """The same fuzzer against sources with a bug of each kind planted in them."""
    bugs = {
        "a length is not checked": ("frames.c", "if (c->in_len - at < 4 + (size_t)len)", "if (len > 0x7fffffff)"),
        "a buffer is one byte short": ("util.c", "while (cap < b->len + n)", "while (cap + 1 < b->len + n)"),
        "a descriptor is left open": ("streams.c", "    loop_drop(&k->loop, &s->src);\n    free(s->ring);", "    free(s->ring);"),
    }
    for name, (file, right, wrong) in bugs.items():
        place = tmp_path / file
        shutil.copytree(SRC, place, ignore=shutil.ignore_patterns("keeper*", "fuzz"))
        text = (place / file).read_text()
        assert text.count(right) == 1, name
        (place / file).write_text(text.replace(right, wrong))
        make_sanitized("fuzz", place)
        done = subprocess.run([place / "fuzz", "1", "20000"], capture_output=True, text=True, timeout=300)
        assert done.returncode != 0, name


def garbage(rng: random.Random) -> bytes:
    out = []
    for _ in range(rng.randrange(1, 40)):
        channel = rng.randrange(1, 40)
        kind = rng.choice([Type.REQ] * 6 + [Type.DATA, Type.EOF, Type.CREDIT, Type.SIGNAL, Type.CANCEL, Type.PING])
        if kind == Type.REQ:
            op = rng.choice([op for op in Op if op < 40])
            path = rng.choice(["/tmp/f", "/etc/passwd", "/", "/dev/shm/x", "relative", "/a/../b", "/tmp/" + "d/" * 3000])
            fields = [(Tag.OP, int(op)), (Tag.PATH, path), (Tag.LAYER, rng.choice(["", "a", "b" * 300])), (Tag.FLAGS, rng.randrange(32))]
            if op == Op.SPAWN:
                fields += [(Tag.ARG, a) for a in rng.choice([["sh", "-c", "echo x; cat"], ["none"], ["sleep", "50"]])]
                fields += [(Tag.STDIN, rng.randrange(2)), (Tag.USER, rng.choice(["", "root", "daemon", "nobody:0", "x" * 200])), (Tag.ENV, "A=b")]
            rng.shuffle(fields)
            payload = tlv(*fields)
        else:
            payload = rng.randbytes(rng.choice([0, 1, 2, 4, 4, 4, 64, 500]))
        out.append(struct.pack("<IBBHII", len(payload) + 12, kind, rng.choice([0] * 9 + [1]), rng.choice([0, 0, 0, 1, 3]), channel, 0) + payload)
    data = bytearray(b"".join(out))
    for _ in range(rng.choice([0, 0, 1, 2, 5])):
        at = rng.randrange(len(data))
        data[at] = rng.randrange(256)
    return bytes(data[: rng.randrange(len(data)) if rng.random() < 0.2 else len(data)])


def at_rest(hub: Hub) -> int:
    """How many descriptors the hub has when one more sandbox like those before stands ready."""
    a_spare(hub)
    return descriptors(hub)


def settles(hub: Hub, before: int) -> None:
    """It comes to have no more descriptors than it had: what it takes apart may take its time."""
    deadline = time.monotonic() + 60
    while (now := descriptors(hub)) > before:
        assert time.monotonic() < deadline, (now, before)


def descriptors(hub: Hub) -> int:
    """How many the hub has once that has not changed for half a second."""
    seen: list[int] = []
    for _ in range(300):
        seen.append(len(os.listdir(f"/proc/{hub.process.pid}/fd")))
        if len(seen) >= 25 and len(set(seen[-25:])) == 1:
            break
        time.sleep(0.02)
    return max(seen[-25:])


def test_garbage_for_a_real_keeper_and_hub(scratch: Path) -> None:
    """Whatever a client sends, its own sandbox ends at worst; sanitizers watch the hub, keepers and episodes."""
    rng = random.Random(7)
    log = scratch / "stderr"
    keeper = shutil.copy(build("keeper-asan"), scratch / "keeper")
    with log.open("wb") as errors, Hub(Path(keeper), scratch=scratch, stderr=errors) as hub:
        bystander = hub.create()
        for name in ("first", "second"):  # from now on one like them stands ready
            hub.create(name=name)
            hub.call(Op.HUB_DISPOSE, (Tag.MEMBER, name))
        fds = at_rest(hub)
        for i in range(60):
            victim = hub.create()
            try:
                victim.sock.settimeout(10)
                victim.sock.sendall(garbage(rng))
                time.sleep(rng.random() / 50)
                victim.sock.setblocking(False)
                victim.sock.recv(1 << 16)
            except OSError:
                pass
            victim.sock.close()
            if i % 3 == 0:
                hub.call(Op.HUB_DISPOSE, (Tag.MEMBER, f"m{i + 2}"))
        for _ in range(200):
            if hub.call(Op.HUB_LIST)[0][Tag.MEMBER] == ["m1"]:
                break
            time.sleep(0.05)
        assert hub.call(Op.HUB_LIST)[0][Tag.MEMBER] == ["m1"]
        settles(hub, fds)
        assert bystander.sh("echo untouched").stdout == b"untouched\n"
    assert b"Sanitizer" not in log.read_bytes() and b"runtime error" not in log.read_bytes(), log.read_text()[-6000:]


def test_garbage_ends_the_hub_cleanly(keeper_binary: Path, scratch: Path) -> None:
    for seed in range(30):
        rng = random.Random(seed)
        with Hub(keeper_binary, scratch=scratch) as hub:
            hub.create()
            data = bytearray(struct.pack("<IBBHII", 30, Type.REQ, 0, 0, 9, 0) + tlv((Tag.OP, int(Op.HUB_CREATE)), (Tag.MEMBER, "x" * 2)))
            for _ in range(rng.randrange(1, 6)):
                data[rng.randrange(len(data))] = rng.randrange(256)
            hub.sock.sendall(bytes(data) + rng.randbytes(rng.randrange(100)))
            hub.sock.shutdown(1)
            assert hub.process.wait(10) == 0
