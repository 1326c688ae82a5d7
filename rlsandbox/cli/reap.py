"""``rlsandbox reap``: what dead runs left on this machine (or in a cluster), and its removal."""

from __future__ import annotations

import re

import click

from ..backends.registry import backend_class
from ..errors import ConfigError, UnsupportedError
from .common import console, json_option, print_json
from .signals import run_async

_UNITS = {"s": 1, "m": 60, "h": 3600, "d": 86400}


@click.command()
@click.option("--older-than", metavar="TIME", help="Only what is older: 90s, 30m, 1h, 2d.")
@click.option(
    "--unused",
    metavar="TIME",
    help="Also our templates, warm pools and keepers that are older, where no run lives (kubernetes).",
)
@click.option("--dry-run", is_flag=True, help="Only say what there is.")
@click.option("--yes", is_flag=True, help="Do not ask.")
@click.option("--backend", default="local", show_default=True, metavar="NAME")
@click.option("--context", metavar="NAME", help="Of the kubeconfig (kubernetes).")
@click.option("--namespace", metavar="NAME", help="Of the sandboxes (kubernetes).")
@json_option
def command(
    older_than: str | None,
    unused: str | None,
    dry_run: bool,
    yes: bool,
    backend: str,
    context: str | None,
    namespace: str | None,
    as_json: bool,
) -> int:
    """Remove what dead runs have left: directories, control groups, claims. Live runs are never touched."""
    if backend == "kubernetes":
        limit = 0.0 if older_than is None else parse_duration(older_than, "--older-than")
        old = None if unused is None else parse_duration(unused, "--unused")
        return run_async(_cluster(limit, old, dry_run, yes, context, namespace, as_json))
    if backend != "local":
        raise UnsupportedError(f"reap does not know backend {backend!r}", hint="it reaps: local, kubernetes")
    if unused is not None:
        raise ConfigError("--unused is for clusters: --backend kubernetes")
    from .._paths import age_s
    from ..backends.local.ids import detect
    from ..backends.local.state import leftovers, reap

    limit = 0.0 if older_than is None else parse_duration(older_than, "--older-than")
    found = [item for item in leftovers() if age_s(item.path) >= limit]
    rows = [{"run": item.run, "pid": item.pid, "path": str(item.path), "group": item.group} for item in found]
    if not as_json:
        _print(rows)
    removed: list[str] = []
    kept: list[str] = []
    if found and not dry_run:
        if not yes and not click.confirm(f"Remove {len(found)}?", err=True):
            return 1
        gone, left = run_async(reap(detect(), older_s=limit))
        removed, kept = [item.run for item in gone], [item.run for item in left]
    if as_json:
        print_json({"found": rows, "removed": removed, "kept": kept, "dry_run": dry_run})
    elif removed or kept:
        click.echo(f"removed {len(removed)}" + (f", could not remove {', '.join(kept)}" if kept else ""))
    return int(bool(kept))


def parse_duration(text: str, what: str) -> float:
    """Seconds of ``90s``, ``30m``, ``1h``, ``2d`` or a plain number of seconds."""
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([smhd]?)\s*", text)
    if match is None:
        raise ConfigError(f"{what} must be a time such as 90s, 30m, 1h or 2d, not {text!r}")
    return float(match.group(1)) * _UNITS[match.group(2) or "s"]


def _print(rows: list[dict[str, object]]) -> None:
    from rich.markup import escape
    from rich.table import Table

    if not rows:
        click.echo("nothing is left of dead runs")
        return
    table = Table("run", "process", "what", "directory")
    for row in rows:
        table.add_row(
            escape(str(row["run"])),
            str(row["pid"]),
            "control group" if row["group"] else "directory",
            escape(str(row["path"])),
        )
    console().print(table)


async def _cluster(
    older_s: float,
    unused_s: float | None,
    dry_run: bool,
    yes: bool,
    context: str | None,
    namespace: str | None,
    as_json: bool,
) -> int:
    backend_class("kubernetes")  # a clear word where its extra is not installed
    from ..backends.kubernetes.api import Api
    from ..backends.kubernetes.lease import Leftover, leftovers, reap
    from ..backends.kubernetes.unused import InUseError, unused

    api = await Api.connect(context=context, namespace=namespace)
    try:
        found = await leftovers(api, older_s=older_s)
        if unused_s is not None:
            try:
                found += await unused(api, older_s=unused_s)
            except InUseError as error:  # what dead runs left goes all the same
                click.echo(f"what is unused stays: {error.message}", err=True)
        if not as_json:
            for one in found:
                whose = f"run {one.run}  of {one.owner}" if one.run else "unused"
                click.echo(f"{one.kind} {one.name}  {whose}  {one.age_s:.0f} s old")
            if not found:
                click.echo(f"nothing is left of dead runs in namespace {api.namespace}")
        gone: list[Leftover] = []
        kept: list[Leftover] = []
        if found and not dry_run:
            if not yes and not click.confirm(f"Remove {len(found)}?", err=True):
                return 1
            gone, kept = await reap(api, found)
    finally:
        await api.close()
    names = [f"{one.kind}/{one.name}" for one in gone]
    if as_json:
        rows = [{"kind": one.kind, "name": one.name, "run": one.run, "age_s": one.age_s} for one in found]
        left = [f"{one.kind}/{one.name}" for one in kept]
        print_json({"found": rows, "removed": names, "kept": left, "dry_run": dry_run})
    elif gone or kept:
        click.echo(f"removed {len(gone)}" + (f", could not remove {len(kept)}" if kept else ""))
    return int(bool(kept))
