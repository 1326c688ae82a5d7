"""Commands that need no sandbox."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from rlsandbox.cli.common import pool_arguments, with_image
from rlsandbox.cli.policy import find_policy
from rlsandbox.cli.reap import parse_duration
from rlsandbox.errors import ConfigError
from rlsandbox.spec import Spec
from rlsandbox.task import Task
from rlsandbox.tasks import policies

from .conftest import Cli


def test_config_show_tells_sources(cli: Cli, monkeypatch: pytest.MonkeyPatch) -> None:
    Path("rlsandbox.toml").write_text('[pool]\nsize = 4\nblock = ["git"]\n[profiles.eval.pool]\nsize = 9\n')
    monkeypatch.setenv("RLSANDBOX_POOL_SPEC_ENV", "A=1")
    done = cli("config", "show", "--json", "--profile", "eval")
    told = {row["key"]: (row["value"], row["source"]) for row in done.json["settings"]}
    assert told["pool.size"] == (9, "rlsandbox.toml [profiles.eval]")
    assert told["pool.block"] == (["git"], "rlsandbox.toml")
    assert told["pool.spec.env"] == ({"A": "1"}, "RLSANDBOX_POOL_SPEC_ENV")
    assert told["pool.write_rate"] == (None, "default")
    assert done.json["files"] == ["rlsandbox.toml"]
    table = cli("config", "show")
    for word in ("pool.size", "rlsandbox.toml", "A=1", "RLSANDBOX_POOL_SPEC_ENV"):
        assert word in table.out
    Path("rlsandbox.toml").write_text("[pool]\nsise = 4\n")
    wrong = cli("config", "show")
    assert (wrong.status, wrong.err.count("\n")) == (2, 1)
    assert "did you mean 'size'" in wrong.err


@pytest.mark.parametrize(
    ("table", "said"),
    [
        ('name = "locl"', "unknown backend 'locl': did you mean 'local'?"),
        ("uper = 1", "rlsandbox.toml: backend 'local' has no option 'uper': did you mean 'upper'?"),
    ],
)
def test_config_show_knows_the_options_of_the_backend(cli: Cli, table: str, said: str) -> None:
    Path("rlsandbox.toml").write_text(f"[pool.backend]\n{table}\n")
    wrong = cli("config", "show")
    assert (wrong.status, wrong.err) == (2, f"rlsandbox: {said}\n")


def test_config_show_where_the_backend_is_not_installed(cli: Cli, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "rlsandbox.backends.kubernetes", None)
    Path("rlsandbox.toml").write_text('[pool.backend]\nname = "kubernetes"\nmode = "overlay"\n')
    told = cli("config", "show")
    assert told.status == 0 and "overlay" in told.out
    assert told.err.startswith("the options of backend 'kubernetes' are not checked: ")


def test_pool_arguments_come_from_options_over_the_file(cli: Cli) -> None:
    Path("rlsandbox.toml").write_text("[pool]\nmax_size = 3\n")
    arguments, config = pool_arguments({"memory": "1GiB", "size": None, "block": ("git",)}, at_most=10)
    assert arguments["size"] == 3, "no larger than the configured ceiling"
    assert arguments["spec"] == Spec(memory="1GiB")
    assert config.sources["pool.block"] == "argument"
    assert pool_arguments({"size": 2}, at_most=10)[0]["size"] == 2
    Path("rlsandbox.toml").unlink()
    assert pool_arguments({}, at_most=3)[0]["size"] == 3
    assert 4 <= pool_arguments({}, at_most=300)[0]["size"] <= 16


def test_an_image_for_all(cli: Cli) -> None:
    tasks = [Task(id="a", image="x"), Task(id="b", spec=Spec(image="y", memory="1GiB"))]
    assert with_image(tasks, None) == tasks
    for image, wanted in (("none", None), ("z", "z")):
        base = pool_arguments({"image": image})[1].spec
        a, b = with_image(tasks, image)
        assert a.spec_over(base).image == wanted
        assert b.spec_over(base) == Spec(image=wanted, memory="1GiB")


def test_policies_by_name(cli: Cli) -> None:
    Path("mine.py").write_text(
        "import functools\n"
        "def fn(s, t): return 1\n"
        "async def co(s, t): return 1\n"
        "class Agent:\n    def __call__(self, s, t): ...\n    @staticmethod\n    def act(s, t): ...\n"
        "agent = Agent()\nnumber = 3\n"
    )
    Path("breaks.py").write_text("import no_such_package_here\n")
    Path("raises.py").write_text("raise RuntimeError('at import')\n")
    Path("exits.py").write_text("raise SystemExit(3)\n")
    assert find_policy("canonical") is policies.canonical
    for name in ("mine:fn", "mine:co", "mine:agent", "mine:Agent.act"):
        assert callable(find_policy(name))
    for name, said in {
        "canonica": "did you mean 'canonical'",
        "mine:fm": "did you mean 'fn'",
        "mine:": "mine has no ''",
        "mine:Agent.bct": "did you mean 'act'",
        "mine:number": "is not callable but int",
        "no_such_module_here:fn": "there is no module 'no_such_module_here'",
        "mine.deeper:fn": "there is no module 'mine.deeper'|'mine' is not a package",
        "breaks:fn": "importing breaks failed: No module named 'no_such_package_here'",
        "raises:fn": "importing raises failed: RuntimeError: at import",
        "exits:fn": "importing exits failed: SystemExit: 3",
    }.items():
        with pytest.raises(ConfigError, match=said):
            find_policy(name)


def test_durations() -> None:
    assert [parse_duration(text, "x") for text in ("90", "90s", "30m", "1h", "1.5d")] == [
        90,
        90,
        1800,
        3600,
        129600,
    ]
    with pytest.raises(ConfigError, match="x must be a time such as"):
        parse_duration("1 week", "x")


def test_reap_finds_what_a_dead_run_left(cli: Cli) -> None:
    assert "nothing is left" in cli("reap").out
    script = "from rlsandbox.backends.local.state import RunState; import os; RunState.begin(); os._exit(9)"
    subprocess.run([sys.executable, "-c", script], timeout=60)
    dry = cli("reap", "--dry-run", "--json")
    assert len(dry.json["found"]) == 1
    assert dry.json["removed"] == []
    assert cli("reap", "--older-than", "1h", "--yes", "--json").json["removed"] == []
    done = cli("reap", "--yes", "--json")
    assert done.json["removed"] == [dry.json["found"][0]["run"]]
    assert cli("reap", "--json").json["found"] == []


def test_keeper_build(cli: Cli, tmp_path: Path) -> None:
    first = cli("keeper", "build", "--json")
    assert first.status == 0, first.err
    assert Path(first.json["path"]).stat().st_size == first.json["bytes"] > 10_000
    assert cli("keeper", "build").out.startswith(first.json["path"])


def test_simulate(cli: Cli) -> None:
    argv = ("simulate", "--images", "20", "--think", "5", "--set", "fault_provision=0.1", "--seed", "3")
    first, again = cli(*argv, "--json"), cli(*argv, "--json")
    assert (first.status, first.err) == (0, "")
    assert first.json["completed"] == first.json["requested"] == 80
    assert first.json["missing"] == 0
    assert first.json["digest"] == again.json["digest"]
    assert cli(*argv[:-1], "4", "--json").json["digest"] != first.json["digest"]
    table = cli(*argv)
    assert "80 completed" in table.out
    assert table.err == ""


def test_the_entry_point_stays_a_function(cli: Cli) -> None:
    assert cli("--version").status == 0
    from rlsandbox.cli import main

    assert callable(main), "a module of that name, once imported, would take its place"
