"""The images of the test cluster, made here: the pause image, the main test image, and 200 that share layers."""

from __future__ import annotations

import hashlib
import http.client
import json
import random
import shutil
import tarfile
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from tests.cluster import build
from tests.support import make_image
from tests.support.make_image import f

HOST = "registry.test"
TEST = f"{HOST}/test:1"
MANIFEST = "application/vnd.oci.image.manifest.v1+json"


@dataclass(frozen=True)
class Layout:
    """An OCI layout on disk and the name under which the cluster knows it."""

    path: Path
    name: str  # registry.test/REPOSITORY:TAG

    @property
    def repository(self) -> str:
        return self.name.removeprefix(HOST + "/").rpartition(":")[0]

    @property
    def tag(self) -> str:
        return self.name.rpartition(":")[2]

    @property
    def archive(self) -> Path:
        return self.path.with_suffix(".tar")

    def blob(self, digest: str) -> Path:
        return self.path / "blobs" / "sha256" / digest.removeprefix("sha256:")

    def manifest(self) -> bytes:
        index = json.loads((self.path / "index.json").read_text())
        return self.blob(index["manifests"][0]["digest"]).read_bytes()

    def digests(self) -> list[str]:
        manifest = json.loads(self.manifest())
        return [entry["digest"] for entry in [*manifest["layers"], manifest["config"]]]


def standard() -> list[Layout]:
    """The images that every node has from the start, in the cache; made when they are not there yet."""
    if make_image.busybox() is None:
        raise build.BuildError(make_image.NO_BUSYBOX)
    place = build.cache() / f"images-{_key()}"
    made = [Layout(place / "pause", f"{HOST}/pause:1"), Layout(place / "test", TEST)]
    if not place.is_dir():
        build.cache().mkdir(parents=True, exist_ok=True)
        scratch = Path(tempfile.mkdtemp(prefix=".images-", dir=build.cache()))
        try:
            make_image.oci_layout(
                scratch / "pause", [make_image.busybox_layer()], {"Cmd": ["/bin/sleep", "infinity"]}, tag="1"
            )
            make_image.residue_image(scratch / "test", tag="1")
            for name in ("pause", "test"):
                with tarfile.open(scratch / f"{name}.tar", "w") as tar:
                    tar.add(scratch / name, arcname=".")
            scratch.chmod(0o755)
            try:
                scratch.rename(place)
            except OSError:  # somebody else was quicker: theirs is as good
                if not place.is_dir():
                    raise
        finally:
            shutil.rmtree(scratch, ignore_errors=True)
    return made


def _key() -> str:
    """Changes with how images are made and with the programs of this machine that are put into them."""
    digest = hashlib.sha256(Path(__file__).read_bytes() + Path(make_image.__file__).read_bytes())
    for name in ("busybox", "git", "bash", "python3"):
        found = shutil.which(name)
        status = Path(found).resolve().stat() if found else None
        digest.update(f"{name} {found} {status and (status.st_size, status.st_mtime_ns)}\n".encode())
    return digest.hexdigest()[:12]


class Registry:
    """Pushes to the cluster's registry through its door."""

    def __init__(self, port: int) -> None:
        self.connection = http.client.HTTPConnection("127.0.0.1", port, timeout=60)

    def __enter__(self) -> Registry:
        return self

    def __exit__(self, *_: object) -> None:
        self.connection.close()

    def _ask(
        self, method: str, path: str, body: bytes | None = None, kind: str = ""
    ) -> tuple[int, http.client.HTTPMessage]:
        self.connection.request(method, path, body, {"Content-Type": kind} if kind else {})
        answer = self.connection.getresponse()
        said = answer.read()
        if answer.status >= 400 and not (method == "HEAD" and answer.status == 404):
            raise RuntimeError(f"registry: {method} {path}: {answer.status} {said[:300]!r}")
        return answer.status, answer.headers

    def has(self, repository: str, tag: str) -> bool:
        return self._ask("HEAD", f"/v2/{repository}/manifests/{tag}")[0] == 200

    def blob(self, repository: str, data: bytes) -> str:
        """Send a blob; its digest."""
        digest = "sha256:" + hashlib.sha256(data).hexdigest()
        _, headers = self._ask("POST", f"/v2/{repository}/blobs/uploads/", b"")
        target = headers["Location"]
        target = target[target.index("/v2/") :] + ("&" if "?" in target else "?") + f"digest={digest}"
        self._ask("PUT", target, data, "application/octet-stream")
        return digest

    def refer(self, repository: str, digest: str, other: str) -> None:
        """Take over a blob that the repository *other* has, without sending it again."""
        query = f"mount={digest}&from={other}"
        status, _ = self._ask("POST", f"/v2/{repository}/blobs/uploads/?{query}", b"")
        if status != 201:
            raise RuntimeError(f"registry: {other} has no {digest} to share")

    def manifest(self, repository: str, tag: str, text: bytes) -> None:
        self._ask("PUT", f"/v2/{repository}/manifests/{tag}", text, MANIFEST)

    def push(self, layout: Layout) -> None:
        for digest in layout.digests():
            self.blob(layout.repository, layout.blob(digest).read_bytes())
        self.manifest(layout.repository, layout.tag, layout.manifest())

    def task_images(self, count: int = 200, *, families: int = 10, size: int = 2 << 20) -> list[str]:
        """*count* images ``registry.test/task/NNN:1``: one base under all, a layer a family, a small one each.

        The same names have the same content each time; a second call makes only what is missing.
        """
        sent: dict[str, str] = {}  # digest: the repository it was sent to
        shared = [make_image.busybox_layer()]
        shared += [
            make_image.layer([f(f"opt/family-{family}", random.Random(family).randbytes(size))])
            for family in range(min(families, count))
        ]
        digests = ["sha256:" + hashlib.sha256(data).hexdigest() for data in shared]
        names = [f"{HOST}/task/{number:03}:1" for number in range(count)]
        for number in range(count):
            repository, family = f"task/{number:03}", 1 + number % families
            if self.has(repository, "1"):
                sent |= {digest: sent.get(digest, repository) for digest in (digests[0], digests[family])}
                continue
            layers = [(digests[n], len(shared[n])) for n in (0, family)]
            for n in (0, family):
                if (other := sent.setdefault(digests[n], repository)) != repository:
                    self.refer(repository, digests[n], other)
                else:
                    self.blob(repository, shared[n])
            own = random.Random(-1 - number).randbytes(65536)
            data = make_image.layer([f("opt/task", f"{number}\n"), f("opt/own", own)])
            layers.append((self.blob(repository, data), len(data)))
            self._image(repository, layers)
        return names

    def _image(self, repository: str, layers: Sequence[tuple[str, int]]) -> None:
        """Layers are not compressed: what a node unpacks is what it is told."""
        media = "application/vnd.oci.image."
        config = make_image.image_config_of([digest for digest, _ in layers])
        described = [
            {"mediaType": media + "layer.v1.tar", "digest": digest, "size": size} for digest, size in layers
        ]
        text = {
            "schemaVersion": 2,
            "mediaType": MANIFEST,
            "config": {
                "mediaType": media + "config.v1+json",
                "digest": self.blob(repository, config),
                "size": len(config),
            },
            "layers": described,
        }
        self.manifest(repository, "1", json.dumps(text).encode())


def import_command(ctr: Path, layout: Layout) -> list[str]:
    """Give *layout* to a node's containerd."""
    base = layout.name.rpartition(":")[0]
    return [str(ctr), "-n", "k8s.io", "images", "import", "--local", "--base-name", base, str(layout.archive)]
