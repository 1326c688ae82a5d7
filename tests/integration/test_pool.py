"""The pool on this machine: what people do with it, and what may go wrong around it."""

from __future__ import annotations

import asyncio
import contextlib
import copy
import gc
import json
import os
import pickle
import signal
import subprocess
import sys
import textwrap
import threading
import time
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

import rlsandbox as rls
from rlsandbox.errors import (
    ClaimTimeoutError,
    ConfigError,
    PoolClosedError,
    PrimeError,
    ProcessesRunningError,
    SandboxStateError,
)
from rlsandbox.hooks import Inspector, Residue
from rlsandbox.metrics.ttfc import PARTS

TASK = rls.Task(id="t", workdir="/work", files={"a.txt": "hello\n"}, setup="echo primed > b.txt")
LONG = 60


@pytest.fixture
def make(tmp_path: Path) -> Iterator[Callable[..., rls.Pool]]:
    pools: list[rls.Pool] = []

    def make(**how: Any) -> rls.Pool:
        pools.append(rls.Pool(**{"size": 2, "config": False, "ledger": tmp_path / "ledger", **how}))
        return pools[-1]

    yield make
    for pool in pools:
        pool.close()


def eventually(true: Callable[[], bool], seconds: float = 20) -> None:
    end = time.monotonic() + seconds
    while not true():
        assert time.monotonic() < end, "it never came true"
        time.sleep(0.01)


# -- claiming -----------------------------------------------------------------------------------------


def test_every_claim_starts_from_the_primed_state(make: Callable[..., rls.Pool]) -> None:
    pool = make()
    for _ in range(6):
        with pool.claim(TASK, timeout=LONG) as sandbox:
            assert sandbox.run("pwd; cat a.txt b.txt; ls -A").stdout.split() == [
                "/work", "hello", "primed", "a.txt", "b.txt",
            ]  # fmt: skip
            sandbox.run("echo x > a.txt; echo y > .hidden; rm b.txt; touch /tmp/z; sleep 100 &")
    eventually(lambda: pool.stats().ready == 2)
    stats = pool.stats()
    assert (stats.granted, stats.recycled, stats.primed, stats.created) == (6, 6, 1, 2)
    assert stats.quarantined == 0
    assert pool.metrics.ttfc.summary().n == 6
    assert repr(pool).endswith("2 ready, 0 claimed, 0 waiting>")


def test_a_task_closes_what_its_pool_leaves_open(make: Callable[..., rls.Pool]) -> None:
    pool = make(size=1, spec=rls.Spec(network="host", env={"A": "pool"}))
    links = "grep -c : /proc/net/dev"
    with pool.claim(rls.Task(id="open"), timeout=LONG) as sandbox:
        theirs = sandbox.run(links).stdout
        assert sandbox.run("readlink /proc/self/ns/net").stdout.strip() == os.readlink("/proc/self/ns/net")
    with pool.claim(rls.Task(id="closed", spec=rls.Spec(network="none")), timeout=LONG) as sandbox:
        assert sandbox.run(links).stdout == "1\n" or theirs == "1\n"
        assert sandbox.run("readlink /proc/self/ns/net").stdout.strip() != os.readlink("/proc/self/ns/net")
        assert (sandbox.spec.network, sandbox.run("echo $A").stdout) == ("none", "pool\n")


def test_many_tasks_in_few_sandboxes_stay_warm(make: Callable[..., rls.Pool]) -> None:
    pool = make(size=3)
    tasks = [rls.Task(id=f"t{i}", setup=f"echo {i} > /tmp/n") for i in range(12)]
    pool.expect(tasks, group_size=2)
    for _ in range(2):
        for i, task in enumerate(tasks):
            with pool.claim(task, timeout=LONG) as sandbox:
                assert sandbox.run("cat /tmp/n").stdout == f"{i}\n"
    stats = pool.stats()
    assert stats.primed == 12, "each setup ran once"
    assert stats.created == 3


def test_threads_share_a_pool(make: Callable[..., rls.Pool]) -> None:
    pool = make(size=2)
    seen: list[str] = []

    def work(i: int) -> None:
        for _ in range(3):
            with pool.claim(TASK, timeout=LONG) as sandbox:
                seen.append(sandbox.run(f"cat a.txt; echo {i} > a.txt").stdout)

    threads = [threading.Thread(target=work, args=(i,)) for i in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert seen == ["hello\n"] * 18
    assert pool.stats().created == 2


def test_an_idle_member_moves_to_another_spec(make: Callable[..., rls.Pool]) -> None:
    pool = make(size=1)
    other = rls.Task(id="o", spec=rls.Spec(env={"WHO": "other"}))
    with pool.claim(TASK, timeout=LONG) as sandbox:
        assert sandbox.run("echo [$WHO]").stdout == "[]\n"
    with pool.claim(other, timeout=LONG) as sandbox:
        assert sandbox.run("echo [$WHO]").stdout == "[other]\n"
    assert pool.stats().moved == 1


def test_a_deadline_says_what_the_claim_waited_for(make: Callable[..., rls.Pool]) -> None:
    pool = make(size=1)
    with pool.claim(TASK, timeout=LONG):
        started = time.monotonic()
        with pytest.raises(ClaimTimeoutError, match=r"ceiling of 1 is reached \(1 claimed") as caught:
            pool.claim(TASK, timeout=0.2)
        assert time.monotonic() - started < 5
        assert caught.value.task == "t"
        assert pickle.loads(pickle.dumps(caught.value)).kind == "claim_timeout"
    with pytest.raises(ConfigError):
        pool.claim(TASK, timeout=-1)
    with pytest.raises(ConfigError, match="takes a Task or a Snapshot"):
        pool.claim("humaneval/0")  # type: ignore[arg-type]


def test_a_setup_that_fails_is_the_tasks_fault(make: Callable[..., rls.Pool]) -> None:
    pool = make()
    bad = rls.Task(id="bad", setup="echo no such thing >&2; exit 3")
    for _ in range(2):
        with pytest.raises(PrimeError, match="its setup exited with 3: no such thing") as caught:
            pool.claim(bad, timeout=LONG)
        assert not caught.value.infrastructure
    with pool.claim(TASK, timeout=LONG) as sandbox:
        assert sandbox.run("true").ok
    assert pool.stats().created == 2, "no sandbox is lost by it"


def test_a_setup_that_needs_more_memory_than_there_is_says_so(make: Callable[..., rls.Pool]) -> None:
    hungry = rls.Task(
        id="m", setup="head -c 1G /dev/zero | tail -n 1 >/dev/null", spec=rls.Spec(memory="64MiB")
    )
    with pytest.raises(PrimeError, match="its setup was over the sandbox's limit of memory"):
        make(size=1).claim(hungry, timeout=LONG)


def test_a_workdir_that_cannot_be_made(make: Callable[..., rls.Pool]) -> None:
    pool = make(size=1)
    with pytest.raises(PrimeError):
        pool.claim(rls.Task(id="w", workdir="/proc/nowhere"), timeout=LONG)


@pytest.mark.parametrize(
    "left", ["true", "echo >/work", "ln -s /nothing /work"], ids=["none", "file", "link"]
)
def test_a_setup_that_removes_the_workdir(make: Callable[..., rls.Pool], left: str) -> None:
    pool = make(size=1)
    task = rls.Task(id="w", workdir="/work", setup=f"rm -rf /work; {left}", grader=rls.Grader(command="true"))
    record = pool.run_rollouts([task], lambda sandbox, task: None).records[0]
    assert record.reward is None, "it is not the agent that removed it"
    assert record.failure is not None
    assert (record.failure.kind, record.failure.phase) == ("workdir", "prime")
    moved = rls.Task(id="m", workdir="/work", setup="rm -rf /work; mkdir /moved; ln -s /moved /work")
    with pool.claim(moved, timeout=LONG) as sandbox:
        assert sandbox.run("pwd -P").stdout == "/moved\n"


def test_top_directories_are_those_of_setup_and_snapshot(make: Callable[..., rls.Pool]) -> None:
    """``tar -xpf work.tar -C /`` gives the root itself the mode that the archive says."""
    pool = make(size=2)
    task = rls.Task(id="tops", setup="chmod 750 / && chown 5:6 / && chmod 775 /usr /etc")
    look = "stat -c %a:%u:%g / /usr /etc"
    primed = ["750:5:6", "775:0:0", "775:0:0"]
    for _ in range(2):
        with pool.claim(task, timeout=LONG) as first, pool.claim(task, timeout=LONG) as second:
            for sandbox in (first, second):
                assert sandbox.run(look).stdout.split() == primed
                sandbox.run("chmod 711 / /usr; chown 7:8 /").check()
    assert pool.stats().quarantined == 0
    with pool.claim(task, timeout=LONG) as sandbox:
        assert sandbox.run(look).stdout.split() == primed, "a reset puts them back"
        sandbox.run("chmod 711 / /usr; chown 7:8 /").check()
        changed = ["711:7:8", "711:0:0", "775:0:0"]
        with sandbox.snapshot().fork(1, timeout=LONG) as kids:
            assert kids[0].run(look).stdout.split() == changed
        sandbox.hibernate()
        sandbox.restore(timeout=LONG)
        assert sandbox.run(look).stdout.split() == changed


def test_claims_made_ahead(make: Callable[..., rls.Pool]) -> None:
    pool = make(size=1)
    first, second = pool.claim_ahead(TASK), pool.claim_ahead(TASK)
    sandbox = first.result(timeout=LONG)
    assert first.done()
    with pytest.raises(ClaimTimeoutError):
        second.result(timeout=0.1)
    sandbox.release()
    again = second.result(timeout=LONG)
    assert again.run("cat a.txt").stdout == "hello\n"
    assert second.cancel() is False
    third = pool.claim_ahead(TASK)
    assert third.cancel() is True
    again.release()
    eventually(lambda: pool.stats().ready == 1)
    fourth = pool.claim_ahead(TASK)
    eventually(fourth.done)
    assert fourth.cancel() is True
    eventually(lambda: pool.stats().ready == 1)
    summary = pool.metrics.ttfc.summary()
    assert (summary.n, summary.censored) == (2, 1), "one sample a claim, none for what nobody needed"
    fifth = pool.claim_ahead(TASK)
    fifth.result(timeout=LONG).release()
    assert (pool.metrics.ttfc.summary().n, pool.metrics.counters()["never_started"]) == (3, 2)


def test_a_claim_that_is_held_when_the_pool_closes_is_a_sample(make: Callable[..., rls.Pool]) -> None:
    pool = make(size=3)
    used, unused = pool.claim(TASK, timeout=LONG), pool.claim(TASK, timeout=LONG)
    used.run("true")
    ahead = pool.claim_ahead(TASK)
    eventually(ahead.done)
    pool.close()
    summary = pool.metrics.ttfc.summary()
    assert (summary.n, summary.censored) == (2, 1)
    unused.release()
    used.release()
    assert pool.metrics.ttfc.summary().n == 2


def test_a_sandbox_that_waited_long_before_its_first_command(make: Callable[..., rls.Pool]) -> None:
    pool = make(size=1)
    pool.wait_ready(timeout=LONG)
    ahead = pool.claim_ahead(TASK)
    eventually(ahead.done)
    time.sleep(0.6)  # asked for, and not needed yet
    with ahead.result(timeout=LONG) as sandbox:
        time.sleep(0.6)  # the model thinks
        assert sandbox.run("sleep 0.6").ok  # and a command takes its time
    parts = {name: series.values() for name, series in pool.metrics.series().items()}
    assert parts["ttfc_idle"][0] >= 1.2
    (ttfc,) = parts["ttfc"]
    assert ttfc == pytest.approx(sum(parts[f"ttfc_{part}"][0] for part in PARTS))
    assert ttfc < 0.6, "neither was waited for"


def test_expect_and_wait_ready(make: Callable[..., rls.Pool]) -> None:
    pool = make(size=3)
    pool.expect([TASK], group_size=3)
    assert pool.wait_ready(timeout=LONG) == 3
    assert pool.stats().expected == 3
    sandboxes = [pool.claim(TASK, timeout=LONG) for _ in range(3)]
    assert pool.stats().warm_hits == 3
    assert pool.stats().expected == 0
    for sandbox in sandboxes:
        sandbox.release()
    with pytest.raises(ConfigError, match="ceiling"):
        pool.wait_ready(4)
    with pytest.raises(ConfigError, match="not a number of sandboxes"):
        pool.wait_ready(-1)
    pool.expect([TASK] * 5)
    pool.expect([], replace=True)
    assert pool.stats().expected == 0


# -- giving back --------------------------------------------------------------------------------------


def test_releasing_twice_is_fine_and_using_it_after_is_not(make: Callable[..., rls.Pool]) -> None:
    pool = make(size=1)
    sandbox = pool.claim(TASK, timeout=LONG)
    sandbox.release()
    sandbox.release()
    with pytest.raises(SandboxStateError, match="released"):
        sandbox.run("true")
    with pool.claim(TASK, timeout=LONG) as other:
        sandbox.release()
        assert other.run("cat a.txt").ok, "the old handle has no hold on it"


def test_a_forgotten_sandbox_comes_back_with_a_warning(make: Callable[..., rls.Pool]) -> None:
    pool = make(size=1)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        pool.claim(TASK, timeout=LONG)
        gc.collect()
        eventually(lambda: pool.stats().claimed == 0)
    (said,) = [str(w.message) for w in caught if issubclass(w.category, ResourceWarning)]
    assert said.startswith("<Sandbox "), said
    with pool.claim(TASK, timeout=LONG) as sandbox:
        assert sandbox.run("true").ok


def test_discarded_ones_are_replaced(make: Callable[..., rls.Pool]) -> None:
    pool = make(size=1)
    sandbox = pool.claim(TASK, timeout=LONG)
    sandbox.release(discard=True)
    eventually(lambda: pool.stats().ready == 1)
    assert pool.stats().created == 2


def test_a_sandbox_whose_keeper_is_killed_is_replaced(make: Callable[..., rls.Pool]) -> None:
    pool = make(size=1)
    sandbox = pool.claim(TASK, timeout=LONG)
    pool._portal.post(sandbox._async.client.give_up, "the test says so")
    eventually(lambda: sandbox.state == "dead")
    sandbox.release()
    with pool.claim(TASK, timeout=LONG) as other:
        assert other.run("cat a.txt").ok
    assert pool.stats().died_claimed == 1


def test_a_hub_that_is_killed_is_replaced_and_layers_are_primed_again(make: Callable[..., rls.Pool]) -> None:
    pool = make(size=2)
    with pool.claim(TASK, timeout=LONG) as sandbox:
        assert sandbox.run("cat b.txt").ok
    process = pool._pool.backend._hubs.alive.process  # type: ignore[attr-defined]
    process.kill()
    process.wait()
    report = pool.run_rollouts([TASK], lambda sandbox, _: sandbox.run("cat b.txt").check().stdout, retries=3)
    assert report.coverage == 1.0
    assert pool.stats().created < 12, "sandboxes are made and thrown away"


def test_a_keeper_that_is_killed_leaves_no_zombie_to_somebody_who_does_not_reap(tmp_path: Path) -> None:
    """A trainer that is pid 1 of its container never waits for what it did not start."""
    script = f"""
        import ctypes, os, subprocess, time
        import rlsandbox as rls
        assert ctypes.CDLL(None).prctl(36, 1, 0, 0, 0) == 0  # PR_SET_CHILD_SUBREAPER: orphans come here
        def children(pid):
            rows = subprocess.run(["ps", "-eo", "pid=,ppid="], capture_output=True, text=True).stdout
            return [int(c) for c, p in map(str.split, rows.splitlines()) if int(p) == pid]
        def below(pid):
            return [d for c in children(pid) for d in (c, *below(c))]
        with rls.Pool(size=2, config=False, ledger={str(tmp_path / "ledger")!r}) as pool:
            pool.wait_ready(timeout={LONG})
            hub = pool._pool.backend._hubs.alive.process.pid
            # all names before the first kill: what is below a killed keeper goes with it
            names = {{pid: open(f"/proc/{{pid}}/comm").read().strip() for pid in below(hub)}}
            keepers = [pid for pid, name in names.items() if name == "rls-keeper"]
            assert len(keepers) in (2, 3), names  # one more may wait for the next sandbox
            for pid in keepers:
                os.kill(pid, 9)
            while pool.stats().created < 4:
                time.sleep(0.02)
            time.sleep(0.2)
            orphans = [p for p in children(os.getpid()) if p != hub and os.path.exists(f"/proc/{{p}}/stat")]
            left = [open(f"/proc/{{p}}/comm").read().strip() for p in orphans]
            assert not [name for name in left if name.startswith("rls")], left
    """
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(script)], capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr


def inits(pool: rls.Pool) -> list[int]:
    """First processes of the pool's episodes."""
    rows = subprocess.run(["ps", "-eo", "pid=,ppid=,comm="], capture_output=True, text=True).stdout
    parent = {int(p): (int(pp), comm) for p, pp, comm in (row.split(None, 2) for row in rows.splitlines())}
    hub = pool._pool.backend._hubs.alive.process.pid  # type: ignore[attr-defined]

    def below(pid: int) -> bool:
        while pid in parent:
            pid = parent[pid][0]
            if pid == hub:
                return True
        return False

    return [pid for pid, (_, comm) in parent.items() if comm.strip() == "rls-init" and below(pid)]


@pytest.mark.parametrize("when", ["command", "grade", "file"])
def test_an_episode_that_is_killed_from_outside_is_nobodys_reward(
    make: Callable[..., rls.Pool], when: str
) -> None:
    """As by the machine's out-of-memory killer: the command had ended with 137, and that was graded."""
    pool = make(size=1)
    task = rls.Task(id="g", workdir="/work", grader=rls.Grader(command=["test", "-e", "done"]))
    attempts = 0

    def kill() -> None:
        for pid in inits(pool):
            os.kill(pid, signal.SIGKILL)

    def policy(sandbox: rls.Sandbox, task: rls.Task) -> str:
        nonlocal attempts
        attempts += 1
        if attempts > 1 or when == "grade":
            sandbox.run("touch done")
        if attempts == 1:
            if when == "command":
                with sandbox.popen("echo begun; sleep 60") as process:
                    next(iter(process))
                    kill()
                    process.wait()
            else:
                kill()
            if when == "file":
                sandbox.read_file("/etc/passwd")
        return "over"

    report = pool.run_rollouts([task], policy, retries=1)
    assert report.coverage == 1.0, report.failures()
    assert report.mean_reward == 1.0
    assert attempts == 2
    assert pool.stats().died_claimed == 1


class Suspicious:
    """Verification that finds something while it is told to."""

    def __init__(self) -> None:
        self.finds = 0

    @rls.hookimpl
    def rlsandbox_verify(self, inspector: Inspector) -> list[Residue]:
        if self.finds:
            self.finds -= 1
            return [Residue("smell", "/work", "something was here")]
        return []


def test_residue_is_quarantined_recorded_and_replaced(make: Callable[..., rls.Pool], tmp_path: Path) -> None:
    plugin = Suspicious()
    pool = make(size=1, plugins=[plugin])
    with pool.claim(TASK, timeout=LONG) as sandbox:
        first = sandbox.id
        plugin.finds = 1
    with pool.claim(TASK, timeout=LONG) as sandbox:
        assert sandbox.id != first
    stats = pool.stats()
    assert stats.quarantined == 1
    assert "smell /work" in stats.residue[0]
    notes = [note for note in pool.report().notes if note.kind == "quarantined"]
    assert len(notes) == 1
    assert "smell /work" in notes[0].cause


# -- snapshots ----------------------------------------------------------------------------------------


def test_forks_see_the_snapshot_and_nobody_elses_writes(make: Callable[..., rls.Pool]) -> None:
    pool = make(size=4)
    with pool.claim(TASK, timeout=LONG) as parent:
        parent.run("echo state > s")
        snapshot = parent.snapshot(name="mine")
        parent.run("echo later > s")
        with snapshot.fork(3, timeout=LONG) as kids:
            for i, kid in enumerate(kids):
                kid.run(f"echo {i} >> s")
            assert [k.run("cat s b.txt").stdout for k in kids] == [f"state\n{i}\nprimed\n" for i in range(3)]
        assert parent.run("cat s").stdout == "later\n"
    assert [s.id for s in pool.snapshots()] == ["mine"]
    with pool.claim(snapshot, timeout=LONG) as again:
        assert again.run("cat s").stdout == "state\n"
    snapshot.delete()
    assert pool.snapshots() == []
    with pytest.raises(ConfigError, match="deleted"):
        pool.claim(snapshot, timeout=LONG)
    with pool.claim(TASK, timeout=LONG) as sandbox:
        assert sandbox.run("ls").stdout.split() == ["a.txt", "b.txt"]
    eventually(lambda: pool.stats().layers == 1)


def test_a_fork_gives_all_or_none(make: Callable[..., rls.Pool]) -> None:
    pool = make(size=3)
    with pool.claim(TASK, timeout=LONG) as parent:
        snapshot = parent.snapshot()
        with pytest.raises(ConfigError, match="ceiling is 3"):
            snapshot.fork(4)
        with pytest.raises(ClaimTimeoutError):
            snapshot.fork(3, timeout=0.5)
        assert pool.stats().claimed == 1
        with snapshot.fork(2, timeout=LONG) as kids:
            assert len(kids) == 2


def test_a_snapshot_of_running_processes_is_refused(make: Callable[..., rls.Pool]) -> None:
    pool = make(size=1)
    with pool.claim(TASK, timeout=LONG) as sandbox:
        process = sandbox.popen("sleep 100")
        with pytest.raises(ProcessesRunningError):
            sandbox.snapshot()
        assert process.poll() is None
        sandbox.snapshot(kill=True).delete()
        assert process.wait(timeout=10).signal == 9


def test_hibernation_gives_the_place_up_and_comes_back(make: Callable[..., rls.Pool]) -> None:
    pool = make(size=1)
    sandbox = pool.claim(TASK, timeout=LONG)
    sandbox.run("echo mine > m")
    sandbox.hibernate()
    with pytest.raises(SandboxStateError, match="hibernated"):
        sandbox.run("true")
    with pool.claim(TASK, timeout=LONG) as other:
        assert other.run("ls").stdout.split() == ["a.txt", "b.txt"]
        with pytest.raises(ClaimTimeoutError):
            sandbox.restore(timeout=0.2)
    sandbox.restore(timeout=LONG)
    assert sandbox.run("cat m").stdout == "mine\n"
    assert pool.metrics.ttfc.summary().n == 2, "a restore adds none"
    sandbox.release()
    asleep = pool.claim(TASK, timeout=LONG)
    asleep.hibernate()
    asleep.release()
    eventually(lambda: pool.stats().layers == 1)
    assert pool.snapshots() == []


# -- the async half -----------------------------------------------------------------------------------


async def test_async_pool_with_and_without_blocks(tmp_path: Path) -> None:
    pool = rls.AsyncPool(size=2, config=False, ledger=tmp_path)
    assert "not started" in repr(pool)
    sandbox = await pool.claim(TASK, timeout=LONG)
    async with pool.claim(TASK, timeout=LONG) as other:
        results = await asyncio.gather(sandbox.run("cat a.txt"), other.run("cat b.txt"))
        assert [r.stdout for r in results] == ["hello\n", "primed\n"]
    await sandbox.release()
    await pool.close()
    await pool.close()
    with pytest.raises(PoolClosedError):
        await pool.claim(TASK)


async def test_a_claim_cancelled_at_any_moment_leaks_nothing(tmp_path: Path) -> None:
    async with rls.AsyncPool(size=2, config=False, ledger=tmp_path) as pool:
        await pool.wait_ready(timeout=LONG)
        for step in range(40):
            task = asyncio.ensure_future(pool._claim(TASK, timeout=LONG))
            for _ in range(step):
                await asyncio.sleep(0)
            task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await (await task).release()
        await pool.driver.until(lambda: pool.stats().ready == 2, 30)
        stats = pool.stats()
        assert (stats.claimed, stats.waiting, stats.ready) == (0, 0, 2)
        async with pool.claim(TASK, timeout=LONG) as sandbox:
            assert (await sandbox.run("ls")).stdout.split() == ["a.txt", "b.txt"]


# -- being made, copied, closed -----------------------------------------------------------------------


def test_what_is_wrong_is_said_before_anything_starts(tmp_path: Path) -> None:
    def refused(match: str, **how: Any) -> None:
        with pytest.raises(ConfigError, match=match):
            rls.Pool(**{"config": False, "ledger": tmp_path, **how})

    refused("unknown backend 'locol': did you mean 'local'", backend="locol")
    refused("size", size=-1)
    refused("MiB", size=10_000, spec=rls.Spec(memory="1TiB"))
    refused("max_size", size=4, max_size=2)
    refused("when_empty", when_empty="explode")
    refused("no plugin is called", block=["gti"])
    refused("Simulated: unknown option", backend="simulated", profile=None, config=_toml(tmp_path))
    assert list(tmp_path.glob("*.db")) == []
    assert not [t for t in threading.enumerate() if t.name == "rlsandbox-pool"]


def _toml(tmp_path: Path) -> Path:
    path = tmp_path / "rlsandbox.toml"
    path.write_text('[pool.backend]\nname = "simulated"\nnodez = 3\n')
    return path


def test_a_pool_copies_to_itself_and_is_never_pickled(make: Callable[..., rls.Pool]) -> None:
    pool = make()
    assert copy.deepcopy({"pool": pool})["pool"] is pool
    assert copy.copy(pool) is pool
    with pytest.raises(TypeError, match=r"Pool\.connect"):
        pickle.dumps(pool)


def test_closing_twice_after_an_exception_and_with_sandboxes_out(make: Callable[..., rls.Pool]) -> None:
    pool = make()

    def broken() -> None:
        with pool:
            pool.claim(TASK, timeout=LONG)
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        broken()
    pool.close()
    with pytest.raises(PoolClosedError, match="the pool is closed"):
        pool.claim(TASK)
    assert repr(pool).endswith("closed>")


def run_python(code: str, *, wait: float = 60, **how: Any) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(code)],
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, **how,
    )  # fmt: skip


def finished(process: subprocess.Popen[str]) -> tuple[int, str, str]:
    out, err = process.communicate(timeout=90)
    return process.returncode, out, err


START = """
    import rlsandbox as rls, os, sys, time, signal, threading
    pool = rls.Pool(size=2, config=False, ledger={ledger!r})
    pool.wait_ready(timeout=60)
    sandbox = pool.claim(rls.Task(id="t"), timeout=60)
    hub = [c for t in os.listdir("/proc/self/task") for c in open(f"/proc/self/task/{{t}}/children").read().split()]
    print("ready", *hub, flush=True)
"""


def gone(pid: str) -> bool:
    try:
        return "State:\tZ" in Path(f"/proc/{pid}/status").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return True


@pytest.mark.parametrize("how", ["exit", "sys.exit", "exception", "SIGTERM", "SIGINT", "SIGKILL", "os._exit"])
def test_nothing_is_left_however_the_process_ends(tmp_path: Path, how: str) -> None:
    ends = {
        "exit": "",
        "sys.exit": "sys.exit(3)",
        "exception": "1 / 0",
        "SIGTERM": "time.sleep(60)",
        "SIGINT": "time.sleep(60)",
        "SIGKILL": "time.sleep(60)",
        "os._exit": "os._exit(4)",
    }
    process = run_python(textwrap.dedent(START).format(ledger=str(tmp_path)) + ends[how])
    assert process.stdout is not None
    hub = process.stdout.readline().split()[1:]
    assert hub
    if how.startswith("SIG"):
        process.send_signal(getattr(signal, how))
    code, _, err = finished(process)
    expected = {"exit": 0, "sys.exit": 3, "exception": 1, "os._exit": 4}
    if how == "SIGINT":  # KeyboardInterrupt: which status that gives is Python's business
        assert code != 0
    else:
        assert code == expected.get(how, -getattr(signal, how, 0)), err
    eventually(lambda: all(gone(pid) for pid in hub))
    if how in ("exit", "sys.exit", "SIGTERM"):
        assert "Traceback" not in err


def test_a_signal_handler_of_the_users_own_is_left_alone(tmp_path: Path) -> None:
    code = textwrap.dedent(
        """
        import signal, sys
        signal.signal(signal.SIGTERM, lambda *_: (print("saved", flush=True), sys.exit(5)))
        """
    )
    process = run_python(code + textwrap.dedent(START).format(ledger=str(tmp_path)) + "time.sleep(60)")
    assert process.stdout is not None
    hub = process.stdout.readline().split()[1:]
    process.send_signal(signal.SIGTERM)
    code_, out, err = finished(process)
    assert (code_, out) == (5, "saved\n"), err
    eventually(lambda: all(gone(pid) for pid in hub))


def test_a_forked_child_is_told_at_once_and_harms_nothing(tmp_path: Path) -> None:
    process = run_python(
        textwrap.dedent(START).format(ledger=str(tmp_path))
        + textwrap.dedent(
            """
            child = os.fork()
            if child == 0:
                try:
                    for use in (lambda: pool.claim(rls.Task(id="t")), pool.stats, lambda: pool.wait_ready(1),
                                lambda: pool.expect([]), lambda: sandbox.run("true")):
                        try:
                            use()
                            print("it worked", flush=True)
                        except rls.errors.PoolClosedError as error:
                            print(error.kind, flush=True)
                    pool.close()
                finally:
                    os._exit(0)
            os.waitpid(child, 0)
            print(sandbox.run("echo alive").stdout.strip(), flush=True)
            """
        )
    )
    code, out, err = finished(process)
    assert code == 0, err
    assert out.split()[-6:] == ["forked"] * 5 + ["alive"]


def test_a_pool_made_in_a_thread_that_ends_lives_on(tmp_path: Path) -> None:
    made: list[rls.Pool] = []
    thread = threading.Thread(target=lambda: made.append(rls.Pool(size=1, config=False, ledger=tmp_path)))
    thread.start()
    thread.join()
    time.sleep(0.2)
    with made[0] as pool, pool.claim(TASK, timeout=LONG) as sandbox:
        assert sandbox.run("cat a.txt").ok


def test_importing_starts_nothing(tmp_path: Path) -> None:
    code = """
        import sys, threading, json
        opened = []
        sys.addaudithook(lambda name, args: opened.append(str(args[0]))
                         if name in ("open", "socket.connect", "subprocess.Popen", "os.fork") else None)
        before = threading.active_count()
        import rlsandbox
        files = [o for o in opened if not o.endswith((".py", ".pyc", ".so")) and "__pycache__" not in o]
        print(json.dumps([threading.active_count() - before, "rlsandbox_plugins" in sys.modules,
                          "rlsandbox.backends.local" in sys.modules,
                          [f for f in files if "rlsandbox" in f and "site-packages" not in f]]))
    """
    code_, out, err = finished(
        run_python(code, cwd=str(tmp_path), env={**os.environ, "PYTHONDONTWRITEBYTECODE": "1"})
    )
    assert code_ == 0, err
    assert json.loads(out) == [0, False, False, []]


# -- waits that nothing could end ---------------------------------------------------------------------


def test_a_fork_that_can_never_be_met_says_so_at_once(make: Callable[..., rls.Pool]) -> None:
    pool = make(size=2)
    with pool.claim(rls.Task(id="f"), timeout=LONG) as sandbox:
        snapshot = sandbox.snapshot(kill=True)
        with pytest.raises(ConfigError, match=r"fork\(3\) can never be met: the pool's ceiling is 2 "):
            snapshot.fork(3)
        with pytest.raises(
            ConfigError, match=r"fork\(2\) can never be met.*snapshot was taken of.*release it"
        ):
            snapshot.fork(2)
        with pytest.raises(ClaimTimeoutError, match="the ceiling of 2 is reached"):
            snapshot.fork(2, timeout=0.5)
        with snapshot.fork(1) as (copy,):
            assert copy.run("true").ok
    with snapshot.fork(2) as copies:  # its sandbox was given back: now it can be met
        assert len(copies) == 2
    eventually(lambda: pool.stats().ready == 2)


def test_a_fork_waits_for_those_who_may_still_give_back(make: Callable[..., rls.Pool]) -> None:
    pool = make(size=2)
    other = pool.claim(rls.Task(id="other"), timeout=LONG)
    with pool.claim(rls.Task(id="f"), timeout=LONG) as sandbox:
        snapshot = sandbox.snapshot(kill=True)
    holder = pool.claim(rls.Task(id="holder"), timeout=LONG)
    threading.Timer(0.5, lambda: (other.release(), holder.release())).start()
    with snapshot.fork(2) as copies:
        assert len(copies) == 2


def test_rollouts_that_fork_do_not_wait_for_each_other_for_ever(make: Callable[..., rls.Pool]) -> None:
    """Each holds one of four, all want two more: one after the other gives way, and comes again."""
    pool = make(size=4)
    meet = threading.Barrier(4)

    def policy(sandbox: rls.Sandbox, task: rls.Task) -> str:
        snapshot = sandbox.snapshot(kill=True)
        if sandbox.rollout is not None and sandbox.rollout.attempt == 1:
            meet.wait(LONG)
        with snapshot.fork(2) as copies:
            return str(len(copies))

    tasks = [rls.Task(id=f"t{i}") for i in range(4)]
    report = pool.run_rollouts(tasks, policy, retries=3, concurrency=4, progress=False)
    assert [record.value for record in report.records] == ["2"] * 4, [
        (r.attempts, r.failure) for r in report.records
    ]
    assert max(record.attempts for record in report.records) > 1, "somebody had to give way"


def test_graders_in_fresh_sandboxes_do_not_wait_for_each_other(make: Callable[..., rls.Pool]) -> None:
    pool = make(size=2)
    grader = rls.Grader(command="cat mine big | wc -c; ls; test ! -e /tmp/left", fresh=True)
    tasks = [rls.Task(id=f"t{i}", workdir="/work", files={"given": "x"}, grader=grader) for i in range(2)]
    meet = threading.Barrier(2)

    def policy(sandbox: rls.Sandbox, task: rls.Task) -> str:
        sandbox.run(
            "printf mine >mine; head -c 20000000 /dev/urandom >big; echo x >/tmp/left; rm given"
        ).check()
        meet.wait(LONG)
        outcome = sandbox.grade()
        assert outcome.result is not None
        return outcome.result.stdout

    report = pool.run_rollouts(tasks, policy, concurrency=2, progress=False, retries=0)
    assert [record.value for record in report.records] == ["20000004\nbig\nmine\n"] * 2
    assert [record.reward for record in report.records] == [1.0, 1.0]
    eventually(lambda: pool.stats().ready == 2)
    assert pool.stats().quarantined == 0
