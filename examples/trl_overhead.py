"""What the wrapping of rlsandbox_trl costs: the bare trainer and the attached one by turns, in one run.

    python examples/trl_overhead.py [--rounds 12]

All have the same tiny model, the same prompts and a tool that takes no time. ``wrapped`` has everything that
is put around the trainer (parallel tools, the callback and its numbers, broken rollouts left out), and no
sandbox: what that adds is the overhead. ``sandboxes`` claims one for each rollout, resets and verifies it, on
the same CPUs. The trainers take turns and do exactly the same work in each round; of each step the fastest
round counts. Time is the process's CPU time: with OMP_NUM_THREADS=1 it is that of a machine without load.
"""

from __future__ import annotations

import argparse
import os
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
    """CPU seconds of each step (all threads of this process), round by round; the first warms up."""

    def __init__(self) -> None:
        self.steps: list[list[float]] = []

    def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.began = time.process_time()

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if state.global_step > 1:
            self.steps[-1].append(time.process_time() - self.began)


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
                trainer, times = kinds[name]
                times.steps.append([])
                trainer.train()  # with the same seed each time
    fastest = {name: [min(step) for step in zip(*t.steps, strict=True)] for name, (_, t) in kinds.items()}
    bare = sum(fastest["bare"])
    print(f"{'':9} {'step':>10} {'added':>20}")
    for name, steps in fastest.items():
        added = sum(steps) - bare
        each, more = sum(steps) / len(steps) * 1e3, added / len(steps) * 1e3
        print(f"{name:9} {each:7.1f} ms {more:+8.1f} ms = {added / bare:+6.1%}")


if __name__ == "__main__":
    main()
