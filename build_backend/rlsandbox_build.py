"""The build backend: setuptools, plus the keeper compiled into the package.

The keeper is compiled for the machine's own architecture by a system compiler that can link statically;
only where there is none is the ``ziglang`` wheel asked for. ``RLSANDBOX_KEEPER_ARCHS=x86_64,aarch64``
(release wheels) compiles more and makes a wheel for any platform. Where no keeper can run (macOS drives a
cluster), a missing one is no error.
"""

from __future__ import annotations

import importlib.util
import os
import sys
import sysconfig
from pathlib import Path
from types import ModuleType
from typing import Any

from setuptools import build_meta
from setuptools.build_meta import (
    build_sdist,
    get_requires_for_build_sdist,
    prepare_metadata_for_build_editable,
    prepare_metadata_for_build_wheel,
)

__all__ = [
    "build_editable",
    "build_sdist",
    "build_wheel",
    "get_requires_for_build_editable",
    "get_requires_for_build_sdist",
    "get_requires_for_build_wheel",
    "prepare_metadata_for_build_editable",
    "prepare_metadata_for_build_wheel",
]

_Settings = dict[str, Any] | None


def _keeper() -> ModuleType:
    """``rlsandbox/keeper/build.py``, without the package around it."""
    path = Path(__file__).resolve().parents[1] / "rlsandbox" / "keeper" / "build.py"
    spec = importlib.util.spec_from_file_location("rlsandbox_keeper_build", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def _architectures(keeper: ModuleType) -> list[str]:
    named = os.environ.get("RLSANDBOX_KEEPER_ARCHS")
    return [name.strip() for name in named.split(",") if name.strip()] if named else [keeper.machine()]


def _zig_if_needed() -> list[str]:
    keeper = _keeper()
    wanted = [arch for arch in _architectures(keeper) if arch in keeper.ARCHITECTURES]
    return ["ziglang"] if any(keeper.find_compiler(arch) is None for arch in wanted) else []


def get_requires_for_build_wheel(config_settings: _Settings = None) -> list[str]:
    return [*build_meta.get_requires_for_build_wheel(config_settings), *_zig_if_needed()]


def get_requires_for_build_editable(config_settings: _Settings = None) -> list[str]:
    return [*build_meta.get_requires_for_build_editable(config_settings), *_zig_if_needed()]


def build_wheel(
    wheel_directory: str, config_settings: _Settings = None, metadata_directory: str | None = None
) -> str:
    archs = _compile()
    platform = sysconfig.get_platform().replace("-", "_").replace(".", "_")
    if len(archs) != 1 or "RLSANDBOX_KEEPER_ARCHS" in os.environ:
        platform = "any"
    settings = {**(config_settings or {})}
    options = settings.get("--build-option") or []
    options = [options] if isinstance(options, str) else list(options)
    settings["--build-option"] = [*options, "--plat-name", platform]
    return build_meta.build_wheel(wheel_directory, settings, metadata_directory)


def build_editable(
    wheel_directory: str, config_settings: _Settings = None, metadata_directory: str | None = None
) -> str:
    _compile()
    return build_meta.build_editable(wheel_directory, config_settings, metadata_directory)


def _compile() -> list[str]:
    """Put the keepers that were asked for, and no others, into the package; their architectures."""
    keeper = _keeper()
    archs = _architectures(keeper)
    asked = "RLSANDBOX_KEEPER_ARCHS" in os.environ
    for old in keeper.SHIPPED.glob("keeper-*"):
        old.unlink()
    done = []
    for arch in archs:
        try:
            keeper.build_shipped(arch)
            done.append(arch)
        except keeper.KeeperBuildError as error:
            if asked or (sys.platform == "linux" and arch in keeper.ARCHITECTURES):
                raise SystemExit(f"rlsandbox: {error}") from error
            print(f"rlsandbox: no keeper in this wheel: {error}", file=sys.stderr)
    return done
