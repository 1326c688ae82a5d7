"""Jobs of verl in processes of their own: what they leave in the log, and what of them is still there."""

from __future__ import annotations

import json
from pathlib import Path


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
    return [json.loads(line)["data"] for line in path.read_text().splitlines()] if path.exists() else []
