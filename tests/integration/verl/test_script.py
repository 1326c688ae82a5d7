"""verl's trainer in processes of its own, and what breaks there: residue, a full disk, kill -9 and a run that goes on."""

from __future__ import annotations

import signal
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("verl", reason="verl is not installed")
from keepers import leaving_out
from small_disk import small_disk
from verl_runs import LONGEST_S, begun, log, of, until_gone

from rlsandbox.ledger import reading
from rlsandbox.ledger.report import Report

SCRIPT = Path(__file__).parents[2] / "support" / "verl_script.py"


def ended(process: Any, place: Path) -> list[dict[str, float]]:
    assert process.wait(timeout=LONGEST_S) == 0, (place / "out").read_text()[-4000:]
    return log(place / "log.jsonl")


def read(place: Path) -> Report:
    return Report.of(reading.read(sorted(place.glob("**/*.db"))))


def test_a_reset_that_leaves_something_costs_the_sandbox_and_no_rollout(start: Any, tmp_path: Path) -> None:
    """A keeper whose resets leave the files where they are: verification finds them, each time."""
    keeper = leaving_out("upper", tmp_path)
    process = start(SCRIPT, str(tmp_path / "job"), "3", "bare", RLSANDBOX_KEEPER=str(keeper))
    steps = ended(process, tmp_path)
    assert [step["sandbox/coverage"] for step in steps] == [1.0] * 3
    assert sum(step["sandbox/quarantined"] for step in steps) >= 16  # those of the last step may come later
    assert all(step["sandbox/recycled"] == 0 for step in steps)
    report = read(tmp_path / "home")
    assert report.completed == 48
    used = [attempt.sandbox for rollout in report.logs for attempt in rollout.attempts]
    assert len(used) == len(set(used)) == 48, "a sandbox in which something was left was used again"


def test_a_ledger_on_a_full_disk_does_not_stop_the_training(start: Any, tmp_path: Path) -> None:
    with small_disk(tmp_path / "small", "16m") as disk:
        steps = ended(start(SCRIPT, str(tmp_path / "job"), "4", f"full={disk}"), tmp_path)
        assert [step["sandbox/coverage"] for step in steps] == [1.0] * 4
        book = read(disk)  # what was kept in memory came later
        assert book.requested == 64 and all(rollout.record is not None for rollout in book.logs)


def test_kill_9_and_a_run_from_the_checkpoint(start: Any, tmp_path: Path) -> None:
    job, saving = str(tmp_path / "job"), "trainer.save_freq=1"
    process = start(SCRIPT, job, "10000", saving)
    making = begun(process, tmp_path, 3)
    process.send_signal(signal.SIGKILL)
    process.wait(timeout=60)
    until_gone(tmp_path, making)
    before = read(tmp_path / "home")
    assert before.requested >= 48
    reached = int((tmp_path / "job/checkpoints/latest_checkpointed_iteration.txt").read_text())
    assert reached >= 2

    last = start(SCRIPT, job, str(reached + 2), saving, VERL_FILE_LOGGER_PATH=str(tmp_path / "second.jsonl"))
    assert last.wait(timeout=LONGEST_S) == 0, (tmp_path / "out").read_text()[-4000:]
    steps = log(tmp_path / "second.jsonl")
    assert [step["training/global_step"] for step in steps] == [reached + 1, reached + 2]
    assert [step["sandbox/coverage"] for step in steps] == [1.0] * 2
    assert not of(tmp_path / "home")
    after = read(tmp_path / "home")
    assert after.requested == before.requested + 32
    statuses = [rollout.record.status for rollout in after.logs if rollout.record is not None]
    assert len(statuses) == after.requested  # what the dead run left open was closed as lost by the next
    assert set(statuses) <= {"completed", "lost"}
    assert statuses.count("completed") >= before.completed + 32


def test_the_asynchronous_trainer_whose_generation_goes_on(start: Any, tmp_path: Path) -> None:
    """Batches are asked for ahead: rollouts of a step run while those before are trained on."""
    steps = ended(start(SCRIPT, str(tmp_path / "job"), "6", "colocated"), tmp_path)
    assert len(steps) == 6
    assert sum(step.get("sandbox/rollouts", 0) for step in steps) >= 6 * 16
    assert all(step["sandbox/missing"] == 0 for step in steps if "sandbox/rollouts" in step)
    report = read(tmp_path / "home")
    left = [record.status for record in report.records if record.status != "completed"]
    assert set(left) <= {"cancelled"}, "asked for ahead when the job ended: nothing of it broke"
    assert report.completed >= 6 * 16 and len(report.records) == report.requested
    assert not of(tmp_path / "home")
