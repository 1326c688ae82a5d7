"""What the wrapping of rlsandbox_trl costs: one trainer, whose steps are by turns wrapped and bare.

    OMP_NUM_THREADS=1 chrt -r 5 python examples/trl_overhead.py [--steps 400]

Its tool takes no time and there is no sandbox: all that differs between two steps is what rlsandbox_trl puts
around the trainer (parallel tools, broken rollouts left out, the callback with its numbers in the log). Each
step does the same work: the learning rate is 0, answers have a fixed length, the model always calls its tool
alike. A step runs from its begin to the next one's, its log included. Printed are the medians, and the median
of the differences of neighbours with its 95 % confidence interval (bootstrap), in time on the wall and in CPU
time of the process (all threads).
"""

from __future__ import annotations

import argparse
import gc
import os
import random
import sys
import tempfile
import time
from typing import Any

import numpy as np
import trl_grpo as example
from rlsandbox_trl import SandboxCallback, leave_out_missing, parallel_tools
from transformers import PrinterCallback, TrainerCallback
from trl import GRPOConfig, GRPOTrainer

import rlsandbox as rls

LENGTH = 64
LIMIT = 0.03


class Fixed(example.Bytes):
    """Whatever the model writes is the same call."""

    def parse_response(self, ids: Any, **kwargs: Any) -> dict[str, Any]:
        function = {"name": "write_file", "arguments": {"path": "answer.txt", "content": "abc1"}}
        return {
            "role": "assistant",
            "content": "",
            "tool_calls": [{"type": "function", "function": function}],
        }


class Plain:
    """An environment without a sandbox; its tool takes no time."""

    def reset(self, **row: Any) -> None:
        self._written = ""

    def write_file(self, path: str, content: str) -> str:
        """Write.

        Args:
            path: The file.
            content: What is to be in it.

        Returns:
            str: A confirmation.
        """
        self._written = content
        return "written"

    def get_reward(self) -> float:
        return sum(c.isalpha() for c in self._written) / max(1, len(self._written))


class Numbers(SandboxCallback):
    """The callback, which does nothing in a bare step."""

    off = False

    def on_step_end(self, *args: Any, **kwargs: Any) -> None:
        if not self.off:
            super().on_step_end(*args, **kwargs)


class Turns(TrainerCallback):  # type: ignore[misc]
    """Takes the wrapping off and puts it on again between two steps, and looks at the clocks."""

    def __init__(self, trainer: Any, numbers: Numbers, warm_up: int) -> None:
        self.trainer, self.numbers, self.warm_up = trainer, numbers, warm_up
        self.found: list[tuple[bool, float, float]] = []
        self.wrapped = True
        self.random = random.Random(0)
        self.began: tuple[float, float] | None = None

    def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        wall, cpu = time.perf_counter(), time.process_time()
        if self.began is not None and state.global_step > self.warm_up:
            self.found.append((self.wrapped, wall - self.began[0], cpu - self.began[1]))
        # By pairs, in an order that is drawn: neither what drifts nor what comes round has to do with it.
        second = state.global_step % 2 == 1
        wanted = not self.wrapped if second else self.random.random() < 0.5
        attached = self.trainer._rlsandbox_attached
        if wanted != self.wrapped:
            if wanted:
                attached._install()
            else:
                attached._remove()
        self.wrapped, self.numbers.off = wanted, not wanted
        self.began = time.perf_counter(), time.process_time()


def measure(steps: int, batch: int, warm_up: int = 8) -> list[tuple[bool, float, float]]:
    """(wrapped, wall, CPU) of each step."""
    words = example.tokenizer()
    words.__class__ = Fixed
    prompt = [{"role": "user", "content": "Write letters."}]
    with tempfile.TemporaryDirectory() as place, rls.Pool(size=1, config=False) as pool:
        from datasets import Dataset

        trainer = GRPOTrainer(
            model=example.model(words), processing_class=words, environment_factory=Plain,
            train_dataset=Dataset.from_dict({"prompt": [prompt] * 2 * (steps + warm_up + 1)}),  # one epoch
            args=GRPOConfig(
                output_dir=place, max_steps=steps + warm_up + 1, per_device_train_batch_size=batch,
                num_generations=batch // 2, max_completion_length=LENGTH, max_tool_calling_iterations=1,
                generation_kwargs={"min_new_tokens": LENGTH // 2 - 8, "max_new_tokens": LENGTH // 2 - 8},
                learning_rate=0.0, logging_steps=1, save_strategy="no", report_to=[], use_cpu=True,
                bf16=False, beta=0.0, disable_tqdm=True, seed=1,
            ),
        )  # fmt: skip
        trainer.remove_callback(PrinterCallback)
        parallel_tools(trainer)
        leave_out_missing(trainer)
        numbers = Numbers(trainer, pool, close=False)
        trainer.add_callback(numbers)
        turns = Turns(trainer, numbers, warm_up)
        trainer.add_callback(turns)
        gc.collect()
        gc.freeze()  # what is there from the start is not looked through again in the midst of a step
        trainer.train()
    return turns.found


def interval(values: Any, draws: int = 10_000) -> tuple[float, float]:
    """95 % confidence interval of the median, by bootstrap."""
    drawn = np.random.default_rng(0)
    medians = np.median(drawn.choice(values, (draws, len(values))), axis=1)
    low, high = np.percentile(medians, [2.5, 97.5])
    return float(low), float(high)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=400)
    parser.add_argument("--batch", type=int, default=16)
    asked = parser.parse_args()
    os.environ.setdefault("TRL_EXPERIMENTAL_SILENCE", "1")
    found = measure(asked.steps - asked.steps % 2, asked.batch)
    print(f"{len(found)} steps, {'':4}{'bare':>12}{'added':>12}{'share':>9}   95 % interval of the share")
    worst = 0.0
    for name, column in (("wall", 1), ("CPU", 2)):
        on = np.array([row[column] for row in found if row[0]]) * 1e3
        off = np.array([row[column] for row in found if not row[0]]) * 1e3
        bare, added = float(np.median(off)), on - off
        low, high = (part / bare for part in interval(added))
        middle = float(np.median(added))
        print(f"{name:>14} {bare:12.2f} ms{middle:+9.2f} ms{middle / bare:+8.2%}   {low:+.2%} .. {high:+.2%}")
        worst = max(worst, high)
    print(
        f"the wrapping costs {'less' if worst < LIMIT else 'not certainly less'} than {LIMIT:.0%} of a step"
    )
    return 0 if worst < LIMIT else 1


if __name__ == "__main__":
    sys.exit(main())
