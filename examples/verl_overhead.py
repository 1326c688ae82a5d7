"""What rlsandbox_verl costs: a job of verl's trainer, whose steps are by turns with our agent loop and bare.

    OMP_NUM_THREADS=1 chrt -r 5 python examples/verl_overhead.py [--steps 100] [--turn 1]

Both loops have a tool of the same name that takes no time, and a reward that takes none. The model server is
elsewhere: it takes no CPU of ours, and for a turn the time that ``--turn`` says, from half to one and a half
of it, as answers are longer and shorter. In a bare step verl's own tool agent runs, and none of our hooks. In
the others each rollout has all that is ours: the owner is asked, a sandbox comes from the warm pool, is put
back and verified, the ledger has the record, the log has the numbers, the pool is told what comes next.

Printed are the medians of a step, begin to begin, and the median of the differences of neighbours with its
95 % confidence interval (bootstrap), on the wall and in CPU time of all processes of the job: those of the
sandboxes too, and in a bare step verl's own book-keeping, as there is no model.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import verl_grpo as example
from overhead import Order, Step, tell
from rlsandbox_verl import SandboxAgentLoop, SandboxAgentLoopManager, hooks
from rlsandbox_verl.owner import ask_blocking
from rlsandbox_verl.tools import BoundTool, schema
from tensordict import NonTensorStack
from verl.experimental.agent_loop.tool_agent_loop import ToolAgentLoop
from verl.tools.base_tool import BaseTool
from verl.tools.schemas import ToolResponse
from verl.trainer.ppo.v1.agent_loop_tq import AgentLoopManagerTQ

WARM_UP = 6
ROLLOUTS = 16
LOOPS = """
- name: sandbox_agent
  _target_: verl_overhead.Sandboxed
  pool: {size: 16}
- name: bare_agent
  _target_: verl_overhead.Bare
"""
TOOL = schema("write_file", "Write.", path="The file.", content="What is to be in it.")
TICKS = os.sysconf("SC_CLK_TCK")


def rewarded(output: Any) -> Any:
    output.reward_score = 0.5
    output.extra_fields["reward_extra_info"] = {"acc": 0.5}
    return output


class Client(example.Client):
    """A model server that takes its time, for each of a step's rollouts another."""

    turn_s = 0.0

    async def generate(self, request_id: str, **kwargs: Any) -> Any:
        known = vars(self).setdefault("known", {})
        share = known.setdefault(request_id, len(known) % ROLLOUTS) / ROLLOUTS
        await asyncio.sleep(self.turn_s * (0.5 + share))
        return await super().generate(request_id, **kwargs)


class Sandboxed(SandboxAgentLoop):
    """Ours, with a tool that takes no time."""

    def make_tools(self, session: Any) -> list[Any]:
        async def write_file(sandbox: Any, path: str, content: str) -> str:
            return "written"

        return [BoundTool(session, TOOL, write_file)]

    def _scored(self, output: Any, session: Any) -> Any:
        return rewarded(super()._scored(output, session))


class Nothing(BaseTool):  # type: ignore[misc]
    """The same tool as verl's own kind."""

    def __init__(self) -> None:
        self.config: dict[str, Any] = {"type": "native"}
        self.tool_schema, self.name = TOOL, "write_file"

    async def execute(self, instance_id: str, parameters: dict[str, Any], **kwargs: Any) -> Any:
        return ToolResponse(text="written"), None, {}


class Bare(ToolAgentLoop):  # type: ignore[misc]
    """verl's own, with that tool."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self.tools = {"write_file": Nothing()}
        self.tool_schemas = [TOOL.model_dump(exclude_unset=True, exclude_none=True)]

    async def run(self, sampling_params: dict[str, Any], **kwargs: Any) -> Any:
        return rewarded(await super().run(sampling_params, **kwargs))


class Manager(SandboxAgentLoopManager):
    """Says with which loop a step's rollouts run."""

    wrapped = True

    def generate_sequences(self, prompts: Any) -> None:
        name = "sandbox_agent" if self.wrapped else "bare_agent"
        prompts["agent_name"] = NonTensorStack(*[name] * len(prompts))
        if self.wrapped:
            super().generate_sequences(prompts)
        else:
            AgentLoopManagerTQ.generate_sequences(self, prompts)


class Trainer(example.Trainer):
    """Takes our hooks off and puts them on again between two steps, and looks at the clocks."""

    turn_s = 0.0

    def __init__(self, config: Any, model: Path) -> None:
        super().__init__(config, model)
        self.client = Client(self._server, model)
        self.client.turn_s = self.turn_s
        self.replay_buffer.poll_interval = 0.01  # steps last whole multiples of it
        self.order, self.found = Order(), list[Step]()
        self.began: tuple[float, float] | None = None
        self.hooks = hooks.numbers, hooks.expect

    def on_step_begin(self) -> None:
        wall = time.perf_counter()
        for owner in self.agent_loop_manager.owners:  # what is put back meanwhile is no part of the next step
            ask_blocking(owner, "wait_ready", 60.0)
        cpu = used()
        if self.began is not None and self.global_steps > WARM_UP:
            self.found.append((self.order.wrapped, wall - self.began[0], cpu - self.began[1]))
        wanted = self.agent_loop_manager.wrapped = self.order.next(self.global_steps)
        hooks.numbers, hooks.expect = self.hooks if wanted else (dict, lambda batches, n: None)
        self.began = time.perf_counter(), cpu


def used() -> float:
    """CPU seconds of this process and all that it has started, directly or not."""
    parents: dict[int, int] = {}
    seconds: dict[int, float] = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                fields = (entry / "stat").read_text().rpartition(")")[2].split()
            except OSError:
                continue
            parents[int(entry.name)] = int(fields[1])
            seconds[int(entry.name)] = sum(map(int, fields[11:15])) / TICKS  # its ended children's as well
    ours = {os.getpid()}
    while more := {pid for pid, parent in parents.items() if parent in ours} - ours:
        ours |= more
    return sum(seconds.get(pid, 0.0) for pid in ours)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--turn", type=float, default=1.0, help="seconds that the model takes for a turn")
    asked = parser.parse_args()
    steps = asked.steps
    os.environ.setdefault("RAY_AUTH_MODE", "disabled")
    found: list[Step] = []

    class Kept(Trainer):
        turn_s = asked.turn

        def __init__(self, *args: Any) -> None:
            super().__init__(*args)
            self.found = found

    with tempfile.TemporaryDirectory() as directory:
        example.train(
            Path(directory), Kept, LOOPS, [{**task, "grader": None} for task in example.tasks()],
            **{
                "trainer.total_training_steps": steps - steps % 2 + WARM_UP,
                "trainer.logger": "[]",
                "++actor_rollout_ref.rollout.agent.agent_loop_manager_class": "verl_overhead.Manager",
                "actor_rollout_ref.rollout.agent.num_workers": 1,
            },
        )  # fmt: skip
    return tell(found, judged=("wall",))


if __name__ == "__main__":
    sys.exit(main())
