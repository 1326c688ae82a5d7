"""Tool calls of a batch side by side, with the results and the order of one after the other."""

from __future__ import annotations

import asyncio
import contextvars
import functools
import inspect
import itertools
import logging
from collections import deque
from collections.abc import Callable, Collection, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

from . import versions
from ._hooks import Hooks, Part, attach

log = logging.getLogger("rlsandbox.trl")
PARAMETERS = [
    "prompts",
    "prompt_ids",
    "completion_ids",
    "completions",
    "logprobs",
    "images",
    "multimodal_fields",
]
NAMES = {"_sync_tool_dicts", "_async_tool_dicts"}
THREADS = 64


def parallel_tools(trainer: Any, *, serial: Collection[str] = ()) -> None:
    """From now on *trainer* runs the tool calls of its rollouts side by side.

    Methods of environments, functions given as ``tools=`` and async tools alike. Calls of one rollout stay
    one after the other. Where the trainer's internals are not those this was written for, a warning says so
    and nothing changes.

    Args:
        serial: names of tools that share state between rollouts, or that are not safe on threads: they run
            one after the other, in the order of the trainer's own loop, and on its thread.
    """
    versions.require()
    loop = getattr(trainer, "_tool_call_loop", None)
    code = getattr(inspect.unwrap(loop) if loop is not None else None, "__code__", None)
    function = getattr(loop, "__func__", loop)
    if code is None:
        code = getattr(function, "__code__", None)
    known = list(inspect.signature(loop).parameters) if loop is not None else []
    if known != PARAMETERS or code is None or not set(code.co_names) >= NAMES:
        log.warning("this trainer's tool loop is not the one known: tool calls run one after the other")
        return
    attach(trainer, _Parallel(trainer, frozenset(serial)))


class _Parallel(Part):
    def __init__(self, trainer: Any, serial: frozenset[str]) -> None:
        self._trainer, self._serial = trainer, serial

    def install(self, hooks: Hooks) -> None:
        hooks.wrap("_tool_call_loop", self._around)

    def _around(
        self, original: Any, prompts: Any, ids: Any, completion_ids: Any, completions: Any, *rest: Any
    ) -> Any:
        trainer = self._trainer
        before = trainer._sync_tool_dicts, trainer._async_tool_dicts
        threads = ThreadPoolExecutor(max_workers=THREADS, thread_name_prefix="rlsandbox-tool")
        turn = _Turn(trainer, completions, *before, self._serial, threads)
        trainer._sync_tool_dicts, trainer._async_tool_dicts = turn.sync, turn.later
        try:
            return original(prompts, ids, completion_ids, completions, *rest)
        finally:
            trainer._sync_tool_dicts, trainer._async_tool_dicts = before
            # Ctrl-C does not wait for tools: closing the pool ends what they wait for.
            threads.shutdown(wait=False, cancel_futures=True)


class _Call:
    """One tool call that was begun ahead of the loop."""

    def __init__(self, name: str, tool: Callable[..., Any], arguments: dict[str, Any], later: bool) -> None:
        self.name, self.tool, self.arguments, self.later = name, tool, arguments, later
        self.made: Future[Any] = Future()
        """Of an async tool: the coroutine was made, or its making raised."""
        self.answer: Future[Any] = Future()

    def run(self) -> Any:
        """On the rollout's thread, in its turn. Gives the coroutine of an async tool."""
        to = self.made if self.later else self.answer
        try:
            found = self.tool(**self.arguments)
        except BaseException as error:
            to.set_exception(error)
            return None
        to.set_result(found)
        return found if self.later else None

    async def wait(self, coroutine: Any) -> None:
        """On the trainer's loop: an async tool to its end."""
        try:
            self.answer.set_result(await coroutine)
        except BaseException as error:
            self.answer.set_exception(error)
            if not isinstance(error, (Exception, asyncio.CancelledError)):
                raise

    async def answered(self) -> Any:
        return await asyncio.wrap_future(self.answer)


class _Turn:
    """One batch's tool loop. The first tool call of an iteration starts those of all rollouts."""

    def __init__(
        self,
        trainer: Any,
        completions: Any,
        sync: list[dict[str, Any]],
        later: list[dict[str, Any]],
        serial: frozenset[str],
        threads: ThreadPoolExecutor,
    ) -> None:
        self._trainer, self._completions, self._threads = trainer, completions, threads
        self._tools = sync, later
        self._serial = serial
        self._started: list[dict[int, Any]] = [{} for _ in sync]
        self._ready: list[deque[_Call]] = [deque() for _ in sync]
        self.sync = [{name: self._proxy(i, name, t) for name, t in d.items()} for i, d in enumerate(sync)]
        self.later = [{name: self._proxy(i, name, t) for name, t in d.items()} for i, d in enumerate(later)]

    def _proxy(self, i: int, name: str, tool: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(tool)  # what the interpreter says of arguments names the function
        def call(**arguments: Any) -> Any:
            self._start()
            ready = self._ready[i]
            if not ready or ready[0].name != name or ready[0].arguments != arguments:
                return tool(**arguments)
            begun = ready.popleft()
            if not begun.later:
                return begun.answer.result()
            begun.made.result()
            return begun.answered()

        return call

    def _start(self) -> None:
        for i, messages in enumerate(self._completions):
            last = messages[-1] if messages else None
            if not isinstance(last, Mapping) or not last.get("tool_calls") or id(last) in self._started[i]:
                continue
            # Kept, so that no other message gets its id. What was too long stands here again.
            self._started[i][id(last)] = last
            self._ready[i] = self._prepared(i, last["tool_calls"])
            if self._ready[i]:
                context = contextvars.copy_context()
                self._threads.submit(context.run, self._run, list(self._ready[i]))

    def _prepared(self, i: int, calls: Any) -> deque[_Call]:
        """The calls that can be made now: up to the first that has to wait for its turn.

        The loop starts a message's async tools when all its other tools are done; so none is begun here when
        one of those has to wait.
        """
        sync, later = self._tools[0][i], self._tools[1][i]
        found: deque[_Call] = deque()
        for call in calls:
            function = call.get("function") if call.get("type") == "function" else None
            name = str(function.get("name")) if function else ""
            tool = sync.get(name) or later.get(name)
            arguments = function.get("arguments") if function else None
            if (
                tool is None
                or not isinstance(arguments, dict)
                or not all(isinstance(key, str) for key in arguments)
            ):
                continue  # answered by the loop itself
            if name in self._serial:
                return deque(itertools.takewhile(lambda begun: not begun.later, found))
            found.append(_Call(name, tool, dict(arguments), name not in sync))
        return found

    def _run(self, calls: list[_Call]) -> None:
        coroutines = [(call, coroutine) for call in calls if (coroutine := call.run()) is not None]

        async def together() -> None:  # as the trainer's loop gathers them
            await asyncio.gather(*(call.wait(coroutine) for call, coroutine in coroutines))

        if coroutines:
            asyncio.run_coroutine_threadsafe(together(), self._trainer.async_loop)
