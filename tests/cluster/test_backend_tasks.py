"""Tasks with files, a workdir and a setup on real pods, in every reset mode: the same task ends the same way."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

import rlsandbox as rls
from rlsandbox import errors
from tests.cluster.kube import Kube, pods, until

pytest.importorskip("kubernetes", reason="needs the extra: pip install 'rlsandbox-pool[kubernetes]'")
from rlsandbox.backends.kubernetes import Kubernetes

TEST = os.environ.get("RLSANDBOX_TEST_IMAGE", "registry.test/test:1")
MODES = {
    "overlay": ("privileged", rls.Spec()),
    "userns": ("baseline", rls.Spec()),
    "manifest": ("baseline", rls.Spec(user="1000", network="host")),
    "replace": ("restricted", rls.Spec(network="host")),
}
TASK = rls.Task(
    id="add",
    workdir="/tmp/add",
    files={"calc.py": "def add(a, b):\n    return a - b\n", "/tmp/beside": b"\x00\xff"},
    setup="mkdir -p deep/er && echo made > deep/er/there; sleep 300 & echo $! > /tmp/daemon",
    grader=rls.Grader(
        command='sh tests/check.sh && test "$(cat deep/er/there)" = made',
        files={"tests/check.sh": 'grep -q "a + b" calc.py\n'},
    ),
)


def fix(sandbox: rls.Sandbox, task: rls.Task) -> str:
    began = sandbox.run("pwd; cat deep/er/there; wc -c </tmp/beside").stdout.split()
    assert began == ["/tmp/add", "made", "2"], began
    assert not sandbox.run("kill -0 $(cat /tmp/daemon)").ok, (
        "an episode begins with files, not with processes"
    )
    assert not sandbox.run("test -e /tmp/before || test -e tests; code=$?; touch /tmp/before; exit $code").ok
    # What would be in the way of the grader's hidden files, and read-only besides.
    sandbox.run(
        "sed -i 's/a - b/a + b/' calc.py; mkdir tests; echo 'exit 1' >tests/check.sh; chmod 555 tests"
    )
    return sandbox.reset_mode


@pytest.mark.parametrize("fresh", [False, True], ids=["in place", "fresh"])
@pytest.mark.parametrize("mode", MODES)
def test_a_task_with_a_setup(
    any_kubeconfig: Path, make_namespace: Callable[..., str], kube: Kube, mode: str, fresh: bool
) -> None:
    level, spec = MODES[mode]
    namespace = make_namespace(level)
    backend = Kubernetes(kubeconfig=str(any_kubeconfig), namespace=namespace, image=TEST, mode=mode)
    assert TASK.grader is not None
    task = replace(TASK, grader=replace(TASK.grader, fresh=fresh))
    with rls.Pool(backend, size=2, spec=spec, config=False) as pool:
        report = pool.run_rollouts([task], fix, group_size=4)
        ends = [(r.status, r.reward, r.value, r.failure) for r in report.records]
        assert ends == [("completed", 1.0, mode, None)] * 4
        stats = pool.stats()
        assert stats.quarantined == 0 and (stats.recycled > 0) == (mode != "replace")
        with pool.claim(rls.Task(id="bare"), timeout=120) as sandbox:
            assert sandbox.run("ls -d /tmp/add /tmp/beside 2>/dev/null").stdout == ""
    until("nothing is left", lambda: not kube.items(pods(namespace)), 60)


@pytest.mark.parametrize("mode", ["manifest", "replace"])
def test_a_task_that_needs_root_where_nobody_is(
    any_kubeconfig: Path, make_namespace: Callable[..., str], mode: str
) -> None:
    """Said in one line, as the task's: the pool and the tasks that need less go on."""
    level, spec = MODES[mode]
    namespace = make_namespace(level)
    backend = Kubernetes(kubeconfig=str(any_kubeconfig), namespace=namespace, image=TEST, mode=mode)
    with rls.Pool(backend, size=1, spec=spec, config=False) as pool:
        for task in (
            rls.Task(id="w", workdir="/opt/not/theirs"),
            rls.Task(id="f", files={"/etc/x": "x"}),
            rls.Task(id="s", setup="echo x > /etc/x"),
        ):
            with pytest.raises(errors.PrimeError, match=r"(?i)permission denied|cannot create") as caught:
                pool.claim(task, timeout=120)
            assert "\n" not in str(caught.value)
        with pool.claim(TASK, timeout=120) as sandbox:
            assert sandbox.run("cat deep/er/there").stdout == "made\n"
