"""GRPO with verl on a CPU: its v1 trainer, workers and losses; a tiny policy learns in real local sandboxes.

    python examples/verl_grpo.py            # the log of every step; verl_grpo.jsonl
    python examples/verl_grpo.py --steps 40

The configuration is verl's own; what needs an accelerator is replaced: the model server and the actor are one
tensor, the logits of 64 characters. What the policy writes goes into a file in its sandbox; the hidden grader
rewards the share of letters.
"""

from __future__ import annotations

import argparse
import json
import os
import string
import tempfile
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import ray
import torch
import transfer_queue as tq
import verl.trainer
from hydra import compose, initialize_config_dir
from rlsandbox_verl import to_parquet
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import AutoTokenizer, LlamaConfig, PreTrainedTokenizerFast
from verl.trainer.ppo.core_algos import compute_policy_loss_vanilla
from verl.trainer.ppo.v1 import PPOTrainerSync
from verl.utils.import_utils import load_class_from_fqn
from verl.workers.config import ActorConfig
from verl.workers.rollout.replica import TokenOutput

CHARACTERS = string.ascii_letters + string.digits + " ."
LENGTH = 8
GRADER = r"""awk '{ n += length($0); k += gsub(/[A-Za-z]/, "") } END { print n ? k / n : 0 }' answer.txt \
    > /tmp/reward 2>/dev/null || echo 0 > /tmp/reward"""
LOOPS = """
- name: sandbox_agent
  _target_: rlsandbox_verl.SandboxAgentLoop
  pool: {size: 16}
  tools: [write_file, submit]
"""
MANAGER = "rlsandbox_verl.SandboxAgentLoopManager"
TEMPLATE = (
    "{%- for m in messages -%}<{{ m.role }}>{{ m.content or '' }}"
    "{%- for c in m.tool_calls or [] -%}<tool_call>{{ c.function | tojson }}</tool_call>{%- endfor -%}<|end|>"
    "{%- endfor -%}{%- if add_generation_prompt -%}<assistant>{%- endif -%}"
)


def make_model(place: Path) -> None:
    """Configuration and tokenizer (bytes): all that verl reads of a model here."""
    names = sorted(pre_tokenizers.ByteLevel.alphabet())
    core = Tokenizer(models.BPE(vocab={name: i for i, name in enumerate(names)}, merges=[]))
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    core.decoder = decoders.ByteLevel()
    words = PreTrainedTokenizerFast(tokenizer_object=core, eos_token="<|end|>", pad_token="<|pad|>")
    words.chat_template = TEMPLATE
    words.save_pretrained(place)
    config = LlamaConfig(
        vocab_size=len(words), hidden_size=16, intermediate_size=16, num_hidden_layers=1,
        num_attention_heads=2, architectures=["LlamaForCausalLM"],
    )  # fmt: skip
    config.save_pretrained(place)


@ray.remote(num_cpus=0)  # type: ignore[untyped-decorator]
class Server:
    """Where the weights are, for those that generate."""

    def __init__(self) -> None:
        self._logits = torch.zeros(len(CHARACTERS))

    def load(self, logits: torch.Tensor) -> None:
        self._logits = logits

    def sample(self) -> tuple[str, list[float]]:
        chosen = torch.distributions.Categorical(logits=self._logits).sample((LENGTH,))
        return "".join(CHARACTERS[i] for i in chosen), torch.log_softmax(self._logits, -1)[chosen].tolist()


class Client:
    """verl's way to the server: each answer is a call of the tool ``write_file``."""

    def __init__(self, server: Any, model: Path) -> None:
        self._server, self._model, self._words = server, str(model), None

    async def generate(self, request_id: str, *, prompt_ids: list[int], **kwargs: Any) -> TokenOutput:
        self._words = words = self._words or AutoTokenizer.from_pretrained(self._model)
        steps = {"global_steps": 0, "min_global_steps": 0, "max_global_steps": 0}
        if "</tool_call>" in words.decode(prompt_ids):
            return TokenOutput(token_ids=[words.eos_token_id], log_probs=[0.0], extra_fields=steps)
        text, log_probs = await self._server.sample.remote()
        call = {"name": "write_file", "arguments": {"path": "answer.txt", "content": text}}
        before, after = f"<tool_call>{json.dumps(call)}</tool_call>".split(text)
        ids = [words.encode(part, add_special_tokens=False) for part in (before, text, after)]
        certain = [0.0] * len(ids[0]), [0.0] * (len(ids[2]) + 1)
        tokens = [*ids[0], *ids[1], *ids[2], words.eos_token_id]
        return TokenOutput(
            token_ids=tokens, log_probs=[*certain[0], *log_probs, *certain[1]], extra_fields=steps
        )


class OnCPU:
    """What verl's trainers do with accelerators, done without."""

    def __init__(self, config: Any, model: Path) -> None:
        super().__init__(config)
        self.logits = torch.zeros(len(CHARACTERS), requires_grad=True)
        self._optimizer = torch.optim.Adam([self.logits], lr=0.2)
        self._server = Server.remote()
        self.client = Client(self._server, model)
        self.replay_buffer.poll_interval = 0.05

    def _setup(self) -> None:
        self._init_tokenizer()
        self._init_dataloader()
        self._init_dump_executor()
        self.global_steps = 0
        self.reward_loop_manager = SimpleNamespace(reward_loop_worker_handles=[])

    def on_init_end(self) -> None: ...
    def on_sample_end(self) -> None: ...

    def on_step_end(self) -> None:
        ray.get(self._server.load.remote(self.logits.detach()))

    def _get_n_gpus_for_throughput(self) -> int:
        return 1

    def _balance_batch(self, batch: Any, metrics: Any, **kwargs: Any) -> Any:
        return batch

    def _update_actor(self, batch: Any, metrics: dict[str, Any]) -> Any:
        fields = ["responses", "response_mask", "advantages", "old_log_probs"]
        rows = tq.kv_batch_get(keys=batch.keys, partition_id=batch.partition_id, select_fields=fields)
        rows = rows.to_padded_tensor(0)
        known = torch.full((len(self.tokenizer),), -1)
        for i, character in enumerate(CHARACTERS):
            known[self.tokenizer.encode(character, add_special_tokens=False)[0]] = i
        drawn = (rows["old_log_probs"] < 0) & (rows["response_mask"] > 0)
        chosen = torch.where(drawn, known[rows["responses"]], 0)
        log_probs = torch.where(drawn, torch.log_softmax(self.logits, -1)[chosen], 0.0)
        loss, found = compute_policy_loss_vanilla(
            rows["old_log_probs"], log_probs, rows["advantages"], drawn.float(), loss_agg_mode="token-mean",
            config=ActorConfig(strategy="fsdp", rollout_n=1, ppo_micro_batch_size_per_gpu=1),
        )  # fmt: skip
        self._optimizer.zero_grad()
        loss.backward()
        self._optimizer.step()
        metrics.update(found)
        return batch


class Trainer(OnCPU, PPOTrainerSync):  # type: ignore[misc]
    """verl's synchronous trainer, without its accelerators."""


def configuration(place: Path, **more: Any) -> Any:
    """verl's own, for a trainer without accelerators; *more* by the options' dotted names."""
    given = {
        "actor_rollout_ref.model.path": place / "model",
        "actor_rollout_ref.rollout.name": "vllm",
        "actor_rollout_ref.rollout.n": 4,
        "actor_rollout_ref.rollout.agent.num_workers": 2,
        "actor_rollout_ref.rollout.agent.agent_loop_config_path": place / "loops.yaml",  # one
        "++actor_rollout_ref.rollout.agent.agent_loop_manager_class": MANAGER,  # two
        "algorithm.adv_estimator": "grpo",
        "algorithm.rollout_correction.bypass_mode": True,  # the generating policy is the trained one
        "data.train_files": place / "train.parquet",
        "data.val_files": place / "train.parquet",
        "data.train_batch_size": 4,
        "data.dataloader_num_workers": 0,
        "trainer.device": "cpu",
        "trainer.logger": "[console,file]",
        "trainer.val_before_train": False,
        "trainer.test_freq": -1,
        "trainer.save_freq": -1,
        "trainer.total_epochs": 1000,
        "trainer.v1.sampler.sync_refill_failed_groups": True,
        "transfer_queue.enable": True,
        "transfer_queue.backend.SimpleStorage.num_data_storage_units": 1,
        **more,
    }
    where = Path(verl.trainer.__file__).parent / "config"
    with initialize_config_dir(config_dir=str(where), version_base=None):
        return compose("ppo_trainer", overrides=[f"{name}={value}" for name, value in given.items()])


def tasks(n: int = 8, **more: Any) -> list[dict[str, Any]]:
    grader = {"command": GRADER, "reward": "file:/tmp/reward"}
    return [
        {"id": f"letters-{i}", "prompt": f"Write letters. {i}", "workdir": "/work", "grader": grader, **more}
        for i in range(n)
    ]


def train(place: Path, kind: type = Trainer, loops: str = LOOPS, rows: Any = (), **options: Any) -> None:
    """Trains in *place*, a directory that outlives it where it is to be gone on with."""
    make_model(place / "model")
    (place / "loops.yaml").write_text(loops)
    (place / "tasks.jsonl").write_text("\n".join(map(json.dumps, rows or tasks())))
    to_parquet(place / "tasks.jsonl", place / "train.parquet")
    # Of these CPUs ray only keeps the books.
    ray.init(num_cpus=16, include_dashboard=False, object_store_memory=100 * 2**20, log_to_driver=False)
    config = configuration(place, **options)
    tq.init(config.transfer_queue)
    try:
        trainer = kind(config, place / "model")
        trainer.init()
        rollout = config.actor_rollout_ref.rollout
        manager = load_class_from_fqn(rollout.agent.agent_loop_manager_class).create(
            config=config, llm_client=trainer.client, reward_loop_worker_handles=[]
        )
        trainer.fit(manager)
        trainer.logger.finish()  # verl's main_ppo does it; closes the pool too
    finally:
        tq.close()
        ray.shutdown()


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=30)
    steps = parser.parse_args().steps
    os.environ.setdefault("VERL_FILE_LOGGER_PATH", "verl_grpo.jsonl")
    os.environ.setdefault("RAY_AUTH_MODE", "disabled")
    with tempfile.TemporaryDirectory() as directory:
        train(Path(directory), **{"trainer.total_training_steps": steps})


if __name__ == "__main__":
    main()
