"""What an environment is asked to do, checked: its tasks, spaces, and how steps are seen and rewarded."""

from __future__ import annotations

import math
import numbers
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
from gymnasium import Space, spaces

from .._sandbox.command import seconds
from .._sandbox.grading import number_of
from .._settings import nearest
from ..errors import ConfigError
from ..results import CommandResult, Failure, Outcome
from ..task import Task
from .spaces import UnicodeText, fit

Observe = Callable[[CommandResult, Task], Any]
RewardFn = Callable[[CommandResult, Any, Outcome | None], float]

NO_COMMAND: Final = -1
"""``exit_code`` of an observation of no command: after a reset, a submission, a broken sandbox."""
NOT_RUN: Final = 126
"""Exit code of an action that cannot be run as a command (a shell's own code for it)."""
ACTION_LENGTH: Final = 1 << 20
PROMPT_LENGTH: Final = 1 << 16


@dataclass(frozen=True)
class Turn:
    """What one reset or step came to, before its reward.

    Args:
        result: of the command; an empty one where there was none.
        outcome: the grade, when the task was graded.
        failure: why the rollout broke.
        limit: which limit was hit (``steps``, ``wall``).
        submitted: the action was to submit.
    """

    task: Task
    result: CommandResult
    outcome: Outcome | None = None
    failure: Failure | None = None
    limit: str | None = None
    submitted: bool = False

    @property
    def terminated(self) -> bool:
        return self.submitted and self.failure is None

    @property
    def truncated(self) -> bool:
        return self.failure is not None or (self.limit is not None and not self.submitted)

    @property
    def done(self) -> bool:
        return self.terminated or self.truncated

    def info(self) -> dict[str, Any]:
        """A dictionary of its own at each call, always with the same names."""
        return {
            "task_id": self.task.id,
            "result": self.result if self.result.exit_code != NO_COMMAND else None,
            "outcome": self.outcome,
            "failure": self.failure,
            "limit": self.limit,
        }


def nothing_ran() -> CommandResult:
    return CommandResult(exit_code=NO_COMMAND)


def not_run(why: str) -> CommandResult:
    """The result of an action that is no command: the acting agent reads why, as from a shell."""
    text = f"rlsandbox: not run: {why}\n"
    raw = text.encode("utf-8", "replace")
    return CommandResult(exit_code=NOT_RUN, stderr=text, stderr_bytes=raw, stderr_size=len(raw), merged=text)


class Rules:
    """Settings of an environment that both kinds share.

    Args:
        tasks: a source for ``load_tasks``, or tasks; None: the demo tasks.
        observe: from a command's result (an empty one with exit code -1 after a reset and a submission) and
            the task to an observation.
        observation_space: what *observe* gives; needed unless that is text.
        reward_fn: from the result, the sandbox and the outcome (None unless the task was graded or
            submitted) to the step's reward; default the grade at the end, 0.0 before it.
        submit: the action that ends the episode and has the work graded.
        max_steps: commands an episode may run; a task's own limit may be lower.
    """

    def __init__(
        self,
        *,
        tasks: str | Iterable[Task] | None = None,
        observe: Observe | None = None,
        observation_space: Space[Any] | None = None,
        reward_fn: RewardFn | None = None,
        submit: str = "submit",
        max_steps: int | None = None,
        render_mode: str | None = None,
        render_modes: Sequence[str] = ("ansi",),
        reset_timeout: float | None = None,
    ) -> None:
        self.observe = observe
        self.reward_fn = reward_fn
        self.submit = submit
        self.max_steps = max_steps
        self.reset_timeout = seconds(reset_timeout, "reset_timeout")
        for name, value in (("observe", observe), ("reward_fn", reward_fn)):
            if value is not None and not callable(value):
                raise ConfigError(f"{name} must be a function, not {type(value).__name__}")
        if not isinstance(submit, str) or not submit:
            raise ConfigError(f"submit must be a text that is not empty, not {submit!r}")
        whole = isinstance(max_steps, numbers.Integral) and not isinstance(max_steps, bool)
        if max_steps is not None and (not whole or max_steps < 1):
            raise ConfigError(f"max_episode_steps must be at least 1, not {max_steps!r}")
        if render_mode is not None and render_mode not in render_modes:
            raise ConfigError(
                f"render_mode must be None or one of {', '.join(render_modes)}, not {render_mode!r}"
            )
        self.tasks = _load(tasks)
        self.by_id = {task.id: i for i, task in enumerate(self.tasks)}
        for task in self.tasks:
            self.check(task)
        self.action_space = UnicodeText(ACTION_LENGTH, nul=False)
        self.observation_space = self._space(observation_space)

    def check(self, task: Task) -> Task:
        """*task*, when an episode of it would have something to reward."""
        if task.grader is None and self.reward_fn is None:
            raise ConfigError(
                f"task {task.id} has no grader, so {self.submit!r} would have nothing to reward",
                hint="give Task(grader=...), or reward_fn= to the environment",
            )
        return task

    def chosen(self, options: dict[str, Any] | None) -> Task | None:
        """The task that ``options={"task": ...}`` names: a Task, an id, or an index."""
        options = options_of(options, "task")
        if options.get("task") is None:
            return None
        wanted = options["task"]
        if isinstance(wanted, Task):
            prompt = self._prompt_space
            if prompt is not None and len(wanted.prompt) > prompt.max_length:
                raise ConfigError(
                    f"the prompt of task {wanted.id} has {len(wanted.prompt)} characters, more than the"
                    f" observation space's {prompt.max_length}",
                    hint="name the task in tasks= as well: the space is made to hold the prompts there",
                )
            return self.check(wanted)
        if isinstance(wanted, str):
            if wanted not in self.by_id:
                import difflib

                near = difflib.get_close_matches(wanted, self.by_id, n=1)
                hint = f"did you mean {near[0]!r}?" if near else f"there are {len(self.tasks)} tasks"
                raise ConfigError(f"options: no task is called {wanted!r}", hint=hint)
            return self.tasks[self.by_id[wanted]]
        if isinstance(wanted, (int, np.integer)) and not isinstance(wanted, bool):
            if not 0 <= wanted < len(self.tasks):
                raise ConfigError(f"options: there is no task {wanted}; there are {len(self.tasks)}")
            return self.tasks[int(wanted)]
        raise ConfigError(f"options: task must be a Task, an id or an index, not {type(wanted).__name__}")

    def check_action(self, action: Any) -> str:
        if not isinstance(action, str):
            raise ConfigError(
                f"an action is a text (a command, or {self.submit!r}), not {type(action).__name__}"
            )
        return str(action)

    def observation(self, turn: Turn) -> Any:
        """What the acting agent sees; inside the space for any bytes."""
        result, space = turn.result, self.observation_space
        if self.observe is not None:
            seen = self.observe(result, turn.task)
            return fit(seen, space) if isinstance(seen, str) and isinstance(space, UnicodeText) else seen
        return {
            "prompt": fit(turn.task.prompt, self._text("prompt")),
            "stdout": fit(result.stdout, self._text("stdout")),
            "stderr": fit(result.stderr, self._text("stderr")),
            "exit_code": min(max(int(result.exit_code), NO_COMMAND), 255),
        }

    def reward(self, turn: Turn, sandbox: Any) -> float:
        """The step's reward; NaN where infrastructure failed or the grade could not be measured."""
        if turn.failure is not None:
            return math.nan
        if self.reward_fn is not None:
            outcome = turn.outcome
            if outcome is None and turn.submitted:
                outcome = Outcome(None, None, None)
            given = self.reward_fn(turn.result, sandbox, outcome)
            number = number_of(given)
            if number is None:
                raise ConfigError(f"reward_fn must give a number, not {given!r:.100}")
            return number
        if turn.outcome is None:
            return 0.0
        return math.nan if turn.outcome.reward is None else float(turn.outcome.reward)

    @property
    def _prompt_space(self) -> UnicodeText | None:
        return self._text("prompt") if self.observe is None else None

    def _text(self, name: str) -> UnicodeText:
        found: UnicodeText = self._spaces[name]
        return found

    def _space(self, given: Space[Any] | None) -> Space[Any]:
        output = max(task.limits.output_bytes for task in self.tasks) + 1024  # the marker where it is cut
        self._spaces: dict[str, Any] = {
            "prompt": UnicodeText(max(PROMPT_LENGTH, *(len(task.prompt) for task in self.tasks))),
            "stdout": UnicodeText(output),
            "stderr": UnicodeText(output),
            "exit_code": spaces.Discrete(257, start=NO_COMMAND),
        }
        if self.observe is None:
            if given is not None:
                raise ConfigError("observation_space belongs to observe=, which is not given")
            return spaces.Dict(self._spaces)
        if given is not None:
            if not isinstance(given, Space):
                raise ConfigError(f"observation_space must be a gymnasium Space, not {type(given).__name__}")
            return given
        seen = self.observe(nothing_ran(), self.tasks[0])
        if not isinstance(seen, str):
            raise ConfigError(
                f"observe gives {type(seen).__name__}: say in which space it lies",
                hint="observation_space=gymnasium.spaces...",
            )
        return UnicodeText(max(output, PROMPT_LENGTH))


def _load(tasks: str | Iterable[Task] | None) -> list[Task]:
    if tasks is None or isinstance(tasks, str):
        from ..tasks import load_tasks

        found = load_tasks(tasks or "demo")
    elif isinstance(tasks, Task):
        found = [tasks]
    elif isinstance(tasks, Iterable):
        found = list(tasks)
    else:
        raise ConfigError(f"tasks must be a name or a list of Tasks, not {type(tasks).__name__}")
    if not found:
        raise ConfigError("an environment needs at least one task")
    seen: set[str] = set()
    for task in found:
        if not isinstance(task, Task):
            raise ConfigError(f"tasks must hold Tasks, not {type(task).__name__}")
        if task.id in seen:
            raise ConfigError(f"two tasks are called {task.id!r}; ids are unique")
        seen.add(task.id)
    return found


def options_of(options: object, *known: str) -> dict[str, Any]:
    """The options of a ``reset``. A name that nobody knows would choose another task than was meant."""
    if options is None:
        return {}
    if not isinstance(options, Mapping):
        raise ConfigError(f"options must map names to values, not {type(options).__name__}")
    for name in options:
        if name not in known:
            raise ConfigError(f"options: unknown name {name!r}{nearest(str(name), known)}")
    return dict(options)
