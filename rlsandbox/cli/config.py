"""``rlsandbox config``: which settings apply, and why."""

from __future__ import annotations

from typing import Any

import click

from ..backends.registry import checked
from ..config import load_config
from ..errors import UnsupportedError
from .common import console, json_option, print_json, with_config


@click.group()
def command() -> None:
    """Settings: arguments over RLSANDBOX_* variables over files."""


@command.command()
@with_config
@json_option
def show(config_file: str | None, profile: str | None, as_json: bool) -> None:
    """Each value and where it came from. A backend that is not there, or has no such option, is an error."""
    config = load_config(config_file, profile)
    backend = config.backend
    given = {o: config.sources.get(f"pool.backend.{o}", "default") for o in backend.options}
    try:
        checked(backend.name, backend.options, given)
    except UnsupportedError as error:  # settings may be right for machines that have it
        click.echo(f"the options of backend {backend.name!r} are not checked: {error}", err=True)
    rows = config.rows()
    if as_json:
        values = [{"key": key, "value": value, "source": source} for key, value, source in rows]
        print_json({"files": config.files, "profile": config.profile, "settings": values})
        return
    from rich.table import Table
    from rich.text import Text

    table = Table("setting", "value", "from")
    for key, value, source in rows:
        style = "dim" if source == "default" else ""
        table.add_row(Text(key, style), Text(_shown(value), style), Text(source, style))
    out = console()
    out.print(table)
    out.print(f"files: {', '.join(config.files) or 'none was found'}", markup=False)


def _shown(value: Any) -> str:
    if value is None:
        return "-"
    if isinstance(value, (tuple, list)):
        return ", ".join(map(str, value)) or "-"
    if isinstance(value, dict):
        return ", ".join(f"{key}={item}" for key, item in value.items()) or "-"
    return str(value)
