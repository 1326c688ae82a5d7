"""``rlsandbox doctor``: what this machine offers, what is missing, and exactly how to get it."""

from __future__ import annotations

from typing import Any

import click

from ..backends.registry import backend_class
from ..errors import UnsupportedError
from .common import console, json_option, print_json
from .signals import run_async

_STYLES = {"ok": "green", "warn": "yellow", "fail": "bold red"}


@click.command()
@click.option("--backend", default="local", show_default=True, metavar="NAME")
@click.option("--context", metavar="NAME", help="Of the kubeconfig (kubernetes).")
@click.option("--namespace", metavar="NAME", help="Of the sandboxes (kubernetes).")
@click.option("--runtime-class", metavar="NAME", help="That pods are to have (kubernetes).")
@click.option(
    "--trial", metavar="IMAGE", help="See with three short pods whether policies are enforced (kubernetes)."
)
@json_option
def command(
    backend: str, context: str | None, namespace: str | None, runtime_class: str | None, trial: str | None,
    as_json: bool,
) -> int:  # fmt: skip
    """Look at this machine by trying things, or at a cluster. Exit status 0: it works, 1: it does not."""
    found = _diagnose(backend, context, namespace, runtime_class, trial)
    if as_json:
        print_json(found.to_json())
        return int(not found.works)
    from rich.markup import escape
    from rich.table import Table

    table = Table("", "what", "found", "what to do", show_lines=False)
    for row in found.rows:
        said = (escape(text) for text in (row.name, row.found, row.fix))
        table.add_row(f"[{_STYLES[row.status]}]{row.status}[/]", *said)
    console().print(table)
    if backend != "local":
        click.echo("sandboxes can be made" if found.works else "no sandbox can be made: see what failed")
        return int(not found.works)
    click.echo("the default works" if found.works else "the default does not work here: see what failed")
    return int(not found.works)


def _diagnose(
    backend: str, context: str | None, namespace: str | None, runtime_class: str | None, trial: str | None
) -> Any:
    if backend == "local":
        from ..backends.local.doctor import examine

        return run_async(examine())
    if backend != "kubernetes":
        raise UnsupportedError(
            f"doctor does not know backend {backend!r}", hint="it knows: local, kubernetes"
        )
    backend_class("kubernetes")  # a clear word where its extra is not installed
    from ..backends.kubernetes.doctor import examine as look

    return run_async(look(context=context, namespace=namespace, runtime_class=runtime_class, trial=trial))
