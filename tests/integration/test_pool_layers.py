"""Primed layers on this machine: many tasks in few sandboxes stay warm, and the least used go under a budget."""

from __future__ import annotations

import concurrent.futures
import contextlib
import os
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

import rlsandbox as rls

LONG = 120


@pytest.fixture
def make(tmp_path: Path) -> Iterator[Callable[..., rls.Pool]]:
    pools: list[rls.Pool] = []

    def make(**how: Any) -> rls.Pool:
        pools.append(rls.Pool(**{"config": False, "ledger": tmp_path / "ledger", **how}))
        return pools[-1]

    yield make
    for pool in pools:
        pool.close()


def task(number: int, size: int = 0) -> rls.Task:
    fill = f"head -c {size} /dev/zero > /var/tmp/fill" if size else "true"
    return rls.Task(id=f"t{number}", files={"/tmp/n": f"{number}\n"}, setup=f"{fill}; cp /tmp/n /tmp/primed")


def seen(pool: rls.Pool, one: rls.Task) -> str:
    with pool.claim(one, timeout=LONG) as sandbox:
        text = sandbox.run("cat /tmp/n /tmp/primed /tmp/dirt 2>&1").stdout
        sandbox.run(f"echo {one.id} > /tmp/dirt; echo edited > /tmp/n").check()
        return text


def test_164_tasks_over_one_base_in_16_sandboxes_stay_warm(make: Callable[..., rls.Pool]) -> None:
    pool = make(size=16)
    tasks = [task(i) for i in range(164)]
    pool.expect(tasks, group_size=3)
    with concurrent.futures.ThreadPoolExecutor(16) as threads:
        for turn in range(3):
            told = list(threads.map(lambda one: seen(pool, one), tasks))
            for i, text in enumerate(told):
                lines = text.splitlines()
                assert lines[:2] == [str(i), str(i)], f"turn {turn}, {tasks[i].id}: {text}"
                assert "No such file" in lines[2], "nothing of another episode"
    stats = pool.stats()
    assert (stats.created, stats.disposed, stats.quarantined) == (16, 0, 0), "the same sandboxes all along"
    assert stats.primed == 164, "each setup ran once, however often its task came back"
    assert stats.claims == stats.granted == 3 * 164


def test_the_least_recently_used_layers_go_under_a_budget(
    make: Callable[..., rls.Pool], monkeypatch: pytest.MonkeyPatch
) -> None:
    mib = 1 << 20
    monkeypatch.setenv("RLSANDBOX_LAYER_BUDGET", str(10 * mib))
    pool = make(size=1)
    tasks = [task(i, 3 * mib) for i in range(6)]
    for one in tasks:
        assert seen(pool, one).startswith(one.id[1:])
        seen(pool, tasks[0])  # the one that is used all the time stays
    stats = pool.stats()
    assert stats.layers_evicted >= 3
    assert stats.layers <= 3
    assert stats.layer_bytes <= 10 * mib
    assert stats.primed == 6, "the one that was used again and again was never made again"
    assert seen(pool, tasks[1]).startswith("1\n"), "what has gone is made again when it is asked for"
    assert pool.stats().primed == 7


def test_evicted_layers_give_their_memory_back(
    make: Callable[..., rls.Pool], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not only in the pool's books: the mounts are gone from the hub, and with them their pages."""
    mib = 1 << 20
    monkeypatch.setenv("RLSANDBOX_LAYER_BUDGET", str(40 * mib))
    pool = make(size=1)
    pool.wait_ready(1, timeout=LONG)
    mounted = []
    for i in range(12):
        seen(pool, task(i, 16 * mib))
        mounted.append(layers_mounted())
    assert pool.stats().layers_evicted >= 9
    assert 1 <= max(mounted) <= 4, mounted


def layers_mounted() -> int:
    """Layer mounts of the hub and of the keepers below it: the most in one mount namespace."""
    found, todo = 0, [str(os.getpid())]
    while todo:
        place = Path(f"/proc/{todo.pop()}")
        with contextlib.suppress(OSError):  # it may end meanwhile
            for thread in (place / "task").iterdir():
                todo += (thread / "children").read_text().split()
            mounts = [line.split()[4] for line in (place / "mountinfo").read_text().splitlines()]
            found = max(found, sum(re.fullmatch(r"(/y|/k/s)/\d+", mount) is not None for mount in mounts))
    return found
