"""One task as a document (a JSON object, a TOML table): checked field by field, then a Task.

The same document is a line of a ``.jsonl`` file and a ``.toml`` file; ``docs/tasks.md`` is its reference.
"""

from __future__ import annotations

import base64
import binascii
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from .._settings import SPEC, nearest
from ..errors import ConfigError
from ..spec import Limits, Spec, is_utf8
from ..task import Grader, Task
from .check import checks_grader

Files = dict[str, str | bytes]


@dataclass(frozen=True, kw_only=True)
class Solution:
    """How a task is solved without a model: files to write, then a shell script to run.

    Paths that are not absolute are under the task's workdir.
    """

    files: Mapping[str, str | bytes] = field(default_factory=dict)
    command: str | None = None


@dataclass(frozen=True)
class Loaded:
    """A task, where it stands (for messages), and how to get at its solutions."""

    task: Task
    where: str
    solution: Callable[[], Solution | None]
    broken: Callable[[], Solution | None]


def parse_document(data: Any, where: str, *, origin: str) -> Loaded:
    """The task in *data*.

    Args:
        data: what was parsed.
        where: place for messages, such as ``tasks.jsonl:12``.
        origin: what :func:`rlsandbox.tasks.solution_of` finds the task by: ``SOURCE#PLACE``.
    """
    table = _Table(data, where, "")
    grader = table.sub("grader", _grader)
    checks = table.take("checks", str, None)
    if checks is not None:
        if grader is not None:
            raise table.error("checks", "stands in for a grader: give one of the two")
        _compiles(checks, table)
        grader = checks_grader(checks)
    spec = table.sub("spec", _spec)
    limits = table.sub("limits", _limits)
    solution = table.sub("solution", _solution)
    broken = table.sub("broken", _solution)
    metadata = table.take("metadata", dict, {})
    if "loaded_from" in metadata:
        raise table.error("metadata.loaded_from", "is set by the loader")
    task = table.make(
        Task,
        id=table.take("id", str),
        prompt=table.take("prompt", str, ""),
        image=table.take("image", str, None),
        workdir=table.take("workdir", str, None),
        files=table.files("files"),
        setup=table.take("setup", str, None),
        grader=grader,
        spec=spec,
        limits=limits or Limits(),
        metadata={**metadata, "loaded_from": origin},
    )
    table.done()
    return Loaded(task, where, lambda: solution, lambda: broken)


def with_spec(loaded: Loaded, spec: Spec | None) -> Loaded:
    """*loaded* with *spec* under the task's own."""
    if spec is None:
        return loaded
    return replace(loaded, task=replace(loaded.task, spec=(loaded.task.spec or Spec()).over(spec)))


def _grader(table: _Table) -> Grader:
    command = table.take("command", (str, list))
    if isinstance(command, list) and not all(isinstance(part, str) for part in command):
        raise table.error("command", "must be a string or a list of strings")
    work = table.take("work", list, [])
    if not all(isinstance(place, str) for place in work):
        raise table.error("work", "must be a list of paths")
    grader: Grader = table.make(
        Grader,
        command=command,
        files=table.files("files"),
        timeout=table.take("timeout", (int, float), 60),
        reward=table.take("reward", str, "exit_code"),
        fresh=table.take("fresh", bool, False),
        work=work,
    )
    return grader


def _limits(table: _Table) -> Limits:
    limits: Limits = table.make(
        Limits,
        steps=table.take("steps", int, None),
        wall=table.take("wall", (int, float), None),
        command=table.take("command", (int, float), None),
        output=table.take("output", (int, str), "1MiB"),
    )
    return limits


def _spec(table: _Table) -> Spec:
    given = {key: table.data[key] for key in SPEC if table.data.get(key) is not None}
    for key in SPEC:
        table.taken.add(key)
    checked = {
        key: SPEC[key].check(value, f"{table.where}: {table.name}{key}") for key, value in given.items()
    }
    spec: Spec = table.make(Spec, **checked)
    return spec


def _solution(table: _Table) -> Solution:
    found = Solution(files=table.files("files"), command=table.take("command", str, None))
    if not found.files and not found.command:
        raise ConfigError(f"{table.where}: {table.name.rstrip('.')} needs files or a command")
    return found


_REQUIRED: Any = object()
_NAMES: dict[type, str] = {
    str: "text",
    int: "a whole number",
    float: "a number",
    bool: "true or false",
    list: "a list",
    dict: "a table",
}


class _Table:
    """A table whose fields are taken one by one; what is left over in the end is unknown."""

    def __init__(self, data: Any, where: str, name: str) -> None:
        self.where, self.name = where, name
        if not isinstance(data, Mapping):
            what = name.rstrip(".") or "a task"
            raise ConfigError(f"{where}: {what} must be a table, not {_short(data)}")
        self.data: Mapping[str, Any] = data
        self.taken: set[str] = set()

    def error(self, key: str, what: str) -> ConfigError:
        return ConfigError(f"{self.where}: {self.name}{key} {what}")

    def take(self, key: str, kinds: type | tuple[type, ...], default: Any = _REQUIRED) -> Any:
        self.taken.add(key)
        value = self.data.get(key)
        if value is None:  # JSON's null is the same as leaving it out
            if default is _REQUIRED:
                near = [k for k in self.data if nearest(k, [key]).startswith(": did")]
                raise self.error(key, f"is missing{f' (is {near[0]!r} meant?)' if near else ''}")
            return default
        kinds = kinds if isinstance(kinds, tuple) else (kinds,)
        if not isinstance(value, kinds) or (isinstance(value, bool) and bool not in kinds):
            names = " or ".join(dict.fromkeys(_NAMES[kind] for kind in kinds))
            raise self.error(key, f"must be {names}, not {_short(value)}")
        if isinstance(value, str):
            _encodable(value, self, key)
        return value

    def files(self, key: str) -> Files:
        """A map from path to text or ``{"base64": ...}``."""
        found: Files = {}
        for path, value in self.take(key, dict, {}).items():
            place = f"{key}[{path!r}]"
            if not is_utf8(path, "surrogateescape"):
                raise self.error(place, "holds half a surrogate pair, which no path can")
            if isinstance(value, Mapping) and set(value) == {"base64"} and isinstance(value["base64"], str):
                try:
                    found[path] = base64.b64decode(value["base64"], validate=True)
                except (binascii.Error, ValueError) as error:
                    raise self.error(place, f"is not valid base64: {error}") from None
            elif isinstance(value, str):
                _encodable(value, self, place)
                found[path] = value
            else:
                raise self.error(place, f'must be text or {{"base64": "..."}}, not {_short(value)}')
        return found

    def sub(self, key: str, read: Callable[[_Table], Any]) -> Any:
        """The table under *key* through *read*, or None when it is absent."""
        value = self.take(key, dict, None)
        if value is None:
            return None
        table = _Table(value, self.where, f"{self.name}{key}.")
        found = read(table)
        table.done()
        return found

    def make(self, cls: Callable[..., Any], **values: Any) -> Any:
        """*cls* of *values*; what it refuses is told with the place it stands at."""
        try:
            return cls(**values)
        except ConfigError as error:
            raise ConfigError(f"{self.where}: {error.message}", hint=error.hint) from None

    def done(self) -> None:
        for key in self.data:
            if key not in self.taken:
                raise ConfigError(
                    f"{self.where}: unknown field {self.name + key!r}{nearest(key, self.taken)}"
                )


def _compiles(checks: str, table: _Table) -> None:
    """Checks that are no Python would end every rollout with a reward of 0."""
    try:
        compile(checks, "checks", "exec", dont_inherit=True)
    except SyntaxError as error:
        place = f" line {error.lineno}" if error.lineno else ""
        raise table.error(f"checks{place}", f"is no Python: {error.msg}") from None
    except (ValueError, RecursionError, MemoryError, OverflowError) as error:
        raise table.error("checks", f"is no Python: {error or 'nested too deep'}") from None


def _encodable(text: str, table: _Table, key: str) -> None:
    try:
        text.encode()
    except UnicodeEncodeError:  # half a surrogate pair: JSON can spell it, no file can hold it
        raise table.error(key, "holds half a surrogate pair, which is no text") from None


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 60 else text[:57] + "..."
