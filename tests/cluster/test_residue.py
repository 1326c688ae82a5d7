"""Every kind of dirt on real pods, in each mode that resets in place: found and named by verification, gone after a reset."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from rlsandbox.spec import Spec
from tests.cluster.test_backend import TEST, Kubernetes
from tests.support.dirt import ROOT, SETUP, SETUP_OF_USER, USER
from tests.support.place import place
from tests.support.residue import Told, every_kind, primed

WHERE = [
    ("privileged", "overlay", ROOT),
    ("privileged", "overlay", USER),
    ("privileged", "gvisor", ROOT),
    ("privileged", "gvisor", USER),
    ("baseline", "userns", ROOT),
    ("baseline", "userns", USER),
    ("baseline", "manifest", USER),
]
NOT_SEEN = "each episode has an IPC namespace of its own, which an old gVisor lets nobody look into"
GVISOR = {
    **dict.fromkeys(("SysV shared memory", "SysV semaphores", "SysV message queue"), NOT_SEEN),
    "abstract socket": "an old gVisor has none in a network namespace",
    "CPU affinity of the episode's first process": "gVisor schedules by none",
}


@pytest.mark.timeout(1200)
@pytest.mark.parametrize(("level", "mode", "user"), WHERE)
def test_every_kind_is_found_and_gone(
    any_kubeconfig: Path, make_namespace: Callable[..., str], capsys: Any, level: str, mode: str, user: str
) -> None:
    alone = mode == "manifest"
    spec = Spec(memory="2GiB", pids=400, isolation="gvisor" if mode == "gvisor" else "auto")
    name, mode = mode, "overlay" if mode == "gvisor" else mode
    if alone:
        spec = Spec(memory="2GiB", pids=400, user="1000", network="host")
    told = Told()
    backend = Kubernetes(
        kubeconfig=str(any_kubeconfig),
        namespace=make_namespace(level),
        image=TEST,
        mode=mode,
        gvisor_class="gvisor",
    )

    async def body() -> None:
        try:
            async with place(backend, spec) as where:
                assert where.mode == mode
                setup = SETUP_OF_USER if alone else SETUP
                suite = await primed(where, user, setup=setup, shared=alone)
                await every_kind(suite, told, whole=True, but=GVISOR if name == "gvisor" else None)
        finally:
            await backend.close()

    asyncio.run(body())
    with capsys.disabled():
        print("\n" + told.lines(f"{name}, as {user}"))
    assert not told.failures, "\n".join(told.failures)
    assert told.planted >= (50 if alone else 60)
