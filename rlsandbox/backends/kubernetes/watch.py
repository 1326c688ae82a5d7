"""One shared watch a kind: a copy of what the cluster has, kept current, with everybody told of each change.

Promises: nothing that was true is missed for ever (a watch goes on from the list's own version; when that is
too old everything is listed anew and compared); what comes twice or late changes nothing; a cut or silent
watch is opened again, spread by full jitter.
"""

from __future__ import annotations

import asyncio
import json
import logging
import random
from collections.abc import AsyncIterator, Callable, Iterable
from typing import Any

import aiohttp

from ...errors import SandboxError
from .api import JSON, Api, ApiError

log = logging.getLogger("rlsandbox.kubernetes")

PAGE = 500
OPEN_S = 240
"""How long the server is asked to keep a watch; it opens again with the version reached."""
SHORT_S = 5.0
"""A watch that ends sooner, and told nothing, did not end because its time was over."""
_FIRST_S, _LONGEST_S = 0.2, 10.0

Changed = Callable[[str, JSON], object]
"""Called with ``set`` or ``gone`` and the object."""


Kept = Callable[[JSON], JSON]
"""What is to be held of an object: its metadata's name, uid and resourceVersion at least."""

_META = ("name", "uid", "resourceVersion", "deletionTimestamp", "labels", "annotations")
_CONTAINER = ("name", "image", "state", "lastState", "restartCount")
_CONDITION = ("type", "status", "reason", "message")


def _only(item: JSON, names: Iterable[str]) -> JSON:
    return {name: item[name] for name in names if name in item}


def slim(item: JSON) -> JSON:
    """A pod or claim as far as anybody here reads it: 34 to 11 KB for both, and thousands are held."""
    status, spec = item.get("status") or {}, item.get("spec") or {}
    kept = _only(status, ("phase", "reason", "message", "sandbox"))
    for what, fields in (
        ("conditions", _CONDITION),
        ("containerStatuses", _CONTAINER),
        ("initContainerStatuses", _CONTAINER),
    ):
        if what in status:
            kept[what] = [_only(row, fields) for row in status[what] or ()]
    found = {"metadata": _only(item["metadata"], _META), "spec": _only(spec, ("nodeName",)), "status": kept}
    if "containers" in spec:
        found["spec"]["containers"] = [_only(row, ("name", "image")) for row in spec["containers"]]
    return found


class Watch:
    """Objects of one kind that carry *selector*'s labels, by name in :attr:`store`."""

    def __init__(
        self, api: Api, path: str, *, selector: str, changed: Changed, keep: Kept | None = None
    ) -> None:
        self.api, self.path, self.selector = api, path, selector
        self.store: dict[str, JSON] = {}
        self.lists = self.opened = 0
        self._changed, self._keep = changed, keep
        self._version: str | None = None
        self._task: asyncio.Task[None] | None = None

    async def start(self) -> None:
        """List, and go on watching in a task of its own.

        Raises:
            SandboxError: the list failed (no such kind, no right to).
        """
        await self._list()
        self._task = asyncio.get_running_loop().create_task(self._run(), name=f"rlsandbox: watch {self.path}")

    async def close(self) -> None:
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)
            self._task = None

    async def _list(self) -> None:
        self.lists += 1
        found: dict[str, JSON] = {}
        query = {"labelSelector": self.selector, "limit": str(PAGE)}
        while True:
            page = await self.api.get(self.path, query)
            for item in page.get("items") or ():
                found[item["metadata"]["name"]] = item
            more = page.get("metadata", {}).get("continue")
            if not more:
                break
            query = {**query, "continue": more}
        for name in [name for name in self.store if name not in found]:
            self._gone(self.store[name])
        for item in found.values():
            self._set(item)
        self._version = page.get("metadata", {}).get("resourceVersion")

    async def _run(self) -> None:
        now = asyncio.get_running_loop().time
        delay = _FIRST_S
        while True:
            began, heard = now(), False
            try:
                if self._version is None:
                    await self._list()
                async for event in self._events():
                    heard = True
                    self._event(event)
            except ApiError as error:
                if error.status == 410:
                    self._version = None  # too old: list again
                log.debug("watch of %s: %s", self.path, error)
            except (SandboxError, aiohttp.ClientError, OSError, TimeoutError, ValueError) as error:
                log.debug("watch of %s: %s: %s", self.path, type(error).__name__, error)
            except Exception:  # an error of ours may not end the watch for everybody
                log.exception("watch of %s: an error of rlsandbox itself", self.path)
                self._version = None
            else:
                if heard or now() - began > SHORT_S:
                    delay = _FIRST_S
                    continue  # ended as was asked for
            # (One that a proxy ends at once without a word is not opened 500 times a second.)
            if heard:
                delay = _FIRST_S
            await asyncio.sleep(random.uniform(0, delay))
            delay = min(delay * 2, _LONGEST_S)

    async def _events(self) -> AsyncIterator[JSON]:
        query = {
            "watch": "1", "labelSelector": self.selector, "allowWatchBookmarks": "true",
            "resourceVersion": self._version or "", "timeoutSeconds": str(OPEN_S + random.randrange(60)),
        }  # fmt: skip
        self.opened += 1
        response = await self.api.stream(self.path, query, silent_s=OPEN_S + 90)
        try:
            rest = b""
            async for chunk in response.content.iter_any():
                lines = (rest + chunk).split(b"\n")
                rest = lines.pop()
                for line in lines:
                    if line.strip():
                        yield json.loads(line)
        finally:
            response.close()

    def _event(self, event: JSON) -> None:
        kind, item = event.get("type"), event.get("object") or {}
        if kind == "ERROR":
            error = ApiError(str(item.get("message") or "the watch was ended"), retryable=True)
            error.status = int(item.get("code") or 500)
            raise error
        version = item.get("metadata", {}).get("resourceVersion")
        if kind in ("ADDED", "MODIFIED"):
            self._set(item)
        elif kind == "DELETED":
            self._gone(item)
        if version:
            self._version = version

    def _set(self, item: JSON) -> None:
        name = item["metadata"]["name"]
        item["metadata"].pop("managedFields", None)  # half of each object, and nobody's business
        if self._keep is not None:
            item = self._keep(item)
        before = self.store.get(name)
        if before is not None and not _newer(item, before):
            return
        if before is not None and before["metadata"].get("uid") != item["metadata"].get("uid"):
            self._gone(before)  # while nobody looked: this is another of the same name
        self.store[name] = item
        self._changed("set", item)

    def _gone(self, item: JSON) -> None:
        name = item["metadata"]["name"]
        before = self.store.get(name)
        if before is None or before["metadata"].get("uid") != item["metadata"].get("uid"):
            return  # of an earlier one of the same name
        del self.store[name]
        self._changed("gone", item)


def _newer(item: JSON, before: JSON) -> bool:
    new, old = item["metadata"].get("resourceVersion"), before["metadata"].get("resourceVersion")
    if new == old:
        return False
    try:
        return int(new) > int(old)
    except (TypeError, ValueError):
        return True  # versions that say nothing: what came last counts


def condition(item: JSON, kind: str) -> JSON:
    """The condition of that type, or an empty one."""
    rows: list[dict[str, Any]] = (item.get("status") or {}).get("conditions") or []
    return next((row for row in rows if row.get("type") == kind), {})
