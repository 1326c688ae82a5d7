"""Templates, warm pools and keepers stay for the next run: which of them nobody wants any more."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from ...errors import SandboxError
from . import names
from .api import JSON, Api
from .lease import LATELY_S, YOUNG_S, Leftover, has_run_out, leftover, listed, server_time
from .names import Paths


class InUseError(SandboxError):
    """A run may want what is unused at present."""


async def unused(api: Api, *, older_s: float) -> list[Leftover]:
    """Templates, warm pools and keepers of ours that are that old and that nothing refers to.

    Whatever is still wanted is made again by the run that wants it, as it was.

    Raises:
        InUseError: a run lives in the namespace, or did within the last hour: it may want any of it.
    """
    paths = Paths(api.namespace)
    now = await server_time(api)
    for lease in await listed(api, paths.leases, ours=True):
        if not has_run_out(lease, now, since=LATELY_S):
            raise InUseError(
                f"a run uses namespace {api.namespace}, or did within the last hour "
                f"(Lease {lease['metadata']['name']})"
            )
    templates, warm_pools = await listed(api, paths.templates), await listed(api, paths.warm_pools)
    claimed = {_at(claim, "spec", "warmPoolRef", "name") for claim in await listed(api, paths.claims)}

    def old(kind: str, path: str, rows: Iterable[JSON]) -> list[Leftover]:
        found = [leftover(kind, row, path, now) for row in rows if _ours(row)]
        return [one for one in found if one.age_s >= max(older_s, YOUNG_S)]

    pools = old(
        "SandboxWarmPool",
        paths.warm_pools,
        (row for row in warm_pools if _name(row) not in claimed and not _at(row, "spec", "replicas")),
    )
    going = {one.name for one in pools}
    wanted = {_at(row, "spec", "sandboxTemplateRef", "name") for row in warm_pools if _name(row) not in going}
    made = old("SandboxTemplate", paths.templates, (row for row in templates if _name(row) not in wanted))
    going = {one.name for one in made}
    pods = [_at(row, "spec", "podTemplate", "spec") for row in templates if _name(row) not in going]
    pods += [row.get("spec") for row in await listed(api, paths.pods)]
    mounted = {_at(volume, "configMap", "name") for pod in pods for volume in _at(pod, "volumes") or ()}
    keepers = await listed(api, paths.config_maps, ours=True)
    return [
        *pools,
        *made,
        *old(
            "ConfigMap",
            paths.config_maps,
            (row for row in keepers if _name(row).startswith(names.KEEPERS) and _name(row) not in mounted),
        ),
    ]


def _name(row: JSON) -> str:
    return str(row["metadata"]["name"])


def _ours(row: JSON) -> bool:
    """Of a run that has ended well; what carries a run's name is that run's (a benchmark's)."""
    labels = row["metadata"].get("labels") or {}
    return labels.get(names.MANAGED) == "true" and names.RUN not in labels


def _at(found: Any, *keys: str) -> Any:
    for key in keys:
        found = found.get(key) if isinstance(found, dict) else None
    return found
