"""What is attached to a trainer: wrappers around its methods, in place while they are wanted and then gone.

Everything of ours that needs a trainer's methods is a :class:`Part`. Parts are put in place when they are
added, taken away when training ends (also by an exception), and put in place again by the next ``train()`` or
``evaluate()``. What stays on the trainer is a thin ``train`` and ``evaluate`` that do this.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

_NAME = "_rlsandbox_attached"


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
                while getattr(
                    before, "off", False
                ):  # one of ours that was taken off while others lay over it
                    before = before.__wrapped__
                if getattr(before, "__self__", None) is self._trainer:  # the class's own method
                    delattr(self._trainer, name)
                else:
                    setattr(self._trainer, name, before)


class Part:
    """Something that needs a trainer's methods. Of each kind a trainer has one: the latest."""

    retired = False
    """Another of its kind has taken its place."""

    def replaces(self, other: Part) -> bool:
        """Whether it takes the place of *other*, which was there before."""
        return type(self) is type(other)

    def retire(self) -> None:
        """Another takes its place."""
        self.retired = True

    def install(self, hooks: Hooks) -> None:
        """Wrap what it needs."""

    def begin(self) -> None:
        """``train()`` was called, or an ``evaluate()`` after it."""

    def end(self) -> None:
        """It is over, by whatever way; the hooks are gone."""


class _Attached:
    """The parts of one trainer."""

    def __init__(self, trainer: Any) -> None:
        self._trainer = trainer
        self._parts: list[tuple[Part, Hooks]] = []
        self._busy = False
        self._installed = True
        around = Hooks(trainer)
        for name, during in (("train", self._train), ("evaluate", self._evaluate)):
            if callable(getattr(trainer, name, None)):
                around.wrap(name, during)

    def add(self, part: Part) -> None:
        for old, wrapped in [pair for pair in self._parts if part.replaces(pair[0])]:
            wrapped.remove()
            old.retire()
            self._parts.remove((old, wrapped))
        hooks = Hooks(self._trainer)
        self._parts.append((part, hooks))
        if self._installed:
            part.install(hooks)

    def _install(self) -> None:
        if not self._installed:
            self._installed = True
            for part, hooks in self._parts:
                part.install(hooks)

    def _remove(self) -> None:
        self._installed = False
        for _, hooks in reversed(self._parts):
            hooks.remove()

    def _train(self, original: Any, *args: Any, **kwargs: Any) -> Any:
        if self._busy:  # by a search over hyperparameters, say
            return original(*args, **kwargs)
        self._busy = True
        try:
            self._install()
            for part, _ in self._parts:
                part.begin()
            return original(*args, **kwargs)
        finally:
            self._busy = False
            self._remove()
            for part, _ in reversed(self._parts):
                part.end()

    def _evaluate(self, original: Any, *args: Any, **kwargs: Any) -> Any:
        if self._installed:  # before training, or in its midst
            return original(*args, **kwargs)
        return self._train(original, *args, **kwargs)


def attach(trainer: Any, part: Part) -> None:
    """*part* is in place from now on until training ends, and again while it trains or evaluates later."""
    found = vars(trainer).get(_NAME)
    if found is None:
        found = _Attached(trainer)
        setattr(trainer, _NAME, found)
    found.add(part)
