"""The keepers of this process's pools, seen from the host: for tests that kill them, or want a bad one."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path


def leaving_out(step: str, place: Path) -> Path:
    """A keeper of the test build whose resets leave one *step* out: a program in *place*.

    A hub's environment is not its client's, so sh tells it.
    """
    import pytest

    from rlsandbox.errors import UnsupportedError
    from rlsandbox.keeper import build

    try:
        keeper = build.keeper_binary(variant="skip")
    except UnsupportedError as error:
        pytest.skip(f"the test build of the keeper cannot be made here: {error}")
    script = place / "keeper"
    script.write_text(f'#!/bin/sh\nRLS_SKIP={step} exec {keeper} "$@"\n')
    script.chmod(0o755)
    return script


def keeper_above(command: str, owner: int | None = None) -> int:
    """The pid, for this process, of the keeper in whose sandbox *command* runs; *owner* has the pool."""
    owner = os.getpid() if owner is None else owner
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit() and cmdline(entry.name) == command.split():
            line = [int(entry.name)]
            while line[-1] != owner:
                status = Path(f"/proc/{line[-1]}/stat").read_text()
                line.append(int(status.rpartition(")")[2].split()[1]))
            return line[-3]  # ... its keeper, the hub, the pool's process
    raise LookupError(command)


def _line(pid: int, ancestor: int) -> list[int]:
    line = [pid]
    while line[-1] != ancestor:
        status = Path(f"/proc/{line[-1]}/stat").read_text()
        line.append(int(status.rpartition(")")[2].split()[1]))
    return line


def keeper_of(command: str, wait_s: float = 20.0, owner: int | None = None) -> int:
    """:func:`keeper_above` once *command* runs."""
    end = time.monotonic() + wait_s
    while True:
        try:
            return keeper_above(command, owner)
        except (LookupError, OSError):  # not yet, or gone while it was looked at
            if time.monotonic() > end:
                raise


def kill_keeper_of(command: str, owner: int, wait_s: float = 60.0) -> None:
    """Kill the keeper in whose sandbox *command* runs, and wait until that has ended too.

    What a keeper leaves behind is the hub's for a moment, and would be taken for a keeper.
    """
    end = time.monotonic() + wait_s
    while True:
        running = [
            entry for entry in os.listdir("/proc") if entry.isdigit() and cmdline(entry) == command.split()
        ]
        try:
            for pid in running:
                line = _line(int(pid), owner)
                if len(line) > 3:
                    os.kill(line[-3], signal.SIGKILL)
                    while cmdline(pid):
                        assert time.monotonic() < end, f"{command!r} outlives its keeper"
                        time.sleep(0.005)
                    return
        except OSError:  # gone while it was looked at
            continue
        assert time.monotonic() < end, f"{command!r} runs nowhere"
        time.sleep(0.02)


def until_gone(command: str, wait_s: float = 20.0) -> None:
    """Wait until *command* runs nowhere."""
    end = time.monotonic() + wait_s
    while any(entry.isdigit() and cmdline(entry) == command.split() for entry in os.listdir("/proc")):
        assert time.monotonic() < end, f"{command!r} still runs"


def cmdline(pid: str) -> list[str]:
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes().decode("utf-8", "replace").split("\0")[:-1]
    except OSError:
        return []
