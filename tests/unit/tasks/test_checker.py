"""What the checks decide, and what work that tries to decide for them gets."""

from __future__ import annotations

import os

import pytest

from rlsandbox.task import Task
from rlsandbox.tasks import Solution
from rlsandbox.tasks.check import checks_grader

from .conftest import WITHOUT_PTRACE, Grade


def checked(checks: str) -> Task:
    return Task(id="t", grader=checks_grader(checks))


def test_values_cross_as_they_are(grade: Grade) -> None:
    work = """
class Mine(dict): pass
class Odd: pass
def echo(*args, **options): return [list(args), options]
def kinds(): return [None, True, 1, 1.5, "x", [1], (1, 2), {1}, {"a": (1,)}, b"\\xff", 1e999, Mine(a=1)]
def odd(): return Odd()
def huge(): return 10**200
"""
    checks = """
m = module("m.py")
assert m.echo(1, (2, 3), {4}, {"k": b"v"}, name=[None]) == [[1, (2, 3), {4}, {"k": b"v"}], {"name": [None]}]
assert m.kinds() == [None, True, 1, 1.5, "x", [1], (1, 2), {1}, {"a": (1,)}, b"\\xff", 1e999, {"a": 1}]
assert type(m.kinds()[2]) is int and m.kinds()[1] is True
assert m.odd() != m.odd()
assert m.huge() == 10**200
"""
    done = grade(checked(checks), Solution(files={"m.py": work}))
    assert done.returncode == 0, done.stderr


def test_exceptions_cross_with_their_builtin_type(grade: Grade) -> None:
    work = """
class Own(Exception): pass
def value(): raise ValueError("v")
def own(): raise Own("o")
def decode(): b"\\xff".decode()
"""
    checks = """
m = module("m.py")
assert raises(ValueError, m.value)
assert raises(RuntimeError, m.own)
assert raises(RuntimeError, m.decode)
assert raises(KeyError, m.missing)
assert not raises(KeyError, len, "")
assert module("m.py").value is not None
"""
    done = grade(checked(checks), Solution(files={"m.py": work}))
    assert done.returncode == 0, done.stderr


CHEATS = {
    "exits": "import sys\nsys.exit(0)",
    "exits when called": "def f():\n    import os\n    os._exit(0)",
    "equals everything": "class A:\n    __eq__ = lambda *a: True\ndef f(): return A()",
    "patches the checker's modules": "import json\njson.loads = lambda *a: ['ok', 42]\ndef f(): return 1",
    "writes an answer of its own": "import os\nos.write(1, b'[\"ok\", 42]\\n')\ndef f(): return 41",
    "reads the checks": "def f():\n    return 42 if '42' in open('.check.py').read() else 0",
    "reads the checker's memory": (
        "import os\ndef f():\n    with open(f'/proc/{os.getppid()}/mem', 'rb') as m: return 42"
    ),
    "answers with a name": "def f(): return __import__('fractions').Fraction(42)",
    "kills the checker": "import os\ndef f():\n    os.kill(os.getppid(), 9)",
    "leaves modules beside it": "def f(): return 41",
}


@pytest.mark.parametrize("name", CHEATS)
def test_cheats_gain_nothing(name: str, grade: Grade) -> None:
    if "memory" in name and os.geteuid() == 0 and not WITHOUT_PTRACE:
        pytest.skip(
            "root with CAP_SYS_PTRACE, which no episode has, reads any memory (setpriv, util-linux, drops it)"
        )
    files = {"m.py": CHEATS[name]}
    if name.startswith("leaves"):
        files |= {"json.py": "raise SystemExit(0)", ".check/json.py": ""}
    task = checked("assert module('m.py').f() == 42")
    assert grade(task, Solution(files={"m.py": "def f(): return 42"})).returncode == 0
    assert grade(task, Solution(files=files)).returncode != 0


def test_run_keeps_code_and_streams(grade: Grade) -> None:
    checks = """
done = run("sh", "x.sh", "a b", stdin="in")
assert (done.code, done.out, done.err) == (3, "a b in", "e"), vars(done)
write("sub/f", "text")
assert read("sub/f") == "text"
assert run("sh", "-c", "echo $X", env={"X": "1"}).out == "1\\n"
"""
    work = 'printf "%s %s" "$1" "$(cat)"; printf e >&2; exit 3'
    done = grade(checked(checks), Solution(files={"x.sh": work}))
    assert done.returncode == 0, done.stderr
