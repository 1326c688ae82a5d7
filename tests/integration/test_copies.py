"""A backend that cannot carry layers: what was sealed outlives the place that sealed it. Real sandboxes."""

from __future__ import annotations

import asyncio
import itertools
import multiprocessing
import os
import signal
import time
from collections.abc import AsyncGenerator, AsyncIterable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import rlsandbox as rls
from rlsandbox.backends import Capabilities, Local, Member
from rlsandbox.backends.copies import LayerCopies
from rlsandbox.errors import ClaimTimeoutError, SandboxDiedError, SandboxError
from rlsandbox.pool.operations import Deadlines
from tests.support.keepers import keeper_of
from tests.support.small_disk import fill, small_disk


class Apart(Local):
    """Sandboxes that share nothing, as those of a cluster."""

    def __init__(self, store: str | None = None) -> None:
        super().__init__()
        self.copies = LayerCopies(store, "run")

    async def capabilities(self) -> Capabilities:
        return replace(await super().capabilities(), shared_layers=False)

    async def give_layer(self, layer: str, member: Member) -> bool:
        return False

    keeps_layers = True

    async def keep_layer(self, layer: str, tar: AsyncIterable[bytes]) -> None:
        await self.copies.save(layer, tar)

    def kept_layer(self, layer: str) -> AsyncGenerator[bytes, None] | None:
        return self.copies.read(layer) if layer in self.copies else None

    async def drop_layer(self, layer: str) -> None:
        await self.copies.drop(layer)

    async def close(self) -> None:
        await super().close()
        await self.copies.close()


TASK = rls.Task(id="t", setup="echo primed > /tmp/primed")


@pytest.fixture
def pool(tmp_path: Path) -> Iterator[rls.Pool]:
    with rls.Pool(
        Apart(str(tmp_path / "copies")), size=2, max_size=4, ledger=tmp_path / "l.db", config=False
    ) as made:
        yield made


_numbers = itertools.count(4711)


def end(sandbox: rls.Sandbox) -> None:
    """Its keeper dies, as with its node."""
    command = f"sleep {next(_numbers)}"
    with sandbox.popen(command.split()) as process:
        os.kill(keeper_of(command), signal.SIGKILL)
        with pytest.raises(SandboxDiedError):
            process.wait(30)


def test_a_snapshot_outlives_the_sandbox_that_made_it(pool: rls.Pool, tmp_path: Path) -> None:
    sandbox = pool.claim(TASK)
    sandbox.run(
        "echo mine > /tmp/mine; head -c 300000 /dev/urandom > /tmp/big; rm /tmp/primed; ln -s mine /tmp/link"
    )
    big = sandbox.read_file("/tmp/big")
    snapshot = sandbox.snapshot()
    second = sandbox.snapshot(name="same again")
    end(sandbox)
    sandbox.release()
    with snapshot.fork(3) as forks:
        for fork in forks:
            assert fork.run("cat /tmp/link; ls /tmp").text == "mine\nbig\nlink\nmine\n"
            assert fork.read_file("/tmp/big") == big
    (place,) = (tmp_path / "copies").iterdir()
    assert len(list((place / "blobs").iterdir())) == 1
    snapshot.delete()
    second.delete()
    with pool.claim(TASK) as other:
        assert other.run("cat /tmp/primed").stdout == "primed\n"
    end_at = time.monotonic() + 60
    while list((place / "blobs").iterdir()):  # nobody waits for that
        assert time.monotonic() < end_at, "what was deleted is still kept"
        time.sleep(0.01)


def test_holes_take_no_room(pool: rls.Pool, tmp_path: Path) -> None:
    with pool.claim(rls.Task(id="t")) as sandbox:
        sandbox.run("truncate -s 40M /tmp/h; printf x >> /tmp/h; truncate -s 60M /tmp/h", check=True)
        snapshot = sandbox.snapshot()
        (blob,) = tmp_path.glob("copies/*/blobs/*")
        assert blob.stat().st_size == 60 << 20 and blob.stat().st_blocks * 512 < 10 << 20
        end(sandbox)
    with pool.claim(snapshot) as other:
        assert other.run("stat -c %s /tmp/h; tr -d '\\0' < /tmp/h").stdout == f"{60 << 20}\nx"


class Slow(Apart):
    """Its copies come a piece at a time, or not to an end."""

    def __init__(self, store: str, *, ends: bool) -> None:
        super().__init__(store)
        self.ends = ends

    def kept_layer(self, layer: str) -> AsyncGenerator[bytes, None] | None:
        whole = super().kept_layer(layer)
        return self.slowly(whole) if whole is not None else None

    async def slowly(self, whole: AsyncGenerator[bytes, None]) -> AsyncGenerator[bytes, None]:
        data = b"".join([piece async for piece in whole])
        step = len(data) // 10 + 1
        for at in range(0, len(data), step):
            yield data[at : at + step]
            await (asyncio.sleep(0.4) if self.ends else asyncio.Event().wait())


@pytest.mark.parametrize("ends", [True, False])
def test_a_large_layer_has_the_time_that_it_takes(tmp_path: Path, ends: bool) -> None:
    """As long as it moves: a checkpoint that can be kept can be gone on from. One that stands still is given up."""
    backend = Slow(str(tmp_path / "copies"), ends=ends)
    with rls.Pool(backend, size=1, max_size=2, ledger=tmp_path / "l.db", config=False) as pool:
        with pool.claim(rls.Task(id="t")) as sandbox:
            sandbox.run("head -c 300000 /dev/urandom > /tmp/big; cksum < /tmp/big > /tmp/sum")
            snapshot = sandbox.snapshot()
            end(sandbox)
        pool._pool.driver.deadlines = Deadlines(reset=3.0)
        if ends:
            with pool.claim(snapshot, timeout=60) as other:
                assert other.run("cksum < /tmp/big | cmp - /tmp/sum && echo same").stdout == "same\n"
        else:
            with pytest.raises(ClaimTimeoutError, match="did not end within 3 s"):
                pool.claim(snapshot, timeout=7)


def test_a_layer_that_came_with_a_fork_is_not_made_again(tmp_path: Path) -> None:
    """Graders of a fork compare with its task's primed layer: it is brought along, and is there for others then."""
    made = rls.Pool(
        Apart(str(tmp_path / "copies")), size=2, max_size=2, ledger=tmp_path / "l.db", config=False
    )
    with made as pool:
        assert pool.wait_ready(2, timeout=60) == 2
        first = pool.claim(TASK)
        with first.snapshot().fork(1) as (fork,):
            other = fork.id
        with pool.claim(TASK, timeout=60) as second:
            assert second.id == other != first.id
            assert second.run("cat /tmp/primed").stdout == "primed\n"
        assert pool.stats().primed == 1 and pool.stats().prime_failed == 0


def test_hibernated_files_are_restored_when_every_place_is_another(pool: rls.Pool) -> None:
    sandbox = pool.claim(TASK)
    sandbox.run("echo kept > /root/kept || echo kept > /tmp/kept")
    sandbox.hibernate()
    others = [pool.claim(TASK) for _ in range(4)]
    for other in others:  # wherever it was, that is gone
        end(other)
        other.release()
    sandbox.restore(timeout=60)
    assert sandbox.run("cat /root/kept /tmp/kept 2>/dev/null; cat /tmp/primed").stdout == "kept\nprimed\n"
    sandbox.release()


def test_the_next_attempt_starts_from_the_checkpoint_although_the_node_is_lost(pool: rls.Pool) -> None:
    seen: list[Any] = []

    def policy(sandbox: rls.Sandbox, task: rls.Task) -> str:
        about = sandbox.rollout
        assert about is not None
        seen.append((about.attempt, about.state))
        if about.state is None:
            sandbox.run("echo half > /tmp/work")
            about.checkpoint({"turn": 1})
            end(sandbox)
        return sandbox.run("cat /tmp/work").stdout

    report = pool.run_rollouts([TASK], policy)
    (record,) = report.records
    assert (record.status, record.value, record.attempts) == ("completed", "half\n", 2)
    assert [state for _, state in seen] == [None, {"turn": 1}]


def test_a_full_disk_costs_the_copy_and_not_the_snapshot(tmp_path: Path) -> None:
    with small_disk(tmp_path / "disk", "2m") as disk:
        made = rls.Pool(Apart(str(disk)), size=1, max_size=2, ledger=tmp_path / "l.db", config=False)
        with made as pool, pool.claim(TASK) as sandbox:
            sandbox.run("head -c 3000000 /dev/urandom > /tmp/big")
            blob = fill(disk)
            snapshot = sandbox.snapshot()
            assert sandbox.run("stat -c %s /tmp/big").stdout == "3000000\n"
            with pytest.raises(SandboxError, match="could not be saved: it goes on as it is") as caught:
                sandbox.hibernate()
            assert caught.value.kind == "layer_copy"
            assert sandbox.run("stat -c %s /tmp/big").stdout == "3000000\n"
            with snapshot.fork(1) as forks:  # from the sandbox itself
                assert forks[0].run("stat -c %s /tmp/big").stdout == "3000000\n"
            blob.unlink()
            sandbox.run("rm /tmp/big; echo small > /tmp/small")
            sandbox.hibernate()
            sandbox.restore()
            assert sandbox.run("cat /tmp/small").stdout == "small\n"


def other_process(ref: Any, told: Any) -> None:
    with rls.Pool.connect(ref) as pool:
        sandbox = pool.claim(TASK)
        sandbox.run("echo from afar > /tmp/afar")
        sandbox.hibernate()
        sandbox.restore(timeout=60)
        sandbox.snapshot(name="afar")
        told.put(sandbox.run("cat /tmp/afar").stdout)
        sandbox.release()


def test_what_another_process_seals_is_copied_when_its_stream_comes_back(pool: rls.Pool) -> None:
    context = multiprocessing.get_context("spawn")
    told = context.Queue()
    process = context.Process(target=other_process, args=(pool.ref, told))
    process.start()
    assert told.get(timeout=120) == "from afar\n"
    process.join(60)
    assert process.exitcode == 0
    (snapshot,) = pool.snapshots()
    others = [pool.claim(TASK) for _ in range(4)]
    for other in others:
        end(other)
        other.release()
    with snapshot.fork(1) as forks:
        assert forks[0].run("cat /tmp/afar").stdout == "from afar\n"
