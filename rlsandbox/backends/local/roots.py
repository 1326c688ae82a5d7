"""Which directories of this machine make up the root of a spec's sandboxes."""

from __future__ import annotations

import asyncio
import os
import shlex
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ... import _paths
from ...errors import ConfigError
from ...spec import Spec
from . import worker
from .ids import IdMap
from .image import Image, Images

PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
PYTHON = "python"
_TELLING = (
    *("/etc", "/etc/passwd", "/etc/group", "/etc/ld.so.cache", "/etc/alternatives", "/etc/ssl/certs"),
    *("/etc/resolv.conf", "/etc/hosts", "/var/lib/dpkg/status"),
)
_OURS = ("/", "/proc", "/sys", "/dev", "/etc", "/usr", "/bin", "/sbin", "/lib", "/tmp", "/run", "/var")


@dataclass(frozen=True)
class Root:
    """The root of a sandbox, in the hub's terms.

    Args:
        lowers: lower directories of ``/``, topmost first.
        overlays: (target, lower directory) of further overlays.
        binds: (target, source) shown read-only.
        env: environment that comes with it.
        facts: what is told about it.
    """

    lowers: tuple[str, ...] = ()
    overlays: tuple[tuple[str, str], ...] = ()
    binds: tuple[tuple[str, str], ...] = ()
    env: Mapping[str, str] = field(default_factory=dict)
    facts: Mapping[str, str] = field(default_factory=dict)


class Roots:
    """Makes roots, each once; what they need on disk is kept in the cache for the next process."""

    def __init__(self, ids: IdMap, cache: Path | None = None) -> None:
        self._ids = ids
        self._cache = cache if cache is not None else _paths.cache()
        self._images = Images(ids, self._cache)
        self._locks: dict[tuple[Any, ...], asyncio.Lock] = {}
        self._roots: dict[tuple[Any, ...], Root] = {}

    async def get(self, spec: Spec) -> Root:
        """Raises ConfigError (a path to expose is missing), ImageError, ProvisionError."""
        key = _key(spec)
        async with self._locks.setdefault(key, asyncio.Lock()):
            image = await self._images.get(spec.image) if spec.image is not None else None
            known = (*key, image.lowers if image is not None else _host_state())
            root = self._roots.get(known)
            if root is None:
                root = await self._make(spec, image)
                self._roots[known] = self._roots[key] = root
            return root

    def environment(self, spec: Spec) -> Mapping[str, str]:
        root = self._roots.get(_key(spec))
        return root.env if root is not None else {}

    async def _make(self, spec: Spec, image: Image | None) -> Root:
        _paths.private_directory(self._cache)
        binds = exposed(spec.expose)
        overlays: list[tuple[str, str]] = []
        if image is None:
            data = await self._work("host", network=spec.network)
            lowers, overlays = data["lowers"], [(target, lower) for target, lower in data["overlays"]]
            env = {"PATH": PATH, "LC_CTYPE": "C.UTF-8"}
            facts = {"base": "host", "base.digest": data["digest"], "workdir": "/workspace"}
        else:
            lowers = list(image.lowers)
            env = {"PATH": PATH, **image.env}
            facts = {
                "base": "image",
                "base.digest": image.digest,
                "workdir": os.path.join("/", image.workdir),
                # With one id there is nobody but root to be.
                "user": image.user if self._ids.kind != "one" else "",
                "entrypoint": shlex.join(image.entrypoint),
            }
        hidden = tuple(target for target, _ in overlays)
        points = [[target, _kind(source)] for target, source in binds if not _inside(target, hidden)]
        if points or image is not None:
            fit = {"lowers": lowers, "points": points, "network": spec.network, "whole": image is not None}
            data = await self._work("fit", **fit, workdir=facts["workdir"] if image is not None else "")
            lowers = data["lowers"]
            binds = [(data["targets"].get(target, target), source) for target, source in binds]
        if PYTHON in spec.expose:
            env["PATH"] = f"{sys.prefix}/bin:{env['PATH']}"
        return Root(tuple(lowers), tuple(overlays), tuple(binds), env, {k: v for k, v in facts.items() if v})

    async def _work(self, job: str, **arguments: Any) -> Any:
        own = {"cache": str(self._cache), "key": self._ids.key, "owners": self._ids.kind != "one"}
        return await worker.call(job, {**own, **arguments}, self._ids)


def exposed(paths: tuple[str, ...]) -> list[tuple[str, str]]:
    """(target, source) of what a spec exposes; ``python`` is the running Python.

    Raises:
        ConfigError: a path is missing, or cannot be shown because the sandbox has its own.
    """
    wanted: list[str] = []
    for path in paths:
        wanted += _python() if path == PYTHON else [os.path.normpath(path)]
    binds: dict[str, str] = {}
    for path in sorted(wanted):
        if path in _OURS:
            raise ConfigError(f"Spec.expose: {path} cannot be exposed: every sandbox has its own")
        if "=" in path or path.startswith(("/proc/", "/sys/", "/dev/")):
            raise ConfigError(f"Spec.expose: {path} cannot be exposed")
        if not os.path.exists(path):
            raise ConfigError(f"Spec.expose: {path} does not exist on this machine")
        if not _inside(path, tuple(binds)):
            binds[path] = os.path.realpath(path)
    return list(binds.items())


def _python() -> list[str]:
    """Where the running Python lies, as far as a sandbox does not see it anyway."""
    places = {sys.prefix, sys.base_prefix, sys.exec_prefix, sys.base_exec_prefix}
    return sorted(place for place in places if not _inside(place, ("/usr",)))


def _kind(path: str) -> str:
    return "d" if os.path.isdir(path) else "f"


def _inside(path: str, directories: tuple[str, ...]) -> bool:
    return any(path == directory or path.startswith(directory.rstrip("/") + "/") for directory in directories)


def _host_state() -> tuple[object, ...]:
    """Changes when the host's base has to be looked at again: accounts, libraries, packages.

    A dozen stat() of local files, which take less than a thread's wake-up.
    """
    found: list[object] = []
    for path in _TELLING:
        try:
            status = os.stat(path)
        except OSError:
            continue
        found.append((path, status.st_ino, status.st_mtime_ns))
    return tuple(found)


def _key(spec: Spec) -> tuple[Any, ...]:
    return (spec.image, spec.expose, spec.network)
