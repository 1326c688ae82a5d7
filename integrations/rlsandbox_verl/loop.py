"""SandboxAgentLoop: verl's tool agent with one sandbox a trajectory.

What infrastructure breaks is tried again from the start; what stays broken is *missing*: in verl's trainer
(v1) its row is not there at all, so neither its group's baseline nor any mean knows of it; with the older
AgentLoopWorker, which wants a row for everything, its row is empty (verl counts it as aborted) and the
estimator ``sandbox_grpo`` leaves it out. It never has a reward, and the ledger has its record.
"""

from __future__ import annotations

import asyncio
import logging
from functools import cache
from typing import Any
from uuid import uuid4

from verl.experimental.agent_loop.agent_loop import AgentLoopMetrics, AgentLoopOutput, register
from verl.experimental.agent_loop.tool_agent_loop import AgentState, ToolAgentLoop

from rlsandbox.errors import ConfigError, SandboxError

from . import advantage, versions
from .groups import ALONE, Group, Place
from .owner import job_of
from .session import CALLERS_MISTAKES, Session
from .settings import Settings
from .tools import tools_of

log = logging.getLogger("rlsandbox.verl")

_groups: dict[str, Group] = {}
_require = cache(versions.require)  # once: it reads files, and there is a loop for each trajectory


@register("sandbox_agent")
class SandboxAgentLoop(ToolAgentLoop):  # type: ignore[misc]
    """One sandbox a trajectory. Options: see :class:`~rlsandbox_verl.settings.Settings`.

    verl makes one for each trajectory, with every key of the YAML entry. A subclass overrides
    :meth:`make_tools` to give the model more tools in its sandbox.
    """

    def __init__(self, *args: Any, tools: Any = None, name: str = "", **options: Any) -> None:
        _require()
        given = {k: options.pop(k) for k in list(options) if k not in _VERLS}
        super().__init__(*args, tools=tools, **options)
        self.settings = Settings.of(given)
        self._given: dict[str, Any] = dict(self.tools)
        self._session: Session | None = None

    def make_tools(self, session: Session) -> list[Any]:
        """The tools that work in the rollout's sandbox."""
        return tools_of(session)

    async def run(self, sampling_params: dict[str, Any], priority: int = 0, **kwargs: Any) -> Any:
        """An AgentLoopOutput; an empty list for a rollout that is missing."""
        replaceable = "session_id" in kwargs  # the worker of the v1 trainer, which can do without a row
        if not replaceable:
            advantage.require(self.config)
        uid = str(kwargs.get("uid") or uuid4().hex)
        place = Place(_groups, uid)
        output, cause = None, None
        try:
            output, cause = await self._rollout(sampling_params, priority, uid, kwargs)
        except BaseException as error:
            place.end(scored=False, cause=error)
            raise
        place.end(scored=output is not None, cause=cause)
        if not replaceable:
            return output if output is not None else await self._empty(kwargs)
        group = await place.settled()
        alone = str(self.config.algorithm.adv_estimator) in ALONE
        if group.verdict(least=1 if alone else 2, all_or_none=self.settings.on_failure == "skip_group"):
            return output if output is not None else []
        if place.tells():
            raise SandboxError(
                f"{group.scored} of {group.size} rollouts of prompt {uid} came to their end: it is left out",
                kind="group_lost", phase="policy", retryable=True,
            ) from group.cause  # fmt: skip
        return []

    async def _rollout(
        self, sampling_params: dict[str, Any], priority: int, uid: str, kwargs: dict[str, Any]
    ) -> tuple[AgentLoopOutput | None, BaseException | None]:
        job = job_of(self.settings)
        row = kwargs.get("extra_info") or {}
        task_id = row.get("task_id")
        if not task_id:
            error = ConfigError(
                "a row of the data set has no extra_info.task_id",
                hint="write the data set with rlsandbox_verl.to_parquet",
            )
            await job.refused(error)
            raise error
        try:
            begun, pool = await job.begin(str(task_id), row.get("task_source"), uid)
        except CALLERS_MISTAKES:
            raise
        except SandboxError as error:
            log.error("a rollout of task %s could not begin: %s", task_id, error)
            return None, error
        step = kwargs.get("global_steps", "")
        session = self._session = Session(
            pool, begun.task, self.settings,
            group=f"{task_id}@{begun.mode}{step}-{uid[:8]}", batch=f"verl-{begun.mode}-{step}",
            uid=f"{uid}-{kwargs.get('session_id', uuid4().hex)}",
        )  # fmt: skip
        cause: BaseException | None = None
        try:
            output, cause = await self._attempts(session, sampling_params, priority, kwargs)
        except BaseException as error:
            await session.cancel(f"{type(error).__name__}: {error}")
            raise
        finally:
            await asyncio.shield(job.ended(session.told()))
        return output, cause

    async def _attempts(
        self, session: Session, sampling_params: dict[str, Any], priority: int, kwargs: dict[str, Any]
    ) -> tuple[AgentLoopOutput | None, BaseException | None]:
        tools = {tool.name: tool for tool in self.make_tools(session)}
        self.tools = {**self._given, **tools}
        self.tool_schemas = [
            tool.tool_schema.model_dump(exclude_unset=True, exclude_none=True) for tool in self.tools.values()
        ]
        while True:
            session.begin()
            try:
                output = await super().run(dict(sampling_params), priority=priority, **kwargs)
            except CALLERS_MISTAKES:
                raise
            except Exception as error:  # raised on, verl would train on what is left of the group unnoticed
                log.exception("a rollout of task %s raised", session.task.id)
                await session.raised(error)
                return None, error
            await session.finish()
            if not session.lost:
                return self._scored(output, session), None
            if not session.may_retry():
                await session.give_up()
                return None, session.error

    def _scored(self, output: AgentLoopOutput, session: Session) -> AgentLoopOutput:
        output.reward_score = session.reward
        output.extra_fields["sandbox"] = session.fields()
        if session.reward is not None:
            output.extra_fields["reward_extra_info"] = {"acc": session.reward}
        return output

    async def _empty(self, kwargs: dict[str, Any]) -> AgentLoopOutput:
        """The row of a rollout that is missing: nothing in it, counted by verl as aborted."""
        session = self._session
        prompt = await self.ct_build_initial_tokens(list(kwargs["raw_prompt"]), tools=self.tool_schemas)
        graded = session is None or session.task.grader is not None
        fields: dict[str, Any] = {"turn_scores": [], "tool_rewards": []}
        fields["sandbox"] = session.fields() if session is not None else {"status": "failed"}
        if graded:
            fields["reward_extra_info"] = {"acc": 0.0}
        return AgentLoopOutput(
            prompt_ids=prompt,
            response_ids=[],
            response_mask=[],
            response_logprobs=[] if self.rollout_config.calculate_log_probs else None,
            multi_modal_data={},
            reward_score=0.0 if graded else None,
            num_turns=0,
            metrics=AgentLoopMetrics(),
            extra_fields=fields,
        )

    # ------------------------------------------------------------------ verl's states

    async def _handle_generating_state(self, agent_data: Any, *args: Any, **kwargs: Any) -> AgentState:
        assert self._session is not None
        async with self._session.busy():
            return await super()._handle_generating_state(agent_data, *args, **kwargs)

    async def _handle_processing_tools_state(self, agent_data: Any) -> AgentState:
        assert self._session is not None
        state = await super()._handle_processing_tools_state(agent_data)
        return AgentState.TERMINATED if self._session.over else state

    async def _call_tool(self, tool_call: Any, tools_kwargs: Any, agent_data: Any) -> Any:
        assert self._session is not None
        answer = await super()._call_tool(tool_call, tools_kwargs, agent_data)
        if self._session.mistake is not None:  # verl makes a line of text of whatever a tool raises
            raise self._session.mistake
        return answer


_VERLS = (
    "trainer_config", "server_manager", "tokenizer", "processor",
    "dataset_cls", "data_config", "hf_model_type",
)  # fmt: skip
