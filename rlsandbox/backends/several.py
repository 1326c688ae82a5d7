"""Several places as one: clusters with weights and ceilings, and one that fails is left out until it is well.

A sandbox lives in one part; what is asked of it goes there. A part whose API server is away, whose
credentials have expired or that has no room is left out for a while, and longer each time; then one creation
tries it again.
"""

from __future__ import annotations

import asyncio
import builtins
import logging
import math
import random
from asyncio import StreamReader, StreamWriter
from collections import Counter
from collections.abc import AsyncGenerator, AsyncIterable, Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from ..errors import ConfigError, ProvisionError, SandboxError, UnsupportedError
from ..spec import Spec
from .base import Backend, Capabilities, Member, Tell
from .registry import load_backend

log = logging.getLogger("rlsandbox.backends")

_OUT_AT_ONCE = frozenset(["api_unreachable", "unauthorized", "forbidden", "quota", "unschedulable"])
"""Kinds of failure after which another one in the same place is not waited for."""
_IN_A_ROW = 3
_FIRST_OUT_S, _LONGEST_OUT_S = 5.0, 120.0


@dataclass(frozen=True)
class Part:
    """One of the places.

    Args:
        backend: it.
        weight: of the sandboxes it gets, beside the others' weights.
        ceiling: sandboxes in it at most; None: as many as the pool has.
        name: how it is called in nodes' names and messages; default its context, or its number.
    """

    backend: Backend
    weight: float = 1.0
    ceiling: int | None = None
    name: str = ""


class _State:
    """A part, what lives in it and how it does."""

    def __init__(self, part: Part) -> None:
        self.part, self.backend, self.name = part, part.backend, part.name
        self.members: dict[str, Member | None] = {}
        """By the pool's name; None while it is being made, or when nobody knows whether it was."""
        self.failures = self.times_out = 0
        self.out_until = 0.0
        self.why: SandboxError | None = None

    def room(self) -> bool:
        return self.part.ceiling is None or len(self.members) < self.part.ceiling

    def load(self) -> float:
        return (len(self.members) + 1) / self.part.weight


class Clusters(Backend):
    """Several backends (clusters, as a rule) behind one pool.

    Args:
        parts: the places: each a :class:`Part`, a Backend, or a table ``{context="a", weight=2, ceiling=64}``
            whose other keys are options of its backend (``name``: which one, default ``kubernetes``).
        common: options of every part that is given as a table.

    Raises:
        ConfigError: no part, a weight or ceiling that is none, two of the same name.
    """

    name = "clusters"

    def __init__(self, parts: Sequence[Part | Backend | Mapping[str, Any]], **common: Any) -> None:
        if isinstance(parts, (str, Mapping)) or not parts:
            raise ConfigError("Clusters: parts must be a list of at least one part")
        made = [_part(row, number, common) for number, row in enumerate(parts)]
        twice = [name for name, count in Counter(part.name for part in made).items() if count > 1]
        if twice:
            raise ConfigError(f"Clusters: two parts are called {twice[0]!r}", hint="Part(name=...)")
        self._states = [_State(part) for part in made]
        self._of: dict[str, _State] = {}
        self._freed = asyncio.Condition()
        self.keeps_layers = any(part.backend.keeps_layers for part in made)
        bounds = [part.backend.max_resetting for part in made]
        self.max_resetting = None if None in bounds else sum(bound or 0 for bound in bounds)
        self.max_creating = sum(int(getattr(part.backend, "max_creating", 8)) for part in made)

    def __repr__(self) -> str:
        told = (
            f"{state.name}: {len(state.members)}{' (left out)' if state.why else ''}"
            for state in self._states
        )
        return f"Clusters({', '.join(told)})"

    def __getattr__(self, name: str) -> Any:
        # What a backend may have beyond the seam: here when all parts have it.
        if name == "open_link" and all(hasattr(state.backend, name) for state in self._states):
            return self._open_link
        raise AttributeError(name)

    @property
    def requests(self) -> Mapping[str, int]:
        """How many requests were made, by verb, all parts together."""
        total: Counter[str] = Counter()
        for state in self._states:
            total.update(getattr(state.backend, "requests", {}))
        return dict(total)

    def check_size(self, max_size: int, spec: Spec) -> None:
        """
        Raises:
            ConfigError: all parts together are too small.
        """
        ceilings = [state.part.ceiling for state in self._states]
        total = sum(row or 0 for row in ceilings)
        if None not in ceilings and total < max_size:
            raise ConfigError(
                f"max_size={max_size}, and the ceilings of the clusters add up to {total}",
                hint="a smaller pool, or higher ceilings",
            )
        for state in self._states:
            check = getattr(state.backend, "check_size", None)
            if check is not None:
                check(min(max_size, state.part.ceiling or max_size), spec)

    # -- the seam -------------------------------------------------------------------------------------

    async def capabilities(self) -> Capabilities:
        """Of the parts that answer. One that is away is left out; one that is set up wrongly is an error."""
        told = await asyncio.gather(
            *(state.backend.capabilities() for state in self._states), return_exceptions=True
        )
        found: list[Capabilities] = []
        for state, answer in zip(self._states, told, strict=True):
            if isinstance(answer, Capabilities):
                found.append(answer)
            elif isinstance(answer, SandboxError) and not isinstance(answer, (ConfigError, UnsupportedError)):
                self._leave_out(state, answer)
            else:
                raise answer
        if not found:
            raise self._all_out()
        rates = [row.max_writes_per_s for row in found]
        return Capabilities(
            reset_modes=frozenset().union(*(row.reset_modes for row in found)),
            adopt=any(row.adopt for row in found),
            pause=all(row.pause for row in found),
            snapshot=all(row.snapshot for row in found),
            max_writes_per_s=None if None in rates else math.fsum(rate or 0.0 for rate in rates),
            shared_layers=len(self._states) == 1 and found[0].shared_layers,
        )

    async def provision(
        self,
        spec: Spec,
        *,
        member: str,
        labels: Mapping[str, str],
        deadline: float,
        node: str | None = None,
    ) -> Member:
        async def make(state: _State, left: float, wish: str | None) -> Member | None:
            where = {} if wish is None else {"node": wish}
            return await state.backend.provision(spec, member=member, labels=labels, deadline=left, **where)

        made = await self._in_some(member, deadline, node, make)
        assert made is not None
        return made

    async def adopt(self, spec: Spec, *, labels: Mapping[str, str], deadline: float) -> Member | None:
        """Of the first part, by load, that has one."""
        loop = asyncio.get_running_loop()
        end = loop.time() + deadline
        for state in self._open(set()):
            try:
                found = await state.backend.adopt(spec, labels=labels, deadline=max(end - loop.time(), 0.05))
            except SandboxError as error:
                self._failed(state, error)
                continue
            if found is not None:
                return self._keep(state, found.id, found)
        return None

    async def connect(self, member: Member) -> tuple[StreamReader, StreamWriter]:
        state, inner = self._where(member)
        return await state.backend.connect(inner)

    async def _open_link(self, member: Member) -> Any:
        state, inner = self._where(member)
        return await state.backend.open_link(inner)  # type: ignore[attr-defined]

    async def dispose(self, member: Member) -> None:
        """Where it is; one that is not known may have been made all the same: everywhere."""
        known = self._of.get(member.id)
        if known is None:
            for state in self._states:
                if state.why is None:
                    await state.backend.dispose(replace(member, node=_inner_node(state, member.node)))
            return
        inner = known.members.get(member.id) or replace(member, node=_inner_node(known, member.node))
        await known.backend.dispose(inner)
        await self._forget(known, member.id)

    async def list(self, labels: Mapping[str, str]) -> Sequence[Member]:
        """Of a part that does not answer: what was there when it last did."""
        told = await asyncio.gather(
            *(state.backend.list(labels) for state in self._states), return_exceptions=True
        )
        found: list[Member] = []
        for state, rows in zip(self._states, told, strict=True):
            if isinstance(rows, SandboxError):
                log.warning("%s cannot be listed: %s", state.name, rows)
                found += [self._outer(state, row) for row in state.members.values() if row is not None]
            elif isinstance(rows, BaseException):
                raise rows
            else:
                found += [self._outer(state, row) for row in rows]
        return found

    def nodes(self) -> Sequence[str]:
        return [f"{state.name}/{node}" for state in self._open(set()) for node in state.backend.nodes()]

    def listen(self, tell: Tell) -> None:
        for state in self._states:
            state.backend.listen(tell)

    async def keep_layer(self, layer: str, tar: AsyncIterable[bytes]) -> None:
        """In one place for all: a layer that is kept can be brought to any part."""
        for state in self._states:
            if state.backend.keeps_layers:
                await state.backend.keep_layer(layer, tar)
                return

    def kept_layer(self, layer: str) -> AsyncGenerator[bytes, None] | None:
        kept = (state.backend.kept_layer(layer) for state in self._states if state.backend.keeps_layers)
        return next((tar for tar in kept if tar is not None), None)

    async def give_layer(self, layer: str, member: Member) -> bool:
        if len(self._states) > 1:
            return False  # a layer may be another part's; the pool brings it over
        state, inner = self._where(member)
        return await state.backend.give_layer(layer, inner)

    async def drop_layer(self, layer: str) -> None:
        await self._each(lambda backend: backend.drop_layer(layer))

    def environment(self, spec: Spec) -> Mapping[str, str]:
        found: dict[str, str] = {}
        for state in reversed(self._states):
            found |= state.backend.environment(spec)
        return found

    async def hurry(self, within: float) -> None:
        await self._each(lambda backend: backend.hurry(within))

    async def close(self) -> None:
        await self._each(lambda backend: backend.close())

    # -- which part -----------------------------------------------------------------------------------

    async def _in_some(
        self,
        name: str,
        deadline: float,
        node: str | None,
        make: Callable[[_State, float, str | None], Awaitable[Member | None]],
    ) -> Member | None:
        """Try parts, the one with the least load first, until one made it or the time is over."""
        loop = asyncio.get_running_loop()
        end = loop.time() + deadline
        tried: set[str] = set()
        last: SandboxError | None = None
        while True:
            state = await self._next(tried, node, end)
            if state is None:
                raise last or self._all_out()
            wish = (
                _inner_node(state, node) if node is not None and node.startswith(f"{state.name}/") else None
            )
            tried.add(state.name)
            state.members[name] = None
            self._of[name] = state
            try:
                made = await make(state, max(end - loop.time(), 0.05), wish)
            except SandboxError as error:
                await self._forget(state, name)
                last = error
                if not self._failed(state, error) or loop.time() >= end:
                    raise
            except BaseException:
                await self._forget(state, name)
                raise
            else:
                state.failures = state.times_out = 0
                if state.why is not None:
                    log.warning("%s is well again", state.name)
                    state.why = None
                return self._keep(state, name, made) if made is not None else None

    async def _next(self, tried: set[str], node: str | None, end: float) -> _State | None:
        """The next part to try, waited for while all that are well are full; None: none is left."""
        loop = asyncio.get_running_loop()
        while True:
            able = self._open(tried)
            wished = [s for s in able if node is not None and node.startswith(f"{s.name}/") and s.room()]
            free = wished or [state for state in able if state.room()]
            if free:
                return free[0]
            if not able:
                return None
            try:
                async with asyncio.timeout_at(end), self._freed:
                    await self._freed.wait()
            except TimeoutError:
                full = ", ".join(f"{state.name} ({len(state.members)})" for state in able)
                raise ProvisionError(
                    f"every cluster is full after {max(end - loop.time(), 0):.0f} s of waiting: {full}",
                    kind="clusters_full", hint="higher ceilings, or a smaller pool",
                ) from None  # fmt: skip

    def _open(self, tried: set[str]) -> builtins.list[_State]:
        """Parts that are not left out, the least loaded first."""
        now = asyncio.get_running_loop().time()
        able = [state for state in self._states if state.name not in tried and state.out_until <= now]
        return sorted(able, key=_State.load)

    def _failed(self, state: _State, error: SandboxError) -> bool:
        """Whether another part may do better."""
        if isinstance(error, (ConfigError, UnsupportedError)) or not error.infrastructure:
            return False
        state.failures += 1
        if error.kind in _OUT_AT_ONCE or state.failures >= _IN_A_ROW:
            self._leave_out(state, error)
        return error.retryable or error.kind in _OUT_AT_ONCE

    def _leave_out(self, state: _State, error: SandboxError) -> None:
        wait = min(_FIRST_OUT_S * 2**state.times_out, _LONGEST_OUT_S) * random.uniform(0.8, 1.2)
        state.times_out += 1
        state.failures = 0
        state.out_until = asyncio.get_running_loop().time() + wait
        if state.why is None:
            log.warning("%s is left out, and tried again in %.0f s: %s", state.name, wait, error)
        state.why = error

    def _all_out(self) -> SandboxError:
        why = "; ".join(
            f"{state.name}: {state.why.message}" for state in self._states if state.why is not None
        )
        return ProvisionError(
            f"no cluster takes sandboxes: {why or 'each was tried'}",
            kind="clusters_out",
            hint="rlsandbox doctor",
        )

    def _keep(self, state: _State, name: str, inner: Member) -> Member:
        state.members[name] = inner
        self._of[name] = state
        return self._outer(state, inner)

    async def _forget(self, state: _State, name: str) -> None:
        state.members.pop(name, None)
        self._of.pop(name, None)
        async with self._freed:
            self._freed.notify_all()

    def _where(self, member: Member) -> tuple[_State, Member]:
        state = self._of.get(member.id)
        inner = state.members.get(member.id) if state is not None else None
        if state is None or inner is None:
            raise ProvisionError(f"sandbox {member.id} is in none of the clusters", kind="unknown_member")
        return state, inner

    def _outer(self, state: _State, inner: Member) -> Member:
        return replace(inner, node=None if inner.node is None else f"{state.name}/{inner.node}")

    async def _each(self, ask: Callable[[Backend], Awaitable[None]]) -> None:
        """Of all parts, whatever the others say; the first error afterwards."""
        told = await asyncio.gather(*(ask(state.backend) for state in self._states), return_exceptions=True)
        wrong = [answer for answer in told if isinstance(answer, BaseException)]
        for error in wrong[1:]:
            log.warning("another cluster failed as well: %s", error)
        if wrong:
            raise wrong[0]


def _part(row: Part | Backend | Mapping[str, Any], number: int, common: Mapping[str, Any]) -> Part:
    if isinstance(row, Backend):
        row = Part(row)
    elif isinstance(row, Mapping):
        options = {**common, **row}
        kind = str(options.pop("name", "kubernetes"))
        weight, ceiling = options.pop("weight", 1.0), options.pop("ceiling", None)
        called = str(options.pop("called", "") or options.get("context") or "").replace("/", ":")
        row = Part(load_backend(kind, options), weight, ceiling, called)
    elif not isinstance(row, Part):
        raise ConfigError(f"Clusters: a part must be a Part, a Backend or a table, not {type(row).__name__}")
    for what, value in (("weight", row.weight), ("ceiling", row.ceiling)):
        number_ = isinstance(value, (int, float)) and not isinstance(value, bool)
        if not (value is None and what == "ceiling") and not (number_ and 0 < value < math.inf):  # type: ignore[operator]
            raise ConfigError(f"Clusters: {what} must be a number above 0, not {value!r}")
    if row.ceiling is not None and not isinstance(row.ceiling, int):
        raise ConfigError(f"Clusters: ceiling must be a whole number, not {row.ceiling!r}")
    name = row.name or f"cluster-{number}"
    if "/" in name:
        raise ConfigError(f"Clusters: a part's name has no '/': {name!r}", hint="Part(name=...)")
    return replace(row, name=name)


def _inner_node(state: _State, node: str | None) -> str | None:
    return None if node is None else node.removeprefix(f"{state.name}/")
