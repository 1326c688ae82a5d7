"""Images by name: skopeo pulls them from a registry of the test's own (Debian: skopeo, docker-registry)."""

from __future__ import annotations

import http.client
import os
import shutil
import socket
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

import rlsandbox as rls
from rlsandbox.backends.local.ids import detect
from rlsandbox.backends.local.image import Images
from rlsandbox.errors import ImageError
from rlsandbox.keeper.build import keeper_binary
from tests.support import make_image
from tests.support.make_image import busybox_layer, d, f, layer, oci_layout, sha256

pytestmark = [
    pytest.mark.skipif(
        shutil.which("skopeo") is None, reason="skopeo is not installed (apt-get install skopeo)"
    ),
    pytest.mark.skipif(
        shutil.which("docker-registry") is None,
        reason="docker-registry is not installed (apt-get install docker-registry)",
    ),
]
LONG = 120


class Registry:
    def __init__(self, place: Path) -> None:
        self.place = place
        self.address = ""
        self.process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        for _ in range(5):
            with socket.socket() as probe:
                probe.bind(("127.0.0.1", 0))
                self.address = f"127.0.0.1:{probe.getsockname()[1]}"
            if self._listens():
                return  # else somebody else has taken the port meanwhile
        raise AssertionError((self.place / "log").read_text())

    def _listens(self) -> bool:
        config = self.place / "registry.yml"
        config.write_text(
            f"version: 0.1\nlog: {{level: error}}\nstorage: {{filesystem: {{rootdirectory: {self.place}/blobs}}}}\n"
            f"http: {{addr: '{self.address}'}}\n"
        )
        with open(self.place / "log", "ab") as log:
            self.process = subprocess.Popen(["docker-registry", "serve", config], stdout=log, stderr=log)
        for _ in range(LONG * 50):
            if self.process.poll() is not None:
                return False
            try:
                http.client.HTTPConnection(self.address, timeout=5).request("GET", "/v2/")
                return self.process.poll() is None
            except OSError:
                time.sleep(0.02)
        self.stop()
        raise TimeoutError("the registry does not listen")

    def stop(self) -> None:
        if self.process is not None:
            self.process.kill()
            self.process.wait()

    def push(self, layout: Path, name: str) -> None:
        to = f"docker://{self.address}/{name}"
        subprocess.run(
            ["skopeo", "copy", "--quiet", "--dest-tls-verify=false", f"oci:{layout}", to], check=True
        )


@pytest.fixture
def registry(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Registry]:
    made = Registry(tmp_path)
    monkeypatch.setenv(
        "RLSANDBOX_KEEPER", str(keeper_binary())
    )  # not from a cache of its own, and where HOME is another's
    monkeypatch.setenv("RLSANDBOX_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.delenv("XDG_CONFIG_HOME", raising=False)
    try:
        made.start()
        plain = tmp_path / "home/.config/containers/registries.conf"
        plain.parent.mkdir(parents=True)
        plain.write_text(f'[[registry]]\nlocation = "{made.address}"\ninsecure = true\n')
        yield made
    finally:
        made.stop()


def image(place: Path, text: str) -> Path:
    return oci_layout(place, [busybox_layer(), layer([d("etc"), f("etc/mark", text)])])


@pytest.mark.skipif(make_image.busybox() is None, reason=make_image.NO_BUSYBOX)
def test_a_sandbox_of_an_image_that_is_pulled(registry: Registry, tmp_path: Path) -> None:
    registry.push(image(tmp_path / "one", "first"), "group/tools:1.2")
    name = f"{registry.address}/group/tools:1.2"
    for _ in range(2):
        pool = rls.Pool("local", size=1, config=False, ledger=tmp_path / "ledger")
        with pool, pool.claim(rls.Task(id="a", image=name), timeout=LONG) as sandbox:
            assert sandbox.run("cat /etc/mark; busybox | head -c 7").stdout == "firstBusyBox"
        registry.stop()  # the second time it is taken from the cache
    pool = rls.Pool("local", size=1, config=False, ledger=tmp_path / "ledger")
    with pool, pytest.raises(ImageError, match="could not pull") as caught:
        pool.claim(rls.Task(id="b", image=f"{registry.address}/other:1"), timeout=LONG)
    assert "refused" in str(caught.value)
    assert "\n" not in str(caught.value)


async def test_by_digest_and_what_is_not_there(registry: Registry, tmp_path: Path) -> None:
    registry.push(image(tmp_path / "one", "first"), "tools:latest")
    images = Images(detect(), tmp_path / "cache")
    manifest = subprocess.run(
        ["skopeo", "inspect", "--raw", "--tls-verify=false", f"docker://{registry.address}/tools:latest"],
        check=True,
        capture_output=True,
    ).stdout
    digest = f"sha256:{sha256(manifest)}"
    found = await images.get(f"{registry.address}/tools@{digest}")
    assert found.digest == (await images.get(f"{registry.address}/tools:latest@{digest}")).digest
    assert found.digest == (await images.get(f"{registry.address}/tools")).digest
    for name in ("tools:none", "nothing/here:1", f"tools@sha256:{'0' * 64}"):
        with pytest.raises(ImageError, match="skopeo could not pull") as caught:
            await images.get(f"{registry.address}/{name}")
        assert caught.value.kind == "image"
        assert "unknown" in str(caught.value)
        assert "\n" not in str(caught.value)
    assert len(os.listdir(tmp_path / "cache/pulls")) == 3
    assert os.listdir(tmp_path / "cache/tmp") == []


async def test_a_blob_that_the_registry_has_spoilt(registry: Registry, tmp_path: Path) -> None:
    registry.push(image(tmp_path / "one", "first"), "tools:latest")
    blobs = sorted((tmp_path / "blobs").rglob("data"), key=lambda path: path.stat().st_size)
    whole = blobs[-1].read_bytes()
    blobs[-1].write_bytes(whole[: len(whole) // 2])
    images = Images(detect(), tmp_path / "cache")
    with pytest.raises(ImageError, match="skopeo could not pull"):
        await images.get(f"{registry.address}/tools")
    assert os.listdir(tmp_path / "cache/pulls") == []
    blobs[-1].write_bytes(whole)
    assert (await images.get(f"{registry.address}/tools")).lowers
