"""Tool calls side by side give what one after the other gives: the real loop of TRL, tools that record."""

from __future__ import annotations

import asyncio
import copy
import threading
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

pytest.importorskip("trl", reason="the extra trl is not installed")

from rlsandbox_trl import parallel_tools, ranks
from trl import GRPOTrainer


class Environment:
    def __init__(self, own: int) -> None:
        self.own, self.seen = own, []  # type: ignore[var-annotated]

    def note(self, x: Any) -> Any:
        self.seen.append(x)
        if x == 3:
            raise ValueError("three")
        return {"own": self.own, "n": len(self.seen), "x": x}

    def twice(self, x: Any) -> str:
        return f"{self.note(x)}{self.note(x)}"

    async def later(self, x: Any) -> Any:
        self.seen.append(("begun", x))
        await asyncio.sleep(0)
        self.seen.append(("done", x))
        if x == 2:
            raise KeyError("two")
        return None if x == 1 else [{"type": "text", "text": f"{self.own}:{x}"}]


def double(x: Any) -> Any:
    if x == 4:
        raise LookupError(x)
    return x * 2


async def fetch(x: Any) -> Any:
    await asyncio.sleep(0)
    return double(x)


def call(name: str, arguments: Any) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name, "arguments": arguments}}


def loop_of_its_own() -> asyncio.AbstractEventLoop:
    loop = asyncio.new_event_loop()
    threading.Thread(target=loop.run_forever, daemon=True).start()
    return loop


LOOP = loop_of_its_own()
ARGUMENTS = st.one_of(
    st.fixed_dictionaries({"x": st.integers(0, 4)}), st.just({"y": 1}), st.just("text"), st.just({})
)
CALLS = st.lists(
    st.builds(
        call, st.sampled_from(["note", "twice", "shared", "unknown", "later", "double", "fetch"]), ARGUMENTS
    ),
    max_size=3,
)
TURNS = st.lists(
    st.lists(st.tuples(CALLS, st.integers(1, 40)), min_size=1, max_size=3), min_size=1, max_size=5
)


def play(
    turns: list[list[tuple[list[Any], int]]],
    parallel: bool,
    limit: int,
    kind: type[Environment] = Environment,
    room: int = 90,
) -> Any:
    """The loop of a trainer whose model says what *turns* has, rollout by rollout."""
    n = len(turns)
    environments = [kind(i) for i in range(n)]
    shared: list[Any] = []

    def common(x: Any) -> str:
        shared.append(x)
        return f"shared {x}"

    said = [[(calls, length) for calls, length in turn] for turn in turns]
    at = [0] * n

    def message(i: int) -> dict[str, Any]:
        calls, _ = said[i][at[i]] if at[i] < len(said[i]) else ([], 1)
        at[i] += 1
        return {"role": "assistant", "content": "", **({"tool_calls": copy.deepcopy(calls)} if calls else {})}

    trainer = GRPOTrainer.__new__(GRPOTrainer)
    values = {
        "max_tool_calling_iterations": limit, "use_vllm": False, "_is_vlm": False, "max_completion_length": room,
        "model": SimpleNamespace(config=SimpleNamespace(max_position_embeddings=10_000)),
        "environments": environments, "environment_factories": {None: None}, "_env_tools": {None: []},
        "_batch_environments": [None] * n, "_tokenizer": None, "tools": [1],
        "_sync_tool_dicts": [
            {"note": e.note, "twice": e.twice, "shared": common, "double": double} for e in environments
        ],
        "_async_tool_dicts": [{"later": e.later, "fetch": fetch} for e in environments],
        "async_loop": LOOP,
    }  # fmt: skip
    trainer.__dict__.update(values)
    trainer._get_tool_suffix_ids = lambda messages: [7] * sum(len(m["content"]) for m in messages)
    # Each prompt begins with its rollout's number: that is how the model knows whose turn it is.
    trainer._generate_single_turn = lambda ids, *a, **k: ([[p[0], 8, 8] for p in ids], None)
    prompts = [[{"role": "user", "content": "go"}] for _ in range(n)]
    completions = [[message(i)] for i in range(n)]
    if parallel:
        parallel_tools(trainer, serial=["shared"])
    import trl.trainer.grpo_trainer as module

    before = module.parse_response
    module.parse_response = lambda tokenizer, ids, **k: message(ids[0])
    try:
        found = trainer._tool_call_loop(
            prompts, [[i] for i in range(n)], [[i, 5] for i in range(n)], completions, None, None, {}
        )
    finally:
        module.parse_response = before
    return found, prompts, [e.seen for e in environments], shared


@settings(max_examples=150, deadline=None)
@given(TURNS, st.integers(1, 3), st.sampled_from([90, 2000]))
def test_side_by_side_is_as_one_after_the_other(turns: Any, limit: int, room: int) -> None:
    """What does not fit is taken back; where all fits, what was answered to wrong arguments is compared."""
    assert play(turns, True, limit, room=room) == play(turns, False, limit, room=room)


def test_what_is_said_of_wrong_arguments_names_the_tool() -> None:
    found, *_ = play([[([call("note", "text"), call("note", {"y": 1})], 1)]], True, 1, room=2000)
    first, second = (message["content"] for message in found[1][0][1:3])
    assert "Environment.note() argument after ** must be a mapping" in first
    assert "Environment.note() got an unexpected keyword argument 'y'" in second


def test_calls_of_different_rollouts_overlap() -> None:
    gate = threading.Barrier(4, timeout=20)  # opens only when four are inside at once

    class Waiting(Environment):
        def note(self, x: Any) -> str:
            gate.wait()
            return str(self.own)

    found, *_ = play([[([call("note", {"x": 0})], 1)]] * 4, True, 1, Waiting)
    assert [messages[1]["content"] for messages in found[1]] == ["0", "1", "2", "3"]


@pytest.mark.parametrize("name", ["later", "fetch", "double"])
def test_async_tools_and_functions_of_different_rollouts_overlap(
    monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    inside = 0
    gate, all_in = threading.Barrier(4, timeout=20), asyncio.Event()

    async def wait(*args: Any, **kwargs: Any) -> str:
        nonlocal inside
        inside += 1
        if inside == 4:
            all_in.set()
        await asyncio.wait_for(all_in.wait(), 20)
        return "in"

    def block(x: Any) -> str:
        gate.wait()
        return "in"

    monkeypatch.setattr(Environment, "later", wait)
    monkeypatch.setitem(globals(), "fetch", wait)
    monkeypatch.setitem(globals(), "double", block)
    found, *_ = play([[([call(name, {"x": 0})], 1)]] * 4, True, 1)
    assert [messages[1]["content"] for messages in found[1]] == ["in"] * 4


def test_other_internals_are_left_alone(caplog: pytest.LogCaptureFixture) -> None:
    class Other:
        def _tool_call_loop(self, prompts: Any) -> None: ...

    trainer = Other()
    parallel_tools(trainer)
    assert "_tool_call_loop" not in vars(trainer)
    assert "one after the other" in caplog.text


@given(st.integers(1, 9), st.integers(1, 3), st.integers(1, 3), st.integers(1, 3), st.integers(1, 9))
def test_peeking_changes_no_order_and_knows_what_follows(
    n: int, unique: int, each: int, repeats: int, names: int
) -> None:
    from rlsandbox_trl.lookahead import Peeking
    from trl.trainer.utils import RepeatSampler

    def sampler() -> Any:
        return RepeatSampler(list(range(n)), each, unique, repeats, seed=5)

    size = unique * each
    name = [str(i % names) for i in range(n)]  # several rows may be of one task
    plain = sampler()
    want = [index for _ in range(3) for index in plain]
    peeking = Peeking(sampler(), size)
    assert 3 * len(peeking) == len(want)
    got: list[int] = []
    for _ in range(3):  # epochs
        for index in peeking:
            got.append(index)
            if len(got) % (size * repeats) == 0:  # a generation batch with all its repeats has been given
                present, following = got[-size:], want[len(got) : len(got) + size]
                found = peeking.after([name[i] for i in present], name)
                assert found == following or len(got) == len(want)
                if names == n:
                    # Generated once more, as after a checkpoint: still the present one.
                    assert peeking.after([name[i] for i in present[:1]], name) == found
    assert got == want


def test_a_sampler_of_ones_own_is_not_gone_through_twice() -> None:
    from rlsandbox_trl.lookahead import Peeking

    class Mine:
        times = 0

        def __iter__(self) -> Any:
            self.times += 1
            return iter([0, 0, 1, 1])

    mine = Mine()
    peeking = Peeking(mine, 2)
    for time in range(1, 3):
        assert list(peeking) == [0, 0, 1, 1] and mine.times == time
        assert peeking.after(["1"], ["0", "1"]) == []


@pytest.mark.parametrize(
    ("environment", "mine"),
    [
        ({}, [0, 1, 2, 3, 4, 5, 6, 7]),
        (
            {"RANK": "1", "LOCAL_RANK": "1", "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2"},
            [0, 1, 2, 3, 4, 5, 6, 7],
        ),
        ({"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "4", "LOCAL_WORLD_SIZE": "2"}, [0, 1, 2, 3]),
        ({"RANK": "3", "LOCAL_RANK": "1", "WORLD_SIZE": "4", "LOCAL_WORLD_SIZE": "2"}, [4, 5, 6, 7]),
        ({"RANK": "3", "LOCAL_RANK": "0", "WORLD_SIZE": "4", "LOCAL_WORLD_SIZE": "1"}, [6, 7]),
    ],
)
def test_a_machine_is_told_of_its_own_part_of_the_next_batch(
    monkeypatch: pytest.MonkeyPatch, environment: dict[str, str], mine: list[int]
) -> None:
    for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    assert ranks.share(list(range(8))) == mine
