"""Pools on members that cannot be put back (mode ``replace``): each serves one episode, and tasks with files,
a workdir and a setup work there as anywhere; unisolated they would be the machine's, and are refused."""

from __future__ import annotations

import functools
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

import rlsandbox as rls
from rlsandbox import errors
from tests.support.container import why_not
from tests.support.make_image import NO_BUSYBOX, busybox
from tests.support.rightless import pod_of_its_own

TASK = rls.Task(
    id="add",
    workdir="/tmp/add",
    files={"calc.py": "def add(a, b):\n    return a - b\n"},
    setup="mkdir -p deep/er && echo made > deep/er/there; sleep 300 & echo $! > /tmp/daemon",
    grader=rls.Grader(command='grep -q "a + b" calc.py && test "$(cat deep/er/there)" = made'),
)


@asynccontextmanager
async def pool_of_pods(tmp_path: Path, keepers: Any = "own-users") -> AsyncIterator[rls.AsyncPool]:
    pytest.importorskip("kubernetes", reason="needs the extra: pip install 'rlsandbox-pool[kubernetes]'")
    if (missing := why_not()) is not None:
        pytest.skip(missing)
    from rlsandbox.backends.kubernetes import Kubernetes
    from tests.support.fake_apiserver import Pods, api_server, kubeconfig

    file = tmp_path / "config"
    async with api_server() as api, Pods(api, keepers=keepers):
        file.write_text(kubeconfig(api.url))
        backend = Kubernetes(kubeconfig=str(file), image="any", mode="replace", write_rate=1000)
        spec = rls.Spec(network="host")  # no policy is tried out
        async with rls.AsyncPool(
            backend, size=2, spec=spec, config=False, ledger=tmp_path / "ledger.db"
        ) as pool:
            yield pool


NOBODYS = functools.partial(pod_of_its_own, uid=65534)


@pytest.mark.parametrize(
    "keepers",
    [
        "own-users",
        pytest.param(NOBODYS, id="nobody", marks=pytest.mark.skipif(busybox() is None, reason=NO_BUSYBOX)),
    ],
)
async def test_tasks_with_a_setup(tmp_path: Path, keepers: Any) -> None:
    """Also where the keeper is nobody, and looks at files as the episode does."""

    async def fix(sandbox: rls.AsyncSandbox, task: rls.Task) -> None:
        assert sandbox.reset_mode == "replace"
        assert (await sandbox.run("pwd; cat deep/er/there")).stdout == "/tmp/add\nmade\n"
        gone = await sandbox.run("kill -0 $(cat /tmp/daemon)")
        assert gone.exit_code != 0, "an episode begins with files, not with processes of the setup"
        assert not (await sandbox.run("test -e /tmp/before; echo $?; touch /tmp/before")).stdout.startswith(
            "0"
        )
        await sandbox.run("sed -i 's/a - b/a + b/' calc.py")

    async with pool_of_pods(tmp_path, keepers) as pool:
        report = await pool.run_rollouts([TASK], fix, group_size=4)
        assert [record.reward for record in report.records] == [1.0] * 4, report.failures()
        bare = await pool.claim(rls.Task(id="bare"), timeout=120)
        assert (await bare.run("test -e /tmp/add || echo no")).stdout == "no\n"
        await bare.release()


async def test_a_setup_that_does_not_work(tmp_path: Path) -> None:
    async with pool_of_pods(tmp_path) as pool:
        with pytest.raises(errors.PrimeError, match="no-such-program"):
            await pool.claim(rls.Task(id="bad", setup="no-such-program"), timeout=120)
        async with pool.claim(TASK, timeout=120) as sandbox:  # and the pool goes on
            assert (await sandbox.run("cat deep/er/there")).stdout == "made\n"


async def test_unisolated_they_are_refused(tmp_path: Path) -> None:
    spec = rls.Spec(isolation="none")
    async with rls.AsyncPool(size=1, spec=spec, config=False, ledger=tmp_path / "ledger.db") as pool:
        for task in (TASK, rls.Task(id="files", files={"rls-unisolated": "x"})):
            with pytest.raises(errors.ConfigError, match="isolation='none' would put into this machine"):
                await pool.claim(task, timeout=60)
        async with pool.claim(rls.Task(id="bare"), timeout=60) as sandbox:
            assert (await sandbox.run("echo fine")).stdout == "fine\n"
    assert not Path("/tmp/add").exists()
