"""Starting and stopping, also when whoever started it was killed. A second small cluster beside the first."""

from __future__ import annotations

import os
import secrets
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.cluster.cluster import Cluster
from tests.cluster.handle import ClusterError, started
from tests.cluster.kube import until

ROOT = Path(__file__).parents[2]
pytestmark = pytest.mark.timeout(300)


@pytest.fixture
def second(cluster: Cluster) -> Iterator[Cluster]:
    """A cluster that was not started yet."""
    other = Cluster(f"t-{secrets.token_hex(3)}")
    yield other
    other.down()
    assert not other.state.exists()


def _starter(cluster: Cluster) -> subprocess.Popen[str]:
    command = [
        sys.executable,
        "-m",
        "tests.cluster",
        "--name",
        cluster.name,
        "up",
        "--nodes",
        "1",
        "--kwok",
        "0",
    ]
    return subprocess.Popen(command, cwd=ROOT, stdout=-1, stderr=-1, text=True, start_new_session=True)


def _containers(cluster: Cluster) -> set[str]:
    tasks = cluster.state.glob("nodes/*/containerd/io.containerd.runtime.v2.task/k8s.io/*")
    return {task.name for task in tasks}


def _groups(names: set[str]) -> list[str]:
    """Control groups of those containers."""
    return [str(path) for path in Path("/sys/fs/cgroup").glob("**/k8s.io/*") if path.name in names]


def _mounts(cluster: Cluster) -> list[str]:
    """Where a node's own directories lie over built-in paths."""
    done = cluster.inside(["cat", "/proc/self/mountinfo"], cluster.nodes()[0].name, check=True)
    targets = [line.split()[4] for line in done.stdout.decode().splitlines()]
    return [target for target in targets if target in cluster.nodes()[0].binds(cluster.state)]


def _processes(state: Path) -> list[str]:
    """Command lines of processes that belong to a cluster."""
    found = []
    for entry in Path("/proc").iterdir():
        try:
            line = (
                (entry / "cmdline").read_bytes().replace(b"\0", b" ").decode() if entry.name.isdigit() else ""
            )
        except OSError:
            continue
        if str(state) in line:
            found.append(line)
    return found


def test_the_starter_is_killed_in_the_middle_and_nothing_is_left(second: Cluster) -> None:
    starter = _starter(second)
    until("etcd runs", lambda: "etcd" in second.parts() if second.supervisor() else False, 60)
    os.killpg(starter.pid, signal.SIGKILL)
    starter.communicate()
    assert not second.running, "half a cluster is none"
    supervisor = second.supervisor()
    assert started(supervisor)
    assert second.down()
    assert not started(supervisor)
    assert _processes(second.state) == []
    assert str(second.state) not in Path("/proc/mounts").read_text()
    assert not second.down(), "there is nothing any more"
    with pytest.raises(ClusterError, match="does not run"):
        second.ask("list")


def test_two_starters_at_once_start_one_and_it_outlives_them(cluster: Cluster, second: Cluster) -> None:
    mounts = _mounts(cluster)
    assert any("/var/lib/kubelet" in line for line in mounts)
    starters = [_starter(second) for _ in range(2)]
    said = [starter.communicate(timeout=200) for starter in starters]
    assert [starter.returncode for starter in starters] == [0, 0], said
    assert sum("is up after" in out for out, _ in said) == 1
    assert all(f"export KUBECONFIG={second.kubeconfig()}" in out for out, _ in said)
    assert second.running
    assert {part["starts"] for part in second.parts().values()} == {1}
    # Pods of its own, of which nothing may be left either.
    done = second.kubectl("run", "p", "--image=registry.test/test:1", "--command", "--", "sleep", "infinity")
    assert done.returncode == 0, done.stderr
    done = second.kubectl("wait", "--for=condition=Ready", "pod/p", "--timeout=60s")
    assert done.returncode == 0, done.stderr
    supervisor, containers = second.supervisor(), _containers(second)
    assert len(containers) == 2
    assert _groups(containers)
    assert second.down()
    assert not started(supervisor)
    assert _processes(second.state) == []
    assert _groups(containers) == []
    assert _mounts(cluster) == mounts, "the other cluster keeps what is mounted in its nodes"
