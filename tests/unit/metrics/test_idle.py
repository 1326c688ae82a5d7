from __future__ import annotations

import threading
from contextlib import ExitStack

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rlsandbox.errors import ConfigError
from rlsandbox.metrics.idle import IdleMeter, IdleWindow, idle_window, union


class Time:
    now = 100.0

    def __call__(self) -> float:
        return self.now


span = st.tuples(st.integers(0, 60), st.integers(0, 60)).map(lambda t: (min(t), max(t)))
spans = st.lists(span, max_size=8)


def by_seconds(
    blocked: list[tuple[int, int]], busy: list[tuple[int, int]], start: int, end: int
) -> IdleWindow:
    """The definition, second by second."""

    def at(second: int, where: list[tuple[int, int]]) -> bool:
        return any(a <= second < b for a, b in where)

    seconds = range(start, end)
    waiting = [at(s, blocked) for s in seconds]
    working = [at(s, busy) for s in seconds]
    idle = [a and not b for a, b in zip(waiting, working, strict=True)]
    return IdleWindow(end - start, sum(waiting), sum(working), sum(idle))


@given(spans, spans, span)
def test_recorded_intervals_agree_with_the_definition(
    blocked: list[tuple[int, int]], busy: list[tuple[int, int]], window: tuple[int, int]
) -> None:
    start, end = window
    assert idle_window(blocked, busy, start=start, end=end) == by_seconds(blocked, busy, start, end)


@given(spans, spans, st.lists(st.integers(0, 60), max_size=4))
def test_the_meter_agrees_with_the_definition_however_its_windows_are_cut(
    blocked: list[tuple[int, int]], busy: list[tuple[int, int]], cuts: list[int]
) -> None:
    time = Time()
    meter = IdleMeter(clock=time)
    reader = meter.window()
    windows = []
    open_: dict[tuple[str, int], ExitStack] = {}
    for second in range(61):
        time.now = 100.0 + second
        for kind, where in (("blocked", blocked), ("busy", busy)):
            for i, (a, b) in enumerate(where):
                if second == a:
                    stack = open_[kind, i] = ExitStack()
                    stack.enter_context(getattr(meter, kind)())
                if second == b:
                    open_.pop((kind, i)).close()
        if second in cuts:
            windows.append(reader.pop())
    windows.append(reader.pop())
    assert not open_
    assert IdleWindow.merge(windows) == by_seconds(blocked, busy, 0, 60) == meter.total()


def test_windows_accumulate_and_are_not_averaged() -> None:
    long_idle, short_busy = IdleWindow(90, 90, 0, 90), IdleWindow(10, 0, 10, 0)
    assert IdleWindow.merge([long_idle, short_busy]).ratio == 0.9
    assert long_idle.to_dict("sandbox/") == {
        "sandbox/blocked_s": 90, "sandbox/accelerator_busy_s": 0, "sandbox/idle_ratio": 1.0,
    }  # fmt: skip


def test_a_window_without_length_has_no_ratio() -> None:
    assert IdleWindow(0, 0, 0, 0).ratio is None
    assert "idle_ratio" not in IdleWindow(0, 0, 0, 0).to_dict()


def test_generation_while_others_wait_is_not_idle() -> None:
    time = Time()
    meter = IdleMeter(clock=time)
    with meter.blocked():
        time.now += 3
        with meter.busy():
            time.now += 5
        time.now += 2
    assert meter.total() == IdleWindow(10, 10, 5, 5)


def test_an_exception_ends_the_interval() -> None:
    time = Time()
    meter = IdleMeter(clock=time)

    def step() -> None:
        with meter.blocked():
            time.now += 1
            raise RuntimeError

    with pytest.raises(RuntimeError):
        step()
    time.now += 9
    assert meter.total() == IdleWindow(10, 1, 0, 1)


def test_a_clock_that_steps_back_takes_nothing_away() -> None:
    time = Time()
    meter = IdleMeter(clock=time)
    with meter.blocked():
        time.now += 5
        meter.total()
        time.now -= 3
    assert meter.total().idle_s == 5


def test_threads_overlap() -> None:
    meter = IdleMeter()
    both = threading.Barrier(3)

    def wait() -> None:
        with meter.blocked():
            both.wait()
            both.wait()

    threads = [threading.Thread(target=wait) for _ in range(2)]
    for thread in threads:
        thread.start()
    both.wait()
    reader = meter.window()
    middle = reader.pop()
    both.wait()
    for thread in threads:
        thread.join()
    assert middle.blocked_s == middle.wall_s == middle.idle_s
    end = meter.window()
    assert end.pop().blocked_s == 0


def test_union() -> None:
    assert union([(3, 4), (1, 2), (2, 3), (9, 9), (5, 8), (6, 7)]) == [(1, 4), (5, 8)]
    with pytest.raises(ConfigError, match="before it begins"):
        union([(2, 1)])
