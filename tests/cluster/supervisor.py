"""The first process of a cluster's namespaces: it starts the parts, reaps everything, and dies last.

``python supervisor.py STATE [LISTENER-FD ...]`` is started in new pid, network, mount and ipc namespaces, so that
one SIGKILL to it ends whatever runs in the cluster, pods and all, also when the process that started it is long gone.
It obeys one-line JSON requests on ``STATE/supervisor.sock`` and uses nothing but the standard library.

``{"do": "node", "name": N, "binds": {target: source}}`` makes a mount namespace with those binds;
``{"do": "start", "name": P, "argv": [...], "env": {...}, "node": N, "fds": [index of a listener, ...]}`` starts a
part (its descriptors are 3, 4, ...; its output goes to ``STATE/log/P.log``); ``{"do": "signal", "name": P,
"signal": 9}``; ``{"do": "list"}`` tells each part's pid (in this namespace), state, start count and exit code.
"""

from __future__ import annotations

import ctypes
import json
import os
import selectors
import signal
import socket
import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

CLONE_NEWNS = 0x00020000
MS_BIND, MS_REC, MS_PRIVATE, MS_SHARED = 0x1000, 0x4000, 0x40000, 0x100000

RESTARTS = 5

libc = ctypes.CDLL(None, use_errno=True)


def _checked(result: int, what: str) -> None:
    if result:
        number = ctypes.get_errno()
        raise OSError(number, f"{what}: {os.strerror(number)}")


def mount(source: str, target: str, kind: str = "none", flags: int = 0) -> None:
    result = libc.mount(source.encode(), target.encode(), kind.encode(), ctypes.c_ulong(flags), None)
    _checked(result, f"mount {source} on {target}")


class Supervisor:
    """All state is here; one thread, nothing waits for anything but its selector."""

    def __init__(self, state: Path, listeners: Sequence[int]) -> None:
        self.state = state
        self.listeners = listeners  # of the starter's network: kept open, so that a door keeps its port
        self.parts: dict[str, dict[str, Any]] = {}
        self.nodes: dict[str, int] = {}
        self.how: dict[str, dict[str, Any]] = {}
        """How each part is started again that ends by itself, as a kubelet does it elsewhere."""
        self._again: set[str] = set()

    def serve(self) -> None:
        wake, wake_end = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)
        signal.set_wakeup_fd(wake_end)
        signal.signal(signal.SIGCHLD, lambda *_: None)
        door = socket.socket(socket.AF_UNIX)
        door.bind(str(self.state / "supervisor.new"))
        door.listen(64)
        selector = selectors.DefaultSelector()
        selector.register(wake, selectors.EVENT_READ)
        selector.register(door, selectors.EVENT_READ)
        os.rename(self.state / "supervisor.new", self.state / "supervisor.sock")  # ready now
        while True:
            for key, _ in selector.select():
                if key.fileobj is door:
                    self._obey(door)
                else:
                    os.read(wake, 4096)
            self._reap()

    def _obey(self, door: socket.socket) -> None:
        peer, _ = door.accept()
        peer.settimeout(5)
        with peer:
            try:
                with peer.makefile("r") as lines:
                    request = json.loads(lines.readline())
                answer: dict[str, Any] = {"ok": getattr(self, "do_" + request.pop("do"))(**request)}
            except (OSError, ValueError, LookupError, TypeError, AttributeError) as error:
                answer = {"error": f"{type(error).__name__}: {error}"}
            with suppress(OSError):  # whoever asked may be gone
                peer.sendall(json.dumps(answer).encode() + b"\n")

    def _reap(self) -> None:
        """Everything orphaned in this pid namespace becomes our child."""
        self._collect()
        for name in list(self._again):
            self._again.discard(name)
            part = self.parts[name]
            if not part["pid"] and not part["asked"] and part["starts"] <= RESTARTS:
                self.do_start(**self.how[name])

    def _collect(self) -> None:
        while True:
            try:
                pid, status = os.waitpid(-1, os.WNOHANG)
            except ChildProcessError:
                return
            if pid == 0:
                return
            for part in self.parts.values():
                if part["pid"] == pid:
                    part |= {"pid": 0, "code": os.waitstatus_to_exitcode(status)}
                    self._again.update(name for name in self.parts if self.parts[name] is part)

    # -- requests

    def do_list(self) -> dict[str, dict[str, Any]]:
        self._reap()
        return {name: part | {"state": _state(part["pid"])} for name, part in self.parts.items()}

    def do_signal(self, name: str, signal: int) -> None:
        self._reap()
        if not self.parts[name]["pid"]:
            raise ProcessLookupError(f"{name} does not run")
        self.parts[name]["asked"] |= signal in (9, 15)
        os.kill(self.parts[name]["pid"], signal)

    def do_start(
        self,
        name: str,
        argv: Sequence[str],
        env: Mapping[str, str] | None = None,
        node: str | None = None,
        fds: Sequence[int] = (),
    ) -> int:
        self._collect()
        before = self.parts.get(name, {"pid": 0, "starts": 0})
        if before["pid"]:
            raise FileExistsError(f"{name} runs already")
        namespace = self.nodes[node] if node is not None else -1
        given = [self.listeners[number] for number in fds]
        pid = os.fork()
        if pid == 0:
            try:
                self._become(name, list(argv), dict(env or {}), namespace, given)
            except Exception as error:
                os.write(2, f"{name}: {error}\n".encode())
            finally:
                os._exit(127)
        self.parts[name] = {"pid": pid, "code": None, "starts": before["starts"] + 1, "node": node}
        self.parts[name]["asked"] = False
        self.how[name] = {"name": name, "argv": argv, "env": env, "node": node, "fds": fds}
        return pid

    def _become(
        self, name: str, argv: list[str], env: dict[str, str], namespace: int, given: list[int]
    ) -> None:
        os.setsid()
        log = os.open(self.state / "log" / f"{name}.log", os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)
        os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
        os.dup2(log, 1)
        os.dup2(log, 2)
        if namespace >= 0:
            _checked(libc.setns(namespace, CLONE_NEWNS), "setns")
        spare = [os.dup2(fd, 100 + number) for number, fd in enumerate(given)]  # clear of 3, 4, ...
        for number, fd in enumerate(spare):
            os.dup2(fd, 3 + number)
        os.closerange(3 + len(given), 1024)
        signal.set_wakeup_fd(-1)
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        os.execvpe(argv[0], argv, os.environ | env)

    def do_node(self, name: str, binds: Mapping[str, str]) -> None:
        if name in self.nodes:
            return
        made, ready = os.pipe()
        pid = os.fork()
        if pid == 0:
            try:
                _checked(libc.unshare(CLONE_NEWNS), "unshare")
                mount("none", "/", flags=MS_REC | MS_PRIVATE)
                for target, source in binds.items():
                    mount(source, target, flags=MS_BIND)
                mount("none", "/", flags=MS_REC | MS_SHARED)  # what the kubelet mounts, its runtime sees
                os.write(ready, b"+")
            except OSError as error:
                os.write(ready, str(error).encode())
            finally:
                signal.pause()
        os.close(ready)
        try:
            said = os.read(made, 4096)
            if said != b"+":
                raise OSError(f"node {name}: {said.decode()}")
            self.nodes[name] = os.open(f"/proc/{pid}/ns/mnt", os.O_RDONLY | os.O_CLOEXEC)
        finally:
            os.close(made)
            os.kill(pid, signal.SIGKILL)


def _state(pid: int) -> str:
    """running, paused, ending (some of its threads live on) or ended."""
    if not pid:
        return "ended"
    try:
        letter = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return "ending"
    return "paused" if letter in "Tt" else "ending" if letter in "ZX" else "running"


if __name__ == "__main__":
    # Whatever class its starter was in: a real-time process cannot enter a container's cpu control group (v1).
    os.sched_setscheduler(0, os.SCHED_OTHER, os.sched_param(0))
    Supervisor(Path(sys.argv[1]), [int(word) for word in sys.argv[2:]]).serve()
