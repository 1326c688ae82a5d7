"""Running hooks: which run where, what a bad one means, and what is told."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pluggy
import pytest

from rlsandbox.errors import SandboxDiedError, SandboxError
from rlsandbox.hooks import Credentials, Inspector, Resetter, Residue, hookimpl, plugin_manager
from rlsandbox.reset.baseline import Baseline, take_baseline
from rlsandbox.reset.facts import Facts
from rlsandbox.reset.runner import MAX_RESIDUE, run_reset, run_verify
from rlsandbox.task import Task
from tests.support.fake_keeper import FakeKeeper, names

DEADLINE_S = 20.0


def manager(*plugins: object, block: tuple[str, ...] = ()) -> pluggy.PluginManager:
    return plugin_manager(plugins, block=block, entry_points=False)


async def baseline_of(keeper: FakeKeeper, mode: str = "overlay") -> Baseline:
    found = await take_baseline(keeper, mode=mode, layer="primed-1")
    keeper.calls.clear()
    return found


async def verify(keeper: FakeKeeper, base: Baseline, *plugins: object, **kw: Any) -> list[Residue]:
    kw.setdefault("deadline_s", DEADLINE_S)
    return await run_verify(keeper, manager(*plugins), task=None, baseline=base, **kw)


async def test_a_clean_verify_is_one_question_and_no_thread() -> None:
    keeper = FakeKeeper()
    base = await baseline_of(keeper)
    keeper.episode = 2
    threads = threading.active_count()
    assert await verify(keeper, base) == []
    assert keeper.calls == ["inspect"]
    assert threading.active_count() <= threads


async def test_user_hooks_run_on_a_thread_of_their_own_and_may_ask() -> None:
    keeper = FakeKeeper(below={"/etc/acme.conf": b"old"})
    base = await baseline_of(keeper)
    keeper.put("/etc/acme.conf", b"new")
    ran_on: list[threading.Thread] = []

    class Acme:
        @hookimpl
        def rlsandbox_verify(self, inspector: Inspector) -> Iterator[Residue]:
            ran_on.append(threading.current_thread())
            if inspector.read("/etc/acme.conf") != inspector.baseline("/etc/acme.conf"):
                yield Residue("acme_config", "/etc/acme.conf")

    found = await verify(keeper, base, Acme())
    assert ("acme_config", "/etc/acme.conf") in names(found)
    assert ("file", "/etc/acme.conf") not in names(found), "the bare word stands beside a better one"
    assert ran_on[0] is not threading.current_thread()


async def test_user_hooks_precede_built_ins_and_take_any_subset_of_arguments() -> None:
    keeper = FakeKeeper()
    base = await baseline_of(keeper)
    order: list[str] = []

    class First:
        @hookimpl
        def rlsandbox_reset(self) -> None:
            order.append("first")

    class Second:
        @hookimpl
        def rlsandbox_reset(self, resetter: Resetter) -> None:
            order.append("second")
            assert resetter.read("/nothing") is None

    await run_reset(
        keeper, manager(First(), Second()), task=None, layer="", baseline=base, deadline_s=DEADLINE_S
    )
    assert order == ["second", "first"]


async def test_facts_are_asked_for_behind_the_reset_only_where_no_policy_runs_in_between() -> None:
    keeper = FakeKeeper()
    base = await baseline_of(keeper)

    class Litterer:
        @hookimpl
        def rlsandbox_reset(self) -> None:
            keeper.put("/tmp/left-by-a-policy")

    asked = await run_reset(
        keeper, manager(Litterer()), task=None, layer="", baseline=base, deadline_s=DEADLINE_S
    )
    assert asked is None
    found = await verify(keeper, base, asked=asked)
    assert "/tmp/left-by-a-policy" in {what for _, what in names(found)}
    asked = await run_reset(keeper, manager(), task=None, layer="", baseline=base, deadline_s=DEADLINE_S)
    assert asked is not None and await verify(keeper, base, asked=asked) == []


@pytest.mark.parametrize("mode", ["overlay", "userns", "manifest"])
async def test_whole_modes_reset_in_the_keeper_without_the_built_in_policies(mode: str) -> None:
    keeper = FakeKeeper()
    base = await baseline_of(keeper, mode)
    keeper.put("/tmp/x")
    await run_reset(keeper, manager(), task=None, layer="", baseline=base, deadline_s=DEADLINE_S)
    assert keeper.calls == ["reset"]


async def test_other_modes_rely_on_the_policies() -> None:
    keeper = FakeKeeper()
    base = await baseline_of(keeper, "of somebody's backend")
    keeper.put("/tmp/x")
    keeper.extra.append("process\t7\t1\t0\tS\tsleep\tsleep\\x0099\\x00")
    await run_reset(keeper, manager(), task=None, layer="", baseline=base, deadline_s=DEADLINE_S)
    assert "reset" not in keeper.calls
    assert {"kill_all", "outside_remove"} <= set(keeper.calls)
    assert await verify(keeper, base) == []


async def test_a_raising_policy_is_an_error_that_names_the_plugin() -> None:
    keeper = FakeKeeper()
    base = await baseline_of(keeper)
    plugin = SimpleNamespace(rlsandbox_reset=hookimpl(_raise))
    pm = manager()
    pm.register(plugin, "acme")
    with pytest.raises(SandboxError, match=r"'acme' raised ZeroDivisionError") as caught:
        await run_reset(keeper, pm, task=None, layer="", baseline=base, deadline_s=DEADLINE_S)
    assert caught.value.kind == "reset_policy"
    assert isinstance(caught.value.__cause__, ZeroDivisionError)


def _raise() -> None:
    raise ZeroDivisionError("no")


def _exit() -> None:
    raise SystemExit(0)


async def test_a_policy_that_exits_is_an_error_too() -> None:
    keeper = FakeKeeper()
    base = await baseline_of(keeper)
    pm = manager(SimpleNamespace(rlsandbox_reset=hookimpl(_exit)))
    with pytest.raises(SandboxError, match="SystemExit"):
        await run_reset(keeper, pm, task=None, layer="", baseline=base, deadline_s=DEADLINE_S)


async def test_a_raising_check_is_residue_that_names_the_plugin() -> None:
    keeper = FakeKeeper()
    base = await baseline_of(keeper)
    pm = manager()
    pm.register(SimpleNamespace(rlsandbox_verify=hookimpl(_raise)), "acme")
    found = await run_verify(keeper, pm, task=None, baseline=base, deadline_s=DEADLINE_S)
    assert [(item.kind, item.what) for item in found] == [("verify", "acme")]
    assert "ZeroDivisionError" in found[0].detail


async def test_a_check_that_answers_nonsense_is_residue() -> None:
    keeper = FakeKeeper()
    base = await baseline_of(keeper)
    pm = manager()
    pm.register(SimpleNamespace(rlsandbox_verify=hookimpl(lambda: ["clean!"])), "acme")
    found = await run_verify(keeper, pm, task=None, baseline=base, deadline_s=DEADLINE_S)
    assert names(found) == {("verify", "acme")}


@pytest.mark.parametrize("hook", ["reset", "verify"])
async def test_a_hook_that_hangs_is_named_and_its_thread_is_disarmed(hook: str) -> None:
    keeper = FakeKeeper()
    base = await baseline_of(keeper)
    go, done = threading.Event(), threading.Event()
    after: list[BaseException] = []

    def body(view: Resetter) -> None:
        go.wait()
        try:
            view.read("/etc/passwd")
        except BaseException as error:
            after.append(error)
        done.set()

    def on_reset(resetter: Resetter) -> None:
        body(resetter)

    def on_verify(inspector: Resetter) -> None:
        body(inspector)

    pm = manager()
    if hook == "reset":
        pm.register(SimpleNamespace(rlsandbox_reset=hookimpl(on_reset)), "sleepy")
        with pytest.raises(SandboxError, match="'sleepy' did not end by the deadline") as caught:
            await run_reset(keeper, pm, task=None, layer="", baseline=base, deadline_s=0.2)
        assert caught.value.kind == "reset_timeout"
    else:
        pm.register(SimpleNamespace(rlsandbox_verify=hookimpl(on_verify)), "sleepy")
        found = await run_verify(keeper, pm, task=None, baseline=base, deadline_s=0.2)
        assert names(found) == {("verify", "sleepy")}
    go.set()
    assert await asyncio.to_thread(done.wait, DEADLINE_S)
    assert isinstance(after[0], SandboxError)


async def test_a_call_that_hangs_in_the_keeper_ends_with_the_deadline_in_the_hook_too() -> None:
    keeper = FakeKeeper(hang=frozenset({"outside_read"}))
    base = await baseline_of(keeper)
    raised = threading.Event()

    def check(inspector: Inspector) -> None:
        try:
            inspector.read("/etc/passwd")
        except SandboxError:
            raised.set()
            raise

    pm = manager(SimpleNamespace(rlsandbox_verify=hookimpl(check)))
    found = await run_verify(keeper, pm, task=None, baseline=base, deadline_s=0.2)
    assert [item.kind for item in found] == ["verify"]
    assert await asyncio.to_thread(raised.wait, DEADLINE_S)


@pytest.mark.parametrize("op", ["reset", "inspect"])
async def test_a_keeper_that_does_not_answer_meets_the_deadline(op: str) -> None:
    keeper = FakeKeeper()
    base = await baseline_of(keeper)
    keeper.hang = frozenset({op})
    started = time.monotonic()
    if op == "reset":
        with pytest.raises(SandboxError, match="did not reset the sandbox"):
            await run_reset(keeper, manager(), task=None, layer="", baseline=base, deadline_s=0.1)
    else:
        found = await verify(keeper, base, deadline_s=0.1)
        assert names(found) == {("verify", "keeper")}
    assert time.monotonic() - started < DEADLINE_S


async def test_death_of_the_sandbox_is_told_as_such_wherever_it_is_noticed() -> None:
    keeper = FakeKeeper()
    base = await baseline_of(keeper)

    def check(inspector: Inspector) -> None:
        keeper.die = SandboxDiedError("gone")
        inspector.read("/etc/passwd")

    with pytest.raises(SandboxDiedError):
        await verify(keeper, base, SimpleNamespace(rlsandbox_verify=hookimpl(check)))
    with pytest.raises(SandboxDiedError):
        await verify(keeper, base)


async def test_cancelling_ends_the_run_and_disarms_the_thread() -> None:
    keeper = FakeKeeper()
    base = await baseline_of(keeper)
    started, go, done = threading.Event(), threading.Event(), threading.Event()
    after: list[BaseException] = []

    def check(inspector: Inspector) -> None:
        started.set()
        go.wait()
        try:
            inspector.read("/etc/passwd")
        except BaseException as error:
            after.append(error)
        done.set()

    run = asyncio.create_task(verify(keeper, base, SimpleNamespace(rlsandbox_verify=hookimpl(check))))
    await asyncio.to_thread(started.wait)
    run.cancel()
    with pytest.raises(asyncio.CancelledError):
        await run
    go.set()
    assert await asyncio.to_thread(done.wait, DEADLINE_S)
    assert isinstance(after[0], SandboxError)


async def test_blocking_a_plugin_switches_both_its_hooks_off() -> None:
    keeper = FakeKeeper()
    base = await baseline_of(keeper)
    keeper.extra.append("process\t7\t1\t0\tS\tsleep\tsleep\\x0099\\x00")
    assert names(await verify(keeper, base)) == {("process", "sleep 99")}
    pm = manager(block=("processes",))
    assert await run_verify(keeper, pm, task=None, baseline=base, deadline_s=DEADLINE_S) == []


async def test_wrappers_of_other_plugins_stay_around_every_check() -> None:
    keeper = FakeKeeper()
    base = await baseline_of(keeper)
    seen: list[str] = []

    class Wrapper:
        @hookimpl(wrapper=True)
        def rlsandbox_verify(self, inspector: Inspector) -> Any:
            seen.append("around")
            return (yield)

    keeper.extra.append("process\t7\t1\t0\tS\tsleep\tsleep\\x0099\\x00")
    assert names(await verify(keeper, base, Wrapper())) == {("process", "sleep 99")}
    assert len(seen) > 1


async def test_secrets_and_unprintable_bytes_never_reach_what_is_told() -> None:
    keeper = FakeKeeper()
    base = await baseline_of(keeper)
    keeper.extra.append("process\t7\t1\t0\tS\tcurl\tcurl\\x00-H\\x00Bearer s3cr3t-value\\x00")
    keeper.put("/tmp/s3cr3t-value\udcff\n", b"")
    held = Credentials("lease-1", env={"ACME_TOKEN": "s3cr3t-value"})
    found = await verify(keeper, base, credentials=[held])
    text = repr(found)
    assert "s3cr3t" not in text
    assert ("tmp", "/tmp/[redacted]\\xff\\x0a") in names(found)
    assert any(item.kind == "credential" and "ACME_TOKEN of lease-1" in item.detail for item in found)


async def test_a_flood_of_residue_is_cut_and_counted() -> None:
    keeper = FakeKeeper(hidden=100_000)
    base = await baseline_of(keeper)
    for n in range(3000):
        keeper.put(f"/tmp/{n}")
    found = await verify(keeper, base)
    assert len(found) == MAX_RESIDUE + 1
    assert found[-1].what == "more"


async def test_files_that_no_list_tells_are_residue_all_the_same() -> None:
    keeper = FakeKeeper()
    base = await baseline_of(keeper)
    keeper.replace = {"upper\t/dev/shm\t0": "upper\t/dev/shm\t3"}
    assert names(await verify(keeper, base)) == {("file", "/dev/shm")}


@pytest.mark.parametrize(
    ("extra", "why"),
    [
        ("process\t7\t1\t0\tS\tsleep\tsleep\\x0099\\x00", "process 7"),
        ("upper\t/run\t2\t0755\t0\t0\t-", "/run"),
    ],
)
async def test_no_baseline_is_taken_of_a_sandbox_in_use(extra: str, why: str) -> None:
    with pytest.raises(SandboxError, match=why) as caught:
        await take_baseline(FakeKeeper(extra=[extra]), mode="overlay")
    assert caught.value.kind == "baseline"


@pytest.mark.parametrize("raw", [("process", "1\t2"), ("upper", "/"), ("episode", "1")])
async def test_facts_that_make_no_sense_are_errors(raw: tuple[str, str]) -> None:
    class Odd(FakeKeeper):
        async def inspect(self) -> list[tuple[str, str]]:
            return [raw]

    with pytest.raises(SandboxError) as caught:
        await take_baseline(Odd(), mode="overlay")
    assert caught.value.kind == "protocol"
    base = await baseline_of(FakeKeeper())
    with pytest.raises(SandboxError):
        await verify(Odd(), base)


def test_the_baseline_is_plain_data() -> None:
    import pickle

    base = Baseline(Facts({"env": ("A=1",)}), "overlay", "l1")
    assert pickle.loads(pickle.dumps(base)) == base
    assert base.on("l2").layer == "l2"
    assert base.layer == "l1"


async def test_the_layer_on_top_is_checked() -> None:
    keeper = FakeKeeper()
    base = await baseline_of(keeper)
    assert names(await verify(keeper, base.on("primed-2"))) == {("layer", "primed-1")}
    assert names(await verify(keeper, base.on(""))) == {("layer", "primed-1")}


async def test_policies_see_the_task_and_may_not_leave_the_root() -> None:
    keeper = FakeKeeper()
    base = await baseline_of(keeper)
    seen: list[object] = []

    def policy(resetter: Resetter) -> None:
        seen.append(resetter.task)
        for path in ("etc", "/a/../b", "/"):
            with pytest.raises(SandboxError):
                resetter.remove(path)

    task = Task(id="t", workdir="/work")
    await run_reset(
        keeper,
        manager(SimpleNamespace(rlsandbox_reset=hookimpl(policy))),
        task=task,
        layer="",
        baseline=base,
        deadline_s=DEADLINE_S,
    )
    assert seen == [task]
