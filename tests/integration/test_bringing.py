"""Layers that are brought from one sandbox to another: the other one is in use meanwhile, dies, or fails. Real sandboxes."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Iterator
from pathlib import Path

import pytest

import rlsandbox as rls
from rlsandbox.backends import Local, Member
from rlsandbox.errors import SandboxDiedError, SandboxError
from rlsandbox.keeper.client import KeeperClient
from rlsandbox.keeper.connection import KeeperFailure


class NotCarried(Local):
    """A layer in one sandbox may be had in all, but the backend does not see to that."""

    async def give_layer(self, layer: str, member: Member) -> bool:
        return False


def tasks(count: int, setup: str = "head -c 3000000 /dev/urandom > /tmp/big") -> list[rls.Task]:
    return [rls.Task(id=f"t{i}", setup=f"{setup}; echo {i} > /tmp/which") for i in range(count)]


@pytest.fixture
def pool(tmp_path: Path) -> Iterator[rls.Pool]:
    with rls.Pool(NotCarried(), size=2, max_size=6, ledger=tmp_path / "l.db", config=False) as made:
        yield made


def test_from_sandboxes_that_are_handed_out_and_reset_meanwhile(pool: rls.Pool) -> None:
    def policy(sandbox: rls.Sandbox, task: rls.Task) -> str:
        return sandbox.run("cat /tmp/which; wc -c < /tmp/big").stdout

    report = pool.run_rollouts(tasks(12), policy, group_size=4, retries=0)
    assert [(r.status, r.value) for r in report.records if r.value != f"{r.task_id[1:]}\n3000000\n"] == []
    assert len(report.records) == 48 and pool.stats().reset_failed == 0


@pytest.mark.parametrize(
    "fault", [KeeperFailure("read the layer: Input/output error"), SandboxDiedError("it died")]
)
def test_one_that_fails_at_it_is_not_the_only_one(
    pool: rls.Pool, monkeypatch: pytest.MonkeyPatch, fault: SandboxError
) -> None:
    sent = KeeperClient.export
    asked: list[str] = []

    async def export(source: KeeperClient, layer: str | None = None) -> AsyncGenerator[bytes, None]:
        asked.append(source.member)
        async for piece in sent(source, layer):
            yield piece
            if source.member == asked[0]:
                raise fault

    (task,) = tasks(1)
    with pool.claim(task), pool.claim(task):  # two have it
        monkeypatch.setattr(KeeperClient, "export", export)
        asked.clear()
        with pool.claim(task) as third:
            assert third.run("cat /tmp/which").stdout == "0\n"
            assert len(asked) > 1 and third.id not in asked
    assert pool.stats().reset_failed == 0


def test_one_failure_is_no_verdict_on_the_task(pool: rls.Pool, monkeypatch: pytest.MonkeyPatch) -> None:
    reset, failed = KeeperClient.reset_and_look, []

    async def once(client: KeeperClient, layer: str = "") -> object:
        if layer and not failed:
            failed.append(client.member)
            raise KeeperFailure("mount the overlay: Cannot allocate memory", errno=12)
        return await reset(client, layer)

    (task,) = tasks(1)
    with pool.claim(task):
        monkeypatch.setattr(KeeperClient, "reset_and_look", once)
        with pool.claim(task) as other:
            assert other.run("cat /tmp/which").stdout == "0\n"
    assert failed and pool.stats().reset_failed == 1
