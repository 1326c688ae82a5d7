"""Missing by chance, or missing on hard tasks: real training, keepers killed, the report tells them apart."""

from __future__ import annotations

import itertools
import json
import os
import signal
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("trl", reason="the extra trl is not installed")

from rlsandbox_trl import SandboxEnvironment, SandboxTraining

from tests.support.keepers import keeper_of

NAPS = itertools.count(77_000)
STEPS, BATCH = 10, 16


class Hit(SandboxEnvironment):
    """Its tool loses the sandbox of every so many-th call of a task: of any, or of hard ones only."""

    every, hard_only = 10, False
    calls: dict[str, Any] = {}  # noqa: RUF012

    def write(self, path: str, content: str) -> str:
        """Write.

        Args:
            path: The file.
            content: The text.

        Returns:
            str: A confirmation.
        """
        hard = self._task.metadata["difficulty"] == "hard"
        if (hard or not self.hard_only) and next(self.calls[self._task.id]) % self.every == self.every - 1:
            nap = f"sleep {next(NAPS)}"
            self._sandbox.run(f"{nap} >/dev/null 2>&1 & until grep -q sleep /proc/$!/comm; do :; done")
            os.kill(keeper_of(nap), signal.SIGKILL)
        self._sandbox.write_file(path, content)
        return "written"

    write_file = None  # type: ignore[assignment]


@pytest.mark.parametrize("hard_only", [False, True])
def test_a_tenth_is_missing_by_chance_or_on_hard_tasks(
    example: Any, make_trainer: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, hard_only: bool
) -> None:
    plain = example.Bytes.parse_response

    def parse(self: Any, ids: Any, **kwargs: Any) -> Any:
        message = plain(self, ids, **kwargs)
        message["tool_calls"][0]["function"]["name"] = "write"
        return message

    monkeypatch.setattr(example.Bytes, "parse_response", parse)
    tasks = [
        replace(task, metadata={"difficulty": "hard" if n % 2 else "easy"})
        for n, task in enumerate(example.tasks(BATCH // 2))
    ]
    values = {
        "every": 5 if hard_only else 10,
        "hard_only": hard_only,
        "calls": {task.id: itertools.count() for task in tasks},
    }
    kind = type("Hit", (Hit,), {"__doc__": Hit.__doc__, **values})
    run = "hard" if hard_only else "chance"
    sandboxes = SandboxTraining(tasks, tools=[], environment=kind, size=BATCH, retries=0, run=run)
    trainer = make_trainer(
        sandboxes, max_steps=STEPS, per_device_train_batch_size=BATCH, num_generations=2, learning_rate=0.0
    )
    trainer.train()
    done = subprocess.run(
        [sys.executable, "-m", "rlsandbox", "ledger", "report", run, "--bias", "--json"],
        capture_output=True, text=True, check=True,
    )  # fmt: skip
    bias = json.loads(done.stdout)["bias"]
    assert bias["requested"] == STEPS * BATCH and bias["missing"] == STEPS * BATCH // 10
    low, high = bias["reward_bounds"]
    assert high - low == pytest.approx(0.1)
    difficulty = next(factor for factor in bias["factors"] if factor["name"] == "difficulty")
    levels = {level["name"]: level["missing"] for level in difficulty["levels"]}
    if hard_only:
        assert difficulty["p"] < 0.01 and difficulty["direction"] > 0
        assert sorted(levels.values()) == [0, STEPS * BATCH // 10]
        assert "difficulty" in bias["goes_with"] and "difficulty" in bias["verdict"]
    else:
        assert sorted(levels.values()) == [STEPS * BATCH // 20] * 2
        assert bias["goes_with"] == []
