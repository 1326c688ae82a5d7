"""On a machine whose root is itself an overlay, as in every container: forks, and a chain of 200 snapshots."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from rlsandbox import _paths

ROOT = Path(__file__).parents[2]

# A root made of an overlay over this machine's, by pivot_root: in a chroot no user namespace can be made.
ENTER = """
set -eu
mount -t tmpfs none "$1"
mkdir "$1/upper" "$1/work" "$1/root"
mount -t overlay -o "lowerdir=/,upperdir=$1/upper,workdir=$1/work" none "$1/root"
for name in proc sys dev; do mount --rbind "/$name" "$1/root/$name"; done
cd "$1/root"
mkdir -p .old
pivot_root . .old
umount -l .old
shift
exec "$@"
"""

PROGRAM = """
import json, time
import rlsandbox as rls

ROOT = [line.split() for line in open("/proc/self/mountinfo") if line.split()[4] == "/"][-1]
told = {"root": ROOT[ROOT.index("-") + 1]}
with rls.Pool(size=2, max_size=12, config=False) as pool:
    with pool.claim(rls.Task(id="t", setup="echo primed > /var/tmp/f"), timeout=60) as sandbox:
        told["mode"] = sandbox.reset_mode
        snapshots = []
        for i in range(200):
            sandbox.run(f"echo {i} >> /tmp/log; rm -f /var/tmp/n{i - 3}; echo {i} > /var/tmp/n{i}").check()
            snapshots.append(sandbox.snapshot())
        told["log"] = sandbox.read_text("/tmp/log").split() == [str(i) for i in range(200)]
        told["kept"] = sandbox.run("cd /var/tmp; echo n*").stdout.split()
        told["depth"] = []
        for at in (0, 33, 100, 199):
            with snapshots[at].fork(1, timeout=60) as (fork,):
                told["depth"].append(len(fork.read_text("/tmp/log").split()))
        with snapshots[-1].fork(8, timeout=60) as forks:
            everyone = [sandbox, *forks]
            for i, one in enumerate(everyone):
                one.run(f"echo {i} > /var/tmp/f; mkdir /var/tmp/only{i}").check()
            told["own"] = [one.run("cat /var/tmp/f; cd /var/tmp; echo only*").stdout.split() for one in everyone]
    with pool.claim(rls.Task(id="t", setup="echo primed > /var/tmp/f"), timeout=60) as again:
        told["clean"] = again.run("cat /var/tmp/f; ls /tmp").stdout
    told["quarantined"] = pool.stats().quarantined
print(json.dumps(told))
"""


def test_forks_and_a_chain_of_200_on_a_root_that_is_an_overlay(tmp_path: Path) -> None:
    if os.geteuid() != 0 or shutil.which("unshare") is None:
        pytest.skip("needs root and unshare (util-linux)")
    place = tmp_path / "place"
    place.mkdir()
    done = subprocess.run(
        ["unshare", "-m", "--propagation", "private", "sh", "-c", ENTER, "sh", place, sys.executable, "-c", PROGRAM],
        cwd=ROOT, capture_output=True, text=True, timeout=300,
        env={**os.environ, "RLSANDBOX_HOME": str(tmp_path / "home"), "RLSANDBOX_CACHE": str(_paths.cache()),
             "PYTHONPATH": str(ROOT)},
    )  # fmt: skip
    if done.returncode and "mount:" in done.stderr:
        pytest.skip(f"no such root can be made here: {done.stderr.strip()}")
    assert done.returncode == 0, done.stderr
    told = json.loads(done.stdout)
    assert told == {
        "root": "overlay",
        "mode": told["mode"],
        "log": True,
        "kept": ["n197", "n198", "n199"],
        "depth": [1, 34, 101, 200],
        "own": [[str(i), f"only{i}"] for i in range(9)],
        "clean": "primed\n",
        "quarantined": 0,
    }
    assert told["mode"] in ("overlay", "userns")
