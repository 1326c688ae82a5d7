"""The group of commands and what becomes of their errors."""

from __future__ import annotations

import importlib
import importlib.util
import json
import logging
import logging.handlers
import os
import sys
import traceback
from collections.abc import Sequence
from typing import Any

import click

from .. import cli
from ..errors import ConfigError, ImageError, SandboxError, UnsupportedError

INTERRUPTED = 130


class Commands(click.Group):
    """Imports a command's module when the command is asked for."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return [name for name, (module, _) in cli.COMMANDS.items() if _is_there(module)]

    def get_command(self, ctx: click.Context, name: str) -> click.Command | None:
        module, _ = cli.COMMANDS.get(name, ("", ""))
        if not module or not _is_there(module):
            return None
        command = importlib.import_module(module).command
        if not isinstance(command, click.Command):
            raise TypeError(f"{module}.command is no click command")
        command.name = name
        return command

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        from .._settings import nearest

        name = args[0]
        if not name.startswith("-") and self.get_command(ctx, name) is None:
            raise click.UsageError(f"unknown command {name!r}{nearest(name, self.list_commands(ctx))}")
        return super().resolve_command(ctx, args)

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        with formatter.section("Commands"):
            formatter.write_dl([(name, cli.COMMANDS[name][1]) for name in self.list_commands(ctx)])


@click.command(cls=Commands, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(package_name="rlsandbox-pool", prog_name="rlsandbox")
@click.option("--debug", is_flag=True, help="Tracebacks with errors, and log lines of every kind.")
@click.option("-v", "--verbose", is_flag=True, help="Log lines of what is being done.")
@click.pass_context
def group(ctx: click.Context, debug: bool, verbose: bool) -> None:
    """Warm, verified sandboxes for reinforcement learning of LLM agents.

    Start with: rlsandbox quickstart
    """
    if isinstance(ctx.obj, _Logs):
        ctx.obj.begin(logging.DEBUG if debug else logging.INFO if verbose else logging.WARNING)


class _Logs:
    """Log lines on stderr. Warnings are held until the end (or an error): they shall not hide the answer."""

    def __init__(self) -> None:
        self._held: logging.handlers.MemoryHandler | None = None

    def begin(self, level: int) -> None:
        stream = logging.StreamHandler()
        stream.setFormatter(logging.Formatter("%(levelname)s %(name)s: %(message)s"))
        capacity = 1 if level < logging.WARNING else 1000
        self._held = logging.handlers.MemoryHandler(capacity, flushLevel=logging.ERROR, target=stream)
        logger = logging.getLogger("rlsandbox")
        logger.addHandler(self._held)
        logger.setLevel(level)

    def drop(self) -> None:
        if self._held is not None:
            self._held.buffer.clear()

    def end(self) -> None:
        if self._held is not None:
            logging.getLogger("rlsandbox").removeHandler(self._held)
            self._held.close()


def run_main(argv: Sequence[str] | None = None) -> int:
    """Run the command line and turn whatever it ends with into an exit status."""
    logs = _Logs()
    try:
        return _run(list(sys.argv[1:] if argv is None else argv), logs)
    finally:
        logs.end()


def _run(arguments: list[str], logs: _Logs) -> int:
    try:
        result = group.main(args=arguments, prog_name="rlsandbox", standalone_mode=False, obj=logs)
        sys.stdout.flush()
        return result if isinstance(result, int) else 0
    except click.exceptions.Exit as done:
        return done.exit_code
    except click.exceptions.NoArgsIsHelpError as error:
        print(error.format_message())
        return 2
    except (click.Abort, KeyboardInterrupt):
        print("rlsandbox: interrupted", file=sys.stderr)
        return INTERRUPTED
    except click.ClickException as error:
        where = getattr(error, "ctx", None)
        return _tell(
            error, error.format_message(), 2, arguments, where.command_path if where else "rlsandbox"
        )
    except SandboxError as error:
        if bad_input(error):
            logs.drop()  # how often the impossible was tried
        return _tell(error, str(error), 2 if bad_input(error) else 1, arguments)
    except BrokenPipeError:
        # The reader of our output (head, a pager) has gone: nothing is wrong, and nothing more can be said.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    except Exception as error:
        said = (
            f"internal error: {type(error).__name__}: {error} (a bug; --debug before the command shows where)"
        )
        return _tell(error, said, 1, arguments)


def bad_input(error: SandboxError) -> bool:
    """Whether what was asked for is wrong, and the same again would be: exit status 2."""
    return isinstance(error, (ConfigError, UnsupportedError, ImageError)) or error.phase == "config"


def _tell(error: Exception, said: str, status: int, arguments: list[str], who: str = "rlsandbox") -> int:
    """One line on stderr; with ``--json`` also an object on stdout; with ``--debug`` also the traceback."""
    if "--debug" in arguments[:2]:
        traceback.print_exception(error)
    print(f"{who}: {' '.join(said.split())}", file=sys.stderr)
    if "--json" in arguments:
        facts: dict[str, Any] = {
            "message": getattr(error, "message", None) or said,
            "type": type(error).__name__,
        }
        for name in ("kind", "phase", "hint", "retryable", "infrastructure", "sandbox", "task"):
            if getattr(error, name, None) not in (None, ""):
                facts[name] = getattr(error, name)
        print(json.dumps({"error": facts, "exit_status": status}))
    return status


def _is_there(module: str) -> bool:
    try:
        return importlib.util.find_spec(module) is not None
    except ModuleNotFoundError:  # not even its package
        return False
