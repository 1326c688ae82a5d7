"""What to do when the machine does not let a sandbox be made: from what the keeper said to one sentence."""

from __future__ import annotations

import errno
import os
from pathlib import Path

# A switch that forbids user namespaces, the value that does, and what to set instead.
SWITCHES = (
    ("user.max_user_namespaces", "0", "65536"),
    ("kernel.unprivileged_userns_clone", "0", "1"),
    ("kernel.apparmor_restrict_unprivileged_userns", "1", "0"),
)
_UNCONFINED = "--security-opt seccomp=unconfined --security-opt apparmor=unconfined"
DOCKER_USERNS = f"docker run {_UNCONFINED} (podman: the same)"
DOCKER_MOUNTS = (
    f"docker run --cap-add SYS_ADMIN {_UNCONFINED} --security-opt systempaths=unconfined "
    "(podman: --cap-add SYS_ADMIN --security-opt seccomp=unconfined --security-opt unmask=ALL)"
)
POD = "a pod: hostUsers: false, capabilities add SYS_ADMIN, seccompProfile Unconfined, procMount Unmasked"


def container() -> str:
    """The kind of container that this process runs in; empty when none is recognised."""
    if os.environ.get("KUBERNETES_SERVICE_HOST"):
        return "pod"
    if os.path.exists("/run/.containerenv"):
        return "podman"
    if os.path.exists("/.dockerenv"):
        return "docker"
    return os.environ.get("container", "")  # noqa: SIM112 - so named by systemd, LXC and enroot


def closed_switches(root: str = "/proc/sys") -> list[str]:
    """``name=value`` to set for each switch of this machine that forbids user namespaces."""
    found = []
    for name, forbids, allows in SWITCHES:
        try:
            value = Path(root, name.replace(".", "/")).read_text().strip()
        except OSError:
            continue
        if value == forbids:
            found.append(f"{name}={allows}")
    return found


def user_namespaces() -> str:
    """How to allow user namespaces here."""
    switches = closed_switches()
    if switches:
        return f"sysctl -w {' '.join(switches)} (and the same in /etc/sysctl.d to keep it)"
    kind = container()
    if kind == "pod":
        return POD
    if kind:
        return f"start the container with: {DOCKER_USERNS}"
    return "allow user namespaces for this user (sysctl, AppArmor or SELinux policy), or run as root"


def mounts() -> str:
    """How to allow a sandbox's mounts here."""
    # AppArmor lets a user make a namespace and then takes its rights away: it is the mounts that fail.
    if os.geteuid() != 0 and closed_switches():
        return user_namespaces()
    if container() == "pod":
        return POD
    return f"in a container start it with: {DOCKER_MOUNTS}; on a bare machine run as root or look at its LSM"


def seccomp() -> str:
    """How to get filters of system calls."""
    if container():
        return f"start the container with: {DOCKER_USERNS}"
    return "a kernel with CONFIG_SECCOMP_FILTER"


def advice(said: str) -> str:
    """The remedy for what the keeper said it could not do; empty when there is none to tell."""
    text = said.lower()
    if "map the ids of" in text:
        return (
            "set RLSANDBOX_CACHE to a directory on a local disk (ext4, xfs, btrfs): this one cannot map ids"
        )
    if "newgidmap" in text:
        return (
            "chmod u+s /usr/bin/newuidmap /usr/bin/newgidmap, or install them again (Debian: package uidmap)"
        )
    forbidden = any(os.strerror(code).lower() in text for code in (errno.EPERM, errno.EACCES, errno.ENOSPC))
    if not forbidden:
        return ""
    if "user namespace" in text or "uid_map" in text or "own user id" in text:
        return user_namespaces()
    if "mount" in text or "pivot_root" in text or "clone" in text:
        return mounts() if os.strerror(errno.ENOSPC).lower() not in text else ""
    return ""
