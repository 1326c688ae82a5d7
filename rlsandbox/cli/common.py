"""What commands share: options of a pool, ``--json``, tables."""

from __future__ import annotations

import dataclasses
import json
import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import click

from ..config import Config, load_config
from ..errors import ConfigError, UnsupportedError
from ..spec import Spec
from ..task import Task

if TYPE_CHECKING:
    from rich.console import Console

F = TypeVar("F", bound=Callable[..., Any])

json_option = click.option(
    "--json", "as_json", is_flag=True, help="One JSON object on stdout instead of tables."
)
config_options = (
    click.option("--config", "config_file", metavar="FILE", help="Instead of rlsandbox.toml."),
    click.option("--profile", metavar="NAME", help="Section [profiles.NAME] of the configuration."),
)
_POOL_OPTIONS = (
    click.option("--backend", metavar="NAME", help="Where sandboxes live; default local."),
    click.option("--size", type=int, metavar="N", help="Sandboxes kept ready."),
    click.option("--max-size", type=int, metavar="N", help="Sandboxes at most; default --size."),
    click.option("--image", metavar="IMAGE", help="Instead of the tasks' own; 'none' is the backend's base."),
    click.option("--memory", metavar="SIZE", help="Of each sandbox, such as 512MiB."),
    click.option("--block", multiple=True, metavar="PLUGIN", help="Leave this plugin out; may be repeated."),
    click.option("--ledger", metavar="PATH", help="A .db file or a directory; default $RLSANDBOX_HOME."),
    click.option("--run", "run_name", metavar="NAME", help="Name of the run; default a new one."),
    *config_options,
)


def pool_options(function: F) -> F:
    """Options that :func:`pool_arguments` turns into arguments of a Pool."""
    for option in reversed(_POOL_OPTIONS):
        function = option(function)
    return function


def with_config(function: F) -> F:
    """``--config`` and ``--profile``."""
    for option in reversed(config_options):
        function = option(function)
    return function


def pool_arguments(
    options: Mapping[str, Any], *, at_most: int | None = None
) -> tuple[dict[str, Any], Config]:
    """Arguments for ``Pool(...)`` from parsed options, and the configuration that they lead to.

    Args:
        options: parsed options of :func:`pool_options`; others are ignored.
        at_most: how many sandboxes can be of use at once: the size where nobody says one.
    """
    file = options.get("config_file")
    given: dict[str, Any] = {
        "backend": options.get("backend"),
        "size": options.get("size"),
        "max_size": options.get("max_size"),
        "block": tuple(options.get("block") or ()),
        "ledger": options.get("ledger"),
        "run": options.get("run_name"),
    }
    image = options.get("image")
    if options.get("memory") or image not in (None, "none"):
        given["spec"] = Spec(memory=options.get("memory"), image=None if image == "none" else image)
    config = load_config(file, options.get("profile"), given)
    if at_most is not None and config.pool.size is None:
        useful = min(16, max(4, 2 * (os.cpu_count() or 2)))  # more would wait for each other
        given["size"] = max(1, min(useful, at_most, config.pool.max_size or useful))
    return {**given, "config": file, "profile": options.get("profile")}, config


def with_image(tasks: list[Task], image: str | None) -> list[Task]:
    """*tasks* without an image of their own when ``--image`` names one for the whole pool."""
    if image is None:
        return tasks

    def moved(task: Task) -> Task:
        spec = dataclasses.replace(task.spec, image=None) if task.spec is not None else None
        return dataclasses.replace(task, image=None, spec=spec)

    return [moved(task) for task in tasks]


def writable_file(path: str | None, option: str) -> Path | None:
    """*path* when a file can be written there, told before any work is done."""
    if path is None:
        return None
    file = Path(path)
    if os.path.isdir(file):
        raise ConfigError(f"{option}: {path} is a directory")
    try:
        if not file.absolute().parent.is_dir():
            raise ConfigError(f"{option}: there is no directory {file.absolute().parent!s:.300}")
        existed = file.exists()
        file.open("ab").close()
        if not existed:
            file.unlink()
    except OSError as error:
        raise ConfigError(f"{option}: {path:.300} cannot be written: {error.strerror}") from None
    return file


def plot_file(path: str | None) -> Path | None:
    """What ``--plot`` names, when a plot can be made and put there."""
    if path is None:
        return None
    try:
        import matplotlib  # noqa: F401
    except ImportError as error:
        raise UnsupportedError(
            "--plot needs matplotlib", kind="missing_extra", hint="pip install 'rlsandbox-pool[plots]'"
        ) from error
    from ..metrics.plots import check_format

    if not os.path.isdir(path):  # that is said better below
        check_format(path)
    return writable_file(path, "--plot")


def written(path: Path | None, option: str, write: Callable[[Path], object]) -> str | None:
    """Write a file when the work is done, and say what went wrong: that must not cost the answer."""
    if path is None:
        return None
    try:
        write(path)
    except (OSError, ConfigError) as error:
        why = error.strerror if isinstance(error, OSError) else str(error)
        return f"{option}: {path} could not be written: {why}"
    return None


def print_json(data: Any) -> None:
    """*data* on stdout; what JSON does not know (paths, tuples, dataclasses) in its plain form."""

    def plain(value: Any) -> Any:
        if dataclasses.is_dataclass(value) and not isinstance(value, type):
            return dataclasses.asdict(value)
        if isinstance(value, (set, frozenset)):
            return sorted(value)
        if isinstance(value, Mapping):
            return dict(value)
        return str(value)

    click.echo(json.dumps(data, default=plain, indent=2))


@contextmanager
def progress(what: str, total: int, shown: bool = True) -> Iterator[Callable[[], None]]:
    """A bar on stderr where that is a terminal; call what it gives after each step."""
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    out = console(stderr=True)
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=out, disable=not (shown and out.is_terminal), transient=True) as bar:
        task = bar.add_task(what, total=total)
        yield lambda: bar.advance(task)


def console(*, stderr: bool = False) -> Console:
    """Tables as wide as the terminal; in a pipe as wide as they need to be."""
    from rich.console import Console

    made = Console(stderr=stderr, highlight=False)
    if not made.is_terminal:
        made.width = max(made.width, 120)
    return made
