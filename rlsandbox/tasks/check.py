"""Graders from Python checks: what ``checks`` in a task file and the HumanEval set use."""

from __future__ import annotations

from functools import cache
from pathlib import Path

from ..task import Grader

SCRIPT = ".check.py"
"""In the workdir itself: whoever may work there may also remove it, root or not."""


def checks_grader(checks: str, *, timeout: float = 20) -> Grader:
    """A grader that runs *checks* in the sandbox: reward 1.0 when they end without an exception.

    In the checks, ``module("calc.py").add(1, 2)`` calls a function of the work, ``run("sh", "x.sh")`` runs a
    program of it, ``raises(ValueError, f, x)``, ``read(path)`` and ``write(path, text)`` help.
    """
    # argv, not a shell line: without a Python there the grade is an error, never a reward of 0.
    return Grader(
        command=("python3", "-I", "-B", SCRIPT),
        files={SCRIPT: f"{_harness()}\n\n# The checks.\n{checks}"},
        timeout=timeout,
    )


@cache
def _harness() -> str:
    return Path(__file__).with_name("_checker.py").read_text(encoding="utf-8")
