"""``image_user=True``: commands are those of the user whom an image names, and nobody is guessed."""

from __future__ import annotations

import asyncio
import hashlib
import json
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from rlsandbox.errors import ConfigError, ImageError
from rlsandbox.spec import Spec

pytest.importorskip("kubernetes", reason="needs the extra: pip install 'rlsandbox-pool[kubernetes]'")
from aiohttp import web

from rlsandbox.backends.kubernetes import Kubernetes
from tests.support.fake_apiserver import FakeApi, Pods, api_server, kubeconfig, stand_in_for_keeper
from tests.support.served import served

PODS, TEMPLATES = f"{Pods.CORE}/pods", f"{Pods.EXT}/sandboxtemplates"


@pytest.fixture(autouse=True)
def _keeper(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    stand_in_for_keeper(tmp_path, monkeypatch)
    monkeypatch.setenv("DOCKER_CONFIG", str(tmp_path))


class Registry:
    """Images by their name; what their config says."""

    def __init__(self) -> None:
        self.asked: list[str] = []
        self._blobs: dict[str, bytes] = {}

    def put(self, name: str, **config: Any) -> None:
        inner = self._put({"architecture": "amd64", "config": config})
        own = self._put({"schemaVersion": 2, "config": {"digest": inner}, "layers": []})
        rows = [
            {"digest": "sha256:" + "0" * 64, "platform": {"os": "linux", "architecture": "s390x"}},
            {"digest": own, "platform": {"os": "linux", "architecture": "amd64"}},
        ]
        self._blobs[f"{name}/manifests/1"] = json.dumps({"manifests": rows}).encode()
        for kind, digest in (("manifests", own), ("blobs", inner)):
            self._blobs[f"{name}/{kind}/{digest}"] = self._blobs[digest]

    def _put(self, what: Any) -> str:
        raw = json.dumps(what).encode()
        digest = f"sha256:{hashlib.sha256(raw).hexdigest()}"
        self._blobs[digest] = raw
        return digest

    def spoil(self, name: str) -> None:
        """Its config is another one than its manifest says."""
        (key,) = [key for key in self._blobs if key.startswith(f"{name}/blobs/")]
        self._blobs[key] += b" "

    async def handle(self, request: web.Request) -> web.Response:
        what = request.path.removeprefix("/v2/")
        self.asked.append(what)
        return web.Response(body=self._blobs[what]) if what in self._blobs else web.Response(status=404)


class World:
    def __init__(self, api: FakeApi, registry: Registry, file: Path, url: str) -> None:
        self.api, self.registry, self._file, self._url = api, registry, file, url

    def backend(self, **how: Any) -> Kubernetes:
        how = {
            "mode": "userns",
            "image_user": True,
            "mirrors": {"registry.test": self._url},
            "arch": "x86_64",
            **how,
        }
        return Kubernetes(kubeconfig=str(self._file), write_rate=1000, **how)

    @property
    def args(self) -> list[list[str]]:
        """Of the keepers in all templates."""
        found = self.api.objects.get(TEMPLATES, {}).values()
        return [item["spec"]["podTemplate"]["spec"]["containers"][0]["args"] for item in found]

    @property
    def users(self) -> list[str]:
        return [args[args.index("--user") + 1] for args in self.args if "--user" in args]


@asynccontextmanager
async def world(tmp_path: Path) -> AsyncIterator[World]:
    registry = Registry()
    app = web.Application()
    app.router.add_route("*", "/{tail:.*}", registry.handle)
    async with served(app) as host, api_server() as api, Pods(api):
        (tmp_path / "kubeconfig").write_text(kubeconfig(api.url))
        yield World(api, registry, tmp_path / "kubeconfig", f"http://{host}")


def run(tmp_path: Path, body: Callable[[World], Awaitable[None]]) -> None:
    async def main() -> None:
        async with asyncio.timeout(60), world(tmp_path) as w:
            await body(w)

    asyncio.run(main())


async def make(backend: Kubernetes, member: str, **spec: Any) -> Any:
    spec = {"image": "registry.test/team/img:1", **spec}
    return await backend.provision(Spec(**spec), member=member, labels={}, deadline=20)


def test_the_user_of_an_image_runs_its_commands(tmp_path: Path) -> None:
    async def body(w: World) -> None:
        w.registry.put("team/img", User="app")
        backend = w.backend()
        await asyncio.gather(*(make(backend, f"m{n}", pids=100 + n % 2) for n in range(6)))
        assert w.users == ["app", "app"]  # two specs
        assert len(w.registry.asked) == 3  # index, manifest, config: once
        await backend.close()

    run(tmp_path, body)


@pytest.mark.parametrize("config", [{}, {"User": ""}, {"User": "root"}, {"User": "0:0"}, {"User": None}])
def test_an_image_of_roots(tmp_path: Path, config: dict[str, Any]) -> None:
    async def body(w: World) -> None:
        w.registry.put("team/img", **config)
        backend = w.backend()
        await make(backend, "m")
        assert w.users == [] and len(w.args) == 1
        await backend.close()

    run(tmp_path, body)


@pytest.mark.parametrize("how", [{"user": "7"}, {"image_user": False, "mirrors": None}])
def test_nobody_is_asked_who_need_not_be(tmp_path: Path, how: dict[str, Any]) -> None:
    async def body(w: World) -> None:
        user = how.pop("user", None)
        backend = w.backend(**how)
        await make(backend, "m", user=user)
        assert w.users == ([user] if user else []) and w.registry.asked == []
        await backend.close()

    run(tmp_path, body)


def test_mode_manifest_has_its_user_from_the_image(tmp_path: Path) -> None:
    async def body(w: World) -> None:
        w.registry.put("team/img", User="1000:1000")
        backend = w.backend(mode="manifest")
        await make(backend, "m", network="host")
        assert w.users == ["1000:1000"] and "manifest" in w.args[0]
        await backend.close()

    run(tmp_path, body)


def test_what_cannot_be_read_is_an_error_and_may_be_read_later(tmp_path: Path) -> None:
    async def body(w: World) -> None:
        backend = w.backend()
        with pytest.raises(ImageError) as caught:
            await make(backend, "m1")
        assert (caught.value.kind, caught.value.retryable) == ("image_not_found", False)
        assert "Spec(user=...)" in str(caught.value)
        assert w.args == [] and not w.api.objects.get(PODS)
        w.registry.put("team/img", User="app")
        await make(backend, "m2")
        assert w.users == ["app"]
        await backend.close()

    run(tmp_path, body)


@pytest.mark.parametrize("user", [5, ["app"], "a\nb", "a\0b", "a" * 300], ids=repr)
def test_a_user_that_is_none(tmp_path: Path, user: Any) -> None:
    async def body(w: World) -> None:
        w.registry.put("team/img", User=user)
        backend = w.backend()
        with pytest.raises(ImageError, match=r"image registry\.test/team/img:1: its USER"):
            await make(backend, "m")
        assert w.args == []
        await backend.close()

    run(tmp_path, body)


def test_a_config_that_is_another_one(tmp_path: Path) -> None:
    async def body(w: World) -> None:
        w.registry.put("team/img", User="app")
        w.registry.spoil("team/img")
        backend = w.backend()
        with pytest.raises(ImageError, match="sent something else") as caught:
            await make(backend, "m")
        assert caught.value.kind == "image_digest"
        await backend.close()

    run(tmp_path, body)


def test_closed_while_a_registry_is_asked(tmp_path: Path) -> None:
    async def body(w: World) -> None:
        asked = asyncio.Event()

        async def never(request: web.Request) -> web.Response:
            asked.set()
            await asyncio.Event().wait()
            raise AssertionError

        w.registry.handle = never  # type: ignore[method-assign]
        backend = w.backend()
        making = asyncio.create_task(make(backend, "m"))
        await asyncio.wait({making, asyncio.ensure_future(asked.wait())}, return_when=asyncio.FIRST_COMPLETED)
        making.cancel()
        await asyncio.gather(making, return_exceptions=True)
        await backend.close()
        left = [task.get_name() for task in asyncio.all_tasks()]
        assert not any("USER" in name for name in left), left

    run(tmp_path, body)


@pytest.mark.parametrize(
    ("how", "said"),
    [
        ({"image_user": True, "template": "t"}, "image_user is not for a named template"),
        ({"mirrors": {"a": "http://b"}}, "mirrors are asked for images' users only"),
        ({"image_user": True, "mirrors": {"a": "b"}}, "the mirror of a must be http"),
    ],
)
def test_bad_input(how: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        Kubernetes(**how)
