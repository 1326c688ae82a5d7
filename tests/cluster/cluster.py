"""Starting and stopping the test cluster."""

from __future__ import annotations

import json
import os
import select
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path

from tests.cluster import build, configs, images, objects
from tests.cluster.configs import DOORS, Node, Start
from tests.cluster.handle import ClusterError, Handle, last, started
from tests.cluster.identity import SERVICE
from tests.cluster.kube import condition, until
from tests.support import make_image

SUPERVISOR = str(Path(__file__).with_name("supervisor.py"))
TOOLS = {
    "unshare": "util-linux",
    "nsenter": "util-linux",
    "ip": "iproute2",
    "openssl": "openssl",
    "docker-registry": "docker-registry",
    "runsc": "runsc",
}


def cannot_run() -> str | None:
    """Why no cluster can be started on this machine, or None when one can."""
    if sys.platform != "linux":
        return "the test cluster needs Linux"
    if os.geteuid() != 0:
        return "the test cluster needs root (namespaces, mounts, cgroups)"
    lacking = [f"{tool} (Debian: {package})" for tool, package in TOOLS.items() if shutil.which(tool) is None]
    if not Path(configs.CNI_PLUGINS, "bridge").exists():
        lacking.append(f"{configs.CNI_PLUGINS}/bridge (Debian: containernetworking-plugins)")
    if make_image.busybox() is None:
        lacking.append("a static busybox (Debian: busybox-static)")
    if any(not part.built for part in build.parts().values()):
        lacking += build.missing_tools()
    return f"the test cluster lacks {'; '.join(lacking)}" if lacking else None


class Cluster(Handle):
    """The cluster called *name*; making the object starts nothing."""

    def up(self, nodes: int = 2, kwok: int = 2, controller: Sequence[str] = ()) -> None:
        """Start it, unless it runs: *nodes* real nodes (the last with gVisor), *kwok* fake ones.

        *controller* are further arguments of the agent-sandbox controller.
        """
        if self.running:
            return
        if (why := cannot_run()) is not None:
            raise ClusterError(why)
        build.build([name for name in build.parts() if kwok or name != "kwok"], say=self.say)
        layouts = images.standard()
        with self.alone():
            if self.running:  # by somebody else meanwhile
                return
            self._kill()  # what a starter left that was killed
            self._remove()
            begun = time.monotonic()
            try:
                self._start(nodes, kwok, tuple(controller), layouts)
            except BaseException:
                self._kill()  # what is in its logs stays
                raise
            took = time.monotonic() - begun
            self.remember(seconds=round(took, 1))
            self.say(f"cluster {self.name} is up after {took:.1f} s")

    def down(self) -> bool:
        """Stop it and remove what it left; False when there was nothing."""
        with self.alone():
            if not self.state.is_dir():
                return False
            self._kill()
            self._remove()
            return True

    def _start(
        self, count: int, kwok: int, controller: tuple[str, ...], layouts: list[images.Layout]
    ) -> None:
        nodes = [Node(number, gvisor=number == count - 1) for number in range(count)]
        self._layout(nodes)
        ports = self._spawn(nodes)
        self._network(nodes)
        for node in nodes:
            self.ask("node", name=node.name, binds=node.binds(self.state))
        starts = self._starts(nodes, kwok, controller)
        self.remember(
            ports=ports,
            nodes=[asdict(node) for node in nodes],
            starts={name: asdict(start) for name, start in starts.items()},
        )
        for name in ("etcd", "registry", *(f"containerd-{node.name}" for node in nodes)):
            self.start(name)
        imports = [self._import(node, layout) for node in nodes for layout in layouts]
        for name in ("kube-apiserver", "doors"):
            self.start(name)
        kube = self.kube("admin", "direct")
        until("the API server is ready", lambda: self.alive("etcd", "kube-apiserver") and kube.ready(), 60)
        for name in (
            "kube-controller-manager",
            "kube-scheduler",
            *(f"kubelet-{node.name}" for node in nodes),
        ):
            self.start(name)
        self._populate(kwok)
        self.start("agent-sandbox")
        if kwok:
            self.start("kwok")
        for process in imports:
            said = process.communicate()[1]
            if process.returncode:
                raise ClusterError(f"importing an image failed: {said.decode().strip()}")
        self.wait_ready()
        self.remember(up=True)

    def _layout(self, nodes: Sequence[Node]) -> None:
        self.state.mkdir(parents=True, mode=0o711)
        self.state.chmod(0o711)  # user namespaces of pods pass through here
        (self.state / "log").mkdir()
        self._make_targets(nodes)
        for node in nodes:
            place = self.state / "nodes" / node.name
            for name in (
                "cni",
                "registries/registry.test",
                "images",
                *map(last, node.binds(self.state).values()),
            ):
                (place / name).mkdir(parents=True, exist_ok=True)
        addresses = ["127.0.0.1", configs.HOST, configs.KWOK, SERVICE, *(node.address for node in nodes)]
        self.identity.make(addresses, [node.name for node in nodes])

    def _spawn(self, nodes: Sequence[Node]) -> dict[str, int]:
        """The supervisor, in its namespaces; the ports of the doors."""
        listeners = {}
        for name in DOORS:
            listeners[name] = socket.create_server(("127.0.0.1", 0), backlog=1024)
        fds = [listener.fileno() for listener in listeners.values()]
        with open(self.state / "log" / "supervisor.log", "ab") as log:
            subprocess.Popen(
                ["unshare", "--pid", "--fork", "--kill-child", "--mount", "--mount-proc", "--net", "--ipc",
                 "--propagation", "private", sys.executable, "-I", SUPERVISOR,
                 str(self.state), *map(str, fds)],
                stdin=subprocess.DEVNULL, stdout=log, stderr=log, cwd="/", pass_fds=fds, start_new_session=True,
            )  # fmt: skip
        ports = {name: int(listener.getsockname()[1]) for name, listener in listeners.items()}
        for listener in listeners.values():
            listener.close()
        until("the supervisor answers", self.supervisor, 10, 0.01)
        self.remember(supervisor=self.supervisor(), started=started(self.supervisor()))
        return ports

    def _network(self, nodes: Sequence[Node]) -> None:
        """Loopback and a bridge that carries every address of the cluster; there is no way out."""
        addresses = [f"{configs.HOST}/16", f"{configs.KWOK}/16", f"{SERVICE}/32", f"{configs.METADATA}/32"]
        addresses += [f"{node.address}/16" for node in nodes]
        lines = ["link set lo up", "link add cluster type bridge", "link set cluster up"]
        lines += [f"addr add {address} dev cluster" for address in addresses]
        done = self.inside(["ip", "-batch", "-"], input="\n".join(lines).encode())
        if done.returncode:
            raise ClusterError(f"ip: {done.stderr.decode().strip()}")
        self.inside(["sh", "-c", "echo 1 > /proc/sys/net/ipv4/ip_forward"], check=True)

    def _starts(self, nodes: Sequence[Node], kwok: int, controller: tuple[str, ...]) -> dict[str, Start]:
        state, identity = self.state, self.identity
        starts = {
            "etcd": configs.etcd(state),
            "kube-apiserver": configs.kube_apiserver(identity),
            "kube-controller-manager": configs.kube_controller_manager(identity),
            "kube-scheduler": configs.kube_scheduler(identity),
            "agent-sandbox": configs.agent_sandbox(identity, controller),
            "registry": configs.registry(state),
            "doors": configs.doors(state, identity),
        }
        if kwok:
            starts["kwok"] = configs.kwok(state, identity)
        for node in nodes:
            starts[f"containerd-{node.name}"] = configs.containerd(state, node)
            starts[f"kubelet-{node.name}"] = configs.kubelet(state, identity, node)
        return starts

    def _import(self, node: Node, layout: images.Layout) -> subprocess.Popen[bytes]:
        address = self.state / "nodes" / node.name / "containerd" / "containerd.sock"
        until(
            f"containerd of {node.name}",
            lambda: self.alive(f"containerd-{node.name}") and address.exists(),
            20,
        )
        command = images.import_command(build.parts()["containerd"].program("ctr"), layout)
        return subprocess.Popen(
            self.enter(node.name) + command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE
        )

    def _populate(self, kwok: int) -> None:
        """CRDs, rights, the runtime class, fake nodes."""
        place = build.parts()["agent-sandbox"].place
        things = [objects.runtime_class(), *objects.rights(), *objects.kwok_nodes(range(kwok), configs.KWOK)]
        text = "\n---\n".join(
            [path.read_text() for path in sorted([*place.glob("crds/*.yaml"), *place.glob("rbac/*.yaml")])]
            + [json.dumps(thing) for thing in things]
        )
        (self.state / "objects.yaml").write_text(text)
        done = self.kubectl("apply", "--server-side", "-f", str(self.state / "objects.yaml"))
        if done.returncode:
            raise ClusterError(f"kubectl apply: {done.stderr.strip()}")
        kube = self.kube("admin", "direct")
        path = "/apis/apiextensions.k8s.io/v1/customresourcedefinitions"
        until(
            "the CRDs are established",
            lambda: all(condition(crd, "Established") == "True" for crd in kube.items(path)),
        )

    def wait_ready(self, seconds: float = 60) -> None:
        """Wait until every node is Ready and pods can be made in the namespace default."""
        kube = self.kube("admin", "direct")
        wanted = {node.name for node in self.nodes()}

        def ready() -> bool:
            self.alive(*self.facts()["starts"])
            found = {
                node["metadata"]["name"]: condition(node, "Ready") for node in kube.items("/api/v1/nodes")
            }
            return wanted <= set(found) and all(status == "True" for status in found.values())

        until("all nodes are Ready", ready, seconds)
        account = "/api/v1/namespaces/default/serviceaccounts/default"
        until("the default service account", lambda: kube.get(account), seconds)

    def _kill(self) -> None:
        """End everything: the supervisor's death is that of all processes in its pid namespace."""
        found: list[int] = []
        try:
            # All of them are found before the first is ended: one that is ending has no command line any more.
            for entry in Path("/proc").iterdir():
                if entry.name.isdigit() and self._supervises(entry):
                    with suppress(ProcessLookupError):
                        found.append(os.pidfd_open(int(entry.name)))
            for descriptor in found:
                with suppress(ProcessLookupError):
                    signal.pidfd_send_signal(descriptor, signal.SIGKILL)
            for descriptor in found:
                if not select.select([descriptor], [], [], 30)[0]:
                    raise ClusterError("the supervisor does not end after SIGKILL")
        finally:
            for descriptor in found:
                os.close(descriptor)

    def _supervises(self, process: Path) -> bool:
        """Is it our supervisor (of any checkout), or what started it?"""
        try:
            words = (process / "cmdline").read_bytes().split(b"\0")
        except OSError:  # gone while it was looked at
            return False
        ours = any(word.endswith(b"/cluster/supervisor.py") for word in words)
        return ours and str(self.state).encode() in words

    def _remove(self) -> None:
        """Control groups, the state itself and, after the last cluster, directories made for built-in paths."""
        for group in self._control_groups():
            with suppress(OSError):  # a group with a process of somebody else's stays
                group.rmdir()
        shutil.rmtree(self.state, ignore_errors=True)
        if self.state.is_dir():
            raise ClusterError(f"{self.state} cannot be removed")
        # While another cluster has something mounted there, removing the directory would take it away.
        if not any(path.is_dir() for path in self.root.iterdir()):
            for made in reversed(self._made()):
                with suppress(OSError):  # something else lies there by now
                    os.rmdir(made)
            (self.root / "made.json").unlink(missing_ok=True)

    def _made(self) -> list[str]:
        try:
            made: list[str] = json.loads((self.root / "made.json").read_text())
        except FileNotFoundError:
            return []
        return made

    def _make_targets(self, nodes: Sequence[Node]) -> None:
        """The directories that a node's own ones are bound over. Which were not there stands in ``made.json``."""
        targets = {target: None for node in nodes for target in node.binds(self.state)}
        wanted = [path for target in targets for path in (*reversed(Path(target).parents), Path(target))]
        groups = [
            tree / "k8s.io" for tree in Path("/sys/fs/cgroup").iterdir() if tree.is_dir()
        ]  # containerd's
        lacking = [
            str(path) for path in (*wanted, Path("/sys/fs/cgroup/k8s.io"), *groups) if not path.is_dir()
        ]
        made = dict.fromkeys([*self._made(), *lacking])
        new = self.root / "made.new"
        new.write_text(json.dumps(list(made)))
        new.rename(self.root / "made.json")
        for path in wanted:
            path.mkdir(mode=0o755, exist_ok=True)

    def _control_groups(self) -> Iterator[Path]:
        """Of containers whose shim did not live to remove them."""
        tasks = self.state.glob("nodes/*/containerd/io.containerd.runtime.v2.task/k8s.io/*")
        for name in [task.name for task in tasks]:
            for tree in (Path("/sys/fs/cgroup"), *Path("/sys/fs/cgroup").iterdir()):
                group = tree / "k8s.io" / name
                if group.is_dir():
                    yield from sorted((path for path in group.rglob("*") if path.is_dir()), reverse=True)
                    yield group
