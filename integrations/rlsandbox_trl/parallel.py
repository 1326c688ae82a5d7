"""Tool calls of a batch side by side, with the results and the order of one after the other."""

from __future__ import annotations

import inspect
import logging
from collections import deque
from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

from . import versions
from ._hooks import Hooks

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


def parallel_tools(trainer: Any) -> None:
    """From now on *trainer* runs the tool calls of its rollouts side by side.

    Calls of one rollout stay one after the other. Only methods of the rollout's own environment run beside
    others; functions given as ``tools=`` may share state and run in their turn. Where the trainer's internals
    are not those this was written for, a warning says so and nothing changes.
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
    hooks = Hooks(trainer)

    def around(
        original: Any, prompts: Any, prompt_ids: Any, completion_ids: Any, completions: Any, *rest: Any
    ) -> Any:
        before = trainer._sync_tool_dicts
        environments = trainer.environments or []
        with ThreadPoolExecutor(max_workers=THREADS, thread_name_prefix="rlsandbox-tool") as threads:
            turn = _Turn(completions, before, environments, threads)
            trainer._sync_tool_dicts = turn.dicts()
            try:
                return original(prompts, prompt_ids, completion_ids, completions, *rest)
            finally:
                trainer._sync_tool_dicts = before

    hooks.wrap("_tool_call_loop", around)


class _Turn:
    """One batch's tool loop. The first tool call of an iteration starts those of all rollouts."""

    def __init__(
        self,
        completions: Any,
        dicts: list[dict[str, Any]],
        environments: list[Any],
        threads: ThreadPoolExecutor,
    ) -> None:
        self._completions, self._dicts, self._threads = completions, dicts, threads
        self._environments = environments
        self._started: list[dict[int, Any]] = [{} for _ in dicts]
        self._ready: list[deque[tuple[str, Any, Future[Any]]]] = [deque() for _ in dicts]

    def dicts(self) -> list[dict[str, Any]]:
        return [
            {name: self._proxy(i, name, tool) for name, tool in d.items()} for i, d in enumerate(self._dicts)
        ]

    def _own(self, i: int, tool: Any) -> bool:
        owner = getattr(tool, "__self__", None)
        return owner is not None and i < len(self._environments) and owner is self._environments[i]

    def _proxy(self, i: int, name: str, tool: Callable[..., Any]) -> Callable[..., Any]:
        def call(**arguments: Any) -> Any:
            self._start()
            ready = self._ready[i]
            if ready and ready[0][0] == name and ready[0][1] == arguments:
                return ready.popleft()[2].result()
            return tool(**arguments)

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
                self._threads.submit(_run, [(self._dicts[i][n], a, f) for n, a, f in self._ready[i]])

    def _prepared(self, i: int, calls: Any) -> deque[tuple[str, Any, Future[Any]]]:
        """The calls that can be made now: up to the first that has to wait for its turn."""
        found: deque[tuple[str, Any, Future[Any]]] = deque()
        for call in calls:
            function = call.get("function") if call.get("type") == "function" else None
            tool = self._dicts[i].get(function.get("name")) if function else None
            arguments = function.get("arguments") if function else None
            if (
                tool is None
                or not isinstance(arguments, dict)
                or not all(isinstance(k, str) for k in arguments)
            ):
                continue  # answered by the loop itself
            if not self._own(i, tool):
                break
            found.append((function["name"], dict(arguments), Future()))
        return found


def _run(calls: list[tuple[Callable[..., Any], dict[str, Any], Future[Any]]]) -> None:
    for tool, arguments, future in calls:
        try:
            future.set_result(tool(**arguments))
        except BaseException as error:
            future.set_exception(error)
