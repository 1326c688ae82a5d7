"""Evaluating an agent: an async pool, a session, output as it comes, a checkpoint, and four forks that race.

A rollout that infrastructure breaks starts again from its checkpoint: files *and* messages. Run it twice: the
second time ``resume`` finds everything done.
"""

import asyncio
import json
import sys
from collections.abc import Awaitable, Callable
from pathlib import Path

import rlsandbox as rls

BUILD = "#!/bin/sh\nfor step in compile link; do echo $step; done\nmkdir -p out && echo 0 > out/answer\n"
TRY = "#!/bin/sh\necho $(( $1 * $1 )) > out/answer\n"
CHECK = "grep -qx 9 out/answer"


def prepare(directory: Path) -> Path:
    """A repository to upload and a task file, as they would lie on your disk."""
    repository = directory / "repo"
    (repository / "venv" / "bin").mkdir(parents=True, exist_ok=True)
    (repository / "venv" / "bin" / "activate").write_text("export ACTIVE=yes\n")
    for name, text in (("build", BUILD), ("try", TRY)):
        (repository / name).write_text(text)
        (repository / name).chmod(0o755)
    tasks = directory / "tasks.jsonl"
    rows = [
        {
            "id": f"answer-{i}",
            "prompt": "Find the answer.",
            "workdir": "/workspace",
            "grader": {"command": CHECK},
        }
        for i in range(4)
    ]
    tasks.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return tasks


def make_policy(repository: Path) -> Callable[[rls.AsyncSandbox, rls.Task], Awaitable[str]]:
    async def policy(sandbox: rls.AsyncSandbox, task: rls.Task) -> str:
        rollout = sandbox.rollout
        assert rollout is not None
        messages: list[str] = rollout.state or [task.prompt]
        await sandbox.upload(repository, "/workspace", exclude=[".git/objects/pack"])
        async with sandbox.session() as shell:  # keeps directory and variables
            await shell.run("cd /workspace && . venv/bin/activate", timeout=30)
            assert (await shell.run("echo $ACTIVE")).stdout == "yes\n"
        process = await sandbox.popen(["./build"], cwd="/workspace")
        async for stream, chunk in process:
            messages.append(f"{stream}: {chunk.decode()}")
        if not (await process.wait()).ok:
            return "the build failed"
        snapshot = await rollout.checkpoint(messages)
        best, score = 0, -1.0
        async with snapshot.fork(4, timeout=60) as forks:
            results = await asyncio.gather(
                *(fork.run(f"./try {i}", timeout=60) for i, fork in enumerate(forks))
            )
            for i, (fork, result) in enumerate(zip(forks, results, strict=True)):
                reward = (await fork.grade()).reward if result.ok else None
                if reward is not None and reward > score:
                    best, score = i, reward
        await sandbox.run(f"./try {best}", check=True)
        return f"try {best}"

    return policy


async def main(directory: Path) -> None:
    tasks = rls.load_tasks(prepare(directory), limit=500)
    policy = make_policy(directory / "repo")
    async with rls.AsyncPool(size=8, run="eval-1", ledger=directory / "runs") as pool:
        async for record in pool.rollouts(tasks, policy, concurrency=2, retries=2, resume=True):
            print(
                record.task_id,
                record.status,
                record.reward,
                record.value,
                record.failure and record.failure.kind,
            )
        print("coverage", pool.report().coverage)


if __name__ == "__main__":
    where = Path(sys.argv[1] if len(sys.argv) > 1 else "evaluation")
    where.mkdir(parents=True, exist_ok=True)
    asyncio.run(main(where))
