"""What is wrong with an option is said where it is given: in a tool, TRL would tell it to the model."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import rlsandbox as rls
from rlsandbox.errors import ConfigError


def require_seconds(name: str, value: Any) -> None:
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not value > 0:
        raise ConfigError(f"{name} must be a number of seconds above 0, not {value!r}")


def require_whole(name: str, value: Any, least: int) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or value < least:
        raise ConfigError(f"{name} must be a whole number of at least {least}, not {value!r}")


def require_tools(found: Any, names: Sequence[str]) -> None:
    hint = f"tools: {', '.join(names)}"
    if isinstance(found, str) or not isinstance(found, Iterable):
        raise ConfigError(f"tools must be a list of names, not {found!r}", hint=hint)
    for name in found:
        if name not in names:
            raise ConfigError(f"there is no tool called {name!r}", hint=hint)


def tasks_from(source: Iterable[rls.Task] | str) -> list[rls.Task]:
    """Tasks, or where :func:`rlsandbox.load_tasks` finds them."""
    if isinstance(source, str):
        return rls.load_tasks(source)
    found = list(source) if isinstance(source, Iterable) else [source]
    for task in found:
        if not isinstance(task, rls.Task):
            raise ConfigError(
                f"tasks must be a list of Task, or where they are, not of {type(task).__name__}",
                hint="rlsandbox.load_tasks() reads them from a file",
            )
    return found
