"""What a rollout works on: :class:`Task` and its :class:`Grader`.

Reading tasks from files lives in :mod:`rlsandbox.tasks`; this module holds data only.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from os import PathLike, fspath
from typing import Any

from .errors import ConfigError
from .spec import Limits, Spec, _Data, _positive, _text, is_utf8

Cmd = str | Sequence[str]


@dataclass(frozen=True, kw_only=True)
class Grader(_Data):
    """The task's check of the work.

    Args:
        command: run after the acting agent's processes are gone and *files* are in place.
        files: hidden files, put in place after the last action (relative paths: under the workdir).
        timeout: seconds.
        reward: ``"exit_code"`` (1.0 for 0, else 0.0), ``"file:/path"`` (a number read from there), or
            ``"pkg.mod:fn"`` (called in the trainer with the CommandResult and the task, returns a float).
        fresh: grade in a fresh sandbox with only the work carried over.
        work: where the work lies, beside the workdir (relative paths: under it). What a rollout changed
            elsewhere among programs, libraries and settings is put back before grading; ``["/"]``: all it did
            is work, as in tasks that install or configure something.
    """

    command: Cmd
    files: Mapping[str, str | bytes] = field(default_factory=dict)
    timeout: float = 60
    reward: str = "exit_code"
    fresh: bool = False
    work: Sequence[str] = ()

    def __post_init__(self) -> None:
        if isinstance(self.work, str) or not isinstance(self.work, Sequence):
            raise ConfigError(f"Grader.work must be a list of paths, not {self.work!r}")
        for place in self.work:
            _text(place, "Grader.work")
        object.__setattr__(self, "work", tuple(self.work))
        if not isinstance(self.command, str):
            if not isinstance(self.command, Sequence) or not all(isinstance(a, str) for a in self.command):
                raise ConfigError(f"Grader.command must be text or a list of text, not {self.command!r}")
            object.__setattr__(self, "command", tuple(self.command))
        if not self.command:
            raise ConfigError("Grader.command must not be empty")
        for part in (self.command,) if isinstance(self.command, str) else self.command:
            if "\0" in part or not is_utf8(part, "surrogateescape"):
                raise ConfigError(f"Grader.command must be UTF-8 text without NUL, not {part!r:.100}")
        if not isinstance(self.fresh, bool):
            raise ConfigError(f"Grader.fresh must be True or False, not {self.fresh!r}")
        if not isinstance(self.reward, str):
            raise ConfigError(f"Grader.reward must be text, not {self.reward!r}")
        _positive(self.timeout, "Grader.timeout")
        object.__setattr__(self, "files", _files(self.files, "Grader.files"))
        ok = self.reward == "exit_code" or self.reward.startswith("file:/")
        if not ok and not _dotted(self.reward):
            raise ConfigError(
                f"Grader.reward must be 'exit_code', 'file:/path' or 'pkg.mod:fn', not {self.reward!r}"
            )


@dataclass(frozen=True, kw_only=True)
class Task(_Data):
    """What a rollout works on.

    Args:
        id: unique within a batch.
        prompt: what the acting agent is told.
        image: shorthand for ``Spec(image=...)``.
        workdir: where commands start; made when missing; relative file paths are under it.
        files: put in place once, before *setup*; text or bytes.
        setup: shell script run once per (spec, setup, files); its result is the primed layer that
            every episode of the task starts from.
        grader: the check; without one ``grade()`` is a ConfigError.
        spec: over ``image`` over the pool's spec, field by field.
        limits: of one attempt.
        metadata: free, JSON-able; goes to the ledger.
    """

    id: str
    prompt: str = ""
    image: str | None = None
    workdir: str | None = None
    files: Mapping[str, str | bytes] = field(default_factory=dict)
    setup: str | None = None
    grader: Grader | None = None
    spec: Spec | None = None
    limits: Limits = field(default_factory=Limits)
    metadata: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if not isinstance(self.id, str) or not self.id:
            raise ConfigError(f"Task.id must be a string that is not empty, not {self.id!r}")
        if "\0" in self.id:
            raise ConfigError(f"Task.id must not contain NUL: {self.id!r:.100}")
        if not is_utf8(self.id):
            raise ConfigError(f"Task.id must be text that UTF-8 can say, not {self.id!r}")
        if isinstance(self.image, PathLike):
            object.__setattr__(self, "image", fspath(self.image))
        if not isinstance(self.prompt, str):
            raise ConfigError(f"Task.prompt must be text, not {type(self.prompt).__name__}", task=self.id)
        for name in ("image", "workdir", "setup"):
            if getattr(self, name) != "":
                _text(getattr(self, name), f"Task.{name}")
        for name, cls in (("grader", Grader), ("spec", Spec), ("limits", Limits), ("metadata", Mapping)):
            value = getattr(self, name)
            if not isinstance(value, cls) and not (value is None and name in ("grader", "spec")):
                raise ConfigError(
                    f"Task.{name} must be a {cls.__name__}, not {type(value).__name__}", task=self.id
                )
        if self.workdir is not None and not self.workdir.startswith("/"):
            raise ConfigError(f"Task.workdir must be an absolute path, not {self.workdir!r}", task=self.id)
        object.__setattr__(self, "files", _files(self.files, "Task.files"))

    def __hash__(self) -> int:
        return hash((self.id, self.layer_key))

    def spec_over(self, base: Spec | None) -> Spec:
        """The spec this task runs in: Task.spec over Task.image over *base*."""
        own = self.spec or Spec()
        if self.image is not None:
            own = own.over(Spec(image=self.image))
        return own.over(base)

    @property
    def layer_key(self) -> str | None:
        """Digest of setup, files and workdir: the primed layer's name. None: there is nothing to prime."""
        if not self.files and not self.setup and not self.workdir:
            return None
        cached: str | None = self.__dict__.get("_layer_key")
        if cached is None:
            digest = hashlib.sha256(json.dumps([self.workdir, self.setup]).encode())
            for path in sorted(self.files):
                data = self.files[path]
                raw = data.encode() if isinstance(data, str) else data
                digest.update(f"\0{path}\0{len(raw)}\0".encode("utf-8", "surrogateescape") + raw)
            cached = digest.hexdigest()[:16]
            object.__setattr__(self, "_layer_key", cached)
        return cached


def layer_name(task: Task, spec: Spec) -> str | None:
    """Of the layer that *task*'s episodes begin on in sandboxes of *spec*; None: on the bare base."""
    return f"p{spec.digest[:8]}-{task.layer_key}" if task.layer_key is not None else None


def _files(value: Mapping[str, str | bytes], what: str) -> dict[str, str | bytes]:
    if not isinstance(value, Mapping):
        raise ConfigError(f"{what} must map paths to text or bytes, not {type(value).__name__}")
    for path, data in value.items():
        if not isinstance(path, str) or not path or "\0" in path or path.endswith("/"):
            raise ConfigError(f"{what}: {path!r} is not a file path")
        if not is_utf8(path, "surrogateescape"):
            raise ConfigError(f"{what}: {path!r} holds half a surrogate pair, which no path can")
        if ".." in path.split("/"):
            raise ConfigError(f"{what}: {path!r} must not contain '..'")
        if not isinstance(data, (str, bytes)):
            raise ConfigError(f"{what}[{path!r}] must be text or bytes, not {type(data).__name__}")
        if isinstance(data, str) and not is_utf8(data):
            raise ConfigError(f"{what}[{path!r}]: this text cannot be written as UTF-8; give bytes")
    return dict(value)


def _dotted(name: str) -> bool:
    module, _, function = name.partition(":")
    return bool(function) and all(p.isidentifier() for p in (*module.split("."), *function.split(".")))
