"""Tasks as TOML files, one a file: the same document as a JSON line, easier to read and to review."""

from __future__ import annotations

import tomllib
from collections.abc import Iterator
from pathlib import Path

from ..errors import ConfigError
from ._host import host_python_spec
from .document import Loaded, parse_document, with_spec


def read_file(path: Path) -> Loaded:
    """The task in *path*."""
    return _read(path, origin=f"{path.absolute()}#")


def read_directory(path: Path, *, name: str | None = None) -> Iterator[Loaded]:
    """The ``.toml`` files of *path* by file name; *name*: of the shipped set that it is."""
    for file in sorted(path.glob("*.toml")):
        origin = f"{name or path.absolute()}#{file.name}"
        loaded = _read(file, origin=origin)
        yield with_spec(loaded, host_python_spec()) if name else loaded


def _read(path: Path, *, origin: str) -> Loaded:
    try:
        data = tomllib.loads(path.read_text(encoding="utf-8-sig"))
    except (ValueError, RecursionError) as error:  # numbers too long, nested too deep
        raise ConfigError(f"{path}: not valid TOML: {error}") from None
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read: {error.strerror or error}") from None
    return parse_document(data, str(path), origin=origin)
