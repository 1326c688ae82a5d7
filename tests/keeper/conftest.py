"""Hubs for the tests of the C side, as root and as the ordinary user where that one exists."""

from __future__ import annotations

import os
import pwd
import shutil
import sys
import tempfile
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
def keeper_binary() -> Iterator[Path]:
    """Where every user can run it, which pytest's own directories are not."""
    with tempfile.TemporaryDirectory(prefix="rls-test-") as place:
        Path(place).chmod(0o755)
        yield Path(shutil.copy(build(os.environ.get("RLS_TEST_KEEPER", "keeper")), Path(place) / "keeper"))


@pytest.fixture
def scratch() -> Iterator[Path]:
    """A directory that every user can read."""
    with tempfile.TemporaryDirectory(prefix="rls-test-") as place:
        Path(place).chmod(0o755)
        yield Path(place)


WAYS = [(user, "overlay") for user in users()] + [(None, "userns")]


@pytest.fixture(params=WAYS, ids=lambda way: f"{way[0] or 'self'}-{way[1]}")
def hub(request: pytest.FixtureRequest, keeper_binary: Path, scratch: Path) -> Iterator[Hub]:
    with Hub(keeper_binary, user=request.param[0], mode=request.param[1], scratch=scratch) as hub:
        yield hub


@pytest.fixture
def keeper(hub: Hub) -> Keeper:
    return hub.create()
