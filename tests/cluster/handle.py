"""A hold on the test cluster from any process: its parts, its doors, kubeconfigs, what to look at.

All parts run in pid, network, mount and ipc namespaces of their own, below one supervisor (supervisor.py), whose death
ends all of them. What a later process must know stands in ``<state>/<name>/cluster.json``.
"""

from __future__ import annotations

import fcntl
import json
import os
import signal
import socket
import struct
import subprocess
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from tests.cluster import build
from tests.cluster.configs import Node
from tests.cluster.identity import API, Identity
from tests.cluster.kube import Kube, until

STATE = "RLSANDBOX_CLUSTER_STATE"
NAME = "RLSANDBOX_CLUSTER"


class ClusterError(Exception):
    """The cluster cannot be started or used: one line that says why."""


class Handle:
    """What can be done with a cluster that runs. Parts are known by name: see :meth:`parts`."""

    def __init__(self, name: str | None = None, say: Callable[[str], None] = print) -> None:
        self.name = name or os.environ.get(NAME) or "default"
        self.root = Path(os.environ.get(STATE) or "/var/lib/rlsandbox-cluster")
        self.state = self.root / self.name
        self.say = say
        self.identity = Identity(self.state / "secrets")

    @property
    def running(self) -> bool:
        """Has it been started whole, and not been stopped since?"""
        try:
            self.ask("list")
        except ClusterError:
            return False
        return bool(self.facts().get("up"))

    def facts(self) -> dict[str, Any]:
        """What was written down when it was started."""
        try:
            facts: dict[str, Any] = json.loads((self.state / "cluster.json").read_text())
        except FileNotFoundError:
            return {}
        return facts

    def remember(self, **facts: Any) -> None:
        new = self.state / "cluster.new"
        new.write_text(json.dumps(self.facts() | facts, indent=1))
        new.rename(self.state / "cluster.json")

    def nodes(self) -> list[Node]:
        """The real nodes."""
        return [Node(**entry) for entry in self.facts()["nodes"]]

    @contextmanager
    def alone(self) -> Iterator[None]:
        """One process at a time starts or stops a cluster."""
        self.root.mkdir(parents=True, exist_ok=True, mode=0o711)
        with open(self.root / "lock", "w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            yield

    # -- the supervisor and its parts

    def ask(self, do: str, **request: Any) -> Any:
        """One request to the supervisor."""
        with socket.socket(socket.AF_UNIX) as connection:
            connection.settimeout(10)
            try:
                connection.connect(str(self.state / "supervisor.sock"))
                connection.sendall(json.dumps({"do": do, **request}).encode() + b"\n")
                with connection.makefile("r") as lines:
                    answer = json.loads(lines.readline() or "{}")
            except OSError as error:
                raise ClusterError(f"cluster {self.name} does not run ({error})") from None
        if "ok" not in answer:
            raise ClusterError(f"{do}: {answer.get('error', 'no answer')}")
        return answer["ok"]

    def supervisor(self) -> int:
        """The supervisor's pid as this process sees it; 0 when there is none."""
        with socket.socket(socket.AF_UNIX) as connection:
            try:
                connection.connect(str(self.state / "supervisor.sock"))
            except OSError:
                return 0
            size = struct.calcsize("3i")
            pid: int = struct.unpack(
                "3i", connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, size)
            )[0]
            return pid

    def parts(self) -> dict[str, dict[str, Any]]:
        """Each part that was started: its pid inside, ``state`` (running, paused, ending, ended), starts, exit code."""
        parts: dict[str, dict[str, Any]] = self.ask("list")
        return parts

    def start(self, name: str, *more: str) -> None:
        """Start a part (again), as it was set up, with *more* arguments this time."""
        start = self.facts()["starts"].get(name)
        if start is None:
            raise ClusterError(f"no part {name}; there are {', '.join(self.facts()['starts'])}")
        self.ask("start", name=name, **start | {"argv": [*start["argv"], *more]})

    def signal(self, name: str, number: int = signal.SIGTERM) -> None:
        if name not in (parts := self.parts()):
            raise ClusterError(f"no part {name}; there are {', '.join(sorted(parts))}")
        self.ask("signal", name=name, signal=int(number))

    def kill(self, name: str) -> None:
        """SIGKILL, and wait until it has ended. Containers of a node live on."""
        self.signal(name, signal.SIGKILL)
        until(f"{name} ends", lambda: self.parts()[name]["state"] == "ended", 10, 0.01)

    def restart(self, name: str, *more: str) -> None:
        """Kill it if it runs, and start it."""
        if self.parts().get(name, {"pid": 0})["pid"]:
            self.kill(name)
        self.start(name, *more)

    def pause(self, name: str) -> None:
        """SIGSTOP: it answers nobody, its connections stay."""
        self.signal(name, signal.SIGSTOP)
        until(f"{name} stops", lambda: self.parts()[name]["state"] == "paused", 10, 0.01)

    def resume(self, name: str) -> None:
        self.signal(name, signal.SIGCONT)

    def alive(self, *names: str) -> bool:
        """True; an error when one of the parts that were started has ended."""
        for name, part in self.parts().items():
            if name in names and part["state"] == "ended":
                raise ClusterError(f"{name} has ended with {part['code']}: {self.last_words(name)}")
        return True

    def log(self, name: str) -> Path:
        return self.state / "log" / f"{name}.log"

    def last_words(self, name: str, lines: int = 5) -> str:
        try:
            return " | ".join(self.log(name).read_text(errors="replace").splitlines()[-lines:])
        except FileNotFoundError:
            return "(no log)"

    # -- doors

    def port(self, door: str) -> int:
        """Of 127.0.0.1 on this machine: doors are api, direct and registry."""
        port: int = self.facts()["ports"][door]
        return port

    def kubeconfig(self, role: str = "admin", door: str = "api", namespace: str = "default") -> Path:
        """A kubeconfig file for a role, through a door: "api" obeys rules, "direct" passes on, "inside" is for pods."""
        server = f"https://{API}" if door == "inside" else f"https://127.0.0.1:{self.port(door)}"
        path = self.identity.place / f"{role}.{door}{'' if namespace == 'default' else '.' + namespace}"
        return self.identity.kubeconfig(role, server, path, namespace)

    def kube(self, role: str = "admin", door: str = "direct") -> Kube:
        return Kube(self.kubeconfig(role, door))

    def kubectl(self, *arguments: str, role: str = "admin") -> subprocess.CompletedProcess[str]:
        program = str(build.parts()["plane"].program())
        home = {"KUBECONFIG": str(self.kubeconfig(role, "direct")), "HOME": str(self.state)}
        return subprocess.run(
            [program, "kubectl", *arguments], env=os.environ | home, capture_output=True, text=True
        )

    # -- inside

    def enter(self, node: str | None = None) -> list[str]:
        """What to put before a command so that it runs in the cluster's namespaces (or in a node's mounts)."""
        words = ["nsenter", "--target", str(self.facts().get("supervisor") or self.supervisor())]
        words += ["--pid", "--mount", "--net", "--ipc", "--"]
        if node is not None:
            pid = self.parts()[f"containerd-{node}"]["pid"]
            words += ["nsenter", "--target", str(pid), "--mount", "--"]
        return words

    def inside(
        self,
        command: Sequence[str],
        node: str | None = None,
        *,
        input: bytes | None = None,
        check: bool = False,
    ) -> subprocess.CompletedProcess[bytes]:
        """Run a command of this machine in there."""
        return subprocess.run([*self.enter(node), *command], input=input, capture_output=True, check=check)

    def ctr(self, node: str, *arguments: str) -> str:
        """containerd's own client on a node, in the namespace that the kubelet uses."""
        program = str(build.parts()["containerd"].program("ctr"))
        done = self.inside([program, "-n", "k8s.io", *arguments], node)
        if done.returncode:
            raise ClusterError(f"ctr {' '.join(arguments)}: {done.stderr.decode().strip()}")
        return done.stdout.decode()

    def memory(self) -> dict[str, float]:
        """MB resident of each part, and of all shims and pods together."""
        found: dict[str, float] = {}
        names = {part["pid"]: name for name, part in self.parts().items() if part["pid"]}
        script = 'for p in /proc/[0-9]*; do echo "${p#/proc/} $(grep -s VmRSS $p/status)"; done'
        for line in self.inside(["sh", "-c", script]).stdout.decode().splitlines():
            words = line.split()
            if len(words) == 4:
                name = names.get(int(words[0]), "supervisor" if words[0] == "1" else "shims and pods")
                found[name] = round(found.get(name, 0) + int(words[2]) / 1000, 1)
        return found


def started(pid: int) -> int:
    """When the process started, in ticks since boot: with the pid, it is this process and no later one. 0: it ended."""
    try:
        words = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return 0
    return 0 if words[0] in "ZX" else int(words[19])


def last(path: str) -> str:
    return Path(path).name
