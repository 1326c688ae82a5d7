"""``rlsandbox simulate``: how a pool would do on a cluster that exists only in time."""

from __future__ import annotations

import contextlib
import logging
import time
import tomllib
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import click

from ..errors import ConfigError
from .common import console, json_option, print_json, progress
from .signals import run_async

if TYPE_CHECKING:
    from ..pool.simulation import Simulation

STATISTICS = ("mean", "p50", "p95", "p99", "max")


@click.command()
@click.option("--images", type=click.IntRange(1), default=4578, show_default=True, help="Different images.")
@click.option("--group-size", type=click.IntRange(1), default=4, show_default=True, help="Rollouts of each.")
@click.option(
    "--think", type=float, default=60.0, show_default=True, help="Mean seconds a rollout holds a sandbox."
)
@click.option(
    "--size", type=click.IntRange(0), default=0, show_default=True, help="Kept ready without demand."
)
@click.option("--max-size", type=click.IntRange(1), help="Ceiling; default: one and a quarter of the images.")
@click.option("--max-creating", type=click.IntRange(1), default=256, show_default=True)
@click.option(
    "--write-rate", type=float, default=80.0, show_default=True, help="Creations and removals a second."
)
@click.option("--ahead/--on-demand", default=True, help="Whether the pool is told the demand before.")
@click.option("--seed", type=int, default=0, show_default=True, help="The same seed gives the same history.")
@click.option(
    "--set", "settings", multiple=True, metavar="NAME=VALUE",
    help="Of the cluster: nodes=64, pull_rate=4e8, writes=100, fault_provision=0.01, fault_hang=0.001 ...",
)  # fmt: skip
@json_option
def command(
    images: int, group_size: int, think: float, size: int, max_size: int | None, max_creating: int,
    write_rate: float, ahead: bool, seed: int, settings: tuple[str, ...], as_json: bool,
) -> int:  # fmt: skip
    """A batch on a simulated cluster, decided by the same code as in production, in virtual time."""
    from ..backends.simulated import Simulated
    from ..pool.model import CoreConfig
    from ..pool.operations import Deadlines
    from ..pool.simulation import Workload, simulate
    from ..spec import Spec
    from ..testing import VirtualClock

    for name, value in (("--think", think), ("--write-rate", write_rate)):
        if not value > 0:
            raise ConfigError(f"{name} must be a number above 0, not {value:g}")
    ceiling = max_size or max(1, images + images // 4)
    if size > ceiling:
        raise ConfigError(f"--size {size} is above --max-size {ceiling}")
    backend = Simulated(seed=seed, **_parsed(settings))
    config = CoreConfig(
        size=size, ceiling=ceiling, max_creating=max_creating, write_rate=write_rate, home=Spec().digest
    )
    work = Workload(specs=images, siblings=group_size, think=think, ahead=ahead)
    began = time.monotonic()
    with _quiet(), progress("rollouts", images * group_size, shown=not as_json) as told:
        deadlines = Deadlines(dispose=20.0)
        simulation = simulate(backend, config, work, deadlines=deadlines, seed=seed, progress=told)
        result = run_async(simulation, VirtualClock().run)
    took = time.monotonic() - began
    failed = int(result.missing > 0)
    if as_json:
        print_json({**result.to_dict(), "ceiling": ceiling, "real_s": took, "exit_status": failed})
    else:
        _print(result, ceiling, took)
    return failed


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """What befalls a pool that exists only in time is no warning about this machine; ``-v`` shows it."""
    logger = logging.getLogger("rlsandbox.pool")
    before = logger.level
    if logger.getEffectiveLevel() >= logging.WARNING:
        logger.setLevel(logging.ERROR)
    try:
        yield
    finally:
        logger.setLevel(before)


def _parsed(settings: tuple[str, ...]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for setting in settings:
        name, equals, text = setting.partition("=")
        try:
            value = tomllib.loads(f"x = {text}")["x"]
        except (ValueError, RecursionError):
            value = None
        if not equals or isinstance(value, bool) or not isinstance(value, (int, float, list)):
            raise ConfigError(f"--set {setting!r} must be NAME=NUMBER")
        found[name.strip()] = tuple(value) if isinstance(value, list) else value
    return found


def _print(result: Simulation, ceiling: int, took: float) -> None:
    from rich.markup import escape
    from rich.table import Table

    out = console()
    out.print(
        f"[bold]{result.requested:,} rollouts[/bold] in {result.batch_s:,.0f} virtual s ({took:.1f} s real): "
        f"{result.completed:,} completed, {sum(result.failed.values()):,} failed, "
        f"{result.retried:,} retried, {result.missing:,} without a record"
    )
    table = Table(title="TTFC (virtual s)", title_justify="left")
    for name in STATISTICS:
        table.add_column(name, justify="right")
    table.add_row(*(result.ttfc.text(name) for name in STATISTICS))
    out.print(table)
    out.print(
        f"sandboxes made {result.members:,}, at once at most {result.peak:,} (ceiling {ceiling:,}); "
        f"writes {result.writes:,}, refused with 429 {result.throttled:,}"
    )
    events = Table("event", "n")
    for name, n in sorted(result.counters.items()):
        if n:
            events.add_row(name, f"{n:,}")
    for kind, n in result.failed.most_common():
        events.add_row(escape(f"failed: {kind}"), f"{n:,}", style="red")
    out.print(events)
