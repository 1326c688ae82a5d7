"""How much of this machine a sandbox may use when its spec does not say, and how many fit at all."""

from __future__ import annotations

import functools
import os
from dataclasses import dataclass

from ...errors import ConfigError
from ...spec import Spec
from . import cgroups

MIB = 1 << 20
PIDS = 1024
NOFILE = 65536
# An idle sandbox costs about this much, all told: no number of them beyond the machine's memory makes sense.
IDLE = 1 * MIB
LEAST = 1 * MIB
MOST_PIDS = 1 << 21  # the kernel has four million at most, and refuses a limit above that
MOST_CPU = 65536
# A file on a tmpfs takes an inode of about this size even when it is empty.
INODE = 1024


@dataclass(frozen=True)
class Allowed:
    """Limits of one sandbox, in the hub's terms. None: no limit."""

    memory: int
    disk: int
    inodes: int
    cpu_milli: int | None
    pids: int
    nofile: int

    def facts(self) -> dict[str, str]:
        """Told with the member: ``memory_bytes``, ``disk_bytes``, ``cpu_milli``, ``pids``, ``nofile``."""
        return {
            "memory_bytes": str(self.memory),
            "disk_bytes": str(self.disk),
            "pids": str(self.pids),
            "nofile": str(self.nofile),
            **({"cpu_milli": str(self.cpu_milli)} if self.cpu_milli is not None else {}),
        }


def of(spec: Spec) -> Allowed:
    """The limits of *spec*, or ConfigError where nothing could live with them.

    What it leaves open is chosen so that a sandbox cannot take the trainer's memory.
    The upper layer lies on a tmpfs, which counts as memory: it is smaller than the memory limit, so that
    a full disk is "no space left" and not the end of a process.
    """
    if spec.memory_bytes is not None and spec.memory_bytes < LEAST:
        raise ConfigError(
            f"Spec.memory={spec.memory!r}: a sandbox needs {LEAST // MIB} MiB at least, with nothing in it"
        )
    memory = spec.memory_bytes if spec.memory_bytes is not None else min(2048 * MIB, machine_memory() // 2)
    disk = spec.disk_bytes if spec.disk_bytes is not None else memory // 2
    return Allowed(
        memory=memory,
        disk=disk,
        inodes=max(disk // INODE // 4, 4096),
        cpu_milli=max(1, round(min(spec.cpu, MOST_CPU) * 1000)) if spec.cpu is not None else None,
        pids=min(spec.pids, MOST_PIDS) if spec.pids is not None else PIDS,
        nofile=NOFILE,
    )


@functools.cache
def machine_memory() -> int:
    """Bytes of memory that this process may use: the machine's, or its control group's when that is less."""
    total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    group = cgroups.memory_limit()
    return total if group is None else min(total, group)


def check_size(size: int, spec: Spec) -> None:
    """Refuse a pool that can never fit.

    Raises:
        ConfigError: it says how much there is and what would fit.
    """
    of(spec)
    each = spec.memory_bytes if spec.memory_bytes is not None else IDLE
    have = machine_memory()
    if have and size * each > have:
        share = have // size // MIB
        fits = have // each
        advice = [f"size={fits}"] if fits else []
        if spec.memory_bytes is not None and share:
            advice.append(f'memory="{share}MiB"')
        raise ConfigError(
            f"a pool of {size} sandboxes with {each // MIB} MiB each needs {size * each // MIB} MiB; "
            f"this machine has {have // MIB} MiB",
            hint=" or ".join(advice),
        )
