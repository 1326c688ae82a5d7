"""The conformance suite on the local backend, in each of its reset modes."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest

from rlsandbox.backends import Backend, Local
from rlsandbox.sandbox import Sandbox
from rlsandbox.testing.conformance import BackendConformance, OnePerClass
from rlsandbox.testing.lone import LoneHost
from tests.support import make_image

PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"  # as most images have it


def children(pid: int) -> list[int]:
    tasks = Path(f"/proc/{pid}/task").iterdir()
    return [int(p) for task in tasks for p in (task / "children").read_text().split()]


class TestOverlay(OnePerClass, BackendConformance):
    @pytest.fixture(scope="class")
    @classmethod
    def backend(cls) -> Backend:
        return Local()

    def kill_keeper(self, host: LoneHost, sandbox: Sandbox) -> None:
        hub = host.backend._hub.process.pid  # type: ignore[attr-defined]
        keepers = [p for p in children(hub) if Path(f"/proc/{p}/comm").read_text() == "rls-keeper\n"]
        keepers = [p for p in keepers if children(p)]  # one without an episode waits for the next sandbox
        assert len(keepers) == 1
        os.kill(keepers[0], signal.SIGKILL)


class TestUserns(TestOverlay):
    """The same in the other mode."""

    @pytest.fixture(scope="class")
    @classmethod
    def backend(cls) -> Backend:
        return Local(mode="userns")


@pytest.mark.skipif(make_image.busybox() is None, reason=make_image.NO_BUSYBOX)
class TestImage(TestOverlay):
    """On an image, whose shell and tools are busybox's; git, bash and python3 where this machine has them."""

    @pytest.fixture(scope="class")
    @classmethod
    def backend(cls, tmp_path_factory: pytest.TempPathFactory) -> Backend:
        image = tmp_path_factory.mktemp("image") / "busybox.tar"
        make_image.docker_archive(image, make_image.tools_layers(), {"Env": [f"PATH={PATH}"]})
        return Local(base=str(image))
