"""``rlsandbox run``: tasks, a policy, a pool; numbers on the terminal, in JSON and as a plot."""

from __future__ import annotations

import contextlib
import dataclasses
import inspect
import math
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

import click

from ..errors import ConfigError, ImageError, SandboxError, UnsupportedError
from ..task import Task
from .common import (
    console,
    json_option,
    plot_file,
    pool_arguments,
    pool_options,
    print_json,
    with_image,
    written,
)
from .policy import find_policy
from .root import bad_input
from .signals import on_record, run_async

if TYPE_CHECKING:
    from ..ledger.report import Report

EVENTS = ("created", "recycled", "quarantined", "reset_failed", "primed", "disposed", "warm_hits", "claims")
"""Of :class:`~rlsandbox.PoolStats`, what is shown."""
WARM_S = 120.0


@click.command()
@click.option("--tasks", "source", default="demo", show_default=True, metavar="SOURCE",
              help="demo, humaneval, a .jsonl or .toml file, or a directory.")  # fmt: skip
@click.option("--policy", "policy_name", default="canonical", show_default=True, metavar="NAME",
              help="canonical, broken, or a callable as pkg.mod:fn.")  # fmt: skip
@click.option("--limit", type=int, metavar="N", help="The first N tasks only.")
@click.option(
    "--group-size", type=int, default=1, show_default=True, metavar="G", help="Rollouts of each task."
)
@click.option("--concurrency", type=int, metavar="N", help="Rollouts at once; default: the pool's ceiling.")
@click.option(
    "--retries", type=int, default=2, show_default=True, metavar="N", help="New attempts after failures."
)
@click.option("--timeout", type=float, metavar="SECONDS", help="Of one rollout, retries included.")
@click.option("--resume", is_flag=True, help="With --run NAME: leave out what that run has completed.")
@click.option(
    "--plot", "plot_file", metavar="FILE", help="TTFC distribution and timeline (.png, .svg, .pdf)."
)
@click.option("--require-coverage", type=float, metavar="SHARE", help="Exit 1 when fewer rollouts completed.")
@click.option("--require-reward", type=float, metavar="MEAN", help="Exit 1 when the mean reward is lower.")
@click.option("--progress/--no-progress", default=None, help="Progress bar; default: on a terminal.")
@click.option(
    "--warm/--cold", default=True, help="Wait for a ready pool before the first claim; default --warm."
)
@pool_options
@json_option
def command(source: str, policy_name: str, as_json: bool, **options: Any) -> int:
    """Run tasks with a policy and say what came of it.

    Exit status: 0 when every rollout completed (or --require-coverage is met); 1 when not; 2 when what was
    asked for is wrong.
    """
    coverage, reward = options["require_coverage"], options["require_reward"]
    if coverage is not None and not 0 <= coverage <= 1:
        raise ConfigError(f"--require-coverage must be a share from 0 to 1, not {coverage}")
    if reward is not None and not math.isfinite(reward):  # no mean is below NaN: such a gate is open
        raise ConfigError(f"--require-reward must be a number, not {reward}")
    policy = find_policy(policy_name)
    plot = plot_file(options["plot_file"])
    from ..tasks import load_tasks

    tasks = with_image(load_tasks(source, limit=options["limit"]), options["image"])
    if options["resume"] and options["run_name"] is None:
        raise ConfigError("--resume needs --run NAME: the run that is to be gone on with")
    rollouts = len(tasks) * max(1, options["group_size"])
    arguments, config = pool_arguments(options, at_most=rollouts)
    plan = {
        "group_size": options["group_size"],
        "concurrency": options["concurrency"],
        "retries": options["retries"],
        "timeout": options["timeout"],
        "resume": options["resume"],
        "progress": options["progress"],
    }
    # With --json, stdout is the object's alone: what policies and plugins print goes to stderr.
    aside = contextlib.redirect_stdout(sys.stderr) if as_json else contextlib.nullcontext()
    with aside:
        report, facts = _run(tasks, policy, arguments, plan, warm=options["warm"])
    _refuse_what_never_could(report)
    unplotted = written(plot, "--plot", report.plot)
    unmet = _unmet(report, coverage, reward)
    unmet += [unplotted] if unplotted else []
    heading = {
        "tasks": len(tasks),
        "rollouts": report.requested,
        "source": source,
        "policy": policy_name,
        "backend": config.backend.name,
        "run": facts["run"],
        "ledger": facts["ledger"],
        "plot": None if plot is None or unplotted else str(plot),
    }
    if as_json:
        told = {**heading, **report.to_dict(), "metrics": facts["metrics"], "pool": facts["stats"]}
        print_json({**told, "unmet": unmet, "exit_status": int(bool(unmet))})
    else:
        _print(heading, report, facts, unmet)
    return int(bool(unmet))


def _run(
    tasks: list[Task],
    policy: Callable[..., Any],
    arguments: dict[str, Any],
    plan: dict[str, Any],
    *,
    warm: bool,
) -> tuple[Report, dict[str, Any]]:
    """The rollouts in a pool of their own; everything is told before it closes and forgets."""
    import rlsandbox

    call = getattr(policy, "__call__", None)  # noqa: B004 (an object with an async __call__)
    if inspect.iscoroutinefunction(policy) or inspect.iscoroutinefunction(call):

        async def awaited() -> tuple[Report, dict[str, Any]]:
            async with rlsandbox.AsyncPool(**arguments) as pool:
                on_record(pool)
                if warm:
                    pool.expect(tasks[: pool.size])
                    with _as_it_was_said():
                        await pool.wait_ready(timeout=WARM_S)
                    pool.expect([], replace=True)  # the rollouts tell the pool themselves
                report = await pool.run_rollouts(tasks, policy, **plan)
                return report, _facts(pool)

        return run_async(awaited())
    with rlsandbox.Pool(**arguments) as pool:
        on_record(pool)
        if warm:
            pool.expect(tasks[: pool.size])
            with _as_it_was_said():
                pool.wait_ready(timeout=WARM_S)
            pool.expect([], replace=True)
        report = pool.run_rollouts(tasks, policy, **plan)
        return report, _facts(pool)


@contextlib.contextmanager
def _as_it_was_said() -> Iterator[None]:
    """What the place said, without the pool's account of its tries, when trying again cannot help."""
    try:
        yield
    except SandboxError as error:
        cause = error.__cause__
        if isinstance(cause, SandboxError) and bad_input(cause):
            raise cause from None
        raise


def _refuse_what_never_could(report: Report) -> None:
    """Raise when no rollout could ever have started, for what was asked for.

    An image that is not there, a workdir that cannot be made; a setup that failed may have had its reasons.
    """
    kinds = {f"{cls.__module__}.{cls.__qualname__}" for cls in (ConfigError, UnsupportedError, ImageError)}
    failures = [record.failure for record in report.records if record.failure is not None]
    wrong = [f for f in failures if f.error in kinds or f.kind == "workdir"]
    if wrong and len(wrong) == report.requested:
        first = wrong[0]
        raise ImageError(first.cause, kind=first.kind, phase=first.phase)


def _facts(pool: Any) -> dict[str, Any]:
    from ..metrics.table import metrics_table

    stats = pool.stats()
    return {
        "run": pool.run,
        "ledger": str(getattr(pool, "_pool", pool).ledger.path),
        "metrics": pool.metrics.to_dict(),
        "stats": dataclasses.asdict(stats),
        "table": metrics_table(pool, title="times (s)"),
    }


def _causes(report: Report, most: int = 5) -> list[tuple[str, int]]:
    """What went wrong, the most frequent first."""
    causes = Counter(
        f"{record.failure.kind} ({record.failure.phase}): {record.failure.cause}"
        for record in report.records
        if record.failure is not None
    )
    return causes.most_common(most)


def _unmet(report: Report, coverage: float | None, reward: float | None) -> list[str]:
    """Why the exit status is not 0."""
    unmet = []
    if coverage is not None:
        if report.coverage < coverage:
            unmet.append(f"coverage {report.coverage:.4f} is below {coverage:g}")
    elif report.completed < report.requested:
        unmet.append(f"{report.requested - report.completed} of {report.requested} rollouts did not complete")
    if reward is not None and (report.mean_reward is None or report.mean_reward < reward):
        got = "there is no reward" if report.mean_reward is None else f"mean reward {report.mean_reward:.4f}"
        unmet.append(f"{got}, {reward:g} is required")
    return unmet


def _print(heading: dict[str, Any], report: Report, facts: dict[str, Any], unmet: list[str]) -> None:
    from rich.markup import escape
    from rich.table import Table

    out = console()
    out.print(
        f"[bold]{heading['rollouts']} rollouts[/bold] of {heading['tasks']} tasks "
        + escape(
            f"({heading['source']}), policy {heading['policy']}, "
            f"backend {heading['backend']}, run {heading['run']}"
        )
    )
    report.print(out)
    out.print(facts["table"])
    stats = facts["stats"]
    events = Table(title="sandboxes", title_justify="left")
    for name in EVENTS:
        events.add_column(name.replace("_", " "), justify="right")
    events.add_row(*(f"{stats.get(name, 0):,}" for name in EVENTS))
    out.print(events)
    for cause, n in _causes(report):
        out.print(f"{n} x {cause}", style="red", markup=False, soft_wrap=True)
    for line in stats.get("residue", ()):
        out.print(f"residue: {line}", style="yellow", markup=False, soft_wrap=True)
    if heading["plot"]:
        out.print(f"plot: {heading['plot']}", markup=False, soft_wrap=True)
    for line in unmet:
        out.print(f"not met: {line}", style="red", markup=False, soft_wrap=True)
