"""Grades work in a plain directory, with this machine's Python: what the checks decide needs no sandbox."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Mapping
from pathlib import Path

import pytest

from rlsandbox.task import Task
from rlsandbox.tasks import Solution

Files = Mapping[str, str | bytes]
# Root may read any memory by CAP_SYS_PTRACE, which no episode has.
WITHOUT_PTRACE = (
    ["setpriv", "--bounding-set=-sys_ptrace"] if os.geteuid() == 0 and shutil.which("setpriv") else []
)
Grade = Callable[[Task, Solution | None], "subprocess.CompletedProcess[str]"]


def put(root: Path, files: Files) -> None:
    for name, data in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(data.encode() if isinstance(data, str) else data)


@pytest.fixture
def grade(tmp_path_factory: pytest.TempPathFactory) -> Grade:
    """Task and solution to the finished grader; its exit code is the reward's."""

    def run(task: Task, solution: Solution | None) -> subprocess.CompletedProcess[str]:
        assert task.grader is not None
        work = tmp_path_factory.mktemp("work")
        env = {**os.environ, "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}"}
        put(work, task.files)
        if solution is not None:
            put(work, solution.files)
            if solution.command:
                subprocess.run(["sh", "-c", solution.command], cwd=work, env=env, check=True, timeout=60)
        put(work, task.grader.files)
        return subprocess.run(
            [*WITHOUT_PTRACE, *task.grader.command],
            cwd=work,
            env=env,
            capture_output=True,
            text=True,
            timeout=120,
        )

    return run
