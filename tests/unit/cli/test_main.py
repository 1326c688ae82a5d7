"""The group, the exit statuses, and one line for every error."""

from __future__ import annotations

import importlib.machinery
import json
import logging
import os
import signal
import subprocess
import sys
import time
import types
from collections.abc import Iterator
from pathlib import Path

import click
import pytest

import rlsandbox
from rlsandbox import cli as cli_package
from rlsandbox.cli.root import group
from rlsandbox.errors import ClaimTimeoutError, ConfigError, ImageError, SandboxError, UnsupportedError

from .conftest import Cli


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch) -> types.ModuleType:
    """A command ``fake`` whose body is ``module.body``."""
    module = types.ModuleType("rlsandbox_fake_command")

    @click.command()
    @click.option("--json", "as_json", is_flag=True)
    def command(as_json: bool) -> object:
        return module.body()  # type: ignore[no-any-return]

    module.command = command  # type: ignore[attr-defined]
    module.__spec__ = importlib.machinery.ModuleSpec(module.__name__, None)
    monkeypatch.setitem(sys.modules, module.__name__, module)
    monkeypatch.setitem(cli_package.COMMANDS, "fake", (module.__name__, "For a test."))
    return module


def test_help_lists_what_is_there_without_loading_it(cli: Cli) -> None:
    done = cli("--help")
    assert done.status == 0
    for name in ("quickstart", "run", "config", "keeper", "reap"):
        assert f"  {name} " in done.out
    script = (
        "import sys, rlsandbox.cli as c; c.main(['--help']);"
        "assert not {'rlsandbox.pool', 'rich', 'gymnasium', 'numpy'} & set(sys.modules), sorted(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", script], check=True, capture_output=True, timeout=60)


def test_a_command_that_is_not_installed_is_left_out(cli: Cli, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(cli_package.COMMANDS, "ghost", ("rlsandbox.no_such.module", "Not there."))
    assert "ghost" not in cli("--help").out
    assert "unknown command 'ghost'" in cli("ghost").err


@pytest.mark.parametrize(
    ("argv", "said"),
    [
        (["runn"], "unknown command 'runn': did you mean 'run'?"),
        (["run", "--sise", "3"], "run: No such option"),
        (["run", "--size"], "Option '--size' requires an argument"),
        (["run", "--size", "four"], "'four' is not a valid integer"),
        (["run", "--tasks", "nope.jsonl"], "no such file or directory"),
        (["run", "--tasks", "humanevel"], "did you mean 'humaneval'"),
        (["run", "--policy", "cannonical"], "did you mean 'canonical'"),
        (["run", "--size", "-1"], "size must be a whole number of at least 1, not -1"),
        (["run", "--limit", "0"], "limit must be a whole number above 0"),
        (["run", "--backend", "locl"], "unknown backend 'locl': did you mean 'local'?"),
        (["run", "--plot", "nowhere/x.png"], "--plot: there is no directory"),
        (["run", "--plot", "."], "--plot: . is a directory"),
        (["run", "--require-coverage", "2"], "--require-coverage must be a share from 0 to 1"),
        (["run", "--require-coverage", "nan"], "--require-coverage must be a share from 0 to 1, not nan"),
        (["run", "--require-reward", "nan"], "--require-reward must be a number, not nan"),
        (["run", "--tasks", ""], "not an empty one"),
        (["run", "--resume"], "--resume needs --run NAME"),
        (["run", "--config", "missing.toml"], "missing.toml, which is not a file"),
        (["run", "--profile", "eval"], "unknown profile 'eval'"),
        (["run", "--memory", "lots"], "Spec.memory must be bytes"),
        (["run", "--block", "gti"], "no plugin is called 'gti'"),
        (["run", "--group-size", "1000000"], "24 tasks in groups of 1,000,000 are 24,000,000 rollouts"),
        (["run", "--group-size", "0"], "group_size must be a whole number of at least 1"),
        (["run", "--run", "a/b"], "run"),
        (["keeper", "build", "--arch", "vax"], "unknown architecture 'vax'"),
        (["keeper", "build", "--out", "nowhere/keeper"], "--out: there is no directory"),
        (["reap", "--older-than", "soon"], "--older-than must be a time such as"),
        (["reap", "--backend", "moon"], "reap does not know backend 'moon'"),
        (["simulate", "--set", "nods=3"], "did you mean 'nodes'"),
        (["simulate", "--set", "nodes=x"], "must be NAME=NUMBER"),
        (["simulate", "--images", "0"], "0 is not in the range"),
        (["simulate", "--size", "9", "--max-size", "3"], "--size 9 is above --max-size 3"),
        (["simulate", "--think", "0"], "--think must be a number above 0"),
        (["config", "show", "--profile", "x"], "unknown profile 'x'"),
    ],
)
def test_bad_input_is_one_line_and_status_2(cli: Cli, argv: list[str], said: str) -> None:
    done = cli(*argv)
    assert done.status == 2, done
    assert said in done.err
    assert done.err.count("\n") == 1, done.err
    assert done.err.startswith("rlsandbox")
    assert done.out == ""
    assert not list(Path.cwd().iterdir()), "something half-made was left behind"


NO_NAME = "x" * 5000
"""What no file can be called: the system's answer is neither "there" nor "not there", as without permission."""


@pytest.mark.parametrize(
    "argv",
    [
        ["run", "--tasks", NO_NAME],
        ["run", "--tasks", f"{NO_NAME}.jsonl"],
        ["run", "--tasks", f"/{NO_NAME}/tasks"],
        ["run", "--tasks", "a\0b"],
        ["run", "--plot", f"{NO_NAME}.png"],
        ["run", "--ledger", NO_NAME],
        ["run", "--ledger", f"{NO_NAME}.db"],
        ["run", "--config", NO_NAME],
        ["run", "--image", NO_NAME],
        ["run", "--image", f"/{NO_NAME}.tar"],
        ["ledger", "show", NO_NAME],
        ["ledger", "show", "--ledger", NO_NAME],
        ["ledger", "report", f"{NO_NAME}.db"],
        ["ledger", "report", f"{NO_NAME}.jsonl"],
        ["ledger", "export", "-o", NO_NAME],
        ["bench", "local", "--output", NO_NAME],
        ["bench", "ttfc", "--backend", "simulated", "--html", NO_NAME],
        ["keeper", "build", "--out", NO_NAME],
        ["config", "show", "--config", NO_NAME],
    ],
    ids=lambda argv: " ".join(word[:12] for word in argv),
)
def test_names_that_no_file_can_have_are_one_line_too(cli: Cli, argv: list[str]) -> None:
    if argv[-1].endswith(".png"):
        pytest.importorskip("matplotlib")
    elif argv[:2] == ["ledger", "export"]:
        assert cli("ledger", "show").status == 0
    done = cli(*argv)
    assert done.status == 2, done
    assert "internal error" not in done.err
    assert done.err.count("\n") == 1, done.err
    assert len(done.err) < 12_000
    assert not list(Path.cwd().iterdir()), "something half-made was left behind"


@pytest.mark.parametrize(
    ("error", "status"),
    [
        (ConfigError("wrong", hint="right"), 2),
        (UnsupportedError("cannot"), 2),
        (ClaimTimeoutError("late"), 1),
        (ImageError("broken"), 2),
        (SandboxError("ledger", phase="config"), 2),
        (SandboxError("two\nlines"), 1),
        (RuntimeError("a bug"), 1),
        (KeyboardInterrupt(), 130),
        (click.Abort(), 1),
    ],
)
def test_errors_become_statuses(cli: Cli, fake: types.ModuleType, error: BaseException, status: int) -> None:
    def body() -> None:
        raise error

    fake.body = body  # type: ignore[attr-defined]
    done = cli("fake")
    assert done.status == status
    assert done.err.strip().count("\n") == 0
    assert "Traceback" not in done.err
    for line in (getattr(error, "hint", ""), *str(getattr(error, "message", "")).split("\n")):
        assert line in done.err
    debugged = cli("--debug", "fake")
    assert debugged.status == status
    assert ("Traceback" in debugged.err) == (status != 130)


def test_json_tells_errors_too(cli: Cli, fake: types.ModuleType) -> None:
    def body() -> None:
        raise ImageError("cut off", hint="pull it again")

    fake.body = body  # type: ignore[attr-defined]
    done = cli("fake", "--json")
    assert done.json["exit_status"] == 2
    assert done.json["error"]["kind"] == "image"
    assert done.json["error"]["hint"] == "pull it again"
    assert cli("run", "--json", "--size", "0").json["error"]["type"] == "ConfigError"
    assert cli("run", "--json", "--foo").json["error"]["kind"] == "config"


def test_return_values_are_statuses(cli: Cli, fake: types.ModuleType) -> None:
    for value, status in ((None, 0), (0, 0), (3, 3), ("text", 0)):
        fake.body = lambda value=value: value  # type: ignore[attr-defined]
        assert cli("fake").status == status


def test_verbose_shows_log_lines(cli: Cli, fake: types.ModuleType) -> None:
    fake.body = lambda: logging.getLogger("rlsandbox.x").info("a step")  # type: ignore[attr-defined]
    assert "a step" not in cli("fake").err
    assert "INFO rlsandbox.x: a step" in cli("-v", "fake").err
    assert "a step" not in cli("fake").err


def test_warnings_are_told_unless_the_input_was_wrong(cli: Cli, fake: types.ModuleType) -> None:
    def body(error: Exception | None) -> None:
        logging.getLogger("rlsandbox.x").warning("tried")
        if error is not None:
            raise error

    fake.body = lambda: body(None)  # type: ignore[attr-defined]
    assert cli("fake").err == "WARNING rlsandbox.x: tried\n"
    fake.body = lambda: body(ClaimTimeoutError("late"))  # type: ignore[attr-defined]
    assert "tried" in cli("fake").err
    fake.body = lambda: body(ConfigError("wrong"))  # type: ignore[attr-defined]
    assert cli("fake").err == "rlsandbox: wrong\n"
    fake.body = lambda: [logging.getLogger("rlsandbox.x").warning("%d", i // 2) for i in range(60)]  # type: ignore[attr-defined]
    lines = cli("fake").err.splitlines()
    assert lines[:20] == [f"WARNING rlsandbox.x: {i}" for i in range(20)]
    assert lines[20:] == ["... and 20 more warnings; rlsandbox -v COMMAND shows all"]


def test_version_and_module(cli: Cli) -> None:
    assert cli("keeper").status in (0, 2)
    done = subprocess.run(
        [sys.executable, "-m", "rlsandbox", "config", "show", "--json"],
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode == 0, done.stderr
    assert rlsandbox.__name__ in done.stdout or "settings" in done.stdout


def test_a_closed_pipe_is_no_traceback(tmp_path: Path) -> None:
    read, write = os.pipe()
    os.close(read)
    done = subprocess.run(
        [sys.executable, "-m", "rlsandbox", "config", "show"],
        stdout=write, stderr=subprocess.PIPE, text=True, timeout=60,
        env={**os.environ, "HOME": str(tmp_path)},
    )  # fmt: skip
    os.close(write)
    assert "Traceback" not in done.stderr
    assert "Exception ignored" not in done.stderr


def test_ctrl_c_is_130(tmp_path: Path) -> None:
    """A real SIGINT to a real process, while the command works."""
    (tmp_path / "slow.py").write_text(
        "print('ready', flush=True)\nimport time\ntime.sleep(60)\ndef fn(s, t): ...\n"
    )
    child = subprocess.Popen(
        [sys.executable, "-m", "rlsandbox", "run", "--policy", "slow:fn"],
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
    )  # fmt: skip
    assert child.stdout is not None
    assert child.stdout.readline() == "ready\n"
    began = time.monotonic()
    child.send_signal(signal.SIGINT)
    _, err = child.communicate(timeout=60)
    assert child.returncode == 130, err
    assert "Traceback" not in err
    assert time.monotonic() - began < 30


@pytest.mark.parametrize(
    ("where", "status", "said"),
    [
        (">&-", 0, ""),
        ("<&-", 0, ""),
        ("2>&-", 0, ""),
        ("<&- >&- 2>&-", 0, ""),
        (">/dev/full", 1, "rlsandbox: the output cannot be written: No space left on device\n"),
    ],
)
def test_closed_and_full_outputs(where: str, status: int, said: str) -> None:
    script = f'exec "$0" -m rlsandbox config show {where}'
    done = subprocess.run(
        ["sh", "-c", script, sys.executable], stderr=subprocess.PIPE, timeout=60, check=False
    )
    assert (done.returncode, done.stderr.decode()) == (status, said)


def leaves(
    command: click.Command, path: tuple[str, ...] = ()
) -> Iterator[tuple[tuple[str, ...], click.Command]]:
    if not isinstance(command, click.Group):
        yield path, command
        return
    ctx = click.Context(command)
    for name in command.list_commands(ctx):
        inner = command.get_command(ctx, name)
        assert inner is not None
        yield from leaves(inner, (*path, name))


def test_every_command_has_json() -> None:
    found = dict(leaves(group))
    assert len(found) >= 18
    without = [
        " ".join(path) for path, leaf in found.items() if "as_json" not in {p.name for p in leaf.params}
    ]
    assert without == []


@pytest.mark.parametrize(
    "argv",
    [
        ("config", "show"), ("ledger", "show"), ("ledger", "gc"), ("reap", "--dry-run"), ("template", "show"),
        ("template", "rbac"), ("template", "rbac", "--closed"), ("template", "reap", "--image", "own:1"),
        ("simulate", "--images", "4"), ("ledger", "report"), ("ledger", "export", "nothing"), ("plan",),
        ("template", "check", "nothing"), ("run", "--tasks", "nothing"), ("keeper", "build", "--arch", "pdp11"),
    ],
    ids=" ".join,
)  # fmt: skip
def test_json_is_all_there_is_on_stdout(cli: Cli, argv: tuple[str, ...]) -> None:
    if argv[0] == "template":
        pytest.importorskip("kubernetes")
    done = cli(*argv, "--json")
    told = json.loads(done.out)
    assert done.status in (0, 2)
    assert ("error" in told) == (done.status == 2)
    assert done.err.count("\n") == (done.status == 2)
