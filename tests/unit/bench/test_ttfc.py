"""The TTFC benchmark's own arithmetic, its report, and what it refuses."""

from __future__ import annotations

import asyncio
import json
import re
from collections import Counter
from dataclasses import replace
from html.parser import HTMLParser
from typing import Any, ClassVar

import pytest

from rlsandbox.bench.html import page, seconds
from rlsandbox.bench.ttfc import Batch, Line, Plan, TtfcReport, in_turn, run_ttfc
from rlsandbox.cli.ttfc import _print, expanded
from rlsandbox.errors import ConfigError, ProvisionError, UnsupportedError


def report(*, p50: float = 0.004, backend: str = "kubernetes") -> TtfcReport:
    def batch(value: float, **how: Any) -> Batch:
        requests = Counter({"POST": 4, "DELETE": 4, "GET": 2, "throttled": 9})
        return Batch(
            ttfc_s=[value, value, value, value * 20], batch_s=0.5, requests=requests, sandboxes=2, **how
        )

    lines = [
        Line("job", 'reg/<b>&"x":1', [batch(2.0), Batch(failures=Counter({"image_pull": 4}))]),
        Line("recycled", None, [batch(p50 * k, command_s=[0.001, 0.002, 0.003]) for k in (1, 3, 2)]),
    ]
    plan = Plan(scenarios=("job", "recycled"), rounds=3, rollouts=4, concurrency=2)
    return TtfcReport(plan, backend, {"nodes": [{"name": "n</script>"}]}, lines, "2026-01-01T00:00:00")


def test_the_median_of_the_rounds_decides() -> None:
    told = report().to_dict()
    recycled = told["scenarios"][1]
    assert recycled["ttfc_s"]["p50"] == 0.008 and recycled["ttfc_s"]["p99"] == pytest.approx(0.16)
    assert recycled["command_s"] == 0.002
    assert recycled["requests_per_rollout"] == 10 / 4, "what was refused is counted once, as what it was"
    assert [round_["ttfc"]["p50"] for round_ in recycled["rounds"]] == [0.004, 0.012, 0.008]
    goals = {goal["label"]: goal for goal in told["goals"]}
    assert goals["recycled: TTFC P50"]["reached"] == 8.0 and goals["recycled: TTFC P50"]["ok"]
    assert goals["recycled: TTFC P99"]["rounds"] == [80.0, 240.0, 160.0]
    assert not goals["recycled: TTFC P99"]["ok"] and goals["recycled: sandboxes"]["ok"]
    assert report(backend="local").to_dict()["goals"] == []


def test_failures_have_no_time_and_are_told() -> None:
    told = report().to_dict()["scenarios"][0]
    assert told["failures"] == {"image_pull": 4}
    assert told["rounds"][1]["ttfc"] == {}, "no sample is no number, never 0"
    assert told["ttfc_s"]["p50"] == 2.0
    json.dumps(told)


class Page(HTMLParser):
    VOID = frozenset({"meta", "line", "circle", "rect"})

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.tags: Counter[str] = Counter()
        self.refers: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags[tag] += 1
        self.refers += [
            str(value) for name, value in attrs if name in ("src", "href", "xlink:href", "action")
        ]
        if tag not in self.VOID:
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        if tag not in self.VOID:
            assert self.open.pop() == tag


def test_the_report_is_one_whole_file_that_fetches_nothing() -> None:
    text = page(report())
    parser = Page()
    parser.feed(text)
    assert parser.open == [] and parser.refers == []
    assert not re.search(r"https?://|@import|url\(", text)
    assert parser.tags["svg"] == 3 and parser.tags["circle"] == 4 + 12
    assert "reg/<b>" not in text and "reg/&lt;b&gt;" in text
    data = re.search(r'<script type="application/json" id="data">(.*?)</script>', text, re.S)
    assert data is not None and json.loads(data[1])["facts"] == {"nodes": [{"name": "n</script>"}]}


def test_a_report_without_any_sandbox_is_still_a_page() -> None:
    nothing = report()
    for line in nothing.lines:
        line.rounds = [Batch(failures=Counter({"forbidden": 4}))]
    Page().feed(page(nothing))
    assert "No rollout got a sandbox" in page(nothing)


@pytest.mark.parametrize(
    ("value", "text"), [(None, "-"), (0.0123, "12.3 ms"), (0.9, "900 ms"), (12.345, "12.3 s")]
)
def test_seconds_for_people(value: float | None, text: str) -> None:
    assert seconds(value) == text


def test_ranges_of_images() -> None:
    assert expanded("r/task/{008..011}:1") == ["r/task/008:1", "r/task/009:1", "r/task/010:1", "r/task/011:1"]
    assert expanded("r/one:1") == ["r/one:1"]
    with pytest.raises(ConfigError, match="below"):
        expanded("r/{3..1}")


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        ({"scenarios": ("hot",)}, "no scenario is called 'hot'"),
        ({"scenarios": ()}, "no scenario is left"),
        ({"scenarios": ("high-cardinality",)}, "needs images"),
        ({"command": ()}, "command"),
    ],
)
def test_plans_that_cannot_be_measured(wrong: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        Plan(**wrong)


async def test_rounds_are_interleaved_and_the_bench_is_closed_whatever_happens() -> None:
    class Recorder:
        def __init__(self) -> None:
            self.did: list[str] = []

        async def check(self, plan: Plan) -> None:
            return None

        async def facts(self) -> dict[str, Any]:
            return {}

        async def batch(self, scenario: str, image: str | None, plan: Plan) -> Batch:
            self.did.append(f"{scenario} {image}")
            if plan.rounds == 9:
                raise RuntimeError("it broke")
            return Batch(ttfc_s=[1.0])

        async def close(self) -> None:
            self.did.append("closed")

    bench = Recorder()
    plan = Plan(scenarios=("cold", "recycled"), rounds=2, images=("a", "b"))
    told = await run_ttfc(bench, plan, backend="local")
    assert [line.label for line in told.lines] == ["cold, a", "cold, b", "recycled"]
    assert bench.did == [*["cold a", "cold b", "recycled a"] * 2, "closed"]
    broken = Recorder()
    with pytest.raises(RuntimeError):
        await run_ttfc(broken, Plan(rounds=9), backend="local")
    assert broken.did == ["warm None", "closed"]


async def test_a_scenario_that_fails_as_a_whole_is_in_the_report_beside_the_others() -> None:
    class Half:
        did: ClassVar[list[str]] = []

        async def check(self, plan: Plan) -> None:
            return None

        async def facts(self) -> dict[str, Any]:
            return {}

        async def batch(self, scenario: str, image: str | None, plan: Plan) -> Batch:
            self.did.append(scenario)
            if scenario == "peer":
                raise ProvisionError("no warm pool", kind="quota")
            if scenario == "cold":
                await asyncio.sleep(60)
            return Batch(ttfc_s=[1.0])

        async def close(self) -> None:
            return None

    plan = Plan(scenarios=("peer", "cold", "recycled"), rounds=4, rollouts=6, concurrency=2, timeout=0.05)
    told = await run_ttfc(Half(), plan, backend="kubernetes")
    assert [Half.did.count(name) for name in plan.scenarios] == [2, 2, 4]
    peer, cold, recycled = told.to_dict()["scenarios"]
    assert peer["failures"] == {"quota": 12}
    assert peer["rounds"][0]["notes"] == ["no warm pool"]
    assert cold["failures"] == {"bench_timeout": 4}
    assert (recycled["failures"], recycled["ttfc_s"]["p50"]) == ({}, 1.0)
    assert "quota 6: no warm pool" in page(told)
    assert (peer["batch_s"], peer["sandboxes"], peer["requests_per_rollout"]) == (None, None, None)
    nothing = TtfcReport(plan, "kubernetes", {}, [replace(told.lines[0], scenario="recycled")], "")
    assert nothing.verdicts() == []  # what did not happen was not fast
    _print(nothing)


async def test_what_cannot_be_measured_at_all_is_told_before_anything_is() -> None:
    class Unable:
        closed = False

        async def check(self, plan: Plan) -> None:
            raise UnsupportedError("needs warm pools")

        async def close(self) -> None:
            self.closed = True

    bench = Unable()
    with pytest.raises(UnsupportedError, match="needs warm pools"):
        await run_ttfc(bench, Plan(), backend="kubernetes")  # type: ignore[arg-type]
    assert bench.closed


async def test_an_image_that_cannot_be_removed_stops_the_run() -> None:
    class Never:
        async def batch(self, *what: object) -> Batch:
            raise AssertionError("measured all the same")

        facts = batch

        async def check(self, plan: Plan) -> None:
            return None

        async def close(self) -> None:
            return None

    plan = Plan(scenarios=("cold",), images=("a b",), evict="echo cannot remove {image} >&2; exit 3")
    with pytest.raises(ConfigError, match="failed with 3 for a b: cannot remove a b"):
        await run_ttfc(Never(), plan, backend="kubernetes")  # type: ignore[arg-type]


async def test_so_many_at_once() -> None:
    now, most, done = 0, 0, []

    async def one(i: int) -> None:
        nonlocal now, most
        now += 1
        most = max(most, now)
        await asyncio.sleep(0)
        now -= 1
        done.append(i)

    await in_turn(20, 3, one)
    assert sorted(done) == list(range(20)) and most == 3
