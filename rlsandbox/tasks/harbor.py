"""Task directories as Harbor and Terminal-Bench 2 have them.

::

    my-task/
      instruction.md          the prompt
      task.toml               timeouts, resources, metadata
      environment/Dockerfile  how the image is made (its simple half), unless task.toml has docker_image
      tests/test.sh           the check: writes /logs/verifier/reward.txt (or reward.json), or just exits
      solution/solve.sh       the known solution

Without ``docker_image`` and without a Dockerfile the task runs on the backend's own base. What a Task cannot
carry is an error where it would change the task (docker-compose, several steps, a verifier's own image,
MCP servers), and is listed in ``metadata["not_applied"]`` where the pool decides instead (``allow_internet``:
the network is what the pool's Spec says) or nothing depends on it (build timeouts).
"""

from __future__ import annotations

import re
import shlex
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ..errors import ConfigError
from ..spec import Limits, Spec, parse_size
from ..task import Grader, Task
from .dockerfile import Recipe, read_dockerfile, read_tree
from .document import Loaded, Solution

WORKDIR = "/app"
_VARIABLE = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
_VERIFY = """\
set -u
rm -rf /logs/verifier
mkdir -p /logs/verifier
shell=sh
if command -v bash >/dev/null 2>&1; then shell=bash; fi
"$shell" /tests/test.sh
status=$?
reward=/logs/verifier/reward
if [ ! -s "$reward.txt" ] && [ -s "$reward.json" ]; then
    number='s/.*"reward"[[:space:]]*:[[:space:]]*\\([-+.0-9eE]*\\).*/\\1/p'
    tr -d '\\n' <"$reward.json" | sed -n "$number" >"$reward.txt"
fi
exit $status
"""
_KNOWN_ENVIRONMENT = {
    "docker_image", "cpus", "memory", "memory_mb", "storage", "storage_mb", "workdir", "env",
}  # fmt: skip
_NOT_APPLIED = {
    "build_timeout_sec", "allow_internet", "gpus", "gpu_types", "network_mode", "allowed_hosts", "os",
}  # fmt: skip


def is_task_directory(path: Path) -> bool:
    """Whether *path* looks like one, complete or not."""
    return (path / "instruction.md").is_file() or (path / "task.toml").is_file()


def read_task_directory(path: Path) -> Loaded:
    """The task in directory *path*; its id is the task's name in task.toml, else the directory's name."""
    for name in ("instruction.md", "task.toml", "tests/test.sh"):
        if not (path / name).is_file():
            raise ConfigError(f"{path}: {name} is missing")
    for name, what in (
        ("environment/docker-compose.yaml", "several containers"),
        ("environment/docker-compose.yml", "several containers"),
        ("steps", "several steps"),
        ("tests/Dockerfile", "an image of the verifier's own"),
    ):
        if (path / name).exists():
            raise ConfigError(f"{path}: {name}: {what} are not supported")
    where = str(path / "task.toml")
    toml = _toml(path / "task.toml")
    not_applied: list[str] = []
    environment = _section(toml, "environment", where)
    for key in environment:
        if key in _NOT_APPLIED or (key not in _KNOWN_ENVIRONMENT and not environment[key]):
            not_applied.append(f"environment.{key}")
        elif key not in _KNOWN_ENVIRONMENT:
            raise ConfigError(f"{where}: environment.{key} is not supported")
    verifier, agent = _section(toml, "verifier", where), _section(toml, "agent", where)
    not_applied += [f"verifier.{key}" for key in verifier if key not in ("timeout_sec", "env")]
    not_applied += [f"agent.{key}" for key in agent if key != "timeout_sec"]
    image = _value(environment, "docker_image", str, f"{where}: environment.")
    recipe = Recipe(image=image)
    if image is None and (path / "environment" / "Dockerfile").is_file():
        recipe = read_dockerfile(path / "environment" / "Dockerfile")
    workdir = _value(environment, "workdir", str, f"{where}: environment.") or recipe.workdir
    if workdir is None and recipe.image is None:
        workdir = WORKDIR
    metadata = _section(toml, "metadata", where)
    name = _section(toml, "task", where).get("name") or path.name
    try:
        task = Task(
            id=str(name),
            image=recipe.image,
            prompt=(path / "instruction.md").read_text(encoding="utf-8"),
            workdir=workdir,
            files=recipe.files,
            setup=recipe.setup,
            grader=_grader(path, verifier, where),
            spec=_spec(environment, recipe, where),
            limits=Limits(wall=_value(agent, "timeout_sec", (int, float), f"{where}: agent.")),
            metadata={
                **_jsonable(metadata),
                "loaded_from": f"{path.absolute()}#",
                **({"not_applied": not_applied} if not_applied else {}),
            },
        )
    except ConfigError as error:
        if str(path) in error.message:
            raise
        raise ConfigError(f"{path}: {error.message}", hint=error.hint) from None
    except UnicodeDecodeError as error:
        raise ConfigError(f"{path / 'instruction.md'}: not valid UTF-8 at byte {error.start}") from None
    return Loaded(task, str(path), lambda: _solution(path), lambda: None)


def _grader(path: Path, verifier: Mapping[str, Any], where: str) -> Grader:
    timeout = _value(verifier, "timeout_sec", (int, float), f"{where}: verifier.")
    env = verifier.get("env", {})
    if not isinstance(env, Mapping) or any("$" in str(value) for value in env.values()):
        raise ConfigError(f"{where}: verifier.env with variables of the host is not supported")
    for key in env:
        if not _VARIABLE.fullmatch(key):
            raise ConfigError(f"{where}: verifier.env: {key!r} is no name of a variable")
    exports = "".join(f"export {key}={shlex.quote(str(value))}\n" for key, value in env.items())
    script = (path / "tests" / "test.sh").read_text(encoding="utf-8", errors="replace")
    writes = any(name in script for name in ("/logs/verifier", "reward.txt", "reward.json"))
    return Grader(
        command=exports + _VERIFY,
        files=read_tree(path / "tests", "/tests", str(path)),
        timeout=600 if timeout is None else timeout,
        reward="file:/logs/verifier/reward.txt" if writes else "exit_code",
        work=["/"],  # what is installed and configured, anywhere, is what such tasks judge
    )


def _spec(environment: Mapping[str, Any], recipe: Recipe, where: str) -> Spec | None:
    values: dict[str, Any] = {"cpu": environment.get("cpus")}
    for key, field in (("memory", "memory"), ("storage", "disk")):
        if environment.get(f"{key}_mb") is not None:
            values[field] = f"{environment[f'{key}_mb']}MiB"
        elif environment.get(key) is not None:  # "2G" is meant as Docker means it: 2**30
            text = str(environment[key]).removesuffix("B").removesuffix("i")
            values[field] = parse_size(text + "iB" if text[-1:].isalpha() else text, f"environment.{key}")
    env = environment.get("env", {})
    if not isinstance(env, Mapping) or any("$" in str(value) for value in env.values()):
        raise ConfigError(f"{where}: environment.env with variables of the host is not supported")
    values["env"] = {**recipe.env, **{str(key): str(value) for key, value in env.items()}}
    spec = Spec(**values)
    return spec if spec != Spec() else None


def _solution(path: Path) -> Solution | None:
    directory = path / "solution"
    if not (directory / "solve.sh").is_file():
        return None
    files = read_tree(directory, "/solution", str(path))
    shell = "bash" if b"bash" in _first_line(files["/solution/solve.sh"]) else "sh"
    return Solution(files=files, command=f"{shell} /solution/solve.sh")


def _first_line(data: str | bytes) -> bytes:
    return (data.encode() if isinstance(data, str) else data).split(b"\n", 1)[0]


def _toml(path: Path) -> dict[str, Any]:
    try:
        return tomllib.loads(path.read_text(encoding="utf-8-sig"))
    except (ValueError, RecursionError) as error:  # numbers too long, nested too deep
        raise ConfigError(f"{path}: not valid TOML: {error}") from None
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read: {error.strerror or error}") from None


def _section(data: Mapping[str, Any], name: str, where: str) -> Mapping[str, Any]:
    value = data.get(name, {})
    if not isinstance(value, Mapping):
        raise ConfigError(f"{where}: {name} must be a table, not {value!r}")
    return value


def _value(data: Mapping[str, Any], key: str, kind: type | tuple[type, ...], where: str) -> Any:
    value = data.get(key)
    if value is not None and (not isinstance(value, kind) or isinstance(value, bool)):
        raise ConfigError(f"{where}{key} is of the wrong type: {value!r}")
    return value


def _jsonable(value: Any) -> Any:
    """TOML's dates as text; the rest as it is."""
    if isinstance(value, Mapping):
        return {str(key): _jsonable(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_jsonable(item) for item in value]
    return value if isinstance(value, (str, int, float, bool, type(None))) else str(value)
