"""What belongs to a sandbox goes when it is gone for certain, and not before."""

from __future__ import annotations

import asyncio
import errno
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from rlsandbox.backends import Local, Member
from rlsandbox.backends.local.backend import _Place
from rlsandbox.errors import ProvisionError
from rlsandbox.keeper.connection import KeeperFailure


@pytest.mark.parametrize("how", ["refused", "unanswered", "cancelled"])
async def test_files_stay_while_somebody_may_write_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, how: str
) -> None:
    error: BaseException = {
        "refused": KeeperFailure("busy", errno=errno.EBUSY),
        "unanswered": ProvisionError("no answer"),
        "cancelled": asyncio.CancelledError(),
    }[how]
    answers: list[BaseException] = [error, KeeperFailure("there is none", errno=errno.ENOENT)]

    async def dispose(member: str) -> None:
        raise answers.pop(0)

    hub: Any = SimpleNamespace(dispose=dispose, lost=asyncio.get_running_loop().create_future())
    local = Local()
    monkeypatch.setattr(type(local._hubs), "alive", hub)
    workdir = tmp_path / "work"
    workdir.mkdir()
    member = Member(id="m", node=None)
    local._places["m"] = _Place({}, member, None, str(workdir))
    with pytest.raises(type(error)):
        await local.dispose(member)
    assert workdir.is_dir()
    await local.dispose(member)
    assert not workdir.exists()
    assert local._places == {}
