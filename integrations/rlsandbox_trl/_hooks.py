"""Methods of one trainer, wrapped and given back."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any


class Hooks:
    """Wrappers around methods of a trainer; :meth:`remove` takes them off, whoever wrapped them since."""

    def __init__(self, trainer: Any) -> None:
        self._trainer = trainer
        self._wrapped: list[tuple[str, Any]] = []

    def wrap(self, name: str, around: Callable[..., Any]) -> None:
        """*around* is called as ``around(original, *args, **kwargs)``."""
        original = getattr(self._trainer, name)

        @functools.wraps(original)
        def wrapper(*args: Any, **kwargs: Any) -> Any:
            if wrapper.off:  # type: ignore[attr-defined]
                return original(*args, **kwargs)
            return around(original, *args, **kwargs)

        wrapper.off = False  # type: ignore[attr-defined]
        setattr(self._trainer, name, wrapper)
        self._wrapped.append((name, wrapper))

    def remove(self) -> None:
        """Twice is fine."""
        while self._wrapped:
            name, wrapper = self._wrapped.pop()
            wrapper.off = True
            if self._trainer.__dict__.get(name) is wrapper:
                before = wrapper.__wrapped__
                if getattr(before, "__self__", None) is self._trainer:  # the class's own method
                    delattr(self._trainer, name)
                else:
                    setattr(self._trainer, name, before)
