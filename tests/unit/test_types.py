"""What users write type-checks against what the package says of itself, and what is wrong does not."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("mypy")
ROOT = Path(__file__).parents[2]


def test_the_examples_type_check_and_wrong_calls_do_not(tmp_path: Path) -> None:
    wrong = tmp_path / "wrong.py"
    wrong.write_text("import rlsandbox as rls\nrls.Pool(sise=4)\nrls.load_tasks(3)\nrls.Task(id=1)\n")
    # those are written against frameworks whose own types are partial, and which may not be here
    frameworks = ("trl_", "verl_")
    examples = sorted(str(p) for p in (ROOT / "examples").glob("*.py") if not p.name.startswith(frameworks))
    cache = ROOT / ".mypy_cache"  # as ``make lint`` leaves it: seconds instead of half a minute
    done = subprocess.run(
        [sys.executable, "-m", "mypy", "--strict", f"--cache-dir={cache}", *examples,
         "tests/typing/promises.py", str(wrong)],
        cwd=ROOT, capture_output=True, text=True, timeout=600,
    )  # fmt: skip
    errors = [line for line in done.stdout.splitlines() if ": error:" in line]
    # by name: what the cache still knows of an earlier run has its path
    assert [Path(line.partition(":")[0]).name for line in errors] == ["wrong.py"] * 3, done.stdout
