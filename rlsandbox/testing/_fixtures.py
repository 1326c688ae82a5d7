"""What the conformance tests stand on."""

from __future__ import annotations

import asyncio
import contextlib
import resource
from collections.abc import Awaitable, Callable, Coroutine, Iterator
from pathlib import Path
from typing import Any, ClassVar, TypeVar

import pytest

from .._portal import Portal
from ..backends.base import Backend
from ..sandbox import AsyncSandbox, Sandbox
from ..spec import Spec
from ..task import Task
from .lone import LoneHost

T = TypeVar("T")


class Fixtures:
    """Fixtures of the suite. A subclass gives ``backend`` and may set ``skip``, ``spec``, ``other_user``."""

    skip: ClassVar[dict[str, str]] = {}
    """Test name (without ``test_``), or the beginning of several, to the reason."""
    spec: ClassVar[Spec] = Spec()
    other_user: ClassVar[str] = "nobody"
    """A user of the image who may do little."""

    @pytest.fixture
    def backend(self) -> Backend:
        raise NotImplementedError("give the backend in a fixture called `backend`")

    def kill_keeper(self, host: LoneHost, sandbox: Sandbox) -> None:
        """End the sandbox's keeper as a broken machine would: at once, without a word."""
        pytest.skip("this backend does not say how to kill a keeper")

    @pytest.fixture(autouse=True)
    def _skips(self, request: pytest.FixtureRequest) -> None:
        name = request.node.originalname.removeprefix("test_")
        for key, reason in self.skip.items():
            if name.startswith(key.removeprefix("test_")):
                pytest.skip(reason)

    @pytest.fixture
    def portal(self) -> Iterator[Portal]:
        portal = Portal("conformance")
        yield portal
        portal.close()

    @pytest.fixture
    def host(self, backend: Backend, portal: Portal) -> Iterator[LoneHost]:
        yield from lone_host(backend, portal)

    @pytest.fixture
    def make(self, host: LoneHost, portal: Portal) -> Iterator[Callable[..., Sandbox]]:
        """Makes sandboxes: ``make(task, spec=..)``."""
        made: list[Sandbox] = []

        def make(task: Task | None = None, **how: Any) -> Sandbox:
            how.setdefault("spec", self.spec)
            sandbox = Sandbox(portal.call(host.make, task, **how), portal)
            made.append(sandbox)
            return sandbox

        yield make
        for sandbox in made:
            sandbox.release()

    @pytest.fixture
    def sandbox(self, make: Callable[..., Sandbox]) -> Sandbox:
        return make()


def lone_host(backend: Backend, portal: Portal) -> Iterator[LoneHost]:
    """A host over *backend*, closed with it at the end."""
    host = LoneHost(backend)
    yield host

    async def close() -> None:
        await host.close()
        await backend.close()

    portal.call(close)


class OnePerClass(Fixtures):
    """For a backend that is slow to begin: one for all tests of a class. Its ``backend`` has class scope."""

    @pytest.fixture(scope="class")
    @classmethod
    def portal(cls) -> Iterator[Portal]:
        portal = Portal("conformance")
        yield portal
        portal.close()

    @pytest.fixture(scope="class")
    @classmethod
    def host(cls, backend: Backend, portal: Portal) -> Iterator[LoneHost]:
        yield from lone_host(backend, portal)


IN_PROC = (
    "in_proc() { d=/proc/$1; read -r own _ </proc/self/stat; [ $own = $$ ] && return; "
    "for d in /proc/[0-9]*; do read -r s <$d/stat; case $s in *'(rls-'*) continue;; esac; n=; "
    'while read -r k v; do [ "$k" = NSpid: ] && n=$v && break; done <$d/status; '
    "case $n in *[!0-9]$1) return;; esac; done 2>/dev/null; d=/proc/gone; }; "
)
"""In sh: ``d`` is where /proc, which may be that of a namespace further out, has the process ``$1``."""


def gone(sandbox: Sandbox, pids: str) -> bool:
    """Whether none of these processes (numbers in words) lives in the sandbox. A zombie does not live.

    A new episode counts from the beginning again: who looks, and what is the keeper's, may bear the number.
    """
    check = (
        IN_PROC + "for p in " + " ".join(pids.split()) + "; do "
        "[ $p != $$ ] && in_proc $p && [ -r $d/stat ] && read -r s <$d/stat && "
        "case $s in *'(rls-'*) continue;; esac && "
        "case ${s##*) } in Z*|X*) ;; *) echo $p;; esac; done 2>/dev/null; :"
    )
    return sandbox.run(check).stdout == ""


def cancelled_when(
    portal: Portal,
    start: Callable[[], Coroutine[Any, Any, Any]],
    ready: Callable[[], Awaitable[bool]],
) -> None:
    """Run *start* as a task, cancel it once *ready* says so, and see it end cancelled."""

    async def run() -> None:
        task = asyncio.ensure_future(start())
        while not await ready():
            if task.done():
                await task
                raise AssertionError("it ended before it was cancelled")
            await asyncio.sleep(0.01)
        task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await task
            raise AssertionError("a cancelled call gave a result")

    portal.call(run)


def inner(sandbox: Sandbox) -> AsyncSandbox:
    """The asynchronous half of a sandbox."""
    return sandbox._async


class Grown:
    """How much more memory than before this process had in use at most, since this was made."""

    def __init__(self) -> None:
        with contextlib.suppress(OSError):  # else an earlier test's peak would hide this one's
            Path("/proc/self/clear_refs").write_text("5")
        self._before = self._status("VmRSS") or self._peak()

    def __call__(self) -> int:
        return self._peak() - self._before

    def _peak(self) -> int:
        return self._status("VmHWM") or resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024

    @staticmethod
    def _status(name: str) -> int:
        try:
            lines = Path("/proc/self/status").read_text().splitlines()
        except OSError:
            return 0  # not on Linux, where a backend's own tests may run
        return next((int(line.split()[1]) * 1024 for line in lines if line.startswith(name + ":")), 0)
