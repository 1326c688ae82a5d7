"""The tests as somebody else: an ordinary user of this machine, where we are root and there is one.

That user can often not read the tree (a checkout in /root, an environment in it): what it needs is copied.
"""

from __future__ import annotations

import importlib.util
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import pytest

TREE = Path(__file__).resolve().parents[2]
USER = os.environ.get("RLS_TEST_USER", "ordinary")
LIBRARIES = ("pluggy", "pytest", "_pytest", "py", "iniconfig", "packaging", "pygments", "pytest_timeout")


class Ordinary:
    """Runs Python programs as the ordinary user.

    Args:
        place: a directory of root's that everybody can read.
        tree: where that user finds the sources, the tests and the libraries.
        home: a directory of that user: HOME and RLSANDBOX_HOME.
        python: an interpreter that it can run.
    """

    def __init__(self, place: Path, tree: Path, home: Path, python: str) -> None:
        self.place, self.tree, self.home, self.python = place, tree, home, python

    def run(
        self, *arguments: str, path: str | None = None, through: Sequence[str] = (), **env: str
    ) -> subprocess.CompletedProcess[str]:
        """Run Python with *arguments* in the copied tree; *through*: a command that starts it, as root."""
        return subprocess.run(
            [*through, *_as_user(), self.python, *arguments],
            env={
                "PATH": path if path is not None else "/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin",
                "PYTHONPATH": str(self.tree),
                "PYTHONDONTWRITEBYTECODE": "1",
                "HOME": str(self.home),
                "RLSANDBOX_HOME": str(self.home / "state"),
                "RLSANDBOX_KEEPER": str(self.tree / "keeper"),
                **env,
            },
            capture_output=True,
            text=True,
            cwd=self.tree,
        )

    def program(self, code: str, **options: str) -> str:
        """What the program *code* prints; it has to succeed."""
        done = self.run("-c", code, **options)
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout


def _as_user() -> list[str]:
    return [
        shutil.which("setpriv") or "setpriv",
        *(f"--reuid={USER}", f"--regid={USER}", "--init-groups"),
        *("/bin/sh", "-c", 'exec "$@"', "sh"),  # setpriv itself may still start what that user may not
    ]


@contextmanager
def make_ordinary() -> Iterator[Ordinary]:
    """Copy what is needed; skips the test where there is no such user or no Python for it."""
    if os.geteuid() != 0:
        pytest.skip("as an ordinary user: these tests run as one already, or cannot become one")
    if subprocess.run(["id", USER], capture_output=True).returncode != 0:
        pytest.skip(f"no user {USER!r} (or RLS_TEST_USER) is on this machine")
    python = next((path for path in (sys.executable, "/usr/bin/python3") if _runs(path)), None)
    if python is None:
        pytest.skip(f"user {USER!r} can run no Python 3.11 or later")
    # Not below pytest's own directories: every session of root's shuts those again.
    with tempfile.TemporaryDirectory(prefix="rlsandbox-test-") as name:
        place = Path(name)
        place.chmod(0o755)
        yield _copied(place, python)


def _copied(place: Path, python: str) -> Ordinary:
    tree = place / "tree"
    ignored = shutil.ignore_patterns("__pycache__", ".venv", ".git")
    for name in ("rlsandbox", "tests", "pyproject.toml"):
        source = TREE / name
        if source.is_dir():
            shutil.copytree(source, tree / name, ignore=ignored)
        else:
            shutil.copy(source, tree / name)
    shutil.copytree(TREE / "plugins", tree / "rlsandbox_plugins", ignore=ignored)
    for name in LIBRARIES:
        found = importlib.util.find_spec(name)
        if found is None or found.origin is None:
            continue
        if found.submodule_search_locations:
            shutil.copytree(found.submodule_search_locations[0], tree / name, ignore=ignored)
        else:
            shutil.copy(found.origin, tree / Path(found.origin).name)
    from rlsandbox.keeper.build import keeper_binary

    shutil.copy(keeper_binary(), tree / "keeper")
    subprocess.run(["chmod", "-R", "a+rX", tree], check=True)
    home = place / "home"
    home.mkdir()
    shutil.chown(home, USER, USER)
    return Ordinary(place, tree, home, python)


def _runs(python: str) -> bool:
    code = "import sys; sys.exit(sys.version_info < (3, 11))"
    try:
        return subprocess.run([*_as_user(), python, "-c", code], capture_output=True).returncode == 0
    except OSError:
        return False
