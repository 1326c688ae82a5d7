"""Gymnasium environments over sandboxes: ``Sandbox-v0``, one sandbox or N at once.

Importing this package does not import Gymnasium; its names do, when they are used.
"""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .env import SandboxEnv
    from .spaces import UnicodeText
    from .vector import SandboxVectorEnv

__all__ = ["SandboxEnv", "SandboxVectorEnv", "UnicodeText", "register", "register_with_gymnasium"]

_WHERE = {"SandboxEnv": "env", "SandboxVectorEnv": "vector", "UnicodeText": "spaces"}
ID = "Sandbox-v0"


def register() -> None:
    """Make ``gym.make("Sandbox-v0")`` work. Again is harmless."""
    from gymnasium.envs import registration

    if ID in registration.registry:
        return
    registration.register(
        ID,
        entry_point="rlsandbox.env.env:SandboxEnv",
        vector_entry_point="rlsandbox.env.vector:SandboxVectorEnv",
        nondeterministic=True,  # programs may print the time
    )


def register_with_gymnasium() -> None:
    """:func:`register` now if Gymnasium is imported, else as soon as it is.

    Gymnasium brings NumPy and half a second, which a program that never uses the environment need not pay,
    and it has no entry points by which it would find environments itself.
    """
    if "gymnasium" in sys.modules:
        register()
    elif not any(isinstance(finder, _Watch) for finder in sys.meta_path):
        sys.meta_path.insert(0, _Watch())


class _Watch(MetaPathFinder):
    """Waits for the import of Gymnasium, then goes away."""

    def find_spec(
        self, name: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if name != "gymnasium":
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(name)
        if spec is not None and spec.loader is not None:
            spec.loader = _RegisterAfter(spec.loader)
        return spec


class _RegisterAfter(Loader):
    """A module's own loader, with the registration behind it."""

    def __init__(self, loader: Loader) -> None:
        self._loader = loader

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        return self._loader.create_module(spec)

    def exec_module(self, module: ModuleType) -> None:
        if module.__spec__ is not None:
            module.__spec__.loader = self._loader
        module.__loader__ = self._loader
        try:
            self._loader.exec_module(module)
        except BaseException:
            sys.meta_path.insert(0, _Watch())  # whoever tries again may have better luck
            raise
        register()


def __getattr__(name: str) -> Any:
    if name not in _WHERE:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f".{_WHERE[name]}", __name__), name)
