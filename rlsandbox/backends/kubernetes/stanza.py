"""What a template that somebody else made must carry so that its pods can be sandboxes."""

from __future__ import annotations

from . import names
from .api import JSON, Api, ApiError


def stanza(config_map: str) -> JSON:
    """The part of a pod's spec that brings the keeper: to be merged into the first container's pod."""
    return {
        "restartPolicy": "Never",
        "automountServiceAccountToken": False,
        "enableServiceLinks": False,
        "terminationGracePeriodSeconds": 0,
        "containers": [
            {
                "command": list(names.COMMAND),
                "volumeMounts": [
                    {"name": names.KEEPER_VOLUME, "mountPath": names.KEEPER_DIR, "readOnly": True},
                    {"name": names.RUN_VOLUME, "mountPath": names.RUN_DIR},
                ],
            }
        ],
        "volumes": [
            {"name": names.KEEPER_VOLUME, "configMap": {"name": config_map, "defaultMode": 0o555}},
            {"name": names.RUN_VOLUME, "emptyDir": {"medium": "Memory", "sizeLimit": "1Mi"}},
        ],
    }


def problems(pod: JSON, config_map: str | None = None) -> list[str]:
    """What is wrong with a pod's spec, worst first; empty when sandboxes can be made of it."""
    found: list[str] = []
    containers = pod.get("containers") or []
    if not containers:
        return ["it has no container"]
    first = containers[0]
    volumes = {row.get("name"): row for row in pod.get("volumes") or ()}
    mounts = {row.get("mountPath"): row for row in first.get("volumeMounts") or ()}
    command = first.get("command") or []
    if command[:2] != names.COMMAND:
        found.append(f"the first container's command must begin with {names.COMMAND}, not {command[:2]}")
    keeper = volumes.get((mounts.get(names.KEEPER_DIR) or {}).get("name"), {})
    if names.KEEPER_DIR not in mounts or "configMap" not in keeper:
        found.append(f"the keeper's ConfigMap must be mounted at {names.KEEPER_DIR}")
    else:
        if config_map is not None and keeper["configMap"].get("name") != config_map:
            other = keeper["configMap"].get("name")
            found.append(f"the keeper's ConfigMap is {other!r}; this client's is {config_map!r}")
        if keeper["configMap"].get("defaultMode", 0o644) & 0o111 == 0:
            found.append("the keeper's ConfigMap needs defaultMode 0555")
    run = volumes.get((mounts.get(names.RUN_DIR) or {}).get("name"), {})
    if names.RUN_DIR not in mounts or "emptyDir" not in run:
        found.append(f"an emptyDir must be mounted at {names.RUN_DIR}")
    if pod.get("restartPolicy") not in ("Never", None):
        found.append("restartPolicy must be Never: a container that starts again has lost its sandbox")
    if pod.get("automountServiceAccountToken") is not False:
        found.append(
            "automountServiceAccountToken must be false: what runs there is not to be trusted with it"
        )
    adds = ((first.get("securityContext") or {}).get("capabilities") or {}).get("add") or ()
    if "SYS_ADMIN" in adds and pod.get("hostUsers") is not False and not pod.get("runtimeClassName"):
        found.append("SYS_ADMIN without hostUsers: false is power over the node: the keeper refuses it")
    if (first.get("securityContext") or {}).get("privileged"):
        found.append("a privileged container is refused")
    return found


async def missing_keeper(api: Api, paths: names.Paths, pod: JSON) -> str:
    """What is wrong with the ConfigMap that such a pod mounts; empty: it holds one, or nobody may look."""
    mounted = {row["name"]: row["configMap"] for row in pod.get("volumes") or () if "configMap" in row}
    first: JSON = (pod.get("containers") or [{}])[0]
    at: JSON = next(
        (row for row in first.get("volumeMounts") or () if row.get("mountPath") == names.KEEPER_DIR), {}
    )
    name = mounted.get(at.get("name"), {}).get("name")
    if not name:
        return ""  # problems() says so
    try:
        found = await api.get(f"{paths.config_maps}/{name}")
    except ApiError as error:
        if error.status == 404:
            return f"there is no ConfigMap {name!r}: `rlsandbox template show --keeper` prints one"
        if error.status == 403:
            return ""
        raise
    return "" if "keeper" in (found.get("binaryData") or {}) else f"ConfigMap {name!r} holds no keeper"
