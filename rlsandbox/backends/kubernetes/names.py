"""Names, labels and numbers that others rely on."""

from __future__ import annotations

import getpass
import hashlib
import json
import re
import socket
from collections.abc import Mapping
from typing import Any

from ...errors import ConfigError

GROUP, EXTENSIONS, VERSION = "agents.x-k8s.io", "extensions.agents.x-k8s.io", "v1beta1"
API_VERSION = f"{EXTENSIONS}/{VERSION}"

MANAGED = "rlsandbox/managed"
RUN, OWNER, MEMBER = "rlsandbox/run", "rlsandbox/owner", "rlsandbox/member"
POD_RUN, POD_OWNER = "sandbox.users.io/rlsandbox-run", "sandbox.users.io/rlsandbox-owner"
"""On pods: the domain is the one that agent-sandbox lets claims label pods with."""
LABELS = "rlsandbox/labels"
"""An annotation: the labels that the pool gave, as JSON; its keys need not be Kubernetes'."""

KEEPER_DIR, RUN_DIR = "/.rlsandbox", "/.rlsandbox-run"
KEEPER_VOLUME, RUN_VOLUME = "rlsandbox-keeper", "rlsandbox-run"
KEEPERS = "rlsandbox-keeper-"
"""How the names of keepers' ConfigMaps begin."""
COMMAND = [f"{KEEPER_DIR}/keeper", "init"]
CONNECT = [f"{KEEPER_DIR}/keeper", "connect"]
CONTAINER = "sandbox"

_BAD = re.compile(r"[^a-z0-9-]+")
_BAD_VALUE = re.compile(r"[^A-Za-z0-9._-]+")


def digest(data: Any, length: int = 12) -> str:
    return hashlib.sha256(json.dumps(data, sort_keys=True).encode()).hexdigest()[:length]


def dns_label(text: str, *, limit: int = 63) -> str:
    """*text* as a DNS label; one that had to be changed ends with its hash, so that two stay two."""
    clean = _BAD.sub("-", text.lower()).strip("-") or "x"
    if clean == text and len(clean) <= limit:
        return clean
    return f"{clean[: limit - 9].rstrip('-')}-{hashlib.sha256(text.encode()).hexdigest()[:8]}"


_LABEL = r"[a-z0-9]([-a-z0-9]{0,61}[a-z0-9])?"
_NAME = re.compile(rf"{_LABEL}(\.{_LABEL})*\Z")


def check_name(text: str, what: str, *, dots: bool = True) -> str:
    """*text*, which may be the name of an object; it becomes a part of URLs.

    Raises:
        ConfigError: it cannot be one.
    """
    if not _NAME.match(text) or len(text) > 253 or (not dots and "." in text):
        raise ConfigError(f"{what} {text!r} cannot be a name: letters a-z, digits and '-' only")
    return text


def label_value(text: str) -> str:
    return _BAD_VALUE.sub("-", text)[:63].strip("-_.")


def owner() -> str:
    """Who runs this: ``user.host``, as a label's value."""
    try:
        user = getpass.getuser()
    except (KeyError, OSError):  # no entry for this uid
        user = "unknown"
    return label_value(f"{user}.{socket.gethostname()}")


def labels_of(item: Mapping[str, Any]) -> dict[str, str]:
    """The pool's labels of an object of ours."""
    text = (item["metadata"].get("annotations") or {}).get(LABELS)
    try:
        found = json.loads(text) if text else {}
    except ValueError:
        return {}
    return {str(key): str(value) for key, value in found.items()} if isinstance(found, dict) else {}


def level_of(namespace: Mapping[str, Any]) -> str:
    """The Pod Security level that it enforces; empty: none."""
    return str((namespace["metadata"].get("labels") or {}).get("pod-security.kubernetes.io/enforce", ""))


class Paths:
    """Of the collections in one namespace."""

    def __init__(self, namespace: str) -> None:
        core, ext = (
            f"/api/v1/namespaces/{namespace}",
            f"/apis/{EXTENSIONS}/{VERSION}/namespaces/{namespace}",
        )
        self.namespace = core
        self.pods, self.config_maps, self.events = f"{core}/pods", f"{core}/configmaps", f"{core}/events"
        self.claims, self.templates = f"{ext}/sandboxclaims", f"{ext}/sandboxtemplates"
        self.warm_pools = f"{ext}/sandboxwarmpools"
        self.sandboxes = f"/apis/{GROUP}/{VERSION}/namespaces/{namespace}/sandboxes"
        self.policies = f"/apis/networking.k8s.io/v1/namespaces/{namespace}/networkpolicies"
        self.jobs = f"/apis/batch/v1/namespaces/{namespace}/jobs"
        self.leases = f"/apis/coordination.k8s.io/v1/namespaces/{namespace}/leases"
