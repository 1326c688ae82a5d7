"""What the wrapping of rlsandbox_trl costs: the bare trainer and the attached one by turns, in one run.

    python examples/trl_overhead.py [--rounds 12]

All have the same tiny model, the same prompts and a tool that takes no time. ``wrapped`` has everything that
is put around the trainer (parallel tools, the callback and its numbers, broken rollouts left out), and no
sandbox: what that adds is the overhead. ``sandboxes`` claims one for each rollout, resets and verifies it, on
the same CPUs. The trainers take turns and write the same completions; each step is compared with the same
step of the bare trainer.
"""

from __future__ import annotations

import argparse
import os
import statistics
import tempfile
import time
from typing import Any

import trl_grpo as example
from rlsandbox_trl import (
    SandboxCallback,
    SandboxEnvironment,
    SandboxTraining,
    leave_out_missing,
    parallel_tools,
)
from transformers import PrinterCallback, TrainerCallback
from trl import GRPOConfig, GRPOTrainer

import rlsandbox as rls


class Plain:
    """An environment without a sandbox; its tool does nothing."""

    def reset(self, **row: Any) -> None:
        self.written = ""

    def write_file(self, path: str, content: str) -> str:
        """Write.

        Args:
            path: The file.
            content: What is to be in it.

        Returns:
            str: A confirmation.
        """
        self.written = content
        return "written"

    def get_reward(self) -> float:
        return sum(c.isalpha() for c in self.written) / max(1, len(self.written))


class Idle(SandboxEnvironment):
    """The same in a sandbox that it claims and gives back, and does not use."""

    write_file = Plain.write_file
    _written = ""

    def get_reward(self) -> float:
        return Plain.get_reward(self)  # type: ignore[arg-type]


class Times(TrainerCallback):  # type: ignore[misc]
    """Seconds of each step; the first of a training warms up."""

    def __init__(self) -> None:
        self.steps: list[float] = []

    def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.began = time.perf_counter()

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if state.global_step > 1:
            self.steps.append(time.perf_counter() - self.began)


def trainer_of(factory: Any, dataset: Any, place: str, steps: int, batch: int) -> tuple[Any, Times]:
    words = example.tokenizer()
    trainer = GRPOTrainer(
        model=example.model(words), processing_class=words, train_dataset=dataset,
        environment_factory=factory,
        args=GRPOConfig(
            output_dir=place, max_steps=steps, per_device_train_batch_size=batch, num_generations=batch // 2,
            max_completion_length=64, max_tool_calling_iterations=2, learning_rate=0.0, logging_steps=1,
            save_strategy="no", report_to=[], use_cpu=True, bf16=False, beta=0.0, disable_tqdm=True, seed=1,
        ),
    )  # fmt: skip
    trainer.remove_callback(PrinterCallback)
    times = Times()
    trainer.add_callback(times)
    return trainer, times


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=12)
    parser.add_argument("--steps", type=int, default=6)
    parser.add_argument("--batch", type=int, default=16)
    asked = parser.parse_args()
    os.environ.setdefault("TRL_EXPERIMENTAL_SILENCE", "1")
    with tempfile.TemporaryDirectory() as place, rls.Pool(size=asked.batch) as pool:
        tasks = example.tasks(2)
        kinds: dict[str, Any] = {}
        sandboxes = SandboxTraining(tasks, environment=Idle, tools=[], pool=pool)
        kinds["bare"] = trainer_of(Plain, sandboxes.dataset, place, asked.steps, asked.batch)
        kinds["wrapped"] = trainer_of(Plain, sandboxes.dataset, place, asked.steps, asked.batch)
        wrapped = kinds["wrapped"][0]
        parallel_tools(wrapped)
        leave_out_missing(wrapped)
        wrapped.add_callback(SandboxCallback(wrapped, pool, close=False))
        kinds["sandboxes"] = trainer_of(sandboxes, sandboxes.dataset, place, asked.steps, asked.batch)
        sandboxes.attach(kinds["sandboxes"][0])
        pool.wait_ready(timeout=60)
        for n in range(asked.rounds):
            for name in list(kinds)[:: -1 if n % 2 else 1]:
                kinds[name][0].args.seed = n  # the same completions for all
                kinds[name][0].train()
    bare = kinds["bare"][1].steps
    print(f"{'':9} {'steps':>6} {'median':>10} {'added to each step (median)':>28}")
    for name, (_, times) in kinds.items():
        added = statistics.median(mine - its for mine, its in zip(times.steps, bare, strict=True))
        share = added / statistics.median(bare)
        median = statistics.median(times.steps)
        print(f"{name:9} {len(times.steps):6} {median * 1e3:7.1f} ms {added * 1e3:+14.1f} ms = {share:+6.1%}")


if __name__ == "__main__":
    main()
