"""The simple half of a Dockerfile: what a Task can carry by itself, so that no image has to be built.

Taken: ``FROM`` (one), ``WORKDIR``, ``ENV``, ``RUN`` (becomes the task's setup) and ``COPY`` of files of the
build context. Passed over: what only says how a container is started or labelled (``CMD``, ``LABEL`` ...).
Everything else, and every option of these, is an error that names the line: half of a recipe would be
another task.
"""

from __future__ import annotations

import json
import posixpath
import re
import shlex
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

from ..errors import ConfigError
from .document import Files

HINT = "build the image and name it as docker_image in task.toml"
_IGNORED = {"LABEL", "EXPOSE", "CMD", "ENTRYPOINT", "STOPSIGNAL", "MAINTAINER", "HEALTHCHECK"}


@dataclass
class Recipe:
    """What was taken from a Dockerfile."""

    image: str | None = None
    workdir: str | None = None
    env: dict[str, str] = field(default_factory=dict)
    files: Files = field(default_factory=dict)
    setup: str | None = None


def read_dockerfile(path: Path) -> Recipe:
    """The recipe in *path*, whose directory is the build context.

    Raises:
        ConfigError: it needs more than the simple half.
    """
    recipe = Recipe()
    steps: list[str] = []
    for number, word, rest in _instructions(path):
        where = f"{path}:{number}"
        if word in _IGNORED:
            continue
        if rest.startswith("--"):
            raise ConfigError(f"{where}: {word} {rest.split()[0]} is not supported", hint=HINT)
        if word == "FROM":
            if recipe.image is not None:
                raise ConfigError(f"{where}: a second FROM is not supported", hint=HINT)
            recipe.image = _plain(rest.split(" ")[0], where)
            continue
        if recipe.image is None:
            raise ConfigError(f"{where}: {word} before FROM is not supported", hint=HINT)
        here = recipe.workdir or "/"
        if word == "WORKDIR":
            recipe.workdir = posixpath.normpath(posixpath.join(here, _expand(rest, recipe, where)))
        elif word == "ENV":
            recipe.env.update(_env(rest, recipe, where))
        elif word == "COPY":
            if steps:
                # A primed layer puts files in place before it runs setup.
                raise ConfigError(f"{where}: COPY after RUN is not supported", hint=HINT)
            recipe.files.update(_copy(rest, here, path.parent, where))
        elif word == "RUN":
            if rest.startswith("["):
                rest = shlex.join(_words(rest, where))
            if "<<" in rest:
                raise ConfigError(f"{where}: RUN with a here-document is not supported", hint=HINT)
            place = shlex.quote(here)
            steps.append(f"mkdir -p {place}\ncd {place}\nsh -c {shlex.quote(rest)}")
        else:
            raise ConfigError(f"{where}: {word} is not supported", hint=HINT)
    if recipe.image is None:
        raise ConfigError(f"{path}: has no FROM")
    if steps:
        recipe.setup = "set -e\n" + "\n".join(steps) + "\n"
    return recipe


def _instructions(path: Path) -> Iterator[tuple[int, str, str]]:
    """(line, instruction, the rest), comments dropped and continued lines joined."""
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except UnicodeDecodeError as error:
        raise ConfigError(f"{path}: not valid UTF-8 at byte {error.start}") from None
    for line in lines:
        directive = re.fullmatch(r"#\s*(escape)\s*=\s*(\S+)\s*", line, re.IGNORECASE)
        if directive and directive.group(2) != "\\":
            raise ConfigError(f"{path}: another escape character is not supported", hint=HINT)
    start, text = 0, ""
    for number, line in enumerate([*lines, ""], 1):
        if line.lstrip().startswith("#") or (text and not line.strip() and number <= len(lines)):
            continue
        start = start if text else number
        if line.rstrip().endswith("\\"):
            text += line.rstrip()[:-1]
            continue
        text = (text + line).strip()
        if text:
            word, _, rest = text.partition(" ")
            yield start, word.upper(), rest.strip() if word.upper() == "RUN" else " ".join(rest.split())
        text = ""


def _plain(text: str, where: str) -> str:
    if "$" in text:
        raise ConfigError(f"{where}: a build argument in {text!r} is not supported", hint=HINT)
    return text


def _expand(text: str, recipe: Recipe, where: str) -> str:
    """$NAME and ${NAME} of earlier ENV lines."""

    def value(match: re.Match[str]) -> str:
        name = match.group(1) or match.group(2)
        if name not in recipe.env:
            raise ConfigError(f"{where}: ${name} is not set by an earlier ENV", hint=HINT)
        return recipe.env[name]

    expanded = re.sub(r"\$(?:(\w+)|\{(\w+)\})", value, text)
    return _plain(expanded, where) if expanded == text else expanded


def _env(rest: str, recipe: Recipe, where: str) -> dict[str, str]:
    if "=" not in rest.split(" ")[0]:  # the old form: ENV NAME the whole rest
        name, _, value = rest.partition(" ")
        return {name: _expand(value, recipe, where)}
    found = {}
    for word in _split(rest, where):
        name, equals, value = word.partition("=")
        if not equals:
            raise ConfigError(f"{where}: ENV {word!r} is no NAME=value")
        found[name] = _expand(value, recipe, where)
    return found


def _copy(rest: str, here: str, context: Path, where: str) -> Files:
    *sources, target = _words(rest, where) if rest.startswith("[") else _split(rest, where)
    if not sources or any(char in rest for char in "*?$"):
        raise ConfigError(f"{where}: COPY with a pattern or a variable is not supported", hint=HINT)
    into_directory = target.endswith("/") or target in (".", "./") or len(sources) > 1
    destination = posixpath.normpath(posixpath.join(here, target))
    found: Files = {}
    for source in sources:
        path = (context / source.lstrip("/")).resolve()
        if not path.is_relative_to(context.resolve()) or not path.exists():
            raise ConfigError(f"{where}: COPY {source}: there is no such file beside the Dockerfile")
        if path.is_dir():
            found.update(read_tree(path, destination, where, skip=("Dockerfile",)))
        else:
            name = posixpath.join(destination, path.name) if into_directory else destination
            found[name] = read_text_or_bytes(path)
    return found


def read_tree(directory: Path, target: str, where: str, *, skip: tuple[str, ...] = ()) -> Files:
    """The files below *directory*, by their paths below *target*; symbolic links are refused."""
    found: Files = {}
    for path in sorted(directory.rglob("*")):
        name = path.relative_to(directory).as_posix()
        if path.is_symlink():
            raise ConfigError(f"{where}: {path} is a symbolic link, which a task's files cannot be")
        if path.is_file() and name not in skip:
            found[posixpath.join(target, name)] = read_text_or_bytes(path)
    return found


def read_text_or_bytes(path: Path) -> str | bytes:
    """Text where it is UTF-8, else the bytes."""
    data = path.read_bytes()
    try:
        return data.decode()
    except UnicodeDecodeError:
        return data


def _split(text: str, where: str) -> list[str]:
    try:
        return shlex.split(text)
    except ValueError as error:
        raise ConfigError(f"{where}: {error}") from None


def _words(text: str, where: str) -> list[str]:
    try:
        words = json.loads(text)
    except (ValueError, RecursionError):
        words = None
    if not isinstance(words, list) or not words or not all(isinstance(word, str) for word in words):
        raise ConfigError(f"{where}: {text!r} is no list of strings")
    return words
