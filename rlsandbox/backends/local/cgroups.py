"""Control groups of hubs: those that dead ones left, and how to get them where there are none."""

from __future__ import annotations

import contextlib
import os
import re
from pathlib import Path

from . import advice as _advice

# A hub names its groups after its process, when that began, and the pid namespace in which both are so.
_HUB = re.compile(r"rlsandbox\.(\d+)\.(\d+)\.(\d+)")


def dead(proc: str = "/proc") -> list[tuple[int, Path]]:
    """(process, directory) of the groups of hubs that are no more, wherever a hub of ours would make them.

    Only of hubs of our own pid namespace: whether one lives in a container that shares the groups with us
    cannot be told by its number.
    """
    space = pid_namespace(proc)
    mounts, own = _mounts(Path(proc, "self/mountinfo")), _own(Path(proc, "self/cgroup"))
    places: dict[Path, None] = {}
    for controller, mount in mounts.items():
        if controller not in own:
            continue
        place = _below(mount, own[controller])
        # As far up as a hub looks.
        while place.is_relative_to(mount[0]):
            places[place] = None
            place = place.parent
    found = []
    for place in places:
        with contextlib.suppress(OSError):
            for name in os.listdir(place):
                match = _HUB.fullmatch(name)
                if match and match.group(3) == space and _born(proc, match.group(1)) != match.group(2):
                    found.append((int(match.group(1)), place / name))
    return found


def pid_namespace(proc: str = "/proc") -> str:
    """The number of our pid namespace; ``0`` where it is not told."""
    try:
        return str(Path(proc, "self/ns/pid").stat().st_ino)
    except OSError:
        return "0"


def _born(proc: str, pid: str) -> str:
    """When process *pid* began, as the kernel counts; empty when there is none."""
    try:
        return Path(proc, pid, "stat").read_text().rpartition(") ")[2].split()[19]
    except (OSError, IndexError):
        return ""


def memory_limit(proc: str = "/proc") -> int | None:
    """Bytes that the own group and those above it allow (a batch system's, a container's); None: no limit."""
    mounts, own = _mounts(Path(proc, "self/mountinfo")), _own(Path(proc, "self/cgroup"))
    least: int | None = None
    for controller, file in (("", "memory.max"), ("memory", "memory.limit_in_bytes")):
        if controller not in mounts or controller not in own:
            continue
        place = _below(mounts[controller], own[controller])
        while place.is_relative_to(mounts[controller][0]):
            with contextlib.suppress(OSError, ValueError):
                found = int((place / file).read_text())
                least = found if least is None else min(least, found)
            place = place.parent
    return least


def advice() -> str:
    """How to get groups of one's own."""
    if "" in _mounts(Path("/proc/self/mountinfo")) and os.geteuid() != 0:
        return "start the program with: systemd-run --user --scope -p Delegate=yes COMMAND"
    if _advice.container():
        return (
            "start the container with --cgroupns=private and /sys/fs/cgroup writable (docker: --privileged)"
        )
    return "run as root, or give this user a delegated group (systemd: Delegate=yes)"


def _mounts(path: Path) -> dict[str, tuple[Path, str]]:
    """Controller ("" for v2) -> (mount point, the group that is its root)."""
    found: dict[str, tuple[Path, str]] = {}
    with contextlib.suppress(OSError):
        for line in path.read_text().splitlines():
            head, _, tail = line.partition(" - ")
            fields, kind = head.split(), tail.split()
            if len(fields) < 5 or len(kind) < 3:
                continue
            if kind[0] == "cgroup2":
                found[""] = (Path(fields[4]), fields[3])
            elif kind[0] == "cgroup":
                for controller in kind[2].split(","):
                    found.setdefault(controller, (Path(fields[4]), fields[3]))
    return found


def _own(path: Path) -> dict[str, str]:
    found: dict[str, str] = {}
    with contextlib.suppress(OSError):
        for line in path.read_text().splitlines():
            _, controllers, group = line.split(":", 2)
            for controller in controllers.split(","):
                found[controller] = group
    return found


def _below(mount: tuple[Path, str], group: str) -> Path:
    """The own group's directory; a container's mount shows only what lies below its root."""
    place, root = mount
    inside = group.removeprefix(root) if root != "/" and group.startswith(root) else group
    return place / inside.lstrip("/")
