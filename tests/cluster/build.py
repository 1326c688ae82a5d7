"""Building the programs of the test cluster, once a version, outside the checkout.

Each part is a Go module of its own under ``go/`` (its go.sum pins every byte that is downloaded) or a C file. What is
built lies in ``<cache>/<part>-<version>-<key>/``; the key is a digest of the module, the flags and the compiler, so a
changed recipe is another directory and never a stale one. A build happens in a scratch directory that is renamed
when it is whole: one that was cut off never counts as done. Two builders at once wait for each other.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import platform
import re
import shutil
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

HERE = Path(__file__).parent
GO = HERE / "go"
CACHE = "RLSANDBOX_CLUSTER_CACHE"
AGENT_SANDBOX = "RLSANDBOX_AGENT_SANDBOX"


class BuildError(Exception):
    """A part cannot be built here: says which, and what is missing or what the compiler said last."""


def cache() -> Path:
    """Where built programs are kept; ``RLSANDBOX_CLUSTER_CACHE`` overrides."""
    if given := os.environ.get(CACHE):
        return Path(given)
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "rlsandbox-cluster"


@dataclass(frozen=True)
class Part:
    """One thing to build: *packages* of a Go module, or *source*, one file for the C compiler."""

    name: str
    version: str
    programs: tuple[str, ...]
    packages: tuple[str, ...] = (".",)
    tags: str = ""
    ldflags: str = "-s -w"
    cgo: bool = False
    source: str = ""
    checkout: Path | None = None  # of the module, when it does not lie under go/
    extra: Callable[[Part, Path], None] | None = field(default=None, compare=False)

    @property
    def module(self) -> Path:
        return self.checkout or GO / self.name

    def key(self) -> str:
        """Changes whenever what would be built changes."""
        digest = hashlib.sha256()
        for word in (self.packages, self.tags, self.ldflags, self.cgo, platform.machine()):
            digest.update(repr(word).encode() + b"\0")
        if self.source:
            files = [HERE / self.source]
        elif self.checkout is None:
            files = sorted(path for path in self.module.iterdir() if path.name != "README.md")
        else:
            files = sorted(path for kind in ("*.go", "*.yaml", "go.*") for path in self.module.rglob(kind))
        for path in files:
            digest.update(path.name.encode() + b"\0" + path.read_bytes())
        return digest.hexdigest()[:12]

    @property
    def place(self) -> Path:
        return cache() / f"{self.name}-{self.version}-{self.key()}"

    def program(self, name: str | None = None) -> Path:
        """The path of one of the programs: of the first without *name*."""
        return self.place / "bin" / (name or self.programs[0])

    @property
    def built(self) -> bool:
        return self.place.is_dir()


def required(module: Path, path: str) -> str:
    """The version of *path* that *module*'s go.mod asks for."""
    found = re.search(rf"^\s*(?:require )?{re.escape(path)} v(\S+)", (module / "go.mod").read_text(), re.M)
    if found is None:
        raise BuildError(f"{module / 'go.mod'} does not require {path}")
    return found[1]


def _kubernetes_flags(version: str) -> str:
    major, minor, _ = version.split(".", 2)
    base = "k8s.io/component-base/version"
    said = {"gitVersion": f"v{version}", "gitMajor": major, "gitMinor": minor, "gitTreeState": "clean"}
    return "-s -w " + " ".join(f"-X {base}.{name}={value}" for name, value in said.items())


def _module(part: Part, path: str) -> Path:
    return Path(_go(["list", "-m", "-f", "{{.Dir}}", path], part).strip())


def _copy_manifests(part: Part, place: Path) -> None:
    """The CRDs and the rights that belong to the controller come with its module."""
    found = _module(part, "sigs.k8s.io/agent-sandbox") / "k8s"
    for folder, pattern in (("crds", "crds/*.yaml"), ("rbac", "*rbac.generated.yaml")):
        (place / folder).mkdir()
        files = list(found.glob(pattern))
        if not files:
            raise BuildError(f"agent-sandbox: no {pattern} in {found}")
        for path in files:
            shutil.copyfile(path, place / folder / path.name)


def _copy_stages(part: Part, place: Path) -> None:
    """What fake nodes and their pods go through comes with KWOK's module."""
    found = _module(part, "sigs.k8s.io/kwok") / "kustomize" / "stage"
    names = ["node/fast/node-initialize", "node/heartbeat-with-lease/node-heartbeat-with-lease"]
    names += [f"pod/fast/pod-{what}" for what in ("ready", "complete", "delete")]
    texts = [(found / f"{name}.yaml").read_text() for name in names]
    (place / "stages.yaml").write_text("\n---\n".join(texts))


def _agent_sandbox() -> Part:
    given = os.environ.get(AGENT_SANDBOX)
    program = "agent-sandbox-controller"
    if given is None:
        path = "sigs.k8s.io/agent-sandbox"
        version = required(GO / "agent-sandbox", path)
        return Part("agent-sandbox", version, (program,), (f"{path}/cmd/{program}",), extra=_copy_manifests)
    checkout = Path(given).resolve()
    if not (checkout / "cmd" / program).is_dir():
        raise BuildError(f"{AGENT_SANDBOX}={given} is no checkout of agent-sandbox: it has no cmd/{program}")
    return Part(
        "agent-sandbox",
        "checkout",
        (program,),
        (f"./cmd/{program}",),
        checkout=checkout,
        extra=_copy_manifests,
    )


def parts() -> dict[str, Part]:
    """Everything the cluster is made of, in the order in which it is built: the quick ones first."""
    containerd, runc = "github.com/containerd/containerd/v2", "github.com/opencontainers/runc"
    containerd_version = required(GO / "containerd", containerd)
    kubernetes_version = required(GO / "plane", "k8s.io/kubernetes")
    kwok = "sigs.k8s.io/kwok"
    listed = [
        Part("runsc-adapter", "1", ("runsc-adapter",), source="runsc_adapter.c"),
        Part("doors", "1", ("doors",)),
        Part("runc", required(GO / "runc", runc), ("runc",), (runc,), tags="seccomp", cgo=True),
        Part(
            "containerd",
            containerd_version,
            ("containerd", "containerd-shim-runc-v2", "ctr"),
            tuple(f"{containerd}/cmd/{name}" for name in ("containerd", "containerd-shim-runc-v2", "ctr")),
            tags="no_btrfs,no_devmapper,no_zfs",
            cgo=True,
            ldflags=f"-s -w -X {containerd}/version.Version=v{containerd_version}",
        ),
        _agent_sandbox(),
        Part("plane", kubernetes_version, ("plane",), ldflags=_kubernetes_flags(kubernetes_version)),
        Part("kwok", required(GO / "kwok", kwok), ("kwok",), (f"{kwok}/cmd/kwok",), extra=_copy_stages),
    ]
    return {part.name: part for part in listed}


def missing_tools() -> list[str]:
    """What building needs and this machine lacks, each with where it comes from."""
    lacking = []
    if shutil.which("go") is None:
        lacking.append(f"go {_go_version()} or later (https://go.dev/dl)")
    if shutil.which("cc") is None:
        lacking.append("cc (Debian: gcc)")
    if (
        shutil.which("pkg-config") is None
        or subprocess.run(["pkg-config", "--exists", "libseccomp"], capture_output=True).returncode
    ):
        lacking.append("libseccomp's headers (Debian: libseccomp-dev pkg-config)")
    return lacking


def _go_version() -> str:
    wanted = [re.search(r"^go (\S+)", path.read_text(), re.M) for path in GO.glob("*/go.mod")]
    return max((found[1] for found in wanted if found), key=lambda text: [int(n) for n in text.split(".")])


def build(names: Sequence[str] = (), say: Callable[[str], None] = print) -> dict[str, float]:
    """Build what is missing of *names* (all of them by default); seconds spent on each part that was built."""
    known = parts()
    if unknown := set(names) - set(known):
        raise BuildError(f"no such part: {', '.join(sorted(unknown))}; there are {', '.join(known)}")
    wanted = [known[name] for name in names or known if not known[name].built]
    if wanted and (lacking := missing_tools()):
        raise BuildError(f"cannot build {', '.join(p.name for p in wanted)}: no {'; no '.join(lacking)}")
    took = {}
    for part in wanted:
        with _alone(part):
            if part.built:  # by somebody else meanwhile
                continue
            say(f"building {part.name} {part.version}")
            start = time.monotonic()
            _build(part)
            took[part.name] = time.monotonic() - start
            say(f"built {part.name} {part.version} in {took[part.name]:.0f} s")
    return took


def _build(part: Part) -> None:
    scratch = Path(tempfile.mkdtemp(prefix=f".{part.name}-", dir=cache()))
    try:
        (scratch / "bin").mkdir()
        if part.source:
            target = scratch / "bin" / part.programs[0]
            _run(["cc", "-O2", "-Wall", "-Wextra", "-static", "-o", str(target), part.source], HERE, part, {})
        else:
            tags = ["-tags", part.tags] if part.tags else []
            options = ["-trimpath", "-buildvcs=false", *tags, "-ldflags", part.ldflags]
            _go(["build", *options, "-o", f"{scratch}/bin/", *part.packages], part)
        if lost := [name for name in part.programs if not (scratch / "bin" / name).is_file()]:
            raise BuildError(f"{part.name}: the build made no {', '.join(lost)}")
        if part.extra is not None:
            part.extra(part, scratch)
        scratch.chmod(0o755)
        os.rename(scratch, part.place)
    finally:
        shutil.rmtree(scratch, ignore_errors=True)


def _go(arguments: Sequence[str], part: Part) -> str:
    # No toolchain or flag of the caller's decides what is built.
    return _run(["go", *arguments], part.module, part, {"CGO_ENABLED": str(int(part.cgo)), "GOFLAGS": ""})


def _run(command: Sequence[str], cwd: Path, part: Part, env: dict[str, str]) -> str:
    done = subprocess.run(
        command, cwd=cwd, env=os.environ | env, stdin=subprocess.DEVNULL, capture_output=True, text=True
    )
    if done.returncode:
        said = "\n".join((done.stderr or done.stdout).strip().splitlines()[-8:])
        raise BuildError(f"{part.name}: {' '.join(command[:2])} failed ({done.returncode}):\n{said}")
    return done.stdout


@contextmanager
def _alone(part: Part) -> Iterator[None]:
    """One builder of *part* at a time; the lock ends with the process, however it ends."""
    cache().mkdir(parents=True, exist_ok=True)
    with open(cache() / f".lock-{part.name}", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        for left in cache().glob(f".{part.name}-????????"):  # of a build that was killed: we hold the lock
            shutil.rmtree(left, ignore_errors=True)
        yield
