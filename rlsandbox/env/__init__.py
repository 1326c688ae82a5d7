"""Gymnasium environments over sandboxes: ``Sandbox-v0``, one sandbox or N at once.

Importing this package does not import Gymnasium; its names do, when they are used.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .env import SandboxEnv
    from .spaces import UnicodeText
    from .vector import SandboxVectorEnv

__all__ = ["SandboxEnv", "SandboxVectorEnv", "UnicodeText", "register"]

_WHERE = {"SandboxEnv": "env", "SandboxVectorEnv": "vector", "UnicodeText": "spaces"}
ID = "Sandbox-v0"


def register() -> None:
    """Make ``gym.make("Sandbox-v0")`` work. Gymnasium calls it by itself where the package is installed."""
    from gymnasium.envs import registration

    if ID in registration.registry:
        return
    registration.register(
        ID,
        entry_point="rlsandbox.env.env:SandboxEnv",
        vector_entry_point="rlsandbox.env.vector:SandboxVectorEnv",
        nondeterministic=True,  # programs may print the time
    )


def __getattr__(name: str) -> Any:
    if name not in _WHERE:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from importlib import import_module

    return getattr(import_module(f".{_WHERE[name]}", __name__), name)
