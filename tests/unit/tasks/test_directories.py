"""Task directories and the half of a Dockerfile that a task can carry."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path
from typing import Any

import pytest

from rlsandbox.errors import ConfigError
from rlsandbox.spec import Spec
from rlsandbox.tasks import Solution, load_tasks, solution_of
from rlsandbox.tasks.dockerfile import read_dockerfile
from rlsandbox.tasks.harbor import _VERIFY

from .conftest import put

TOML = """
version = "1.0"
[metadata]
difficulty = "easy"
created = 2026-01-31
[verifier]
timeout_sec = 120.0
[agent]
timeout_sec = 300.0
[environment]
build_timeout_sec = 600.0
cpus = 2
memory = "4G"
storage_mb = 512
allow_internet = true
"""
TEST = "#!/bin/bash\nset -e\ngrep -q hi /app/out && echo 1 > /logs/verifier/reward.txt\n"


def directory(path: Path, toml: str = TOML, **more: str) -> Path:
    files = {
        "instruction.md": "Say hi.\n",
        "task.toml": toml,
        "tests/test.sh": TEST,
        "tests/data/x.bin": "x",
        "solution/solve.sh": "#!/bin/bash\necho hi > /app/out\n",
        **{name.replace("__", "/"): text for name, text in more.items()},
    }
    put(path, {name: text for name, text in files.items() if text})
    return path


def test_a_directory(tmp_path: Path) -> None:
    dockerfile = (
        'FROM debian:12\nENV A=1 B="x y"\nWORKDIR /app\nCOPY data.txt ./\nRUN mkdir -p deep && touch deep/x\n'
    )
    path = directory(tmp_path / "say-hi", environment__Dockerfile=dockerfile)
    (path / "environment" / "data.txt").write_bytes(b"\xff")
    (task,) = load_tasks(path)
    assert task.id == "say-hi"
    assert task.prompt == "Say hi.\n"
    assert task.image == "debian:12"
    assert task.workdir == "/app"
    assert task.files == {"/app/data.txt": b"\xff"}
    assert task.setup is not None
    assert "sh -c 'mkdir -p deep && touch deep/x'" in task.setup
    assert task.spec == Spec(cpu=2, memory=4 << 30, disk="512MiB", env={"A": "1", "B": "x y"})
    assert task.limits.wall == 300
    assert task.grader is not None
    assert task.grader.timeout == 120
    assert task.grader.reward == "file:/logs/verifier/reward.txt"
    assert set(task.grader.files) == {"/tests/test.sh", "/tests/data/x.bin"}
    assert task.metadata["difficulty"] == "easy"
    assert task.metadata["created"] == "2026-01-31"
    assert task.metadata["not_applied"] == ["environment.build_timeout_sec", "environment.allow_internet"]
    assert solution_of(task) == Solution(
        files={"/solution/solve.sh": "#!/bin/bash\necho hi > /app/out\n"}, command="bash /solution/solve.sh"
    )


def test_many_and_names(tmp_path: Path) -> None:
    directory(tmp_path / "b")
    directory(tmp_path / "a", toml=TOML + '[task]\nname = "org/a"\n')
    (tmp_path / "README.md").write_text("not a task")
    (tmp_path / "notes").mkdir()
    assert [task.id for task in load_tasks(tmp_path)] == ["org/a", "b"]
    assert solution_of(load_tasks(tmp_path)[1]) is not None
    directory(tmp_path / "c", toml=TOML + '[task]\nname = "org/a"\n')
    with pytest.raises(ConfigError, match=r"/c: id 'org/a' is already that of .*/a"):
        load_tasks(tmp_path)


def test_the_hosts_base_and_an_image(tmp_path: Path) -> None:
    bare = load_tasks(directory(tmp_path / "bare", toml="# nothing\n"))[0]
    assert (bare.image, bare.workdir, bare.spec) == (None, "/app", None)
    named = directory(
        tmp_path / "named",
        toml='[environment]\ndocker_image = "reg/x:1"\n',
        environment__Dockerfile="FROM a AS b\nFROM c\n",  # not read: the image is named
    )
    assert load_tasks(named)[0].image == "reg/x:1"
    assert load_tasks(named)[0].workdir is None


def test_a_test_that_only_exits_is_graded_by_its_status(tmp_path: Path) -> None:
    path = directory(tmp_path / "t")
    (path / "tests" / "test.sh").write_text("exec grep -q hi /app/out\n")
    grader = load_tasks(path)[0].grader
    assert grader is not None
    assert grader.reward == "exit_code"


@pytest.mark.parametrize(
    ("name", "text", "said"),
    [
        ("instruction.md", None, "instruction.md is missing"),
        ("tests/test.sh", None, "tests/test.sh is missing"),
        ("task.toml", None, "task.toml is missing"),
        ("task.toml", "[agent\n", "task.toml: not valid TOML"),
        ("task.toml", "agent = 3\n", "agent must be a table"),
        ("task.toml", "[agent]\ntimeout_sec = 'x'\n", "agent.timeout_sec is of the wrong type"),
        ("task.toml", "[agent]\ntimeout_sec = -1\n", "Limits.wall must be a number above 0"),
        ("task.toml", "[environment]\nmemory = 'lots'\n", "environment.memory must be bytes"),
        (
            "task.toml",
            "[environment]\n[[environment.mcp_servers]]\nname = 'x'\n",
            "mcp_servers is not supported",
        ),
        ("task.toml", "[verifier]\nenv = {K = '${KEY}'}\n", "verifier.env with variables of the host"),
        ("environment/docker-compose.yaml", "x", "several containers are not supported"),
        ("tests/Dockerfile", "FROM x", "an image of the verifier's own"),
        (
            "environment/Dockerfile",
            "FROM a\nUSER joe\n",
            "Dockerfile:2: USER is not supported .*docker_image",
        ),
    ],
)
def test_what_a_task_cannot_carry(tmp_path: Path, name: str, text: str | None, said: str) -> None:
    path = directory(tmp_path / "t")
    if text is None:
        (path / name).unlink()
    else:
        put(path, {name: text})
    with pytest.raises(ConfigError, match=said) as caught:
        load_tasks(path)
    assert str(path) in str(caught.value)


def test_the_verifiers_variables_arrive_whatever_is_in_them(tmp_path: Path) -> None:
    values = {"A": "it's", "B": 'two "words"', "C_1": "a\\b\n; exit 0 #", "D": 3, "E": "é"}
    told = "".join(f"{key} = {json.dumps(value, ensure_ascii=False)}\n" for key, value in values.items())
    task = directory(tmp_path / "t", f"[verifier.env]\n{told}")
    grader = load_tasks(task)[0].grader
    assert grader is not None
    line = str(grader.command).partition("set -u\n")[0]
    shown = subprocess.run(
        ["sh", "-c", line + "".join(f'printf "%s|" "${key}"\n' for key in values)],
        capture_output=True,
        text=True,
    )
    assert shown.stdout.split("|")[:-1] == [str(value) for value in values.values()]
    directory(tmp_path / "u", '[verifier.env]\n"A B" = "1"\n')
    with pytest.raises(ConfigError, match="'A B' is no name of a variable"):
        load_tasks(tmp_path / "u")
    directory(tmp_path / "v", "[verifier]\ntimeout_sec = 0\n")
    with pytest.raises(ConfigError, match="timeout must be a number above 0"):
        load_tasks(tmp_path / "v")


def test_what_cannot_be_read_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    directory(tmp_path / "t")
    real = Path.read_text

    def forbidden(path: Path, *how: Any, **options: Any) -> str:
        if path.name == "test.sh":
            raise PermissionError(13, "Permission denied", str(path))
        return real(path, *how, **options)

    monkeypatch.setattr(Path, "read_text", forbidden)
    with pytest.raises(
        ConfigError, match=r"t': cannot be read: Permission denied \('.*/t/tests/test\.sh'\)$"
    ):
        load_tasks(tmp_path / "t")


def test_links_are_refused(tmp_path: Path) -> None:
    path = directory(tmp_path / "t")
    (path / "tests" / "link").symlink_to("/etc/passwd")
    with pytest.raises(ConfigError, match="is a symbolic link"):
        load_tasks(path)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("", "has no FROM"),
        ("RUN x\nFROM a", ":1: RUN before FROM"),
        ("ARG V=1\nFROM a:$V", "ARG before FROM"),
        ("FROM a:$V", "a build argument in"),
        ("FROM --platform=x a", ":1: FROM --platform=x is not supported"),
        ("FROM a AS b\nFROM c", ":2: a second FROM"),
        ("FROM a\nCOPY --from=b x y", "COPY --from=b is not supported"),
        ("FROM a\nCOPY *.txt /x/", "COPY with a pattern"),
        ("FROM a\nCOPY missing /x", "COPY missing: there is no such file"),
        ("FROM a\nCOPY ../up /x", "there is no such file"),
        ("FROM a\nRUN true\nCOPY here /x", ":3: COPY after RUN"),
        ("FROM a\nADD http://x /y", "ADD is not supported"),
        ("FROM a\nRUN <<EOF\ntrue\nEOF", "here-document"),
        (
            "FROM a\nRUN --mount=type=cache,target=/x true",
            "RUN --mount=type=cache,target=/x is not supported",
        ),
        ("FROM a\nENV PATH=/x:$PATH", r"\$PATH is not set by an earlier ENV"),
        ("# escape=`\nFROM a", "another escape character"),
        ("FROM a\nRUN [1]", "is no list of strings"),
        ('FROM a\nENV A="x', "No closing quotation"),
    ],
)
def test_dockerfiles_that_need_a_build(tmp_path: Path, text: str, said: str) -> None:
    (tmp_path / "up").write_text("")
    context = tmp_path / "context"
    put(context, {"Dockerfile": text, "here": ""})
    with pytest.raises(ConfigError, match=said):
        read_dockerfile(context / "Dockerfile")


def test_the_simple_half_of_a_dockerfile(tmp_path: Path) -> None:
    text = """\
# a comment
FROM debian:12
LABEL x=y
ENV HOME_OF=/srv \\
    OTHER=2
ENV OLD the whole rest
WORKDIR ${HOME_OF}/work
COPY dir sub/
COPY ["one file", "two", "/t/"]
run echo one \\
  # a comment inside
  && echo "$HOME"
RUN ["echo", "a b"]
WORKDIR deeper
RUN true
EXPOSE 80
CMD ["x"]
"""
    put(tmp_path, {"Dockerfile": text, "dir/a": "A", "dir/b/c": "C", "one file": "1", "two": "2"})
    recipe = read_dockerfile(tmp_path / "Dockerfile")
    assert recipe.env == {"HOME_OF": "/srv", "OTHER": "2", "OLD": "the whole rest"}
    assert recipe.files == {
        "/srv/work/sub/a": "A",
        "/srv/work/sub/b/c": "C",
        "/t/one file": "1",
        "/t/two": "2",
    }
    assert recipe.workdir == "/srv/work/deeper"
    assert recipe.setup is not None
    moved = recipe.setup.replace("/srv", f"{tmp_path}/srv")
    done = subprocess.run(
        ["sh", "-c", moved], capture_output=True, text=True, env={"HOME": "/h", "PATH": "/bin:/usr/bin"}
    )
    assert done.stdout == "one\n/h\na b\n", done.stderr
    assert (tmp_path / "srv/work/deeper").is_dir()


def test_setup_stops_at_the_first_failure(tmp_path: Path) -> None:
    put(tmp_path, {"Dockerfile": "FROM a\nRUN false; true\nRUN exit 3\nRUN echo never\n"})
    setup = read_dockerfile(tmp_path / "Dockerfile").setup
    assert setup is not None
    done = subprocess.run(["sh", "-c", setup], capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (3, "")


@pytest.mark.parametrize(
    ("script", "reward"),
    [
        ("echo 0.5 > /logs/verifier/reward.txt", "0.5"),
        ('printf \'{"reward": 0.25, "x": 1}\' > /logs/verifier/reward.json', "0.25"),
        ('printf \'{\\n "a": 2,\\n "reward" : 1\\n}\\n\' > /logs/verifier/reward.json', "1"),
        ("true", None),
    ],
)
def test_how_the_verifier_is_run(tmp_path: Path, script: str, reward: str | None) -> None:
    """The reward of this run of the tests is taken, never one that was lying there."""
    put(tmp_path, {"tests/test.sh": script.replace("/logs", f"{tmp_path}/logs") + "\nexit 7\n"})
    put(tmp_path, {"logs/verifier/reward.txt": "1.0", "logs/verifier/reward.json": '{"reward": 1}'})
    verify = _VERIFY.replace("/logs", f"{tmp_path}/logs").replace("/tests", f"{tmp_path}/tests")
    assert subprocess.run(["sh", "-c", verify]).returncode == 7
    path = tmp_path / "logs/verifier/reward.txt"
    assert (path.read_text().strip() if path.exists() else None) == reward
