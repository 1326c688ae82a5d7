"""GRPO with TRL on a CPU: a tiny model, made here, learns by what it does in real local sandboxes.

    python examples/trl_grpo.py                       # the log, the rewards, trl_grpo.png
    python examples/trl_grpo.py --compare cold,warm   # a few steps of tasks with a slow setup, twice:
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
from rlsandbox_trl import SandboxCallback, SandboxTraining
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast
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
            num_attention_heads=4, max_position_embeddings=512, eos_token_id=words.eos_token_id,
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


def train(
    steps: int, batch: int, *, warm: bool = True, setup: str | None = None, quiet: bool = False
) -> list[dict[str, float]]:
    """The trainer's own log, step by step."""
    words = tokenizer()
    options: dict[str, Any] = {"size": batch} if warm else {"size": 1, "max_size": batch}
    sandboxes = SandboxTraining(tasks(8, setup), tools=["write_file"], **options)  # one
    with tempfile.TemporaryDirectory() as place:
        trainer = GRPOTrainer(
            model=model(words),
            processing_class=words,
            train_dataset=sandboxes.dataset,
            environment_factory=sandboxes,
            args=GRPOConfig(
                output_dir=place, max_steps=steps, per_device_train_batch_size=batch,
                num_generations=batch // 2,
                max_completion_length=12, max_tool_calling_iterations=1, learning_rate=2e-2,
                lr_scheduler_type="constant", logging_steps=1, save_strategy="no", report_to=[], use_cpu=True,
                bf16=False, beta=0.0, disable_tqdm=True, seed=1,
            ),
        )  # fmt: skip
        if warm:
            sandboxes.attach(trainer)  # two
            sandboxes.pool.expect(sandboxes.tasks.values(), group_size=batch // 8)
            sandboxes.pool.wait_ready(timeout=60)
        else:
            trainer.add_callback(SandboxCallback(trainer, sandboxes.pool))  # the numbers only
        if quiet:
            from transformers import PrinterCallback

            trainer.remove_callback(PrinterCallback)
        trainer.train()
    return [entry for entry in trainer.state.log_history if "reward" in entry]


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


def compare(names: list[str], steps: int, batch: int) -> None:
    rows = []
    for name in names:  # four steps see each task once
        log = train(steps, batch, warm=name == "warm", setup="sleep 0.5", quiet=True)
        mean = {
            key: statistics.fmean(entry[key] for entry in log if key in entry)
            for key in ("sandbox/ttfc/mean", "sandbox/ttfc/max", "step_time", "sandbox/idle_ratio")
        }
        rows.append((name, mean))
    print(f"{'pool':6} {'TTFC mean':>10} {'TTFC max':>10} {'step':>8} {'idle ratio':>11}")
    for name, mean in rows:
        ttfc, most, step, idle = mean.values()
        print(f"{name:6} {ttfc:8.3f} s {most:8.3f} s {step:6.2f} s {idle:11.3f}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--batch", type=int, default=16)
    parser.add_argument("--compare", metavar="cold,warm")
    parser.add_argument("--plot", default="trl_grpo.png")
    asked = parser.parse_args()
    os.environ.setdefault("TRL_EXPERIMENTAL_SILENCE", "1")
    if asked.compare:
        compare(asked.compare.split(","), min(asked.steps, 4), asked.batch)
        return
    log = train(asked.steps, asked.batch)
    few = max(1, len(log) // 8)
    first, last = (statistics.fmean(e["reward"] for e in part) for part in (log[:few], log[-few:]))
    print(f"mean reward {first:.2f} -> {last:.2f}")
    plot(log, asked.plot)
    print(f"plot: {asked.plot}")


if __name__ == "__main__":
    main()
