"""``rlsandbox plan``: which image goes to which node, and bringing them there."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from ..backends.registry import backend_class
from ..config import load_config
from ..errors import ConfigError
from ..spec import Spec, parse_size
from ..tasks import load_tasks
from .common import console, json_option, print_json, progress, with_config, writable_file
from .signals import run_async

if TYPE_CHECKING:
    from ..images import Demand, Image, Inventory, Plan
    from ..images.hydrate import Hydration

_SHOWN, _ERRORS_SHOWN = 20, 5


@click.command()
@click.argument("tasks", required=False)
@click.option(
    "--group-size", type=click.IntRange(1), default=1, show_default=True, help="Rollouts of a task."
)
@click.option("--limit", type=click.IntRange(1), metavar="N", help="The first N tasks only.")
@click.option("--image", metavar="IMAGE", help="Of tasks that name none.")
@click.option("--memory", metavar="SIZE", help="Of a sandbox: how many a node can run.")
@click.option("--cpu", type=float, metavar="CORES", help="Likewise.")
@click.option("--cluster", metavar="CONTEXT", help="Of the kubeconfig; default the current one.")
@click.option("--namespace", metavar="NAME", help="In which images are pulled.")
@click.option("--selector", default="", metavar="LABELS", help="Only nodes with these labels: a=b,c=d.")
@click.option(
    "--nodes", type=click.IntRange(1), metavar="N", help="No cluster: N empty nodes of one's fancy."
)
@click.option(
    "--node-disk", metavar="SIZE", default="500GiB", show_default=True, help="For images, with --nodes."
)
@click.option(
    "--node-sandboxes", type=click.IntRange(1), default=100, show_default=True, help="With --nodes."
)
@click.option("--offline", is_flag=True, help="Ask no registry; sizes are those that nodes tell.")
@click.option("--mirror", "mirrors", multiple=True, metavar="HOST=URL", help="Where to ask instead of HOST.")
@click.option(
    "--assume", default="1GiB", show_default=True, metavar="SIZE", help="Of images of unknown size."
)
@click.option("--unpack", type=float, metavar="N", help="Bytes on disk per compressed byte; default 3.5.")
@click.option("--split", is_flag=True, help="What does not fit on disk goes into later waves.")
@click.option("--out", metavar="FILE", help="Write the plan there, as JSON.")
@click.option("--from", "source", metavar="FILE", help="Carry out a plan that --out wrote (with --apply).")
@click.option("--apply", "carry_out", is_flag=True, help="Bring the images to the nodes.")
@click.option("--wave", type=click.IntRange(0), default=0, show_default=True, help="Which, with --apply.")
@click.option(
    "--per-node", type=click.IntRange(1), default=2, show_default=True, help="Pulls at once on a node."
)
@click.option(
    "--at-once", type=click.IntRange(1), default=32, show_default=True, help="Pulls at once on all."
)
@click.option("--timeout", type=float, default=900.0, show_default=True, help="Seconds for one image.")
@with_config
@json_option
def command(tasks: str | None, source: str | None, carry_out: bool, out: str | None, **how: Any) -> int:
    """Plan which images TASKS need on which nodes of a cluster, and bring them there (--apply).

    Exit status 1: some images fit nowhere, or could not be brought.
    """
    if (tasks is None) == (source is None):
        raise ConfigError("name a task file (or demo, humaneval), or a plan: --from FILE")
    if source is not None and not carry_out:
        raise ConfigError("--from FILE is for --apply")
    if how["nodes"] is not None and carry_out:
        raise ConfigError("--nodes makes nodes up: there is nothing to bring images to (--apply)")
    if not how["timeout"] > 0 or (how["unpack"] is not None and not how["unpack"] >= 1):
        raise ConfigError("--timeout must be above 0, and --unpack at least 1")
    target = writable_file(out, "--out")
    return run_async(_run(tasks, source, carry_out, target, how))


async def _run(
    tasks: str | None, source: str | None, carry_out: bool, target: Path | None, how: dict[str, Any]
) -> int:
    from ..images import Plan, demand_of, plan_images

    config = load_config(how["config_file"], how["profile"], {"backend": "kubernetes"})
    given = config.spec
    spec = Spec(
        image=how["image"] or given.image, memory=how["memory"] or given.memory, cpu=how["cpu"] or given.cpu,
        isolation=given.isolation,
    )  # fmt: skip
    backend = None
    if how["nodes"] is None:
        kind: Any = backend_class("kubernetes")  # a clear word where its extra is not installed
        options = dict(config.backend.options)
        options |= {key: how[name] for key, name in _OPTIONS.items() if how[name] is not None}
        backend = kind(**options)
    api = await backend.connect_api() if backend is not None else None
    try:
        shape, notes = await _shape(api, backend, spec) if backend is not None else (None, ())
        if source is not None:
            plan = Plan.load(source)
        else:
            assert tasks is not None
            demand = demand_of(
                load_tasks(tasks, limit=how["limit"]), group_size=how["group_size"], spec=spec,
                default=shape.image if shape is not None else None,
            )  # fmt: skip
            inventory = await _inventory(api, shape, spec, how)
            inventory = replace(inventory, notes=(*inventory.notes, *notes))
            arch = _arch(shape)
            images = {} if how["offline"] else await _ask(demand, arch, how)
            plan = plan_images(
                demand, images, inventory, split=how["split"], assumed=parse_size(how["assume"], "--assume"),
                **({} if how["unpack"] is None else {"unpack": how["unpack"]}),
            )  # fmt: skip
            _why_unknown(plan, images)
        if target is not None:
            plan.save(target)
        done = None
        if not how["as_json"]:
            _print(plan)
        if carry_out:
            assert api is not None
            if how["wave"] >= plan.waves:
                raise ConfigError(f"--wave {how['wave']}: the plan has {plan.waves}, from 0")
            done = await _apply(plan, api, shape, how)
    finally:
        if api is not None:
            await api.close()
    failed = int(bool(plan.refused) or (done is not None and bool(done.failed)))
    if how["as_json"]:
        print_json(
            {**plan.to_json(), "applied": None if done is None else _told(done), "exit_status": failed}
        )
    return failed


_OPTIONS = {"context": "cluster", "namespace": "namespace", "image": "image"}


async def _shape(api: Any, backend: Any, spec: Spec) -> tuple[Any, tuple[str, ...]]:
    """The shape of sandboxes' pods, with what their RuntimeClass adds; and what could not be learned."""
    from ..images.inventory import scheduling

    shape = backend.shape
    name = shape.gvisor_class if spec.isolation == "gvisor" else shape.runtime_class
    if name is None:
        return shape, ()
    labels, tolerations, notes = await scheduling(api, name)
    return replace(
        shape, node_selector={**shape.node_selector, **labels}, tolerations=(*shape.tolerations, *tolerations)
    ), notes


def _arch(shape: Any) -> str:
    if shape is None:
        return "amd64"
    from ..backends.kubernetes.manifests import ARCH

    return ARCH[shape.arch]


async def _inventory(api: Any, shape: Any, spec: Spec, how: dict[str, Any]) -> Inventory:
    from ..images import Inventory, Node

    if api is None:
        room, each = parse_size(how["node_disk"], "--node-disk"), how["node_sandboxes"]
        made = tuple(Node(f"node-{n}", room=room, sandboxes=each) for n in range(how["nodes"]))
        return Inventory(made, ("nodes are made up: --nodes",))
    from ..images.inventory import read_inventory  # needs the extra

    labels = [f"{key}={value}" for key, value in shape.node_selector.items()]
    selector = ",".join([*labels, *([how["selector"]] if how["selector"] else [])])
    found = await read_inventory(
        api, spec=spec, selector=selector, arch=_arch(shape), tolerations=shape.tolerations
    )
    if not found.nodes:
        raise ConfigError(f"{api.where} has no node" + (f" with labels {selector}" if selector else ""))
    return found


async def _ask(demand: list[Demand], arch: str, how: dict[str, Any]) -> dict[str, Image]:
    from ..images.registry import Registries

    mirrors: dict[str, str] = {}
    for text in how["mirrors"]:
        host, equals, url = text.partition("=")
        if not (host and equals):
            raise ConfigError(f"--mirror must be HOST=URL, not {text!r}")
        mirrors[host] = url
    async with Registries(arch=arch, mirrors=mirrors) as registries:
        with progress("asking registries", len(demand), not how["as_json"]) as step:
            return await registries.images([row.image for row in demand], told=lambda _: step())


async def _apply(plan: Plan, api: Any, shape: Any, how: dict[str, Any]) -> Hydration:
    from ..images.hydrate import Hydrated, hydrate

    todo = plan.missing(how["wave"])
    with progress("bringing images", len(todo), not how["as_json"]) as step:
        said: Counter[str] = Counter()

        def told(row: Hydrated) -> None:
            step()
            if row.error is None:
                return
            kind = row.error.kind
            said[kind] += 1
            if said[kind] <= _ERRORS_SHOWN:
                click.echo(f"{row.pull.image} to {row.pull.node}: {row.error.message}", err=True)

        done = await hydrate(
            todo,
            api,
            shape,
            per_node=how["per_node"],
            at_once=how["at_once"],
            timeout=how["timeout"],
            told=told,
        )
    for kind, count in said.items():
        if count > _ERRORS_SHOWN:
            click.echo(f".. and {count - _ERRORS_SHOWN} more of kind {kind} (--json has all)", err=True)
    if not how["as_json"]:
        good = len(done.rows) - len(done.failed)
        click.echo(
            f"brought {good} of {len(todo)} images in {done.seconds:.1f} s ({_size(done.bytes)}, "
            f"{done.requests} requests)"
        )
    return done


def _told(done: Hydration) -> dict[str, Any]:
    rows = [
        {
            "image": row.pull.image, "node": row.pull.node, "seconds": round(row.seconds, 3),
            "bytes": row.pull.bytes, "error": None if row.error is None else row.error.message,
        }
        for row in done.rows
    ]  # fmt: skip
    return {"seconds": done.seconds, "requests": done.requests, "bytes": done.bytes, "pulls": rows}


def _why_unknown(plan: Plan, images: dict[str, Image]) -> None:
    reasons: dict[str, int] = {}
    for name in plan.unknown:
        why = images[name].why if name in images else ""
        if why:
            reasons[why.replace(name, "...")] = reasons.get(why.replace(name, "..."), 0) + 1
    for why, count in sorted(reasons.items(), key=lambda row: -row[1])[:5]:
        click.echo(f"{count} of unknown size: {why}", err=True)


def _size(value: float) -> str:
    for unit in ("B", "KiB", "MiB", "GiB"):
        if value < 1024:
            return f"{value:.0f} {unit}" if unit == "B" else f"{value:.1f} {unit}"
        value /= 1024
    return f"{value:.1f} TiB"


def _print(plan: Plan) -> None:
    from rich.markup import escape
    from rich.table import Table

    out = console()
    waves = "" if plan.waves == 1 else f", in {plan.waves} waves"
    out.print(
        f"[bold]{plan.images:,} images for {plan.rollouts:,} rollouts[/bold] on {len(plan.nodes)} nodes: "
        f"{_size(plan.bytes)} to move{waves} (all layers once: {_size(plan.unique_bytes)}; "
        f"if nothing were shared: {_size(plan.image_bytes)})"
    )
    table = Table("node", *(f"{name}" for name in ("rollouts", "images", "to move", "on disk", "room")))
    for use in plan.nodes[:_SHOWN]:
        room = "unknown" if use.room is None else _size(use.room)
        table.add_row(
            escape(use.node),
            f"{use.rollouts:,}",
            f"{use.images:,}",
            _size(use.bytes),
            _size(use.working_set),
            room,
        )
    if len(plan.nodes) > _SHOWN:
        table.add_row(f".. {len(plan.nodes) - _SHOWN} more (--json)")
    out.print(table)
    if plan.unknown:
        out.print(
            f"{len(plan.unknown):,} of unknown size, each taken for {_size(plan.assumed)} if no node tells: "
            + escape(", ".join(plan.unknown[:3])) + (" .." if len(plan.unknown) > 3 else "")
        )  # fmt: skip
    for note in plan.notes:
        out.print(f"- {escape(note)}")
    for image, why in list(plan.refused.items())[:_SHOWN]:
        out.print(f"[red]does not fit: {escape(image)}: {escape(why)}[/red]")
    if len(plan.refused) > _SHOWN:
        out.print(f"[red].. and {len(plan.refused) - _SHOWN} more[/red]")
