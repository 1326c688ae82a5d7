"""A pool under many callers, under clocks that jump, and under more specs than it has places."""

from __future__ import annotations

import threading
import time
from collections import Counter
from pathlib import Path

import pytest

import rlsandbox as rls

TASK = rls.Task(id="t", workdir="/work", files={"a": "clean\n"})


@pytest.mark.timeout(900)
def test_200_threads_claim_at_once(tmp_path: Path) -> None:
    """Each gets a sandbox of its own, put back in place; never more than the ceiling."""
    seen: Counter[str] = Counter()
    errors: list[BaseException] = []
    held: set[str] = set()
    lock = threading.Lock()
    together = threading.Barrier(200)
    with rls.Pool(size=4, max_size=6, config=False, ledger=tmp_path) as pool:

        def work(n: int) -> None:
            try:
                together.wait(120)
                with pool.claim(TASK, timeout=300) as sandbox:
                    with lock:
                        assert sandbox.id not in held
                        held.add(sandbox.id)
                        assert len(held) <= 6
                    text = sandbox.run(f"cat a; echo {n} > a").stdout
                    with lock:
                        seen[text] += 1
                        held.remove(sandbox.id)
            except BaseException as error:
                errors.append(error)

        threads = [threading.Thread(target=work, args=(n,)) for n in range(200)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(300)
            assert not thread.is_alive()
        assert errors == []
        assert seen == {"clean\n": 200}
        stats = pool.stats()
        assert (stats.claims, stats.claimed, stats.waiting) == (200, 0, 0)
        assert stats.created - stats.disposed <= 6


def test_more_specs_than_places(tmp_path: Path) -> None:
    """Seven specs on a ceiling of two: each claim is served in turn, none starves, and none sees another's."""
    tasks = [rls.Task(id=f"t{n}", spec=rls.Spec(env={"N": str(n)})) for n in range(7)]
    with rls.Pool(size=1, max_size=2, config=False, ledger=tmp_path) as pool:
        report = pool.run_rollouts(tasks, lambda sandbox, task: sandbox.run("echo $N").stdout, group_size=2)
        assert report.coverage == 1.0
        values = Counter((record.task_id, record.value) for record in report.records)
        assert values == {(f"t{n}", f"{n}\n"): 2 for n in range(7)}
        assert pool.stats().live <= 2


@pytest.mark.parametrize("step", [-1e9, -3600.0, 3600.0, 1e9])
def test_a_wall_clock_that_jumps_changes_no_wait(
    tmp_path: Path, step: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Deadlines, TTFC and records are of the monotonic clock."""
    real = time.time
    jumped = 0.0
    monkeypatch.setattr(time, "time", lambda: real() + jumped)
    with rls.Pool(size=1, config=False, ledger=tmp_path) as pool:
        with pool.claim(TASK, timeout=120) as sandbox:
            waiting = pool.claim_ahead(TASK)
            jumped = step
            assert sandbox.run("echo there", timeout=60).stdout == "there\n"
        with waiting.result(timeout=120) as sandbox:
            assert sandbox.run("cat a").stdout == "clean\n"
        report = pool.run_rollouts([TASK], lambda sandbox, task: sandbox.run("cat a").stdout)
        (record,) = report.records
        assert record.status == "completed"
        assert 0 <= record.ended_at - record.started_at < 120
        assert abs(record.started_at - real()) < 600, "times of a run go on from its start"
        assert all(0 <= value < 120 for value in pool.metrics.ttfc.values())
