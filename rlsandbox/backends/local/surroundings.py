"""What surrounds sandboxes on this machine: memory, disks, counters, tools. Rows for :mod:`.doctor`."""

from __future__ import annotations

import contextlib
import importlib.util
import os
import resource
import shutil
from pathlib import Path

from ... import _paths
from ...errors import ConfigError
from ...spec import Spec
from ..diagnosis import Row
from . import limits

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


def surroundings() -> list[Row]:
    rows = [_memory(), *_disk(), _counts()]
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
    if any(_installed(name) for name in ("compression.zstd", "zstandard")):
        rows.append(Row("zstd", "ok", "layers compressed with zstd can be read"))
    else:
        text = "layers compressed with zstd cannot be read"
        rows.append(Row("zstd", "warn", text, "pip install zstandard"))
    runsc = shutil.which("runsc")
    if runsc:
        text = f"{runsc}: used by the kubernetes backend's runtime classes, not by this one"
        rows.append(Row("gVisor", "ok", text))
    return rows


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
        except ConfigError as error:
            rows.append(Row(name, "fail", error.message, f"set {fix} to a directory of yours"))
            continue
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


def _installed(module: str) -> bool:
    try:
        return importlib.util.find_spec(module) is not None
    except ModuleNotFoundError:
        return False
