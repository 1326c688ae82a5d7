"""A small synchronous Kubernetes client, for the cluster's own use: standard library only, one connection a call.

The product's client is not used here: what tests it must not share its mistakes.
"""

from __future__ import annotations

import base64
import http.client
import json
import ssl
import tempfile
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any
from urllib.parse import urlencode, urlsplit

Object = dict[str, Any]


class ApiError(Exception):
    """The API server refused: *status*, and what it said."""

    def __init__(self, status: int, said: str) -> None:
        super().__init__(f"{status}: {said}")
        self.status = status


class Kube:
    """Talks to the server of a kubeconfig file that has a token or a client certificate in it."""

    def __init__(self, kubeconfig: Path) -> None:
        config = _load(kubeconfig)
        context = _named(config["contexts"], config["current-context"])["context"]
        cluster = _named(config["clusters"], context["cluster"])["cluster"]
        user = _named(config["users"], context["user"])["user"]
        url = urlsplit(cluster["server"])
        self.host, self.port = url.hostname or "", url.port or 443
        self.namespace = context.get("namespace", "default")
        self.tls = ssl.create_default_context()
        if "certificate-authority-data" in cluster:
            self.tls = ssl.create_default_context(
                cadata=base64.b64decode(cluster["certificate-authority-data"]).decode()
            )
        elif "certificate-authority" in cluster:
            self.tls = ssl.create_default_context(cafile=cluster["certificate-authority"])
        if cluster.get("insecure-skip-tls-verify"):
            self.tls.check_hostname, self.tls.verify_mode = False, ssl.CERT_NONE
        self.headers = {"Authorization": f"Bearer {user['token']}"} if "token" in user else {}
        if "client-certificate-data" in user:
            self._certificate(user["client-certificate-data"], user["client-key-data"])
        elif "client-certificate" in user:
            self.tls.load_cert_chain(user["client-certificate"], user["client-key"])
        elif not self.headers:
            raise ValueError(f"{kubeconfig}: the user has neither a token nor a certificate in it")

    def _certificate(self, certificate: str, key: str) -> None:
        with tempfile.NamedTemporaryFile() as file:  # readable for us alone
            file.write(base64.b64decode(certificate) + b"\n" + base64.b64decode(key))
            file.flush()
            self.tls.load_cert_chain(file.name)

    def call(
        self,
        method: str,
        path: str,
        body: Any = None,
        *,
        kind: str = "application/json",
        timeout: float = 30,
        **query: Any,
    ) -> Any:
        """One request; its JSON answer (or text where it is none)."""
        text = None if body is None else body if isinstance(body, bytes | str) else json.dumps(body)
        connection = http.client.HTTPSConnection(self.host, self.port, context=self.tls, timeout=timeout)
        try:
            target = path + ("?" + urlencode(query) if query else "")
            connection.request(method, target, text, self.headers | {"Content-Type": kind})
            answer = connection.getresponse()
            said = answer.read()
        finally:
            connection.close()
        if answer.status >= 300:
            try:
                message = json.loads(said)["message"]
            except (ValueError, LookupError, TypeError):
                message = said.decode("utf-8", "replace")[:500]
            raise ApiError(answer.status, message)
        try:
            return json.loads(said)
        except ValueError:
            return said.decode("utf-8", "replace")

    def get(self, path: str, **query: Any) -> Any:
        return self.call("GET", path, **query)

    def items(self, path: str, **query: Any) -> list[Object]:
        found: list[Object] = self.get(path, **query)["items"]
        return found

    def create(self, path: str, body: Object) -> Object:
        made: Object = self.call("POST", path, body)
        return made

    def patch(self, path: str, body: Any) -> Object:
        changed: Object = self.call("PATCH", path, body, kind="application/merge-patch+json")
        return changed

    def delete(self, path: str, *, grace: int | None = None) -> bool:
        """Delete; False when it was not there."""
        body = {"kind": "DeleteOptions", "apiVersion": "v1", "propagationPolicy": "Background"}
        try:
            self.call("DELETE", path, body | ({} if grace is None else {"gracePeriodSeconds": grace}))
        except ApiError as error:
            if error.status != 404:
                raise
            return False
        return True

    def ready(self) -> bool:
        """Does the server say that it is ready?"""
        try:
            return bool(self.call("GET", "/readyz", timeout=2) == "ok")
        except (OSError, http.client.HTTPException, ApiError):
            return False


def until(what: str, check: Callable[[], Any], seconds: float = 60, pause: float = 0.05) -> Any:
    """Wait until *check* is true and give what it gave; errors of the API count as not yet, and are told at the end."""
    end = time.monotonic() + seconds
    last: object = None
    while True:
        try:
            found = check()
            if found:
                return found
        except (OSError, http.client.HTTPException, ApiError) as error:
            last = error
        if time.monotonic() > end:
            raise TimeoutError(f"{what}: not within {seconds:g} s" + (f" (last: {last})" if last else ""))
        time.sleep(pause)


def pods(namespace: str = "default", name: str = "") -> str:
    return f"/api/v1/namespaces/{namespace}/pods" + (f"/{name}" if name else "")


def condition(thing: Mapping[str, Any], kind: str) -> str:
    """The status of a condition, "" when there is none of that type."""
    found = thing.get("status", {}).get("conditions") or []
    return next((str(entry["status"]) for entry in found if entry["type"] == kind), "")


def _named(entries: list[Object], name: str) -> Object:
    return next(entry for entry in entries if entry["name"] == name)


def _load(path: Path) -> Object:
    text = path.read_text()
    try:
        config: Object = json.loads(text)
    except ValueError:
        import yaml  # type: ignore[import-untyped]  # comes with the kubernetes client

        config = yaml.safe_load(text)
    return config
