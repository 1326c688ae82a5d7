"""``rlsandbox bench ttfc``."""

from __future__ import annotations

import datetime
import json
import re
import shlex
from typing import TYPE_CHECKING, Any

import click

from ..backends.registry import backend_class, backend_names
from ..errors import ConfigError
from ..spec import Spec
from .common import console, json_option, print_json, writable_file, written
from .signals import run_async

if TYPE_CHECKING:
    from ..bench.ttfc import Bench, Plan, TtfcReport

DEFAULT = {
    "kubernetes": ("job", "peer", "cold", "warm", "recycled"),
    "local": ("cold", "warm", "recycled"),
    "simulated": ("cold", "warm", "recycled"),
}


@click.command("ttfc")
@click.option("--backend", default="kubernetes", show_default=True, metavar="NAME")
@click.option(
    "--scenario", "scenarios", multiple=True, metavar="NAME",
    help="job, peer, cold, warm, recycled, high-cardinality; may be repeated; default: what the backend has.",
)  # fmt: skip
@click.option("--rounds", default=5, show_default=True, type=click.IntRange(1, 100))
@click.option("--rollouts", default=64, show_default=True, type=click.IntRange(1, 100_000))
@click.option(
    "--concurrency", default=8, show_default=True, type=click.IntRange(1, 10_000), help="Rollouts at once."
)
@click.option("--size", type=click.IntRange(1, 10_000), help="Of the pool; default: --concurrency.")
@click.option(
    "--think", default=0.0, show_default=True, type=click.FloatRange(0, 3600),
    help="Seconds that a rollout holds its sandbox after its first command.",
)  # fmt: skip
@click.option("--command", "words", default="/bin/echo hi", show_default=True, help="What a rollout runs.")
@click.option(
    "--image", "images", multiple=True, metavar="IMAGE",
    help="May be repeated: job and cold are measured with each, the others with the first.",
)  # fmt: skip
@click.option(
    "--many", multiple=True, metavar="IMAGE", help="Images of high-cardinality; reg/task/{000..199}:1 is 200."
)
@click.option("--group-size", default=2, show_default=True, type=click.IntRange(1), help="Rollouts of each.")
@click.option("--evict", metavar="COMMAND", help="Removes {image} from all nodes, before each batch of cold.")
@click.option("--memory", metavar="SIZE", help="Of each sandbox.")
@click.option("--context", metavar="NAME", help="Of the kubeconfig.")
@click.option("--kubeconfig", metavar="FILE")
@click.option("--namespace", metavar="NAME", help="Where sandboxes are made.")
@click.option("--mode", default="auto", show_default=True, help="Reset mode to make pods for.")
@click.option(
    "--pull-policy", default="IfNotPresent", show_default=True,
    type=click.Choice(["IfNotPresent", "Always", "Never"]),
)  # fmt: skip
@click.option("--runtime-class", metavar="NAME", help="Of all pods.")
@click.option(
    "--write-rate", default=200.0, show_default=True, type=click.FloatRange(0.1), help="Writes a second."
)
@click.option("--output", metavar="FILE", help="Write the JSON report there too.")
@click.option("--html", metavar="FILE", help="Write a report with plots, one file that fetches nothing.")
@click.option("--gate", is_flag=True, help="Exit with 1 when a goal is missed, or a rollout failed.")
@json_option
def command(as_json: bool, output: str | None, html: str | None, gate: bool, **options: Any) -> int:
    """Time to first command of batches of rollouts, beside Jobs and beside a claim for each rollout."""
    json_file, html_file = writable_file(output, "--output"), writable_file(html, "--html")
    plan, bench = _plan(options), _bench(options)
    name = options["backend"]
    report = _run(
        bench, plan, name, lambda text: None if as_json else click.echo(f"  {text}", err=True),
    )  # fmt: skip
    from ..bench.html import page

    text = json.dumps(report.to_dict(), indent=2, default=str) + "\n"
    told = (
        written(json_file, "--output", lambda file: file.write_text(text, encoding="utf-8")),
        written(html_file, "--html", lambda file: file.write_text(page(report), encoding="utf-8")),
    )
    if as_json:
        print_json(report.to_dict())
    else:
        _print(report)
    unwritten = [line for line in told if line]
    for line in unwritten:
        click.echo(f"rlsandbox: {line}", err=True)
    failed = any(batch.failures for line in report.lines for batch in line.rounds)
    missed = gate and (failed or not all(verdict.ok for verdict in report.verdicts()))
    return int(missed or bool(unwritten))


def _plan(options: dict[str, Any]) -> Plan:
    from ..bench.ttfc import Plan

    try:
        words = shlex.split(options["words"])
    except ValueError as error:
        raise ConfigError(f"--command: {error}") from None
    many = [image for given in options["many"] for image in expanded(given)]
    scenarios = options["scenarios"] or DEFAULT.get(options["backend"], ("cold", "warm", "recycled"))
    if not options["scenarios"] and many:
        scenarios = (*scenarios, "high-cardinality")
    return Plan(
        scenarios=tuple(dict.fromkeys(scenarios)), rounds=options["rounds"], rollouts=options["rollouts"],
        concurrency=options["concurrency"], size=options["size"], think=options["think"], command=words,
        images=options["images"], many=many, group=options["group_size"], evict=options["evict"],
    )  # fmt: skip


def expanded(text: str) -> list[str]:
    """``reg/task/{000..199}:1`` as 200 names; what has no such range is one."""
    found = re.search(r"\{(\d+)\.\.(\d+)\}", text)
    if found is None:
        return [text]
    first, last = int(found[1]), int(found[2])
    if last < first:
        raise ConfigError(f"{text!r}: {found[2]} is below {found[1]}")
    width = len(found[1])
    return [f"{text[: found.start()]}{n:0{width}}{text[found.end() :]}" for n in range(first, last + 1)]


def _bench(options: dict[str, Any]) -> Bench:
    name = options["backend"]
    spec = Spec(memory=options["memory"])
    if name not in backend_names():
        backend_class(name)  # says which there are
    if name == "kubernetes":
        backend_class(name)  # a clear word where its extra is not installed
        from ..bench.kubernetes import KubernetesBench

        how = {key: options[key] for key in ("kubeconfig", "context", "namespace")}
        return KubernetesBench(
            how, image=options["images"][0] if options["images"] else None,
            pull_policy=options["pull_policy"], runtime_class=options["runtime_class"],
            write_rate=options["write_rate"], spec=spec, options={"mode": options["mode"]},
        )  # fmt: skip
    from ..bench.pools import PoolBench

    for option in ("kubeconfig", "context", "namespace", "runtime_class"):
        if options[option] is not None:
            raise ConfigError(f"--{option.replace('_', '-')} is for --backend kubernetes, not {name}")
    return PoolBench(backend_class(name), spec=spec)


def _run(bench: Bench, plan: Plan, backend: str, progress: Any) -> TtfcReport:
    from ..bench.ttfc import run_ttfc

    began = datetime.datetime.now().astimezone().isoformat(timespec="seconds")
    run = run_ttfc(bench, plan, backend=backend, progress=progress, began=began)
    if backend == "simulated":
        from ..testing import VirtualClock

        return run_async(run, VirtualClock().run)
    return run_async(run)


def _number(value: float | None, form: str) -> str:
    return "-" if value is None else f"{value:{form}}"


def _print(report: TtfcReport) -> None:
    from rich.table import Table

    from ..bench.html import seconds
    from ..metrics.series import STATISTICS

    screen, plan = console(), report.plan
    table = Table(
        title=f"TTFC on {report.backend}: {plan.rollouts} rollouts, {plan.concurrency} at once, "
        f"median of {plan.rounds} interleaved rounds"
    )
    for name in ("scenario", *STATISTICS, "batch", "command", "pods", "requests", "failed"):
        table.add_column(name, justify="left" if name == "scenario" else "right", no_wrap=name != "scenario")
    for line in report.lines:
        told = line.to_dict()
        table.add_row(
            line.label, *(seconds(told["ttfc_s"][name]) for name in STATISTICS), seconds(told["batch_s"]),
            seconds(told["command_s"]), _number(told["sandboxes"], "g"),
            _number(told["requests_per_rollout"], ".2f"),
            str(sum(told["failures"].values())),
        )  # fmt: skip
    screen.print(table)
    click.echo("requests: of the API server, a rollout. Each round, P50 (batch):")
    for line in report.lines:
        each = "  ".join(
            f"{seconds(b.summary.p50)} ({seconds(None if b.empty else b.batch_s)})" for b in line.rounds
        )
        click.echo(f"  {line.label}: {each}")
    for line in report.lines:
        for kind, n in line.to_dict()["failures"].items():
            click.echo(f"{line.label}: {n} rollouts failed: {kind}")
    if not report.verdicts():
        return
    goals = Table(title="Goals")
    for name in ("what", "reached", "at most", "", "each round"):
        goals.add_column(name, justify="left" if name in ("what", "") else "right")
    for v in report.verdicts():
        each = "  ".join(f"{value:.3g}" for value in v.rounds)
        word = "ok" if v.ok else "missed"
        goals.add_row(v.label, f"{v.reached:.3g} {v.unit}", f"{v.most:g} {v.unit}", word, each)
    screen.print(goals)
