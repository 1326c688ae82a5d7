"""verl's own tests of its agent loops pass beside our plugin."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[3]


def test_verls_own_tests_of_agent_loops_pass(verl: Any, tmp_path: Path) -> None:
    package = Path(verl.__file__).parents[1]
    files = sorted(package.glob("tests/experimental/agent_loop/*_on_cpu.py"))
    if not files:
        pytest.skip("this verl was installed without its tests")
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-m", "pytest", "-q", "-p", "verl_own", "-p", "no:cacheprovider",
         "--rootdir", str(package), "-c", os.devnull, *map(str, files)],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(ROOT / "tests" / "support")},
        capture_output=True,
        text=True,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout[-6000:]
    assert "ours: True" in done.stdout and "sandbox_agent" in done.stdout, done.stdout[-2000:]
