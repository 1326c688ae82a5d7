"""sandbox_reward: a plain reward function that runs the model's code in a pool's sandboxes."""

from __future__ import annotations

import asyncio
import math
import re
import threading
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from typing import Any

import rlsandbox as rls
from rlsandbox.errors import ConfigError, SandboxError
from rlsandbox.metrics import BatchClock

from ._options import require_seconds, require_whole, tasks_from
from .ranks import connected
from .rollout import CALLERS_MISTAKES
from .tally import counter_of

FENCE = re.compile(r"```[^\n`]*\n(.*?)```", re.DOTALL)


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
    require_seconds("timeout", timeout)
    require_seconds("claim_timeout", claim_timeout)
    require_whole("retries", retries, 0)
    require_whole("concurrency", concurrency, 1)
    if not isinstance(pool, rls.Pool):
        raise ConfigError(f"pool must be a Pool, not {pool!r}")
    if not isinstance(path, str) or not path:
        raise ConfigError(f"path must name a file, not {path!r}")
    if not callable(answer):
        raise ConfigError(f"answer must be a function, not {answer!r}")
    plain = rls.Task(id=name, spec=spec, grader=rls.Grader(command=command, timeout=timeout))
    found = None if tasks is None else tasks_from(tasks)
    known = None if found is None else {task.id: task for task in found}
    for task in (known or {}).values():
        if task.grader is None:
            raise ConfigError(f"task {task.id!r} has no grader: nothing could score an answer")
    how = _How(path, answer, timeout, claim_timeout, retries, concurrency, name)
    return RewardFunction(pool, plain, known, how)


@dataclass(frozen=True)
class _How:
    path: str
    answer: Callable[[str], str | None]
    timeout: float
    claim_timeout: float
    retries: int
    concurrency: int
    name: str


class RewardFunction:
    """What ``reward_funcs=`` of a GRPOTrainer takes: see :func:`sandbox_reward`.

    It pickles: another process of this machine (a rollout worker) uses the same pool. What *answer* is has to
    pickle too, as a function of a module does.
    """

    def __init__(self, pool: rls.Pool, plain: rls.Task, known: dict[str, rls.Task] | None, how: _How) -> None:
        self.pool, self.plain, self.known, self.how = pool, plain, known, how
        self.missing: list[bool] = []
        """Of the last call: which rollouts infrastructure broke."""
        self.__name__ = self.__qualname__ = how.name
        # Before 1.14 the trainer asks inspect whether to await: this has what it knows a function by.
        call = type(self).__call__
        self.__code__, self.__defaults__, self.__kwdefaults__ = call.__code__, None, call.__kwdefaults__
        self._counter = counter_of(pool)
        self._threads = ThreadPoolExecutor(how.concurrency, thread_name_prefix="rlsandbox-reward")
        self._busy = threading.Lock()
        self._calls = 0

    def __reduce__(self) -> Any:
        return _connected, (self.pool.ref, self.plain, self.known, self.how)

    async def __call__(
        self, *, prompts: Sequence[Any], completions: Sequence[Any], **row: Any
    ) -> list[float | None]:
        with self._busy:
            self._calls += 1
            batch = f"{self.how.name}-{self._calls}"
        ids = row.get("task_id") or [None] * len(completions)
        step = getattr(row.get("trainer_state"), "global_step", self._calls)
        clock = BatchClock(self.pool.metrics.batch)
        groups: dict[str, str] = {}
        loop = asyncio.get_running_loop()
        try:
            rows = [
                (_group(groups, prompt, task_id, step), batch, clock, task_id, said)
                for prompt, task_id, said in zip(prompts, ids, completions, strict=True)
            ]
            with self.pool.metrics.idle.blocked():
                found = await asyncio.gather(
                    *(loop.run_in_executor(self._threads, self._scored, *one) for one in rows)
                )
        finally:
            clock.close()
        self.missing = [broken for _, broken in found]
        return [value for value, _ in found]

    def _scored(
        self, group: str, batch: str, clock: BatchClock, task_id: Any, completion: Any
    ) -> tuple[float | None, bool]:
        """The reward, and whether infrastructure broke it."""
        task, retries = self._task_of(task_id), self.how.retries
        episode = rls.Episode(self.pool, task, group=group, batch=batch, retries=retries, clock=clock)
        try:
            code = self.how.answer(text_of(completion))
            if code is None:
                episode.complete(value="no code", reward=0.0)
                self._counter.ended(completed=True, expected=True, reward=0.0)
                return 0.0, False
            return self._score(episode, code)
        except BaseException:
            episode.cancel("the reward function was left")
            raise

    def _task_of(self, task_id: Any) -> rls.Task:
        if self.known is None:
            return self.plain
        task = self.known.get(task_id)
        if task is None:
            raise ConfigError(
                f"no task is called {task_id!r}", hint="the dataset's column task_id says which"
            )
        assert task.grader is not None
        return replace(task, grader=replace(task.grader, timeout=min(self.how.timeout, task.grader.timeout)))

    def _score(self, episode: rls.Episode, code: str) -> tuple[float | None, bool]:
        while True:
            try:
                # As bytes: what UTF-8 cannot say (a lone surrogate) is the model's mistake, not the caller's.
                held = episode.begin(timeout=self.how.claim_timeout)
                held.write_file(self.how.path, code.encode(errors="replace"))
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
                self._counter.ended(completed=False, expected=True, reward=None)
                return None, True
            episode.complete()
            self._counter.ended(completed=True, expected=True, reward=reward)
            return reward, False


def _connected(
    ref: rls.PoolRef, plain: rls.Task, known: dict[str, rls.Task] | None, how: _How
) -> RewardFunction:
    return RewardFunction(connected(ref), plain, known, how)


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
