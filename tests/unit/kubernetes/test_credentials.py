"""Credentials that fail, hang, print something else, expire and are renewed, many requests at once."""

from __future__ import annotations

import asyncio
import json
import os
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest

from rlsandbox import errors

pytest.importorskip("kubernetes", reason="needs the extra: pip install 'rlsandbox-pool[kubernetes]'")
from rlsandbox.backends.kubernetes import credentials
from rlsandbox.backends.kubernetes.api import Api, ApiError
from tests.support.fake_apiserver import FakeApi, api_server, kubeconfig

VERSION = "client.authentication.k8s.io/v1"
PODS = "/api/v1/namespaces/rls/pods"
GOOD = f"""echo call >> calls; printf '{{"apiVersion":"{VERSION}","kind":"ExecCredential","status":{{"token":"%s"}}}}' "$(cat token)" """


class Place:
    """A kubeconfig in *path* whose user comes from a script beside it."""

    def __init__(self, api: FakeApi, path: Path) -> None:
        self.api, self.path, self.file = api, path, path / "config"

    def plugin(self, script: str, **more: Any) -> Place:
        made = self.path / "login"
        made.write_text(f"#!/bin/sh\ncd '{self.path}'\n{script}\n")
        made.chmod(0o755)
        return self.user({"exec": {"apiVersion": VERSION, "command": "./login", **more}})

    def user(self, user: dict[str, Any]) -> Place:
        text = json.loads(kubeconfig(self.api.url))
        text["users"][0]["user"] = user
        self.file.write_text(json.dumps(text))
        return self

    def token(self, token: str) -> None:
        (self.path / "token").write_text(token)

    @property
    def calls(self) -> int:
        return len((self.path / "calls").read_text().splitlines())

    async def expired(self) -> Api:
        """Connected with a token from the plugin that the server takes no longer; the plugin has a newer one."""
        self.api.token = "one"
        self.token("one")
        api = await self.plugin(GOOD).connect()
        self.api.token = "two"
        self.token("two")
        return api

    async def connect(self) -> Api:
        return await Api.connect(kubeconfig=str(self.file), write_rate=1000)


def run(path: Path, body: Callable[[Place], Awaitable[None]]) -> None:
    async def main() -> None:
        async with asyncio.timeout(60), api_server() as api:
            await body(Place(api, path))

    asyncio.run(main())


@pytest.mark.parametrize(
    ("script", "says"),
    [
        ("echo 'please log in'", "printed no ExecCredential"),
        ("echo '[]'", "printed no ExecCredential"),
        ("echo first >&2; echo 'session  expired' >&2; exit 3", r"ended with 3: session expired \(get it\)"),
        ("kill -9 $$", "ended with -9"),
        (f"""echo '{{"apiVersion":"{VERSION}","status":{{}}}}'""", "neither a token nor a certificate"),
        (f"""echo '{{"apiVersion":"{VERSION}","status":{{"token":7}}}}'""", "neither a token nor a certif"),
        (
            """echo '{"apiVersion":"client.authentication.k8s.io/v1beta1","status":{"token":"t"}}'""",
            "v1beta1",
        ),
    ],
)
def test_a_plugin_that_fails_is_an_error_and_no_anonymous_request(
    tmp_path: Path, script: str, says: str
) -> None:
    async def body(p: Place) -> None:
        p.plugin(script, installHint="get it")
        with pytest.raises(errors.SandboxError, match=says) as caught:
            await p.connect()
        # What may be over tomorrow leaves a cluster out; what is set up wrongly ends all.
        now = any(word in says for word in ("printed", "ended"))
        assert isinstance(caught.value, errors.ProvisionError if now else errors.ConfigError)
        assert caught.value.kind == ("unauthorized" if now else "config")
        assert "./login" in str(caught.value) and "\n" not in str(caught.value)
        assert not p.api.seen

    run(tmp_path, body)


def test_a_plugin_that_is_not_there_or_needs_a_terminal(tmp_path: Path) -> None:
    async def body(p: Place) -> None:
        p.user(
            {"exec": {"apiVersion": VERSION, "command": "no-such-login", "installHint": "brew install it"}}
        )
        with pytest.raises(errors.ConfigError, match=r"cannot be started.*\(brew install it\)"):
            await p.connect()
        p.plugin(GOOD, interactiveMode="Always")
        with pytest.raises(errors.ConfigError, match="wants a terminal"):
            await p.connect()

    run(tmp_path, body)


def test_a_plugin_that_hangs_is_ended_with_what_it_started(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(credentials, "PLUGIN_S", 1.0)

    async def body(p: Place) -> None:
        p.plugin("sleep 1000 & echo $! > child; cat; wait")
        with pytest.raises(errors.ProvisionError, match="had not ended after 1 s"):
            await p.connect()
        child = int((tmp_path / "child").read_text())
        stat = Path(f"/proc/{child}/stat")
        while stat.exists() and stat.read_text().rpartition(")")[2].split()[0] != "Z":
            await asyncio.sleep(0.01)

    run(tmp_path, body)


def test_a_plugin_that_is_talkative_and_wants_to_know_the_cluster(tmp_path: Path) -> None:
    async def body(p: Place) -> None:
        p.api.token = "one"
        p.token("one\n\n")
        script = f'head -c 300000 /dev/zero >&2; printf \'%s\' "$KUBERNETES_EXEC_INFO" > info; echo "$WHO" > who; {GOOD}'
        p.plugin(
            script, provideClusterInfo=True, env=[{"name": "WHO", "value": "me"}], interactiveMode="Never"
        )
        api = await p.connect()
        assert await api.list(PODS) == []
        told = json.loads((tmp_path / "info").read_text())
        assert told["spec"] == {"interactive": False, "cluster": {"server": p.api.url}}
        assert (tmp_path / "who").read_text() == "me\n"
        await api.close()

    run(tmp_path, body)


def test_all_requests_of_an_expired_token_are_made_again_by_one_renewal(tmp_path: Path) -> None:
    async def body(p: Place) -> None:
        api = await p.expired()
        assert await asyncio.gather(*(api.list(PODS) for _ in range(20))) == [[]] * 20
        assert p.calls == 2
        await api.close()

    run(tmp_path, body)


@pytest.mark.parametrize("what", ["exec", "watch"])
def test_streams_renew_what_has_expired(tmp_path: Path, what: str) -> None:
    async def body(p: Place) -> None:
        api = await p.expired()
        if what == "exec":
            with pytest.raises(ApiError) as caught:
                await api.websocket(f"{PODS}/gone/exec", "command=true")
            assert caught.value.status == 404  # let in; there is no such pod
        else:
            response = await api.stream(PODS, {"watch": "1"}, silent_s=5)
            assert response.status == 200
            response.close()
        assert p.calls == 2
        await api.close()

    run(tmp_path, body)


def test_credentials_that_are_always_refused_end_soon_and_say_why(tmp_path: Path) -> None:
    async def body(p: Place) -> None:
        p.api.token = "one"
        p.token("one")
        api = await p.plugin(GOOD).connect()
        p.api.token = "nobody knows"
        p.plugin(GOOD.replace('"$(cat token)"', '"$(date +%N)"'))  # another one each time, none is good
        for ask in (
            lambda: api.list(PODS),
            lambda: api.websocket(f"{PODS}/x/exec", ""),
            lambda: api.stream(PODS, {}, silent_s=5),
        ):
            before = p.calls
            with pytest.raises(ApiError) as caught:
                await ask()
            assert caught.value.kind == "unauthorized" and not caught.value.retryable
            assert p.calls - before <= 3
        p.plugin("echo 'log in again' >&2; exit 1")
        with pytest.raises(ApiError, match="log in again") as caught:
            await api.list(PODS)
        assert caught.value.kind == "unauthorized"
        await api.close()

    run(tmp_path, body)


def test_a_kubeconfig_that_is_written_anew_is_followed_in_its_context(tmp_path: Path) -> None:
    async def body(p: Place) -> None:
        p.api.token = "one"
        p.user({"token": "one"})
        api = await p.connect()
        p.api.token = "two"
        text = json.loads(p.user({"token": "two"}).file.read_text())
        text["contexts"].append({"name": "other", "context": {"cluster": "x", "user": "y"}})
        text["clusters"].append({"name": "x", "cluster": {"server": "http://127.0.0.1:9"}})
        text["users"].append({"name": "y", "user": {"token": "no"}})
        text["current-context"] = "other"  # somebody works with another cluster meanwhile
        p.file.write_text(json.dumps(text))
        assert await api.list(PODS) == []
        p.api.token = "three"
        p.file.write_text("{half of")  # being written
        with pytest.raises(ApiError, match="newer ones cannot be had") as caught:
            await api.list(PODS)
        assert caught.value.kind == "unauthorized"
        p.user({"token": "three"})
        assert await api.list(PODS) == []
        await api.close()

    run(tmp_path, body)


def test_a_token_file_that_ends_with_a_newline(tmp_path: Path) -> None:
    async def body(p: Place) -> None:
        p.api.token = "one"
        p.token("one\n")
        api = await p.user({"tokenFile": "token"}).connect()
        assert await api.list(PODS) == []
        await api.close()

    run(tmp_path, body)


def test_certificates_that_are_none_are_told(tmp_path: Path) -> None:
    async def body(p: Place) -> None:
        p.api.url = p.api.url.replace("http:", "https:")
        p.user({"client-certificate-data": "bm9uZQ==", "client-key-data": "bm9uZQ=="})
        with pytest.raises(errors.ConfigError, match="cannot be used") as caught:
            await p.connect()
        assert os.linesep not in str(caught.value)

    run(tmp_path, body)
