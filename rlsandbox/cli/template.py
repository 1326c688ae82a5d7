"""``rlsandbox template``: what sandbox templates of a cluster must carry; the rights of a run."""

from __future__ import annotations

import json
from importlib import resources
from typing import Any

import click

from ..backends.registry import backend_class
from ..errors import ConfigError
from ..spec import Spec
from .common import json_option, print_json
from .reap import parse_duration
from .signals import run_async


@click.group()
def command() -> None:
    """Sandbox templates of a cluster: what they must carry, and whether they do."""


def _extra() -> None:
    backend_class("kubernetes")  # a clear word where its extra is not installed


@command.command()
@click.option("--image", metavar="IMAGE", default="YOUR-IMAGE", show_default=True)
@click.option(
    "--mode",
    type=click.Choice(["overlay", "userns", "manifest", "replace"]),
    default="overlay",
    show_default=True,
)
@click.option("--memory", metavar="SIZE", help="Such as 2GiB.")
@click.option("--cpu", type=float, metavar="CORES")
@click.option("--gvisor-class", metavar="NAME", help="For pods under gVisor: their RuntimeClass.")
@click.option("--arch", default=None, metavar="ARCH", help="x86_64 or aarch64; default this machine's.")
@click.option("--keeper", "with_keeper", is_flag=True, help="Also the keeper's ConfigMap (300 KB of base64).")
@json_option
def show(
    image: str, mode: str, memory: str | None, cpu: float | None, gvisor_class: str | None, arch: str | None,
    with_keeper: bool, as_json: bool,
) -> None:  # fmt: skip
    """A SandboxTemplate and SandboxWarmPool, ready to be changed and applied (JSON, which is YAML)."""
    _extra()
    from ..backends.kubernetes import manifests
    from ..keeper.build import keeper_binary, machine

    arch = arch or machine()
    if arch not in manifests.ARCH:
        raise ConfigError(f"--arch must be one of {', '.join(manifests.ARCH)}, not {arch!r}")
    keeper = manifests.keeper_config_map(keeper_binary(arch), arch)
    if gvisor_class is not None and mode in ("userns", "manifest"):
        raise ConfigError(f"--mode {mode}: under gVisor there are overlay and replace")
    spec = Spec(
        image=image,
        memory=memory,
        cpu=cpu,
        network="host" if mode in manifests.SHARED_NETWORK else "none",
        user="1000" if mode == "manifest" else None,
        isolation="auto" if gvisor_class is None else "gvisor",
    )
    shape = manifests.Shape(mode=mode, arch=arch, gvisor_class=gvisor_class)
    pod = manifests.pod_spec(spec, shape, keeper["metadata"]["name"])
    made = [
        manifests.template("rlsandbox-example", pod),
        manifests.warm_pool("rlsandbox-example", "rlsandbox-example", 2),
    ]
    items = [*([keeper] if with_keeper else []), *made]
    if as_json:
        print_json(_list(items))
        return
    for item in items:
        click.echo("---\n" + json.dumps(item, indent=2))


@command.command()
@click.argument("name")
@click.option("--context", metavar="NAME", help="Of the kubeconfig.")
@click.option("--namespace", metavar="NAME", help="Of the template.")
@json_option
def check(name: str, context: str | None, namespace: str | None, as_json: bool) -> int:
    """Whether SandboxTemplate NAME can be used with Kubernetes(template=...). Exit status 1: it cannot."""
    _extra()
    found = run_async(_check(name, context, namespace))
    if as_json:
        print_json({"template": name, "ok": not found, "problems": found})
    else:
        for line in found:
            click.echo(f"- {line}")
        click.echo("it can be used" if not found else "see: rlsandbox template show")
    return int(bool(found))


async def _check(name: str, context: str | None, namespace: str | None) -> list[str]:
    from ..backends.kubernetes.api import Api, ApiError
    from ..backends.kubernetes.names import Paths, check_name
    from ..backends.kubernetes.stanza import missing_keeper, problems

    check_name(name, "template")
    api = await Api.connect(context=context, namespace=namespace)
    paths = Paths(api.namespace)
    try:
        template: dict[str, Any] = await api.get(f"{paths.templates}/{name}")
        pod = template["spec"]["podTemplate"]["spec"]
        missing = await missing_keeper(api, paths, pod)
    except ApiError as error:
        if error.status == 404:
            raise ConfigError(f"namespace {api.namespace!r} has no SandboxTemplate {name!r}") from error
        raise
    finally:
        await api.close()
    return [*problems(pod), *([missing] if missing else [])]


@command.command()
@click.option(
    "--image", metavar="IMAGE", required=True, help="One in which rlsandbox-pool[kubernetes] is installed."
)
@click.option("--schedule", metavar="CRON", default="*/10 * * * *", show_default=True)
@click.option("--older-than", metavar="TIME", help="Only what is older: 90s, 30m, 1h, 2d.")
@json_option
def reap(image: str, schedule: str, older_than: str | None, as_json: bool) -> None:
    """A CronJob that removes what dead runs left in its namespace, with the rights that it needs, as YAML."""
    if older_than is not None:
        parse_duration(older_than, "--older-than")
    if len(schedule.split()) != 5:
        raise ConfigError(f"--schedule must have five fields, such as '*/10 * * * *', not {schedule!r}")
    text = resources.files("rlsandbox").joinpath("backends/kubernetes/reap.yaml").read_text()
    more = "" if older_than is None else f", --older-than, {json.dumps(older_than)}"
    for word, value in (("IMAGE", json.dumps(image)), ("SCHEDULE", json.dumps(schedule)), (", MORE", more)):
        text = text.replace(word, value)
    _print(text, as_json)


@command.command()
@click.option("--nodes", "part", flag_value="-nodes", help="To look at nodes, which are the whole cluster's.")
@click.option("--closed", "part", flag_value="-closed", help="To hold network='none' by a NetworkPolicy.")
@json_option
def rbac(part: str | None, as_json: bool) -> None:
    """The least rights that a run needs, as YAML; or those for one thing more."""
    name = f"rbac{part or ''}.yaml"
    _print(resources.files("rlsandbox").joinpath(f"backends/kubernetes/{name}").read_text(), as_json)


def _print(text: str, as_json: bool) -> None:
    """YAML as it is, with its comments; as JSON one list, which kubectl takes as well."""
    if not as_json:
        click.echo(text, nl=False)
        return
    _extra()
    import yaml  # type: ignore[import-untyped]  # comes with the kubernetes client

    print_json(_list(list(yaml.safe_load_all(text))))


def _list(items: list[Any]) -> dict[str, Any]:
    return {"apiVersion": "v1", "kind": "List", "items": items}
