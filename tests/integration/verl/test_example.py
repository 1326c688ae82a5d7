"""The example: verl's trainer from its configuration to its log, and a job that is ended in the middle."""

from __future__ import annotations

import signal
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("verl", reason="verl is not installed")

from verl_runs import LONGEST_S, begun, log, of, until_gone

from rlsandbox.ledger import reading
from rlsandbox.ledger.report import Report

EXAMPLES = Path(__file__).parents[3] / "examples"
EXAMPLE = EXAMPLES / "verl_grpo.py"


def test_it_learns_and_the_log_has_the_numbers(start: Any, tmp_path: Path) -> None:
    process = start(EXAMPLE, "--steps", "25")
    assert process.wait(timeout=LONGEST_S) == 0, (tmp_path / "out").read_text()[-4000:]
    steps = log(tmp_path / "log.jsonl")
    assert len(steps) == 25
    mean = [step["critic/score/mean"] for step in steps]
    assert sum(mean[-5:]) / 5 > sum(mean[:3]) / 3 + 0.05
    for step in steps:
        assert (
            step["sandbox/coverage"] == 1 and step["sandbox/rollouts"] == 16 and step["sandbox/claims"] == 16
        )
        assert step["sandbox/reward_bound_low"] == pytest.approx(step["critic/score/mean"], abs=1e-6)
        assert 0 <= step["sandbox/idle_ratio"] <= 1
        assert step["sandbox/ttfc/p50"] <= step["sandbox/ttfc/max"]
    assert not of(tmp_path / "home")


def test_a_job_that_is_ended_by_a_signal_leaves_nothing(start: Any, tmp_path: Path) -> None:
    process = start(EXAMPLE, "--steps", "10000")
    making = begun(process, tmp_path, 2)
    process.send_signal(signal.SIGTERM)
    process.wait(timeout=120)
    until_gone(tmp_path, making)


def test_the_overhead_is_measured_by_turns(start: Any, tmp_path: Path) -> None:
    process = start(EXAMPLES / "verl_overhead.py", "--steps", "4", "--turn", "0")
    assert process.wait(timeout=LONGEST_S) in (0, 1)  # which of them is a matter of time
    told = (tmp_path / "out").read_text()
    assert "4 steps, " in told and "the wrapping costs " in told, told[-4000:]
    report = Report.of(reading.read(sorted((tmp_path / "home").glob("*.db"))))
    # Half of the steps, and of those before: each rollout of theirs has had its sandbox.
    assert report.completed % 16 == 0 and 16 * 2 <= report.completed == report.requested <= 16 * 8
