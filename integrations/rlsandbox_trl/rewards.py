"""sandbox_reward: a plain reward function that runs the model's code in a pool's sandboxes."""

from __future__ import annotations

import asyncio
import math
import re
import threading
from collections.abc import Awaitable, Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any, Protocol

import rlsandbox as rls
from rlsandbox.errors import ConfigError, SandboxError
from rlsandbox.metrics import BatchClock

from .rollout import CALLERS_MISTAKES
from .tally import counter_of

FENCE = re.compile(r"```[^\n`]*\n(.*?)```", re.DOTALL)


class RewardFunction(Protocol):
    """What ``reward_funcs=`` of a GRPOTrainer takes."""

    __name__: str
    missing: list[bool]
    """Of the last call: which rollouts infrastructure broke."""

    def __call__(
        self, *, prompts: Sequence[Any], completions: Sequence[Any], **row: Any
    ) -> Awaitable[list[float | None]]: ...


def code_of(text: str) -> str | None:
    """The last fenced block of *text*; all of it when there is no fence; None when that is empty."""
    blocks = FENCE.findall(text)
    found = blocks[-1] if blocks else text
    return found if found.strip() else None


def sandbox_reward(
    pool: rls.Pool,
    tasks: Iterable[rls.Task] | str | None = None,
    *,
    command: str = "python3 answer.py",
    path: str = "answer.py",
    answer: Callable[[str], str | None] = code_of,
    timeout: float = 30.0,
    spec: rls.Spec | None = None,
    claim_timeout: float = 300.0,
    retries: int = 2,
    concurrency: int = 64,
    name: str = "sandbox_reward",
) -> RewardFunction:
    """A reward function: each completion's code runs in a clean sandbox of its own.

    With *tasks*, the dataset's column ``task_id`` says which one a row belongs to; the code becomes the file
    *path* and the task's grader scores it. Without, the code becomes the file *path* and *command* runs:
    1.0 when it exits with 0, else 0.0. What the code does wrong (it fails, hangs, uses up its memory, is not
    there) is scored; what infrastructure breaks is asked for again in a fresh sandbox, and then None.

    Args:
        pool: of yours; it may be smaller than a batch.
        tasks: tasks with graders, or where :func:`rlsandbox.load_tasks` finds them.
        command: what runs when there are no *tasks*.
        path: where the code goes; relative to the working directory.
        answer: from a completion's text to the code; None: there is none, which is worth 0.0.
        timeout: seconds a call's command, or grader, may take.
        spec: of each call's sandbox when there are no *tasks*: memory, pids, image ...
        claim_timeout: seconds a call may wait for its sandbox, retries included.
        retries: further sandboxes for a call that infrastructure broke.
        concurrency: calls at once, at most.
        name: under which the trainer logs it.
    """
    if not timeout > 0:
        raise ConfigError(f"timeout must be a number of seconds above 0, not {timeout!r}")
    if tasks is None:
        known = None
        plain = rls.Task(id=name, spec=spec, grader=rls.Grader(command=command, timeout=timeout))
    else:
        known = {task.id: task for task in (rls.load_tasks(tasks) if isinstance(tasks, str) else tasks)}
        for task in known.values():
            if task.grader is None:
                raise ConfigError(f"task {task.id!r} has no grader: nothing could score an answer")
    counter = counter_of(pool)
    threads = ThreadPoolExecutor(max_workers=concurrency, thread_name_prefix="rlsandbox-reward")
    busy = threading.Lock()
    calls = 0

    def task_of(task_id: Any) -> rls.Task:
        if known is None:
            return plain
        task = known.get(task_id)
        if task is None:
            raise ConfigError(
                f"no task is called {task_id!r}", hint="the dataset's column task_id says which"
            )
        assert task.grader is not None
        return replace(task, grader=replace(task.grader, timeout=min(timeout, task.grader.timeout)))

    def score(episode: rls.Episode, code: str) -> tuple[float | None, bool]:
        """The reward, and whether infrastructure broke it."""
        while True:
            try:
                episode.begin(timeout=claim_timeout).write_file(path, code)
                reward = episode.grade().reward
                if reward is not None and not math.isfinite(reward):
                    raise ValueError(f"the grader's reward is {reward}, not a finite number")
            except CALLERS_MISTAKES as error:
                episode.cancel(str(error))
                raise
            except Exception as error:
                if episode.record is None:
                    phase = error.phase if isinstance(error, SandboxError) else "grade"
                    episode.broke(error, phase)
                    if episode.may_retry:  # nothing is lost: the code is all there was
                        continue
                    episode.fail()
                counter.ended(completed=False, expected=True, reward=None)
                return None, True
            episode.complete()
            counter.ended(completed=True, expected=True, reward=reward)
            return reward, False

    def scored(group: str, batch: str, clock: BatchClock, task_id: Any, completion: Any) -> Any:
        task = task_of(task_id)
        episode = rls.Episode(pool, task, group=group, batch=batch, retries=retries, clock=clock)
        try:
            code = answer(text_of(completion))
            if code is None:
                episode.complete(value="no code", reward=0.0)
                counter.ended(completed=True, expected=True, reward=0.0)
                return 0.0, False
            return score(episode, code)
        except BaseException:
            episode.cancel("the reward function was left")
            raise

    async def reward(*, prompts: Sequence[Any], completions: Sequence[Any], **row: Any) -> list[float | None]:
        nonlocal calls
        with busy:
            calls += 1
            batch = f"{name}-{calls}"
        ids = row.get("task_id") or [None] * len(completions)
        step = getattr(row.get("trainer_state"), "global_step", calls)
        clock = BatchClock(pool.metrics.batch)
        groups: dict[str, str] = {}
        loop = asyncio.get_running_loop()
        try:
            rows = [
                (_group(groups, prompt, task_id, step), batch, clock, task_id, said)
                for prompt, task_id, said in zip(prompts, ids, completions, strict=True)
            ]
            with pool.metrics.idle.blocked():
                found = await asyncio.gather(*(loop.run_in_executor(threads, scored, *one) for one in rows))
        finally:
            clock.close()
        made.missing = [broken for _, broken in found]
        return [value for value, _ in found]

    made: Any = reward
    made.__name__ = made.__qualname__ = name
    made.missing = []
    result: RewardFunction = made
    return result


def _group(groups: dict[str, str], prompt: Any, task_id: Any, step: Any) -> str:
    """Siblings answer the same prompt."""
    first = task_id if task_id is not None else f"prompt-{len(groups)}"
    return groups.setdefault(repr(prompt), f"{first}@{step}")


def text_of(completion: Any) -> str:
    """A completion as text: of a conversation what the model said, tool results left out."""
    if isinstance(completion, str):
        return completion
    said = [message.get("content") for message in completion if message.get("role") == "assistant"]
    return "\n".join(
        part if isinstance(part, str) else "".join(piece.get("text", "") for piece in part)
        for part in said
        if part
    )
