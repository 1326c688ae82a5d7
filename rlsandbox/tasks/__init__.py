"""Where tasks come from: shipped sets, JSON lines, TOML files and task directories.

:func:`load_tasks` reads data and nothing else: no code of a data set is imported or run. What is wrong
is one :class:`~rlsandbox.errors.ConfigError` that names file, line and field.
"""

from __future__ import annotations

import difflib
import os
from collections.abc import Iterable, Iterator
from functools import lru_cache
from itertools import islice
from pathlib import Path

from ..errors import ConfigError
from ..task import Task
from .document import Loaded, Solution

__all__ = ["DATASETS", "Solution", "load_tasks", "solution_of"]

DATASETS = ("demo", "humaneval")


def load_tasks(source: str | os.PathLike[str], /, *, limit: int | None = None) -> list[Task]:
    """Tasks in the order of their source, ids unique.

    Args:
        source: ``"demo"`` (24 small bug fixes that ship with the package), ``"humaneval"`` (needs the extra
            of that name), a file ``x.jsonl``, ``x.jsonl.gz`` or ``x.toml``, or a directory: one task
            directory (``task.toml``, ``instruction.md``, ``tests/test.sh``), a directory of such, or one of
            ``.toml`` files.
        limit: at most so many, from the start.

    Raises:
        ConfigError: nothing is there, or what is there is wrong.
    """
    if not isinstance(source, (str, os.PathLike)):
        raise ConfigError(f"load_tasks() takes a name or a path, not {type(source).__name__}")
    if not os.fspath(source):
        raise ConfigError("load_tasks() takes a name or a path, not an empty one")
    if limit is not None and (isinstance(limit, bool) or not isinstance(limit, int) or limit < 1):
        raise ConfigError(f"limit must be a whole number above 0, not {limit!r}")
    try:
        tasks = [loaded.task for loaded in islice(_unique(_read(source)), limit)]
    except OSError as error:
        raise _unreadable(source, error) from None
    if not tasks:
        raise ConfigError(f"{os.fspath(source)}: holds no task")
    return tasks


def solution_of(task: Task, *, broken: bool = False) -> Solution | None:
    """The known solution of a loaded task, read again from where the task came from.

    It is not part of the task, so that nothing which sees the task (the acting agent, the ledger) sees it.

    Args:
        task: one that :func:`load_tasks` gave.
        broken: the known wrong one instead.

    Returns:
        None when its source has none.

    Raises:
        ConfigError: the task did not come from :func:`load_tasks`, or its source has changed since.
    """
    origin = task.metadata.get("loaded_from")
    if not isinstance(origin, str):
        raise ConfigError(
            f"task {task.id!r} was not loaded from a source that knows solutions",
            hint="load_tasks() remembers where a task came from",
        )
    source, _, place = origin.rpartition("#")
    if place.endswith(".toml") and source not in DATASETS:
        source = os.path.join(source, place)  # one file of a directory of many
    loaded = _known(source, _state(source)).get(task.id)
    if loaded is None:
        raise ConfigError(f"task {task.id!r} is no longer in {source}")
    return loaded.broken() if broken else loaded.solution()


@lru_cache(maxsize=8)
def _known(source: str, state: object) -> dict[str, Loaded]:
    """A source by task id; read again when its *state* has changed."""
    try:
        return {loaded.task.id: loaded for loaded in _read(source)}
    except OSError as error:
        raise _unreadable(source, error) from None


def _state(source: str) -> object:
    if source in DATASETS:
        return None
    try:
        stat = os.stat(source)
    except OSError:
        return None  # reading it says what is wrong
    return stat.st_mtime_ns, stat.st_size


def _read(source: str | os.PathLike[str]) -> Iterator[Loaded]:
    name = os.fspath(source)
    if name == "demo":
        from .toml import read_directory

        return read_directory(Path(__file__).with_name("demo"), name="demo")
    if name == "humaneval":
        from .humaneval import read_humaneval

        return read_humaneval()
    path = Path(name)
    try:
        os.stat(path)
    except (FileNotFoundError, NotADirectoryError, ValueError):  # a name with NUL in it is no file's
        raise ConfigError(
            f"tasks {name!r}: no such file or directory, and no shipped set{_near(path)}"
        ) from None
    if path.is_dir():
        return _read_directory(path)
    if path.suffix == ".toml":
        from .toml import read_file

        return iter([read_file(path)])
    if path.name.endswith((".jsonl", ".jsonl.gz", ".ndjson")):
        from .jsonl import read_lines

        return read_lines(path)
    raise ConfigError(
        f"{name}: task files end in .jsonl, .jsonl.gz or .toml", hint="docs/tasks.md describes each"
    )


def _read_directory(path: Path) -> Iterator[Loaded]:
    from .harbor import is_task_directory, read_task_directory
    from .toml import read_directory

    if is_task_directory(path):
        return iter([read_task_directory(path)])
    inner = sorted(entry for entry in path.iterdir() if entry.is_dir() and is_task_directory(entry))
    if inner:
        return (read_task_directory(entry) for entry in inner)
    if any(path.glob("*.toml")):
        return read_directory(path)
    raise ConfigError(
        f"{path}: no task directory (task.toml, instruction.md), and none of such or of .toml tasks"
    )


def _unreadable(source: str | os.PathLike[str], error: OSError) -> ConfigError:
    """No permission, a name too long, a file that goes away meanwhile."""
    name = os.fspath(source)
    place = "" if error.filename in (None, name, Path(name)) else f" ({os.fsdecode(error.filename)!r:.300})"
    return ConfigError(f"tasks {name!r:.300}: cannot be read: {error.strerror or error}{place}")


def _unique(loaded: Iterable[Loaded]) -> Iterator[Loaded]:
    seen: dict[str, str] = {}
    for one in loaded:
        first = seen.setdefault(one.task.id, one.where)
        if first != one.where:
            raise ConfigError(f"{one.where}: id {one.task.id!r} is already that of {first}")
        yield one


def _near(path: Path) -> str:
    """The nearest shipped set or neighbouring file, as the end of a message."""
    try:
        beside = {str(path.parent / entry.name): entry.name for entry in path.parent.iterdir()}
    except OSError:
        return f" ({path.parent} is no directory); shipped: {', '.join(DATASETS)}"
    names = {name: name for name in DATASETS} | {short: full for full, short in beside.items()}
    close = difflib.get_close_matches(path.name, list(names), n=1, cutoff=0.6)
    if close:
        return f": did you mean {names[close[0]]!r}?"
    return f"; shipped: {', '.join(DATASETS)}"
