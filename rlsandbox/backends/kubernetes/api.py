"""The API server, over the official client's asyncio half: credentials, requests, what went wrong.

Every write is one that may be repeated (creations and removals by name, server-side apply), so a request
whose answer was lost is simply made again. Writes go through one token bucket; what is throttled waits as
long as the server says, spread by full jitter.
"""

from __future__ import annotations

import asyncio
import builtins
import contextlib
import datetime
import json
import logging
import os
import random
from collections import Counter
from collections.abc import Mapping
from email.utils import parsedate_to_datetime
from itertools import count
from pathlib import Path
from typing import Any

import aiohttp
from kubernetes.aio import client as _client

from ...errors import ConfigError, ProvisionError, SandboxError, ThrottledError
from .credentials import SERVICE_ACCOUNT, Credentials
from .names import check_name

log = logging.getLogger("rlsandbox.kubernetes")
k8s: Any = _client  # it says nothing of its types

TIMEOUT_S = 30.0
PAGE = 500
"""Objects a page of a listing."""
_APPLY = "application/apply-patch+yaml"
_MERGE = "application/merge-patch+json"
_FIRST_S, _LONGEST_S = 0.2, 8.0
_LONGEST_PAUSE_S = 30.0
_SAME_CLOCK_S = 2.0
_RENEWALS = 2
"""Of the credentials, for one request: others may have had them renewed while it was on its way."""
JSON = dict[str, Any]


class ApiError(ProvisionError):
    """The API server said no. ``status``: HTTP; ``reason``: its own word (``NotFound`` ...)."""

    default_kind = "api"
    status: int = 0
    reason: str = ""


class Unreachable(ProvisionError):
    """No answer from the API server; what was asked may or may not have been done."""

    default_kind = "api_unreachable"


class Bucket:
    """At most *rate* writes a second, none saved up beyond a tenth of a second's worth."""

    def __init__(self, rate: float) -> None:
        self.rate = rate
        self._free_at = 0.0

    async def take(self) -> None:
        loop = asyncio.get_running_loop()
        now = loop.time()
        start = max(self._free_at, now - 0.1)
        self._free_at = start + 1 / self.rate
        if start > now:
            await asyncio.sleep(start - now)

    def pause(self, seconds: float) -> None:
        """Nobody writes for so long: the server has enough."""
        self._free_at = max(self._free_at, asyncio.get_running_loop().time() + seconds)


class Api:
    """One cluster and namespace, with one set of credentials. Make one with :meth:`connect`."""

    def __init__(
        self,
        client: Any,
        *,
        namespace: str,
        where: str,
        credentials: Credentials,
        write_rate: float = 50.0,
    ) -> None:
        self.namespace, self.where = namespace, where
        self.requests: Counter[str] = Counter()
        """How many requests have been made, by verb; ``throttled`` and ``repeated`` among them."""
        self._client, self._credentials = client, credentials
        self._bucket = Bucket(write_rate)
        self._certificates = credentials.certificates()
        self._older: builtins.list[aiohttp.ClientSession] = []
        """Connections made with certificates that were renewed since: streams may still run over them."""
        self._ahead = datetime.timedelta()

    @classmethod
    async def connect(
        cls,
        *,
        kubeconfig: str | None = None,
        context: str | None = None,
        namespace: str | None = None,
        write_rate: float = 50.0,
    ) -> Api:
        """Credentials from *kubeconfig*, $KUBECONFIG, ~/.kube/config, or of the pod that we are in.

        Raises:
            ConfigError: there are none, or no such context.
        """
        settings = k8s.Configuration()
        settings.connection_pool_maxsize = 0  # each held sandbox may have a stream
        settings.retries = None  # repeated here, where it is known what may be
        path = kubeconfig or os.environ.get("KUBECONFIG") or str(Path.home() / ".kube" / "config")
        files = [part for part in path.split(os.pathsep) if Path(part).is_file()]  # noqa: ASYNC240 - once
        in_pod = kubeconfig is None and context is None and SERVICE_ACCOUNT.joinpath("token").exists()
        if not files and not in_pod:
            raise ConfigError(
                f"no cluster to talk to: {path} does not exist, and this is no pod with a service account",
                hint="set KUBECONFIG, or Kubernetes(kubeconfig=...)",
            )
        credentials = Credentials(settings, files, path, context)
        current = await credentials.load()
        if files:
            spoken = namespace or current.get("context", {}).get("namespace") or "default"
            where = f"context {current['name']!r} ({settings.host})"
        else:
            own = SERVICE_ACCOUNT.joinpath("namespace")
            spoken = namespace or (own.read_text().strip() if own.exists() else "default")
            where = f"the cluster of this pod ({settings.host})"
        check_name(spoken, "namespace", dots=False)
        try:
            client = k8s.ApiClient(settings)
        except (OSError, ValueError) as error:  # of certificates and keys that are none
            raise ConfigError(f"credentials of {where} cannot be used: {_one_line(error)}") from error
        return cls(client, namespace=spoken, where=where, credentials=credentials, write_rate=write_rate)

    def now(self) -> datetime.datetime:
        """The API server's clock, by its last answer: what others there judge by it is not told by ours."""
        return datetime.datetime.now(datetime.UTC) + self._ahead

    def _hear(self, response: aiohttp.ClientResponse) -> None:
        date = response.headers.get("Date")
        with contextlib.suppress(TypeError, ValueError):
            told = parsedate_to_datetime(date or "")
            ahead = told - datetime.datetime.now(told.tzinfo)
            # It tells whole seconds, and it was on its way: as much is no difference.
            self._ahead = ahead if abs(ahead.total_seconds()) > _SAME_CLOCK_S else datetime.timedelta()

    async def close(self) -> None:
        await self._client.close()
        for session in self._older:
            await session.close()

    # -- requests ------------------------------------------------------------------------------------

    async def get(
        self, path: str, query: Mapping[str, str] | None = None, *, timeout: float = TIMEOUT_S
    ) -> JSON:
        return await self._call("GET", path, query=query, limit=timeout)

    async def look(self, path: str, missing: ConfigError, *, timeout: float = TIMEOUT_S) -> JSON | None:
        """What is at *path*; None when we may not look: then it is told when it is needed.

        Raises:
            ConfigError: *missing*, when there is nothing.
        """
        try:
            return await self.get(path, timeout=timeout)
        except ApiError as error:
            if error.status == 404:
                raise missing from error
            if error.status != 403:
                raise
            return None

    async def runtime_class(self, name: str) -> JSON | None:
        """The RuntimeClass; None when we may not look.

        Raises:
            ConfigError: there is none of that name.
        """
        missing = ConfigError(
            f"{self.where} has no RuntimeClass {name!r}",
            kind="no_runtime_class",
            hint="kubectl get runtimeclasses",
        )
        return await self.look(f"/apis/node.k8s.io/v1/runtimeclasses/{name}", missing)

    async def list(self, path: str, query: Mapping[str, str] | None = None) -> builtins.list[JSON]:
        """All objects of a collection, page by page."""
        asked = {**(query or {}), "limit": str(PAGE)}
        rows: builtins.list[JSON] = []
        while True:
            page = await self.get(path, asked)
            rows += page.get("items") or ()
            more = (page.get("metadata") or {}).get("continue")
            if not more:
                return rows
            asked = {**asked, "continue": more}

    async def create(
        self, path: str, body: JSON, *, limit: float = TIMEOUT_S, throttle: bool = False
    ) -> JSON:
        """Create by name. One that is there already, made by an attempt whose answer was lost, is success.

        Args:
            throttle: raise ThrottledError on 429 instead of waiting here.
        """
        try:
            return await self._call("POST", path, body=body, limit=limit, throttle=throttle)
        except ApiError as error:
            if error.reason != "AlreadyExists":
                raise
            return await self.get(f"{path}/{body['metadata']['name']}")

    async def ask(self, path: str, body: JSON) -> JSON:
        """A POST that makes nothing (a review)."""
        return await self._call("POST", path, body=body)

    async def apply(self, path: str, body: JSON, *, force: bool = True) -> JSON:
        """Server-side apply, as the field manager ``rlsandbox``."""
        query = {"fieldManager": "rlsandbox", "force": "true" if force else "false"}
        return await self._call("PATCH", path, query=query, body=body, content_type=_APPLY)

    async def merge(self, path: str, body: JSON, *, limit: float = TIMEOUT_S) -> JSON:
        return await self._call("PATCH", path, body=body, content_type=_MERGE, limit=limit)

    async def delete(
        self, path: str, *, limit: float = TIMEOUT_S, throttle: bool = False, body: JSON | None = None
    ) -> bool:
        """Remove; False when it was not there."""
        try:
            await self._call("DELETE", path, body=body, limit=limit, throttle=throttle)
        except ApiError as error:
            if error.status == 404:
                return False
            raise
        return True

    async def _call(
        self,
        method: str,
        path: str,
        *,
        query: Mapping[str, str] | None = None,
        body: JSON | None = None,
        content_type: str = "application/json",
        limit: float = TIMEOUT_S,
        throttle: bool = False,
    ) -> JSON:
        """Ask until there is an answer, or *limit* seconds are over."""
        loop = asyncio.get_running_loop()
        deadline = loop.time() + limit
        delay, renewals = _FIRST_S, 0
        failure: SandboxError = ApiError(
            f"{self.where} was not asked: others' writes were waited for for {limit:g} s", retryable=True
        )
        while True:
            if method != "GET":
                try:
                    async with asyncio.timeout(max(0.0, deadline - loop.time())):
                        await self._bucket.take()
                except TimeoutError:
                    raise failure from None
            left = deadline - loop.time()
            wait: float
            used = self._credentials.number
            try:
                async with asyncio.timeout(max(0.05, left)):
                    response = await self._request(method, path, query, body, content_type, max(0.05, left))
                    text = await response.read()
                status = response.status
            except (aiohttp.ClientError, TimeoutError, OSError) as error:
                said = _one_line(error) or type(error).__name__
                failure = Unreachable(f"no answer from the API server of {self.where}: {said}")
                wait = random.uniform(0, delay)
            else:
                if status < 300:
                    return json.loads(text) if text else {}
                if status == 401 and renewals < _RENEWALS and await self._renew(used):
                    renewals += 1
                    continue
                failure = self._error(status, text)
                if status == 429:
                    self.requests["throttled"] += 1
                    retry_after = _seconds(response.headers.get("Retry-After"))
                    if method != "GET":
                        self._bucket.pause(random.uniform(0, 2 * (retry_after or 1.0)))
                    if throttle:
                        slow = ThrottledError(f"the API server of {self.where} has enough requests (429)")
                        slow.retry_after = retry_after
                        raise slow
                    wait = (retry_after or 1.0) + random.uniform(0, delay)
                elif status in (500, 502, 503, 504):
                    wait = random.uniform(0, delay)
                else:
                    raise failure
            if loop.time() + wait >= deadline:
                raise failure
            self.requests["repeated"] += 1
            delay = min(delay * 2, _LONGEST_S)
            await asyncio.sleep(wait)

    async def _request(
        self,
        method: str,
        path: str,
        query: Mapping[str, str] | None,
        body: JSON | None,
        kind: str,
        timeout: Any,
    ) -> aiohttp.ClientResponse:
        self.requests[method] += 1
        headers = {"Accept": "application/json", "Content-Type": kind}
        await self._authorize(headers, path, method)
        url = self._client.configuration.host + path
        if query:
            url += "?" + "&".join(f"{key}={_quoted(value)}" for key, value in query.items())
        if not isinstance(timeout, aiohttp.ClientTimeout):
            timeout = aiohttp.ClientTimeout(total=timeout)
        answer = await self._client.rest_client.request(
            method, url, headers=headers, body=body, _request_timeout=timeout
        )
        response: aiohttp.ClientResponse = answer.response
        self._hear(response)
        return response

    async def _authorize(self, headers: dict[str, str], path: str, method: str) -> None:
        await self._client.update_params_for_auth(headers, [], ["BearerToken"], path, method, None)

    async def _renew(self, used: int) -> bool:
        """Look for newer credentials than *used* (in file, token file, plugin); False when there are none."""
        if not await self._credentials.renew(used):
            return False
        rest, now = self._client.rest_client, self._credentials.certificates()
        if now != self._certificates and now:
            self._certificates = now
            settings = self._client.configuration
            rest.ssl_context.load_cert_chain(settings.cert_file, keyfile=settings.key_file)
            if rest.pool_manager is not None:  # its connections are still known by the old ones
                self._older.append(rest.pool_manager)
                rest.pool_manager = None
        return True

    def _error(self, status: int, text: bytes) -> SandboxError:
        error = _error(status, text, self.where)
        if status == 401 and self._credentials.trouble:
            error.hint = f"newer ones cannot be had: {self._credentials.trouble}"
        return error

    async def stream(self, path: str, query: Mapping[str, str], *, silent_s: float) -> aiohttp.ClientResponse:
        """A response to read from as it comes (a watch); *silent_s*: how long it may say nothing."""
        timeout = aiohttp.ClientTimeout(total=None, sock_connect=10, sock_read=silent_s)
        for turn in count():
            used = self._credentials.number
            response = await self._request("GET", path, query, None, "application/json", timeout)
            if response.status < 300:
                return response
            text = await response.read()
            if response.status != 401 or turn >= _RENEWALS or not await self._renew(used):
                raise self._error(response.status, text)
        raise AssertionError("unreachable")

    async def websocket(self, path: str, query: str) -> aiohttp.ClientWebSocketResponse:
        """An exec stream.

        Raises:
            ApiError: the server refused. OSError, aiohttp.ClientError: it could not be reached.
        """
        rest = self._client.rest_client
        url = self._client.configuration.host + path + "?" + query
        url = "ws" + url.removeprefix("http")
        extra: dict[str, Any] = {}
        if self._client.configuration.tls_server_name:
            extra["server_hostname"] = self._client.configuration.tls_server_name
        if rest.proxy:
            extra["proxy"] = rest.proxy
        for turn in count():
            self.requests["exec"] += 1
            used = self._credentials.number
            headers = {"sec-websocket-protocol": "v4.channel.k8s.io"}
            await self._authorize(headers, path, "GET")
            if rest.pool_manager is None:
                rest.pool_manager = rest._create_pool_manager()
            try:
                ws: aiohttp.ClientWebSocketResponse = await rest.pool_manager.ws_connect(
                    url, headers=headers, max_msg_size=0, autoping=True, **extra
                )
            except aiohttp.WSServerHandshakeError as error:
                if error.status != 401 or turn >= _RENEWALS or not await self._renew(used):
                    raise self._error(error.status, b"") from error
            else:
                return ws
        raise AssertionError("unreachable")


def _error(status: int, text: bytes, where: str) -> SandboxError:
    reason, message = "", ""
    try:
        told = json.loads(text)
        reason, message = str(told.get("reason") or ""), str(told.get("message") or "")
    except ValueError:
        message = text.decode(errors="replace").strip()[:300]
    how: dict[str, Any] = {"retryable": status >= 500 or status in (408, 409, 429)}
    if status == 401:
        message, how["kind"] = (
            f"{where} refused the credentials: the token is wrong or has expired",
            "unauthorized",
        )
        how["hint"] = "renew the kubeconfig's credentials"
    elif status == 403:
        how["kind"] = "forbidden"
        if reason == "Forbidden" and "cannot" in message:
            how["hint"] = "give the right to the user or service account: rlsandbox template rbac"
        message = f"{where} forbids it: {message or 'no reason given'}"
    elif status in (400, 422):
        how["kind"] = "invalid"
        message = f"{where} found the request wrong: {message}"
    else:
        message = f"{where} answered {status}: {message or reason or 'no reason given'}"
    error = ApiError(" ".join(message.split()), **how)
    error.status, error.reason = status, reason
    return error


def _seconds(text: str | None) -> float | None:
    """Of a Retry-After, but not more than a pool can stand still: then the server is asked again."""
    try:
        return min(max(0.0, float(text)), _LONGEST_PAUSE_S) if text else None
    except ValueError:
        return None


def _one_line(error: BaseException) -> str:
    return " ".join(str(error).split())


def _quoted(value: str) -> str:
    from urllib.parse import quote

    return quote(str(value), safe="")
