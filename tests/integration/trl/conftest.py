"""The real GRPOTrainer with a tiny model, and real local sandboxes."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

ROOT = Path(__file__).parents[3]


@pytest.fixture(scope="session")
def example() -> ModuleType:
    """The example's model, tokenizer and tasks."""
    pytest.importorskip("trl", reason="the extra trl is not installed")
    spec = importlib.util.spec_from_file_location("trl_grpo_example", ROOT / "examples" / "trl_grpo.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from rlsandbox import _paths

    monkeypatch.setenv("RLSANDBOX_CACHE", str(_paths.cache()))
    monkeypatch.setenv("RLSANDBOX_HOME", str(tmp_path / "home"))
    monkeypatch.setenv("TRL_EXPERIMENTAL_SILENCE", "1")


@pytest.fixture
def make_trainer(example: ModuleType, tmp_path: Path) -> Any:
    from trl import GRPOConfig, GRPOTrainer

    def make(sandboxes: Any, *, attach: bool = True, **options: Any) -> Any:
        words = example.tokenizer()
        functions = options.pop("reward_funcs", None)
        settings = {
            "max_steps": 2, "per_device_train_batch_size": 4, "num_generations": 2, "logging_steps": 1,
            "max_completion_length": 12, "max_tool_calling_iterations": 1, "save_strategy": "no",
            "report_to": [], "use_cpu": True, "bf16": False, "disable_tqdm": True, "seed": 1, **options,
        }  # fmt: skip
        trainer = GRPOTrainer(
            model=example.model(words),
            processing_class=words,
            train_dataset=sandboxes.dataset,
            eval_dataset=sandboxes.dataset if options.get("eval_strategy") else None,
            environment_factory=sandboxes,
            reward_funcs=functions,
            args=GRPOConfig(output_dir=str(tmp_path / "out"), **settings),
        )
        if attach:
            sandboxes.attach(trainer)
        return trainer

    return make
