"""A plugin package in one file: undo and check what our image leaves, name its failures, lend credentials.

In a package of its own it is found by its entry point, and ``Pool(block=["acme"])`` leaves it out:

    [project.entry-points.rlsandbox]
    acme = "acme_rl.plugin"
"""

import sys
from collections.abc import Iterable

import rlsandbox as rls
from rlsandbox.hooks import Credentials, Inspector, Resetter, Residue, hookimpl

lent: list[str] = []
revoked: list[str] = []


@hookimpl
def rlsandbox_reset(resetter: Resetter) -> None:
    resetter.remove("/var/cache/acme")


@hookimpl
def rlsandbox_verify(inspector: Inspector) -> Iterable[Residue]:
    # Reads from outside: a command run in the sandbox would trust what the episode left there.
    if inspector.read("/etc/acme.conf") != inspector.baseline("/etc/acme.conf"):
        yield Residue("acme_config", "/etc/acme.conf")


@hookimpl
def rlsandbox_classify_failure(error: BaseException, phase: str) -> rls.Failure | None:
    if "acme quota" in str(error):
        return rls.Failure(
            kind="acme_quota", phase=phase, cause=str(error), retryable=True, infrastructure=True
        )
    return None


@hookimpl
def rlsandbox_issue_credentials(rollout: rls.Rollout) -> Credentials:
    lent.append(f"lease-{rollout.index}-{rollout.attempt}")
    return Credentials(id=lent[-1], env={"ACME_TOKEN": f"secret of {lent[-1]}"})


@hookimpl
def rlsandbox_revoke_credentials(credentials: Credentials) -> None:
    revoked.append(credentials.id)


def policy(sandbox: rls.Sandbox, task: rls.Task) -> str:
    assert sandbox.rollout is not None
    print(sandbox.run('echo "the episode holds $ACME_TOKEN"').stdout, end="")
    sandbox.run("mkdir -p /var/cache/acme && date > /var/cache/acme/x; echo changed > /etc/acme.conf")
    if sandbox.rollout.index == 1 and sandbox.rollout.attempt == 1:
        raise RuntimeError("acme quota exceeded")  # infrastructure, says the classifier: tried again
    return "done"


def main() -> None:
    with rls.Pool(size=2, plugins=[sys.modules[__name__]]) as pool:
        report = pool.run_rollouts(rls.load_tasks("demo", limit=1), policy, group_size=3)
        for record in report.records:
            print(record.task_id, record.index, record.status, "attempts:", record.attempts)
        print("coverage", report.coverage, "residue of", pool.stats().quarantined, "sandboxes")
    print("lent", sorted(lent), "revoked", sorted(revoked))
    assert sorted(lent) == sorted(revoked)


if __name__ == "__main__":
    main()
