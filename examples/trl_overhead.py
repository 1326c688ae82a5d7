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
import sys
import tempfile
import time
from typing import Any

import trl_grpo as example
from overhead import Order, Step, tell
from rlsandbox_trl import SandboxCallback, leave_out_missing, parallel_tools
from transformers import PrinterCallback, TrainerCallback
from trl import GRPOConfig, GRPOTrainer

import rlsandbox as rls

LENGTH = 64


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
        self.found: list[Step] = []
        self.wrapped = True
        self.order = Order()
        self.began: tuple[float, float] | None = None

    def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        wall, cpu = time.perf_counter(), time.process_time()
        if self.began is not None and state.global_step > self.warm_up:
            self.found.append((self.wrapped, wall - self.began[0], cpu - self.began[1]))
        wanted = self.order.next(state.global_step)
        attached = self.trainer._rlsandbox_attached
        if wanted != self.wrapped:
            if wanted:
                attached._install()
            else:
                attached._remove()
        self.wrapped, self.numbers.off = wanted, not wanted
        self.began = time.perf_counter(), time.process_time()


def measure(steps: int, batch: int, warm_up: int = 8) -> list[Step]:
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


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=400)
    parser.add_argument("--batch", type=int, default=16)
    asked = parser.parse_args()
    os.environ.setdefault("TRL_EXPERIMENTAL_SILENCE", "1")
    return tell(measure(asked.steps - asked.steps % 2, asked.batch))


if __name__ == "__main__":
    sys.exit(main())
