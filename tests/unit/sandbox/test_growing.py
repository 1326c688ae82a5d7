"""A file that an episode makes longer, faster than it is read, comes to an end all the same."""

from __future__ import annotations

import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from rlsandbox._sandbox import files
from rlsandbox.keeper.wire import Op, Tag
from rlsandbox.results import FileInfo

FIRST = files.PIECE + 5


class Growing:
    """Twice as long with every request, and full of data."""

    def __init__(self) -> None:
        self.size = FIRST
        self.asked = 0

    async def collect(self, op: Op, *, length: int, offset: int = 0, **how: Any) -> tuple[bytes, Any]:
        assert op is Op.READ
        self.asked += 1
        assert self.asked < 10, "it goes on and on"
        self.size *= 2
        reply = {Tag.SIZE: FIRST if self.asked == 1 else self.size, Tag.OFFSET: offset, Tag.FILE_MODE: 0o644}
        return b"x" * min(length, self.size - offset), SimpleNamespace(int=lambda tag, *or_: reply[tag])

    async def list(self, path: str, user: Any) -> Any:
        raise files.KeeperFailure("not a directory", errno=20)

    async def stat(self, path: str, user: Any) -> FileInfo:
        return FileInfo(name="f", size=FIRST, mode=0o644, kind="file")


def sandbox() -> Any:
    return SimpleNamespace(client=Growing(), path=os.fspath, user=lambda user: None, id="s", task=None)


async def test_read() -> None:
    assert await files.read(sandbox(), "/f", None) == b"x" * FIRST


async def test_download(tmp_path: Path) -> None:
    await files.download(sandbox(), "/f", tmp_path / "f", (), None, None)
    assert (tmp_path / "f").read_bytes() == b"x" * FIRST
