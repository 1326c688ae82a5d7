"""`.ci/run` itself: what it exits with, says last and leaves behind, with stand-ins for all that it starts."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import time
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[3]
SUMMARY = "==== 3 passed in 0.01s ===="

# One script under all names: fails where $FAIL is part of how it was called, and hangs where $HANG is.
STAND_IN = """#!/bin/sh
called="${0##*/} $*"
case "$called" in
    "uv venv "*) for last; do :; done; mkdir -p "$last/bin"
        for name in python ruff mypy lint-imports; do cp "$0" "$last/bin/$name"; done ;;
    "make "*) echo "$SUMMARY" ;;
esac
case "$called" in *"${HANG:-no such}"*) echo $$ >"$HANGING"; exec sleep 1000 ;; esac
case "$called" in *"${FAIL:-no such}"*) exit 1 ;; esac
exit 0
"""
NAMES = ("uv", "make", "go", "apt-get", "pkg-config", "python3.13", "runsc", "docker-registry")


class Ci:
    """A clone of a project that has `.ci/run` and nothing else, and what it would start."""

    def __init__(self, where: Path) -> None:
        self.temporary, self.tree, stubs = where / "tmp", where / "tree", where / "bin"
        for directory in (self.temporary, self.tree / ".ci", stubs):
            directory.mkdir(parents=True)
        shutil.copy(ROOT / ".ci" / "run", self.tree / ".ci" / "run")
        (self.tree / "Makefile").write_text("")
        for name in NAMES:
            (stubs / name).write_text(STAND_IN)
            (stubs / name).chmod(0o755)
        self.hanging = where / "hanging"
        self.environ = {
            "PATH": f"{stubs}:{os.environ['PATH']}",
            "HOME": str(where),
            "TMPDIR": str(self.temporary),
            "PYTHON": "python3.13",
            "RLSANDBOX_CI_VERL": "0",
            "HANGING": str(self.hanging),
            "SUMMARY": SUMMARY,
        }
        who = ("-c", "user.name=t", "-c", "user.email=t@t.invalid", "-c", "init.defaultBranch=main")
        for arguments in (("init", "-q"), ("add", "."), ("commit", "-qm", "all")):
            subprocess.run(["git", *who, *arguments], cwd=self.tree, check=True, env=self.environ)

    def start(self, **environ: str) -> subprocess.Popen[str]:
        return subprocess.Popen(
            [self.tree / ".ci" / "run"],
            env=self.environ | environ,
            text=True,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
        )

    def run(self, **environ: str) -> tuple[int, list[str]]:
        with self.start(**environ) as process:
            output, _ = process.communicate(timeout=100)
        assert not list(self.temporary.iterdir()), output
        return process.returncode, output.splitlines()


@pytest.fixture
def ci(tmp_path: Path) -> Ci:
    if shutil.which("git") is None or shutil.which("setsid") is None:
        pytest.skip("needs git and setsid")
    return Ci(tmp_path)


ROOTS = pytest.mark.skipif(os.geteuid() != 0, reason="the cluster is root's")


@pytest.mark.parametrize("cluster", ["0", pytest.param("auto", marks=ROOTS), pytest.param("1", marks=ROOTS)])
def test_when_all_passes_so_does_it(ci: Ci, cluster: str) -> None:
    status, lines = ci.run(RLSANDBOX_CI_CLUSTER=cluster)
    assert (status, lines[-1]) == (0, SUMMARY), lines
    assert not [line for line in lines if "failed" in line]


@pytest.mark.parametrize(
    ("fail", "told"),
    [
        ("ruff check", "ruff"),
        ("make ", "tests"),
        pytest.param("-m pytest -q tests/cluster/", "cluster: the backend", marks=ROOTS),
    ],
)
def test_what_fails_is_told_and_is_its_status(ci: Ci, fail: str, told: str) -> None:
    status, lines = ci.run(FAIL=fail)
    assert (status, lines[-1]) == (1, SUMMARY), lines
    assert f"== failed: {told}" in lines


@ROOTS
@pytest.mark.parametrize(("cluster", "status"), [("auto", 0), ("1", 1)])
def test_a_cluster_that_cannot_be_built_fails_where_it_was_asked_for(
    ci: Ci, cluster: str, status: int
) -> None:
    got, lines = ci.run(FAIL="tests.cluster build", RLSANDBOX_CI_CLUSTER=cluster)
    assert (got, lines[-1]) == (status, SUMMARY), lines
    assert any(line.startswith("tests that need a Kubernetes are skipped") for line in lines)


@ROOTS
def test_stopped_it_leaves_nothing_running(ci: Ci) -> None:
    with ci.start(HANG="tests.cluster build", RLSANDBOX_CI_CLUSTER="1") as process:
        assert process.stdout is not None
        while "building the test cluster" not in (line := process.stdout.readline()):
            assert line, "it ended before"
        while not ci.hanging.exists() or not ci.hanging.read_text().strip():
            assert process.poll() is None
            time.sleep(0.01)
        building = int(ci.hanging.read_text())
        process.send_signal(signal.SIGTERM)
        process.communicate(timeout=60)
    assert process.returncode == 130
    assert not list(ci.temporary.iterdir())
    while (
        Path(f"/proc/{building}").exists()
        and "Z" not in Path(f"/proc/{building}/stat").read_text().split()[2]
    ):
        time.sleep(0.01)  # pytest's timeout is the bound
