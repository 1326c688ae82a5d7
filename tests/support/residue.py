"""Every kind of dirt in one sandbox, whatever backend made it: planted, named by verification, gone after a reset.

What an episode sees after the reset is told by a census taken inside it, which has nothing to do with the
code that resets or verifies.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, field

from rlsandbox.hooks import Credentials, Residue, plugin_manager
from rlsandbox.reset.baseline import Baseline, take_baseline
from rlsandbox.reset.runner import run_reset, run_verify
from rlsandbox.task import Task
from tests.support.dirt import EVERY, PROLOGUE, ROOT, SECRETS, SETUP, Dirt
from tests.support.host import Ran
from tests.support.place import Place

TASK = Task(id="residue", workdir="/work/repo", setup=SETUP)
DEADLINE_S = 60.0
NOT_THEIRS = ("Permission denied", "Operation not permitted", "Read-only file system", "overflow")
GROUP = 12
"""Kinds after which a census is taken: it costs more than everything else."""
HELD = [Credentials("lease-1", env={f"TOKEN_{n}": value for n, value in enumerate(SECRETS)})]

CENSUS = r"""
import hashlib, os, stat, sys
def told(top, whole):
    for d, ds, fs in os.walk(top):
        ds.sort()
        if d == "/": ds[:] = [x for x in ds if x not in ("proc", "sys") and (whole or x not in ("usr",))]
        for n in sorted((*ds, *fs)):
            p = os.path.join(d, n)
            s = os.lstat(p)
            what = [p, oct(s.st_mode), s.st_uid, s.st_gid]
            folder = stat.S_ISDIR(s.st_mode)
            if not p.startswith("/dev/pts") and not (folder and os.path.ismount(p)):
                what += [0 if folder else s.st_size, 0 if folder else s.st_nlink]
                what.append(0 if p.startswith("/dev") else s.st_mtime_ns)
            if p.startswith("/usr/"):  # a hundred thousand of them: names, owners, sizes and times must do
                print(*what)
                continue
            if stat.S_ISLNK(s.st_mode): what.append(os.readlink(p))
            elif stat.S_ISREG(s.st_mode) and s.st_size < 1 << 16 and os.access(p, os.R_OK):
                what.append(hashlib.md5(open(p, "rb").read()).hexdigest())
            try: names = os.listxattr(p, follow_symlinks=False)
            except OSError: names = []
            what.append(sorted(a for a in names if not a.startswith("user.overlay")))
            print(*what)
s = os.stat("/"); print("/", oct(s.st_mode), s.st_uid)
told("/", "whole" in sys.argv)
def name(pid):  # one of the keeper's own may wait for the next command
    try:
        return open("/proc/%s/comm" % pid).read().strip()
    except OSError:
        return "gone"
own = os.readlink("/proc/self")  # where /proc is the container's, so are its numbers
print("processes", sorted(p for p in os.listdir("/proc") if p.isdigit() and p not in ("1", own) and name(p) not in ("rls-standby", "rls-init", "gone")))
for name in ("tcp", "tcp6", "udp", "udp6", "unix", "raw"):
    try: lines = open(f"/proc/net/{name}").read().splitlines()[1:]
    except OSError: continue
    if "shared" in sys.argv: lines = [l for l in lines if l.split()[3] != "06"]  # the kernel's memory of what has ended
    # an old gVisor lists the keeper's to everybody
    print(name, [l for l in lines if name != "unix" or (len(l.split()) > 7 and "/.rlsandbox-run/" not in l)])
for name in ("shm", "sem", "msg"):
    try: print(name, open(f"/proc/sysvipc/{name}").read().splitlines()[1:])
    except OSError: pass
print("mounts", [l.split()[4] for l in open("/proc/self/mountinfo")])
print("environment", sorted(os.environ.items()))
import resource, socket
print("limits", [resource.getrlimit(i) for i in range(16)])
print("nice", os.nice(0), "cpus", os.sched_getaffinity(0))
print("name", socket.gethostname(), "umask", os.umask(0o22))
"""


@dataclass
class Told:
    """What became of each kind, to be printed."""

    refused: dict[str, str] = field(default_factory=dict)
    skipped: dict[str, str] = field(default_factory=dict)
    failures: list[str] = field(default_factory=list)
    planted: int = 0

    def lines(self, name: str) -> str:
        told = [f"residue, {name}: {self.planted} kinds planted, {len(self.refused)} refused by the sandbox"]
        told += [f"  refused: {kind}: {why}" for kind, why in sorted(self.refused.items())]
        return "\n".join(
            [*told, *(f"  skipped: {kind}: {why}" for kind, why in sorted(self.skipped.items()))]
        )


class Suite:
    """One sandbox with its primed layer, used for every kind of dirt in turn."""

    def __init__(self, where: Place, baseline: Baseline, user: str, shared: bool) -> None:
        self.where, self.baseline, self.user = where, baseline, user
        self.flags = ["shared"] if shared else []
        self.nobodys_usr = os.geteuid() != 0 and where.member.facts.get("base") == "host"
        self.manager = plugin_manager(entry_points=False)

    async def plant(self, dirt: Dirt) -> Ran:
        home = "/root" if self.user == ROOT else "/home/agent"
        return await self.where.run(
            ["sh", "-s"],  # not -c: a process caught before its exec would show the whole script
            stdin=(PROLOGUE + dirt.script).encode(),
            user=None if self.user == ROOT else "1000",
            env={"HOME": home, "GIT_PAGER": "cat"},
            cwd="/work/repo",
        )

    async def verify(self) -> list[Residue]:
        return await run_verify(
            self.where.client,
            self.manager,
            task=TASK,
            baseline=self.baseline,
            deadline_s=DEADLINE_S,
            credentials=HELD,
        )

    async def reset(self) -> None:
        await run_reset(
            self.where.client,
            self.manager,
            task=TASK,
            layer="primed",
            baseline=self.baseline,
            deadline_s=DEADLINE_S,
        )

    async def census(self, *, whole: bool = False) -> list[str]:
        ran = await self.where.run(
            ["python3", "-B", "-c", CENSUS, *(["whole"] if whole else []), *self.flags], timeout_s=300
        )
        assert ran.code == 0, ran.err[-2000:]
        return ran.out.splitlines()


async def primed(where: Place, user: str, *, setup: str = SETUP, shared: bool = False) -> Suite:
    """*shared*: the sandbox's network outlives an episode."""
    ran = await where.sh(setup)
    assert ran.code == 0, ran
    await where.client.seal("primed", kill=True)
    baseline = await take_baseline(where.client, mode=where.mode, layer="primed")
    return Suite(where, baseline, user, shared)


def fits(dirt: Dirt, residue: list[Residue]) -> bool:
    return any(item.kind == dirt.kind and dirt.what in item.what for item in residue)


def difference(before: list[str], after: list[str]) -> str:
    gone, come = set(before) - set(after), set(after) - set(before)
    return "; ".join(
        [f"gone: {line[:200]}" for line in sorted(gone)[:3]]
        + [f"new: {line[:200]}" for line in sorted(come)[:3]]
    )


async def every_kind(suite: Suite, told: Told, *, whole: bool, but: Mapping[str, str] | None = None) -> None:
    """*whole*: at the end compare every file of the root; else all but those under /usr.

    *but*: kinds that there are not, or that cannot be told, here, with the reason.
    """
    told.skipped |= but or {}
    pristine = await suite.census()
    everything = await suite.census(whole=whole)
    await suite.reset()
    assert await suite.verify() == []
    since: list[str] = []
    for dirt in EVERY:
        if suite.user not in dirt.who or dirt.name in told.skipped:
            continue
        if dirt.needs and (await suite.where.sh(f"command -v {dirt.needs}")).code != 0:
            told.skipped[dirt.name] = f"no {dirt.needs} here"
            continue
        ran = await suite.plant(dirt)
        if ran.code == 77:
            told.refused[dirt.name] = ran.err.strip().splitlines()[-1]
        elif ran.code != 0 and suite.nobodys_usr and any(word in ran.err for word in NOT_THEIRS):
            told.refused[dirt.name] = "/usr of the machine is nobody's in an ordinary user's sandbox"
        elif ran.code != 0:
            told.failures.append(f"{dirt.name}: not planted: {ran}")
        else:
            told.planted += 1
            found = await suite.verify()
            if not fits(dirt, found):
                told.failures.append(f"{dirt.name}: not named as {dirt.kind} {dirt.what}: {found[:8]}")
        await suite.reset()
        if left := await suite.verify():
            told.failures.append(f"{dirt.name}: left after the reset: {left[:4]}")
        since.append(dirt.name)
        if len(since) == GROUP or dirt is EVERY[-1]:
            if (now := await suite.census()) != pristine:
                told.failures.append(f"after one of {since}: {difference(pristine, now)}")
            since.clear()
            await suite.reset()
    # all of it at once, and then every file of the whole root
    for dirt in EVERY:
        if suite.user in dirt.who and dirt.name not in ("program replaced", "program deleted"):
            await suite.plant(dirt)
    assert len(await suite.verify()) > told.planted / 2
    await suite.reset()
    if left := await suite.verify():
        told.failures.append(f"all at once: left after the reset: {left[:8]}")
    if (now := await suite.census(whole=whole)) != everything:
        told.failures.append(f"all at once: the next episode differs: {difference(everything, now)}")
