"""The examples run as they stand."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.alone import alone

ROOT = Path(__file__).parents[2]
EXAMPLES = {
    "notebook.py": ([], ["def average", "TTFC p95"]),
    "platform_team.py": ([], ["metrics at", "coverage 1.0"]),
    "plugin.py": ([], ["the episode holds secret of lease-0-1", "lease-1-2", "coverage 1.0"]),
    "evaluation.py": (["work"], ["answer-3 completed 1.0 try 3", "coverage 1.0"]),
    "backend.py": ([], ["reward 1.0"]),
    "plan_images.py": (
        ["--images", "300", "--nodes", "4"],
        ["300 images, 1,200 rollouts, 4 nodes", "to move"],
    ),
}


@pytest.mark.parametrize("name", EXAMPLES)
def test_an_example_runs(name: str, tmp_path: Path) -> None:
    if not (ROOT / "examples" / name).exists():
        pytest.fail(f"examples/{name} is missing")
    arguments, said = EXAMPLES[name]
    done = subprocess.run(
        [sys.executable, "-W", "error::ResourceWarning", str(ROOT / "examples" / name), *arguments],
        cwd=tmp_path, env=alone(tmp_path / "home"), capture_output=True, text=True, timeout=300,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    assert "Traceback" not in done.stderr
    for text in said:
        assert text in done.stdout, done.stdout
