"""Task files: what is read, and what is refused with its place."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

import pytest

import rlsandbox.tasks._host as host
from rlsandbox.errors import ConfigError
from rlsandbox.spec import Limits, Spec
from rlsandbox.task import Grader, Task
from rlsandbox.tasks import Solution, load_tasks, solution_of

FULL: dict[str, Any] = {
    "id": "a/1",
    "prompt": "Do it.",
    "workdir": "/w",
    "files": {"x.py": "print()\n", "b.bin": {"base64": "/wA="}},
    "setup": "mkdir y",
    "grader": {
        "command": ["sh", "t.sh"],
        "files": {"t.sh": "true"},
        "timeout": 5,
        "reward": "file:/r",
        "fresh": True,
    },
    "spec": {"memory": "1GiB", "env": {"A": "1"}, "expose": ["/opt"]},
    "limits": {"steps": 3, "wall": 60, "command": 1.5, "output": "2MiB"},
    "metadata": {"difficulty": "easy", "n": [1, None]},
    "solution": {"files": {"x.py": "ok"}, "command": "chmod +x x.py"},
    "broken": {"command": "rm x.py"},
}
WANTED = Task(
    id="a/1",
    prompt="Do it.",
    workdir="/w",
    files={"x.py": "print()\n", "b.bin": b"\xff\0"},
    setup="mkdir y",
    grader=Grader(command=["sh", "t.sh"], files={"t.sh": "true"}, timeout=5, reward="file:/r", fresh=True),
    spec=Spec(memory="1GiB", env={"A": "1"}, expose=("/opt",)),
    limits=Limits(steps=3, wall=60, command=1.5, output="2MiB"),
)


def lines(path: Path, *documents: Any) -> Path:
    path.write_text("".join(json.dumps(document) + "\n" for document in documents))
    return path


def without_metadata(task: Task) -> dict[str, Any]:
    return {key: value for key, value in vars(task).items() if key != "metadata" and not key.startswith("_")}


def test_a_full_line(tmp_path: Path) -> None:
    path = lines(tmp_path / "t.jsonl", FULL)
    (task,) = load_tasks(path)
    assert without_metadata(task) == without_metadata(WANTED)
    assert task.metadata["n"] == [1, None]
    assert solution_of(task) == Solution(files={"x.py": "ok"}, command="chmod +x x.py")
    assert solution_of(task, broken=True) == Solution(command="rm x.py")
    assert "chmod" not in json.dumps(dict(task.metadata))


def test_gzip_bom_blank_lines_and_limit(tmp_path: Path) -> None:
    path = tmp_path / "t.jsonl.gz"
    rows = "\ufeff" + "\n\n".join(json.dumps({"id": str(i), "prompt": "é"}) for i in range(5)) + "\n"
    path.write_bytes(gzip.compress(rows.encode()))
    assert [task.id for task in load_tasks(str(path), limit=3)] == ["0", "1", "2"]
    assert load_tasks(path)[0].prompt == "é"


def test_toml_file_and_directory(tmp_path: Path) -> None:
    for name in ("b", "a"):
        (tmp_path / f"{name}.toml").write_text(
            f'id = "{name}"\nchecks = "assert True"\n[files]\nf = "1"\n[solution]\ncommand = "echo {name}"\n'
        )
    tasks = load_tasks(tmp_path)
    assert [task.id for task in tasks] == ["a", "b"]
    assert tasks[0].grader is not None
    assert "assert True" in str(tasks[0].grader.files[".check.py"])
    assert load_tasks(tmp_path / "b.toml")[0].id == "b"
    for task in (*tasks, *load_tasks(tmp_path / "b.toml")):
        assert solution_of(task) == Solution(command=f"echo {task.id}")


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ('{"promt": "x", "id": "a"}', "t.jsonl:1: unknown field 'promt': did you mean 'prompt'"),
        ('{"prompt": "x"}', "t.jsonl:1: id is missing"),
        ('{"ID": "x"}', "id is missing"),
        ('{"id": 3}', "id must be text, not 3"),
        ('{"id": ""}', "Task.id must be a string that is not empty"),
        ('{"id": "a", "prompt": ["x"]}', "prompt must be text"),
        ('{"id": "a", "workdir": "w"}', "Task.workdir must be an absolute path"),
        ('{"id": "a", "files": {"../x": ""}}', r"Task.files: '../x' must not contain '\.\.'"),
        ('{"id": "a", "files": {"x": 1}}', r"files\['x'\] must be text or"),
        ('{"id": "a", "files": {"x": {"base64": "!"}}}', r"files\['x'\] is not valid base64"),
        ('{"id": "a", "files": {"x": {"base65": ""}}}', r"files\['x'\] must be text or"),
        ('{"id": "a", "files": []}', "files must be a table"),
        ('{"id": "a", "files": {"x": "\\ud800"}}', "half a surrogate pair"),
        ('{"id": "a", "grader": {}}', "grader.command is missing"),
        ('{"id": "a", "grader": {"comand": "x"}}', "grader.command is missing .is 'comand' meant"),
        ('{"id": "a", "grader": {"command": "x", "timout": 1}}', "'grader.timout': did you mean 'timeout'"),
        ('{"id": "a", "grader": {"command": [1]}}', "grader.command must be a string or a list of strings"),
        (
            '{"id": "a", "grader": {"command": "x", "timeout": "1"}}',
            "grader.timeout must be a whole number or",
        ),
        ('{"id": "a", "grader": {"command": "x", "timeout": -1}}', "Grader.timeout must be a number above 0"),
        ('{"id": "a", "grader": {"command": "x", "reward": "sum"}}', "Grader.reward must be"),
        ('{"id": "a", "grader": {"command": "x", "fresh": 1}}', "grader.fresh must be true or false"),
        ('{"id": "a", "grader": {"command": "x"}, "checks": "y"}', "checks stands in for a grader"),
        ('{"id": "a", "files": {"\\ud800": "x"}}', r"files\['\\ud800'\] holds half a surrogate pair"),
        ('{"id": "a", "solution": {"files": {"\\udfff": "x"}}}', r"solution.files\['\\udfff'\] holds half"),
        ('{"id": "a\\u0000"}', "Task.id must not contain NUL"),
        ('{"id": "a", "checks": "x = 1\\nassert ("}', "checks line 2 is no Python: '.' was never closed"),
        ('{"id": "a", "checks": "a\\u0000b"}', "checks is no Python: .*null byte"),
        ('{"id": "a", "checks": "' + "(" * 100_000 + '"}', "checks.* is no Python: "),
        ('{"id": "a", "checks": "' + "-" * 100_000 + '1"}', "checks.* is no Python: "),
        ('{"id": "a", "spec": {"memroy": 1}}', "unknown field 'spec.memroy': did you mean 'memory'"),
        ('{"id": "a", "spec": {"memory": "lots"}}', "spec.memory must be bytes"),
        ('{"id": "a", "spec": {"network": "all"}}', "spec.network must be one of"),
        ('{"id": "a", "limits": {"steps": true}}', "limits.steps must be a whole number"),
        ('{"id": "a", "limits": {"steps": 0}}', "Limits.steps must be a whole number above 0"),
        ('{"id": "a", "solution": {}}', "solution needs files or a command"),
        ('{"id": "a", "metadata": {"loaded_from": "x"}}', "metadata.loaded_from is set by the loader"),
        ('{"id": "a", "id": "b"}', "t.jsonl:1: field 'id' stands twice"),
        ('{"id": "a", "metadata": {"x": NaN}}', "NaN is not valid JSON"),
        ('["a"]', "a task must be a table"),
        ('{"id": "a"', "t.jsonl:1: not valid JSON at column"),
        ("[" * 100_000, "nested too deep"),
        ('{"id": "ok"}\n\n{"id": "ok"}', "t.jsonl:3: id 'ok' is already that of .*t.jsonl:1"),
        ("\n", "holds no task"),
        ("", "holds no task"),
    ],
)
def test_a_wrong_line_is_named(tmp_path: Path, text: str, said: str) -> None:
    path = tmp_path / "t.jsonl"
    path.write_text(text)
    with pytest.raises(ConfigError, match=said) as caught:
        load_tasks(path)
    assert "\n" not in str(caught.value)
    assert "t.jsonl" in str(caught.value)


def test_broken_files(tmp_path: Path) -> None:
    whole = gzip.compress(json.dumps(FULL).encode() * 1000)
    (tmp_path / "cut.jsonl.gz").write_bytes(whole[: len(whole) // 2])
    (tmp_path / "not.jsonl.gz").write_text("plain")
    (tmp_path / "bytes.jsonl").write_bytes(b'{"id": "a"}\n\xff\n')
    (tmp_path / "x.toml").write_text("id = \n")
    (tmp_path / "x.csv").write_text("id\n")
    for name, said in {
        "cut.jsonl.gz": "not a whole gzip file",
        "not.jsonl.gz": "not a whole gzip file",
        "bytes.jsonl": "bytes.jsonl:2: not valid UTF-8 at byte 0",
        "x.toml": "x.toml: not valid TOML",
        "x.csv": "task files end in",
    }.items():
        with pytest.raises(ConfigError, match=said):
            load_tasks(tmp_path / name)


def test_what_is_not_there_names_the_nearest(tmp_path: Path) -> None:
    (tmp_path / "tasks.jsonl").write_text("")
    (tmp_path / "empty").mkdir()
    for source, said in {
        "humanevl": "no such file or directory, and no shipped set: did you mean 'humaneval'",
        "dmeo": "did you mean 'demo'",
        str(tmp_path / "task.jsonl"): "did you mean '.*/tasks.jsonl'",
        str(tmp_path / "nowhere" / "x.jsonl"): "nowhere is no directory",
        "qqqqq": "shipped: demo, humaneval",
        str(tmp_path / "empty"): "no task directory",
    }.items():
        with pytest.raises(ConfigError, match=said):
            load_tasks(source)
    for limit in (0, -1, True, 1.5):
        with pytest.raises(ConfigError, match="limit must be a whole number above 0"):
            load_tasks("demo", limit=limit)  # type: ignore[arg-type]


def test_solutions_follow_their_source(tmp_path: Path) -> None:
    path = lines(tmp_path / "t.jsonl", FULL, {"id": "b"})
    first, second = load_tasks(path)
    assert solution_of(second) is None
    lines(path, {**FULL, "solution": {"command": "a new one"}})
    assert solution_of(first) == Solution(command="a new one")
    with pytest.raises(ConfigError, match="'b' is no longer in"):
        solution_of(second)
    with pytest.raises(ConfigError, match="was not loaded from a source"):
        solution_of(Task(id="mine"))


def test_without_a_system_python_ours_is_shown(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(host, "BASE_PATH", str(tmp_path))
    assert host.host_python_spec() == Spec(expose=("python",))
    assert load_tasks("demo", limit=1)[0].spec == Spec(expose=("python",))
    (tmp_path / "python3").touch(mode=0o755)
    assert host.host_python_spec() is None
    assert load_tasks("demo", limit=1)[0].spec is None
