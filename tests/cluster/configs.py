"""What each part of the cluster is started with: command lines and configuration files."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tests.cluster import build
from tests.cluster.identity import API, SERVICE, Identity

HOST = "10.88.0.1"
REGISTRY = f"{HOST}:5000"  # the registry itself
REGISTRY_DOOR = f"{HOST}:5001"  # what nodes pull through
METADATA = "169.254.169.254"  # answers, so that a sandbox that cannot reach it proves something
KWOK = "10.88.0.2"
CNI_PLUGINS = "/usr/lib/cni"
PAUSE = "registry.test/pause:1"


@dataclass(frozen=True)
class Start:
    """How a part is started; its name is also that of its log."""

    argv: list[str]
    env: Mapping[str, str] = field(default_factory=dict)
    node: str | None = None
    fds: tuple[int, ...] = ()


@dataclass(frozen=True)
class Node:
    """A real node: number 0, 1, ...; with gVisor or without."""

    number: int
    gvisor: bool

    @property
    def name(self) -> str:
        return f"node-{self.number}"

    @property
    def address(self) -> str:
        return f"10.88.0.{10 + self.number}"

    @property
    def pods(self) -> str:
        return f"10.{90 + self.number}.0.0/16"

    def binds(self, state: Path) -> dict[str, str]:
        """What lies elsewhere for this node alone: all of it paths that programs have built in."""
        place = state / "nodes" / self.name
        targets = {
            "/var/lib/kubelet": "kubelet",
            "/var/lib/cni": "cni-cache",
            "/var/log/pods": "pods",
            "/var/log/containers": "containers",
            "/run/containerd": "containerd",
            "/run/netns": "netns",
            "/run/rlsandbox-cluster": "runsc",
        }
        return {target: str(place / name) for target, name in targets.items()}


def etcd(state: Path) -> Start:
    own = "http://127.0.0.1"
    return Start(
        [
            str(build.parts()["plane"].program()), "etcd", "--data-dir", str(state / "etcd"), "--unsafe-no-fsync",
            "--listen-client-urls", f"{own}:2379", "--advertise-client-urls", f"{own}:2379",
            "--listen-peer-urls", f"{own}:2380", "--log-level", "warn", "--quota-backend-bytes", str(4 << 30),
        ]
    )  # fmt: skip


def kube_apiserver(identity: Identity) -> Start:
    file = identity.file
    flags = {
        "etcd-servers": "http://127.0.0.1:2379",
        "bind-address": HOST,
        "advertise-address": HOST,
        "secure-port": API.rpartition(":")[2],
        "tls-cert-file": file("server.crt"),
        "tls-private-key-file": file("server.key"),
        "client-ca-file": file("ca.crt"),
        "token-auth-file": file("tokens.csv"),
        "authorization-mode": "Node,RBAC",
        "enable-admission-plugins": "NodeRestriction",
        "service-account-issuer": "https://kubernetes.default.svc",
        "service-account-key-file": file("accounts.pub"),
        "service-account-signing-key-file": file("accounts.key"),
        "service-cluster-ip-range": "10.96.0.0/16",
        "kubelet-client-certificate": file("client.crt"),
        "kubelet-client-key": file("client.key"),
        "kubelet-certificate-authority": file("ca.crt"),
        "kubelet-preferred-address-types": "InternalIP",
        "endpoint-reconciler-type": "none",
        "allow-privileged": "true",
        # A lost node's pods go within seconds, not after five minutes.
        "default-not-ready-toleration-seconds": "10",
        "default-unreachable-toleration-seconds": "10",
        "max-requests-inflight": "2000",
        "max-mutating-requests-inflight": "1000",
    }
    return _plane("kube-apiserver", flags)


def kube_controller_manager(identity: Identity) -> Start:
    file = identity.file
    flags = {
        "kubeconfig": file("kube-controller-manager.inside"),
        "bind-address": HOST,
        "tls-cert-file": file("server.crt"),
        "tls-private-key-file": file("server.key"),
        "leader-elect": "false",
        "allocate-node-cidrs": "false",
        "service-account-private-key-file": file("accounts.key"),
        "root-ca-file": file("ca.crt"),
        "use-service-account-credentials": "true",
        "node-monitor-period": "2s",
        "node-monitor-grace-period": "16s",
        "kube-api-qps": "500",
        "kube-api-burst": "1000",
    }
    return _plane("kube-controller-manager", flags)


def kube_scheduler(identity: Identity) -> Start:
    file = identity.file
    flags = {
        "kubeconfig": file("kube-scheduler.inside"),
        "bind-address": HOST,
        "tls-cert-file": file("server.crt"),
        "tls-private-key-file": file("server.key"),
        "leader-elect": "false",
        "kube-api-qps": "1000",
        "kube-api-burst": "2000",
    }
    return _plane("kube-scheduler", flags)


def kubelet(state: Path, identity: Identity, node: Node) -> Start:
    place = state / "nodes" / node.name
    config = {
        "apiVersion": "kubelet.config.k8s.io/v1beta1",
        "kind": "KubeletConfiguration",
        "address": node.address,
        "authentication": {
            "anonymous": {"enabled": False},
            "webhook": {"enabled": True},
            "x509": {"clientCAFile": identity.file("ca.crt")},
        },
        "authorization": {"mode": "Webhook"},
        "tlsCertFile": identity.file("server.crt"),
        "tlsPrivateKeyFile": identity.file("server.key"),
        "containerRuntimeEndpoint": "unix:///run/containerd/containerd.sock",
        "failCgroupV1": False,
        "cgroupDriver": "cgroupfs",
        "cgroupsPerQOS": False,
        "enforceNodeAllocatable": [],
        "failSwapOn": False,
        "maxPods": 500,
        "resolvConf": "",
        "serializeImagePulls": False,
        "volumePluginDir": str(place / "plugins"),
        "imageGCHighThresholdPercent": 100,
        "evictionHard": {"memory.available": "100Mi", "nodefs.available": "1%", "imagefs.available": "1%"},
        "nodeStatusUpdateFrequency": "3s",
        "nodeLeaseDurationSeconds": 12,  # renewed every 3 s
        "healthzPort": 0,
        "kubeAPIQPS": 200,
        "kubeAPIBurst": 400,
        "registryPullQPS": 100,
        "registryBurst": 200,
        "registerNode": True,
    }
    (place / "kubelet.json").write_text(json.dumps(config, indent=1))
    labels = f"rlsandbox.test/real=true,rlsandbox.test/gvisor={str(node.gvisor).lower()}"
    flags = {
        "config": str(place / "kubelet.json"),
        "kubeconfig": identity.file(f"node-{node.name}.inside"),
        "hostname-override": node.name,
        "node-ip": node.address,
        "node-labels": labels,
        "runtime-cgroups": "/",
    }
    return Start(_plane("kubelet", flags).argv, node=node.name)


def containerd(state: Path, node: Node) -> Start:
    place = state / "nodes" / node.name
    runtime, images = 'plugins."io.containerd.cri.v1.runtime"', 'plugins."io.containerd.cri.v1.images"'
    parts = build.parts()
    handlers = {"runc": parts["runc"].program()}
    if node.gvisor:
        handlers["runsc"] = parts["runsc-adapter"].program()
    lines = [
        "version = 3",
        f'root = "{place}/images"',
        'state = "/run/containerd"',
        # What the kernel lets only CAP_SYS_RESOURCE do is not tried.
        f"[{runtime}]\nrestrict_oom_score_adj = true",
        f'[{runtime}.cni]\nbin_dirs = ["{CNI_PLUGINS}"]\nconf_dir = "{place}/cni"',
        f'[{images}.pinned_images]\nsandbox = "{PAUSE}"',
        f'[{images}.registry]\nconfig_path = "{place}/registries"',
        f'[{runtime}.containerd]\ndefault_runtime_name = "runc"',
        '[plugins."io.containerd.nri.v1.nri"]\ndisable = true',  # its socket has a fixed place
    ]
    for name, program in handlers.items():
        handler = f"{runtime}.containerd.runtimes.{name}"
        lines.append(f'[{handler}]\nruntime_type = "io.containerd.runc.v2"\nsandboxer = "podsandbox"')
        lines.append(f'[{handler}.options]\nBinaryName = "{program}"')
    (place / "containerd.toml").write_text("\n".join(lines) + "\n")
    address = node.pods.replace(".0.0/16", ".0.1")
    network = {
        "cniVersion": "1.0.0",
        "name": node.name,
        "plugins": [
            {
                "type": "bridge", "bridge": f"pods{node.number}", "isGateway": True, "ipMasq": False,
                "ipam": {
                    "type": "host-local", "dataDir": str(place / "addresses"),
                    "ranges": [[{"subnet": node.pods, "gateway": address}]], "routes": [{"dst": "0.0.0.0/0"}],
                },
            },
        ],
    }  # fmt: skip
    (place / "cni" / "10-pods.conflist").write_text(json.dumps(network, indent=1))
    pulls = f'server = "http://{REGISTRY_DOOR}"\n[host."http://{REGISTRY_DOOR}"]\ncapabilities = ["pull", "resolve"]\n'
    (place / "registries" / "registry.test" / "hosts.toml").write_text(pulls)
    (place / "runsc" / "flags").write_text("--platform=ptrace --network=sandbox\n")
    binaries = parts["containerd"].place / "bin"
    path = f"{binaries}:{parts['runc'].place / 'bin'}:/usr/sbin:/usr/bin:/sbin:/bin"
    return Start(
        [str(binaries / "containerd"), "--config", f"{place}/containerd.toml"], {"PATH": path}, node.name
    )


def agent_sandbox(identity: Identity, arguments: tuple[str, ...] = ()) -> Start:
    program = str(build.parts()["agent-sandbox"].program())
    flags = ["--extensions", "--leader-elect=false", "--metrics-bind-address=127.0.0.1:8080"]
    flags += ["--health-probe-bind-address=127.0.0.1:8081", *arguments]
    return Start([program, *flags], {"KUBECONFIG": identity.file("agent-sandbox.inside")})


def registry(state: Path) -> Start:
    config: dict[str, Any] = {
        "version": "0.1",
        "log": {"level": "warn", "accesslog": {"disabled": True}},
        "storage": {
            "filesystem": {"rootdirectory": str(state / "registry")},
            "delete": {"enabled": True},
            "cache": {"blobdescriptor": "inmemory"},
        },
        "http": {"addr": REGISTRY},
    }
    (state / "registry.yml").write_text(json.dumps(config))
    return Start(["docker-registry", "serve", str(state / "registry.yml")])


#: The doors that a client on this machine comes in by, and what each is for.
DOORS = {"api": "obeys rules", "direct": "passes bytes on", "registry": "obeys rules"}


def doors(state: Path, identity: Identity) -> Start:
    inherited = {name: 3 + number for number, name in enumerate(DOORS)}
    listed = [
        {"name": "api", "kind": "https", "fd": inherited["api"], "target": API, "says": "kubernetes"},
        {"name": "direct", "kind": "tcp", "fd": inherited["direct"], "target": API},
        {
            "name": "registry", "kind": "http", "fd": inherited["registry"], "listen": REGISTRY_DOOR,
            "target": REGISTRY, "says": "registry",
        },
        {"name": "service", "kind": "tcp", "listen": f"{SERVICE}:443", "target": API},
        {"name": "metadata", "kind": "tcp", "listen": f"{METADATA}:80", "target": REGISTRY},
    ]  # fmt: skip
    config = {
        "control": str(state / "doors.sock"),
        "ca": identity.file("ca.crt"),
        "cert": identity.file("server.crt"),
        "key": identity.file("server.key"),
        "doors": listed,
    }
    (state / "doors.json").write_text(json.dumps(config, indent=1))
    argv = [str(build.parts()["doors"].program()), str(state / "doors.json")]
    return Start(argv, fds=tuple(range(len(DOORS))))


def kwok(state: Path, identity: Identity) -> Start:
    part = build.parts()["kwok"]
    # exec into a fake node's pod runs the command here, beside kwok.
    execs = {
        "apiVersion": "kwok.x-k8s.io/v1alpha1", "kind": "ClusterExec", "metadata": {"name": "all"},
        "spec": {"execs": [{"local": {"workDir": "/"}}]},
    }  # fmt: skip
    (state / "kwok.yaml").write_text(
        "---\n".join([(part.place / "stages.yaml").read_text(), json.dumps(execs)])
    )
    flags = {
        "kubeconfig": identity.file("kwok.inside"),
        "config": str(state / "kwok.yaml"),
        "manage-nodes-with-label-selector": "rlsandbox.test/kwok=true",
        "node-ip": KWOK,
        "node-port": "10247",
        "server-address": f"{KWOK}:10247",
        "tls-cert-file": identity.file("server.crt"),
        "tls-private-key-file": identity.file("server.key"),
        "cidr": "10.200.0.0/16",
        "node-lease-duration-seconds": "40",
    }
    return Start([str(part.program()), *(f"--{name}={value}" for name, value in flags.items())])


def _plane(part: str, flags: Mapping[str, str]) -> Start:
    program = str(build.parts()["plane"].program())
    return Start([program, part, *(f"--{name}={value}" for name, value in flags.items())])
