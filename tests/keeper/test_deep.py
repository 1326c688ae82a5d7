"""Trees deeper than there are descriptors for: they are removed as any other."""

from __future__ import annotations

import contextlib
import os
import time
from pathlib import Path

import pytest
from rawclient import Hub, Keeper, KeeperError
from test_outside import changes

from rlsandbox.keeper.wire import Op, Tag

pytestmark = pytest.mark.timeout(900)  # for a keeper with sanitizers

LEVELS = 5000
TREE = 1  # flag of REMOVE

# Beside each level a directory with something in it, and names that the keeper itself would choose.
DEEP = f"""
import os, sys
os.mkdir(sys.argv[1]); os.chdir(sys.argv[1])
for n in range({LEVELS}):
    if n % 50 == 0:
        os.makedirs("side/in"); open("side/in/file", "w").close(); os.symlink("/usr", "link")
    if n < 3:
        os.mkdir("rls-deep.1"); open("rls-deep.1/x", "w").close(); open("rls-deep.2", "w").close()
    os.mkdir("d"); os.chdir("d")
"""


def plant(keeper: Keeper, path: str) -> None:
    if keeper.sh("command -v python3").code != 0:
        pytest.skip("no Python in the base")
    keeper.write("/tmp/deep.py", DEEP.encode())
    r = keeper.run("python3", "/tmp/deep.py", path)
    assert r.code == 0, r.stderr


def left(place: Path) -> list[str]:
    """What lies in the members' directories there; they may vanish meanwhile."""
    found = []
    for member in os.listdir(place):
        with contextlib.suppress(FileNotFoundError):
            found += [f"{member}/{name}" for name in os.listdir(place / member)]
    return found


def becomes(place: Path, count: int) -> None:
    for _ in range(3000):
        if len(left(place)) == count:
            return
        time.sleep(0.01)
    raise AssertionError(left(place))


def test_uppers_on_a_disk(hub: Hub, scratch: Path) -> None:
    place = scratch / "uppers"
    place.mkdir()
    place.chmod(0o777)
    keeper = hub.create((Tag.UPPER, f"disk:{place}"))
    plant(keeper, "/tmp/deep")
    plant(keeper, "/dev/shm/deep")
    keeper.reset()
    becomes(place, 1)
    assert changes(keeper) == []
    plant(keeper, "/root/deep")
    hub.call(Op.HUB_DISPOSE, (Tag.MEMBER, "m1"))
    becomes(place, 0)
    for _ in range(1000):
        if not os.listdir(place):
            break
        time.sleep(0.01)
    assert os.listdir(place) == []


def test_by_request(keeper: Keeper) -> None:
    before = changes(keeper)
    plant(keeper, "/tmp/deep")
    keeper.call(Op.REMOVE, (Tag.PATH, "/tmp/deep"), (Tag.FLAGS, TREE))
    with pytest.raises(KeeperError, match="No such file"):
        keeper.call(Op.REMOVE, (Tag.PATH, "/tmp/deep"), (Tag.FLAGS, TREE))
    assert keeper.sh("test -d /usr/bin").code == 0  # no link was followed
    plant(keeper, "/tmp/deep")
    keeper.call(Op.OUTSIDE_REMOVE, (Tag.PATH, "/tmp/deep"))
    keeper.call(Op.OUTSIDE_REMOVE, (Tag.PATH, "/tmp/deep.py"))
    assert changes(keeper) == before


def test_with_few_descriptors(keeper_binary: Path, scratch: Path) -> None:
    few = scratch / "few"
    few.write_text(f"#!/bin/sh\nulimit -n 80 && exec {keeper_binary} \"$@\"\n")
    few.chmod(0o755)
    with Hub(few, scratch=scratch) as hub:
        keeper = hub.create((Tag.NOFILE, 40))
        plant(keeper, "/tmp/deep")
        keeper.call(Op.REMOVE, (Tag.PATH, "/tmp/deep"), (Tag.FLAGS, TREE))
        plant(keeper, "/tmp/deep")
        keeper.call(Op.OUTSIDE_REMOVE, (Tag.PATH, "/tmp/deep"))
        assert changes(keeper, "/tmp/deep") == []
