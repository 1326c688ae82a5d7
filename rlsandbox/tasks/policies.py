"""Scripted policies: what a model would do, without one. For smoke tests, examples and CI gates."""

from __future__ import annotations

import posixpath
from typing import TYPE_CHECKING

from ..errors import ConfigError
from . import solution_of

if TYPE_CHECKING:
    from ..sandbox import Sandbox
    from ..task import Task


def canonical(sandbox: Sandbox, task: Task) -> str:
    """Applies the task's known solution."""
    return _apply(sandbox, task, "canonical")


def broken(sandbox: Sandbox, task: Task) -> str:
    """Applies the task's known wrong solution; where it has none, leaves everything as it is."""
    return _apply(sandbox, task, "broken")


POLICIES = {"canonical": canonical, "broken": broken}


def _apply(sandbox: Sandbox, task: Task, name: str) -> str:
    solution = solution_of(task, broken=name == "broken")
    if solution is None:
        if name == "broken":
            return "nothing done"
        raise ConfigError(
            f"task {task.id!r} has no known solution",
            hint="give it one (docs/tasks.md), or use a policy of your own: --policy pkg.mod:fn",
        )
    for path, data in solution.files.items():
        sandbox.write_file(posixpath.join(task.workdir or "/", path), data)
    if solution.command:
        sandbox.run(solution.command, cwd=task.workdir, timeout=task.limits.wall or 600).check()
    return name
