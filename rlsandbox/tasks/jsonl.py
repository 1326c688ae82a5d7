"""JSON lines: one task a line, gzipped or not."""

from __future__ import annotations

import gzip
import json
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from ..errors import ConfigError
from .document import Loaded, parse_document


def read_lines(path: Path) -> Iterator[Loaded]:
    """Tasks of *path*, one a line; empty lines are skipped."""
    for number, text in _lines(path):
        where = f"{path}:{number}"
        yield parse_document(parse_line(text, where), where, origin=f"{path.absolute()}#{number}")


def parse_line(text: str, where: str) -> Any:
    """JSON as the standard has it: no NaN, and no key twice in an object."""
    try:
        return json.loads(text, object_pairs_hook=_pairs, parse_constant=_constant)
    except json.JSONDecodeError as error:
        raise ConfigError(f"{where}: not valid JSON at column {error.colno}: {error.msg}") from None
    except RecursionError:
        raise ConfigError(f"{where}: not valid JSON: nested too deep") from None
    except ValueError:
        raise ConfigError(f"{where}: a number has more digits than Python reads") from None
    except _Refused as error:
        raise ConfigError(f"{where}: {error}") from None


class _Refused(Exception):
    pass


def _pairs(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for key, value in pairs:
        if key in found:
            raise _Refused(f"field {key!r} stands twice")
        found[key] = value
    return found


def _constant(name: str) -> Any:
    raise _Refused(f"{name} is not valid JSON")


def _lines(path: Path) -> Iterator[tuple[int, str]]:
    try:
        with gzip.open(path) if path.name.endswith(".gz") else path.open("rb") as file:
            for number, line in enumerate(file, 1):
                try:
                    text = line.decode("utf-8-sig" if number == 1 else "utf-8").strip()
                except UnicodeDecodeError as error:
                    raise ConfigError(f"{path}:{number}: not valid UTF-8 at byte {error.start}") from None
                if text:
                    yield number, text
    except (EOFError, zlib.error, gzip.BadGzipFile) as error:
        raise ConfigError(f"{path}: not a whole gzip file: {error}") from None
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read: {error.strerror or error}") from None
