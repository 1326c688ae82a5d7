"""Running reset policies and verification: :func:`run_reset` and :func:`run_verify`.

What holds:

- verification reads one INSPECT answer, taken after the reset and after every policy has ended, and compares
  it with the baseline. It uses nothing the reset code produced, and it never asks the episode;
- a hook that raises, hangs past the deadline, or answers with something else than residue is itself a
  reason to keep the sandbox out of the pool, under the plugin's name;
- in the modes ``overlay`` and ``userns`` the keeper's RESET does all that the built-in policies could, so
  they are not called there: what RESET had failed at would be tidied away by them instead of being found.
  Other people's policies are always called;
- built-in checks of a sandbox without changed files run on the event loop, because a clean verify must
  cost less than a thread hop; everything else runs on a thread of its own, with a deadline. Python cannot
  end a thread: one that hangs is left behind as a daemon whose every further call on its inspector raises.
"""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from collections.abc import Awaitable, Callable, Iterable, Sequence
from concurrent.futures import Future
from typing import TYPE_CHECKING, Any, TypeVar, cast
from weakref import WeakKeyDictionary

import pluggy

from ..errors import SandboxDiedError, SandboxError
from ..hooks import Credentials, Residue
from ..ledger import redact
from ..results import CommandResult
from .baseline import Baseline
from .facts import Facts, shown
from .inspector import Keeper, NeedsThread, OutsideInspector, OutsideResetter, inspect

if TYPE_CHECKING:
    from ..keeper.client import Look
    from ..task import Task

_log = logging.getLogger(__name__)
_T = TypeVar("_T")
_Call = tuple[str, Callable[..., Any]]
"""A plugin's name and how to call its implementation."""

WHOLE_MODES = frozenset({"overlay", "userns", "manifest"})
"""Modes whose RESET puts everything back by itself."""

MAX_RESIDUE = 1000
"""Residue kept of one verification; the rest is counted."""


async def run_reset(
    client: Keeper,
    manager: pluggy.PluginManager,
    *,
    task: Task | None,
    layer: str,
    baseline: Baseline,
    deadline_s: float,
    credentials: Sequence[Credentials] = (),
    trusted: Callable[[list[str]], Awaitable[CommandResult]] | None = None,
) -> Look | None:
    """Put a sandbox back on *layer* (``""``: its base) and run the reset policies.

    Gives the facts for :func:`run_verify` that were asked for right behind the reset, where no policy had to
    run in between.

    Args:
        task: whose episode ended; policies see it.
        deadline_s: seconds for all of it.
        credentials: what the ended episode held.
        trusted: runs a program in the sandbox as it is after RESET, for ``Resetter.run_trusted``.

    Raises:
        SandboxDiedError: the keeper is gone.
        SandboxError: a policy raised (kind ``reset_policy``) or the deadline passed (kind ``reset_timeout``):
            the sandbox must not be used again.
    """
    end = time.monotonic() + deadline_s
    whole = baseline.mode in WHOLE_MODES
    policies = _implementations(manager, "rlsandbox_reset", built_in=not whole)
    look: Look | None = None
    if whole:
        try:
            async with asyncio.timeout(deadline_s):
                if policies:
                    await client.reset(layer)
                else:
                    look = await client.reset_and_look(layer)
        except TimeoutError:
            raise SandboxError(
                f"the keeper did not reset the sandbox in {deadline_s:g} s",
                kind="reset_timeout",
                phase="reset",
            ) from None
    if not policies:
        return look
    facts = await inspect(client)

    def work(bridge: _Bridge) -> None:
        resetter = OutsideResetter(
            client,
            facts,
            baseline.on(layer),
            task=task,
            credentials=credentials,
            bridge=bridge,
            trusted=trusted if whole else None,
        )
        for plugin, call in policies:
            bridge.running = plugin
            call(resetter=resetter)

    outcome = await _on_thread("reset", work, end)
    if isinstance(outcome, _Stopped):
        raise SandboxError(
            f"reset policy {outcome.plugin!r} {outcome.why}", kind=outcome.kind("reset"), phase="reset"
        ) from outcome.error
    return None


async def run_verify(
    client: Keeper,
    manager: pluggy.PluginManager,
    *,
    task: Task | None,
    baseline: Baseline,
    deadline_s: float,
    credentials: Sequence[Credentials] = (),
    asked: Look | None = None,
) -> list[Residue]:
    """What is left of earlier episodes; empty exactly when the sandbox is at its baseline.

    A plugin that fails is residue too, of kind ``verify``. Values of *credentials* never appear in what is
    returned.

    Args:
        task: whose episode ended.
        baseline: of this member, ``.on(layer)`` the layer that it was reset to.
        deadline_s: seconds for all of it.
        credentials: what earlier episodes held; their values must be nowhere.
        asked: of :func:`run_reset`: an INSPECT that the keeper was sent behind the RESET.

    Raises:
        SandboxDiedError: the keeper is gone.
    """
    end = time.monotonic() + deadline_s
    try:
        async with asyncio.timeout(deadline_s):
            facts = await inspect(client) if asked is None else Facts.of_lines(await asked())
    except TimeoutError:
        return [Residue("verify", "keeper", f"did not answer INSPECT in {deadline_s:g} s")]
    built_in = _implementations(manager, "rlsandbox_verify", built_in=True, others=False)
    others = _implementations(manager, "rlsandbox_verify", built_in=False)
    found: list[Residue] = []

    def look(checks: Sequence[_Call], bridge: _Bridge | None) -> list[Residue]:
        view = OutsideInspector(client, facts, baseline, task=task, credentials=credentials, bridge=bridge)
        residue: list[Residue] = []
        for plugin, call in checks:
            if bridge is not None:
                bridge.running = plugin
            residue.extend(_residue_of(call(inspector=view)))
        return residue

    threaded = [*others, *built_in]
    if facts.files_clean:
        try:
            found = look(built_in, None)
            threaded = others
        except NeedsThread:
            _log.debug("a built-in check must wait for the keeper: all run on a thread")
    if threaded:
        outcome = await _on_thread("verify", lambda bridge: look(threaded, bridge), end)
        if isinstance(outcome, _Stopped):
            found.append(Residue("verify", outcome.plugin, outcome.why))
        else:
            found += outcome
    return _told(found, credentials)


def _residue_of(answer: object) -> Iterable[Residue]:
    if answer is None:
        return
    for item in cast(Iterable[object], answer):
        if not isinstance(item, Residue):
            raise TypeError(f"a verify hook must give Residue, not {type(item).__name__}")
        yield item


def _told(found: list[Residue], credentials: Sequence[Credentials]) -> list[Residue]:
    """Each finding once, printable, without secrets; a bare ``file`` only where nobody knows better."""
    secrets = secret_values(credentials)
    better = {item.what for item in found if item.kind != "file"}
    told: dict[Residue, None] = {}
    for item in found:
        if item.kind == "file" and item.what in better:
            continue
        told[Residue(item.kind, _clean(item.what, secrets), _clean(item.detail, secrets))] = None
        if len(told) == MAX_RESIDUE:
            told[Residue("verify", "more", f"{len(found) - MAX_RESIDUE} further findings are not listed")] = (
                None
            )
            break
    return list(told)


def secret_values(credentials: Iterable[Credentials]) -> list[str]:
    """The values to be hidden, longest first, so that no part of a longer one is left standing."""
    values = {value for item in credentials for value in item.env.values()}
    values |= {
        data.decode("utf-8", "surrogateescape").strip()
        for item in credentials
        for data in item.files.values()
    }
    return sorted((value for value in values if value), key=len, reverse=True)


def _clean(text: str, secrets: Sequence[str]) -> str:
    for secret in secrets:
        text = text.replace(secret, "[redacted]")
    return shown(redact.text(text))


# ---- calling hooks


def _implementations(
    manager: pluggy.PluginManager, hook: str, *, built_in: bool, others: bool = True
) -> list[_Call]:
    """The hook's implementations one by one, in pluggy's order, so that each can be named."""
    known = getattr(manager.hook, hook).get_hookimpls()
    if any(impl.wrapper or impl.hookwrapper for impl in known):
        return _calls(manager, hook, known, built_in, others)  # these refer to the manager: never kept
    wanted = (hook, built_in, others)
    told = _told_before.setdefault(manager, {}).get(wanted)
    if told is None or told[0] != known:
        told = _told_before[manager][wanted] = known, _calls(manager, hook, known, built_in, others)
    return told[1]


_told_before: WeakKeyDictionary[
    pluggy.PluginManager, dict[tuple[str, bool, bool], tuple[list[pluggy.HookImpl], list[_Call]]]
] = WeakKeyDictionary()
"""Answers of :func:`_implementations`: they are the same for every verification of a pool."""


def _calls(
    manager: pluggy.PluginManager, hook: str, known: list[pluggy.HookImpl], built_in: bool, others: bool
) -> list[_Call]:
    import rlsandbox_plugins

    ours = {id(plugin) for plugin in rlsandbox_plugins.BUILTIN.values()}
    impls = [impl for impl in known if not (impl.wrapper or impl.hookwrapper)]
    wrapped = len(impls) < len(known)
    calls: list[_Call] = []
    for impl in reversed(impls):
        if built_in if id(impl.plugin) in ours else others:
            if wrapped:
                rest = [other.plugin for other in impls if other is not impl]
                calls.append((impl.plugin_name, _first(manager.subset_hook_caller(hook, rest))))
            else:
                calls.append((impl.plugin_name, _direct(impl)))
    return calls


def _first(caller: Any) -> Callable[..., Any]:
    def call(**kwargs: Any) -> Any:
        answers = caller(**kwargs)
        return answers[0] if answers else None

    return call


def _direct(impl: pluggy.HookImpl) -> Callable[..., Any]:
    return lambda **kwargs: impl.function(*(kwargs[name] for name in impl.argnames))


class _Stopped:
    """A hook run that did not end well."""

    def __init__(self, plugin: str, why: str, error: BaseException | None) -> None:
        self.plugin, self.why, self.error = plugin, why, error

    def kind(self, what: str) -> str:
        return f"{what}_policy" if self.error is not None else f"{what}_timeout"


class _Bridge:
    """Calls of one hook thread, carried out one at a time by the coroutine that waits for it."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self.running = ""
        self.died: SandboxDiedError | None = None
        self.requests: asyncio.Queue[tuple[Callable[[], Awaitable[Any]], Future[Any]] | None] = (
            asyncio.Queue()
        )
        self._loop = loop
        self._lock = threading.Lock()
        self._closed: str | None = None
        self._waiting: Future[Any] | None = None

    def __call__(self, make: Callable[[], Awaitable[_T]]) -> _T:
        answer: Future[_T] = Future()
        with self._lock:
            if self._closed is not None:
                raise SandboxError(self._closed, kind="hook_timeout", phase="verify")
            self._waiting = answer
            self._loop.call_soon_threadsafe(self.requests.put_nowait, (make, answer))
        return answer.result()

    def ended(self) -> None:
        """The thread's last word; nobody listens any more when the run was cut off."""
        with self._lock:
            if self._closed is None:
                self._loop.call_soon_threadsafe(self.requests.put_nowait, None)

    def close(self, why: str) -> None:
        """From now on every call of the thread raises, the one it waits in too."""
        with self._lock:
            self._closed = why
            waiting, self._waiting = self._waiting, None
        if waiting is not None and not waiting.done():
            waiting.set_exception(SandboxError(why, kind="hook_timeout", phase="verify"))

    async def serve(self) -> None:
        """Carry out requests until the thread has ended."""
        while (request := await self.requests.get()) is not None:
            make, answer = request
            try:
                value = await make()
            except Exception as error:
                if isinstance(error, SandboxDiedError):
                    self.died = error
                answer.set_exception(error)
            else:
                answer.set_result(value)


async def _on_thread(what: str, work: Callable[[_Bridge], _T], end: float) -> _T | _Stopped:
    """Run *work* on a thread of its own until ``time.monotonic()`` reaches *end*."""
    bridge = _Bridge(asyncio.get_running_loop())
    answer: list[_T] = []
    error: list[BaseException] = []

    def main() -> None:
        try:
            answer.append(work(bridge))
        except BaseException as raised:  # SystemExit of a hook must not look like success
            error.append(raised)
        finally:
            bridge.ended()

    threading.Thread(target=main, name=f"rlsandbox-{what}-hooks", daemon=True).start()
    left = end - time.monotonic()
    try:
        async with asyncio.timeout(max(0.0, left)):
            await bridge.serve()
    except TimeoutError:
        hung = bridge.running
        _log.warning("%s hook of plugin %r hangs; its thread is left behind", what, hung)
        return _Stopped(hung, "did not end by the deadline", None)
    finally:
        bridge.close(f"the {what} hook's time is over")
    if bridge.died is not None:
        raise bridge.died
    if error:
        _log.warning("%s hook of plugin %r raised", what, bridge.running, exc_info=error[0])
        return _Stopped(bridge.running, f"raised {type(error[0]).__name__}: {error[0]}", error[0])
    return answer[0]
