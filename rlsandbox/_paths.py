"""Where rlsandbox keeps its own files. Nothing here creates anything.

``home()`` holds ledgers and state of runs (precious), ``cache()`` what can be made again: unpacked image
layers, prepared bases, keepers built on this machine. Both belong to one user, and what they hold is made
with mode 0700: an unpacked image contains setuid files, which nobody else on the machine may reach.
"""

from __future__ import annotations

import math
import os
import time
from pathlib import Path

from .errors import ConfigError


def home() -> Path:
    """``$RLSANDBOX_HOME``, else ``$XDG_STATE_HOME/rlsandbox``, else ``~/.local/state/rlsandbox``."""
    return _place("RLSANDBOX_HOME", "XDG_STATE_HOME", ".local/state")


def cache() -> Path:
    """``$RLSANDBOX_CACHE``, else ``$RLSANDBOX_HOME/cache``, else the user's cache directory.

    It should lie on a local disk: layers are the lower directories of every sandbox's overlay.
    """
    if "RLSANDBOX_CACHE" not in os.environ and os.environ.get("RLSANDBOX_HOME"):
        return home() / "cache"
    return _place("RLSANDBOX_CACHE", "XDG_CACHE_HOME", ".cache")


def private_directory(path: Path) -> Path:
    """Make *path*, readable by its owner only, and what is missing above it, writable by its owner only.

    Raises:
        ConfigError: it cannot be made, or nothing can be written there.
    """
    try:
        for above in reversed(path.parents):  # whatever the umask: what lies there is ours to clean up
            if not above.exists():
                above.mkdir(mode=0o755, exist_ok=True)
        path.mkdir(mode=0o700, exist_ok=True)
        writable = os.access(path, os.W_OK | os.X_OK)
    except OSError as error:
        raise unusable(path, error.strerror or str(error)) from error
    if not writable:
        raise unusable(path, "it is not writable")
    return path


def unusable(path: Path, why: str) -> ConfigError:
    return ConfigError(
        f"the directory {path} cannot be used: {why}",
        hint="set RLSANDBOX_HOME (and RLSANDBOX_CACHE) to a directory of yours on a local disk",
    )


def age_s(path: Path) -> float:
    """Seconds since *path* was last written to.

    More than a minute ahead of the clock: that was set back since, and nobody knows how long ago (inf).
    """
    age = time.time() - path.stat().st_mtime
    return math.inf if age < -60 else max(0.0, age)


def _place(variable: str, xdg: str, fallback: str) -> Path:
    own = os.environ.get(variable)
    if own:
        return Path(own).expanduser().absolute()
    shared = os.environ.get(xdg, "")
    base = Path(shared) if shared.startswith("/") else Path.home() / fallback
    return base / "rlsandbox"
