"""Grading: the task's check of the work, out of the acting agent's reach.

In this order: every process of the episode is ended; what the rollout changed that is not its work but what
graders trust is put back (:mod:`.trust`), or, on request, the work alone is carried into a fresh sandbox;
what the agent may have put in the way of the hidden files is removed (a link, a directory, a file where a
directory must be: links that the episode made are never followed), a reward file of its own too; the files
are written; the grader runs; its answer becomes a reward.

A grader that answers nonsense is the task's fault: GradeError, no reward. A sandbox that the work left too
full, or without its workdir, or that breaks the grader half-way, is a failed grade: 0.0. Nothing else is.
"""

from __future__ import annotations

import asyncio
import contextlib
import contextvars
import errno
import importlib
import inspect
import logging
import math
import posixpath
import re
import threading
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from ..errors import (
    NO_ROOM,
    CommandStartError,
    ConfigError,
    GradeError,
    SandboxError,
    SandboxFileError,
    file_error,
    shared_disk_full,
)
from ..keeper.client import AS_KEEPER, KeeperFailure
from ..results import CommandResult, FileInfo, Outcome
from ..task import Grader, Task
from . import files
from .carry import carried_over, kind_of
from .trust import Trust, told

if TYPE_CHECKING:
    from .core import AsyncSandbox

log = logging.getLogger("rlsandbox.grading")

_told: set[str] = set()
"""Tasks of which it was said that something was put back: a second time it is no news."""
_AT_ONCE = 16
_LINKS = 40
_SHARE = 1 << 30
"""Bytes that the work may have of a disk that many share, where no limit says it."""
REWARD_BYTES = 4096
_NUMBER = re.compile(r"[+-]?([0-9]+\.?[0-9]*|\.[0-9]+)([eE][+-]?[0-9]+)?")
"""As every language writes one: Python alone would take ``1_0`` for ten, and other scripts' digits."""
_KINDS = {"dir": "is a directory", "symlink": "is a link that leads to no regular file", None: "is not there"}


def grader_of(task: Task, grader: Grader | None) -> Grader:
    chosen = grader if grader is not None else task.grader
    if chosen is None:
        raise ConfigError(
            f"task {task.id!r} has no grader", hint="Task(grader=Grader(command=...)) or grade(grader)"
        )
    if not isinstance(chosen, Grader):
        raise ConfigError(f"grade() takes a Grader, not {type(chosen).__name__}")
    return chosen


async def grade(sandbox: AsyncSandbox, grader: Grader | None) -> Outcome:
    chosen = grader_of(sandbox.task, grader)
    function = _function(chosen.reward)
    trust = Trust(sandbox, chosen)
    if chosen.fresh and not trust.places:
        raise ConfigError(
            f"task {sandbox.task.id!r}: a grader with fresh=True needs a workdir or Grader.work: "
            "it says what is carried over"
        )
    async with sandbox.grading():
        await sandbox.client.kill_all()
        try:
            if chosen.fresh:
                put_back = await carried_over(sandbox, trust)
            else:
                put_back = await _put_back(sandbox, trust)
        except SandboxFileError as error:
            if error.errno in NO_ROOM:
                return await _full(sandbox, error)
            if not chosen.fresh:
                return _unfit(error)
            raise
        return replace(await _grade_in(sandbox, chosen, function), put_back=put_back)


async def _put_back(sandbox: AsyncSandbox, trust: Trust) -> tuple[str, ...]:
    """Undo what the rollout changed that is not its work; the paths, but for byte code."""
    client = sandbox.client
    try:
        changed = await sandbox.changed()
    except KeeperFailure as error:
        if error.errno == errno.EOPNOTSUPP:  # isolation="none": there is no outside to see it from
            return ()
        raise
    foreign = await trust.foreign(changed)

    async def undo(path: str) -> None:
        try:
            await client.outside_remove(path, since=sandbox.primed)
        except KeeperFailure as error:
            if error.errno != errno.ENOENT:
                raise file_error(error.errno, path, sandbox=sandbox.id) from None

    for at in range(0, len(foreign), _AT_ONCE):
        some = foreign[at : at + _AT_ONCE]
        for ended in await asyncio.gather(*(undo(info.name) for info in some), return_exceptions=True):
            if isinstance(ended, BaseException):
                raise ended
    names = tuple(info.name for info in foreign if not info.name.endswith("/__pycache__"))
    loud = [name for name in names if "/__pycache__/" not in name]  # any Python run as root writes those
    if loud:
        first = sandbox.task.id not in _told and len(_told) < 1000
        _told.add(sandbox.task.id)
        log.log(
            logging.WARNING if first else logging.INFO,
            "task %s: put back before grading, as it is no work: %s (if it is: Grader(work=[...]))",
            sandbox.task.id,
            told(loud),
        )
    return names


async def _grade_in(sandbox: AsyncSandbox, grader: Grader, function: Any) -> Outcome:
    try:
        await _place(sandbox, grader)
    except OSError as error:
        if error.errno in NO_ROOM:
            return await _full(sandbox, error)
        raise
    try:
        result = await sandbox.run_grader(grader.command, timeout=grader.timeout)
    except CommandStartError as error:
        if error.kind == "bad_cwd" and await kind_of(sandbox, sandbox.workdir) != "dir":
            return _unfit(file_error(errno.ENOENT, sandbox.workdir))
        error.phase = "grade"
        raise
    return await _outcome(sandbox, grader, function, result)


async def _full(sandbox: AsyncSandbox, error: OSError) -> Outcome:
    """No room: the work's fault, unless many share the disk and the work kept to its share."""
    if sandbox.shares_disk and isinstance(error, SandboxError):
        with contextlib.suppress(KeeperFailure):  # nobody sees what it wrote
            if (await sandbox.changed()).bytes <= (sandbox.limits.disk or _SHARE):
                raise shared_disk_full(error)
    return _unfit(error)


def _unfit(error: OSError) -> Outcome:
    """The work left the sandbox unfit to be graded: it fails, as if the tests themselves had found out."""
    text = f"the work cannot be graded: {error.filename}: {error.strerror}\n"
    result = CommandResult(exit_code=1, stderr=text, stderr_bytes=text.encode(), merged=text)
    return Outcome(reward=0.0, passed=False, result=result)


# -- hidden files -----------------------------------------------------------------------------------


async def _place(sandbox: AsyncSandbox, grader: Grader) -> None:
    for path, data in grader.files.items():
        raw = data.encode("utf-8", "surrogateescape") if isinstance(data, str) else data
        target = await _clear(sandbox, sandbox.path(path))
        try:
            # Exclusive: nobody is left who could have put something there since.
            flags = files.MAKE_PARENTS | files.EXCLUSIVE | AS_KEEPER
            await sandbox.client.write(target, raw, mode=0o644, flags=flags)
        except KeeperFailure as error:
            raise file_error(error.errno, target, sandbox=sandbox.id) from None
    if grader.reward.startswith("file:"):
        await _clear(sandbox, grader.reward.removeprefix("file:"))


async def _clear(sandbox: AsyncSandbox, path: str) -> str:
    """Remove what is in the way of a file at *path*; the path with the image's own links resolved.

    A link that was there at the baseline (``/bin``) is the task's own and is followed; one that the episode
    made is removed, as is anything that is no directory where one must be.
    """
    client = sandbox.client
    todo = [part for part in posixpath.normpath(path).split("/") if part]
    at = ""
    links = 0
    while todo:
        here = f"{at}/{todo.pop(0)}"
        try:
            info = await client.stat(here, flags=AS_KEEPER)
        except KeeperFailure as error:
            if error.errno == errno.ENOENT:
                return posixpath.join(here, *todo)
            raise file_error(error.errno, here, sandbox=sandbox.id) from None
        if not todo:
            await _remove(sandbox, here)
            return here
        if info.kind == "dir":
            at = here
        elif info.kind == "symlink" and links < _LINKS and not await _made_by_episode(sandbox, info, here):
            links += 1
            target = (await client.read_link(here, flags=AS_KEEPER)).decode("utf-8", "surrogateescape")
            resolved = posixpath.normpath(posixpath.join(at or "/", target))
            todo = [part for part in resolved.split("/") if part] + todo
            at = ""
        else:
            await _remove(sandbox, here)
            return posixpath.join(here, *todo)
    return path


async def _remove(sandbox: AsyncSandbox, path: str) -> None:
    try:
        await sandbox.client.remove(path, tree=True, flags=AS_KEEPER)
    except KeeperFailure as error:
        raise file_error(error.errno, path, sandbox=sandbox.id) from None


async def _made_by_episode(sandbox: AsyncSandbox, link: FileInfo, path: str) -> bool:
    try:
        return any(info.name == path for info in await sandbox.changed(path))
    except KeeperFailure as error:
        if error.errno != errno.EOPNOTSUPP:
            raise
        # No outside to see it from. The image's own are root's; where commands are, too, none is telling.
        return str(link.uid) == sandbox.keeper_uid != "0"


# -- the reward -------------------------------------------------------------------------------------


def _function(reward: str) -> Any:
    """The reward function, found before anything is done: a wrong name must not cost the work."""
    if reward == "exit_code" or reward.startswith("file:"):
        return None
    module, _, name = reward.partition(":")
    try:
        found: Any = importlib.import_module(module)
        for part in name.split("."):
            found = getattr(found, part)
    except (ImportError, AttributeError) as error:
        raise ConfigError(f"Grader.reward={reward!r} cannot be imported: {error}") from error
    if not callable(found):
        raise ConfigError(f"Grader.reward={reward!r} is not callable")
    return found


async def _outcome(sandbox: AsyncSandbox, grader: Grader, function: Any, result: CommandResult) -> Outcome:
    if function is not None:
        return await _called(sandbox, grader, function, result)
    if grader.reward == "exit_code" or result.timed_out:
        return Outcome(reward=1.0 if result.ok else 0.0, passed=result.ok, result=result)
    path = grader.reward.removeprefix("file:")
    raw = await sandbox.client.outside_read(path, limit=REWARD_BYTES + 1)
    if raw is None and not result.ok:
        return Outcome(reward=0.0, passed=False, result=result)
    if raw is None:
        found = await _instead(sandbox, path)
    elif len(raw) > REWARD_BYTES:
        found = f"holds more than {REWARD_BYTES} bytes, which is no finite number"
    else:
        text = raw.decode("utf-8", "replace").strip()
        reward = _number(text)
        if reward is not None:
            return Outcome(reward=reward, passed=reward >= 1, result=result)
        found = f"holds {text[:60]!r}, which is no finite number"
    raise GradeError(
        f"the grader's reward file {path} {found} (its command exited with {result.exit_code})",
        sandbox=sandbox.id,
        task=sandbox.task.id,
    )


async def _instead(sandbox: AsyncSandbox, path: str) -> str:
    """What is there, where no regular file is."""
    try:
        return _KINDS.get(await kind_of(sandbox, path), "is no regular file")
    except KeeperFailure as error:
        return f"cannot be read ({error.message})"


def _number(text: str) -> float | None:
    value = float(text) if _NUMBER.fullmatch(text) else math.nan
    return value if math.isfinite(value) else None


async def _called(sandbox: AsyncSandbox, grader: Grader, function: Any, result: CommandResult) -> Outcome:
    where: dict[str, Any] = {"sandbox": sandbox.id, "task": sandbox.task.id}
    value, error = await _foreign(function, result, sandbox.task)
    if error is not None:
        raise GradeError(f"{grader.reward} raised {type(error).__name__}: {error}", **where) from error
    if value is None:
        return Outcome(reward=None, passed=None, result=result)
    number = finite(value)
    if number is None:
        raise GradeError(f"{grader.reward} gave {value!r:.200}, which is no finite number", **where)
    return Outcome(reward=number, passed=number >= 1, result=result)


async def _foreign(function: Any, *args: Any) -> tuple[Any, BaseException | None]:
    """What somebody's function gave, or raised: SystemExit, KeyboardInterrupt, CancelledError too.

    On a thread of its own, which keeps neither the interpreter from exiting nor others from the loop's.
    """
    loop = asyncio.get_running_loop()
    answer: asyncio.Future[tuple[Any, BaseException | None]] = loop.create_future()

    def settle(value: Any, error: BaseException | None) -> None:
        if not answer.done():
            answer.set_result((value, error))

    def main() -> None:
        try:
            said: tuple[Any, BaseException | None] = (function(*args), None)
        except BaseException as error:
            said = (None, error)
        with contextlib.suppress(RuntimeError):  # the loop has ended meanwhile
            loop.call_soon_threadsafe(settle, *said)

    context = contextvars.copy_context()
    threading.Thread(target=context.run, args=(main,), name="rlsandbox-reward", daemon=True).start()
    value, error = await answer
    if error is not None or not inspect.isawaitable(value):
        return value, error

    async def guarded() -> tuple[Any, BaseException | None]:
        # A task that ends with SystemExit or KeyboardInterrupt would end the loop.
        try:
            return await value, None
        except BaseException as error:
            return None, error

    inner = asyncio.ensure_future(guarded())
    try:
        await asyncio.wait({inner})
    finally:
        inner.cancel()
    return inner.result()


def finite(value: Any) -> float | None:
    """A finite number: as :func:`number_of`; else None."""
    number = number_of(value)
    return number if number is not None and math.isfinite(number) else None


def number_of(value: Any) -> float | None:
    """A number: also numpy's, and whatever holds just one and gives it (a tensor); else None."""
    try:
        item = getattr(value, "item", None)
        number = item() if callable(item) else value
        if isinstance(number, (str, bytes, bytearray)):
            return None
        return float(number)
    except (TypeError, ValueError, OverflowError, RuntimeError):
        return None
