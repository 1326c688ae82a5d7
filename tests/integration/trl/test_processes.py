"""Training in processes of their own: two ranks with gloo, one that dies, kill -9 and a run that goes on."""

from __future__ import annotations

import json
import math
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("trl", reason="the extra trl is not installed")

from rlsandbox import _paths
from rlsandbox.ledger import reading
from rlsandbox.ledger.report import Report

SCRIPT = Path(__file__).parents[2] / "support" / "trl_script.py"
STARTUP_S = 300.0  # importing the trainer takes most of it on a busy machine
RANKS = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]


def start(
    place: Path, *arguments: str, ranks: bool = False, how: Sequence[str] = ()
) -> subprocess.Popen[str]:
    env = {
        **os.environ,
        "RLSANDBOX_HOME": str(place / "home"),
        "RLSANDBOX_CACHE": str(_paths.cache()),
        "OMP_NUM_THREADS": "1",
        "TRL_EXPERIMENTAL_SILENCE": "1",
        "PYTHONUNBUFFERED": "1",
    }
    how = RANKS if ranks else how
    return subprocess.Popen(
        [sys.executable, "-W", "ignore", *how, str(SCRIPT), str(place / "out"), *arguments],
        cwd=place, env=env, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
    )  # fmt: skip


def said(lines: list[str], word: str) -> list[dict[str, Any]]:
    return [json.loads(line.removeprefix(word)) for line in lines if line.startswith(word)]


def tree(pid: int) -> list[int]:
    """A process's children, and theirs."""
    try:
        threads = list(Path(f"/proc/{pid}/task").iterdir())
        below = [int(word) for thread in threads for word in (thread / "children").read_text().split()]
    except OSError:
        return []
    return below + [one for child in below for one in tree(child)]


def until_gone(pids: list[int]) -> None:
    end = time.monotonic() + 60
    while any(Path(f"/proc/{pid}").exists() for pid in pids):
        assert time.monotonic() < end, "something of the run is still there"
        time.sleep(0.05)


def read(place: Path) -> Report:
    return Report.of(reading.read(sorted((place / "home").glob("**/*.db"))))


def test_two_ranks_share_one_pool_and_their_numbers_are_counted_once(tmp_path: Path) -> None:
    lines, _ = start(tmp_path, "3", ranks=True).communicate(timeout=STARTUP_S)[0].splitlines(), None
    steps, ends = said(lines, "LOG "), said(lines, "END ")
    assert len(steps) == 3 and len(ends) == 2, "\n".join(lines[-30:])
    (owner,) = [end for end in ends if end["owner"] == end["pid"]]
    (other,) = [end for end in ends if end["owner"] != end["pid"]]
    assert other["owner"] == owner["pid"]
    assert owner["children"] == 1 and other["children"] == 0  # one hub
    assert owner["max_size"] == other["max_size"] == 8  # room for both, in one pool
    assert 0 < max(owner["most"], other["most"]) <= 8
    for entry in steps:
        assert entry["sandbox/claims"] == 8 and entry["sandbox/coverage"] == 1.0
        assert entry["sandbox/reward_bound_low"] == pytest.approx(entry["reward"], abs=1e-4)
        assert 0 <= entry["sandbox/idle_ratio"] <= 1
    # Exact percentiles of all: the owner has every sample once, and each step's mean and maximum are of 8.
    assert len(owner["ttfc"]) == 24
    assert math.fsum(8 * entry["sandbox/ttfc/mean"] for entry in steps) == pytest.approx(sum(owner["ttfc"]))
    assert max(entry["sandbox/ttfc/max"] for entry in steps) == pytest.approx(owner["ttfc"][-1])
    slower = [max(pair) for pair in zip(owner["batches"], other["batches"], strict=True)]
    assert [entry["sandbox/batch_completion_s"] for entry in steps] == pytest.approx(slower)
    report = read(tmp_path)
    assert report.requested == report.completed == 24
    assert report.mean_reward == pytest.approx(sum(entry["reward"] for entry in steps) / 3, abs=1e-4)


def test_machines_have_pools_of_their_own_and_each_is_told_of_its_own_part(tmp_path: Path) -> None:
    """Two that are one here: what they know of each other is by ranks alone."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    running = []
    for rank in range(2):
        (place := tmp_path / f"{rank}").mkdir()
        how = [
            "-m",
            "torch.distributed.run",
            "--nnodes",
            "2",
            "--node-rank",
            f"{rank}",
            "--nproc-per-node",
            "1",
        ]
        how += ["--master-addr", "127.0.0.1", "--master-port", f"{port}"]
        running.append(start(place, "3", "tell", how=how))
    parts = []
    for rank, process in enumerate(running):
        lines = process.communicate(timeout=STARTUP_S)[0].splitlines()
        told, begun = said(lines, "EXPECT "), said(lines, "BATCH ")
        (end,) = said(lines, "END ")
        assert (end["owner"], end["children"], end["max_size"]) == (end["pid"], 1, 4)
        assert len(begun) == 3 and begun[1:] == told[:2], "\n".join(lines[-30:])
        assert read(tmp_path / f"{rank}").requested == 12
        parts.append(begun)
    assert all(mine != theirs for mine, theirs in zip(*parts, strict=True))


def test_the_claims_of_an_evaluation_are_those_of_all_ranks(tmp_path: Path) -> None:
    """Whichever of the ranks is there first."""
    options = (
        "eval_strategy=steps",
        "eval_steps=1",
        "per_device_eval_batch_size=4",
        "num_generations_eval=2",
    )
    process = start(tmp_path, "2", "evaluate", *options, ranks=True)
    lines = process.communicate(timeout=STARTUP_S)[0].splitlines()
    steps, evaluations = said(lines, "LOG "), said(lines, "EVAL ")
    assert len(steps) == len(evaluations) == 2, "\n".join(lines[-30:])
    assert [entry["sandbox/claims"] for entry in steps] == [8, 8]
    assert [entry["eval_sandbox/claims"] for entry in evaluations] == [16, 16]


def test_a_rank_that_dies_takes_no_sandbox_with_it(tmp_path: Path) -> None:
    process = start(tmp_path, "100000", "die_at=1", ranks=True)
    try:
        assert process.stdout is not None
        for line in process.stdout:
            if line.startswith("LOG "):
                break
        began = tree(process.pid)
        assert len(began) >= 3  # two ranks, a hub
        process.communicate(timeout=120)
    finally:
        process.kill()
        process.wait()
    assert process.returncode != 0
    until_gone(began)
    report = read(tmp_path)
    done = subprocess.run(
        [sys.executable, "-m", "rlsandbox", "ledger", "reconcile", "grpo", "--json"],
        env={**os.environ, "RLSANDBOX_HOME": str(tmp_path / "home")},
        capture_output=True, text=True, check=True,
    )  # fmt: skip
    lost = json.loads(done.stdout)["lost"]
    after = read(tmp_path)
    assert after.requested == report.requested >= 12
    assert all(log.record is not None for log in after.logs)  # the dead rank's are closed as lost
    assert lost == sum(log.record.status == "lost" for log in after.logs if log.record) > 0
    assert not any(
        log.record.reward == 0 and log.record.status != "completed" for log in after.logs if log.record
    )


def test_kill_9_and_a_run_from_the_checkpoint(tmp_path: Path) -> None:
    saving = ("save_strategy=steps", "save_steps=1", "save_total_limit=2")
    process = start(tmp_path, "100000", *saving)
    try:
        assert process.stdout is not None
        steps = 0
        for line in process.stdout:
            steps += line.startswith("LOG ")
            if steps == 3:
                break
        began = tree(process.pid)
        assert began
        process.send_signal(signal.SIGKILL)
        process.communicate(timeout=60)
    finally:
        process.kill()
        process.wait()
    until_gone(began)  # keepers watch their client
    before = read(tmp_path)
    assert before.requested >= 12
    reached = max(int(path.name.rpartition("-")[2]) for path in (tmp_path / "out").glob("checkpoint-*"))
    assert reached >= 2

    lines = (
        start(tmp_path, str(reached + 2), "resume", *saving).communicate(timeout=STARTUP_S)[0].splitlines()
    )
    entries = said(lines, "LOG ")
    assert [entry["step"] for entry in entries] == [reached + 1, reached + 2], "\n".join(lines[-30:])
    assert all(entry["sandbox/coverage"] == 1.0 for entry in entries)
    after = read(tmp_path)
    assert after.requested == before.requested + 8
    statuses = [log.record.status for log in after.logs if log.record is not None]
    assert len(statuses) == after.requested  # what the dead run left open was closed as lost by the next
    assert set(statuses) <= {"completed", "lost"}
    assert statuses.count("completed") >= before.completed + 8
