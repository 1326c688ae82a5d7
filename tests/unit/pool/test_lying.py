"""A pool over a place that lies keeps its ceiling, loses nobody's claim and leaves nothing behind."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest

from rlsandbox import AsyncPool, Spec, Task
from rlsandbox.backends.simulated import Simulated
from rlsandbox.errors import ClaimTimeoutError, PoolClosedError, ProvisionError, SandboxDiedError
from rlsandbox.pool.operations import Deadlines
from rlsandbox.testing import LyingBackend, VirtualClock

TASK = Task(id="t")
FAST = Deadlines(provision=20.0, reset=20.0, dispose=10.0, list_every=15.0)


def on_virtual_time(
    tmp_path: Path, test: Callable[[AsyncPool, LyingBackend], Awaitable[Any]], *, left: int = 0, **how: Any
) -> None:
    """Run *test* on a pool over a lying backend; afterwards *left* members may be there."""

    async def main() -> None:
        lying = LyingBackend(Simulated(seed=5), list_lag=2)
        pool = AsyncPool(lying, config=False, ledger=tmp_path, **{"size": 2, **how})
        pool.deadlines = FAST
        async with pool:
            await pool.wait_ready(timeout=60)
            await test(pool, lying)
        assert lying.most <= pool.max_size, "above the ceiling"
        assert len(lying.exists) == left

    VirtualClock().run(main())


async def hold(pool: AsyncPool, seconds: float, **how: Any) -> float:
    async with pool.claim(TASK, **how) as sandbox:
        await sandbox.run(f"sleep {seconds}")
    return asyncio.get_running_loop().time()


def test_a_create_that_fails_is_made_again(tmp_path: Path) -> None:
    async def test(pool: AsyncPool, lying: LyingBackend) -> None:
        lying.creates_fail = 2
        await asyncio.gather(*(hold(pool, 5) for _ in range(4)))
        assert pool.stats().create_failed == 2
        assert pool.stats().granted == 4

    on_virtual_time(tmp_path, test, max_size=4)


def test_a_create_that_answers_an_error_and_exists_all_the_same(tmp_path: Path) -> None:
    async def test(pool: AsyncPool, lying: LyingBackend) -> None:
        lying.creates_lie = 2
        await asyncio.gather(*(hold(pool, 5) for _ in range(4)))
        await pool.wait_ready(timeout=60)
        assert len(lying.exists) == pool.stats().live

    on_virtual_time(tmp_path, test, max_size=4)


def test_a_create_that_never_answers_is_given_up(tmp_path: Path) -> None:
    async def test(pool: AsyncPool, lying: LyingBackend) -> None:
        lying.creates_hang = 1
        await asyncio.gather(*(hold(pool, 1) for _ in range(4)))
        await asyncio.sleep(60)
        assert pool.stats().create_gave_up == 1
        assert pool.stats().terminating == 0

    on_virtual_time(tmp_path, test, max_size=3)


def test_a_create_that_comes_late_is_disposed_of(tmp_path: Path) -> None:
    async def test(pool: AsyncPool, lying: LyingBackend) -> None:
        lying.creates_come_late = 1
        await asyncio.gather(*(hold(pool, 30) for _ in range(3)))
        await asyncio.sleep(200)
        assert pool.stats().create_gave_up == 1
        assert set(lying.exists) == set(pool.driver.core.members)

    on_virtual_time(tmp_path, test, max_size=3)


def test_what_nobody_knows_is_found_and_removed_though_listings_lag(tmp_path: Path) -> None:
    async def test(pool: AsyncPool, lying: LyingBackend) -> None:
        labels = pool.driver.labels
        await lying._make(Spec(), "a-stray", labels, 10)
        await lying._make(Spec(), "of-another-run", {"rlsandbox.run": "other"}, 10)
        lying._changed()
        lying._changed()
        await asyncio.sleep(100)
        assert "a-stray" not in lying.exists
        assert "of-another-run" in lying.exists
        assert pool.stats().strays == 1
        assert pool.stats().ready == 2, "the pool's own stay, however old the listing is"
        await lying.lose("of-another-run")
        lying.most = 0

    on_virtual_time(tmp_path, test)


def test_a_delete_that_never_ends_counts_and_is_reported(tmp_path: Path) -> None:
    async def test(pool: AsyncPool, lying: LyingBackend) -> None:
        lying.deletes_hang = 10**6
        sandbox = await pool.claim(TASK)
        await sandbox.release(discard=True)
        await asyncio.sleep(100)
        stats = pool.stats()
        assert list(stats.stuck.values()) == [pytest.approx(100, abs=5)]
        assert stats.terminating == 1
        assert stats.live <= 2
        assert stats.ready == 1, "its place cannot be used"
        first, blocked = await pool.claim(TASK), pool.claim(TASK, timeout=30)
        with pytest.raises(
            ClaimTimeoutError, match="1 terminating, 1 of them stuck: removal did not end within"
        ):
            await blocked
        await first.release()
        lying.deletes_hang = 0
        lying.relent()
        await asyncio.sleep(100)
        assert pool.stats().stuck == {}
        assert pool.stats().ready == 2

    on_virtual_time(tmp_path, test)


def test_a_delete_that_fails_is_asked_for_again(tmp_path: Path) -> None:
    async def test(pool: AsyncPool, lying: LyingBackend) -> None:
        lying.deletes_fail = 3
        sandbox = await pool.claim(TASK)
        await sandbox.release(discard=True)
        await asyncio.sleep(60)
        assert pool.stats().dispose_failed == 3
        assert pool.stats().ready == 2

    on_virtual_time(tmp_path, test)


def test_429_slows_everything_down_and_trips_nothing(tmp_path: Path) -> None:
    async def test(pool: AsyncPool, lying: LyingBackend) -> None:
        lying.throttled, lying.retry_after = 4, 2.0
        began = asyncio.get_running_loop().time()
        ends = await asyncio.gather(*(hold(pool, 1) for _ in range(8)))
        assert pool.stats().throttled == 4
        assert pool.stats().create_failed == 0
        assert pool.stats().failing == {}
        assert max(ends) > began + 2, "it waited as long as it was told to"

    on_virtual_time(tmp_path, test, max_size=8)


def test_a_member_that_dies_while_it_lies_ready_is_replaced(tmp_path: Path) -> None:
    async def test(pool: AsyncPool, lying: LyingBackend) -> None:
        cluster = lying.inner.cluster  # type: ignore[attr-defined]
        for name in list(lying.exists):
            cluster.kill(name)
        await asyncio.sleep(0)
        assert pool.stats().died_idle == 2
        await hold(pool, 1, timeout=60)
        await asyncio.sleep(30)
        assert pool.stats().ready == 2

    on_virtual_time(tmp_path, test)


def test_a_member_that_dies_while_it_is_claimed_says_so_and_is_replaced(tmp_path: Path) -> None:
    async def test(pool: AsyncPool, lying: LyingBackend) -> None:
        sandbox = await pool.claim(TASK)
        lying.inner.cluster.kill(sandbox.id)  # type: ignore[attr-defined]
        with pytest.raises(SandboxDiedError):
            await sandbox.run("true")
        assert sandbox.state == "dead"
        await sandbox.release()
        await asyncio.sleep(30)
        assert pool.stats().died_claimed == 1
        assert pool.stats().ready == 2

    on_virtual_time(tmp_path, test)


def test_a_spec_that_keeps_failing_says_why_and_others_go_on(tmp_path: Path) -> None:
    async def test(pool: AsyncPool, lying: LyingBackend) -> None:
        bad = Task(id="bad", image="broken")
        inner = lying.inner.provision

        async def provision(spec: Spec, **how: Any) -> Any:
            if spec.image == "broken":
                raise ProvisionError("the image has no shell", kind="no_shell")
            return await inner(spec, **how)

        lying.inner.provision = provision  # type: ignore[method-assign]
        failing = asyncio.ensure_future(pool._claim(bad, timeout=60))
        for _ in range(20):
            await hold(pool, 1, timeout=30)
        with pytest.raises(ClaimTimeoutError, match="the image has no shell") as caught:
            await failing
        assert isinstance(caught.value.__cause__, ProvisionError)
        assert "the image has no shell" in str(pool.stats().failing)
        assert pool.stats().breaker_trips == 1
        with pytest.raises(ProvisionError, match="times in a row"):
            await asyncio.wait_for(pool._claim(bad), 1000)

    on_virtual_time(tmp_path, test)


@pytest.mark.parametrize("after", [0.0, 0.01, 0.5, 1.0, 2.0, 3.0, 4.0, 5.0])
def test_a_cancelled_claim_leaks_nothing(tmp_path: Path, after: float) -> None:
    async def test(pool: AsyncPool, lying: LyingBackend) -> None:
        primed = Task(id="primed", setup="true")
        claims = [asyncio.ensure_future(pool._claim(t)) for t in (primed, TASK, primed, TASK)]
        await asyncio.sleep(after)
        for claim in claims:
            claim.cancel()
        done = await asyncio.gather(*claims, return_exceptions=True)
        for sandbox in done:
            if not isinstance(sandbox, BaseException):
                await sandbox.release()
        await asyncio.sleep(120)
        stats = pool.stats()
        assert (stats.claimed, stats.waiting) == (0, 0)
        assert stats.ready == 2
        assert pool.driver._waiters == {}
        assert pool.driver._refused == {}
        assert pool.driver.core.claims == {}

    on_virtual_time(tmp_path, test)


def test_closing_while_everything_is_under_way(tmp_path: Path) -> None:
    async def test(pool: AsyncPool, lying: LyingBackend) -> None:
        waiting = [asyncio.ensure_future(pool._claim(Task(id=f"w{i}", image=f"i{i}"))) for i in range(6)]
        held = [await pool._claim(TASK) for _ in range(2)]
        await asyncio.sleep(0.4)
        await pool.close()
        for claim in waiting:
            with pytest.raises(PoolClosedError):
                await claim
        assert all(s.state != "released" for s in held)
        await held[0].release()
        with pytest.raises(PoolClosedError, match="closed"):
            await pool.claim(TASK)
        assert lying.exists == {}

    on_virtual_time(tmp_path, test, max_size=8)


def test_closing_gives_up_on_what_never_goes(tmp_path: Path) -> None:
    async def test(pool: AsyncPool, lying: LyingBackend) -> None:
        lying.deletes_hang = 1
        await pool.close(timeout=40)
        assert asyncio.get_running_loop().time() < 120

    on_virtual_time(tmp_path, test)


@pytest.mark.parametrize("when_empty", ["fail", "wait"])
def test_what_an_empty_pool_does(tmp_path: Path, when_empty: str) -> None:
    async def test(pool: AsyncPool, lying: LyingBackend) -> None:
        held = [await pool._claim(TASK) for _ in range(2)]
        before = pool.stats().created
        if when_empty == "fail":
            with pytest.raises(ClaimTimeoutError) as caught:
                await pool.claim(TASK)
            assert caught.value.kind == "pool_empty"
        else:
            with pytest.raises(ClaimTimeoutError, match="when_empty='wait'"):
                await pool.claim(TASK, timeout=1)
        await held[0].release()
        await asyncio.sleep(5)
        again = await pool.claim(TASK, timeout=5)
        await again.release()
        await held[1].release()
        assert pool.stats().created == before

    on_virtual_time(tmp_path, test, when_empty=when_empty)


def test_closing_does_not_wait_for_a_creation_that_takes_long(tmp_path: Path) -> None:
    """An image that is being pulled would keep whoever has pressed Ctrl-C for as long as the close may take."""

    async def main() -> None:
        lying = LyingBackend(Simulated(seed=5))
        pool = AsyncPool(lying, config=False, ledger=tmp_path, size=2)
        pool.deadlines = Deadlines(provision=10_000.0)
        await pool.start()
        await pool.wait_ready(timeout=60)
        lying.creates_hang = 1
        sandbox = await pool.claim(TASK)
        await sandbox.release(discard=True)
        await asyncio.sleep(5)
        assert pool.stats().creating == 1
        began = asyncio.get_running_loop().time()
        await pool.close(timeout=300)
        assert asyncio.get_running_loop().time() - began < 30
        assert lying.exists == {}

    VirtualClock().run(main())
