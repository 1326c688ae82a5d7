"""The 24 shipped tasks: the known solution passes, the known wrong one does not, and neither is visible."""

from __future__ import annotations

import pickle

import pytest

from rlsandbox.tasks import load_tasks, solution_of

from .conftest import Grade

TASKS = load_tasks("demo")


def test_there_are_24_with_prompt_files_and_difficulty() -> None:
    assert len(TASKS) == 24
    assert len({task.layer_key for task in TASKS}) == 24
    for task in TASKS:
        assert task.prompt.strip()
        assert task.files
        assert task.grader is not None
        assert task.metadata["difficulty"] in {"easy", "medium", "hard"}
        assert not task.setup
    assert {task.metadata["language"] for task in TASKS} == {"python", "sh"}


def test_the_first_is_calc() -> None:
    assert "def" in str(TASKS[0].files["calc.py"])


@pytest.mark.parametrize("task", TASKS, ids=lambda task: task.id)
def test_canonical_passes_and_broken_fails(task, grade: Grade) -> None:  # type: ignore[no-untyped-def]
    good = grade(task, solution_of(task))
    assert good.returncode == 0, good.stderr
    bad = grade(task, solution_of(task, broken=True))
    assert bad.returncode == 1, bad.stderr


def test_solutions_are_nowhere_in_the_task() -> None:
    for task in TASKS:
        solution = solution_of(task)
        assert solution is not None
        visible = pickle.dumps(task).decode("latin-1")
        for data in solution.files.values():
            assert str(data) not in visible


def test_limit() -> None:
    assert load_tasks("demo", limit=3) == TASKS[:3]
