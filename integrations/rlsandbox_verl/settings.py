"""What the YAML file of agent loops says about the sandboxes of a job."""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from difflib import get_close_matches
from functools import lru_cache
from types import MappingProxyType
from typing import Any

import rlsandbox as rls
from rlsandbox.errors import ConfigError

TOOLS = ("shell", "read_file", "write_file", "submit")
ON_FAILURE = ("mask", "skip_group")


@dataclass(frozen=True, kw_only=True)
class Settings:
    """Options of the agent loop; those of its pool hold for the whole job.

    Args:
        profile: section ``[profiles.NAME]`` of the configuration that the pool is made from.
        pool: arguments of :class:`rlsandbox.Pool` over that: ``size``, ``max_size``, ``spec`` (a table) ...
        tasks: where the tasks are, for :func:`rlsandbox.load_tasks`, or ``pkg.mod:fn``, a function that gives
            them; default what the rows of the data set say.
        tools: those of the loop's own tools that the model gets.
        on_failure: what becomes of a group one of whose rollouts was lost: ``mask`` leaves that rollout out,
            ``skip_group`` the whole group.
        retries: further attempts, from the start and in a fresh sandbox, for what infrastructure broke.
        claim_timeout: seconds an attempt may wait for its sandbox.
        command_timeout: seconds a command of the tool ``shell`` may take.
        deadline: seconds from a rollout's start after which no further attempt is begun.
        restarts: how often the process that owns the pool is started anew when it dies.
        give_up: batches in a row of which no rollout came to its end, after which training is ended.
    """

    profile: str | None = None
    pool: Mapping[str, Any] = field(default_factory=dict)
    tasks: str | None = None
    tools: Sequence[str] = TOOLS
    on_failure: str = "mask"
    retries: int = 2
    claim_timeout: float = 300.0
    command_timeout: float = 60.0
    deadline: float | None = None
    restarts: int = 3
    give_up: int = 3

    def __post_init__(self) -> None:
        _require_names("tools", self.tools, TOOLS)
        if self.on_failure not in ON_FAILURE:
            raise ConfigError(f"on_failure must be one of {', '.join(ON_FAILURE)}, not {self.on_failure!r}")
        for name in ("claim_timeout", "command_timeout"):
            _require_seconds(name, getattr(self, name))
        if self.deadline is not None:
            _require_seconds("deadline", self.deadline)
        for name, least in (("retries", 0), ("restarts", 0), ("give_up", 1)):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int) or value < least:
                raise ConfigError(f"{name} must be a whole number of at least {least}, not {value!r}")
        for name in ("tasks", "profile"):
            value = getattr(self, name)
            if value is not None and not isinstance(value, str):
                raise ConfigError(f"{name} must be text, not {value!r}")
        _require_keys("pool", self.pool, _arguments(rls.Pool), but={"profile": "it stands beside pool"})
        if isinstance(spec := self.pool.get("spec"), Mapping):
            _require_keys("pool.spec", spec, _arguments(rls.Spec))
            rls.Spec(**spec)  # says what is wrong with it

    @classmethod
    def of(cls, options: Mapping[str, Any]) -> Settings:
        """From a mapping as YAML gives it; what is unknown is one error."""
        for name in options:
            if name not in _NAMES:
                raise ConfigError(f"SandboxAgentLoop has no option {name!r}", hint=_near(name, _NAMES))
        found = {name: _plain(value) for name, value in options.items()}
        if found.get("pool", {}) is None:  # a heading in the file with nothing under it
            del found["pool"]
        if isinstance(found.get("tools"), list):
            found["tools"] = tuple(found["tools"])
        return cls(**found)

    def make_pool(self, run: str) -> rls.Pool:
        """The job's pool."""
        given = dict(self.pool)
        if isinstance(given.get("spec"), Mapping):
            given["spec"] = rls.Spec(**given["spec"])
        given.setdefault("run", run)
        return rls.Pool(**given, profile=self.profile)


_NAMES = [f.name for f in fields(Settings)]


def _near(name: object, names: Sequence[str]) -> str:
    near = get_close_matches(str(name), names, 1)
    return f"did you mean {near[0]}?" if near else f"there are: {', '.join(names)}"


def _arguments(kind: type) -> list[str]:
    return [name for name in inspect.signature(kind).parameters if name != "self"]


def _require_names(what: str, found: Any, names: Sequence[str]) -> None:
    if isinstance(found, str) or not isinstance(found, Sequence):
        raise ConfigError(f"{what} must be a list, not {found!r}", hint=f"of {', '.join(names)}")
    for name in found:
        if name not in names:
            raise ConfigError(f"there is no tool called {name!r}", hint=f"{what}: {', '.join(names)}")


def _require_seconds(name: str, value: Any) -> None:
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not value > 0:
        raise ConfigError(f"{name} must be a number of seconds above 0, not {value!r}")


def _require_keys(
    what: str, found: Any, names: Sequence[str], but: Mapping[str, str] = MappingProxyType({})
) -> None:
    if not isinstance(found, Mapping):
        raise ConfigError(f"{what} must be a table, not {found!r}")
    for name in found:
        if name in but or name not in names:
            hint = but.get(name) or _near(name, [known for known in names if known not in but])
            raise ConfigError(f"{what} has no option {name!r}", hint=hint)


def _plain(value: Any) -> Any:
    """Without the containers of OmegaConf, which do not pickle cheaply and are no Mapping to everybody."""
    if isinstance(value, Mapping) or type(value).__name__ == "DictConfig":
        return {str(k): _plain(v) for k, v in value.items()}
    if isinstance(value, (list, tuple)) or type(value).__name__ == "ListConfig":
        return [_plain(v) for v in value]
    return value


def settings_in(config: Any) -> Settings:
    """Those of the job: of the first loop of ours in
    ``actor_rollout_ref.rollout.agent.agent_loop_config_path``."""
    path = config.actor_rollout_ref.rollout.agent.get("agent_loop_config_path")
    if not path:
        return Settings()
    from omegaconf import OmegaConf
    from verl.utils.import_utils import load_class_from_fqn, resolve_config_path

    from .loop import SandboxAgentLoop

    for entry in OmegaConf.load(resolve_config_path(path)):
        options = _plain(entry)
        target = options.pop("_target_", "")
        options.pop("name", None)
        kind = load_class_from_fqn(target, "agent loop") if "." in target else None
        if kind is SandboxAgentLoop:
            return Settings.of(options)
        if isinstance(kind, type) and issubclass(kind, SandboxAgentLoop):  # it may have options of its own
            return Settings.of({k: v for k, v in options.items() if k in _NAMES})
    return Settings()


@lru_cache(maxsize=8)
def tasks_of(source: str) -> dict[str, rls.Task]:
    """Tasks by id: of a source of :func:`rlsandbox.load_tasks`, or what ``pkg.mod:fn`` gives."""
    module, _, function = source.partition(":")
    if function and all(part.isidentifier() for part in (*module.split("."), function)):
        try:
            found = list(getattr(importlib.import_module(module), function)())
        except (ImportError, AttributeError) as error:
            raise ConfigError(f"tasks: {source!r} cannot be loaded: {error}") from error
    else:
        found = rls.load_tasks(source)
    tasks = {task.id: task for task in found}
    if len(tasks) != len(found):
        raise ConfigError(f"{source}: two tasks have the same id")
    return tasks
