"""Signals to a command whose work does not let the interruption through; a terminal that is gone."""

from __future__ import annotations

import os
import pty
import signal
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]
BEGIN = """
import asyncio, gc, os, signal, sys, threading
from rlsandbox.cli import main, signals
import rlsandbox.cli.root as whole

def kill():
    os.kill(os.getpid(), signal.SIGTERM)
    for _ in range(1000):  # handlers run between any two steps
        pass
"""
END = """
whole._run = lambda arguments, logs: command()
sys.exit(main())
"""


def ended(tmp_path: Path, command: str) -> subprocess.CompletedProcess[str]:
    env = {**os.environ, "PYTHONPATH": str(ROOT), "RLSANDBOX_HOME": str(tmp_path)}
    return subprocess.run(
        [sys.executable, "-c", BEGIN + command + END], capture_output=True, text=True, env=env, timeout=300
    )


SWALLOWED = {
    "__del__": """
class Dying:
    def __del__(self):
        kill()

def command():
    dying = Dying()
    del dying
    threading.Event().wait(250)
    return 0
""",
    "a callback, at the very end": """
import weakref

class Dying: ...

def command():
    dying = Dying()
    ref = weakref.ref(dying, lambda _: kill())
    del dying
    return 0
""",
    "a result": """
async def work():
    try:
        kill()
        await asyncio.sleep(250)
    except asyncio.CancelledError:
        return 0

def command():
    signals.run_async(work())
    print("went on")
    return 0
""",
    "another error": """
async def work():
    try:
        kill()
        await asyncio.sleep(250)
    except asyncio.CancelledError:
        raise ValueError("no") from None

def command():
    return signals.run_async(work())
""",
    "an error of a command": """
def command():
    try:
        kill()
    finally:
        return 1
""",
}


@pytest.mark.parametrize("how", SWALLOWED)
def test_an_interruption_is_not_lost(tmp_path: Path, how: str) -> None:
    done = ended(tmp_path, SWALLOWED[how])
    assert (done.returncode, done.stdout, done.stderr) == (143, "", "rlsandbox: ended by SIGTERM\n")


def test_other_errors_that_nobody_can_catch_are_told_as_ever(tmp_path: Path) -> None:
    command = """
class Dying:
    def __del__(self):
        raise ValueError("no")

def command():
    hook = sys.unraisablehook
    dying = Dying()
    del dying
    return 0
"""
    done = ended(tmp_path, command)
    assert done.returncode == 0
    assert "Exception ignored in" in done.stderr
    assert "ValueError: no" in done.stderr


@pytest.mark.skipif(not hasattr(signal, "SIGHUP"), reason="there is no SIGHUP")
def test_a_terminal_that_is_gone(tmp_path: Path) -> None:
    """Nothing can be said any more: the status is still the signal's."""
    command = """
import logging

def command():
    logs = whole._Logs()
    logs.begin(logging.WARNING)
    logging.getLogger("rlsandbox").warning("held")
    os.write(int(sys.argv[1]), b"up")
    try:
        threading.Event().wait(250)
    finally:
        logs.end()
    return 0
"""
    master, slave = pty.openpty()
    said, says = os.pipe()
    try:
        child = subprocess.Popen(
            [sys.executable, "-c", BEGIN + command + END, str(says), "--json"],
            stdin=slave, stdout=slave, stderr=slave, pass_fds=[says], start_new_session=True,
            env={**os.environ, "PYTHONPATH": str(ROOT), "RLSANDBOX_HOME": str(tmp_path)},
            preexec_fn=lambda: signal.signal(signal.SIGHUP, signal.SIG_DFL),
        )  # fmt: skip
        try:
            os.close(slave)
            os.close(says)
            says = -1
            assert os.read(said, 2) == b"up"
            os.close(master)  # every write to it fails from here on
            master = -1
            child.send_signal(signal.SIGHUP)
            assert child.wait(300) == 129
        finally:
            child.kill()
            child.wait()
    finally:
        for fd in (said, says, master):
            if fd >= 0:
                os.close(fd)


def test_an_interruption_that_comes_while_handlers_are_set_leaves_none(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from rlsandbox.cli import signals

    before = {number: signal.getsignal(number) for number in signals.ENDING}
    stop = signals.Stop()
    install = signal.signal
    calls = []

    def interrupted(number: int, handler: object) -> object:
        result = install(number, handler)  # type: ignore[arg-type]
        calls.append(number)
        if len(calls) == 1:
            raise KeyboardInterrupt
        return result

    monkeypatch.setattr(signal, "signal", interrupted)
    with pytest.raises(KeyboardInterrupt), signals.ended_by_signals(stop, whole=False):
        raise AssertionError("it was interrupted before")
    assert {number: signal.getsignal(number) for number in signals.ENDING} == before
    assert signals._stop is None
    assert len(calls) > 1
