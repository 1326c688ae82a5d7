"""What the YAML says, and what it says wrongly; the data set; versions."""

from __future__ import annotations

import importlib.metadata
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from rlsandbox_verl import versions
from rlsandbox_verl.settings import Settings, tasks_of

import rlsandbox as rls
from rlsandbox.errors import ConfigError, UnsupportedError


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"retrys": 1}, "did you mean retries"),
        ({"tools": ["shel"]}, "no tool called 'shel'"),
        ({"on_failure": "zero"}, "on_failure must be one of mask, skip_group"),
        ({"claim_timeout": 0}, "claim_timeout must be a number of seconds above 0, not 0"),
        ({"claim_timeout": "300"}, "claim_timeout must be a number of seconds above 0, not '300'"),
        ({"claim_timeout": float("nan")}, "claim_timeout must be a number of seconds"),
        ({"deadline": -1}, "deadline must be a number of seconds above 0"),
        ({"restarts": -1}, "restarts must be a whole number of at least 0"),
        ({"retries": 1.5}, "retries must be a whole number"),
        ({"give_up": 0}, "give_up must be a whole number of at least 1"),
        ({"tools": "shell"}, "tools must be a list, not 'shell'"),
        ({"tools": [["shell"]]}, "no tool called"),
        ({"tasks": 3}, "tasks must be text"),
        ({"pool": "x"}, "pool must be a table"),
        ({"pool": {"sise": 4}}, "pool has no option 'sise' .did you mean size"),
        ({"pool": {"profile": "big"}}, "it stands beside pool"),
        ({"pool": {"spec": {"memry": "1GiB"}}}, "pool.spec has no option 'memry' .did you mean memory"),
        ({"pool": {"spec": {"memory": "lots"}}}, "not 'lots'"),
    ],
)
def test_mistakes_are_one_error(options: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        Settings.of(options)


def test_a_heading_with_nothing_under_it_is_none() -> None:
    assert Settings.of({"pool": None}) == Settings()


def test_the_pool_is_made_from_it(tmp_path: Path) -> None:
    settings = Settings.of(
        {"pool": {"size": 2, "spec": {"memory": "64MiB"}, "config": False, "ledger": str(tmp_path)}}
    )
    with settings.make_pool("a-run") as pool:
        assert (pool.size, pool.run) == (2, "a-run")


def made() -> list[rls.Task]:
    return [rls.Task(id="a"), rls.Task(id="b")]


def test_tasks_come_from_a_file_or_a_function(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "x.jsonl").write_text(json.dumps({"id": "one"}) + "\n")
    assert list(tasks_of(str(tmp_path / "x.jsonl"))) == ["one"]
    (tmp_path / "of_mine.py").write_text(
        "import rlsandbox as rls\ndef made():\n    return [rls.Task(id='a')]\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    assert list(tasks_of("of_mine:made")) == ["a"]
    with pytest.raises(ConfigError, match="cannot be loaded"):
        tasks_of("of_mine:unmade")
    with pytest.raises(ConfigError):
        tasks_of(str(tmp_path / "none.jsonl"))


def test_a_row_says_where_its_task_is(tmp_path: Path) -> None:
    parquet = pytest.importorskip("pyarrow.parquet", reason="pyarrow is not installed")
    from rlsandbox_verl import to_parquet

    lines = [{"id": f"t{i}", "prompt": f"do {i}"} for i in range(3)]
    (tmp_path / "x.jsonl").write_text("\n".join(map(json.dumps, lines)))
    command = [sys.executable, "-m", "rlsandbox_verl.dataset", "x.jsonl", "y.parquet", "--system", "be good"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip().endswith("3 tasks -> y.parquet")
    rows = parquet.read_table(tmp_path / "y.parquet").to_pylist()
    assert [row["extra_info"]["index"] for row in rows] == [0, 1, 2]
    assert rows[1]["prompt"] == [
        {"role": "system", "content": "be good"},
        {"role": "user", "content": "do 1"},
    ]
    assert rows[1]["agent_name"] == "sandbox_agent"
    assert tasks_of(rows[1]["extra_info"]["task_source"])["t1"].prompt == "do 1"
    assert to_parquet(rls.load_tasks("demo"), tmp_path / "demo.parquet") == 24
    row = parquet.read_table(tmp_path / "demo.parquet").to_pylist()[0]
    assert row["extra_info"]["task_id"] in tasks_of(row["extra_info"]["task_source"])
    with pytest.raises(ConfigError, match="made in code"):
        to_parquet(made(), tmp_path / "z.parquet")
    assert to_parquet(made(), tmp_path / "z.parquet", source="of_mine:made") == 2


@pytest.mark.parametrize(
    ("found", "fits"), [("0.9.1", True), ("0.9.2", True), ("0.9.0", False), ("0.10.0", False)]
)
def test_versions(found: str, fits: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(versions, "version", lambda name: found)
    if fits:
        versions.require()
    else:
        with pytest.raises(UnsupportedError, match=r"supports verl>=0.9.1,<0.10, not verl " + found):
            versions.require()


def test_without_verl_the_error_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    def none(name: str) -> str:
        raise importlib.metadata.PackageNotFoundError(name)

    monkeypatch.setattr(versions, "version", none)
    with pytest.raises(UnsupportedError, match="pip install"):
        versions.require()


def test_importing_the_package_needs_no_framework() -> None:
    code = "import sys, rlsandbox_verl; assert not {'verl', 'ray', 'torch'} & set(sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=120)
