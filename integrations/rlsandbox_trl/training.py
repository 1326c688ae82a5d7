"""SandboxTraining: tasks in; a dataset, an environment factory and :meth:`SandboxTraining.attach` out."""

from __future__ import annotations

import inspect
import math
import os
import threading
import time
from collections import deque
from collections.abc import Collection, Iterable, Sequence
from typing import Any

import rlsandbox as rls
from rlsandbox.config import load_config
from rlsandbox.errors import ConfigError
from rlsandbox.metrics import BatchClock

from . import versions
from ._options import require_seconds, require_tools, require_whole, tasks_from
from .environment import SandboxEnvironment
from .ranks import connected, local_processes, shared_pool
from .tally import Counter, counter_of

GRADING = 64
"""Rollouts that are graded at once."""
SPARE = 8
"""One sandbox more for so many rollouts, in which the next tasks' setups run meanwhile."""
TOOLS = ("shell", "read_file", "write_file", "submit")


class SandboxTraining:
    """Tasks for a GRPOTrainer, each rollout in a sandbox of its own.

    Args:
        tasks: tasks, or where :func:`rlsandbox.load_tasks` finds them.
        pool: a pool of yours; it has room for all rollouts that a process generates at once.
        tools: those of the environment's own tools that the model gets; a subclass's tools it always gets.
        environment: a subclass of :class:`SandboxEnvironment`.
        retries: further sandboxes for a rollout that infrastructure broke.
        claim_timeout: seconds a rollout may wait for its sandbox, retries included; then it is missing.
        step_timeout: seconds from the beginning of a generation batch in which all of its rollouts have to
            end; the last fifth (at most the grader's timeout) is for grading. What broke is begun again while
            they last; what is stuck then is missing. None: there is no such limit.
        command_timeout: seconds a command of the tool ``shell`` may take.
        output: characters that a tool answers at most.
        pool_kwargs: of a pool of its own: ``size=`` and whatever :class:`rlsandbox.Pool` takes.
    """

    def __init__(
        self,
        tasks: Iterable[rls.Task] | str,
        *,
        pool: rls.Pool | None = None,
        tools: Sequence[str] = TOOLS,
        environment: type[SandboxEnvironment] = SandboxEnvironment,
        retries: int = 2,
        claim_timeout: float = 300.0,
        step_timeout: float | None = None,
        command_timeout: float = 60.0,
        output: int = 8000,
        **pool_kwargs: Any,
    ) -> None:
        versions.require()
        if pool is not None and pool_kwargs:
            raise ConfigError(f"{min(pool_kwargs)}= belongs to a pool of its own, but pool= is given")
        require_tools(tools, TOOLS)
        require_whole("retries", retries, 0)
        require_whole("output", output, 2)
        for name, value in (("claim_timeout", claim_timeout), ("command_timeout", command_timeout)):
            require_seconds(name, value)
        if step_timeout is not None:
            require_seconds("step_timeout", step_timeout)
        if not (isinstance(environment, type) and issubclass(environment, SandboxEnvironment)):
            raise ConfigError(f"environment must be a subclass of SandboxEnvironment, not {environment!r}")
        if pool is not None and not isinstance(pool, rls.Pool):
            raise ConfigError(f"pool must be a Pool, not {pool!r}")
        for name in pool_kwargs:
            if name not in inspect.signature(rls.Pool).parameters:
                raise TypeError(f"SandboxTraining() got an unexpected keyword argument {name!r}")
        found = tasks_from(tasks)
        self.tasks = {task.id: task for task in found}
        if not found or len(self.tasks) != len(found):
            raise ConfigError("there are no tasks" if not found else "two tasks have the same id")
        self._base, self._tools = environment, tuple(tools)
        self._environment = _without(environment, [name for name in TOOLS if name not in tools])
        self._retries, self._claim_timeout = retries, claim_timeout
        self._step_timeout, self._deadline = step_timeout, math.inf
        self._command_timeout, self._output = command_timeout, output
        self._pool, self._own, self._pool_kwargs = pool, pool is None, pool_kwargs
        self._grading_since: float | None = None
        self._grading = threading.BoundedSemaphore(GRADING)
        self._environments: list[SandboxEnvironment] = []
        self._ahead: dict[str, deque[rls.Episode]] = {}
        self._batch: str | None = None
        self._clock: BatchClock | None = None
        self._label = ""
        self._batches = 0

    def __reduce__(self) -> Any:
        """For trainers that make rollouts in another process of this machine: it shares this one's pool."""
        options: dict[str, Any] = {"retries": self._retries, "claim_timeout": self._claim_timeout}
        options |= {"step_timeout": self._step_timeout, "command_timeout": self._command_timeout}
        options["output"] = self._output
        return _connected, (list(self.tasks.values()), self._tools, self._base, self.pool.ref, options)

    @property
    def pool(self) -> rls.Pool:
        """The pool; one of its own is made when it is first needed, and anew when it was closed."""
        if self._pool is None or (self._own and self._pool.closed):
            if self._pool is None and self._environments:  # not attached: so many rollouts are made at once
                self._pool_kwargs |= self._sizes(len(self._environments) * local_processes())
            self._pool = shared_pool(lambda: rls.Pool(**self._pool_kwargs))
        return self._pool

    @property
    def dataset(self) -> Any:
        """A ``datasets.Dataset`` with the columns ``prompt`` and ``task_id``, and no other.

        Other columns would be read as pictures, or filled with each other's keys.
        """
        from datasets import Dataset

        prompts = [[{"role": "user", "content": task.prompt}] for task in self.tasks.values()]
        return Dataset.from_dict({"prompt": prompts, "task_id": list(self.tasks)})

    def __call__(self) -> SandboxEnvironment:
        """The environment factory."""
        environment = self._environment()
        environment._training = self
        self._environments.append(environment)
        return environment

    def attach(self, trainer: Any, *, serial: Collection[str] = ()) -> None:
        """Numbers in the trainer's log, tools side by side, claims ahead, what broke left out of the update.

        A pool of its own is closed when training ends, by an exception too; one that was given is its
        maker's to close.

        Args:
            serial: see :func:`parallel_tools`.
        """
        from .callback import SandboxCallback
        from .lookahead import look_ahead
        from .missing import leave_out_missing
        from .parallel import parallel_tools

        versions.require_own_rollouts(trainer)
        self._check_pools(trainer)
        self._check_room(trainer)
        parallel_tools(trainer, serial=serial)
        look_ahead(trainer, self)
        leave_out_missing(trainer, self._counter)
        # Last: its windows hold all of a batch.
        trainer.add_callback(SandboxCallback(trainer, lambda: self.pool, close=self._own))

    def _check_pools(self, trainer: Any) -> None:
        """A trainer's log has the numbers of one pool."""
        factories = (getattr(trainer, "environment_factories", None) or {}).values()
        for other in factories:
            if not isinstance(other, SandboxTraining) or other is self:
                continue
            if self._own or other._own or other._pool is not self._pool:
                raise ConfigError(
                    "the environments of one trainer come from several trainings with pools of their own",
                    hint="make one Pool and hand it to each as pool=",
                )

    def _check_room(self, trainer: Any) -> None:
        args = trainer.args
        most = args.per_device_train_batch_size * args.steps_per_generation
        if trainer.eval_dataset is not None:
            most = max(most, args.per_device_eval_batch_size)
        if self._own:
            most *= local_processes()  # they share it
        if self._own and self._pool is None:
            self._pool_kwargs |= self._sizes(most)
        self._require_room(most)

    def _require_room(self, most: int) -> None:
        """A rollout keeps its sandbox until the whole batch is graded: the rest would wait for ever."""
        if self.pool.max_size < most:
            raise ConfigError(
                f"{most} rollouts are generated at once, the pool may have {self.pool.max_size} sandboxes",
                hint=f"size={most}, or max_size={most}",
            )

    def _sizes(self, most: int) -> dict[str, int]:
        """What nobody has said of the size of a pool of its own, when *most* rollouts are made at once."""
        given = {name: self._pool_kwargs.get(name) for name in ("size", "max_size")}
        said = load_config(self._pool_kwargs.get("config"), self._pool_kwargs.get("profile"), given).pool
        if said.size is not None:
            return {}
        if said.max_size is not None:
            return {"size": min(most, said.max_size)}
        layers = any(task.setup is not None or task.files for task in self.tasks.values())
        return {"size": most, "max_size": most + (max(1, most // SPARE) if layers else 0)}

    # ------------------------------------------------------------------ for environments

    def _task_of(self, row: dict[str, Any]) -> rls.Task:
        task = self._known(row)
        if task is None:
            known = "task_id" in row
            raise ConfigError(
                f"no task is called {row['task_id']!r}" if known else "the dataset has no column task_id",
                hint="train on the dataset of this SandboxTraining, or on rows with its tasks' ids",
            )
        return task

    def _known(self, row: dict[str, Any]) -> rls.Task | None:
        name = row.get("task_id")
        return self.tasks.get(name) if isinstance(name, str) else None

    def _counter(self) -> Counter:
        return counter_of(self.pool)

    def _episode(self, task: rls.Task) -> rls.Episode:
        """The one that was begun ahead, else a new one."""
        waiting = self._ahead.get(task.id)
        if waiting:
            return waiting.popleft()
        # A reset of the user's own took another task than the row says: what was claimed for the row, and
        # rows are reset in order, is in the way.
        for unused in self._ahead.values():
            if unused:
                unused.popleft().cancel("the environment's reset took another task")
                break
        return self._new(task)

    def _new(self, task: rls.Task) -> rls.Episode:
        group = f"{task.id}@{self._label}" if self._label else None
        return rls.Episode(
            self.pool, task, group=group, batch=self._batch, retries=self._retries, clock=self._clock
        )

    def _finish(self) -> None:
        """Grade the whole batch side by side: the trainer asks for one reward after the other.

        Only within a batch of a trainer that this is attached to: elsewhere others may be in their midst.
        """
        if self._batch is None:
            return
        if self._grading_since is None:
            self._grading_since = time.monotonic()
        for environment in self._environments:
            if environment._rollout is not None and environment._graded_by_task():
                environment._rollout.finish()

    def _unscored(self) -> int:
        """Rollouts that may yet be asked for their reward; 1 at least."""
        held = (environment._rollout for environment in self._environments)
        return max(1, sum(rollout is not None and not rollout.over for rollout in held))

    def _step_deadline(self) -> float:
        """Of the batch under way, else of one that begins now."""
        if self._deadline == math.inf and self._step_timeout is not None:
            return time.monotonic() + self._step_timeout
        return self._deadline

    # ------------------------------------------------------------------ for the look-ahead

    def _begin_batch(self, rows: Sequence[dict[str, Any]], label: str) -> None:
        """Claim for all rollouts of a batch at once: the trainer resets one environment after the other."""
        for environment in self._environments:
            environment._abandon("the trainer went on without asking for the reward")
        self._require_room(len(rows) * (local_processes() if self._own else 1))
        tasks = [self._task_of(row) if self._resets_by_row() else self._known(row) for row in rows]
        self._batches += 1
        self._label, self._batch = label, f"trl-{os.getpid()}-{self._batches}"
        self._clock = BatchClock(self.pool.metrics.batch)
        if self._step_timeout is not None:
            self._deadline = time.monotonic() + self._step_timeout
        timeout = (
            self._claim_timeout
            if self._step_timeout is None
            else min(self._claim_timeout, self._step_timeout)
        )
        for task in tasks:
            if task is None:
                continue
            episode = self._new(task)
            self._ahead.setdefault(task.id, deque()).append(episode)
            episode.begin_ahead(timeout=timeout)

    def _resets_by_row(self) -> bool:
        """Else a reset of the user's own says which task it is."""
        return self._base.reset is SandboxEnvironment.reset

    def _end_batch(self, *, whole: bool = True) -> None:
        """*whole*: by its own way, not by an exception."""
        for environment in self._environments:
            environment._leave(whole)
        left = [episode for waiting in self._ahead.values() for episode in waiting]
        self._ahead.clear()
        if not self.pool.closed:
            for episode in left:
                episode.cancel("the trainer did not begin this rollout")
        if self._clock is not None:
            self._clock.close()
        self._clock, self._label, self._batch, self._deadline = None, "", None, math.inf


def _connected(
    tasks: list[rls.Task],
    tools: tuple[str, ...],
    environment: type[SandboxEnvironment],
    ref: rls.PoolRef,
    options: dict[str, Any],
) -> SandboxTraining:
    pool = connected(ref)
    return SandboxTraining(tasks, pool=pool, tools=tools, environment=environment, **options)


def _without(environment: type[SandboxEnvironment], names: list[str]) -> type[SandboxEnvironment]:
    """A subclass of the same name in which *names* are no functions: then they are no tools."""
    off = [name for name in names if getattr(environment, name) is getattr(SandboxEnvironment, name)]
    if not off:
        return environment
    described = {"__doc__": environment.__doc__, "__module__": environment.__module__}
    return type(environment.__name__, (environment,), {**described, **dict.fromkeys(off)})
