"""Synchronous classes say of their methods what the asynchronous ones say."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable
from typing import Any, TypeVar

C = TypeVar("C", bound=type)
_SEE = re.compile(r"See :meth:`[^`]*`[.:;]?\s*(?P<rest>.*)", re.DOTALL)


def mirrors(asynchronous: type) -> Callable[[C], C]:
    """Give a class's public names the documentation of *asynchronous*.

    What a method says itself ("See :meth:`AsyncX.name`. It is called on this thread.") stands at the end.
    """

    def document(cls: C) -> C:
        for name, value in vars(cls).items():
            if name.startswith("_") or name not in dir(asynchronous):
                continue
            theirs = inspect.getdoc(inspect.getattr_static(asynchronous, name))
            target: Any = value.__func__ if isinstance(value, (classmethod, staticmethod)) else value
            if not theirs or not (inspect.isfunction(target) or isinstance(target, property)):
                continue
            own = inspect.getdoc(target) or ""
            see = _SEE.fullmatch(own)
            if own and see is None:
                continue
            rest = see["rest"].strip() if see is not None else ""
            target.__doc__ = f"{theirs}\n\n{rest}" if rest else theirs
        return cls

    return document
