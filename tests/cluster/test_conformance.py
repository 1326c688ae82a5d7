"""The conformance suite on a real cluster, in each mode."""

from __future__ import annotations

import os
import secrets
from collections.abc import Iterator
from pathlib import Path
from typing import Any, ClassVar

import pytest

from rlsandbox.sandbox import Sandbox
from rlsandbox.spec import Spec
from rlsandbox.testing.conformance import BackendConformance, OnePerClass
from rlsandbox.testing.lone import LoneHost
from tests.cluster import objects
from tests.cluster.kube import Kube, pods
from tests.support.rightless import NOT_IN_REPLACE

pytest.importorskip("kubernetes", reason="needs the extra: pip install 'rlsandbox-pool[kubernetes]'")
from rlsandbox.backends.kubernetes import Kubernetes

TEST = os.environ.get("RLSANDBOX_TEST_IMAGE", "registry.test/test:1")
FOREIGN = "/proc is the container's: pids in it are not the episode's"


class TestOverlay(OnePerClass, BackendConformance):
    skip: ClassVar[dict[str, str]] = {
        **dict.fromkeys(("no_hidden_deadline", "much_output[300"), "as locally"),
    }
    spec = Spec(memory="2GiB")
    level: ClassVar[str] = "privileged"
    mode: ClassVar[str] = "auto"

    @pytest.fixture(scope="class")
    @classmethod
    def backend(cls, any_kubeconfig: Path) -> Iterator[Any]:
        kube, name = Kube(any_kubeconfig), f"t-{secrets.token_hex(4)}"
        kube.create("/api/v1/namespaces", objects.namespace(name, cls.level))
        how = {"kubeconfig": str(any_kubeconfig), "namespace": name, "image": TEST, "write_rate": 200}
        yield Kubernetes(**how, mode=cls.mode, gvisor_class="gvisor")
        kube.delete(f"/api/v1/namespaces/{name}")

    @pytest.fixture(autouse=True)
    def _kube(self, any_kubeconfig: Path) -> None:
        self._admin = Kube(any_kubeconfig)

    def kill_keeper(self, host: LoneHost, sandbox: Sandbox) -> None:
        backend: Any = host.backend
        self._admin.delete(pods(backend._api.namespace, backend._places[sandbox.id].pod), grace=0)


class TestGvisor(TestOverlay):
    """A kernel of its own, that of Debian 12: all processes share their mounts."""

    skip: ClassVar[dict[str, str]] = {
        **TestOverlay.skip,
        **dict.fromkeys(("much_", "session_much", "files_sparse_read_whole"), "as overlay"),
        "grade_without_room": "inodes are not counted there: it would make empty files for ever",
        "pause_remembers_who_was_stopped": "a stopped process is hung up when its shell ends, as the group is an orphan",
    }
    spec = Spec(memory="2GiB", isolation="gvisor")

    @pytest.fixture(autouse=True)
    def _trees(self, request: pytest.FixtureRequest) -> None:
        if request.node.name == "test_timeout_kills_the_tree[double-fork]":
            pytest.skip("no subreapers there: what left its parent and its session ends with the episode")


class TestUserns(TestOverlay):
    """What does not depend on the mode is not waited for twice."""

    skip: ClassVar[dict[str, str]] = {
        **TestOverlay.skip,
        **dict.fromkeys(("much_", "session_much", "files_sparse_read_whole"), "as overlay"),
    }
    level: ClassVar[str] = "baseline"


class TestManifest(TestUserns):
    spec = Spec(memory="2GiB", user="1000", network="host")
    mode: ClassVar[str] = "manifest"


class TestReplace(TestUserns):
    """Nobody with any right, and nothing to look from outside with."""

    skip: ClassVar[dict[str, str]] = {**TestUserns.skip, **NOT_IN_REPLACE}
    spec = Spec(memory="2GiB", network="host")
    level: ClassVar[str] = "restricted"
    mode: ClassVar[str] = "replace"
