"""``rlsandbox keeper``: the program that runs in every sandbox."""

from __future__ import annotations

from pathlib import Path

import click

from ..errors import ConfigError, UnsupportedError
from .common import json_option, print_json, writable_file


@click.group()
def command() -> None:
    """The keeper: a small static program that starts, watches and resets episodes."""


@command.command()
@click.option("--arch", metavar="ARCH", help="x86_64 or aarch64; default: this machine's.")
@click.option("--out", "target", metavar="FILE", help="Write it here; default: into the cache.")
@json_option
def build(arch: str | None, target: str | None, as_json: bool) -> None:
    """Build the keeper for an architecture, unless one that fits is there, and say where it lies."""
    from ..keeper.build import ARCHITECTURES, KeeperBuildError, keeper_binary, machine, source_digest
    from ..keeper.build import build as build_keeper

    if arch is not None and arch not in ARCHITECTURES:
        from .._settings import nearest

        raise ConfigError(f"unknown architecture {arch!r}{nearest(arch, ARCHITECTURES)}")
    if target is None:
        path = keeper_binary(arch)
    else:
        writable_file(target, "--out")
        try:
            path = build_keeper(arch or machine(), Path(target).absolute())
        except KeeperBuildError as error:
            raise UnsupportedError(str(error), kind="keeper_build") from error
    facts = {"path": str(path), "bytes": path.stat().st_size, "sources": source_digest()}
    if as_json:
        print_json(facts)
    else:
        click.echo(f"{facts['path']} ({facts['bytes']:,} bytes)")
