"""``rlsandbox doctor``: what this machine offers, what is missing, and exactly how to get it."""

from __future__ import annotations

import click

from ..errors import UnsupportedError
from .common import console, json_option, print_json

_STYLES = {"ok": "green", "warn": "yellow", "fail": "bold red"}


@click.command()
@click.option("--backend", default="local", show_default=True, metavar="NAME")
@json_option
def command(backend: str, as_json: bool) -> int:
    """Look at this machine by trying things. Exit status 0: the default works here, 1: it does not."""
    if backend != "local":
        raise UnsupportedError(f"doctor does not know backend {backend!r}", hint="it knows: local")
    from ..backends.local.doctor import diagnose

    found = diagnose()
    if as_json:
        print_json(found.to_json())
        return int(not found.works)
    from rich.table import Table

    table = Table("", "what", "found", "what to do", show_lines=False)
    for row in found.rows:
        table.add_row(f"[{_STYLES[row.status]}]{row.status}[/]", row.name, row.found, row.fix)
    console().print(table)
    click.echo("the default works" if found.works else "the default does not work here: see what failed")
    return int(not found.works)
