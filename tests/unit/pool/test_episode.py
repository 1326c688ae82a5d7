"""Episode: exactly one record, whatever happens on the way."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from rlsandbox.errors import ConfigError, ProvisionError, SandboxDiedError, SandboxStateError
from rlsandbox.hooks import hookimpl
from rlsandbox.metrics import BatchClock
from rlsandbox.pool.episode import Episode
from tests.support.pool_double import DoublePool, task


@pytest.fixture
def pool(tmp_path: Path) -> Iterator[DoublePool]:
    made = DoublePool(tmp_path)
    yield made
    held = list(made.held)
    made.close()
    assert not held, "sandboxes were not given back"


def one(pool: DoublePool) -> Any:
    (record,) = pool.records()
    return record


async def test_the_usual_course(pool: DoublePool) -> None:
    episode = Episode(pool, task("t"), group="g", batch=pool.ledger.new_batch())
    assert len(pool.ledger.book().open()) == 1, "asked for before any work"
    assert not pool.claimed
    sandbox = await episode.begin()
    assert pool.rollouts[0] is not None
    assert (pool.rollouts[0].group, pool.rollouts[0].attempt) == ("g", 1)
    await sandbox.run("touch done")
    outcome = await episode.grade()
    assert outcome.reward == 1.0
    record = await episode.complete(value={"steps": 1})
    assert record == one(pool) == episode.record
    assert (record.status, record.reward, record.group, record.ttfc_s) == ("completed", 1.0, "g", 0.001)
    assert sandbox.discarded is False


async def test_a_broken_attempt_and_another_one(pool: DoublePool) -> None:
    episode = Episode(pool, task("t"), retries=1)
    for n in (1, 2):
        sandbox = await episode.begin()
        try:
            await sandbox.run("die")
        except SandboxDiedError as error:
            failure = await episode.broke(error, "command")
        assert failure.kind == "sandbox_died"
        assert sandbox.discarded is True
        assert episode.may_retry is (n == 1)
        assert episode.record is None
    record = await episode.fail()
    assert (record.attempts, record.outcome) == (2, "failed_by_infrastructure")
    assert pool.metrics.counters()["failures/sandbox_died"] == 2


async def test_a_failure_of_the_task_is_not_retried_and_keeps_the_sandbox(pool: DoublePool) -> None:
    episode = Episode(pool, task("t"))
    sandbox = await episode.begin()
    await episode.broke(KeyError("its own"), "policy")
    assert not episode.may_retry
    assert sandbox.discarded is False
    record = await episode.fail()
    assert record.outcome == "failed_by_task"
    assert record.failure is not None
    assert "KeyError" in record.failure.error


async def test_claims_that_cannot_be_mended_are_not_repeated(pool: DoublePool) -> None:
    pool.broken = [ProvisionError("image is broken", retryable=False)]
    episode = Episode(pool, task("t"))
    with pytest.raises(ProvisionError):
        await episode.begin()
    assert (one(pool).attempts, one(pool).outcome) == (1, "never_ran")
    with pytest.raises(SandboxStateError):
        await episode.begin()


async def test_no_claim_is_repeated_past_the_deadline(pool: DoublePool) -> None:
    pool.broken = [ProvisionError("no")] * 3
    episode = Episode(pool, task("t"))
    with pytest.raises(ProvisionError):
        await episode.begin(timeout=0)
    assert one(pool).attempts == 1


async def test_a_cancelled_claim_is_on_record(pool: DoublePool, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = asyncio.Event()

    async def never(*args: Any, **kwargs: Any) -> Any:
        asked.set()
        await asyncio.Event().wait()

    monkeypatch.setattr(pool, "claim", never)
    episode = Episode(pool, task("t"))
    begin = asyncio.create_task(episode.begin())
    await asked.wait()
    begin.cancel()
    with pytest.raises(asyncio.CancelledError):
        await begin
    assert one(pool).status == "cancelled"


async def test_cancelling_and_ending_twice(pool: DoublePool) -> None:
    episode = Episode(pool, task("t"))
    sandbox = await episode.begin()
    record = await episode.cancel("enough")
    assert record is not None
    assert record.status == "cancelled"
    assert sandbox.discarded is not None
    assert await episode.cancel("again") is None
    with pytest.raises(SandboxStateError):
        await episode.complete()
    assert one(pool).status == "cancelled"


async def test_a_value_that_is_no_json_leaves_the_rollout_open(pool: DoublePool) -> None:
    episode = Episode(pool, task("t"))
    await episode.begin()
    with pytest.raises(TypeError, match="JSON"):
        await episode.complete(value=object())
    assert episode.record is None
    await episode.complete(value="text")
    assert one(pool).value == "text"


async def test_out_of_order(pool: DoublePool) -> None:
    episode = Episode(pool, task("t"))
    with pytest.raises(SandboxStateError):
        await episode.grade()
    with pytest.raises(SandboxStateError):
        await episode.fail()
    await episode.begin()
    with pytest.raises(SandboxStateError):
        await episode.begin()
    await episode.cancel("over")


async def test_a_sandbox_that_cannot_be_given_back_changes_no_record(
    pool: DoublePool, caplog: pytest.LogCaptureFixture
) -> None:
    episode = Episode(pool, task("t"))
    sandbox = await episode.begin()
    release = sandbox.release

    async def broken(*, discard: bool = False) -> None:
        await release(discard=discard)
        raise SandboxDiedError("gone")

    sandbox.release = broken
    record = await episode.complete()
    assert record.status == "completed"
    assert "could not be given back" in caplog.text


async def test_plugins_hear_of_the_record_and_cannot_break_it(
    pool: DoublePool, caplog: pytest.LogCaptureFixture
) -> None:
    heard: list[Any] = []

    class Plugin:
        @hookimpl
        def rlsandbox_record(self, record: Any) -> None:
            heard.append(record)
            raise ValueError("a plugin's own trouble")

    pool.manager.register(Plugin())
    episode = Episode(pool, task("t"))
    await episode.begin()
    record = await episode.complete()
    assert heard == [record]
    assert "rlsandbox_record" in caplog.text


async def test_a_batch_is_timed_from_the_first_request_to_the_last_record(pool: DoublePool) -> None:
    clock = BatchClock(pool.metrics.batch)
    episodes = [Episode(pool, task(f"t{i}"), clock=clock) for i in range(3)]
    for episode in episodes:
        await episode.begin()
    assert clock.completion_s is None
    await episodes[0].complete()
    await episodes[1].cancel("x")
    pool.broken = [ConfigError("x")]
    await episodes[2].broke(SandboxDiedError("x"), "command")
    await episodes[2].fail()
    clock.close()
    assert pool.metrics.batch.summary().n == 1
    assert pool.metrics.batch.summary().censored == 0


async def test_a_sandbox_is_given_back_whoever_is_cancelled_meanwhile(pool: DoublePool) -> None:
    episode = Episode(pool, task("t"))
    sandbox = await episode.begin()
    release, begun, go_on = sandbox.release, asyncio.Event(), asyncio.Event()

    async def slow(*, discard: bool = False) -> None:
        begun.set()
        await go_on.wait()
        await release(discard=discard)

    sandbox.release = slow
    ending = asyncio.create_task(episode.complete())
    await begun.wait()
    ending.cancel()
    await asyncio.sleep(0)
    ending.cancel()
    go_on.set()
    with pytest.raises(asyncio.CancelledError):
        await ending
    assert sandbox.discarded is False
    assert one(pool).status == "completed"


async def test_a_rollout_that_the_closing_ledger_has_ended_gives_its_sandbox_back(pool: DoublePool) -> None:
    episode = Episode(pool, task("t"))
    sandbox = await episode.begin()
    pool.ledger._open[episode._entry.id].cancel("the pool was closed before the rollout ended")
    assert await episode.cancel("closed") is None
    assert sandbox.discarded is not None
