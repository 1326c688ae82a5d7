"""The group of commands and what becomes of their errors."""

from __future__ import annotations

import contextlib
import errno
import importlib
import importlib.util
import io
import json
import logging
import os
import sys
import traceback
from collections.abc import Sequence
from typing import Any

import click

from .. import cli
from ..errors import ConfigError, ImageError, SandboxError, UnsupportedError
from .signals import say


class _Interrupted(BaseException):
    """A KeyboardInterrupt on its way past click, which has words of its own for it."""


class Commands(click.Group):
    """Imports a command's module when the command is asked for."""

    def invoke(self, ctx: click.Context) -> Any:
        try:
            return super().invoke(ctx)
        except KeyboardInterrupt:
            raise _Interrupted from None

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


def _version() -> str:
    import importlib.metadata

    try:
        return importlib.metadata.version("rlsandbox-pool")
    except importlib.metadata.PackageNotFoundError:
        return "of a source tree, not installed"


@click.command(cls=Commands, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(_version(), prog_name="rlsandbox")
@click.option("--debug", is_flag=True, help="Tracebacks with errors, and log lines of every kind.")
@click.option("-v", "--verbose", is_flag=True, help="Log lines of what is being done.")
@click.pass_context
def group(ctx: click.Context, debug: bool, verbose: bool) -> None:
    """Warm, verified sandboxes for reinforcement learning of LLM agents.

    Start with: rlsandbox quickstart
    """
    if isinstance(ctx.obj, _Logs):
        ctx.obj.begin(logging.DEBUG if debug else logging.INFO if verbose else logging.WARNING)


class _Held(logging.Handler):
    """Keeps warnings back, each once, so that they do not hide the answer; errors are told at once."""

    def __init__(self, most: int = 20) -> None:
        super().__init__(logging.WARNING)
        self.most = most
        self.lines: dict[str, None] = {}
        self.more = 0

    def emit(self, record: logging.LogRecord) -> None:
        line = self.format(record)
        if record.levelno >= logging.ERROR:
            say(line)
        elif len(self.lines) < self.most:
            self.lines[line] = None
        elif line not in self.lines:
            self.more += 1

    def tell(self) -> None:
        for line in self.lines:
            say(line)
        if self.more:
            say(f"... and {self.more} more warnings; rlsandbox -v COMMAND shows all")


class _Logs:
    """Log lines on stderr: with ``-v`` or ``--debug`` all, as they come; else warnings, at the end."""

    def __init__(self) -> None:
        self._handler: logging.Handler | None = None

    def begin(self, level: int) -> None:
        self._handler = _Held() if level >= logging.WARNING else logging.StreamHandler()
        self._handler.setFormatter(logging.Formatter("%(levelname)s %(name)s: %(message)s"))
        logger = logging.getLogger("rlsandbox")
        logger.addHandler(self._handler)
        logger.setLevel(level)

    def drop(self) -> None:
        """Forget what was held."""
        if isinstance(self._handler, _Held):
            self._handler = None

    def end(self) -> None:
        logger = logging.getLogger("rlsandbox")
        for handler in [h for h in logger.handlers if h is self._handler or isinstance(h, _Held)]:
            logger.removeHandler(handler)
        if isinstance(self._handler, _Held):
            self._handler.tell()


def run_main(argv: Sequence[str] | None = None) -> int:
    """Run the command line and turn whatever it ends with into an exit status."""
    logs = _Logs()
    try:
        return _run(list(sys.argv[1:] if argv is None else argv), logs)
    finally:
        logs.end()


def _run(arguments: list[str], logs: _Logs) -> int:
    # A character that the locale cannot show, or a name that is no text, must not cost the answer.
    if isinstance(sys.stdout, io.TextIOWrapper) and sys.stdout.errors in ("strict", "surrogateescape"):
        sys.stdout.reconfigure(errors="replace")
    _open_standard()
    try:
        result = group.main(args=arguments, prog_name="rlsandbox", standalone_mode=False, obj=logs)
        sys.stdout.flush()
        return result if isinstance(result, int) else 0
    except click.exceptions.Exit as done:
        return done.exit_code
    except click.exceptions.NoArgsIsHelpError as error:
        print(error.format_message())
        return 2
    except _Interrupted:
        raise KeyboardInterrupt from None
    except click.Abort as error:
        if isinstance(error.__context__, KeyboardInterrupt):
            raise KeyboardInterrupt from None
        return _tell(error, "nothing was done: the question had no answer", 1, arguments)
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
    except OSError as error:
        if error.errno not in (errno.ENOSPC, errno.EIO, errno.EDQUOT, errno.EBADF) or error.filename:
            return _internal(error, arguments)
        # The table or the objects: where the ledger is meant, it has said so itself.
        with contextlib.suppress(OSError):
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return _tell(error, f"the output cannot be written: {error.strerror}", 1, [])
    except Exception as error:
        return _internal(error, arguments)


def _open_standard() -> None:
    """Descriptors 0, 1 and 2 that whoever started us has closed lead nowhere: not into a file opened next."""
    for fd, name in ((0, "stdin"), (1, "stdout"), (2, "stderr")):
        try:
            os.fstat(fd)
        except OSError:
            os.open(os.devnull, os.O_RDWR)  # the lowest number that is free: this one
        if getattr(sys, name) is None:
            setattr(sys, name, open(fd, "r" if fd == 0 else "w", closefd=False))  # noqa: SIM115


def _internal(error: Exception, arguments: list[str]) -> int:
    said = f"internal error: {type(error).__name__}: {error} (a bug; --debug before the command shows where)"
    return _tell(error, said, 1, arguments)


def bad_input(error: SandboxError) -> bool:
    """Whether what was asked for is wrong, and the same again would be: exit status 2."""
    return isinstance(error, (ConfigError, UnsupportedError, ImageError)) or error.phase == "config"


def _tell(error: Exception, said: str, status: int, arguments: list[str], who: str = "rlsandbox") -> int:
    """One line on stderr; with ``--json`` also an object on stdout; with ``--debug`` also the traceback."""
    if "--debug" in arguments[:2]:
        say("".join(traceback.format_exception(error)).rstrip("\n"))
    say(f"{who}: {' '.join(said.split())}")
    if "--json" in arguments:
        facts: dict[str, Any] = {
            "message": getattr(error, "message", None) or said,
            "type": type(error).__name__,
        }
        for name in ("kind", "phase", "hint", "retryable", "infrastructure", "sandbox", "task"):
            if getattr(error, name, None) not in (None, ""):
                facts[name] = getattr(error, name)
        if isinstance(error, click.UsageError):
            facts["kind"] = "config"
        say(json.dumps({"error": facts, "exit_status": status}), sys.stdout)
    return status


def _is_there(module: str) -> bool:
    try:
        return importlib.util.find_spec(module) is not None
    except ModuleNotFoundError:  # not even its package
        return False
