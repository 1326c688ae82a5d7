"""Upper layers on a disk: the same behaviour, and nothing left of it."""

from __future__ import annotations

import glob
import time
from pathlib import Path

import pytest
from rawclient import Hub, Keeper, KeeperError
from test_layers import give, seal, stand_on
from test_outside import changes, facts
from test_tar import bring, export

from rlsandbox.keeper.wire import Op, Tag


@pytest.fixture
def place(hub: Hub, scratch: Path) -> Path:
    directory = scratch / "uppers"
    directory.mkdir()
    directory.chmod(0o777)
    return directory


def create(hub: Hub, place: Path, name: str | None = None) -> Keeper:
    return hub.create((Tag.UPPER, f"disk:{place}"), (Tag.UPPER_BYTES, 64 << 20), name=name)


def entries(place: Path) -> list[str]:
    """What members have there. Not by pathlib: its glob raises where a directory goes while it looks."""
    return glob.glob("*/*", root_dir=place, include_hidden=True)


def empties(place: Path, allowed: int = 0) -> bool:
    for _ in range(200):
        if len(entries(place)) <= allowed:
            return True
        time.sleep(0.02)
    return False


def test_reset_and_changes(hub: Hub, place: Path) -> None:
    keeper = create(hub, place)
    assert "limit.disk=none" in keeper.welcome[Tag.FACT]
    before = facts(keeper)["upper"]
    for _ in range(5):
        r = keeper.sh("echo x > /tmp/x; rm /etc/group; mkdir -p /usr/d/e; head -c 3000000 /dev/zero > /usr/d/big; touch /dev/shm/s")
        assert r.code == 0, r.stderr
        assert changes(keeper) == [("f", "/dev/shm/s"), ("x", "/etc/group"), ("f", "/tmp/x"), ("d", "/usr/d"), ("f", "/usr/d/big"), ("d", "/usr/d/e")] or hub.mode == "userns"
        keeper.reset()
        assert changes(keeper) == [] and facts(keeper)["upper"] == before
    assert empties(place, 1)
    hub.call(Op.HUB_DISPOSE, (Tag.MEMBER, "m1"))
    assert empties(place)
    for _ in range(100):
        if not list(place.iterdir()):
            break
        time.sleep(0.02)
    assert not list(place.iterdir())


def test_layers(hub: Hub, place: Path) -> None:
    keeper, other = create(hub, place), create(hub, place, "other")
    keeper.write("/tmp/primed", b"1")
    assert seal(keeper, "primed") > 0
    give(hub, "primed", "other")
    stand_on(other, "primed")
    hub.call(Op.HUB_DISPOSE, (Tag.MEMBER, "m1"))
    assert other.read("/tmp/primed") == b"1"
    hub.call(Op.HUB_DROP_LAYER, (Tag.LAYER, "primed"))
    time.sleep(0.2)
    assert other.read("/tmp/primed") == b"1", "it stands on it still"
    stand_on(other, "primed")
    assert other.read("/tmp/primed") == b"1"
    stand_on(other, "")
    other.call(Op.DROP_LAYER, (Tag.LAYER, "primed"))
    assert empties(place, 1)


def test_chains_and_tars(hub: Hub, place: Path) -> None:
    keeper = create(hub, place)
    for i in range(40):
        keeper.sh(f"echo {i} >> /tmp/log; rm -f /etc/group; echo {i} > /tmp/f{i}; rm -f /tmp/f{i - 2}")
        seal(keeper, f"s{i}")
    assert keeper.sh("wc -l < /tmp/log; echo /tmp/f*; ls /etc/group").stdout == b"40\n/tmp/f38 /tmp/f39\n"
    data = export(keeper, layer="s39") + b""
    bring(keeper, "again", data)
    stand_on(keeper, "again")
    stand_on(keeper, "s10")
    assert keeper.sh("wc -l < /tmp/log").stdout == b"11\n"
    with pytest.raises(KeeperError):
        bring(keeper, "bad", b"x" * 2000)
    hub.close()
    assert len(entries(place)) <= 45  # whoever owns the place removes it


def test_what_cannot_be(hub: Hub, scratch: Path) -> None:
    for upper in ("disk:relative", "elsewhere", f"disk:{scratch}/none"):
        with pytest.raises(KeeperError):
            hub.create((Tag.UPPER, upper))
