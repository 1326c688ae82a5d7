"""What registries say of images, also when they lie, are slow, or want to know who asks."""

from __future__ import annotations

import asyncio
import base64
import hashlib
import json
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest

from rlsandbox.errors import ConfigError, ImageError

pytest.importorskip("aiohttp", reason="needs the extra: pip install 'rlsandbox-pool[kubernetes]'")
from aiohttp import web

from rlsandbox._registry import LARGEST
from rlsandbox.images import Layer
from rlsandbox.images.registry import Registries
from tests.support.served import served

OCI = "application/vnd.oci.image."
D1, D2 = "sha256:" + "1" * 64, "sha256:" + "2" * 64


def manifest(*layers: dict[str, Any], **more: Any) -> bytes:
    rows = list(layers) or [{"mediaType": OCI + "layer.v1.tar+gzip", "digest": D1, "size": 11}]
    return json.dumps(
        {"schemaVersion": 2, "mediaType": OCI + "manifest.v1+json", "layers": rows, **more}
    ).encode()


def digest(body: bytes) -> str:
    return "sha256:" + hashlib.sha256(body).hexdigest()


class Registry:
    """Answers by path; a list of answers is used up one by one."""

    def __init__(self) -> None:
        self.answers: dict[str, Any] = {}
        self.seen: list[tuple[str, str]] = []
        self.at_once = self.most = 0

    async def handle(self, request: web.Request) -> web.StreamResponse:
        self.seen.append((request.path_qs, request.headers.get("Authorization", "")))
        self.at_once += 1
        self.most = max(self.most, self.at_once)
        try:
            await asyncio.sleep(0.01)
            found = self.answers.get(request.path.removeprefix("/v2/"), web.Response(status=404))
            if isinstance(found, list):
                found = found.pop(0)
            if callable(found):
                return await found(request)  # type: ignore[no-any-return]
            if isinstance(found, bytes):
                return web.Response(body=found, content_type=OCI + "manifest.v1+json")
            return web.Response(status=found.status, headers=found.headers, body=found.body)
        finally:
            self.at_once -= 1


def run(body: Callable[[Registry, Registries, str], Awaitable[None]], **how: Any) -> None:
    async def main() -> None:
        fake = Registry()
        app = web.Application()
        app.router.add_route("*", "/{tail:.*}", fake.handle)
        async with served(app) as host, asyncio.timeout(60), Registries(**how) as registries:
            await body(fake, registries, host)

    asyncio.run(main())


@pytest.fixture(autouse=True)
def _no_credentials(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DOCKER_CONFIG", str(tmp_path))
    monkeypatch.setattr("rlsandbox._registry.random.uniform", lambda low, high: 0.01)


def test_layers_and_sizes() -> None:
    async def body(fake: Registry, registries: Registries, host: str) -> None:
        text = manifest(
            {"mediaType": OCI + "layer.v1.tar", "digest": D1, "size": 5},
            {"mediaType": "application/vnd.docker.image.rootfs.diff.tar.gzip", "digest": D2, "size": 7},
            {"mediaType": "application/vnd.docker.image.rootfs.diff.tar.gzip", "digest": D2, "size": 7},
        )
        fake.answers["a/manifests/1"] = text
        image = await registries.image(f"{host}/a:1")
        assert image.layers == (Layer(D1, 5, packed=False), Layer(D2, 7), Layer(D2, 7))
        assert (image.size, image.digest, image.streams) == (12, digest(text), "")

    run(body)


def test_an_index_and_its_platforms() -> None:
    async def body(fake: Registry, registries: Registries, host: str) -> None:
        text = manifest()
        rows = [
            {"digest": D2, "platform": {"os": "linux", "architecture": "arm64"}},
            {"digest": D2, "platform": {"os": "unknown", "architecture": "unknown"}},
            {"digest": digest(text), "platform": {"os": "linux", "architecture": "amd64"}},
            "rubbish",
        ]
        index = {"schemaVersion": 2, "mediaType": OCI + "index.v1+json", "manifests": rows}
        fake.answers |= {
            "a/manifests/latest": json.dumps(index).encode(),
            f"a/manifests/{digest(text)}": text,
        }
        assert (await registries.image(f"{host}/a")).digest == digest(text)
        index["manifests"] = rows[:2]
        fake.answers["a/manifests/latest"] = json.dumps(index).encode()
        with pytest.raises(ImageError, match=r"is not there for linux/amd64: only linux/arm64"):
            await registries.image(f"{host}/a")

    run(body)


def test_one_that_sends_something_else() -> None:
    async def body(fake: Registry, registries: Registries, host: str) -> None:
        fake.answers[f"a/manifests/{D1}"] = manifest()
        with pytest.raises(ImageError, match="sent something else than"):
            await registries.image(f"{host}/a@{D1}")

    run(body)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (b"<html>", "is no JSON"),
        (b"[]", "is no manifest"),
        (b"{}", "without layers"),
        (b'{"schemaVersion": 1, "fsLayers": []}', "schema 1"),
        (manifest({"digest": D1, "size": -1}), "a layer without size and digest"),
        (manifest({"digest": D1, "size": True}), "a layer without size and digest"),
        (manifest({"digest": D1, "size": 10**400}), "a layer without size and digest"),
        (b"[" * 100_000, "is no JSON"),
        (manifest({"digest": "x", "size": 1}), "a layer without size and digest"),
        (json.dumps({"layers": ["x"]}).encode(), "a layer without size and digest"),
        (b" " * (LARGEST + 1), "more than 4,194,304 bytes"),
    ],
)
def test_what_is_no_manifest(text: bytes, said: str) -> None:
    async def body(fake: Registry, registries: Registries, host: str) -> None:
        fake.answers["a/manifests/latest"] = text
        with pytest.raises(ImageError, match=said):
            await registries.image(f"{host}/a")

    run(body)


def test_one_that_is_busy_is_asked_again_and_one_that_says_no_is_not() -> None:
    async def body(fake: Registry, registries: Registries, host: str) -> None:
        busy = web.Response(status=429, headers={"Retry-After": "1"})
        fake.answers["a/manifests/latest"] = [busy, web.Response(status=503), manifest()]
        assert (await registries.image(f"{host}/a")).size == 11
        fake.answers["b/manifests/latest"] = web.Response(status=403)
        with pytest.raises(ImageError, match="does not let it be read") as caught:
            await registries.image(f"{host}/b")
        assert (caught.value.kind, caught.value.retryable) == ("image_forbidden", False)
        with pytest.raises(ImageError, match="has none of that name"):
            await registries.image(f"{host}/c")
        assert [path for path, _ in fake.seen].count("/v2/b/manifests/latest") == 1

    run(body)


def test_an_answer_that_is_cut_off_is_asked_for_again() -> None:
    async def body(fake: Registry, registries: Registries, host: str) -> None:
        async def cut(request: web.Request) -> web.StreamResponse:
            answer = web.StreamResponse(headers={"Content-Length": "1000"})
            await answer.prepare(request)
            await answer.write(b"{")
            assert request.transport is not None
            request.transport.abort()
            return answer

        fake.answers["a/manifests/latest"] = [cut, manifest()]
        assert (await registries.image(f"{host}/a")).size == 11

    run(body)


def test_tokens(tmp_path: Path) -> None:
    own = base64.b64encode(b"me:secret").decode()

    async def body(fake: Registry, registries: Registries, host: str) -> None:
        registries._auths[host] = own
        realm = f'Bearer realm="http://{host}/v2/token",service="s",scope="repository:a:pull"'
        want = web.Response(status=401, headers={"WWW-Authenticate": realm})
        fake.answers |= {
            "a/manifests/latest": [want, manifest()],
            "token": web.Response(body=json.dumps({"token": "T"}).encode()),
        }
        assert (await registries.image(f"{host}/a")).size == 11
        assert [auth for _, auth in fake.seen] == ["", f"Basic {own}", "Bearer T"]
        assert "scope=repository:a:pull" in fake.seen[1][0]
        fake.answers |= {"b/manifests/latest": want, "token": web.Response(status=500)}
        with pytest.raises(ImageError, match=r"does not let it be read \(401\)"):
            await registries.image(f"{host}/b")

    run(body)


@pytest.mark.parametrize(
    "headers",
    [["Negotiate", 'Basic realm="x"'], ['Negotiate, Basic realm="a, b=c", charset="UTF-8"'], ["BASIC"]],
)
def test_a_registry_that_names_several_ways_to_log_in(headers: list[str]) -> None:
    async def body(fake: Registry, registries: Registries, host: str) -> None:
        registries._auths[host] = "QQ=="

        async def want(_: web.Request) -> web.StreamResponse:
            answer = web.Response(status=401)
            for line in headers:
                answer.headers.add("WWW-Authenticate", line)
            return answer

        fake.answers["a/manifests/latest"] = [want, manifest()]
        assert (await registries.image(f"{host}/a")).size == 11
        assert [auth for _, auth in fake.seen] == ["", "Basic QQ=="]

    run(body)


@pytest.mark.parametrize("after", ["\u00b2", "-1", "nan", "soon", "Wed, 21 Oct 2015 07:28:00 GMT"])
def test_odd_words_of_how_long_to_wait_stop_nothing(after: str) -> None:
    async def body(fake: Registry, registries: Registries, host: str) -> None:
        busy = web.Response(status=429, headers={"Retry-After": after})
        fake.answers["a/manifests/latest"] = [busy, manifest()]
        assert (await registries.images([f"{host}/a"]))[f"{host}/a"].size == 11

    run(body)


def test_passwords_do_not_go_to_a_realm_without_encryption() -> None:
    async def body(fake: Registry, registries: Registries, host: str) -> None:
        registries._auths["r.example"] = "x"
        challenge = {"bearer": f'realm="http://{host}/v2/token"'}
        assert not await registries._login("n", "r.example", "a", challenge)
        assert not fake.seen

    run(body)


def test_credentials_of_docker(tmp_path: Path) -> None:
    file = tmp_path / "c.json"
    file.write_text(
        json.dumps(
            {
                "auths": {
                    "https://index.docker.io/v1/": {"auth": "A"},
                    "notdocker.io": {"auth": "B"},
                    "odd.example": {"auth": 7},
                    "r.example:5": {"username": "u", "password": "p"},
                }
            }
        )
    )
    assert Registries(credentials=file)._auths == {
        "docker.io": "A",
        "notdocker.io": "B",
        "r.example:5": base64.b64encode(b"u:p").decode(),
    }
    for text in ("", "[]", "\0", '{"auths": ["x"]}', "[" * 100_000):
        file.write_text(text)
        with pytest.raises(ConfigError, match="cannot be read as docker's"):
            Registries(credentials=file)
    with pytest.raises(ConfigError, match="does not exist"):
        Registries(credentials=tmp_path / "none")
    with pytest.raises(ConfigError, match="must be http"):
        Registries(mirrors={"docker.io": "mirror.example"})


def test_many_are_asked_at_once_but_not_all() -> None:
    async def body(fake: Registry, registries: Registries, host: str) -> None:
        for number in range(30):
            fake.answers[f"i{number}/manifests/latest"] = manifest()
        told: list[str] = []
        names = [f"{host}/i{number}" for number in range(31)]
        found = await registries.images(names, told=lambda image: told.append(image.name))
        assert sorted(told) == sorted(names) == sorted(found)
        assert found[names[30]].layers is None
        assert "none of that name" in found[names[30]].why
        assert 1 < fake.most <= 3

    run(body, concurrency=3)


def test_a_mirror_and_one_that_is_not_there() -> None:
    async def body(fake: Registry, registries: Registries, host: str) -> None:
        fake.answers["library/a/manifests/latest"] = manifest()
        async with Registries(mirrors={"docker.io": f"http://{host}/"}) as mirrored:
            assert (await mirrored.image("a")).size == 11
        with pytest.raises(ImageError, match=r"no answer from 127\.0\.0\.1:1: ") as caught:
            await registries.image("127.0.0.1:1/a")
        assert caught.value.retryable

    run(body)


def test_formats_that_start_early() -> None:
    async def body(fake: Registry, registries: Registries, host: str) -> None:
        row = {"mediaType": OCI + "layer.v1.tar+gzip", "digest": D1, "size": 11}
        notes = {"containerd.io/snapshot/stargz/toc.digest": D2}
        fake.answers["a/manifests/latest"] = manifest({**row, "annotations": notes})
        fake.answers["b/manifests/latest"] = manifest({**row, "annotations": "x"})
        assert (await registries.image(f"{host}/a")).streams == "estargz"
        assert (await registries.image(f"{host}/b")).streams == ""

    run(body)
