"""Hubs for the tests of the C side, as root and as the ordinary user where that one exists."""

from __future__ import annotations

import os
import pwd
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))

from rawclient import Hub, Keeper, build


def users() -> list[str | None]:
    """Whom the hub runs as: whoever runs the tests, and beside root also the user named by RLS_TEST_USER."""
    name = os.environ.get("RLS_TEST_USER", "ordinary")
    found: list[str | None] = [None]
    if os.geteuid() == 0:
        try:
            pwd.getpwnam(name)
            found.append(name)
        except KeyError:
            pass
    return found


@pytest.fixture(scope="session")
def keeper_binary(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where every user can run it."""
    place = tmp_path_factory.mktemp("keeper")
    for part in (place, *place.parents):
        if part.stat().st_uid == os.geteuid() and part != Path("/tmp") and part != Path("/"):
            part.chmod(0o755)
    return Path(shutil.copy(build(), place / "keeper"))


@pytest.fixture(params=users(), ids=lambda user: user or "self")
def hub(request: pytest.FixtureRequest, keeper_binary: Path, tmp_path: Path) -> Iterator[Hub]:
    tmp_path.chmod(0o755)
    with Hub(keeper_binary, user=request.param, scratch=tmp_path) as hub:
        yield hub


@pytest.fixture
def keeper(hub: Hub) -> Keeper:
    return hub.create()
