"""``rlsandbox bench local``: every figure is measured, in a few seconds, and none can be nothing."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from rlsandbox import _paths
from rlsandbox.bench import measure

ROOT = Path(__file__).parents[2]


def test_everything_is_measured(tmp_path: Path) -> None:
    if shutil.which("git") is None:
        pytest.skip("git is not installed")
    done = subprocess.run(
        [sys.executable, "-m", "rlsandbox", "bench", "local", "--rounds", "1", "--samples", "5", "--hold", "6",
         "--json", "--output", str(tmp_path / "bench.json")],
        cwd=tmp_path, capture_output=True, text=True, timeout=300,
        env={**os.environ, "RLSANDBOX_HOME": str(tmp_path / "home"), "RLSANDBOX_CACHE": str(_paths.cache()),
             "PYTHONPATH": str(ROOT)},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    told = json.loads(done.stdout)
    assert told == json.loads((tmp_path / "bench.json").read_text())
    assert len(told["figures"]) >= 9
    for figure in told["figures"].values():
        assert len(figure["round_medians_ms"]) == 1, figure
        assert 0 < min(figure["round_medians_ms"]) <= figure["median_ms"] <= figure["p99_ms"], figure
    (held,) = told["held"]
    assert held["n"] == 6
    assert held["bytes"] > 6 * 20_000, "two processes a sandbox cost something"


def test_memory_of_children_sees_those_of_children() -> None:
    before = measure.memory_of_children()
    hog = "x = bytearray(64 << 20); print(len(x), flush=True); input()"
    with subprocess.Popen(
        ["sh", "-c", '"$0" -c "$1"; exit', sys.executable, hog], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as child:
        assert child.stdin is not None and child.stdout is not None
        assert child.stdout.readline() == b"67108864\n"
        assert measure.memory_of_children() - before > 64 << 20
        child.stdin.close()
