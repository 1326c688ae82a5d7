"""Credentials rotate: issued before hand-over, revoked at release, and their values nowhere afterwards."""

from __future__ import annotations

import json
import logging
import os
import secrets
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

import rlsandbox as rls
from rlsandbox.cli import main
from rlsandbox.hooks import Credentials, Rollout, hookimpl


class Issuer:
    """Gives each attempt its own value, and remembers what it gave and took back."""

    def __init__(self, *, refuse: bool = False) -> None:
        self.issued: list[Credentials] = []
        self.revoked: list[str] = []
        self.refuse = refuse

    @hookimpl
    def rlsandbox_issue_credentials(self, rollout: Rollout) -> Credentials:
        number = len(self.issued)
        made = Credentials(
            id=f"lease-{number}",
            env={"ACME_TOKEN": f"acme-env-secret-{number}"},
            files={"/run/acme/key": f"acme-file-secret-{number}\n".encode()},
        )
        self.issued.append(made)
        return made

    @hookimpl
    def rlsandbox_revoke_credentials(self, credentials: Credentials) -> None:
        if self.refuse:
            raise RuntimeError(f"the service is down, {credentials.env['ACME_TOKEN']} stays valid")
        self.revoked.append(credentials.id)


TASK = rls.Task(id="t")
LOG = logging.getLogger("rlsandbox.test")
SPREAD = (
    "echo $ACME_TOKEN > /tmp/.t; cp /run/acme/key /var/tmp/; export X=$ACME_TOKEN;"
    " (exec -a $ACME_TOKEN sleep 600 >/dev/null 2>&1 &) 2>/dev/null;"
    " sleep 601 >/dev/null 2>&1 & echo $ACME_TOKEN"
)
LOOK = (
    "env; cat /proc/[0-9]*/environ /proc/[0-9]*/cmdline 2>/dev/null | tr '\\0' '\\n';"
    " grep -rs 'acme-[a-z]*-secret' /tmp /var /run /etc /root /home /dev/shm /opt /srv /workspace;"
    " find / -xdev -name '*acme*'"
)


def test_each_episode_has_its_own_and_never_an_earlier_ones(tmp_path: Path) -> None:
    issuer = Issuer()
    with rls.Pool("local", size=1, plugins=[issuer], ledger=tmp_path / "l.db", config=False) as pool:
        for number in range(3):
            with pool.claim(TASK) as sandbox:
                assert sandbox.run("echo $ACME_TOKEN").stdout.strip() == f"acme-env-secret-{number}"
                assert sandbox.read_text("/run/acme/key") == f"acme-file-secret-{number}\n"
                assert sandbox.run("stat -c %a /run/acme/key").stdout.strip() == "600"
                seen = sandbox.run(LOOK).stdout
                for earlier in range(number):
                    assert f"secret-{earlier}" not in seen
                assert sandbox.run(SPREAD).ok
        assert pool.stats().recycled >= 2, "the same sandbox served all three: else this shows nothing"
    assert [c.id for c in issuer.issued] == issuer.revoked == ["lease-0", "lease-1", "lease-2"]


def test_a_revoke_that_fails_is_on_record_without_the_value(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    issuer = Issuer(refuse=True)
    ledger = tmp_path / "l.db"
    with caplog.at_level(logging.DEBUG, logger="rlsandbox"):
        with rls.Pool("local", size=1, plugins=[issuer], ledger=ledger, config=False) as pool:

            def policy(sandbox: rls.Sandbox, task: rls.Task) -> Any:
                said = sandbox.run(SPREAD).stdout
                LOG.info("it said %s", said)
                return {"said": said}

            report = pool.run_rollouts([TASK, rls.Task(id="u")], policy, progress=False)
        assert len(report.records) == 2
    written = b"".join(p.read_bytes() for p in tmp_path.glob("l.db*"))
    assert b"could not be revoked" in written
    for credentials in issuer.issued:
        for value in (*credentials.env.values(), *(v.decode().strip() for v in credentials.files.values())):
            assert value.encode() not in written, "a value lies in the ledger"
            assert value not in caplog.text, "a value was logged"
            assert value not in json.dumps([str(r) for r in report.records])
    assert "could not be revoked" in caplog.text


def test_an_issuer_that_fails_fails_the_attempt(tmp_path: Path) -> None:
    class Broken:
        @hookimpl
        def rlsandbox_issue_credentials(self, rollout: Rollout) -> Credentials:
            raise RuntimeError("no lease to be had")

    with rls.Pool("local", size=1, plugins=[Broken()], ledger=tmp_path / "l.db", config=False) as pool:
        report = pool.run_rollouts([TASK], lambda sandbox, task: 1, retries=0, progress=False)
    [record] = report.records
    assert record.status == "failed"
    assert record.failure is not None
    assert record.failure.infrastructure
    assert "no lease to be had" in record.failure.cause


def test_reset_policies_may_run_a_program_and_what_it_leaves_is_found(tmp_path: Path) -> None:
    said: list[str] = []

    class Careful:
        @hookimpl
        def rlsandbox_reset(self, resetter: rls.hooks.Resetter) -> None:
            said.append(resetter.run_trusted(["sh", "-c", "ls /tmp; echo done"]).stdout)

    with rls.Pool("local", size=1, plugins=[Careful()], ledger=tmp_path / "l.db", config=False) as pool:
        for _ in range(2):
            with pool.claim(TASK) as sandbox:
                sandbox.run("touch /tmp/x")
        assert pool.stats().quarantined == 0
    assert set(said) == {"done\n"}, "the program runs in the baseline view"

    class Careless:
        @hookimpl
        def rlsandbox_reset(self, resetter: rls.hooks.Resetter) -> None:
            resetter.run_trusted(["sh", "-c", "touch /tmp/left-by-a-policy"])

    with rls.Pool("local", size=1, plugins=[Careless()], ledger=tmp_path / "m.db", config=False) as pool:
        with pool.claim(TASK) as sandbox:
            sandbox.run("true")
        with pool.claim(TASK, timeout=60):
            pass
        assert pool.stats().quarantined >= 1


def test_a_snapshot_and_its_forks_hold_none_and_the_holder_keeps_its_own(tmp_path: Path) -> None:
    issuer = Issuer()
    with rls.Pool("local", size=2, plugins=[issuer], ledger=tmp_path / "l.db", config=False) as pool:
        sandbox = pool.claim(TASK)
        sandbox.run("echo work > /tmp/work").check()
        snapshot = sandbox.snapshot()
        assert sandbox.read_text("/run/acme/key") == "acme-file-secret-0\n"
        with snapshot.fork(1, timeout=60) as (fork,):
            assert fork.read_text("/tmp/work") == "work\n"
            assert fork.read_text("/run/acme/key") == "acme-file-secret-1\n"  # its own
            assert "acme-file-secret-0" not in fork.run(LOOK).stdout
        with sandbox.popen("sleep 600"), pytest.raises(rls.errors.ProcessesRunningError):
            sandbox.snapshot()
        assert sandbox.read_text("/run/acme/key") == "acme-file-secret-0\n"
        sandbox.hibernate()
        sandbox.restore(timeout=60)
        assert sandbox.read_text("/run/acme/key") == "acme-file-secret-0\n"
        assert sandbox.read_text("/tmp/work") == "work\n"
        sandbox.release()
        assert issuer.revoked == ["lease-1", "lease-0"]


async def test_a_plugin_that_issues_something_else_is_named(tmp_path: Path) -> None:
    class Wrong:
        @hookimpl
        def rlsandbox_issue_credentials(self, rollout: Rollout) -> Any:
            return {"TOKEN": "x"}

    async with rls.AsyncPool(size=1, ledger=tmp_path, plugins=[Wrong()]) as pool:
        with pytest.raises(rls.errors.SandboxError, match=r"gave a dict, not rlsandbox\.hooks") as caught:
            await pool.claim(TASK)
        assert (caught.value.kind, caught.value.retryable) == ("credentials", False)


def test_a_value_is_nowhere_on_the_host_after_a_run_that_failed_in_many_ways(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, capsys: pytest.CaptureFixture[str]
) -> None:
    """Ledger, exports, reports, plots, metrics, logs of every level, and the processes that are not the episode's."""
    env, file = f"env-{secrets.token_hex(12)}", f"file-{secrets.token_hex(12)}"

    class Mine:
        @rls.hookimpl
        def rlsandbox_issue_credentials(self) -> rls.hooks.Credentials:
            return rls.hooks.Credentials(id="lease", env={"TOKEN": env}, files={"/run/token": file})

        @rls.hookimpl
        def rlsandbox_revoke_credentials(self, credentials: rls.hooks.Credentials) -> None:
            raise RuntimeError(f"cannot revoke {credentials.env['TOKEN']}")

    hosts: list[str] = []

    def policy(sandbox: rls.Sandbox, task: rls.Task) -> Any:
        match task.id:
            case "raises":
                raise RuntimeError(f"the model saw {sandbox.run('cat /run/token; echo $TOKEN').text}")
            case "returns":
                return {"seen": [sandbox.run("echo $TOKEN").stdout, sandbox.read_text("/run/token")]}
            case "fails":
                sandbox.run("echo $TOKEN >&2; exit 3", check=True)
            case "starts nothing":
                sandbox.run(["no-such-program", env], check=True)
            case "reads nothing":
                sandbox.read_file(f"/nowhere/{env}")
            case "times out":
                with sandbox.popen(f"sleep 300 # {env}"):
                    hosts.append(others())
                sandbox.run(f"sleep 300 # {env}", timeout=0.2, check=True)
        return None

    names = ["raises", "returns", "fails", "starts nothing", "reads nothing", "times out"]
    tasks = [rls.Task(id=name) for name in names]
    grader = rls.Grader(command="cat /run/token > /r; echo $TOKEN >> /r", reward="file:/r")
    tasks.append(rls.Task(id="nonsense", grader=grader))
    caplog.set_level(logging.DEBUG)
    with rls.Pool(size=2, config=False, run="r", ledger=tmp_path, plugins=[Mine()]) as pool:
        report = pool.run_rollouts(tasks, policy, retries=0)
        assert Counter(record.status for record in report.records) == {"failed": 6, "completed": 1}
        told = [repr(report.records), repr(report.failures()), json.dumps(report.to_dict(), default=str)]
        told += [json.dumps(pool.metrics.to_dict()), repr(pool.stats()), repr(pool)]
        hosts.append(others())
    assert any(
        "[redacted TOKEN]" in (record.failure.cause if record.failure else "") for record in report.records
    )
    for command in (("show", "--json"), ("show",), ("report",), ("export",), ("export", "--format", "csv")):
        assert main(["ledger", command[0], str(tmp_path / "r.db"), *command[1:]]) == 0
    told += [*capsys.readouterr(), caplog.text]
    told += [path.read_bytes().decode("latin-1") for path in tmp_path.rglob("*") if path.is_file()]
    assert len(hosts) == 2
    for text in (*told, *hosts):
        assert env not in text
        assert file not in text


def others() -> str:
    """Command lines and environments of this process's descendants that are no episode's."""
    own = os.readlink("/proc/self/ns/pid")
    found = []
    for process in Path("/proc").glob("[0-9]*"):
        try:
            if os.readlink(process / "ns/pid") == own:
                found += [(process / name).read_bytes().decode("latin-1") for name in ("cmdline", "environ")]
        except OSError:
            continue
    assert any("rlsandbox" in text for text in found), "neither hub nor keeper is seen"
    return "\n".join(found)
