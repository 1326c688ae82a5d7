"""The example's tiny model and configuration, and a model that does what its prompt says."""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path
from typing import Any

EXAMPLES = str(Path(__file__).parents[2] / "examples")


def example() -> Any:
    """The example: its model and its configuration are ours."""
    if EXAMPLES not in sys.path:
        sys.path.insert(0, EXAMPLES)
    import verl_grpo

    return verl_grpo


def config(model: Path, loops: Path, **overrides: Any) -> Any:
    """The example's, with room for what prompts say."""
    given = {
        "actor_rollout_ref.rollout.prompt_length": 2048,
        "actor_rollout_ref.rollout.response_length": 2048,
        "actor_rollout_ref.rollout.calculate_log_probs": True,
        "actor_rollout_ref.rollout.agent.agent_loop_config_path": loops,
        "actor_rollout_ref.rollout.agent.default_agent_loop": "sandboxes",
        "actor_rollout_ref.rollout.multi_turn.max_tool_response_length": 512,
        "algorithm.rollout_correction.bypass_mode": False,
        "transfer_queue.enable": False,
        **overrides,
    }
    return example().configuration(model.parent, **given)


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
