"""Pools whose episodes write to a disk: used sandboxes come back as from a tmpfs, and nothing stays there."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

import rlsandbox as rls
from rlsandbox.backends import Local
from tests.support.small_disk import takes_uppers

LONG = 120


@pytest.mark.parametrize("mode", ["overlay", "userns"])
@pytest.mark.parametrize("setup", [None, "mkdir /work; echo primed > /work/file"])
def test_used_sandboxes_come_back(tmp_path: Path, mode: str, setup: str | None) -> None:
    takes_uppers(tmp_path)
    place = tmp_path / "uppers"
    place.mkdir()
    backend = Local(upper=str(place), mode=mode)
    with rls.Pool(backend, size=1, config=False, ledger=tmp_path / "ledger") as pool:
        for number in range(4):
            with pool.claim(rls.Task(id=f"t{number}", setup=setup), timeout=LONG) as sandbox:
                assert sandbox.run("cat /work/file").ok == (setup is not None)
                assert sandbox.run("ls -A /dev/shm /tmp | grep -c left").stdout == "0\n"
                assert sandbox.run("echo x > /dev/shm/left; echo x > /tmp/left; rm -rf /work; umask 0").ok
        pool.wait_ready(timeout=LONG)
        stats = pool.stats()
    assert (stats.quarantined, stats.residue, stats.created) == (0, [], 1), stats
    assert os.listdir(place) == []
