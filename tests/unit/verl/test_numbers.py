"""A step's numbers: they add up over machines, and what did not happen has none."""

from __future__ import annotations

import pickle
import time
from typing import Any

import pytest
from rlsandbox_verl.numbers import Ended, Numbers, Window

from rlsandbox.metrics import Metrics, TtfcSample


def end(
    id: str, group: str = "g", *, reward: float | None = None, failure: str | None = None, **rest: Any
) -> Ended:
    now = time.monotonic()
    given = {
        "batch": "b",
        "began": now - 1,
        "ended": now,
        "completed": failure is None,
        "graded": True,
        **rest,
    }
    return Ended(id, group, reward=reward, failure=failure, **given)


def test_a_step() -> None:
    metrics = Metrics()
    numbers = Numbers(metrics)
    metrics.record_ttfc(TtfcSample(queued_s=0.5, provisioned_s=0, reset_s=0, connected_s=0, started_s=0.5))
    numbers.add(end("1", reward=1.0))
    numbers.add(end("1", reward=1.0))  # told twice
    numbers.add(end("2", failure="sandbox_died", attempts=3))
    numbers.add(end("3", "lost", failure="claim_timeout"))
    assert numbers.missing_in_row == 2 and numbers.last_failure == "claim_timeout"
    found = pickle.loads(pickle.dumps(numbers.pop()))
    flat = found["train"].to_dict()
    assert flat["sandbox/coverage"] == pytest.approx(1 / 3)
    assert flat["sandbox/rollouts"] == 3 and flat["sandbox/missing"] == 2 and flat["sandbox/retried"] == 1
    assert flat["sandbox/groups_partial"] == 1 and flat["sandbox/groups_lost"] == 1
    assert flat["sandbox/failures/sandbox_died"] == flat["sandbox/failures/claim_timeout"] == 1
    assert flat["sandbox/reward_bound_low"] == pytest.approx(1 / 3) and flat["sandbox/reward_bound_high"] == 1
    assert flat["sandbox/ttfc/mean"] == flat["sandbox/ttfc/p99"] == 1.0
    assert flat["sandbox/batch_completion_s"] == pytest.approx(1, abs=0.5)
    numbers.add(end("4", reward=0.0))
    assert numbers.missing_in_row == 0


def test_nothing_happened_and_nothing_is_told_of_rollouts() -> None:
    flat = Numbers(Metrics()).pop()["train"].to_dict()
    assert not [
        name for name in flat if "ttfc" in name or "coverage" in name or "bound" in name or "idle" in name
    ]


def test_idle_is_blocked_while_no_rollout_generates() -> None:
    numbers = Numbers(Metrics())
    time.sleep(0.05)
    now = time.monotonic()
    numbers.add(end("1", reward=1.0, blocked=((now - 0.04, now - 0.01),), busy=((now - 0.03, now - 0.02),)))
    numbers.add(end("2", reward=1.0, blocked=((now - 0.02, now - 0.01),), busy=((now - 0.015, now - 0.01),)))
    idle = numbers.pop()["train"].snapshot.idle
    assert idle is not None
    assert idle.blocked_s == pytest.approx(0.03)
    assert idle.idle_s == pytest.approx(0.015)


def test_modes_are_told_apart_and_machines_are_added() -> None:
    metrics = Metrics()
    numbers = Numbers(metrics)
    numbers.add(end("1", reward=1.0))
    numbers.begin("val")
    numbers.add(end("2", reward=0.0))
    numbers.begin("train")
    numbers.add(end("3", "h", reward=0.0))
    found = numbers.pop()
    assert {mode: window.requested for mode, window in found.items()} == {"train": 2, "val": 1}
    other = Numbers(Metrics())
    other.add(end("9", "g", failure="oom", began=time.monotonic() - 9))
    whole = Window.merge([found["train"], other.pop()["train"]])
    assert whole.requested == 3 and whole.completed == 2 and whole.failures == {"oom": 1}
    assert whole.groups == {"g": (2, 1), "h": (1, 1)}, "a group may be spread over machines"
    assert whole.batches["b"] == pytest.approx(9, abs=0.5), "no clock is shared: the longest counts"
