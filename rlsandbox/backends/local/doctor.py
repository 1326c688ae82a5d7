"""What this machine offers for local sandboxes, what is missing, and exactly what to do about it.

Everything is found out by doing it: the keeper's hub tries namespaces and mounts, and at the end a
sandbox is made and runs a command. ``fail`` is a thing without which the default does not work, ``warn``
one without which something is weaker or missing.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import platform
import resource
import shutil
import sys
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

from ... import _paths
from ...errors import SandboxError
from ...keeper import build
from ...keeper.client import KeeperClient
from ...keeper.hubclient import HubClient
from ...spec import Spec
from . import advice, cgroups, limits
from .backend import Local

Status = Literal["ok", "warn", "fail"]
MIB = 1 << 20
_NETWORK_DISKS = {
    "nfs",
    "nfs4",
    "lustre",
    "cifs",
    "smb3",
    "ceph",
    "gpfs",
    "9p",
    "afs",
    "fuse.sshfs",
    "beegfs",
}


@dataclass(frozen=True)
class Row:
    """One thing that was looked at.

    Args:
        name: what.
        status: ``ok``, ``warn`` or ``fail``.
        found: what was found, and what it means.
        fix: what to do; empty when there is nothing to do.
    """

    name: str
    status: Status
    found: str
    fix: str = ""


@dataclass(frozen=True)
class Diagnosis:
    """All rows, and whether the default works here (the CLI's exit status)."""

    rows: tuple[Row, ...]

    @property
    def works(self) -> bool:
        return all(row.status != "fail" for row in self.rows)

    def to_json(self) -> dict[str, Any]:
        return {"works": self.works, "rows": [asdict(row) for row in self.rows]}


def diagnose() -> Diagnosis:
    """Look at this machine; for callers without an event loop."""
    return asyncio.run(examine())


async def examine() -> Diagnosis:
    """Look at this machine."""
    rows = [_system(), *await asyncio.to_thread(_keeper)]
    if rows[-1].status != "fail":
        rows += await _namespaces()
        rows.append(await _sandbox())
    rows += await asyncio.to_thread(_surroundings)
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
    ("fresh_proc", "a /proc of its own", False, "ps and psutil see the episode only", advice.mounts),
)
_IDS = {
    "idmapped": Row("ids", "ok", "65,536 ids of a sandbox's own, by mapped mounts"),
    "range": Row("ids", "ok", "65,536 ids: users inside are real"),
    "one": Row(
        "ids",
        "warn",
        "one id: everything inside is root's, and user= is refused",
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
    rows += [
        Row(key.replace("_", " "), "ok" if said == "ok" else "warn", said)
        for key, said in sorted(facts.items())
    ]
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


def _surroundings() -> list[Row]:
    rows = [_cgroups(), _seccomp(), _memory(), *_disk(), _counts()]
    found = shutil.which("skopeo")
    rows.append(
        Row("skopeo", "ok", f"{found}: images can be named by registry reference")
        if found
        else Row(
            "skopeo",
            "warn",
            "missing: images come from files only (OCI layout, docker save)",
            "Debian: apt-get install skopeo",
        )
    )
    try:
        from compression import zstd  # type: ignore[import-not-found, unused-ignore]  # noqa: F401

        rows.append(Row("zstd", "ok", "layers compressed with zstd can be read"))
    except ImportError:
        try:
            import zstandard  # type: ignore[import-not-found, unused-ignore]  # noqa: F401

            rows.append(Row("zstd", "ok", "layers compressed with zstd can be read"))
        except ImportError:
            text = "layers compressed with zstd cannot be read"
            rows.append(Row("zstd", "warn", text, "pip install zstandard"))
    runsc = shutil.which("runsc")
    if runsc:
        text = f"{runsc}: used by the kubernetes backend's runtime classes, not by this one"
        rows.append(Row("gVisor", "ok", text))
    return rows


def _cgroups() -> Row:
    found = cgroups.find()
    missing = [name for name in ("memory", "pids", "cpu") if name not in found.writable]
    if not missing:
        return Row(
            "cgroups", "ok", f"{found.version}, writable: memory, processes and cpu are held by the kernel"
        )
    return Row(
        "cgroups",
        "warn",
        f"{found.version or 'none'}, not writable for {', '.join(missing)}: a watchdog, and none for cpu",
        cgroups.advice(found),
    )


def _seccomp() -> Row:
    fields = {}
    with contextlib.suppress(OSError), open("/proc/self/status") as file:
        fields = dict(line.rstrip("\n").split(":\t", 1) for line in file if ":\t" in line)
    if "Seccomp" not in fields:
        fix = "a kernel with CONFIG_SECCOMP_FILTER"
        return Row("seccomp", "warn", "this kernel has none: episodes may try every system call", fix)
    if fields["Seccomp"].strip() != "0":
        return Row("seccomp", "ok", "there, and a filter is on this process already (a container's?)")
    return Row("seccomp", "ok", "there")


def _memory() -> Row:
    have = limits.machine_memory()
    each = limits.of(Spec()).memory
    text = f"{have // MIB} MiB; a sandbox may use {each // MIB} MiB unless its spec says otherwise"
    if have < 1024 * MIB:
        return Row("memory", "warn", text, 'name a small limit: Spec(memory="128MiB")')
    return Row("memory", "ok", text)


def _disk() -> list[Row]:
    rows = []
    for name, path, fix in (
        ("state", _paths.home(), "RLSANDBOX_HOME"),
        ("cache", _paths.cache(), "RLSANDBOX_CACHE"),
    ):
        try:
            _paths.private_directory(path)
            space = os.statvfs(path)
        except OSError as error:
            text = f"{path}: {error.strerror}"
            rows.append(Row(name, "fail", text, f"set {fix} to a directory of yours"))
            continue
        kind = _filesystem(path)
        free = space.f_bavail * space.f_frsize
        text = f"{path} ({kind}, {free // MIB} MiB free)"
        if kind in _NETWORK_DISKS:
            rows.append(Row(name, "warn", f"{text}: a network disk", f"set {fix} to a local directory"))
        elif free < 1024 * MIB:
            rows.append(Row(name, "warn", f"{text}: little room for images", f"free some, or set {fix}"))
        else:
            rows.append(Row(name, "ok", text))
    return rows


def _filesystem(path: Path) -> str:
    """The type of the filesystem that *path* is on."""
    best, kind = "", "unknown"
    real = os.path.realpath(path)
    with contextlib.suppress(OSError), open("/proc/self/mounts") as file:
        for line in file:
            _, place, found, *_ = line.split(" ")
            place = place.encode().decode("unicode_escape")
            if len(place) >= len(best) and (place == "/" or f"{real}/".startswith(f"{place}/")):
                best, kind = place, found
    return kind


def _counts() -> Row:
    """How many sandboxes the machine's counters allow."""
    hard = resource.getrlimit(resource.RLIMIT_NPROC)[1]
    found: list[tuple[int, str, str]] = []
    # Each sandbox: two user namespaces, about three processes.
    for name, each in (
        ("user.max_user_namespaces", 2),
        ("user.max_mnt_namespaces", 3),
        ("kernel.pid_max", 8),
    ):
        with contextlib.suppress(OSError, ValueError):
            value = int(Path("/proc/sys", name.replace(".", "/")).read_text())
            found.append((value // each, f"{name}={value}", f"sysctl -w {name}={max(65536, value * 4)}"))
    if os.geteuid() != 0 and hard != resource.RLIM_INFINITY:
        found.append((hard // 8, f"ulimit -u {hard}", "raise nproc in /etc/security/limits.conf"))
    if not found:
        return Row("counters", "ok", "no limit was found")
    least, what, fix = min(found)
    text = f"room for about {least} sandboxes ({what})"
    return Row("counters", "ok" if least >= 512 else "warn", text, "" if least >= 512 else fix)
