"""The cache of built programs, tried with a part that is one small C file: no cluster is needed."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.cluster import build

ROOT = Path(__file__).parents[2]
pytestmark = pytest.mark.skipif(shutil.which("cc") is None, reason="needs a C compiler")

# A compiler that says when it is called, and takes its time when told to.
SLOW_CC = """#!/bin/sh
echo called >> "$CALLS"
[ -z "$SLOW" ] || sleep "$SLOW"
exec {cc} "$@"
"""
BUILD = """
import sys
from pathlib import Path
from tests.cluster import build
build.HERE, build.missing_tools = Path(sys.argv[1]), list
build.parts = lambda: {"small": build.Part("small", "1", ("small",), source="small.c")}
print(build.build())
"""


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "small.c").write_text("int main(void) { return 7; }\n")
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin" / "cc").write_text(SLOW_CC.replace("{cc}", str(shutil.which("cc"))))
    (tmp_path / "bin" / "cc").chmod(0o755)
    monkeypatch.setenv(build.CACHE, str(tmp_path / "cache"))
    monkeypatch.setenv("CALLS", str(tmp_path / "calls"))
    monkeypatch.setenv("PATH", f"{tmp_path / 'bin'}:{os.environ['PATH']}")
    monkeypatch.setattr(build, "HERE", tmp_path)
    monkeypatch.setattr(build, "missing_tools", list)
    monkeypatch.setattr(
        build, "parts", lambda: {"small": build.Part("small", "1", ("small",), source="small.c")}
    )
    return tmp_path


def _builder(place: Path, **env: str) -> subprocess.Popen[str]:
    command = [sys.executable, "-c", BUILD, str(place)]
    return subprocess.Popen(
        command, cwd=ROOT, env=os.environ | env, stdout=-1, stderr=-1, text=True, start_new_session=True
    )


def _calls(place: Path) -> int:
    path = place / "calls"
    return len(path.read_text().split()) if path.exists() else 0


def test_a_part_is_built_once_and_anew_when_its_source_changes(place: Path) -> None:
    assert set(build.build()) == {"small"}
    assert build.build() == {}
    first = build.parts()["small"].program()
    assert subprocess.run([first]).returncode == 7
    (place / "small.c").write_text("int main(void) { return 8; }\n")
    assert set(build.build()) == {"small"}
    assert subprocess.run([build.parts()["small"].program()]).returncode == 8
    assert first.exists()


def test_a_build_that_was_killed_does_not_count(place: Path) -> None:
    killed = _builder(place, SLOW="60")
    _until(lambda: _calls(place) == 1)
    os.killpg(killed.pid, signal.SIGKILL)
    killed.communicate()
    assert not build.parts()["small"].built
    assert set(build.build()) == {"small"}
    assert [path.name for path in (place / "cache").iterdir() if path.name.startswith(".small")] == []


def test_two_builders_at_once_build_once(place: Path) -> None:
    builders = [_builder(place, SLOW="1") for _ in range(2)]
    said = sorted(builder.communicate(timeout=60)[0].splitlines()[-1] for builder in builders)
    assert [builder.returncode for builder in builders] == [0, 0]
    assert said[-1] == "{}"
    assert _calls(place) == 1


def test_what_the_compiler_said_is_told(place: Path) -> None:
    (place / "small.c").write_text("int main(void) { return missing; }\n")
    with pytest.raises(build.BuildError, match=r"small: cc .* failed(.|\n)*missing"):
        build.build()
    assert not build.parts()["small"].built


def test_unknown_parts_and_wrong_checkouts_are_refused(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(build.BuildError, match="no such part: larg"):
        build.build(["larg"])
    monkeypatch.undo()
    monkeypatch.setenv(build.AGENT_SANDBOX, str(place))
    with pytest.raises(build.BuildError, match="is no checkout of agent-sandbox"):
        build.parts()


def _until(check, seconds: float = 20) -> None:  # type: ignore[no-untyped-def]
    end = time.monotonic() + seconds
    while not check():
        assert time.monotonic() < end
        time.sleep(0.02)
