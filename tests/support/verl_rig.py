"""A tiny model directory, a model that does what its prompt says, and verl's own configuration."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

TEMPLATE = (
    "{%- for m in messages -%}<|{{ m.role }}|>{{ m.content or '' }}"
    "{%- for c in m.tool_calls or [] -%}<tool_call>{{ c.function | tojson }}</tool_call>{%- endfor -%}<|end|>"
    "{%- endfor -%}{%- if add_generation_prompt -%}<|assistant|>{%- endif -%}"
)


def make_model(place: Path) -> Path:
    """Configuration and tokenizer (bytes) of a model that nobody ever runs."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import LlamaConfig, PreTrainedTokenizerFast

    names = sorted(pre_tokenizers.ByteLevel.alphabet())
    core = Tokenizer(models.BPE(vocab={name: i for i, name in enumerate(names)}, merges=[]))
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    core.decoder = decoders.ByteLevel()
    words = PreTrainedTokenizerFast(tokenizer_object=core, eos_token="<|end|>", pad_token="<|pad|>")
    words.chat_template = TEMPLATE
    words.save_pretrained(place)
    LlamaConfig(
        vocab_size=len(words), hidden_size=16, intermediate_size=16, num_hidden_layers=1,
        num_attention_heads=2, architectures=["LlamaForCausalLM"],
    ).save_pretrained(place)  # fmt: skip
    return place


def config(model: Path, loops: Path, **overrides: Any) -> Any:
    """verl's own, for a trainer without accelerators."""
    import verl.trainer
    from hydra import compose, initialize_config_dir

    given = {
        "actor_rollout_ref.model.path": model,
        "actor_rollout_ref.rollout.name": "vllm",
        "actor_rollout_ref.rollout.prompt_length": 2048,
        "actor_rollout_ref.rollout.response_length": 2048,
        "actor_rollout_ref.rollout.calculate_log_probs": True,
        "actor_rollout_ref.rollout.n": 4,
        "actor_rollout_ref.rollout.agent.num_workers": 2,
        "actor_rollout_ref.rollout.agent.agent_loop_config_path": loops,
        "actor_rollout_ref.rollout.agent.default_agent_loop": "sandboxes",
        "actor_rollout_ref.rollout.multi_turn.max_tool_response_length": 512,
        "++actor_rollout_ref.rollout.agent.agent_loop_manager_class": "rlsandbox_verl.SandboxAgentLoopManager",
        "trainer.device": "cpu",
        "trainer.v1.sampler.sync_refill_failed_groups": True,
        "algorithm.adv_estimator": "grpo",
        **overrides,
    }
    where = Path(verl.trainer.__file__).parent / "config"
    with initialize_config_dir(config_dir=str(where), version_base=None):
        return compose("ppo_trainer", overrides=[f"{name}={value}" for name, value in given.items()])


def plan(*calls: tuple[str, dict[str, Any]]) -> str:
    """A prompt that tells :class:`Obedient` which tools to call, one a turn."""
    return "PLAN" + json.dumps(calls) + "END"


class Obedient:
    """A model server's client: does what the prompt says, then says that it is done.

    ``@i`` in a plan is the number of the conversation among those with the same prompt in this process: verl
    runs siblings in one process, so they get 0, 1, 2 ...
    """

    def __init__(self, model: Path) -> None:
        self.model = str(model)
        self._words: Any = None
        self._known: dict[str, dict[str, int]] = {}

    async def generate(self, request_id: str, *, prompt_ids: Any, sampling_params: Any, **kwargs: Any) -> Any:
        from transformers import AutoTokenizer
        from verl.workers.rollout.replica import TokenOutput

        if self._words is None:
            self._words = AutoTokenizer.from_pretrained(self.model)
        text = self._words.decode(prompt_ids)
        found = re.search(r"PLAN(.*?)END", text, re.DOTALL)
        known = self._known.setdefault(found[1] if found else "", {})
        number = known.setdefault(request_id, len(known))
        calls = json.loads(found[1].replace("@i", str(number))) if found else []
        turn = text.count("<tool_call>")
        if turn < len(calls):
            name, arguments = calls[turn]
            if name == "RAISE" and number % 4 in arguments["who"]:
                raise RuntimeError("the model server has a bad day")
            if name == "RAISE":
                name, arguments = "shell", {"command": f"echo {number} > out"}
            answer = f"<tool_call>{json.dumps({'name': name, 'arguments': arguments})}</tool_call>"
        else:
            answer = "done"
        ids = [*self._words.encode(answer, add_special_tokens=False), self._words.eos_token_id]
        steps = {"global_steps": 0, "min_global_steps": 0, "max_global_steps": 0}
        return TokenOutput(token_ids=ids, log_probs=[-0.5] * len(ids), extra_fields=steps)


def column(values: list[Any]) -> Any:
    """As verl's collate function makes it."""
    import numpy

    made = numpy.empty(len(values), dtype=object)
    made[:] = values
    return made
