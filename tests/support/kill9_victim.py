"""A process that does rollouts until it is killed, and says what it has been promised: for test_kill9."""

from __future__ import annotations

import asyncio
import os
import random
import signal
from pathlib import Path
from typing import Any

from rlsandbox.pool import attempts
from rlsandbox.pool.rollouts import rollouts
from rlsandbox.results import Outcome
from rlsandbox.task import Grader, Task
from tests.support.fake_pool import FakePool, FakeSandbox
from tests.support.faulty_sqlite import faulty


def run(
    where: str, run_name: str, seed: int, said: str, die_at: int | None = None, batches: int | None = None
) -> None:
    """Batches of rollouts, until killed from outside, or by itself at its SQLite call number *die_at*."""
    attempts.BACKOFF_S = 0.001
    fd = os.open(said, os.O_WRONLY | os.O_CREAT | os.O_APPEND)

    def decide(number: int, what: str) -> str | None:
        if number == die_at:
            os.kill(os.getpid(), signal.SIGKILL)
        return None

    with faulty(decide) as faults:
        asyncio.run(_work(Path(where), run_name, random.Random(seed), fd, batches))
    os.write(fd, f"calls {len(faults.calls)}\n".encode())


async def _work(where: Path, run_name: str, rng: random.Random, fd: int, batches: int | None) -> None:
    def say(text: str) -> None:
        os.write(fd, (text + "\n").encode())

    async def policy(sandbox: Any, task: Task) -> Any:
        say(f"work {sandbox.rollout.id}")
        await sandbox.run("put x y")
        await asyncio.sleep(rng.random() * 0.002)
        if rng.random() < 0.2:
            await sandbox.rollout.checkpoint("state")
        if rng.random() < 0.2:
            await sandbox.run("die")
        if rng.random() < 0.1:
            raise ValueError("a bug of the policy")
        return "done"

    def grader(sandbox: FakeSandbox) -> Outcome:
        reward = rng.randrange(1000) / 1000
        return Outcome(reward, reward > 0.5)

    pool = FakePool(where, run=run_name)
    pool.grader = grader
    say("open")
    number = 0
    while batches is None or number < batches:
        tasks = [Task(id=f"t{i}", grader=Grader(command="true")) for i in range(4)]
        async for record in rollouts(pool, tasks, policy, group_size=2):
            say(f"record {record.id} {record.status} {record.reward}")
        say("batch")
        number += 1
    await pool.close()
