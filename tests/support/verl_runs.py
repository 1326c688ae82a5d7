"""Jobs of verl in processes of their own: what they leave in the log, and what of them is still there."""

from __future__ import annotations

import json
import subprocess
import time
from pathlib import Path

LONGEST_S = 900.0  # on a busy machine; it takes half a minute


def cmdline(pid: str) -> str:
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
    except OSError:
        return ""


def of(home: Path) -> list[str]:
    """Processes that have the run's home in their environment: ray's and the pool's owner."""
    wanted, found = f"RLSANDBOX_HOME={home}".encode(), []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                if wanted in (entry / "environ").read_bytes().split(b"\0"):
                    found.append(entry.name)
            except OSError:
                continue
    return found


def hubs(home: Path) -> list[str]:
    """What makes the owner's sandboxes, and ends with them; its environment is empty."""
    owners = [pid for pid in of(home) if cmdline(pid).startswith("ray::PoolOwner")]
    every = [entry.name for entry in Path("/proc").iterdir() if entry.name.isdigit()]
    return [pid for pid in every if any(f" --client {owner} " in cmdline(pid) for owner in owners)]


def log(path: Path) -> list[dict[str, float]]:
    lines = path.read_text().splitlines(keepends=True) if path.exists() else []
    return [json.loads(line)["data"] for line in lines if line.endswith("\n")]  # the last may be half there


def begun(process: subprocess.Popen[str], place: Path, steps: int) -> list[str]:
    """Wait until the job in *place* has logged so many steps; what makes its sandboxes."""
    end = time.monotonic() + LONGEST_S
    while len(log(place / "log.jsonl")) < steps:
        assert process.poll() is None and time.monotonic() < end, (place / "out").read_text()[-4000:]
        time.sleep(0.1)
    making = hubs(place / "home")
    assert making, "there would be nothing to leave"
    return making


def until_gone(place: Path, making: list[str]) -> None:
    """Wait until nothing of an ended job in *place* is there any more."""
    end = time.monotonic() + 120
    while left := of(place / "home") + [pid for pid in making if " --client " in cmdline(pid)]:
        assert time.monotonic() < end, [cmdline(pid) for pid in left]
        time.sleep(0.2)
