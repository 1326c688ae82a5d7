"""Manifests and configs of images, asked of their registries (the OCI distribution API).

Layers are never read. Credentials are those of ``~/.docker/config.json`` (``auths``). What a
registry says is checked against the digest that was asked for; what it refuses is said of that image alone.
"""

from __future__ import annotations

import asyncio
import base64
import datetime
import hashlib
import json
import logging
import os
import random
import re
from collections.abc import Mapping
from email.utils import parsedate_to_datetime
from pathlib import Path
from typing import Any, Self
from urllib.parse import urlencode, urlsplit

import aiohttp
from multidict import CIMultiDictProxy

from ._references import DIGEST, split_name
from .errors import ConfigError, ImageError

log = logging.getLogger("rlsandbox.images")

LARGEST = 4 << 20
"""Bytes of a manifest: what registries themselves allow."""
TRIES, TIMEOUT_S, LONGEST_S = 5, 30.0, 30.0
_INDEX = (
    "application/vnd.oci.image.index.v1+json",
    "application/vnd.docker.distribution.manifest.list.v2+json",
)
_MANIFEST = (
    "application/vnd.oci.image.manifest.v1+json",
    "application/vnd.docker.distribution.manifest.v2+json",
)
_CHALLENGE = re.compile(r'(\w+)="([^"]*)"')
_SCHEME = re.compile(r"(?:^|,)\s*([A-Za-z][\w-]*)(?=\s+\w+=|\s*(?:,|$))")


class RegistryClient:
    """Registries of images. An async context manager.

    Args:
        arch: of the nodes: which image of a multi-platform one is meant.
        mirrors: where to ask instead, by registry: ``{"docker.io": "https://mirror.example"}``.
        concurrency: requests at once.
        credentials: a ``config.json`` of docker; default $DOCKER_CONFIG, then ``~/.docker``.
    """

    def __init__(
        self,
        *,
        arch: str = "amd64",
        mirrors: Mapping[str, str] | None = None,
        concurrency: int = 8,
        credentials: Path | None = None,
    ) -> None:
        if concurrency < 1:
            raise ConfigError(f"concurrency must be at least 1, not {concurrency}")
        self.arch = arch
        self.requests = 0
        self._mirrors = {host: _base(host, url) for host, url in (mirrors or {}).items()}
        self._limit = asyncio.Semaphore(concurrency)
        self._auths = _auths(credentials)
        self._tokens: dict[tuple[str, str], str] = {}
        self._session: aiohttp.ClientSession | None = None

    async def __aenter__(self) -> Self:
        timeout = aiohttp.ClientTimeout(total=TIMEOUT_S)
        self._session = aiohttp.ClientSession(timeout=timeout, trust_env=True)
        return self

    async def __aexit__(self, *_: object) -> None:
        if self._session is not None:
            await self._session.close()

    async def config(self, name: str) -> Mapping[str, Any]:
        """What its containers are by default: ``config`` of the image's own configuration (OCI image-spec).

        Raises:
            ImageError: there is no such image, it may not be read, or what came is none.
        """
        _, data = await self.manifest(name)
        row = data.get("config")
        digest = str(row.get("digest")) if isinstance(row, dict) else ""
        if not DIGEST.match(digest):
            raise ImageError(f"image {name}: a manifest without a config")
        host, path, _, _ = split_name(name)
        _, body = await self._fetch(name, host, path, f"blobs/{digest}", "*/*")
        _check(name, host, digest, body)
        found = _object(name, body).get("config")
        return found if isinstance(found, dict) else {}

    async def manifest(self, name: str) -> tuple[str, dict[str, Any]]:
        """Its digest, and the manifest for our architecture."""
        host, path, tag, digest = split_name(name)
        wanted = digest or tag
        for _ in range(3):  # an index of an index, and no deeper
            kind, body = await self._fetch(
                name, host, path, f"manifests/{wanted}", ", ".join((*_MANIFEST, *_INDEX))
            )
            own = _check(name, host, wanted, body)
            data = _object(name, body)
            kind = str(data.get("mediaType") or kind)
            if kind in _INDEX or "manifests" in data:
                wanted = self._choose(name, data)
                continue
            return own, data
        raise ImageError(f"image {name}: an index within an index within an index")

    def _choose(self, name: str, index: Mapping[str, Any]) -> str:
        rows = index.get("manifests")
        seen: list[str] = []
        for row in rows if isinstance(rows, list) else ():
            if not isinstance(row, dict):
                continue
            platform = row["platform"] if isinstance(row.get("platform"), dict) else {}
            spoken = f"{platform.get('os', 'linux')}/{platform.get('architecture', self.arch)}"
            if spoken == f"linux/{self.arch}" and DIGEST.match(str(row.get("digest"))):
                return str(row["digest"])
            seen.append(spoken)
        there = ", ".join(sorted({spoken for spoken in seen if "unknown" not in spoken}))
        raise ImageError(f"image {name} is not there for linux/{self.arch}: only {there or 'nothing'}")

    async def _fetch(self, name: str, host: str, path: str, what: str, accept: str) -> tuple[str, bytes]:
        """Content type and body of a manifest or a small blob."""
        base = self._mirrors.get(host) or _default(host)
        url = f"{base}/v2/{path}/{what}"
        headers = {"Accept": accept}
        delay, asked = 0.5, False
        problem = ""
        for turn in range(TRIES):
            if turn:
                await asyncio.sleep(delay)
                delay = min(delay * 2, LONGEST_S)
            status, kind, body, extra = await self._get(url, headers | self._authorization(host, path))
            if status == 200:
                return kind, body
            if status == 401 and not asked:
                asked = True
                if await self._login(name, host, path, _challenges(extra)):
                    delay = 0.0
                    continue
            if status in (401, 403):
                raise ImageError(
                    f"image {name}: {host} does not let it be read ({status})", kind="image_forbidden",
                    hint="docker login, or a plan without registries: --offline",
                )  # fmt: skip
            if status == 404:
                raise ImageError(f"image {name}: {host} has none of that name", kind="image_not_found")
            problem = (
                body[:200].decode(errors="replace").strip() if status == 0 else f"{host} answered {status}"
            )
            if 0 < status < 500 and status not in (408, 429):
                break
            wait = min(_seconds(extra.get("Retry-After", "")), LONGEST_S)
            delay = max(delay, wait) * random.uniform(0.8, 1.2)
        raise ImageError(f"image {name}: {problem}", kind="registry", retryable=True, infrastructure=True)

    async def _get(self, url: str, headers: Mapping[str, str]) -> tuple[int, str, bytes, Mapping[str, str]]:
        """Status, content type, body, headers; status 0 and the reason when there was no answer."""
        assert self._session is not None, "use `async with`"
        self.requests += 1
        try:
            async with self._session.get(url, headers=dict(headers)) as answer:
                body = await answer.content.read(LARGEST + 1)
                while len(body) <= LARGEST and (more := await answer.content.read(LARGEST + 1 - len(body))):
                    body += more
                if len(body) > LARGEST:
                    return 0, "", f"more than {LARGEST:,} bytes came for a manifest".encode(), {}
                return answer.status, answer.content_type, body, answer.headers
        except (aiohttp.ClientError, TimeoutError, OSError, ValueError) as error:
            where = urlsplit(url).netloc
            said = " ".join(str(error).split()) or type(error).__name__
            return 0, "", f"no answer from {where}: {said}".encode(), {}

    def _authorization(self, host: str, path: str) -> dict[str, str]:
        token = self._tokens.get((host, path))
        if token is not None:
            return {"Authorization": token}
        return {}

    async def _login(self, name: str, host: str, path: str, challenges: Mapping[str, str]) -> bool:
        """Do what a 401 asks for; False when there is no way."""
        own = self._auths.get(host)
        if "bearer" not in challenges:
            if "basic" in challenges and own is not None:
                self._tokens[host, path] = f"Basic {own}"
                return True
            return False
        fields = dict(_CHALLENGE.findall(challenges["bearer"]))
        realm = fields.get("realm", "")
        if urlsplit(realm).scheme not in ("http", "https"):
            return False
        plain = urlsplit(self._mirrors.get(host) or _default(host)).scheme == "http"
        if own is not None and urlsplit(realm).scheme == "http" and not plain:
            log.warning("%s asks for credentials over plain http (%s): not sent", host, realm)
            return False
        query = {"scope": fields.get("scope") or f"repository:{path}:pull"}
        if fields.get("service"):
            query["service"] = fields["service"]
        headers = {"Authorization": f"Basic {own}"} if own is not None else {}
        url = f"{realm}{'&' if '?' in realm else '?'}{urlencode(query)}"
        status, _, body, _ = await self._get(url, headers)
        if status != 200:
            return False
        told = _object(name, body)
        token = told.get("token") or told.get("access_token")
        if not isinstance(token, str) or any(ord(char) < 33 or ord(char) > 126 for char in token):
            return False
        self._tokens[host, path] = f"Bearer {token}"
        return True


def _check(name: str, host: str, wanted: str, body: bytes) -> str:
    """The digest of *body*; when one was asked for it has to be that."""
    own = "sha256:" + hashlib.sha256(body).hexdigest()
    if wanted.startswith("sha256:") and wanted != own:
        raise ImageError(f"image {name}: {host} sent something else than {wanted}", kind="image_digest")
    return own


def _challenges(headers: Mapping[str, str]) -> dict[str, str]:
    """Ways to log in that a 401 names, by scheme in small letters: in one header or in several."""
    lines = headers.getall("WWW-Authenticate", []) if isinstance(headers, CIMultiDictProxy) else ()
    found: dict[str, str] = {}
    for line in lines:
        starts = [match.start(1) for match in _SCHEME.finditer(line)]
        for start, end in zip(starts, [*starts[1:], len(line)], strict=True):
            scheme, _, fields = line[start:end].partition(" ")
            found.setdefault(scheme.lower(), fields)
    return found


def _seconds(text: str) -> float:
    """Of a Retry-After: a number, or a date; 0 for what is neither."""
    try:
        return max(float(text), 0.0) if text.isascii() else 0.0
    except ValueError:
        pass
    try:
        until = parsedate_to_datetime(text)
        return max((until - datetime.datetime.now(until.tzinfo)).total_seconds(), 0.0)
    except ValueError:
        return 0.0


def _default(host: str) -> str:
    if host == "docker.io":
        return "https://registry-1.docker.io"
    local = host.partition(":")[0] in ("localhost", "127.0.0.1")
    return f"{'http' if local else 'https'}://{host}"


def _base(host: str, url: str) -> str:
    parts = urlsplit(url)
    if parts.scheme not in ("http", "https") or not parts.netloc:
        raise ConfigError(f"the mirror of {host} must be http://... or https://..., not {url!r}")
    return url.rstrip("/")


def _auths(given: Path | None) -> dict[str, str]:
    """Basic credentials by registry; those in a credential helper are not asked for."""
    default = Path(os.environ.get("DOCKER_CONFIG") or Path.home() / ".docker") / "config.json"
    path = given or default
    try:
        data = json.loads(path.read_text())
        rows = dict(data.get("auths") or {})
    except FileNotFoundError:
        if given is not None:
            raise ConfigError(f"{path} does not exist") from None
        return {}
    except (OSError, ValueError, AttributeError, TypeError, RecursionError) as error:
        raise ConfigError(f"{path} cannot be read as docker's configuration: {error}") from error
    if data.get("credsStore") or data.get("credHelpers"):
        log.info("%s: credential helpers are not asked; only what stands in `auths` is used", path)
    found: dict[str, str] = {}
    for host, row in rows.items():
        auth = row.get("auth") if isinstance(row, dict) else None
        if isinstance(row, dict) and not auth and row.get("username"):
            auth = base64.b64encode(f"{row['username']}:{row.get('password', '')}".encode()).decode()
        if isinstance(auth, str) and auth:
            plain = urlsplit(host).netloc or host.partition("/")[0]
            ours = plain == "docker.io" or plain.endswith(".docker.io")
            found["docker.io" if ours else plain] = auth
    return found


def _object(name: str, body: bytes) -> dict[str, Any]:
    try:
        data = json.loads(body)
    except (ValueError, RecursionError) as error:
        raise ImageError(f"image {name}: what its registry sent is no JSON: {error}") from error
    if not isinstance(data, dict):
        raise ImageError(f"image {name}: what its registry sent is no manifest")
    return data
