"""What users may rely on, as types. Never run: mypy reads it (tests/unit/test_types.py)."""

from __future__ import annotations

from asyncio import StreamReader, StreamWriter
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, assert_type

import rlsandbox as rls
from rlsandbox.backends import Backend, Capabilities, Local, Member, keeper_binary
from rlsandbox.hooks import Credentials, Inspector, Resetter, Residue

Stream = Literal["stdout", "stderr"]
Status = Literal["completed", "failed", "lost", "cancelled"]
State = Literal["ready", "paused", "hibernated", "graded", "released", "dead"]


def data(record: rls.Record, result: rls.CommandResult, outcome: rls.Outcome, failure: rls.Failure) -> None:
    spec = rls.Spec(
        image="x.tar", cpu=1.5, memory="1GiB", disk=1 << 30, pids=10, network="none", user="1000",
        env={"A": "b"}, isolation="auto", expose=("/opt",), labels={"team": "rl"},
    )  # fmt: skip
    limits = rls.Limits(steps=1, wall=2.0, command=3, output="1MiB")
    grader = rls.Grader(
        command=["true"], files={"a": b"", "b": ""}, timeout=60, reward="exit_code", fresh=True
    )
    task = rls.Task(
        id="t", prompt="", image=None, workdir="/w", files={"a": "b"}, setup="true", grader=grader,
        spec=spec, limits=limits, metadata={"difficulty": 1},
    )  # fmt: skip
    assert_type(rls.load_tasks(Path("tasks.jsonl"), limit=3), list[rls.Task])
    assert_type(task.grader, rls.Grader | None)
    assert_type(task.limits, rls.Limits)
    assert_type((result.exit_code, result.ok, result.stdout, result.stderr), tuple[int, bool, str, str])
    assert_type((result.stdout_bytes, result.stderr_bytes, result.text), tuple[bytes, bytes, str])
    assert_type((result.stdout_size, result.stderr_size, result.truncated), tuple[int, int, bool])
    assert_type((result.timed_out, result.oom_killed), tuple[bool, bool])
    assert_type((result.signal, result.duration_s), tuple[int | None, float])
    assert_type(result.check(), rls.CommandResult)
    assert_type((failure.kind, failure.phase, failure.cause), tuple[str, str, str])
    assert_type((failure.retryable, failure.infrastructure), tuple[bool, bool])
    assert_type(outcome.reward, float | None)
    assert_type((outcome.passed, outcome.result), tuple[bool | None, rls.CommandResult | None])
    assert_type((record.task_id, record.index, record.attempts), tuple[str, int, int])
    assert_type(record.status, Status)
    assert_type((record.reward, record.passed), tuple[float | None, bool | None])
    assert_type((record.failure, record.ttfc_s), tuple[rls.Failure | None, float | None])


def pools(task: rls.Task, snapshot: rls.Snapshot, ref: rls.PoolRef, plugin: object) -> None:
    pool = rls.Pool(
        "local", size=2, max_size=4, spec=rls.Spec(), when_empty="create", max_creating=1, write_rate=1.5,
        run="r", ledger=Path("x"), plugins=[plugin], block=["git"], config=False, profile="eval",
    )  # fmt: skip
    assert_type(pool.run, str)
    assert_type(pool.ref, rls.PoolRef)
    assert_type(rls.Pool.connect(ref), rls.Pool)
    assert_type(pool.claim(task, timeout=1), rls.Sandbox)
    assert_type(pool.claim(snapshot), rls.Sandbox)
    claim = pool.claim_ahead(task)
    assert_type(claim, rls.Claim)
    assert_type(claim.result(timeout=3.0), rls.Sandbox)
    assert_type((claim.done(), claim.cancel()), tuple[bool, bool])
    pool.expect(iter([task]), group_size=4, replace=True)
    assert_type(pool.wait_ready(2, timeout=3), int)

    def policy(sandbox: rls.Sandbox, task: rls.Task) -> str:
        return sandbox.run("true").text

    records = pool.rollouts([task], policy, group_size=2, concurrency=2, retries=1, timeout=9.0, resume=True)
    assert_type(iter(records), Iterator[rls.Record])
    report = pool.run_rollouts([task], policy, progress=True)
    assert_type(report, rls.Report)
    assert_type(report.records, list[rls.Record])
    assert_type((report.mean_reward, report.coverage), tuple[float | None, float])
    assert_type(report.reward_bounds, tuple[float, float] | None)
    for by in ("kind", "phase", "image", "node", "group"):
        assert_type(report.failures(by), dict[str, int])
    assert_type(pool.report(), rls.Report)
    assert_type(pool.snapshots(), list[rls.Snapshot])
    stats = pool.stats()
    assert_type(stats, rls.PoolStats)
    assert_type((stats.size, stats.ready, stats.claimed), tuple[int, int, int])
    assert_type((stats.waiting, stats.recycled, stats.quarantined), tuple[int, int, int])
    pool.close(timeout=None)
    for series in (pool.metrics.ttfc, pool.metrics.reset, pool.metrics.verify, pool.metrics.prime):
        assert_type(series, rls.Series)
        assert_type(series.values(), list[float])
        summary = series.summary()
        assert_type(summary, rls.Summary)
        assert_type(summary.n, int)
    rls.metrics.serve_prometheus(pool, port=0, host="127.0.0.1")
    rls.metrics.export_otel(pool, endpoint="http://otel:4318")


def sandboxes(sandbox: rls.Sandbox, grader: rls.Grader) -> None:
    assert_type((sandbox.id, sandbox.task, sandbox.spec), tuple[str, rls.Task, rls.Spec])
    assert_type(sandbox.state, State)
    assert_type(sandbox.reset_mode, str)

    def seen(stream: Stream, piece: bytes) -> int:
        return len(piece)

    result = sandbox.run(
        ["cat"], timeout=1, cwd="/", env={"A": "b"}, stdin=b"x", user="1000", output_limit="1MiB", check=True,
        on_output=seen,
    )  # fmt: skip
    assert_type(result, rls.CommandResult)
    with sandbox.popen("cat", cwd="/", env={}, user=None) as process:
        assert_type(process, rls.Process)
        assert_type((process.pid, process.exit_code), tuple[int, int | None])
        process.write("text")
        process.write(b"bytes")
        process.close_stdin()
        for stream, piece in process:
            seen(stream, piece)
        assert_type(process.poll(), int | None)
        process.kill(15)
        assert_type(process.wait(timeout=3), rls.CommandResult)
    with sandbox.session(shell="bash", cwd="/", env={}, user=None) as session:
        assert_type(session, rls.Session)
        assert_type(session.run("true", timeout=1, stdin="x", output_limit=5, check=True), rls.CommandResult)
        session.close()
    assert_type((sandbox.read_file("a"), sandbox.read_text("a")), tuple[bytes, str])
    sandbox.write_file("a", "text", mode=0o600, user="1000")
    sandbox.upload(Path("here"), "/there", exclude=["*.pyc"])
    sandbox.download("/there", "here")
    for info in (*sandbox.list_dir("/"), *sandbox.changes()):
        assert_type(info, rls.FileInfo)
        assert_type((info.name, info.size, info.mode), tuple[str, int, int])
        assert_type(info.kind == "file" or info.kind == "dir", bool)
    assert_type(sandbox.grade(grader), rls.Outcome)
    snapshot = sandbox.snapshot(kill=True, name="best")
    assert_type(snapshot, rls.Snapshot)
    assert_type((snapshot.id, snapshot.bytes), tuple[str, int])
    with snapshot.fork(2, timeout=3) as forks:
        assert_type(forks, rls.Sandboxes)
        assert_type(forks[0], rls.Sandbox)
    snapshot.delete()
    sandbox.pause()
    sandbox.resume()
    sandbox.hibernate()
    sandbox.restore(timeout=3)
    sandbox.release(discard=True)
    rollout = sandbox.rollout
    if rollout is not None:
        assert_type((rollout.run, rollout.index, rollout.attempt), tuple[str, int, int])
        rollout.checkpoint({"messages": []})


async def asynchronous(task: rls.Task) -> None:
    async def policy(sandbox: rls.AsyncSandbox, task: rls.Task) -> str:
        rollout = sandbox.rollout
        assert rollout is not None
        assert_type(await rollout.checkpoint(["state"]), rls.AsyncSnapshot)
        return (await sandbox.run("true", timeout=3, cwd="/", check=True)).text

    async with rls.AsyncPool(
        size=1, spec=rls.Spec(), run="r", ledger="x", config=False, profile=None
    ) as pool:
        assert_type(pool.metrics, rls.Metrics)
        waiting = await pool.claim(task, timeout=3)
        await waiting.release(discard=True)
        async with pool.claim(task) as sandbox:
            assert_type(sandbox, rls.AsyncSandbox)
            assert_type((sandbox.id, sandbox.task), tuple[str, rls.Task])
            process = await sandbox.popen("cat")
            assert_type(process, rls.AsyncProcess)
            async for _stream, piece in process:
                assert_type(piece, bytes)
            assert_type(await process.wait(timeout=3), rls.CommandResult)
            await process.kill(9)
            async with sandbox.popen(["cat"]) as other:
                assert_type(other, rls.AsyncProcess)
            async with sandbox.session(shell="sh") as session:
                assert_type(session, rls.AsyncSession)
                assert_type(await session.run("true", timeout=3), rls.CommandResult)
            await sandbox.upload("here", "/there", exclude=())
            assert_type(await sandbox.read_text("a"), str)
            assert_type(await sandbox.grade(), rls.Outcome)
            snapshot = await sandbox.snapshot(kill=True)
            async with snapshot.fork(2) as forks:
                assert_type(forks, rls.AsyncSandboxes)
                assert_type(forks[0], rls.AsyncSandbox)
            assert_type(await snapshot.fork(1), rls.AsyncSandboxes)
            await snapshot.delete()
        records = pool.rollouts([task], policy, concurrency=2, retries=1, resume=False)
        assert_type(aiter(records), AsyncIterator[rls.Record])
        assert_type(pool.report(), rls.Report)


class Place(Backend):
    """The least that a backend of one's own has."""

    name = "place"

    async def capabilities(self) -> Capabilities:
        return Capabilities(
            reset_modes=frozenset({"overlay"}), adopt=False, pause=True, snapshot=True, max_writes_per_s=None
        )

    async def provision(
        self, spec: rls.Spec, *, member: str, labels: Mapping[str, str], deadline: float
    ) -> Member:
        return Member(id=member, node=None, facts={})

    async def connect(self, member: Member) -> tuple[StreamReader, StreamWriter]:
        raise NotImplementedError

    async def dispose(self, member: Member) -> None: ...

    async def list(self, labels: Mapping[str, str]) -> Sequence[Member]:
        return []


def plugins(inspector: Inspector, resetter: Resetter) -> None:
    Place()
    Local(isolation="none", base="/images/x")
    assert_type(keeper_binary("x86_64"), Path)
    Residue("file", "/x", "detail")
    Credentials(id="x", env={"A": "b"}, files={"/a": b"c"})
    assert_type((inspector.task, inspector.mode), tuple[rls.Task | None, str])
    list(inspector.changed("/tmp"))
    list(inspector.processes())
    list(inspector.sockets())
    assert_type(inspector.read("/a", limit=3), bytes | None)
    assert_type(inspector.baseline("/a"), bytes | None)
    resetter.remove("/x")
    resetter.kill_all()
    assert_type(resetter.run_trusted(["true"]), rls.CommandResult)


def kinds(error: rls.errors.SandboxError) -> Any:
    assert_type((error.kind, error.phase, error.hint), tuple[str, str, str])
    assert_type((error.retryable, error.infrastructure), tuple[bool, bool])
