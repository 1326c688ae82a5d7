"""Signals to the command line, as a process: its status, its one line, and that nothing of it is left."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from rlsandbox import _paths

INT, TERM, HUP = signal.SIGINT, signal.SIGTERM, signal.SIGHUP
LONG = 300
pytestmark = pytest.mark.timeout(900)
POLICIES = """
import asyncio
from rlsandbox import AsyncPool
from rlsandbox.cli import signals

def slow(sandbox, task):
    signals.AGAIN_S = 600  # however slowly the test sends them, its signals come at once
    print("begun", flush=True)
    sandbox.run("sleep 300.125")

async def async_slow(sandbox, task):
    signals.AGAIN_S = 600
    print("begun", flush=True)
    await sandbox.run("sleep 300.125")

def _closing(seconds):
    end = AsyncPool._end

    async def slowly(self, timeout):
        print("begun", flush=True)
        await asyncio.sleep(seconds)
        await end(self, timeout)
        print("closed", flush=True)

    AsyncPool._end = slowly

def closes_slowly(sandbox, task):
    _closing(1)

def closes_too_slowly(sandbox, task):
    _closing(300)
"""


class Command:
    """``rlsandbox ...`` as a process whose descendants can be told by a variable."""

    def __init__(self, where: Path, *argv: str, ignored: int | None = None, path: Path | None = None) -> None:
        self.where = where
        self.mark = f"RLS_TEST_MARK={where}"
        self.out, self.err = where / "stdout", where / "stderr"
        (where / "policies.py").write_text(POLICIES)
        root = str(Path(__file__).parents[2])
        env = {
            **os.environ,
            "RLS_TEST_MARK": str(where),
            "RLSANDBOX_HOME": str(where / "home"),
            "RLSANDBOX_CACHE": str(_paths.cache()),
            "PYTHONPATH": os.pathsep.join([root, os.environ.get("PYTHONPATH", "")]),
        }
        if path is not None:
            env["PATH"] = f"{path}{os.pathsep}{env['PATH']}"
        ignoring = [] if ignored is None else ["sh", "-c", f"trap '' {ignored}; exec \"$@\"", "sh"]
        with self.out.open("w") as out, self.err.open("w") as err:
            self.child = subprocess.Popen(
                [*ignoring, sys.executable, "-m", "rlsandbox", *argv],
                stdout=out, stderr=err, cwd=where, env=env, start_new_session=True,
            )  # fmt: skip

    def goes_on(self, until: Callable[[Command], bool]) -> None:
        """It has come as far as that, or has ended."""
        eventually(lambda: until(self) or self.child.poll() is not None)

    def begun(self, true: Callable[[], bool] | None = None) -> None:
        """It has come as far as that; by default its policy runs."""
        self.goes_on(lambda run: true() if true is not None else "begun" in run.out.read_text())
        assert self.child.poll() is None, self.out.read_text() + self.err.read_text()

    def ended(self, *signals: int, group: bool = False) -> int:
        """Send the signals, wait for the end; no process may be left of it."""
        try:
            for number in signals:
                os.killpg(self.child.pid, number) if group else self.child.send_signal(number)
            status = self.child.wait(LONG)
        finally:
            self.child.kill()
            self.child.wait()
        eventually(lambda: self.mark not in environments())
        return status

    @property
    def said(self) -> str:
        return self.err.read_text()

    def nothing_left(self) -> None:
        local = self.where / "home/local"
        assert not local.exists() or os.listdir(local) == []

    def records(self, run: str) -> list[str]:
        """How the run's rollouts ended, as another process reads it."""
        shown = Command(self.where, "ledger", "export", run)
        assert shown.child.wait(LONG) == 0, shown.said
        return [json.loads(line)["status"] for line in shown.out.read_text().splitlines()]


def eventually(true: Callable[[], bool], seconds: float = LONG) -> None:
    deadline = time.monotonic() + seconds
    while not true():
        assert time.monotonic() < deadline, "it never came true"
        time.sleep(0.02)


def environments() -> str:
    found = b""
    for path in Path("/proc").glob("[0-9]*/environ"):
        try:
            found += path.read_bytes() + b"\0"
        except OSError:
            continue
    return found.decode(errors="replace")


def catches(pid: int, number: int = HUP) -> bool:
    """Whether the process has come so far that it has a handler of its own; the one of HUP is the last of them."""
    status = Path(f"/proc/{pid}/status").read_text()
    return bool(int(status.split("SigCgt:")[1].split()[0], 16) >> (number - 1) & 1)


SAID = {130: "interrupted", 143: "ended by SIGTERM", 129: "ended by SIGHUP"}


@pytest.mark.parametrize("policy", ["slow", "async_slow"])
@pytest.mark.parametrize(
    "signals", [(INT,), (TERM,), (HUP,), (INT, INT), (TERM, TERM, HUP), (HUP, TERM, INT)], ids=str
)
def test_a_signal_during_a_batch(tmp_path: Path, policy: str, signals: tuple[int, ...]) -> None:
    run = Command(tmp_path, "run", "--policy", f"policies:{policy}", "--limit", "2", "--run", "stopped")
    run.begun()
    status = run.ended(*signals)
    assert status - 128 in signals, run.said  # of several that come at once, any may be the first to be seen
    assert run.said == f"rlsandbox: {SAID[status]}; what ran is on record: rlsandbox ledger report stopped\n"
    run.nothing_left()
    assert run.records("stopped") == ["cancelled", "cancelled"]


def test_the_terminals_ctrl_c_goes_to_the_whole_group(tmp_path: Path) -> None:
    ledger = tmp_path / "else where"
    run = Command(
        tmp_path, "run", "--policy", "policies:slow", "--limit", "2", "--run", "r", "--ledger", str(ledger)
    )
    run.begun()
    assert run.ended(INT, group=True) == 130, run.said
    assert (
        run.said
        == f"rlsandbox: interrupted; what ran is on record: rlsandbox ledger report '{ledger}/r.db'\n"
    )
    run.nothing_left()


def test_an_ignored_signal_stays_ignored(tmp_path: Path) -> None:
    """As under nohup, or behind ``&`` in a script."""
    for ignored, policy in ((HUP, "slow"), (INT, "async_slow")):
        place = tmp_path / policy
        place.mkdir()
        run = Command(
            place, "run", "--policy", f"policies:{policy}", "--limit", "1", "--run", "r", ignored=ignored
        )
        run.begun()
        assert run.ended(ignored, ignored, TERM) == 143, run.said
        assert run.said == "rlsandbox: ended by SIGTERM; what ran is on record: rlsandbox ledger report r\n"
        assert run.records("r") == ["cancelled"]


def test_a_signal_while_it_starts(tmp_path: Path) -> None:
    """From the first moment at which it can have a handler, and while an image is pulled."""
    run = Command(tmp_path, "run", "--policy", "policies:slow", "--limit", "2", "--run", "early")
    run.begun(lambda: catches(run.child.pid))
    assert run.ended(TERM) == 143, run.said
    # Meanwhile it has gone on: perhaps it has a ledger by now.
    assert run.said.startswith("rlsandbox: ended by SIGTERM") and run.said.count("\n") == 1
    run.nothing_left()
    tool = tmp_path / "bin/skopeo"
    tool.parent.mkdir()
    pulls = _paths.cache() / "pulls"
    before = set(pulls.glob("*.*"))
    tool.write_text('#!/bin/sh\nto="${4#oci:}"; mkdir "${to%:*}" && touch begun\nexec sleep 300.25\n')
    tool.chmod(0o755)
    for number in (INT, TERM):
        (tmp_path / "begun").unlink(missing_ok=True)
        image = ("--image", "registry.test/slow:1", "--limit", "1", "--run", f"pull{number}")
        run = Command(tmp_path, "run", *image, path=tool.parent)
        run.begun((tmp_path / "begun").exists)
        assert run.ended(number) == 128 + number, run.said
        said = f"{SAID[128 + number]}; what ran is on record: rlsandbox ledger report pull{number}"
        assert run.said == f"rlsandbox: {said}\n"
        run.nothing_left()
        assert set(pulls.glob("*.*")) <= before, "half an image"


def test_a_signal_while_it_closes_lets_it_close(tmp_path: Path) -> None:
    run = Command(tmp_path, "run", "--policy", "policies:closes_slowly", "--limit", "1", "--run", "r")
    run.begun()
    assert run.ended(TERM, TERM) == 143, run.said
    assert run.said == "rlsandbox: ended by SIGTERM; what ran is on record: rlsandbox ledger report r\n"
    assert run.out.read_text() == "begun\nclosed\n"
    run.nothing_left()
    assert run.records("r") == ["completed"]


def test_ctrl_c_again_leaves_at_once(tmp_path: Path) -> None:
    run = Command(tmp_path, "run", "--policy", "policies:closes_too_slowly", "--limit", "2", "--run", "r")
    run.begun()
    deadline = time.monotonic() + LONG
    while run.child.poll() is None:
        run.child.send_signal(INT)
        assert time.monotonic() < deadline
        time.sleep(0.2)
    assert run.ended() == 130
    assert run.said == (
        "rlsandbox: interrupted; what ran is on record: rlsandbox ledger report r; "
        "left at once: the next start removes what is left over\n"
    )
    assert run.records("r") == ["completed", "completed"]
    following = Command(tmp_path, "run", "--limit", "1", "--run", "next")
    assert following.ended() == 0, following.said
    following.nothing_left()


@pytest.mark.parametrize(
    ("number", "argv", "begun"),
    [
        (INT, ("bench", "local", "--samples", "1000", "--rounds", "9"), "round 1"),
        (TERM, ("bench", "local", "--samples", "1000", "--rounds", "9", "--hold", "50"), "round 1"),
        (TERM, ("simulate", "--images", "50000"), ""),
        (HUP, ("bench", "ttfc", "--backend", "simulated", "--rollouts", "20000"), ""),
        (TERM, ("bench", "ttfc", "--backend", "local", "--rollouts", "20000", "--think", "1"), ""),
        (TERM, ("quickstart",), "Claimed sandbox"),
        (INT, ("doctor",), ""),
    ],
    ids=lambda value: "-".join(value[:2]) if isinstance(value, tuple) else None,
)
def test_a_signal_during_other_work(tmp_path: Path, number: int, argv: tuple[str, ...], begun: str) -> None:
    for _ in range(5):
        run = Command(tmp_path, *argv)
        run.goes_on(lambda run: catches(run.child.pid) and begun in run.said + run.out.read_text())
        status = run.ended(number)
        if status > 1 or len(argv) > 1:
            break  # else it was so short that it had ended by itself
    assert status == 128 + number, run.said
    assert run.said.splitlines()[-1].startswith(f"rlsandbox: {SAID[status]}")
    assert "Traceback" not in run.said
    run.nothing_left()


def test_as_json(tmp_path: Path) -> None:
    run = Command(tmp_path, "run", "--policy", "policies:slow", "--limit", "1", "--run", "r", "--json")
    run.begun(lambda: "begun" in run.said)
    assert run.ended(TERM) == 143
    told = json.loads(run.out.read_text())
    assert told["exit_status"] == 143
    assert told["error"]["kind"] == "sigterm"
    assert "rlsandbox ledger report r" in told["error"]["message"]
