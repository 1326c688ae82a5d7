"""Command lines of rlsandbox that several tests of the cluster need."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

from tests.cluster.kube import Kube

ROOT = Path(__file__).parents[2]
RLSANDBOX = [sys.executable, "-m", "rlsandbox"]


def reap(namespace: str) -> list[str]:
    return [*RLSANDBOX, "reap", "--backend", "kubernetes", "--namespace", namespace, "--yes"]


def theirs(kube: Kube, namespace: str, image: str) -> dict[str, str]:
    """Make what `template show` prints, as a platform team does; where each kind of object is."""
    shown = subprocess.run(
        [*RLSANDBOX, "template", "show", "--image", image, "--keeper"],
        cwd=ROOT, capture_output=True, text=True, check=True,
    ).stdout  # fmt: skip
    made = {}
    for text in shown.split("---\n")[1:]:
        item = json.loads(text)
        group = "/api/v1" if item["apiVersion"] == "v1" else f"/apis/{item['apiVersion']}"
        path = f"{group}/namespaces/{namespace}/{item['kind'].lower()}s"
        kube.create(path, item)
        made[item["kind"]] = f"{path}/{item['metadata']['name']}"
    return made
