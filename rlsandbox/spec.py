"""What a sandbox is made from (:class:`Spec`) and the limits of one attempt (:class:`Limits`).

Both are frozen, keyword-only, picklable and copy to themselves. Sizes are integers in bytes or
strings: ``"512MiB"`` and ``"512Mi"`` are 2**20-based, ``"512M"`` and ``"512MB"`` 10**6-based. Times are
seconds.
"""

from __future__ import annotations

import hashlib
import json
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from os import PathLike, fspath
from typing import Any, Self

from .errors import ConfigError

NETWORKS = ("none", "host")
ISOLATIONS = ("auto", "namespaces", "none", "gvisor")

_SIZE = re.compile(r"\s*(\d+(?:\.\d+)?)\s*([A-Za-z]*)\s*")
_UNITS = {
    "": 1,
    "b": 1,
    **{u + s: 1000**e for e, u in enumerate("kmgt", 1) for s in ("", "b")},
    **{u + s: 1024**e for e, u in enumerate("kmgt", 1) for s in ("i", "ib")},
}


def parse_size(value: str | int, what: str = "size") -> int:
    """Bytes of a size in human form.

    Raises:
        ConfigError: *value* is no size, is negative, or is no whole number of bytes.
    """
    if isinstance(value, bool) or not isinstance(value, (int, str)):
        raise ConfigError(f"{what} must be bytes or a string such as '512MiB', not {value!r}")
    if isinstance(value, int):
        if value < 0:
            raise ConfigError(f"{what} must not be negative, not {value}")
        return value
    match = _SIZE.fullmatch(value)
    unit = _UNITS.get(match.group(2).lower()) if match else None
    if match is None or unit is None:
        raise ConfigError(f"{what} must be bytes or a string such as '512MiB', not {value!r}")
    number, _, fraction = match.group(1).partition(".")
    if len(number) > 20:
        raise ConfigError(f"{what} is more than any machine has: {value[:30]}...")
    return int(number) * int(unit) + int(float(f"0.{fraction or 0}") * unit)


def _positive(value: float | None, what: str, *, whole: bool = False) -> None:
    if value is None:
        return
    ok = isinstance(value, int if whole else (int, float)) and not isinstance(value, bool)
    if not ok or not math.isfinite(value) or value <= 0:
        kind = "a whole number" if whole else "a number"
        raise ConfigError(f"{what} must be {kind} above 0, not {value!r}")


def is_utf8(text: str, errors: str = "strict") -> bool:
    """Whether *text* can be written down: a lone surrogate, as JSON may hold it, cannot.

    With *errors* ``surrogateescape`` it can where it stands for a byte, as in names of files.
    """
    try:
        text.encode("utf-8", errors)
    except UnicodeEncodeError:
        return False
    return True


def _text(value: object, what: str) -> None:
    """None, or text that can be a name or a path."""
    if value is not None and (not isinstance(value, str) or not value or "\0" in value):
        raise ConfigError(f"{what} must be text that is not empty, not {value!r}")
    if isinstance(value, str) and not is_utf8(value, "surrogateescape"):
        raise ConfigError(f"{what} must be text that UTF-8 can say, not {value!r:.100}")


class _Data:
    """Frozen data: copying gives the object itself, so ``gym.make`` may deep-copy it for free."""

    def __copy__(self) -> Self:
        return self

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        return self


class _Passed(_Data):
    """Frozen data that remembers which fields were passed, also when their value is the default.

    ``given`` has to be the first field: :func:`dataclasses.replace` calls the class with what the caller
    changes, then with the other fields in their order. So what stands before ``given`` was passed by the
    caller, and what stands behind it was passed if ``given`` says so.
    """

    given: tuple[str, ...]

    def __new__(cls, **values: Any) -> Self:
        self = object.__new__(cls)
        if values:  # without them it may be an unpickler that asks, which calls no __init__
            self.__dict__["_passed"] = tuple(values)
        return self


@dataclass(frozen=True, kw_only=True, repr=False)
class Spec(_Passed):
    """What a sandbox is made from. ``None`` leaves a field to the pool's spec or the backend.

    A field counts as said when it is passed, also when it is passed its default: a task's
    ``Spec(network="none")`` closes the network of a pool whose spec says ``"host"``.

    Args:
        image: an OCI layout directory, a ``docker save`` archive or, on a cluster, a reference;
            ``None`` is the backend's base (locally: an allow-list of the host).
        cpu: cores, fractions allowed.
        memory: of all processes together.
        disk: of all files the rollout writes.
        pids: processes and threads at once.
        network: ``"none"`` (loopback only) or ``"host"``.
        user: default user of commands: a name, a uid, or ``"uid:gid"``.
        env: environment of every command.
        isolation: ``"auto"`` (the best there is, never none), ``"namespaces"``, ``"gvisor"``, or
            ``"none"`` (asked for by that name only).
        expose: host paths shown read-only at the same place (local backend); the word ``"python"`` stands
            for the running Python (``sys.prefix``, ``sys.base_prefix``), first in ``PATH``.
        labels: free; part of the identity.
        given: names of the fields that were passed; it comes by itself.
    """

    given: tuple[str, ...] = ()
    image: str | None = None
    cpu: float | None = None
    memory: str | int | None = None
    disk: str | int | None = None
    pids: int | None = None
    network: str = "none"
    user: str | None = None
    env: Mapping[str, str] = field(default_factory=dict)
    isolation: str = "auto"
    expose: tuple[str, ...] = ()
    labels: Mapping[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if isinstance(self.image, PathLike):
            object.__setattr__(self, "image", fspath(self.image))
        if isinstance(self.user, int) and not isinstance(self.user, bool):
            object.__setattr__(self, "user", str(self.user))
        for name in ("image", "user"):
            _text(getattr(self, name), f"Spec.{name}")
        _positive(self.cpu, "Spec.cpu")
        _positive(self.pids, "Spec.pids", whole=True)
        for name in ("memory", "disk"):
            value = getattr(self, name)
            if value is not None and parse_size(value, f"Spec.{name}") == 0:
                raise ConfigError(f"Spec.{name} must be above 0")
        _one_of(self.network, NETWORKS, "Spec.network")
        _one_of(self.isolation, ISOLATIONS, "Spec.isolation")
        if isinstance(self.expose, str):
            raise ConfigError("Spec.expose must be a tuple of paths, not one string")
        for path in self.expose:
            if path != "python" and (not str(path).startswith("/") or "\0" in str(path)):
                raise ConfigError(f"Spec.expose: {path!r} is neither an absolute path nor 'python'")
        object.__setattr__(self, "expose", tuple(str(path) for path in self.expose))
        for name in ("env", "labels"):
            object.__setattr__(self, name, _strings(getattr(self, name), f"Spec.{name}"))
        object.__setattr__(self, "given", self._said(self.__dict__.pop("_passed", ())))

    def _said(self, passed: tuple[str, ...]) -> tuple[str, ...]:
        """The names in :attr:`given`, in the order of the fields."""
        if not set(self.given) <= set(SPEC_FIELDS):
            raise ConfigError(f"Spec.given must be names of fields, not {self.given!r}")
        mine = passed[: passed.index("given")] if "given" in passed else passed
        said = {*mine, *self.given}
        # A mapping adds up, so an empty one says nothing; None is what leaves a field open.
        return tuple(n for n in SPEC_FIELDS if n in said and getattr(self, n) not in (None, {}))

    def __repr__(self) -> str:
        said = ", ".join(f"{name}={getattr(self, name)!r}" for name in self.given)
        return f"{type(self).__name__}({said})"

    def __hash__(self) -> int:
        return hash(self.digest)

    @property
    def memory_bytes(self) -> int | None:
        return None if self.memory is None else parse_size(self.memory)

    @property
    def disk_bytes(self) -> int | None:
        return None if self.disk is None else parse_size(self.disk)

    @property
    def digest(self) -> str:
        """16 hex digits that are equal exactly for specs that make the same sandbox."""
        cached: str | None = self.__dict__.get("_digest")
        if cached is None:
            data: dict[str, Any] = {name: getattr(self, name) for name in SPEC_FIELDS}
            data["memory"], data["disk"] = self.memory_bytes, self.disk_bytes
            text = json.dumps(data, sort_keys=True, default=dict)
            cached = hashlib.sha256(text.encode()).hexdigest()[:16]
            object.__setattr__(self, "_digest", cached)
        return cached

    def over(self, base: Spec | None) -> Spec:
        """This spec over *base*, field by field: what was not given comes from *base*; mappings add up."""
        if base is None:
            return self
        said = {name: getattr(base, name) for name in base.given}
        for name in self.given:
            mine = getattr(self, name)
            said[name] = {**said.get(name, {}), **mine} if isinstance(mine, Mapping) else mine
        return type(self)(**said)


SPEC_FIELDS = tuple(f.name for f in fields(Spec) if f.name != "given")


@dataclass(frozen=True, kw_only=True)
class Limits(_Data):
    """Limits of one attempt. Reaching one ends it as ``truncated``; it is no infrastructure failure.

    Args:
        steps: commands the acting agent may run.
        wall: seconds from hand-over to the end.
        command: seconds a single command may take unless it names its own timeout.
        output: bytes kept of each of stdout and stderr (head and tail).
    """

    steps: int | None = None
    wall: float | None = None
    command: float | None = None
    output: str | int = "1MiB"

    def __post_init__(self) -> None:
        _positive(self.steps, "Limits.steps", whole=True)
        _positive(self.wall, "Limits.wall")
        _positive(self.command, "Limits.command")
        parse_size(self.output, "Limits.output")

    @property
    def output_bytes(self) -> int:
        return parse_size(self.output)


def _one_of(value: object, allowed: tuple[str, ...], what: str) -> None:
    if value not in allowed:
        raise ConfigError(f"{what} must be one of {', '.join(allowed)}, not {value!r}")


def _strings(value: Mapping[str, str], what: str) -> dict[str, str]:
    if not isinstance(value, Mapping):
        raise ConfigError(f"{what} must map names to strings, not {value!r}")
    for key, item in value.items():
        bad = not isinstance(key, str) or not key or "=" in key or "\0" in key
        if bad or not isinstance(item, str) or "\0" in item or not is_utf8(key + item, "surrogateescape"):
            raise ConfigError(
                f"{what}: {key!r}={item!r} must be strings in UTF-8 without NUL, the name without '='"
            )
    return dict(value)
