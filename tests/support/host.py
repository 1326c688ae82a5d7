"""This machine, without any isolation: for control runs, and for building what goes into a sandbox."""

from __future__ import annotations

import shutil
import subprocess
from dataclasses import dataclass
from pathlib import Path

SUPPORT = Path(__file__).parent


@dataclass(frozen=True)
class Ran:
    """How a command ended."""

    code: int
    out: str
    err: str

    @property
    def said(self) -> str:
        return self.out.strip() or self.err.strip()


def compiled(name: str, directory: Path) -> Path | None:
    """A static program made of ``tests/support/<name>.c``; None without a compiler that can link it."""
    compiler = shutil.which("cc") or shutil.which("gcc")
    if compiler is None:
        return None
    target = directory / name
    command = [compiler, "-static", "-O1", "-o", str(target), str(SUPPORT / f"{name}.c")]
    done = subprocess.run(command, capture_output=True, text=True)
    return target if done.returncode == 0 else None


def on_host(argv: list[str], **kw: object) -> Ran:
    """The same command, on this machine and without any isolation."""
    done = subprocess.run(argv, capture_output=True, text=True, timeout=60, **kw)  # type: ignore[call-overload]
    return Ran(done.returncode, done.stdout, done.stderr)
