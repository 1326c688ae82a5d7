"""The tools of the model, as verl's own kind."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any

from verl.tools.base_tool import BaseTool
from verl.tools.schemas import OpenAIFunctionToolSchema, ToolResponse

import rlsandbox as rls
from rlsandbox.errors import SandboxError

from .owner import job_of
from .session import UNAVAILABLE, Session
from .settings import Settings

Answer = tuple[ToolResponse, Any, dict[str, Any]]


def schema(name: str, description: str, **parameters: str) -> Any:
    """A tool's, all of whose parameters are text and needed."""
    return OpenAIFunctionToolSchema.model_validate(
        {
            "type": "function",
            "function": {
                "name": name,
                "description": description,
                "parameters": {
                    "type": "object",
                    "properties": {k: {"type": "string", "description": v} for k, v in parameters.items()},
                    "required": list(parameters),
                },
            },
        }
    )


class BoundTool(BaseTool):  # type: ignore[misc]
    """A tool in a rollout's own sandbox. ``function(sandbox, **parameters)`` gives the answer as text."""

    def __init__(
        self,
        session: Session,
        tool_schema: Any,
        function: Callable[..., Awaitable[str]],
        *,
        ends: bool = False,
    ) -> None:
        # Not the base class's own: that one prints the schema, and there is one of us for each rollout.
        self.config: dict[str, Any] = {"type": "native"}
        self.tool_schema, self.name = tool_schema, tool_schema.function.name
        self._session, self._function, self._ends = session, function, ends

    async def execute(self, instance_id: str, parameters: dict[str, Any], **kwargs: Any) -> Answer:
        wrong = self._wrong(parameters)
        if wrong:
            return ToolResponse(text=f"error: {wrong}"), None, {}

        async def call(sandbox: rls.AsyncSandbox) -> str:
            return await self._function(sandbox, **parameters)

        text = await self._session.perform(call, ends=self._ends)
        return ToolResponse(text=text or "(no output)"), None, {}

    def _wrong(self, parameters: Any) -> str | None:
        """The model's mistake, if it made one."""
        known = self.tool_schema.function.parameters
        if not isinstance(parameters, dict):
            return f"{self.name} takes an object, not {type(parameters).__name__}"
        for name in known.required or []:
            if name not in parameters:
                return f"{self.name} needs {name}"
        for name, value in parameters.items():
            if name not in known.properties:
                return f"{self.name} takes no {name}"
            if known.properties[name].type == "string" and not isinstance(value, str):
                return f"{name} must be a string"
        return None


def tools_of(session: Session) -> list[BaseTool]:
    """Those that the settings name."""

    async def shell(sandbox: rls.AsyncSandbox, command: str) -> str:
        return shown(await sandbox.run(command, timeout=session.seconds()))

    async def read_file(sandbox: rls.AsyncSandbox, path: str) -> str:
        return (await sandbox.read_file(path)).decode(errors="replace")

    async def write_file(sandbox: rls.AsyncSandbox, path: str, content: str) -> str:
        await sandbox.write_file(path, content)
        return f"wrote {len(content.encode())} bytes to {path}"

    async def submit(sandbox: rls.AsyncSandbox) -> str:
        return "Submitted."

    path = "The file; relative to the working directory."
    made = {
        "shell": BoundTool(
            session,
            schema("shell", "Run a shell command in the sandbox.", command="The command, as for sh -c."),
            shell,
        ),
        "read_file": BoundTool(
            session, schema("read_file", "Read a text file in the sandbox.", path=path), read_file
        ),
        "write_file": BoundTool(
            session,
            schema(
                "write_file",
                "Write a text file in the sandbox, replacing what is there.",
                path=path,
                content="What is to be in it.",
            ),
            write_file,
        ),
        "submit": BoundTool(
            session,
            schema("submit", "Hand in the work. Nothing can be changed afterwards."),
            submit,
            ends=True,
        ),
    }
    return [made[name] for name in session.settings.tools]


def shown(result: rls.CommandResult) -> str:
    """A command's output as the model sees it."""
    text = result.text or result.stdout + result.stderr
    if result.timed_out:
        return text + "\n[timed out]"
    return text + f"\n[exit {result.exit_code}]" if result.exit_code else text


class SandboxTool(BaseTool):  # type: ignore[misc]
    """A shell for verl's own ``tool_agent``: each call in a fresh sandbox of the job's pool.

    verl makes and releases such a tool on each call, so nothing is kept between calls, and a rollout whose
    sandbox broke cannot be left out: for agents that work in one sandbox use SandboxAgentLoop. The tool's
    ``config`` takes the options of the loop (``profile``, ``pool``, ``command_timeout`` ...).
    """

    def __init__(self, config: dict[str, Any], tool_schema: Any = None) -> None:
        super().__init__(config, tool_schema)
        self._settings = Settings.of({k: v for k, v in config.items() if k != "type"})

    def get_openai_tool_schema(self) -> Any:
        return schema(
            "shell", "Run a shell command in a fresh sandbox.", command="The command, as for sh -c."
        )

    async def execute(self, instance_id: str, parameters: dict[str, Any], **kwargs: Any) -> Answer:
        command = parameters.get("command") if isinstance(parameters, dict) else None
        if not isinstance(command, str):
            return ToolResponse(text="error: command must be a string"), None, {}
        for left in reversed(range(self._settings.retries + 1)):
            try:
                return ToolResponse(text=await self._run(command) or "(no output)"), None, {}
            except SandboxError as error:
                if not error.infrastructure:
                    return ToolResponse(text=f"error: {error.message}"), None, {}
                if not left or not error.retryable:
                    return ToolResponse(text=UNAVAILABLE), None, {"sandbox_failure": error.kind}
        raise AssertionError("unreachable")

    async def _run(self, command: str) -> str:
        pool = await job_of(self._settings).pool()
        async with pool.claim(rls.Task(id="tool"), timeout=self._settings.claim_timeout) as sandbox:
            return shown(await sandbox.run(command, timeout=self._settings.command_timeout))
