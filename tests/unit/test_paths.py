"""Places of our own that cannot be used: one line that says what to set."""

from __future__ import annotations

import math
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

import rlsandbox as rls
from rlsandbox import _paths
from rlsandbox.backends import keeper_binary
from rlsandbox.backends.local.state import RunState, leftovers
from rlsandbox.errors import ConfigError, ProvisionError
from tests.support.small_disk import small_disk

SAYS = r"cannot be used: .*Not a directory.*set RLSANDBOX_HOME"


def test_a_directory_that_cannot_be_made_is_the_caller_s_to_mend(tmp_path: Path) -> None:
    made = _paths.private_directory(tmp_path / "a" / "b")
    assert made.stat().st_mode & 0o777 == 0o700
    (tmp_path / "file").write_text("in the way")
    with pytest.raises(ConfigError, match=SAYS):
        _paths.private_directory(tmp_path / "file" / "x")


def test_whatever_the_umask_nobody_else_can_write_there(tmp_path: Path) -> None:
    before = os.umask(0)
    try:
        _paths.private_directory(tmp_path / "home" / "local" / "run")
    finally:
        os.umask(before)
    modes = [(tmp_path / name).stat().st_mode & 0o777 for name in ("home", "home/local", "home/local/run")]
    assert modes == [0o755, 0o755, 0o700]


def test_what_was_written_before_the_clock_was_set_back_is_not_young(tmp_path: Path) -> None:
    assert 0 <= _paths.age_s(tmp_path) < 60
    for ahead, age in ((1, 0.0), (3600, math.inf)):
        os.utime(tmp_path, (time.time() + ahead,) * 2)
        assert _paths.age_s(tmp_path) == age


def test_whoever_needs_one_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").write_text("in the way")
    monkeypatch.setenv("RLSANDBOX_CACHE", str(tmp_path / "file" / "cache"))
    monkeypatch.delenv("RLSANDBOX_KEEPER", raising=False)
    with pytest.raises(ConfigError, match=SAYS):
        keeper_binary("aarch64")
    with pytest.raises(ConfigError, match=SAYS):
        RunState.begin(tmp_path / "file")


def test_a_place_that_may_not_be_looked_into_says_so_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As another user's home: a name too long is refused by the system in the same way."""
    said = "cannot be used: File name too long .set RLSANDBOX_HOME"
    monkeypatch.setenv("RLSANDBOX_CACHE", str(tmp_path / ("x" * 300)))
    monkeypatch.delenv("RLSANDBOX_KEEPER", raising=False)
    with pytest.raises(ConfigError, match=said):
        keeper_binary("aarch64")
    with pytest.raises(ConfigError, match=said):
        leftovers(tmp_path / ("x" * 300))
    assert leftovers(tmp_path / "nothing") == leftovers(tmp_path)


@pytest.mark.parametrize("variable", ["RLSANDBOX_CACHE", "RLSANDBOX_HOME"])
def test_the_command_line_says_it_in_one_line(tmp_path: Path, variable: str) -> None:
    (tmp_path / "file").write_text("in the way")
    places = {"RLSANDBOX_HOME": str(tmp_path / "home"), "RLSANDBOX_CACHE": str(tmp_path / "cache")}
    places[variable] = str(tmp_path / "file" / "x")
    done = subprocess.run(
        [sys.executable, "-m", "rlsandbox", "run", "--limit", "1", "--size", "1"],
        env={"PATH": "/usr/bin:/bin", **places}, capture_output=True, text=True, timeout=120,
    )  # fmt: skip
    assert done.returncode == 2, done
    (line,) = done.stderr.splitlines()
    assert str(tmp_path / "file") in line and "RLSANDBOX_HOME" in line


def test_a_home_that_is_not_ascii_in_a_locale_that_is(tmp_path: Path) -> None:
    home = tmp_path / "h\u00f6m\u00e9"
    locale = {"LC_ALL": "C", "PYTHONCOERCECLOCALE": "0", "PYTHONUTF8": "0"}
    for command in (
        ["reap"],
        ["ledger", "show"],
        ["doctor"],
        ["config", "show"],
    ):
        done = subprocess.run(
            [sys.executable, "-m", "rlsandbox", *command],
            env={"PATH": "/usr/bin:/bin", "RLSANDBOX_HOME": str(home), **locale}, capture_output=True, timeout=120,
        )  # fmt: skip
        assert b"internal error" not in done.stderr, done.stderr
    done = subprocess.run(
        [sys.executable, "-c", "import rlsandbox as r; r.Pool(size=1, config=False).close()"],
        env={"PATH": "/usr/bin:/bin", "RLSANDBOX_HOME": str(home), **locale}, capture_output=True, timeout=120,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert list(home.glob("*.db"))


def test_a_cache_without_room_is_told_at_once_and_where(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RLSANDBOX_KEEPER", str(keeper_binary()))
    with small_disk(tmp_path / "small", "256k") as disk:
        monkeypatch.setenv("RLSANDBOX_CACHE", str(disk / "cache"))
        says = (
            f"creation failed once: making the host's base failed at {disk}/cache.*No space left.*free some"
        )
        pool = rls.Pool(size=1, config=False, ledger=tmp_path / "ledger")
        with pool, pytest.raises(ProvisionError, match=says):
            pool.claim(rls.Task(id="t"))
        assert not list((disk / "cache").glob("**/root")), "nothing half-made is left"
