"""What a grader trusts: the programs and settings that are not the rollout's work, put back before it runs.

A grader's command is run by the image's shell and interpreter, which read start-up files, configuration and
byte code by themselves. An agent that may write there decides what the grader says. So, seen and done from
outside the episode and after its processes are gone, what the rollout changed among these goes back to the
state in which the episode began:

- where programs, libraries and their settings are: ``/usr``, ``/bin``, ``/lib*``, ``/opt``, ``/etc``, what is
  exposed, and the directories of ``PATH``;
- hidden files and ``bin`` in home directories;
- files that tools run or read unasked, wherever they lie: ``conftest.py``, ``pytest.ini`` (and pytest's
  section in other files), ``sitecustomize``, ``__pycache__``; a repository's hooks and configuration.

The workdir is the rollout's own but for the last group; what ``Grader.work`` names is its own altogether.
"""

from __future__ import annotations

import asyncio
import configparser
import contextlib
import posixpath
import re
import tomllib
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

from ..results import FileInfo
from ..task import Grader
from .command import DEFAULT_ENV

if TYPE_CHECKING:
    from .core import AsyncSandbox

TOOLS = ("/usr", "/bin", "/sbin", "/lib", "/lib32", "/lib64", "/libx32", "/opt", "/etc", "/nix", "/snap")
UNASKED = re.compile(r"/(conftest\.py|\.?pytest\.ini|__pycache__|(site|user)customize(\.[\w.-]+)?)(/|$)")
_GIT = re.compile(r"(?P<git>.*/\.git)/(config|config\.worktree|hooks(/.*)?|info/(attributes|grafts))")
_SECTIONS = {"pyproject.toml", "setup.cfg", "tox.ini"}
_HOME = re.compile(r"(/root|/home/[^/]+)/(\.[^/]*|bin)(/.*)?")
_CACHE = re.compile(r"(/root|/home/[^/]+)/\.cache(/.*)?")
# In a home that is the workdir too, a hidden file may well be the work: only what is read unasked goes back.
_STARTUP = re.compile(
    r"\.(bash\w*|profile|zsh\w*|zprofile|zlogin|kshrc|cshrc|tcshrc|login|inputrc|shinit|pam_environment|vimrc"
    r"|gdbinit|local|config|cargo|rustup|npmrc|gemrc|gitconfig|pip|pydistutils\.cfg|pythonrc(\.py)?|condarc"
    r"|pyenv|ssh)"
)
_MAX = 65536
_AT_ONCE = 16


def within(path: str, places: Iterable[str]) -> bool:
    """Whether *path* is one of *places* or lies in one."""
    return any(path == p or path.startswith(p.rstrip("/") + "/") for p in places)


class Trust:
    """Tells which changed paths of *sandbox* are not the work that *grader* is to judge."""

    def __init__(self, sandbox: AsyncSandbox, grader: Grader) -> None:
        self._sandbox = sandbox
        self.workdir = posixpath.normpath(sandbox.workdir)
        self.work = [posixpath.normpath(sandbox.path(place)) for place in grader.work]
        env = {**DEFAULT_ENV, **sandbox.base_env, **sandbox.spec.env}
        programs = [p.rstrip("/") for p in env.get("PATH", "").split(":") if p.startswith("/") and p != "/"]
        beside = [f"{posixpath.dirname(p)}/lib" for p in programs if p.count("/") > 1]
        shown = [place for place in sandbox.spec.expose if place.startswith("/")]
        self.tools = (*TOOLS, *programs, *beside, *shown)
        self.home = env.get("HOME", "")

    @property
    def places(self) -> list[str]:
        """Where the work lies: what is carried into a fresh sandbox."""
        mine = [] if self.workdir == "/" or within(self.workdir, self.work) else [self.workdir]
        return self.work + mine

    async def foreign(self, changes: Iterable[FileInfo]) -> list[FileInfo]:
        """Those of *changes* that are no work: topmost only, in the order of their names."""
        found: list[FileInfo] = []
        repositories: dict[str, bool] = {}
        done = "\0"
        changes = sorted(changes, key=lambda info: info.name)
        settings = await self._settings(changes)
        for info in changes:
            path = info.name
            if path.startswith(done + "/"):
                continue
            if not (self._tool(path) or self._unasked(path)):
                if path not in settings and not await self._repository(info, repositories):
                    continue
            elif any(within(place, [path]) and place != path for place in (*self.work, self.workdir)):
                continue  # the work lies in this directory: what else is in it is told by itself
            found.append(info)
            done = path
        return found

    def _tool(self, path: str) -> bool:
        if within(path, self.work):
            return False
        if self.workdir != "/" and within(path, [self.workdir]):
            rest = path.removeprefix(self.workdir).strip("/")
            is_home = self.workdir in ("/root", self.home) or posixpath.dirname(self.workdir) == "/home"
            return is_home and _STARTUP.fullmatch(rest.partition("/")[0]) is not None
        if within(path, self.tools):
            return True
        if self.home and self.home != "/" and path.startswith(self.home + "/"):
            name = path.removeprefix(self.home + "/").partition("/")[0]
            return (name.startswith(".") or name == "bin") and name != ".cache"
        return _HOME.fullmatch(path) is not None and _CACHE.fullmatch(path) is None

    def _unasked(self, path: str) -> bool:
        return UNASKED.search(path) is not None and not within(path, self.work)

    async def _repository(self, info: FileInfo, repositories: dict[str, bool]) -> bool:
        """Settings of git in the working tree."""
        path = info.name
        match = _GIT.fullmatch(path)
        if within(path, self.work) or (match is None and not (path.endswith("/.git") and info.kind != "dir")):
            return False
        top = match["git"] if match is not None else path
        if top not in repositories:  # one that the rollout made is its work
            # Where nobody knows what there was (mode replace), any may be the task's.
            unknown = self._sandbox.reset_mode == "replace"
            repositories[top] = unknown or await self._read(f"{top}/HEAD", baseline=True) is not None
        return bool(repositories[top]) and info.kind != "dir"

    async def _settings(self, changes: Sequence[FileInfo]) -> set[str]:
        """Files whose section for pytest is another one than before; some are read at a time.

        Where nobody knows what was before (mode ``replace``), any that have one.
        """
        asked = [
            info.name
            for info in changes
            if posixpath.basename(info.name) in _SECTIONS
            and _GIT.fullmatch(info.name) is None
            and not within(info.name, self.work)
        ]

        async def differs(path: str) -> bool:
            reads = (self._read(path), self._read(path, baseline=True))
            said = []
            for answer in await asyncio.gather(*reads, return_exceptions=True):  # neither is left running
                if isinstance(answer, BaseException):
                    raise answer
                said.append(pytest_section(path, answer))
            return bool(said[0] != said[1])

        found: set[str] = set()
        for at in range(0, len(asked), _AT_ONCE):
            some = asked[at : at + _AT_ONCE]
            answers = await asyncio.gather(*map(differs, some), return_exceptions=True)
            for path, answer in zip(some, answers, strict=True):
                if isinstance(answer, BaseException):
                    raise answer
                if answer:
                    found.add(path)
        return found

    async def _read(self, path: str, *, baseline: bool = False) -> bytes | None:
        since = self._sandbox.primed
        return await self._sandbox.client.outside_read(path, baseline=baseline, limit=_MAX, since=since)


def pytest_section(path: str, data: bytes | None) -> Any:
    """What *data*, a file called *path*, says to pytest; None when nothing."""
    if data is None:
        return None
    text = data.decode("utf-8", "replace")
    if path.endswith(".toml"):
        try:
            said: Any = tomllib.loads(text).get("tool", {})
        except tomllib.TOMLDecodeError:
            return None  # pytest cannot read it either
        except (ValueError, RecursionError):
            return text  # too large or deep for us: what a Python in the sandbox makes of it nobody knows
        return said.get("pytest") if isinstance(said, dict) else None
    parser = configparser.RawConfigParser(strict=False)
    with contextlib.suppress(configparser.Error):
        parser.read_string(text)
    found = {name: dict(parser[name]) for name in ("pytest", "tool:pytest") if parser.has_section(name)}
    return found or None


def told(names: Sequence[str]) -> str:
    """Some of the paths, for a line of a log."""
    more = f" and {len(names) - 5} more" if len(names) > 5 else ""
    return ", ".join(names[:5]) + more
