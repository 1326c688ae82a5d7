"""What every later Python starts with: site-packages, ``.pth``, sitecustomize, byte code, pip's settings."""

from __future__ import annotations

import re
from collections.abc import Iterator

from rlsandbox.hooks import Inspector, Resetter, Residue, fact_fields, hookimpl

from ._common import named, undo

_CUSTOMIZE = re.compile(r"/(site|user)customize(\.py|\.so|/|\.[a-z0-9_.-]+\.so|$)")
_LIBRARY = re.compile(r"/(lib|lib64)/(python3?(\.\d+)?t?|pypy\S*)(/|$)")
_PIP = re.compile(
    r"/(\.config/pip|\.pip|\.pydistutils\.cfg|etc/pip\.conf|\.config/uv|\.condarc|pyvenv\.cfg|\.pythonrc(\.py)?)(/|$)"
)


@hookimpl
def rlsandbox_reset(resetter: Resetter) -> None:
    undo(resetter, lambda path: _word(path) is not None)


@hookimpl
def rlsandbox_verify(inspector: Inspector) -> Iterator[Residue]:
    yield from named(inspector, "python", _word)
    before = set(inspector.baseline_facts("env"))
    for line in inspector.facts("env"):
        name = fact_fields(line)[0].partition("=")[0]
        if line not in before and name.startswith(("PYTHON", "PIP_", "VIRTUAL_ENV", "UV_")):
            yield Residue("python", name, "is in the environment that commands start from")


def _word(path: str) -> str | None:
    if _CUSTOMIZE.search(path):
        return "runs at every start of Python"
    if path.endswith((".pth", ".egg-link")):
        return "is read at every start of Python"
    if "/site-packages" in path or "/dist-packages" in path:
        return "is importable everywhere"
    if _LIBRARY.search(path):
        return "is part of a Python library directory"
    if "/__pycache__" in path or path.endswith((".pyc", ".pyo")):
        return "byte code"
    if _PIP.search(path):
        return "configures pip or an environment"
    return None
