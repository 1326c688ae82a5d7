"""The policy named on the command line: a scripted one, or any callable by its dotted name."""

from __future__ import annotations

import importlib
import importlib.util
import sys
from collections.abc import Callable
from typing import Any

from .._settings import nearest
from ..errors import ConfigError


def find_policy(name: str) -> Callable[..., Any]:
    """``canonical``, ``broken``, or ``pkg.mod:fn`` (found from the current directory too).

    Raises:
        ConfigError: there is none, it is not callable, or importing its module failed.
    """
    from ..tasks.policies import POLICIES

    if ":" not in name:
        if name in POLICIES:
            return POLICIES[name]
        raise ConfigError(
            f"unknown policy {name!r}{nearest(name, POLICIES)}",
            hint="a callable of yours: --policy pkg.mod:fn",
        )
    module_name, _, path = name.partition(":")
    if "" not in sys.path:
        sys.path.insert(0, "")  # as ``python -m`` has it
    try:
        found: Any = importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        if error.name and (module_name == error.name or module_name.startswith(error.name + ".")):
            raise ConfigError(f"policy {name!r}: there is no module {error.name!r}") from error
        raise ConfigError(f"policy {name!r}: importing {module_name} failed: {error}") from error
    except (Exception, SystemExit) as error:
        raise ConfigError(
            f"policy {name!r}: importing {module_name} failed: {type(error).__name__}: {error}"
        ) from error
    for part in path.split("."):
        if not part or not hasattr(found, part):
            known = (
                [word for word in vars(found) if not word.startswith("_")]
                if hasattr(found, "__dict__")
                else []
            )
            raise ConfigError(f"policy {name!r}: {module_name} has no {path!r}{nearest(part, known)}")
        found = getattr(found, part)
    if not callable(found):
        raise ConfigError(f"policy {name!r} is not callable but {type(found).__name__}")
    policy: Callable[..., Any] = found
    return policy
