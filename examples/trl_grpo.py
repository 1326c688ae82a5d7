"""GRPO with TRL on a CPU: a tiny model, made here, learns by what it does in real local sandboxes.

    python examples/trl_grpo.py                       # the log, the rewards, trl_grpo.png
    python examples/trl_grpo.py --compare cold,warm   # a few steps of tasks with a slow setup, by turns:
                                                      # sandboxes made when they are needed, and ahead

The model has two layers and bytes for a vocabulary, and knows nothing. What it writes goes into a file in its
sandbox; the hidden grader rewards the share of letters.
"""

from __future__ import annotations

import argparse
import os
import statistics
import tempfile
from typing import Any

import torch
from rlsandbox_trl import SandboxCallback, SandboxTraining, leave_out_missing, look_ahead, parallel_tools
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast, PrinterCallback
from trl import GRPOConfig, GRPOTrainer

import rlsandbox as rls

GRADER = r"""awk '{ n += length($0); k += gsub(/[A-Za-z]/, "") } END { print n ? k / n : 0 }' answer.txt \
    > /tmp/reward 2>/dev/null || echo 0 > /tmp/reward"""
TEMPLATE = (
    "{%- for m in messages -%}"
    "{%- if m.role == 'assistant' -%}A{{ m.content or '' }}"
    "{%- for c in m.tool_calls or [] -%}"
    "{{ c.function.name }}{{ c.function.arguments | tojson }}{%- endfor -%}"
    "{%- else -%}{{ m.role[0] }}{{ m.content }}{%- endif -%}<|end|>"
    "{%- endfor -%}{%- if add_generation_prompt -%}A{%- endif -%}"
)


class Bytes(PreTrainedTokenizerFast):
    """Bytes; all that the model writes is a call of the tool write_file."""

    def parse_response(self, ids: Any, **kwargs: Any) -> dict[str, Any]:
        text = self.decode(ids, skip_special_tokens=True)
        call = {"name": "write_file", "arguments": {"path": "answer.txt", "content": text}}
        return {"role": "assistant", "content": "", "tool_calls": [{"type": "function", "function": call}]}


def tokenizer() -> Bytes:
    names = sorted(pre_tokenizers.ByteLevel.alphabet())
    core = Tokenizer(models.BPE(vocab={name: i for i, name in enumerate(names)}, merges=[]))
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    core.decoder = decoders.ByteLevel()
    made = Bytes(tokenizer_object=core, eos_token="<|end|>", pad_token="<|pad|>", padding_side="left")
    made.chat_template = TEMPLATE
    made.response_template = {}
    return made


def model(words: Bytes) -> LlamaForCausalLM:
    torch.manual_seed(0)
    return LlamaForCausalLM(
        LlamaConfig(
            vocab_size=len(words), hidden_size=64, intermediate_size=128, num_hidden_layers=2,
            num_attention_heads=4, max_position_embeddings=1024, eos_token_id=words.eos_token_id,
            pad_token_id=words.pad_token_id, bos_token_id=words.eos_token_id,
        )
    )  # fmt: skip


def tasks(n: int, setup: str | None = None) -> list[rls.Task]:
    return [
        rls.Task(
            id=f"letters-{i}",
            prompt=f"Write letters. {i}",
            workdir="/work",
            setup=setup and f"{setup} # {i}",
            grader=rls.Grader(command=GRADER, reward="file:/tmp/reward", timeout=20),
        )
        for i in range(n)
    ]


def trainer_of(sandboxes: SandboxTraining, place: str, steps: int, batch: int, **options: Any) -> Any:
    words = tokenizer()
    return GRPOTrainer(
        model=model(words),
        processing_class=words,
        train_dataset=sandboxes.dataset,
        environment_factory=sandboxes,
        args=GRPOConfig(
            output_dir=place, max_steps=steps, per_device_train_batch_size=batch, num_generations=batch // 2,
            max_tool_calling_iterations=1, learning_rate=2e-2, lr_scheduler_type="constant", logging_steps=1,
            save_strategy="no", report_to=[], bf16=False, beta=0.0, disable_tqdm=True, seed=1,
            **{"max_completion_length": 12, "use_cpu": True, **options},
        ),
    )  # fmt: skip


def log_of(trainer: Any) -> list[dict[str, float]]:
    return [entry for entry in trainer.state.log_history if "reward" in entry]


def train(steps: int, batch: int) -> list[dict[str, float]]:
    """The trainer's own log, step by step."""
    sandboxes = SandboxTraining(tasks(8), tools=["write_file"], size=batch)  # one
    with tempfile.TemporaryDirectory() as place:
        trainer = trainer_of(sandboxes, place, steps, batch)
        sandboxes.attach(trainer)  # two
        trainer.train()
    return log_of(trainer)


def plot(log: list[dict[str, float]], path: str) -> None:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, (above, below) = pyplot.subplots(2, sharex=True, figsize=(7, 5))
    above.plot([entry["reward"] for entry in log])
    above.set_ylabel("mean reward")
    below.plot([entry.get("sandbox/idle_ratio", float("nan")) for entry in log], color="tab:red")
    below.set_ylabel("idle ratio")
    below.set_xlabel("step")
    figure.savefig(path)


def warm_or_cold(name: str, steps: int, batch: int, **options: Any) -> list[dict[str, float]]:
    """Tasks whose setup takes a third of a second; a generation takes longer than that.

    ``cold`` makes a sandbox, and does its setup, when a rollout asks for it (a pool keeps one at least);
    ``warm`` has them ready, and reads in the trainer's sampler which tasks come next. Nothing else differs.
    """
    warm = name == "warm"
    # Room for the next tasks' setups while all rollouts hold a sandbox.
    room: dict[str, Any] = {"size": batch + 4 if warm else 1, "max_size": batch + 4}
    sandboxes = SandboxTraining(tasks(2 * steps, setup="sleep 0.3"), tools=["write_file"], **room)
    with tempfile.TemporaryDirectory() as place:
        trainer = trainer_of(sandboxes, place, steps, batch, max_completion_length=250, **options)
        parallel_tools(trainer)
        leave_out_missing(trainer)
        look_ahead(trainer, sandboxes, expect=warm)
        trainer.add_callback(SandboxCallback(trainer, lambda: sandboxes.pool))
        trainer.remove_callback(PrinterCallback)
        trainer.train()
    return log_of(trainer)[1:]  # before the first step nobody could look ahead


def compare(names: list[str], steps: int, batch: int) -> None:
    found: dict[str, list[dict[str, float]]] = {name: [] for name in names}
    for turn in (names, names[::-1]):
        for name in turn:
            found[name] += warm_or_cold(name, steps, batch)
    print(f"{'pool':6} {'steps':>6} {'TTFC mean':>10} {'TTFC max':>10} {'step':>8} {'idle ratio':>11}")
    for name, log in found.items():
        ttfc, step, idle = (
            statistics.fmean(entry[key] for entry in log)
            for key in ("sandbox/ttfc/mean", "step_time", "sandbox/idle_ratio")
        )
        most = max(entry["sandbox/ttfc/max"] for entry in log)
        print(f"{name:6} {len(log):6} {ttfc:8.3f} s {most:8.3f} s {step:6.2f} s {idle:11.3f}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--batch", type=int, default=16)
    parser.add_argument("--compare", metavar="cold,warm")
    parser.add_argument("--plot", default="trl_grpo.png")
    asked = parser.parse_args()
    os.environ.setdefault("TRL_EXPERIMENTAL_SILENCE", "1")
    if asked.compare:
        compare(asked.compare.split(","), min(asked.steps, 5), asked.batch)
        return
    log = train(asked.steps, asked.batch)
    few = max(1, len(log) // 8)
    first, last = (statistics.fmean(e["reward"] for e in part) for part in (log[:few], log[-few:]))
    print(f"mean reward {first:.2f} -> {last:.2f}")
    plot(log, asked.plot)
    print(f"plot: {asked.plot}")


if __name__ == "__main__":
    main()
