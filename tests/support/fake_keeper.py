"""A keeper that answers from a script: for what is made of facts, not for whether they are true."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass, field

from rlsandbox.keeper.client import Changes, KeeperFailure, Look
from rlsandbox.results import FileInfo

CLEAN = """
episode\t{episode}
layer\tprimed-1
lower\t/usr\t2049\t11\t100\t100
upper\t/\t0\t0755\t0\t0\t-
upper\t/dev/shm\t0\t1777\t0\t0\t-
upper\t/dev/mqueue\t0\t1777\t0\t0\t-
mount\t/\toverlay\trw,nosuid,nodev\t/\t-
mount\t/proc\tproc\trw,nosuid,nodev,noexec\t/\t-
ns\tpid\t4026532{episode}01\t{episode}
ns\tmnt\t4026532{episode}02\t{episode}
ns\tipc\t4026532{episode}03\t{episode}
ns\tnet\t4026532{episode}04\t{episode}
ns\tcgroup\t4026531835\t1\tshared
key\tsession\t{episode}77\t{episode}
env\tPATH=/usr/bin:/bin
cwd\t/\tcurrent
root\t/\tcurrent
fd\t0\tsocket
limit\tMax open files\t1024\t4096
status\tNoNewPrivs\t1
uts\tsandbox\t(none)
net\tif\tlo\tup
cgroup\t/
"""


@dataclass
class FakeKeeper:
    """Facts are :data:`CLEAN` with *replace* applied and *extra* lines added."""

    episode: int = 1
    extra: list[str] = field(default_factory=list)
    replace: dict[str, str] = field(default_factory=dict)
    files: dict[str, FileInfo] = field(default_factory=dict)
    content: dict[str, bytes] = field(default_factory=dict)
    below: dict[str, bytes] = field(default_factory=dict)
    calls: list[str] = field(default_factory=list)
    hang: frozenset[str] = frozenset()
    die: BaseException | None = None
    hidden: int = 0

    def put(self, path: str, data: bytes = b"x", *, kind: str = "file", mode: int = 0o100644) -> None:
        self.files[path] = FileInfo(path, len(data), mode, kind)  # type: ignore[arg-type]
        self.content[path] = data

    async def _called(self, name: str) -> None:
        self.calls.append(name)
        if self.die is not None:
            raise self.die
        if name in self.hang:
            await asyncio.Event().wait()

    async def reset(self, layer: str = "") -> object:
        await self._called("reset")
        self.files.clear()
        self.content.clear()
        self.extra.clear()
        self.episode += 1
        return {}

    async def reset_and_look(self, layer: str = "") -> Look:
        await self.reset(layer)
        return self.inspect

    async def inspect(self) -> list[tuple[str, str]]:
        await self._called("inspect")
        text = CLEAN.format(episode=self.episode)
        for old, new in self.replace.items():
            assert old in text, old
            text = text.replace(old, new)
        if self.files:
            text = text.replace("upper\t/\t0", f"upper\t/\t{len(self.files)}")
        lines = [*text.splitlines(), *self.extra]
        return [(kind, rest) for kind, _, rest in (line.partition("\t") for line in lines) if kind]

    async def changes(self, path: str = "/", *, limit: int | None = None) -> Changes:
        await self._called("changes")
        every = sorted(self.files.values(), key=lambda f: f.name)
        found = Changes(every[:limit])
        found.total = len(every) + self.hidden
        return found

    async def outside_read(
        self, path: str, *, baseline: bool = False, limit: int | None = None
    ) -> bytes | None:
        await self._called("outside_read")
        held = self.below if baseline else {**self.below, **self.content}
        return held[path][:limit] if path in held else None

    async def outside_remove(self, path: str) -> None:
        await self._called("outside_remove")
        gone = [name for name in self.files if name == path or name.startswith(path + "/")]
        if not gone:
            raise KeeperFailure(f"{path}: no such file", errno=2)
        for name in gone:
            del self.files[name]
            self.content.pop(name, None)

    async def kill_all(self) -> None:
        await self._called("kill_all")
        self.extra = [line for line in self.extra if not line.startswith(("process", "socket"))]


def names(residue: Sequence[object]) -> set[tuple[str, str]]:
    return {(item.kind, item.what) for item in residue}  # type: ignore[attr-defined]
