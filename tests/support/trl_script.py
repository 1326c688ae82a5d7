"""A training script as a user has one: run by tests in processes of its own.

    trl_script.py PLACE STEPS [resume] [evaluate] [tell] [name=value of GRPOConfig ...]

*tell*: also ``EXPECT [task ids]`` and ``BATCH [task ids]``, as they are told and begun in this process.
It prints a line ``LOG {json}`` for each step, and at the end ``END {json}`` with what it knows of its pool.
"""

from __future__ import annotations

import json
import os
import sys
import threading
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[2] / "examples"))

import trl_grpo as example
from rlsandbox_trl import SandboxTraining
from transformers import TrainerCallback
from trl import GRPOConfig, GRPOTrainer

SIZE = 4
"""Rollouts of one process at once."""


def children() -> int:
    """Processes that this one has begun and that live."""
    threads = Path("/proc/self/task").iterdir()
    return sum(len((thread / "children").read_text().split()) for thread in threads)


class Watch(TrainerCallback):  # type: ignore[misc]
    """Looks at the pool while it is used, and prints each step."""

    def __init__(self, sandboxes: SandboxTraining) -> None:
        self.sandboxes, self.most, self.about = sandboxes, 0, {}
        self.over = threading.Event()

    def on_train_begin(self, *args: Any, **kwargs: Any) -> None:
        pool = self.sandboxes.pool
        self.about: dict[str, Any] = {
            "max_size": pool.max_size,
            "owner": pool.ref.pid,
            "children": children(),
        }
        threading.Thread(target=self.look, args=(pool,), daemon=True).start()

    def look(self, pool: Any) -> None:
        while not self.over.wait(0.02) and not pool.closed:
            try:
                self.most = max(self.most, pool.stats().live)
            except Exception:  # it is being closed
                return

    def on_step_end(self, args: Any, state: Any, *rest: Any, **kwargs: Any) -> None:
        pool = self.sandboxes.pool
        self.about["ttfc"] = sorted(pool.metrics.ttfc.values())
        self.about["batches"] = list(pool.metrics.batch.values())
        self.about["ledger"] = str(pool._pool.ledger.path)

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **kwargs: Any) -> None:
        if state.is_world_process_zero and "eval_reward" in logs:
            print("EVAL", json.dumps(logs), flush=True)
        if state.is_world_process_zero and "reward" in logs:
            print("LOG", json.dumps({**logs, "step": state.global_step}), flush=True)


def tell(sandboxes: SandboxTraining) -> None:
    expect, begin = sandboxes.pool.expect, sandboxes._begin_batch

    def expected(tasks: Any, **how: Any) -> None:
        print("EXPECT", json.dumps(sorted(task.id for task in tasks)), flush=True)
        expect(tasks, **how)

    def began(rows: Any, label: str) -> None:
        print("BATCH", json.dumps(sorted(row["task_id"] for row in rows)), flush=True)
        begin(rows, label)

    sandboxes.pool.expect = expected  # type: ignore[method-assign]
    sandboxes._begin_batch = began  # type: ignore[method-assign]


def main() -> None:
    place, steps, *rest = sys.argv[1:]
    options = dict(word.split("=", 1) for word in rest if "=" in word)
    die_at = int(options.pop("die_at", "-1"))
    words = example.tokenizer()
    sandboxes = SandboxTraining(example.tasks(8), tools=["write_file"], run="grpo")
    args = GRPOConfig(
        output_dir=place, max_steps=int(steps), per_device_train_batch_size=SIZE, num_generations=4,
        max_completion_length=12, max_tool_calling_iterations=1, learning_rate=1e-2, logging_steps=1,
        report_to=[], use_cpu=True, bf16=False, disable_tqdm=True, seed=1,
        **({"save_strategy": "no"} | {k: json.loads(v) if v[:1].isdigit() else v for k, v in options.items()}),
    )  # fmt: skip
    trainer = GRPOTrainer(
        model=example.model(words), processing_class=words, train_dataset=sandboxes.dataset,
        eval_dataset=sandboxes.dataset if "evaluate" in rest else None,
        environment_factory=sandboxes, args=args,
    )  # fmt: skip
    sandboxes.attach(trainer)
    if "tell" in rest:
        tell(sandboxes)
    watch = Watch(sandboxes)
    trainer.add_callback(watch)
    if os.environ.get("LOCAL_RANK") == "1" and die_at >= 0:
        plain = trainer._generate

        def generate(*args: Any, **kwargs: Any) -> Any:
            if trainer.state.global_step == die_at:  # it holds sandboxes
                os.kill(os.getpid(), 9)
            return plain(*args, **kwargs)

        trainer._generate = generate
    if "evaluate" in rest and os.environ.get("LOCAL_RANK") == "0":
        evaluate = trainer.evaluate

        def later(*args: Any, **kwargs: Any) -> Any:  # the others are there long before the pool's owner
            time.sleep(1.0)
            return evaluate(*args, **kwargs)

        trainer.evaluate = later
    began = time.monotonic()
    trainer.train(resume_from_checkpoint="resume" in rest or None)
    watch.over.set()
    about = {**watch.about, "most": watch.most, "pid": os.getpid(), "seconds": time.monotonic() - began}
    sys.stdout.write(f"END {json.dumps(about)}\n")
    sys.stdout.flush()


if __name__ == "__main__":
    main()
