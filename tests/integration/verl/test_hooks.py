"""Around verl's own functions: the log, the data loader, the plugin."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("verl", reason="verl is not installed")
from torchdata.stateful_dataloader import StatefulDataLoader


def trainer(size: int, batch: int, workers: int = 0) -> Any:
    """What the look-ahead touches of verl's trainer, with a real data loader."""
    loader = StatefulDataLoader(range(12), batch_size=size, num_workers=workers)
    made = SimpleNamespace(train_dataloader=loader, global_steps=1, total_training_steps=9, it=iter(loader))
    made.config = SimpleNamespace(data=SimpleNamespace(train_batch_size=batch))
    return made


def fetch(trainer: Any) -> list[int]:
    """As verl does it: over and over."""
    try:
        return [int(i) for i in next(trainer.it)]
    except StopIteration:
        trainer.it = iter(trainer.train_dataloader)
        return [int(i) for i in next(trainer.it)]


@pytest.mark.parametrize(("size", "batch"), [(4, 4), (1, 4), (2, 4)])
def test_looking_ahead_gives_the_same_batches_and_the_same_checkpoints(size: int, batch: int) -> None:
    from rlsandbox_verl.hooks import Ahead

    plain, peeked = trainer(size, batch), trainer(size, batch)
    ahead = Ahead(peeked)
    for _ in range(30 // size):
        assert ahead.fetch(fetch) == fetch(plain)
        assert sum(len(chunk) for chunk, _ in ahead.held) == batch
        state = peeked.train_dataloader.state_dict()
        again = StatefulDataLoader(range(12), batch_size=size)
        again.load_state_dict(state)
        following = next(iter(again), None)
        wanted = StatefulDataLoader(range(12), batch_size=size)
        wanted.load_state_dict(plain.train_dataloader.state_dict())
        expected = next(iter(wanted), None)
        assert (following is None) == (expected is None)
        if expected is not None and following is not None:
            assert following.tolist() == expected.tolist()


def test_the_last_step_reads_no_further() -> None:
    from rlsandbox_verl.hooks import Ahead

    last = trainer(4, 4)
    ahead = Ahead(last)
    last.global_steps = 9
    assert ahead.fetch(fetch) == [0, 1, 2, 3]
    assert not ahead.held


def test_the_log_is_verls_own_without_a_job(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from rlsandbox_verl import hooks
    from verl.utils.tracking import Tracking

    monkeypatch.setattr(hooks, "owners", list)
    monkeypatch.setenv("VERL_FILE_LOGGER_PATH", str(tmp_path / "log.jsonl"))
    hooks.track()
    hooks.track()
    tracking = Tracking("p", "e", default_backend=["file"])
    tracking.log(data={"a": 1.0}, step=3)
    tracking.finish()
    assert json.loads((tmp_path / "log.jsonl").read_text()) == {"step": 3, "data": {"a": 1.0}}


def test_the_plugin_registers_the_loop_by_name() -> None:
    code = (
        "import rlsandbox_verl.plugin\n"
        "from verl.experimental.agent_loop.agent_loop import _agent_loop_registry as known\n"
        "from verl.utils.tracking import Tracking\n"
        "assert known['sandbox_agent'] == {'_target_': 'rlsandbox_verl.loop.SandboxAgentLoop'}, known\n"
        "assert Tracking.log._rlsandbox\n"
    )
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", code], capture_output=True, text=True, timeout=300,
        env={**os.environ, "VERL_USE_EXTERNAL_PLUGINS": "none"},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr


def test_importing_verl_loads_the_plugin() -> None:
    from importlib.metadata import entry_points

    if not [e for e in entry_points(group="verl.plugins") if e.value == "rlsandbox_verl.plugin"]:
        pytest.skip("the package itself is not installed, so it has no entry points")
    code = (
        "import verl\n"
        "from verl.experimental.agent_loop.agent_loop import _agent_loop_registry as known\n"
        "assert 'sandbox_agent' in known, known\n"
    )
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", code], capture_output=True, text=True, timeout=300,
        env={k: v for k, v in os.environ.items() if k != "VERL_USE_EXTERNAL_PLUGINS"},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
