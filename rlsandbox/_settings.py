"""The settings there are: their names, kinds and checks. Reading them is :mod:`rlsandbox.config`'s job."""

from __future__ import annotations

import difflib
import math
import numbers
import os
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from .errors import ConfigError
from .spec import ISOLATIONS, NETWORKS, parse_size

_SHOWN = 30
_LONGEST = 200


def nearest(word: str, known: Iterable[str]) -> str:
    """``": did you mean 'size'?"``, or what there is when nothing is near; for the end of a message."""
    names = sorted(set(known))
    word = word[:_LONGEST]  # a whole prompt given for a name must not be compared with every task's
    close = difflib.get_close_matches(word, names, n=1, cutoff=0.5)
    close = close or [name for name in names if len(word) > 2 and word.lower() in name.lower()]
    if close:
        return f": did you mean {close[0]!r}?"
    if not names:
        return "; there is none"
    more = f" ... ({len(names)} in all)" if len(names) > _SHOWN else ""
    return f"; known: {', '.join(names[:_SHOWN])}{more}"


@dataclass(frozen=True)
class Kind:
    """How a value is read from a variable's text (*parse*) and checked wherever it came from (*check*)."""

    parse: Callable[[str, str], Any]
    check: Callable[[Any, str], Any]


def _text(text: str, where: str) -> Any:
    return text


def _parse_number(text: str, where: str) -> Any:
    for convert in (int, float):
        try:
            return convert(text)
        except ValueError:
            continue
    return text  # the check says what it should be


def _parse_list(text: str, where: str) -> Any:
    return [part.strip() for part in text.split(",") if part.strip()]


def _parse_map(text: str, where: str) -> Any:
    pairs = {}
    for part in _parse_list(text, where):
        name, equals, value = part.partition("=")
        if not equals:
            raise ConfigError(f"{where} must be NAME=value,NAME=value, not {text!r}")
        pairs[name.strip()] = value
    return pairs


def _whole(lowest: int, highest: int | None = None) -> Kind:
    def check(value: Any, where: str) -> int:
        bad = isinstance(value, bool) or not isinstance(value, numbers.Integral) or value < lowest
        if bad or (highest is not None and value > highest):
            span = f"from {lowest} to {highest}" if highest is not None else f"of at least {lowest}"
            raise ConfigError(f"{where} must be a whole number {span}, not {value!r}")
        return int(value)

    return Kind(_parse_number, check)


def _number() -> Kind:
    def check(value: Any, where: str) -> float:
        bad = isinstance(value, bool) or not isinstance(value, numbers.Real)
        if bad or not math.isfinite(value) or value <= 0:
            raise ConfigError(f"{where} must be a number above 0, not {value!r}")
        return int(value) if isinstance(value, numbers.Integral) else float(value)

    return Kind(_parse_number, check)


def _string(allowed: tuple[str, ...] = ()) -> Kind:
    def check(value: Any, where: str) -> str:
        if isinstance(value, os.PathLike):
            value = os.fspath(value)
        if not isinstance(value, str) or not value or "\0" in value:
            raise ConfigError(f"{where} must be a string that is not empty, not {value!r}")
        if allowed and value not in allowed:
            raise ConfigError(f"{where} must be one of {', '.join(allowed)}, not {value!r}")
        return value

    return Kind(_text, check)


def _size() -> Kind:
    def check(value: Any, where: str) -> Any:
        parse_size(value, where)
        return value

    return Kind(_text, check)


def _strings() -> Kind:
    def check(value: Any, where: str) -> tuple[str, ...]:
        if isinstance(value, str) or not isinstance(value, (list, tuple, set, frozenset)):
            raise ConfigError(f"{where} must be a list of strings, not {value!r}")
        for item in value:
            if not isinstance(item, str) or not item:
                raise ConfigError(f"{where} must be a list of strings, not one with {item!r}")
        return tuple(value)

    return Kind(_parse_list, check)


def _string_map() -> Kind:
    def check(value: Any, where: str) -> dict[str, str]:
        if not isinstance(value, Mapping) or any(not isinstance(v, str) for v in value.values()):
            raise ConfigError(f"{where} must map names to strings, not {value!r}")
        return dict(value)

    return Kind(_parse_map, check)


POOL: dict[str, Kind] = {
    "size": _whole(1),
    "max_size": _whole(1),
    "when_empty": _string(("create", "wait", "fail")),
    "max_creating": _whole(1),
    "write_rate": _number(),
    "run": _string(),
    "ledger": _string(),
    "block": _strings(),
}
SPEC: dict[str, Kind] = {
    "image": _string(),
    "cpu": _number(),
    "memory": _size(),
    "disk": _size(),
    "pids": _whole(1),
    "network": _string(NETWORKS),
    "user": _string(),
    "env": _string_map(),
    "isolation": _string(ISOLATIONS),
    "expose": _strings(),
    "labels": _string_map(),
}
METRICS: dict[str, Kind] = {
    "prometheus_port": _whole(1, 65535),
    "prometheus_host": _string(),
    "otlp_endpoint": _string(),
}
BACKEND = _string()
