"""The example as it stands, and signals in the midst of training: from outside, as a user runs it."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

pytest.importorskip("trl", reason="the extra trl is not installed")

from rlsandbox import _paths
from rlsandbox.ledger import reading
from rlsandbox.ledger.report import Report

EXAMPLE = Path(__file__).parents[3] / "examples" / "trl_grpo.py"
STARTUP_S = 600.0  # importing the trainer takes most of it on a busy machine


def start(place: Path, *arguments: str, script: Path = EXAMPLE) -> subprocess.Popen[str]:
    env = {
        **os.environ,
        "RLSANDBOX_HOME": str(place / "home"),
        "RLSANDBOX_CACHE": str(_paths.cache()),
        "OMP_NUM_THREADS": "1",
        "PYTHONUNBUFFERED": "1",
    }
    return subprocess.Popen(
        [sys.executable, "-W", "ignore", str(script), *arguments],
        cwd=place, env=env, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
    )  # fmt: skip


def test_the_mean_reward_rises_and_there_is_a_plot(tmp_path: Path) -> None:
    said, _ = start(tmp_path, "--steps", "24").communicate(timeout=STARTUP_S)
    line = next(line for line in said.splitlines() if line.startswith("mean reward"))
    first, last = (float(word) for word in line.removeprefix("mean reward ").split(" -> "))
    assert first < 0.4 and last > 0.8, said
    assert (tmp_path / "trl_grpo.png").stat().st_size > 1000


@pytest.mark.parametrize("sign", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_leaves_no_sandbox_and_no_open_rollout(tmp_path: Path, sign: signal.Signals) -> None:
    process = start(tmp_path, "--steps", "100000")
    try:
        assert process.stdout is not None
        for line in process.stdout:
            if "sandbox/claims" in line:
                break
        threads = Path(f"/proc/{process.pid}/task").iterdir()
        children = [pid for thread in threads for pid in (thread / "children").read_text().split()]
        assert children, "there is a hub"
        process.send_signal(sign)
        process.communicate(timeout=60)
    finally:
        process.kill()
        process.wait()
    assert process.returncode in (-sign, 1, 130)
    end = time.monotonic() + 20
    while any(Path(f"/proc/{child}").exists() for child in children):
        assert time.monotonic() < end, "the hub is still there"
        time.sleep(0.05)
    (ledger,) = (tmp_path / "home").glob("**/*.db")
    book = Report.of(reading.read([ledger]))
    assert book.requested >= 16
    assert all(log.record is not None for log in book.logs)


@pytest.mark.timeout(900)
def test_the_overhead_is_measured_by_turns(tmp_path: Path) -> None:
    script = EXAMPLE.with_name("trl_overhead.py")
    measuring = start(tmp_path, "--steps", "4", "--batch", "4", script=script)
    said, _ = measuring.communicate(timeout=STARTUP_S)
    assert measuring.returncode in (0, 1), said  # which of them is a matter of time
    assert "4 steps, " in said and "the wrapping costs " in said, said
