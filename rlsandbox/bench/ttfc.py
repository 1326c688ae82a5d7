"""``rlsandbox bench ttfc``: time to first command of a batch, in several ways of getting a sandbox.

All ways ("scenarios") are measured in one run and interleaved: each round runs every scenario once, so that
a cluster whose speed drifts favours none of them. All rounds are in the report; the median of the rounds
decides. Times are this process's monotonic clock and nothing else.
"""

from __future__ import annotations

import asyncio
import shlex
import statistics
from collections import Counter
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields
from typing import Any, Protocol

from ..errors import ConfigError, SandboxError, UnsupportedError
from ..metrics import Samples
from ..metrics.series import STATISTICS, Summary
from .goals import Verdict

SCENARIOS = {
    "job": "a Job of its own for each rollout; its first line is awaited",
    "peer": "a claim on a warm pool for each rollout, one exec call a command",
    "cold": "no sandbox is ready: one is made for each rollout, its image pulled where it was removed",
    "warm": "a sandbox is ready for each rollout, and none is used twice",
    "recycled": "sandboxes are reset and verified between rollouts",
    "high-cardinality": "many images with few rollouts each, recycled within an image",
}


_TRIES = 2
"""Rounds in which a scenario may fail as a whole before it is left out."""


@dataclass(frozen=True, kw_only=True)
class Plan:
    """What is measured.

    Args:
        scenarios: names of :data:`SCENARIOS`.
        rounds: each runs every scenario once.
        rollouts: of a batch; ``cold`` makes one wave of *concurrency*.
        concurrency: rollouts at once.
        size: sandboxes of the pool; default *concurrency*.
        think: seconds that a rollout holds its sandbox after its first command.
        commands: further commands that are timed in one held sandbox after the batch.
        command: what a rollout runs.
        images: each is measured by itself in ``job`` and ``cold``: their size is a variable. The first one
            serves the other scenarios. Empty: what the backend has.
        many: images of ``high-cardinality``.
        group: rollouts of each of these.
        evict: a shell command that removes ``{image}`` from all nodes, before each batch of ``cold``.
        timeout: seconds for a batch.
    """

    scenarios: Sequence[str] = ("warm", "recycled")
    rounds: int = 5
    rollouts: int = 64
    concurrency: int = 8
    size: int | None = None
    think: float = 0.0
    commands: int = 50
    command: Sequence[str] = ("/bin/echo", "hi")
    images: Sequence[str] = ()
    many: Sequence[str] = ()
    group: int = 2
    evict: str | None = None
    timeout: float = 600.0

    def __post_init__(self) -> None:
        for name in self.scenarios:
            if name not in SCENARIOS:
                raise ConfigError(f"no scenario is called {name!r}; there are {', '.join(SCENARIOS)}")
        if not self.scenarios:
            raise ConfigError("no scenario is left to be measured")
        if "high-cardinality" in self.scenarios and not self.many:
            raise ConfigError("high-cardinality needs images", hint="--many 'registry/task/{000..199}:1'")
        if not self.command:
            raise ConfigError("the command of a rollout is empty")

    @property
    def pool_size(self) -> int:
        return self.size if self.size is not None else self.concurrency

    def batch(self, scenario: str) -> int:
        """How many rollouts a batch of the scenario has."""
        if scenario == "cold":
            return min(self.concurrency, self.rollouts)
        return len(self.many) * self.group if scenario == "high-cardinality" else self.rollouts


@dataclass
class Batch:
    """One batch of one scenario.

    Args:
        ttfc_s: of each rollout that got so far.
        parts: sums of seconds by phase, where they are known.
        batch_s: first request until the last rollout's end.
        failures: by kind; a rollout that failed has no TTFC.
        requests: of the API server, by verb: for making ready, the batch, and giving everything back.
        requests_during: those of them that fell into the batch.
        sandboxes: pods that were made for it.
        fill_s: what making the pool ready took before; no part of TTFC.
        command_s: of further commands in one held sandbox.
        notes: what the cluster said of it (pulls).
    """

    ttfc_s: list[float] = field(default_factory=list)
    batch_s: float = 0.0
    failures: Counter[str] = field(default_factory=Counter)
    requests: Counter[str] = field(default_factory=Counter)
    requests_during: Counter[str] = field(default_factory=Counter)
    sandboxes: int = 0
    fill_s: float = 0.0
    command_s: list[float] = field(default_factory=list)
    parts: dict[str, float] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)
    facts: dict[str, str] = field(default_factory=dict)

    @property
    def summary(self) -> Summary:
        return Samples.of(self.ttfc_s).summary()

    @property
    def empty(self) -> bool:
        """Whether no rollout got a sandbox."""
        return not self.ttfc_s and bool(self.failures)

    @property
    def rollouts(self) -> int:
        return len(self.ttfc_s) + sum(self.failures.values())

    @property
    def requests_each(self) -> float:
        """Of the API server, a rollout, all told."""
        made = sum(n for verb, n in self.requests.items() if verb not in ("repeated", "throttled"))
        return made / max(1, self.rollouts)

    def to_dict(self) -> dict[str, Any]:
        plain = {f.name: getattr(self, f.name) for f in fields(self)}
        return {
            **{name: dict(value) if isinstance(value, Counter) else value for name, value in plain.items()},
            "ttfc": self.summary.to_dict(),
            "requests_per_rollout": self.requests_each,
        }


class Bench(Protocol):
    """A backend that is measured."""

    async def facts(self) -> dict[str, Any]:
        """What it is: nodes, versions, images, settings."""
        ...

    async def check(self, plan: Plan) -> None:
        """
        Raises:
            ConfigError, UnsupportedError: what *plan* wants cannot be measured here: told before anything is.
        """
        ...

    async def batch(self, scenario: str, image: str | None, plan: Plan) -> Batch: ...

    async def close(self) -> None: ...


@dataclass
class Line:
    """One scenario with one image, over all rounds."""

    scenario: str
    image: str | None
    rounds: list[Batch] = field(default_factory=list)
    one_of_several: bool = True
    """Whether the scenario is measured with other images as well."""

    @property
    def label(self) -> str:
        plain = self.image is None or not self.one_of_several
        return self.scenario if plain else f"{self.scenario}, {self.image}"

    def each(self, of: Callable[[Batch], float | None]) -> list[float]:
        """The number of each round that has it; one in which no rollout got a sandbox has none."""
        rounds = [batch for batch in self.rounds if not batch.empty]
        return [value for value in map(of, rounds) if value is not None]

    def median(self, of: Callable[[Batch], float | None]) -> float | None:
        """The median of the rounds that have the number."""
        found = self.each(of)
        return statistics.median(found) if found else None

    def statistic(self, name: str) -> float | None:
        return self.median(lambda batch: getattr(batch.summary, name))

    def to_dict(self) -> dict[str, Any]:
        failures: Counter[str] = Counter()
        for batch in self.rounds:
            failures += batch.failures
        return {
            "scenario": self.scenario,
            "image": self.image,
            "what": SCENARIOS[self.scenario],
            "ttfc_s": {name: self.statistic(name) for name in STATISTICS},
            "batch_s": self.median(lambda batch: batch.batch_s),
            "command_s": self.median(_command),
            "requests_per_rollout": self.median(lambda batch: batch.requests_each),
            "sandboxes": self.median(lambda batch: batch.sandboxes),
            "failures": dict(failures),
            "rounds": [batch.to_dict() for batch in self.rounds],
        }


def _command(batch: Batch) -> float | None:
    return statistics.median(batch.command_s) if batch.command_s else None


@dataclass
class TtfcReport:
    """All of one run."""

    plan: Plan
    backend: str
    facts: Mapping[str, Any]
    lines: list[Line]
    began: str

    def verdicts(self) -> list[Verdict]:
        """The goals for a cluster; there are none elsewhere (``bench local`` has those of a machine)."""
        if self.backend != "kubernetes":
            return []
        found = []
        for line in self.lines:
            if line.scenario != "recycled":
                continue
            rows: list[tuple[str, Callable[[Batch], float | None], float, str]] = [
                ("TTFC P50", lambda b: _ms(b.summary.p50), 10.0, "ms"),
                ("TTFC P99", lambda b: _ms(b.summary.p99), 100.0, "ms"),
                ("whole batch", lambda b: b.batch_s, 2.0, "s"),
                ("sandboxes", lambda b: float(b.sandboxes), float(self.plan.pool_size), ""),
                ("command, median", lambda b: _ms(_command(b)), 2.0, "ms"),
            ]
            for label, of, most, unit in rows:
                if rounds := tuple(line.each(of)):
                    found.append(Verdict(f"recycled: {label}", statistics.median(rounds), most, unit, rounds))
        return found

    def to_dict(self) -> dict[str, Any]:
        return {
            "what": "rlsandbox bench ttfc",
            "began": self.began,
            "backend": self.backend,
            "plan": asdict(self.plan),
            "facts": dict(self.facts),
            "scenarios": [line.to_dict() for line in self.lines],
            "goals": [
                {**asdict(v), "rounds": list(v.rounds), "ok": v.ok} for v in self.verdicts()
            ],
        }  # fmt: skip


def _ms(seconds: float | None) -> float | None:
    return None if seconds is None else seconds * 1e3


async def run_ttfc(
    bench: Bench,
    plan: Plan,
    *,
    backend: str,
    progress: Callable[[str], None] = lambda text: None,
    began: str = "",
) -> TtfcReport:
    """Measure; *bench* is closed whatever happens."""
    try:
        lines = [
            Line(scenario, image, one_of_several=len(images) > 1)
            for scenario in plan.scenarios
            for images in [(plan.images if scenario in ("job", "cold") else plan.images[:1]) or (None,)]
            for image in images
        ]
        await bench.check(plan)
        for number in range(plan.rounds):
            for line in lines:
                if sum(batch.empty for batch in line.rounds) >= _TRIES:
                    progress(f"round {number + 1} of {plan.rounds}: {line.label}: left out, it failed twice")
                    continue
                progress(f"round {number + 1} of {plan.rounds}: {line.label}")
                if line.scenario == "cold" and plan.evict is not None and line.image is not None:
                    await _evict(plan.evict, line.image)
                line.rounds.append(await _measured(bench, line, plan, progress))
        facts = await bench.facts()
    finally:
        await bench.close()
    return TtfcReport(plan, backend, facts, lines, began)


async def _measured(bench: Bench, line: Line, plan: Plan, progress: Callable[[str], None]) -> Batch:
    """One batch. One that cannot be measured is in the report, beside those that could."""
    try:
        async with asyncio.timeout(plan.timeout) as limit:
            return await bench.batch(line.scenario, line.image, plan)
    except (ConfigError, UnsupportedError):
        raise
    except SandboxError as error:
        kind, said = error.kind, str(error)
    except TimeoutError:
        if not limit.expired():
            raise
        kind, said = "bench_timeout", f"the batch was not over after {plan.timeout:g} s"
    progress(f"  failed: {said}")
    return Batch(failures=Counter({kind: plan.batch(line.scenario)}), notes=[said])


async def _evict(command: str, image: str) -> None:
    done = await asyncio.create_subprocess_shell(
        command.replace("{image}", shlex.quote(image)),
        stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.STDOUT,
    )  # fmt: skip
    said, _ = await done.communicate()
    if done.returncode:
        words = said.decode(errors="replace").split("\n")
        raise ConfigError(
            f"--evict failed with {done.returncode} for {image}: {next(filter(None, reversed(words)), '')}"
        )


async def in_turn(n: int, concurrency: int, one: Callable[[int], Awaitable[object]]) -> None:
    """``one(0)`` to ``one(n - 1)``, so many at once; each begins when a place is free."""
    numbers = iter(range(n))

    async def work() -> None:
        for number in numbers:
            await one(number)

    async with asyncio.TaskGroup() as group:
        for _ in range(min(n, concurrency)):
            group.create_task(work())
