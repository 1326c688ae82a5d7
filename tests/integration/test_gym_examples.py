"""The Gymnasium example runs as it stands."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from rlsandbox._paths import cache

ROOT = Path(__file__).parents[2]


def test_gymnasium_loops(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-W", "error::UserWarning", str(ROOT / "examples/gymnasium_loops.py"),
         "--num-envs", "8", "--steps", "25"],
        capture_output=True, text=True, cwd=tmp_path, timeout=600,
        env={**os.environ, "RLSANDBOX_HOME": str(tmp_path), "RLSANDBOX_CACHE": str(cache()),
             "PYTHONPATH": str(ROOT)},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert "'wrapped\\n'" in done.stdout
    # Ten commands an episode, the reset takes a step of its own.
    assert "8 environments, 25 steps: 16 episodes, 0 broken" in done.stdout
    assert "TTFC: n 24," in done.stdout
