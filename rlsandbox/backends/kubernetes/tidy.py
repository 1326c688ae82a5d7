"""What runs of this machine left that were killed: found by their Lease, removed by the next run at once.

A Lease names its process exactly (boot, pid namespace, pid, start time), so that no living one can be taken
for dead; what is of other machines waits until its Lease has run out, for ``rlsandbox reap``.
"""

from __future__ import annotations

import logging
import os
from pathlib import Path

from ...errors import SandboxError
from . import names
from .api import Api
from .names import Paths

log = logging.getLogger("rlsandbox.kubernetes")

PROCESS = "rlsandbox/process"
"""An annotation of Leases."""


def this_process() -> str:
    """``boot/pid namespace/pid/start``; empty where that cannot be told (macOS)."""
    try:
        return f"{_machine()}/{os.getpid()}/{_started(os.getpid())}"
    except OSError:
        return ""


def is_dead(process: str) -> bool:
    """Whether it was a process of this machine, seen from here, and has ended."""
    machine, _, rest = process.rpartition("/")
    machine, _, pid = machine.rpartition("/")
    try:
        if not pid.isdecimal() or machine != _machine():
            return False
    except OSError:
        return False
    try:
        return _started(int(pid)) != rest
    except OSError:
        return not Path(f"/proc/{pid}").exists()


def _machine() -> str:
    boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    return f"{boot}/{os.readlink('/proc/self/ns/pid')}"


def _started(pid: int) -> str:
    """In ticks since boot; raises OSError when there is no such process, ``-`` for one that is a zombie."""
    words = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return "-" if words[0] in "ZX" else words[19]


async def tidy(api: Api) -> int:
    """Remove what dead processes of this machine left in the namespace; how many runs they were."""

    from .lease import Leftover, of_runs, reap

    selector = f"{names.MANAGED}=true,{names.OWNER}={names.owner()}"
    found = await api.get(Paths(api.namespace).leases, {"labelSelector": selector})
    dead: set[str] = set()
    for lease in found.get("items") or ():
        meta = lease["metadata"]
        if is_dead((meta.get("annotations") or {}).get(PROCESS, "")):
            dead.add(str((meta.get("labels") or {}).get(names.RUN, "")))
    dead.discard("")
    if not dead:
        return 0
    left: list[Leftover] = await of_runs(api, dead)
    gone, kept = await reap(api, left)
    log.warning(
        "%d run%s of this machine had been killed: %d of their %d things were removed",
        len(dead), "" if len(dead) == 1 else "s", len(gone), len(gone) + len(kept),
    )  # fmt: skip
    return len(dead)


async def tidy_quietly(api: Api) -> None:
    try:
        await tidy(api)
    except SandboxError as error:
        log.warning("what killed runs left could not be removed: %s", error)
