"""Every door for plugins, in one file.

A plugin is a module or object with functions marked ``@rlsandbox.hookimpl``; it may take any subset of
a hook's arguments. Plugins come from the entry-point group ``rlsandbox``, from ``Pool(plugins=[...])``,
and from :mod:`rlsandbox_plugins`: the built-in ones use this same door and can be switched off by
name (``Pool(block=["git"])``). Hooks are plain synchronous functions; the pool calls them on a thread
of their own with a deadline. They run last-registered first, so a user's plugin precedes the built-ins.
"""

from __future__ import annotations

import inspect
import os
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

import pluggy

from .errors import ConfigError
from .spec import is_utf8

if TYPE_CHECKING:
    from .results import CommandResult, Failure, FileInfo, Record
    from .sandbox import Snapshot
    from .task import Task

PROJECT = "rlsandbox"
hookspec = pluggy.HookspecMarker(PROJECT)
_F = TypeVar("_F")
hookimpl = pluggy.HookimplMarker(PROJECT)
_ESCAPE = re.compile(r"\\x([0-9a-f]{2})")


@dataclass(frozen=True)
class Residue:
    """One thing of an earlier episode that verification found.

    Args:
        kind: ``file``, ``process``, ``socket``, ``mount``, ``ipc``, ``namespace``, ``credential`` ... or a
            plugin's own word.
        what: which one: a path, a command line, an address.
        detail: how it differs from the baseline.
    """

    kind: str
    what: str
    detail: str = ""


@dataclass(frozen=True)
class Credentials:
    """What one episode may hold. Values are redacted everywhere outside the episode."""

    id: str
    env: Mapping[str, str] = field(default_factory=dict)
    files: Mapping[str, bytes] = field(default_factory=dict)

    def __post_init__(self) -> None:
        # Here, in the plugin that makes it: later it would look like a sandbox's fault. No value is told.
        if not isinstance(self.id, str) or not self.id:
            raise ConfigError(f"Credentials.id must be text that is not empty, not {self.id!r}")
        for what, values, kinds in (("env", self.env, str), ("files", self.files, (bytes, str))):
            if not isinstance(values, Mapping):
                raise ConfigError(f"Credentials.{what} must be a mapping, not {type(values).__name__}")
            for name, value in values.items():
                bad = not isinstance(name, str) or not name or not isinstance(value, kinds)
                text = "" if bad else name + (value if isinstance(value, str) else "")
                bad = bad or "\0" in text or (what == "env" and "=" in name)
                if bad or not is_utf8(text, "surrogateescape"):
                    kind = "bytes" if what == "files" else "UTF-8 text without NUL"
                    raise ConfigError(f"Credentials.{what}: {name!r} must be a name, its value {kind}")
        if any(isinstance(data, str) for data in self.files.values()):
            raw = {p: d.encode() if isinstance(d, str) else d for p, d in self.files.items()}
            object.__setattr__(self, "files", raw)

    def __repr__(self) -> str:
        return f"Credentials(id={self.id!r}, env={sorted(self.env)}, files={sorted(self.files)})"


def fact_fields(line: str) -> list[str]:
    """The fields of a fact as they were; bytes that are no UTF-8 become surrogates (:func:`os.fsdecode`)."""
    if "\\" not in line:
        return line.split("\t")
    return [os.fsdecode(_ESCAPE.sub(_byte, item).encode("latin-1")) for item in line.split("\t")]


def _byte(match: re.Match[str]) -> str:
    return chr(int(match.group(1), 16))


@dataclass(frozen=True)
class ProcessInfo:
    """A process of the episode, seen from outside it."""

    pid: int
    ppid: int
    uid: int
    state: str
    command: str
    argv: tuple[str, ...] = ()


@dataclass(frozen=True)
class SocketInfo:
    """A socket of the episode's network namespace, seen from outside it."""

    proto: str
    local: str
    remote: str = ""
    state: str = ""


class Inspector(Protocol):
    """The view of a sandbox from outside. Nothing here runs a program of the image or trusts the episode."""

    task: Task | None
    mode: str
    """The reset mode: ``overlay``, ``userns``, ``manifest`` or ``replace``."""
    credentials: Sequence[Credentials]
    """What earlier episodes of this sandbox held; their values must be nowhere any more."""

    def changed(self, under: str = "/") -> Iterable[FileInfo]:
        """What differs from the baseline under a path; deletions have kind ``deleted``."""
        ...

    def processes(self) -> Iterable[ProcessInfo]:
        """Processes of the episode other than its first."""
        ...

    def sockets(self) -> Iterable[SocketInfo]: ...

    def facts(self, kind: str) -> Sequence[str]:
        """Raw facts of one kind (``mount``, ``ipc``, ``ns``, ``env``, ``fd``, ``key`` ...), a line each.

        :func:`fact_fields` splits a line.
        """
        ...

    def baseline_facts(self, kind: str) -> Sequence[str]:
        """The same facts as taken when the sandbox was primed."""
        ...

    def read(self, path: str, limit: int = 1 << 20) -> bytes | None:
        """Content as the episode would see it; None when there is no such file. Never follows a link out."""
        ...

    def baseline(self, path: str) -> bytes | None:
        """Content at the baseline."""
        ...


class Resetter(Inspector, Protocol):
    """What a reset policy may do; everything acts from outside the episode."""

    def remove(self, path: str) -> None:
        """Put *path* back to its baseline: what was made is gone, what was changed or deleted is back."""
        ...

    def kill_all(self) -> None:
        """End every process of the episode."""
        ...

    def run_trusted(self, argv: list[str]) -> CommandResult:
        """Run a program in the baseline view (not the episode's), for policies that need one."""
        ...


@dataclass(frozen=True)
class Rollout:
    """The attempt a hook is called for, and what ``sandbox.rollout`` is inside a policy.

    Args:
        attempt: 1 for the first.
        state: what the last checkpoint of an earlier attempt kept, None when there was none.
    """

    run: str
    task: Task
    index: int
    group: str
    attempt: int
    id: str = ""
    state: Any = None
    _checkpoint: Callable[[Any], Any] | None = field(default=None, repr=False, compare=False)

    def checkpoint(self, state: Any = None) -> Snapshot:
        """Keep files and a copy of *state*: should this attempt break, the next one starts there.

        Raises:
            SandboxStateError: called outside the policy that the rollout belongs to.
        """
        if self._checkpoint is None:
            from .errors import SandboxStateError

            raise SandboxStateError("checkpoint() works on sandbox.rollout, inside a policy of run_rollouts")
        snapshot: Snapshot = self._checkpoint(state)
        return snapshot


class Specs:
    """The hook specifications."""

    @hookspec
    def rlsandbox_prime(self, task: Task, sandbox: Any) -> None:
        """After a task's files and setup, before its primed layer is sealed; *sandbox* is a Sandbox."""

    @hookspec
    def rlsandbox_reset(self, resetter: Resetter) -> None:
        """Undo what an episode did. All implementations run; an exception quarantines the sandbox."""

    @hookspec
    def rlsandbox_verify(self, inspector: Inspector) -> Iterable[Residue]:  # type: ignore[empty-body]
        """Look for residue, independently of every reset policy. Any residue quarantines the sandbox."""

    @hookspec(firstresult=True)
    def rlsandbox_classify_failure(
        self, error: BaseException, phase: str, rollout: Rollout | None
    ) -> Failure | None:
        """Name a failure. The first that answers wins; the built-in classifier answers last."""

    @hookspec
    def rlsandbox_record(self, record: Record) -> None:
        """A rollout has ended and is in the ledger. An exception here is logged and changes nothing."""

    @hookspec(firstresult=True)
    def rlsandbox_place(self, task: Task, nodes: Sequence[str]) -> str | None:
        """Choose a node for a sandbox that is about to be made; None leaves it to the backend.

        Sandboxes of one spec serve every task of that spec: *task* is the one that asked last (claimed or
        told to ``expect``). Called where a backend has nodes to choose from, so not on one machine, and not
        for what a pool is filled with before it knows any task. A node that is not among *nodes*, an
        exception, or an answer that takes longer than 10 s count as None, with a warning.
        """

    @hookspec(firstresult=True)
    def rlsandbox_issue_credentials(self, rollout: Rollout) -> Credentials | None:
        """Issue what one episode may hold. Called before hand-over; an exception fails the attempt."""

    @hookspec
    def rlsandbox_revoke_credentials(self, credentials: Credentials) -> None:
        """Take credentials back at release. An exception becomes a failure record."""


def plugin_manager(
    plugins: Iterable[object] = (), *, block: Iterable[str] = (), entry_points: bool = True
) -> pluggy.PluginManager:
    """A manager with the built-in plugins, those of installed packages, and *plugins*, in that order."""
    import importlib.metadata

    from ._settings import nearest

    manager = pluggy.PluginManager(PROJECT)
    manager.add_hookspecs(Specs)
    try:
        import rlsandbox_plugins
    except ImportError as error:
        raise ConfigError(
            f"the built-in plugins are not importable: {error}",
            hint="pip install rlsandbox-pool (the package ships rlsandbox_plugins)",
        ) from error
    known = dict(rlsandbox_plugins.BUILTIN)
    if isinstance(block, str):
        raise ConfigError(f"block must be a list of names, not one text (block=[{block!r}])")
    blocked = set(block)
    for name, plugin in known.items():
        if name not in blocked:
            manager.register(plugin, name)
    if entry_points:
        for name in blocked:
            manager.set_blocked(name)
        _load_installed(manager)
    for plugin in plugins:
        # By a name that people know: errors and records say whose hook it was.
        name = str(getattr(plugin, "__name__", None) or type(plugin).__name__)
        if manager.is_registered(plugin):
            raise ConfigError(f"plugins: {name} is there twice, or installed as well")
        taken = sum(1 for known_as, _ in manager.list_name_plugin() if known_as.partition("#")[0] == name)
        try:
            manager.register(plugin, f"{name}#{taken + 1}" if taken else name)
        except pluggy.PluginValidationError as error:
            raise ConfigError(f"plugins: {name}: {' '.join(str(error).split())}") from error
        if not manager.get_hookcallers(plugin):
            raise ConfigError(f"plugins: {plugin!r} has no function marked @rlsandbox.hookimpl")
    for hook, caller in vars(manager.hook).items():
        for impl in () if hook.startswith("_") or caller.has_spec() else caller.get_hookimpls():
            if not impl.optionalhook:  # else what it was written for would silently not be done
                like = nearest(hook, [name for name in vars(Specs) if name.startswith("rlsandbox_")])
                raise ConfigError(f"plugins: {impl.plugin_name}: there is no hook {hook}{like}")
        for impl in caller.get_hookimpls() if not hook.startswith("_") else ():
            _runs_when_called(impl, hook)
    # Not from the manager's own list: that holds every name that was blocked.
    names = {*known, *(point.name for point in importlib.metadata.entry_points(group=PROJECT))}
    unknown = sorted(blocked - names)
    if unknown:
        raise ConfigError(f"block: no plugin is called {unknown[0]!r}{nearest(unknown[0], names)}")
    return manager


def _runs_when_called(impl: pluggy.HookImpl, hook: str) -> None:
    """A coroutine or a generator that nobody goes through would silently do nothing."""
    function = impl.function
    wrapper = impl.wrapper or impl.hookwrapper
    if inspect.iscoroutinefunction(function) or inspect.isasyncgenfunction(function):
        how = "async"
    elif inspect.isgeneratorfunction(function) and not wrapper and hook != "rlsandbox_verify":
        how = "a generator (it has a yield)"
    else:
        return
    raise ConfigError(f"plugins: {impl.plugin_name}: {hook} is {how}: hooks are plain functions")


def _load_installed(manager: pluggy.PluginManager) -> None:
    """Plugins of installed packages; one that is broken is named, so that it can be left out."""
    import importlib.metadata

    for point in importlib.metadata.entry_points(group=PROJECT):
        if manager.get_plugin(point.name) is not None or manager.is_blocked(point.name):
            continue
        try:
            plugin = point.load()
            if not manager.is_registered(plugin):
                manager.register(plugin, point.name)
        except Exception as error:
            raise ConfigError(
                f"the installed plugin {point.name!r} ({point.value}) cannot be loaded: "
                f"{type(error).__name__}: {' '.join(str(error).split())}",
                hint=f"mend or uninstall it, or leave it out: Pool(block=[{point.name!r}])",
            ) from error
