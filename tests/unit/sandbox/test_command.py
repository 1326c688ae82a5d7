"""From bytes to a CommandResult, from a caller's words to a SPAWN, and the budget of an attempt."""

from __future__ import annotations

import errno
import math
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rlsandbox._sandbox.command import (
    MAX_ARGUMENT,
    Collector,
    argv_of,
    beginning,
    env_pairs,
    seconds,
    start_error,
)
from rlsandbox._sandbox.local import Excluded
from rlsandbox.errors import (
    CommandError,
    CommandStartError,
    CommandTimeoutError,
    ConfigError,
    LimitReachedError,
    SandboxDiedError,
)
from rlsandbox.keeper.channel import STDERR, Exit
from rlsandbox.keeper.connection import KeeperFailure
from rlsandbox.keeper.wire import ExitFlag
from rlsandbox.sandbox import Budget
from rlsandbox.spec import Limits

PIECES = st.lists(st.tuples(st.sampled_from([1, 2]), st.binary(max_size=40)), max_size=30)


@given(PIECES, st.integers(0, 60))
def test_head_and_tail_of_any_output(pieces: list[tuple[int, bytes]], limit: int) -> None:
    collector = Collector(limit)
    for stream, data in pieces:
        collector.add(stream, data)
    r = collector.result(Exit(0, ExitFlag(0), 0, 0, 0))
    for stream, kept, size in ((1, r.stdout_bytes, r.stdout_size), (2, r.stderr_bytes, r.stderr_size)):
        full = b"".join(data for s, data in pieces if s == stream)
        assert size == len(full)
        if len(full) <= limit:
            assert kept == full
        elif limit >= 2:
            head, _, rest = kept.partition(b"\n[... ")
            tail = rest.partition(b" ...]\n")[2]
            if b"\n[... " not in full and b" ...]\n" not in full:
                assert full.startswith(head)
                assert full.endswith(tail)
                assert (len(head), len(tail)) == (limit // 2, limit - limit // 2)
    assert r.truncated == any(sum(len(d) for s, d in pieces if s == stream) > limit for stream in (1, 2))


@given(PIECES)
def test_text_is_all_of_it(pieces: list[tuple[int, bytes]]) -> None:
    collector = Collector(1 << 20)
    for stream, data in pieces:
        collector.add(stream, data)
    r = collector.result(None, duration_s=1.0, exit_code=4)
    assert (r.exit_code, r.duration_s, r.truncated) == (4, 1.0, False)
    assert r.stdout == b"".join(d for s, d in pieces if s == 1).decode("utf-8", "replace")
    if not any(s == 2 and d for s, d in pieces):
        assert r.text == r.stdout


@given(st.text(max_size=200), st.integers(1, 7))
def test_characters_across_pieces(text: str, step: int) -> None:
    raw = text.encode("utf-8", "surrogatepass").decode("utf-8", "replace").encode()
    collector = Collector(1 << 20)
    collector.add(2, b"x")
    for at in range(0, len(raw), step):
        collector.add(1, raw[at : at + step])
    assert collector.result(None, duration_s=0).text == "x" + raw.decode()


def test_the_keeper_s_own_head_and_tail() -> None:
    collector = Collector(8)
    collector.add(1, b"head")
    collector.add(2, b"err")
    collector.add(1, b"tail", True)
    r = collector.result(Exit(0x200, ExitFlag(0), 1_500_000_000, 1000, 3))
    assert r.stdout == "head\n[... 992 bytes left out ...]\ntail"
    assert r.text == "headerr\n[... 992 bytes left out ...]\ntail"
    assert (r.exit_code, r.stdout_size, r.truncated, r.duration_s) == (2, 1000, True, 1.5)
    whole = Collector(8)
    whole.add(1, b"head")
    whole.add(1, b"mor", True)
    assert whole.result(Exit(0, ExitFlag(0), 0, 7, 0)).stdout == "headmor"


TEXTS = st.lists(st.tuples(st.sampled_from([1, 2]), st.text("ab\n", max_size=9).map(str.encode)), max_size=40)


@given(TEXTS, st.integers(0, 60), st.integers(0, 3))
def test_text_is_in_the_order_of_arrival(pieces: list[tuple[int, bytes]], limit: int, most: int) -> None:
    """Against a list of every byte: what is left out of a stream is where its marker stands."""
    collector = Collector(limit)
    collector._most_runs = most or 1000  # few: what is not kept any more is forgotten again and again
    for stream, data in pieces:
        collector.add(stream, data)
        collector._most_runs = min(collector._most_runs, most or 1000)
    r = collector.result(None, duration_s=0)
    sizes = {stream: sum(len(d) for s, d in pieces if s == stream) for stream in (1, 2)}
    expected, at, told = "", {1: 0, 2: 0}, {s for s, size in sizes.items() if size <= limit}
    for stream, data in pieces:
        for byte in data.decode():
            first = at[stream] < limit // 2 or sizes[stream] <= limit
            last = at[stream] >= sizes[stream] - (limit - limit // 2)
            if last and not first and stream not in told:
                told.add(stream)
                expected += f"\n[... {sizes[stream] - limit} bytes left out ...]\n"
            expected += byte if first or last else ""
            at[stream] += 1
    for stream in (1, 2):
        if stream not in told:
            expected += f"\n[... {sizes[stream] - limit} bytes left out ...]\n"
    assert r.text == expected


@given(PIECES, PIECES, st.integers(0, 60), st.integers(0, 200))
def test_what_came_between_two_commands_comes_with_the_next_one(
    before: list[tuple[int, bytes]], after: list[tuple[int, bytes]], held: int, limit: int
) -> None:
    between, collector = Collector(held), Collector(limit)
    for stream, data in before:
        between.add(stream, data)
    between.replay(collector)
    for stream, data in after:
        collector.add(stream, data)
    r = collector.result(None, duration_s=0)
    for stream, kept, size in ((1, r.stdout_bytes, r.stdout_size), (2, r.stderr_bytes, r.stderr_size)):
        old = b"".join(d for s, d in before if s == stream)
        full = old + b"".join(d for s, d in after if s == stream)
        assert size == len(full)
        if len(old) <= held and len(full) <= limit:
            assert kept == full
        elif kept != full:  # a little more than *held* is kept, and need not be
            assert r.truncated
            assert kept.endswith(full[len(full) - min(limit - limit // 2, len(full) - len(old)) :])


def test_collector_is_bounded() -> None:
    def held(collector: Collector) -> int:
        buffers = [*collector._head.values(), *collector._tail.values()]
        return sum(map(len, buffers)) + len(collector._runs) * collector._runs.itemsize

    collector = Collector(1000)
    for _ in range(1000):
        collector.add(1, b"x" * 10_000)
    assert held(collector) < 200_000
    assert collector.result(None, duration_s=0).stdout_size == 10_000_000
    alternating = Collector(20_000)
    for _ in range(200_000):  # byte by byte, in turns
        alternating.add(1, b"o")
        alternating.add(2, b"e")
    assert held(alternating) < 8_000_000
    r = alternating.result(None, duration_s=0)
    assert r.text.startswith("oeoeoe")
    assert r.text.endswith("oeoeoe")
    assert (r.stdout_size, r.stderr_size) == (200_000, 200_000)


def test_argv() -> None:
    assert argv_of("echo é") == ([b"/bin/sh", b"-c", "echo é".encode()], None)
    assert argv_of(("a", "")) == ([b"a", b""], None)
    long = "x" * MAX_ARGUMENT
    argv, script = argv_of(long)
    assert (argv, script) == ([b"/bin/sh", b"/proc/self/fd/9"], long.encode())
    assert argv_of("x" * (MAX_ARGUMENT - 1))[1] is None
    assert argv_of("\udcff")[0][2] == b"\xff"
    for bad in ("", "a"):
        assert argv_of(bad)[0][2] == bad.encode()
    for bad_cmd in ([], None, 1, b"x", ["a", b"x"], ["a\0"], "a\0"):
        with pytest.raises(ConfigError):
            argv_of(bad_cmd)  # type: ignore[arg-type]


def test_env() -> None:
    assert env_pairs({"A": "1", "B": "2"}, {"A": "3"}) == ["A=3", "B=2"]
    for bad in ({"": "x"}, {"A=": "x"}, {"A": "x\0"}, {"A": 1}, {1: "x"}):
        with pytest.raises(ConfigError):
            env_pairs(bad)  # type: ignore[arg-type]


def test_seconds() -> None:
    assert seconds(None) is None
    assert seconds(math.inf) is None
    assert seconds(3) == 3
    for bad in (0, -1, math.nan, True, "3"):
        with pytest.raises(ConfigError):
            seconds(bad)  # type: ignore[arg-type]


def test_start_errors() -> None:
    def of(code: int, what: str) -> object:
        return start_error(
            KeeperFailure(f"{what}: x", errno=code, what=what), [b"prog"], sandbox="s", task="t"
        )

    for what, kind in (
        ("start prog", "command_start"),
        ("enter the working directory /x", "bad_cwd"),
        ("find user joe in the sandbox's /etc/passwd", "bad_user"),
        ("fork in the sandbox", "command_spawn"),
    ):
        error = of(errno.ENOENT, what)
        assert isinstance(error, CommandStartError)
        assert (error.kind, error.sandbox, error.task, error.infrastructure) == (kind, "s", "t", False)
        assert "'prog' could not be started" in str(error)
    assert isinstance(of(errno.ESRCH, "run in the episode"), SandboxDiedError)


def test_excluded() -> None:
    for patterns, path, expected in (
        (["*.pyc"], "a/b.pyc", True),
        (["*.pyc"], "a.pyc/b", False),
        ([".git/objects/pack"], ".git/objects/pack", True),
        ([".git/objects/pack"], "x/.git/objects/pack", False),
        (["**/pack"], "x/.git/objects/pack", True),
        (["a/**/z"], "a/z", True),
        (["a/**/z"], "a/b/c/z", True),
        (["a/*"], "a/b", True),
        (["a/*"], "a/b/c", False),
        (["./a/b/"], "a/b", True),
        (["build/"], "x/build", True),
        (["[ab].txt"], "b.txt", True),
        (["B.txt"], "b.txt", False),
        ([], "x", False),
    ):
        assert Excluded(patterns)(path) is expected, (patterns, path)
    assert Excluded("*.o")("x.o")


def test_budget() -> None:
    now = [0.0]
    budget = Budget(Limits(steps=2, wall=10), clock=lambda: now[0])
    assert budget.spend() == 10
    now[0] = 4
    assert budget.spend() == 6
    with pytest.raises(LimitReachedError, match="2 steps") as caught:
        budget.spend()
    assert caught.value.limit == "steps"
    budget = Budget(Limits(wall=10), clock=lambda: now[0])
    now[0] = 14
    with pytest.raises(LimitReachedError, match="10 s") as caught:
        budget.spend()
    assert caught.value.limit == "wall"
    assert Budget(Limits()).spend() is None


@pytest.mark.parametrize(
    ("cmd", "named"),
    [
        ("exit 3", "'exit 3'"),
        ("set -e\n  make\ttest\n", "'set -e make test'"),
        (["grep", "-c", "a b", "file"], "'grep -c a b file'"),
        ("x" * 200_000, f"'{'x' * 77}...'"),
        (["y" * 1000] * 1000, f"'{'y' * 77}...'"),
        ("printf '\x1b[31m\udcff'", "\"printf '\\x1b[31m\\udcff'\""),
        ("x" * 80, f"'{'x' * 80}'"),
    ],
)
def test_errors_name_the_command(cmd: Any, named: str) -> None:
    collector = Collector(1 << 20, beginning(cmd))
    collector.add(STDERR, b"first\nno such thing\n")
    failed = collector.result(None, exit_code=3, duration_s=1.0)
    with pytest.raises(CommandError) as caught:
        failed.check()
    assert str(caught.value) == f"command {named} exited with 3: no such thing"
    late = collector.result(None, exit_code=137, timed_out=True, duration_s=1.0)
    with pytest.raises(CommandTimeoutError) as caught:
        late.check()
    assert str(caught.value) == f"command {named} timed out after 1 s"


@pytest.mark.parametrize("wrong", [None, 3, b"true", ["a", 3], [], {"a": 1}])
def test_naming_leaves_what_is_no_command_to_who_refuses_it(wrong: Any) -> None:
    assert isinstance(beginning(wrong), str)
