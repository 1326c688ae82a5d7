"""The example: verl's trainer from its configuration to its log, and a job that is ended in the middle."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("verl", reason="verl is not installed")

from rlsandbox import _paths

ROOT = Path(__file__).parents[3]


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Any]:
    begun: list[subprocess.Popen[str]] = []

    def run(*arguments: str) -> subprocess.Popen[str]:
        env = {
            **os.environ, "RLSANDBOX_HOME": str(tmp_path / "home"), "RLSANDBOX_CACHE": str(_paths.cache()),
            "VERL_FILE_LOGGER_PATH": str(tmp_path / "log.jsonl"), "RAY_AUTH_MODE": "disabled",
        }  # fmt: skip
        env.pop("RAY_ADDRESS", None)
        with (tmp_path / "out").open("w") as out:
            process = subprocess.Popen(
                [sys.executable, "-W", "ignore", str(ROOT / "examples" / "verl_grpo.py"), *arguments],
                cwd=tmp_path, env=env, stdout=out, stderr=out, text=True,
            )  # fmt: skip
        begun.append(process)
        return process

    yield run
    for process in begun:
        process.kill()
        process.wait()


def cmdline(pid: str) -> str:
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
    except OSError:
        return ""


def of(home: Path) -> list[str]:
    """Processes that have the run's home in their environment: ray's and the pool's owner."""
    wanted, found = f"RLSANDBOX_HOME={home}".encode(), []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                if wanted in (entry / "environ").read_bytes().split(b"\0"):
                    found.append(entry.name)
            except OSError:
                continue
    return found


def hubs(home: Path) -> list[str]:
    """What makes the owner's sandboxes, and ends with them; its environment is empty."""
    owners = [pid for pid in of(home) if cmdline(pid).startswith("ray::PoolOwner")]
    every = [entry.name for entry in Path("/proc").iterdir() if entry.name.isdigit()]
    return [pid for pid in every if any(f" --client {owner} " in cmdline(pid) for owner in owners)]


def log(path: Path) -> list[dict[str, float]]:
    return [json.loads(line)["data"] for line in path.read_text().splitlines()] if path.exists() else []


def test_it_learns_and_the_log_has_the_numbers(start: Any, tmp_path: Path) -> None:
    process = start("--steps", "25")
    assert process.wait(timeout=900) == 0, (tmp_path / "out").read_text()[-4000:]
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
    process = start("--steps", "10000")
    end = time.monotonic() + 600
    while len(log(tmp_path / "log.jsonl")) < 2:
        assert process.poll() is None and time.monotonic() < end, (tmp_path / "out").read_text()[-4000:]
        time.sleep(0.1)
    making = hubs(tmp_path / "home")
    assert making, "there would be nothing to leave"
    process.send_signal(signal.SIGTERM)
    process.wait(timeout=120)
    end = time.monotonic() + 120
    while left := of(tmp_path / "home") + [pid for pid in making if " --client " in cmdline(pid)]:
        assert time.monotonic() < end, left
        time.sleep(0.2)
