"""What a grader trusts is put back to the task's primed state, whatever snapshots were sealed meanwhile."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

import rlsandbox as rls
from rlsandbox.backends import Capabilities, Local, Member

RIGHT = "grep -q right answer.txt"
FAKE = "printf '#!/bin/sh\\nexit 0\\n' >/usr/bin/grep; chmod 755 /usr/bin/grep"
LONG = 120


def task(*, fresh: bool = False, setup: str = "echo theirs >/opt/setting") -> rls.Task:
    grader = rls.Grader(command=f"{RIGHT} && test $(cat /opt/setting) = theirs", fresh=fresh)
    return rls.Task(id="t", workdir="/w", files={"answer.txt": "wrong\n"}, setup=setup, grader=grader)


@pytest.fixture(params=["overlay", "userns", "disk"])
def pool(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[rls.Pool]:
    tmp_path.chmod(0o755)
    how = {"upper": str(tmp_path)} if request.param == "disk" else {"mode": request.param}
    with rls.Pool(Local(**how), size=2, config=False, ledger=tmp_path / "l.db") as made:
        yield made


def slept(sandbox: rls.Sandbox) -> None:
    sandbox.hibernate()
    sandbox.restore(timeout=LONG)


def many(sandbox: rls.Sandbox) -> None:
    """More than a stack of layers holds: they are made one."""
    for number in range(40):
        sandbox.write_file(f"/tmp/{number}", "x")
        sandbox.snapshot()


MEANWHILE = {
    "nothing": lambda sandbox: None,
    "a snapshot": lambda sandbox: sandbox.snapshot(kill=True),
    "two snapshots": lambda sandbox: (sandbox.snapshot(), sandbox.run("echo x >/tmp/x"), sandbox.snapshot()),
    "sleep": slept,
    "forty snapshots": many,
}


@pytest.mark.timeout(900)
@pytest.mark.parametrize("meanwhile", MEANWHILE)
def test_a_program_replaced_before_it_is_put_back(pool: rls.Pool, meanwhile: str) -> None:
    with pool.claim(task(), timeout=LONG) as sandbox:
        sandbox.run(FAKE).check()
        sandbox.run(
            "echo mine >/opt/setting; mkdir -p /usr/local/share/x; echo y >/usr/local/share/x/y"
        ).check()
        MEANWHILE[meanwhile](sandbox)
        sandbox.run("rm -r /usr/local/share/x").check()
        outcome = sandbox.grade()
        assert outcome.reward == 0.0
        assert {"/usr/bin/grep", "/opt/setting"} <= set(outcome.put_back)
        assert not any("share/x" in name for name in outcome.put_back), "what is gone was not put back"


@pytest.mark.timeout(900)
@pytest.mark.parametrize("fresh", [False, True])
@pytest.mark.parametrize("meanwhile", MEANWHILE)
def test_work_done_before_it_counts(pool: rls.Pool, meanwhile: str, fresh: bool) -> None:
    with pool.claim(task(fresh=fresh), timeout=LONG) as sandbox:
        sandbox.run("echo right >answer.txt; mkdir sub; echo x >sub/gone").check()
        MEANWHILE[meanwhile](sandbox)
        sandbox.run("rm -r sub; mkdir sub; echo new >sub/new").check()
        found = {change.name for change in sandbox.changes("/w")}
        assert {"/w/answer.txt", "/w/sub", "/w/sub/new"} <= found
        assert "/w/sub/gone" not in found
        assert sandbox.grade().reward == 1.0


def test_a_fork_is_graded_as_its_parent_would_be(pool: rls.Pool) -> None:
    with pool.claim(task(), timeout=LONG) as sandbox:
        sandbox.run(f"{FAKE}; rm -f /usr/bin/cat; echo wrong >answer.txt").check()
        with sandbox.snapshot(kill=True).fork(1, timeout=LONG) as (fork,):
            outcome = fork.grade()
            assert outcome.reward == 0.0
            assert {"/usr/bin/grep", "/usr/bin/cat"} <= set(outcome.put_back)
        sandbox.run("echo right >answer.txt").check()
        with sandbox.snapshot(kill=True).fork(1, timeout=LONG) as (fork,):
            assert fork.grade().reward == 1.0


def test_an_attempt_that_goes_on_from_a_checkpoint(pool: rls.Pool) -> None:
    def policy(sandbox: rls.Sandbox, task: rls.Task) -> None:
        assert sandbox.rollout is not None
        if sandbox.rollout.attempt == 1:
            sandbox.run(FAKE).check()
            sandbox.rollout.checkpoint({"step": 1})
            raise rls.errors.SandboxDiedError("as if its machine had gone")
        assert sandbox.rollout.state == {"step": 1}

    [record] = pool.run_rollouts([task()], policy, progress=False).records
    assert (record.status, record.attempts, record.reward) == ("completed", 2, 0.0)


class Apart(Local):
    """Places that share nothing: layers are brought from one to the other, all that lies below them in one."""

    async def capabilities(self) -> Capabilities:
        return replace(await super().capabilities(), shared_layers=False)

    async def give_layer(self, layer: str, member: Member) -> bool:
        return False


@pytest.mark.timeout(600)
@pytest.mark.parametrize("depth", [1, 2])
def test_a_fork_in_another_place_is_compared_with_the_primed_state_too(tmp_path: Path, depth: int) -> None:
    with (
        rls.Pool(Apart(), size=1, max_size=3, config=False, ledger=tmp_path / "l.db") as pool,
        pool.claim(task(), timeout=LONG) as sandbox,
    ):
        sandbox.run(FAKE + "; echo mine >/opt/setting").check()
        for _ in range(depth):
            snapshot = sandbox.snapshot()
        with snapshot.fork(1, timeout=LONG) as (wrong,):
            outcome = wrong.grade()
        assert outcome.reward == 0.0 and "/usr/bin/grep" in outcome.put_back
        sandbox.run("echo theirs >/opt/setting; echo right answer >answer.txt").check()
        with sandbox.snapshot().fork(1, timeout=LONG) as (right,):
            assert right.grade().reward == 1.0
