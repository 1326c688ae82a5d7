"""What a process that runs rollouts tells the owner, whoever is cancelled meanwhile."""

from __future__ import annotations

import asyncio
import logging
from typing import Any

import pytest
from rlsandbox_verl import owner as module
from rlsandbox_verl.numbers import Ended
from rlsandbox_verl.owner import Job
from rlsandbox_verl.settings import Settings

from rlsandbox.errors import ProvisionError


def end(name: str) -> Ended:
    return Ended(name, "g", "b", 0.0, 1.0, completed=True, graded=False)


class Owner:
    """Takes its time for each call; *errors* are what the next calls end with."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, *errors: Exception) -> None:
        self.told: list[list[Ended]] = []
        self.errors = list(errors)
        self.go = asyncio.Event()
        monkeypatch.setattr(module, "ask", self.ask)

    async def ask(self, owner: Any, what: str, *ends: Ended) -> None:
        assert what == "ended"
        await self.go.wait()
        if self.errors:
            raise self.errors.pop(0)
        self.told.append(list(ends))


def a_job() -> Job:
    job = Job(Settings())
    job._owner = object()
    return job


async def turns() -> None:
    for _ in range(5):
        await asyncio.sleep(0)


async def test_siblings_are_told_together_whoever_is_cancelled(monkeypatch: pytest.MonkeyPatch) -> None:
    owner, job = Owner(monkeypatch), a_job()
    first = [asyncio.create_task(job.ended(end(name))) for name in "ab"]
    await turns()
    second = [asyncio.create_task(job.ended(end(name))) for name in "cd"]
    await turns()
    first[0].cancel()
    second[0].cancel()
    await turns()
    assert not first[1].done()
    owner.go.set()
    await asyncio.gather(first[1], second[1])
    assert owner.told == [[end("a"), end("b")], [end("c"), end("d")]]


async def test_what_the_owner_could_not_be_told_is_said(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    owner, job = Owner(monkeypatch, ProvisionError("no room")), a_job()
    owner.go.set()
    with caplog.at_level(logging.WARNING):
        await asyncio.gather(job.ended(end("a")), job.ended(end("b")))
    assert "the end of 2 rollouts is in the ledger only: " in caplog.text
    await job.ended(end("c"))
    assert owner.told == [[end("c")]]


async def test_an_error_of_somebody_else_comes_to_all_that_it_concerns(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    owner, job = Owner(monkeypatch, ValueError("a bug")), a_job()
    owner.go.set()
    ends = await asyncio.gather(*(job.ended(end(name)) for name in "ab"), return_exceptions=True)
    assert [type(error) for error in ends] == [ValueError, ValueError]
    await job.ended(end("c"))
    assert owner.told == [[end("c")]]


async def test_leaving_waits_for_what_is_being_told(monkeypatch: pytest.MonkeyPatch) -> None:
    owner, job = Owner(monkeypatch), a_job()
    carrier = asyncio.create_task(job.ended(end("a")))
    await turns()
    carrier.cancel()
    leaving = asyncio.create_task(job.close())
    await turns()
    assert not leaving.done()
    owner.go.set()
    await leaving
    assert owner.told == [[end("a")]]
