"""The conformance suite on the Kubernetes backend, without a cluster.

The API server is the tests' own (HTTP, watches, exec streams); each pod is a real ``keeper init`` in the namespaces of
an ordinary container. The same suite on a real cluster: tests/cluster.
"""

from __future__ import annotations

import functools
import os
import signal
from collections.abc import Iterator
from contextlib import AsyncExitStack
from typing import Any, ClassVar

import pytest

from rlsandbox._portal import Portal
from rlsandbox.sandbox import Sandbox
from rlsandbox.spec import Spec
from rlsandbox.testing.conformance import BackendConformance, OnePerClass
from rlsandbox.testing.lone import LoneHost
from tests.support.container import why_not

pytest.importorskip("kubernetes", reason="needs the extra: pip install 'rlsandbox-pool[kubernetes]'")
from rlsandbox.backends.kubernetes import Kubernetes
from tests.support.fake_apiserver import FakeApi, Pods, api_server, kubeconfig
from tests.support.make_image import NO_BUSYBOX, busybox
from tests.support.rightless import NOT_IN_REPLACE, pod_of_its_own

pytestmark = pytest.mark.skipif(why_not() is not None, reason=str(why_not()))


class TestKubernetes(OnePerClass, BackendConformance):
    spec = Spec(image="any", memory="2GiB")
    mode: ClassVar[str] = "userns"
    keepers: ClassVar[Any] = "own-users"

    @pytest.fixture(scope="class")
    @classmethod
    def place(cls) -> Iterator[tuple[FakeApi, Pods]]:
        portal, stack = Portal("an API server"), AsyncExitStack()

        async def begin() -> tuple[FakeApi, Pods]:
            api = await stack.enter_async_context(api_server())
            return api, await stack.enter_async_context(Pods(api, keepers=cls.keepers))

        yield portal.call(begin)
        portal.call(stack.aclose)
        portal.close()

    @pytest.fixture(scope="class")
    @classmethod
    def backend(cls, place: tuple[FakeApi, Pods], tmp_path_factory: pytest.TempPathFactory) -> Any:
        file = tmp_path_factory.mktemp("kube") / "config"
        file.write_text(kubeconfig(place[0].url))
        return Kubernetes(kubeconfig=str(file), image="any", mode=cls.mode, write_rate=1000)

    @pytest.fixture(autouse=True)
    def _pods(self, place: tuple[FakeApi, Pods]) -> None:
        self._containers = place[1].containers

    def kill_keeper(self, host: LoneHost, sandbox: Sandbox) -> None:
        (made, _), *more = self._containers.values()
        assert not more
        os.kill(made.pid, signal.SIGKILL)


@pytest.mark.skipif(busybox() is None, reason=NO_BUSYBOX)
class TestManifest(TestKubernetes):
    """Containers that may isolate nothing, each over a root of its own; commands are an ordinary user's."""

    spec = Spec(image="any", memory="2GiB", user="1000", network="host")
    mode = "manifest"
    keepers = staticmethod(pod_of_its_own)


class TestReplace(TestManifest):
    """Containers of the level restricted: nobody with any right, and nothing to look from outside with."""

    skip: ClassVar[dict[str, str]] = NOT_IN_REPLACE
    spec = Spec(image="any", memory="2GiB", network="host")
    mode = "replace"
    keepers = staticmethod(functools.partial(pod_of_its_own, uid=65534))
