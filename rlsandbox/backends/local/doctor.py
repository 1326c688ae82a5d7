"""What this machine offers for local sandboxes, what is missing, and exactly what to do about it.

Everything is found out by doing it: the keeper's hub tries namespaces and mounts, and at the end a
sandbox is made and runs a command. ``fail`` is a thing without which the default does not work, ``warn``
one without which something is weaker or missing.
"""

from __future__ import annotations

import asyncio
import os
import platform
import subprocess
import sys
from collections.abc import Callable

from ...errors import SandboxError
from ...keeper import build
from ...keeper.client import KeeperClient
from ...keeper.hubclient import HubClient
from ...spec import Spec
from ..diagnosis import Diagnosis, Row
from . import advice, cgroups
from .backend import Local
from .surroundings import surroundings


async def examine() -> Diagnosis:
    """Look at this machine."""
    rows = [_system(), *await asyncio.to_thread(_keeper)]
    if rows[-1].status != "fail":
        rows += await _namespaces()
        rows.append(await _sandbox())
    rows += await asyncio.to_thread(surroundings)
    return Diagnosis(tuple(rows))


def _system() -> Row:
    where = advice.container()
    text = f"Linux {platform.release()} {platform.machine()}, Python {platform.python_version()}"
    text += f", uid {os.getuid()}"
    if where:
        text += f", perhaps in a container ({where})"
    if sys.platform != "linux":
        return Row(
            "system", "fail", f"{sys.platform}: local sandboxes need Linux", "use the kubernetes backend"
        )
    return Row("system", "ok", text)


def _keeper() -> list[Row]:
    rows = []
    arch = build.machine()
    compiler = build.find_compiler(arch)
    fix = "Debian: apt-get install gcc libc6-dev; else: pip install ziglang"
    try:
        binary = build.keeper_binary()
    except SandboxError as error:
        return [Row("keeper", "fail", error.message, fix)]
    if compiler is None:
        rows.append(
            Row("compiler", "warn", "no compiler here links statically; the keeper is there already", fix)
        )
    else:
        name = "ziglang" if build.ZIG in compiler else " ".join(compiler)
        rows.append(Row("compiler", "ok", f"{name} makes static programs for {arch}"))
    try:
        subprocess.run([binary, "version"], check=True, capture_output=True, timeout=30)
    except (OSError, subprocess.SubprocessError) as error:
        fix = "set RLSANDBOX_CACHE to a directory from which programs may run (no noexec mount)"
        return [*rows, Row("keeper", "fail", f"{binary} cannot be run: {error}", fix)]
    rows.append(Row("keeper", "ok", f"{binary} ({binary.stat().st_size >> 10} KiB)"))
    return rows


# What the hub tries: its name there, ours, whether the default needs it, what it is for, what to do.
_PROBES: tuple[tuple[str, str, bool, str, Callable[[], str]], ...] = (
    (
        "user_namespace",
        "user namespaces",
        True,
        "episodes have no rights over the machine",
        advice.user_namespaces,
    ),
    ("mount_namespace", "mount namespaces", True, "each episode sees its own files", advice.mounts),
    ("pid_namespace", "pid namespaces", True, "each episode sees its own processes", advice.mounts),
    ("ipc_namespace", "ipc namespaces", True, "shared memory is an episode's own", advice.mounts),
    ("net_namespace", "network namespaces", True, 'network="none" holds', advice.mounts),
    ("overlay", "overlay mounts", True, "a reset costs the same whatever was done", advice.mounts),
    ("overlay_whiteout", "overlay deletions", True, "files of the base can be deleted", advice.mounts),
    ("overlay_whiteout_mkdir", "overlay mkdir over one", True, "and made anew as directories", advice.mounts),
    ("overlay_unmount", "overlay unmount", True, "a reset lets go of the old view", advice.mounts),
    ("overlay_layers", "overlay layers", True, "setups are primed once, snapshots are forked", advice.mounts),
    ("seccomp", "seccomp", True, "dangerous system calls are refused", advice.seccomp),
    ("fresh_proc", "a /proc of its own", False, "ps and psutil see the episode only", advice.mounts),
)
_IDS = {
    "idmapped": Row("ids", "ok", "65,536 ids of a sandbox's own, by mapped mounts"),
    "range": Row(
        "ids",
        "ok",
        "65,536 ids: users inside are real; the host's own files belong to nobody there, so installing "
        "packages (dpkg -i, apt) works on an image only",
    ),
    "one": Row(
        "ids",
        "warn",
        "one id: everything inside is root's, user= is refused, and packages cannot be installed (dpkg -i)",
        "install newuidmap (Debian: apt-get install uidmap) and give this user a range: "
        "usermod --add-subuids 100000-165535 --add-subgids 100000-165535 $USER",
    ),
}


async def _namespaces() -> list[Row]:
    try:
        hub = await HubClient.start(await asyncio.to_thread(build.keeper_binary))
    except SandboxError as error:
        return [Row("hub", "fail", error.message, error.hint or advice.advice(error.message))]
    try:
        facts = await hub.probe()
    finally:
        await hub.aclose()
    rows = []
    for key, name, needed, purpose, fix in _PROBES:
        said = facts.pop(key, "not tried")
        if said == "ok":
            rows.append(Row(name, "ok", purpose))
        else:
            rows.append(Row(name, "fail" if needed else "warn", f"{said}; without it not: {purpose}", fix()))
    told = facts.pop("ids", "")
    if told in _IDS:
        rows.append(_IDS[told])
    rows += _limits(facts)
    return rows


def _limits(facts: dict[str, str]) -> list[Row]:
    """By which means a sandbox's limits hold."""
    groups = {name: facts.get(f"cgroup.{name}", "none") for name in ("memory", "pids", "cpu")}
    weaker = {"memory": "by a watchdog", "pids": "by an rlimit", "cpu": "not at all"}
    missing = [name for name, said in groups.items() if said == "none"]
    if missing:
        held = ", ".join(f"{name} is held {weaker[name]}" for name in missing)
        rows = [
            Row(
                "control groups",
                "warn",
                f"none can be made for {', '.join(missing)}: {held}",
                cgroups.advice(),
            )
        ]
    else:
        rows = [
            Row(
                "control groups",
                "ok",
                f"{groups['memory']}: memory, processes and cpu are held by the kernel",
            )
        ]
    if facts.get("freezer", "none") == "none":
        text = "none: a paused sandbox's processes are stopped one by one"
        rows.append(Row("freezer", "warn", text, cgroups.advice()))
    else:
        rows.append(Row("freezer", "ok", f"{facts['freezer']}: a sandbox is paused as a whole"))
    return rows


async def _sandbox() -> Row:
    """The proof: a sandbox, a command in it."""
    backend = Local()
    try:
        member = await backend.provision(Spec(), member="doctor", labels={}, deadline=60)
        client = await KeeperClient.open(*await backend.connect(member))
        try:
            out = bytearray()
            channel = await client.spawn(
                ["/bin/sh", "-c", "id -u; echo works"],
                env=["PATH=/usr/bin:/bin"],
                sink=lambda stream, data, tail: out.extend(data),
            )
            end = await channel.wait_exit()
        finally:
            await client.aclose()
        await backend.dispose(member)
        if end.status != 0 or not out.endswith(b"works\n"):
            text = out.decode(errors="replace").strip()
            return Row("a sandbox", "fail", f"its first command ended with {end.status}: {text}")
        means = {k.removeprefix("limit."): v for k, v in member.facts.items() if k.startswith("limit.")}
        held = ", ".join(f"{name} by {how}" for name, how in sorted(means.items()))
        mode = member.facts.get("mode", "?")
        return Row(
            "a sandbox",
            "ok",
            f"made, ran a command, reset mode {mode}" + (f"; limits: {held}" if held else ""),
        )
    except SandboxError as error:
        return Row("a sandbox", "fail", error.message, error.hint)
    finally:
        await backend.close()
