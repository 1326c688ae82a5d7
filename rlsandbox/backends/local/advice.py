"""What to do when the machine does not let a sandbox be made: from what was tried to one sentence."""

from __future__ import annotations

import errno


def advice(code: int, what: str) -> str:
    """The remedy for errno *code* when *what* was tried; empty when there is no known one."""
    text = what.lower()
    if "user namespace" in text or "newuser" in text:
        if code == errno.ENOSPC:
            return "user namespaces are switched off here: sysctl -w user.max_user_namespaces=65536"
        if code in (errno.EPERM, errno.EACCES):
            return (
                "user namespaces are forbidden here: sysctl -w kernel.unprivileged_userns_clone=1 "
                "kernel.apparmor_restrict_unprivileged_userns=0 (those that exist), or run as root; in a "
                "container start it with --security-opt seccomp=unconfined --security-opt apparmor=unconfined"
            )
    if code == errno.EPERM and ("mount" in text or "proc" in text):
        return (
            "mounting is forbidden here: in a container start it with --cap-add SYS_ADMIN --security-opt "
            "seccomp=unconfined --security-opt apparmor=unconfined --security-opt systempaths=unconfined"
        )
    return ""
