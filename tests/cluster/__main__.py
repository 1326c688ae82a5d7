"""The test cluster from the command line.

Names of parts: etcd kube-apiserver kube-controller-manager kube-scheduler containerd-NODE kubelet-NODE agent-sandbox
kwok registry doors. Names of roles: admin pool other nobody ...; of doors: api (obeys rules), direct, inside.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import signal
import sys
from typing import Any

from tests.cluster import build
from tests.cluster.cluster import Cluster
from tests.cluster.faults import Faults
from tests.cluster.handle import ClusterError
from tests.cluster.images import Registry
from tests.cluster.kube import ApiError
from tests.cluster.measure import keep_shielded, measured


def _parser() -> argparse.ArgumentParser:
    raw = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser("python -m tests.cluster", description=__doc__, formatter_class=raw)
    parser.add_argument("--name", help="which cluster (default: $RLSANDBOX_CLUSTER, or default)")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")

    def command(name: str, help: str, *arguments: str) -> argparse.ArgumentParser:
        made = commands.add_parser(name, help=help)
        for argument in arguments:
            made.add_argument(argument)
        return made

    up = command("up", "build what is missing, start it, print a kubeconfig")
    up.add_argument(
        "--nodes", type=int, default=2, help="real nodes, the last with gVisor (default: %(default)s)"
    )
    up.add_argument("--kwok", type=int, default=2, help="fake nodes (default: %(default)s)")
    up.add_argument(
        "--controller", action="append", default=[], metavar="FLAG", help="for the agent-sandbox controller"
    )
    measure = command("measure", "time pods of each kind and a pool on fake nodes; memory")
    measure.add_argument("--rounds", type=int, default=7)
    measure.add_argument(
        "--sandboxes", type=int, default=100, help="in the pool on fake nodes (default: %(default)s)"
    )
    command(
        "shield", "give its parts and pods the processor before everything else, to measure on a busy machine"
    )
    command("unshield", "no longer")
    command("remove-image", "remove an image from all real nodes", "image")
    command("down", "stop it and remove all it left")
    command("status", "parts, their state and memory")
    kubeconfig = command("kubeconfig", "write a kubeconfig and print its path")
    kubeconfig.add_argument("role", nargs="?", default="admin")
    kubeconfig.add_argument("--door", default="api", choices=["api", "direct", "inside"])
    kubeconfig.add_argument("--namespace", default="default")
    command("build", "build parts that are missing (all of them by default)").add_argument("parts", nargs="*")
    for name, help in (
        ("kill", "SIGKILL a part"),
        ("pause", "SIGSTOP a part"),
        ("resume", "SIGCONT a part"),
        ("restart", "kill a part and start it"),
        ("log", "print what a part wrote"),
    ):
        command(name, help, "part")
    command("kubectl", "kubectl, as admin; all that follows is for it")
    command("ctr", "containerd's client on a node; all that follows is for it", "node")
    command("enter", "run the command that follows in the cluster's network")
    images = command("images", "put generated images that share layers into the registry; print their names")
    images.add_argument("count", type=int, nargs="?", default=200)
    fault = command("fault", "set a rule (door=api status=429 path=/api/v1/.* times=3 ...); none: list them")
    fault.add_argument("words", nargs="*", metavar="KEY=VALUE")
    command("clear", "remove all rules")
    cut = command("cut", "cut open requests through the door api: watches, or exec streams of pods", "what")
    cut.add_argument("pod", nargs="?", default="[^/]+")
    command("drain", "cordon a node and evict its pods", "node")
    command("uncordon", "let a node take pods again", "node")
    gone = command("delete-pods", "delete pods behind the back of their owner", "namespace")
    gone.add_argument("selector", nargs="?", default="")
    return parser


def _value(text: str) -> Any:
    try:
        return json.loads(text)
    except ValueError:
        return text


def _status(cluster: Cluster) -> None:
    memory, facts = cluster.memory(), cluster.facts()
    for name, part in sorted(cluster.parts().items()):
        code = "" if part["code"] is None else f"  (last ended with {part['code']})"
        print(f"{name:26} {part['state']:8} {memory.pop(name, 0):8.1f} MB{code}")
    for name, size in memory.items():
        print(f"{name:26} {'running':8} {size:8.1f} MB")
    print("doors:", ", ".join(f"{name} 127.0.0.1:{port}" for name, port in facts["ports"].items()))


def main(arguments: list[str] | None = None) -> int:
    words = list(sys.argv[1:] if arguments is None else arguments)
    # What follows is another program's command line, options and all.
    passed = next((n + 1 for n, word in enumerate(words) if word in ("kubectl", "enter", "ctr")), len(words))
    passed += words[passed - 1 : passed] == ["ctr"]  # its node
    options = _parser().parse_args(words[:passed])
    rest = words[passed:]
    cluster = Cluster(options.name)
    faults = Faults(cluster)
    match options.command:
        case "up":
            cluster.up(options.nodes, options.kwok, options.controller)
            print(f"export KUBECONFIG={cluster.kubeconfig()}")
        case "down":
            print(
                f"cluster {cluster.name} is gone" if cluster.down() else f"there is no cluster {cluster.name}"
            )
        case "measure":
            measured(cluster, options.rounds, options.sandboxes)
        case "shield":
            keep_shielded(cluster)
        case "remove-image":
            for node in cluster.nodes():
                faults.remove_image(node.name, options.image)
        case "status":
            _status(cluster)
        case "kubeconfig":
            cluster.ask("list")
            print(cluster.kubeconfig(options.role, options.door, options.namespace))
        case "build":
            for name, seconds in build.build(options.parts).items():
                print(f"{name:16} {seconds:6.0f} s  {build.parts()[name].place}")
        case "kill" | "pause" | "resume" | "restart":
            getattr(cluster, options.command)(options.part)
        case "log":
            with open(cluster.log(options.part), errors="replace") as text:
                shutil.copyfileobj(text, sys.stdout)
        case "kubectl":
            program = str(build.parts()["plane"].program())
            os.environ["KUBECONFIG"] = str(cluster.kubeconfig("admin", "direct"))
            os.execv(program, [program, "kubectl", *rest])
        case "ctr":
            sys.stdout.write(cluster.ctr(options.node, *rest))
        case "enter":
            command = [*cluster.enter(), *rest]
            os.execvp(command[0], command)
        case "images":
            with Registry(cluster.port("registry")) as registry:
                print("\n".join(registry.task_images(options.count)))
        case "fault":
            if options.words:
                print(
                    faults.add(
                        **{key: _value(value) for key, _, value in (w.partition("=") for w in options.words)}
                    )
                )
            else:
                print(json.dumps(faults.rules(), indent=1))
        case "clear":
            faults.remove()
        case "cut":
            if options.what not in ("watches", "exec"):
                raise ClusterError(f"cut watches or exec, not {options.what}")
            print(faults.cut_watches() if options.what == "watches" else faults.cut_exec(pod=options.pod))
        case "drain":
            print(faults.drain(options.node))
        case "uncordon":
            faults.cordon(options.node, False)
        case "delete-pods":
            print(faults.delete_pods(options.namespace, options.selector))
    return 0


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # what was begun is ended, compilers too
    try:
        sys.exit(main())
    except (ClusterError, build.BuildError, ApiError, OSError, ValueError) as error:
        sys.exit(f"error: {error}")
    except KeyboardInterrupt:
        sys.exit(130)
