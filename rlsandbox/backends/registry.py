"""Backends by name: built-in ones and those of entry points ``rlsandbox.backends``, loaded when named."""

from __future__ import annotations

import importlib
import importlib.metadata
import inspect
from collections.abc import Mapping
from typing import Any

from .._settings import nearest
from ..errors import ConfigError, UnsupportedError
from .base import Backend

GROUP = "rlsandbox.backends"
BUILTIN = {
    "local": "rlsandbox.backends.local:Local",
    "kubernetes": "rlsandbox.backends.kubernetes:Kubernetes",
    "simulated": "rlsandbox.backends.simulated:Simulated",
    "clusters": "rlsandbox.backends.several:Clusters",
}


def backend_names() -> list[str]:
    """Names that :func:`load_backend` knows, whether or not they work here."""
    return sorted({*BUILTIN, *(point.name for point in importlib.metadata.entry_points(group=GROUP))})


def load_backend(name: str, options: Mapping[str, Any] | None = None) -> Backend:
    """The backend called *name*, made with *options*.

    Raises:
        ConfigError: nobody has that name, or its constructor does not know an option.
        UnsupportedError: what it needs is not installed.
    """
    factory = checked(name, options or {})
    backend = factory(**(options or {}))
    if not isinstance(backend, Backend):
        raise ConfigError(
            f"backend {name!r}: {factory!r} did not make a Backend but {type(backend).__name__}"
        )
    return backend


def checked(name: str, options: Mapping[str, Any], sources: Mapping[str, str] | None = None) -> Any:
    """What makes the backend called *name*, if it takes *options*; nothing is made of them.

    *sources*: of each option, where it came from; raises as :func:`load_backend` does.
    """
    factory = backend_class(name)
    try:
        signature = inspect.signature(factory)
    except (TypeError, ValueError):
        return factory  # a callable that does not say what it takes
    kinds = signature.parameters.values()
    known = [p.name for p in kinds if p.kind in (p.KEYWORD_ONLY, p.POSITIONAL_OR_KEYWORD)]
    for option in options:
        if option not in known and not any(p.kind is p.VAR_KEYWORD for p in kinds):
            source = f"{sources[option]}: " if sources and option in sources else ""
            raise ConfigError(f"{source}backend {name!r} has no option {option!r}{nearest(option, known)}")
    try:
        signature.bind(**options)
    except TypeError as error:
        raise ConfigError(f"backend {name!r}: {error}") from None
    return factory


def backend_class(name: str) -> Any:
    """What makes the backend called *name*; raises as :func:`load_backend` does."""
    points = {point.name: point.value for point in importlib.metadata.entry_points(group=GROUP)}
    target = {**BUILTIN, **points}.get(name)
    if target is None:
        raise ConfigError(f"unknown backend {name!r}{nearest(name, backend_names())}")
    module, _, attribute = target.partition(":")
    try:
        found: Any = importlib.import_module(module)
        for part in attribute.split(".") if attribute else ():
            found = getattr(found, part)
    except ImportError as error:
        missing = (error.name or "").partition(".")[0]
        if missing == "rlsandbox":
            raise UnsupportedError(
                f"backend {name!r} is not part of this version of rlsandbox", kind="missing_backend"
            ) from error
        extra = f"pip install 'rlsandbox-pool[{name}]'" if name in BUILTIN else f"pip install {missing}"
        raise UnsupportedError(
            f"backend {name!r} cannot be loaded: {error}", kind="missing_extra", hint=extra
        ) from error
    except AttributeError as error:
        raise ConfigError(f"backend {name!r}: {module} has no {attribute!r}") from error
    return found
