"""SandboxAgentLoopManager: verl's own manager, which also owns the job's pool."""

from __future__ import annotations

import logging
from typing import Any

import ray
from tensordict import TensorDict
from verl.trainer.ppo.v1.agent_loop_tq import AgentLoopManagerTQ

from rlsandbox.errors import UnsupportedError

from . import hooks, versions
from .owner import ask, ask_blocking, owner_on
from .settings import settings_in

log = logging.getLogger("rlsandbox.verl")


class SandboxAgentLoopManager(AgentLoopManagerTQ):  # type: ignore[misc]
    """For ``actor_rollout_ref.rollout.agent.agent_loop_manager_class``.

    The pool is filled before the first batch and lives as long as training; its numbers are in every step's
    log; it is told ahead which tasks come next; and training ends with an error, not in an endless loop,
    when no rollout can be completed any more.
    """

    def __init__(self, config: Any, *args: Any, **kwargs: Any) -> None:
        versions.require()
        if not config.get("transfer_queue", {}).get("enable"):
            raise UnsupportedError(
                "SandboxAgentLoopManager is for verl's v1 trainer: this trainer has no transfer queue",
                phase="config",
                hint="with trainer.use_v1=False, one-step-off and fully async leave agent_loop_manager_class "
                "out and set algorithm.adv_estimator=sandbox_grpo",
            )
        super().__init__(config, *args, **kwargs)
        self.settings = settings_in(self.config)
        self.owners: list[Any] = []
        hooks.track()
        hooks.look_ahead()
        trainer = self.config.get("trainer", {}).get("v1", {})
        if trainer.get("trainer_mode") == "sync" and not trainer.sampler.get("sync_refill_failed_groups"):
            log.warning(
                "a step whose every group is lost will end the training; "
                "trainer.v1.sampler.sync_refill_failed_groups=True takes other prompts in their place"
            )

    async def _init_agent_loop_workers(self) -> None:
        # First: verl puts its workers on these machines, one after the other, and they shall find an owner.
        nodes = [
            node["NodeID"] for node in ray.nodes() if node["Alive"] and node["Resources"].get("CPU", 0) > 0
        ]
        nodes = nodes[: self.rollout_config.agent.num_workers]
        self.owners = [owner_on(node, self.settings) for node in nodes]
        for owner in self.owners:
            await ask(owner, "pid")  # a mistake in the settings is told here and now
        await super()._init_agent_loop_workers()

    def generate_sequences(self, prompts: TensorDict) -> None:
        """Dispatch a batch.

        Raises:
            SandboxError: none of the last batches' rollouts came to its end.
            PoolClosedError: the pool's owner died once too often.
        """
        validate = bool(prompts["validate"]) if "validate" in prompts else False
        rollout = self.rollout_config
        n = rollout.val_kwargs.n if validate else rollout.n
        uids = [str(uid) for uid in prompts["uid"]] if "uid" in prompts else []
        for owner in self.owners:
            ask_blocking(owner, "begin_batch", "val" if validate else "train", uids, len(prompts) * n)
        super().generate_sequences(prompts)
