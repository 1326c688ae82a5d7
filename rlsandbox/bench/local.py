"""``rlsandbox bench local``: medians and P99s of this machine, as ratios in one run.

Rounds are interleaved (each round measures every figure once) so that a machine whose speed drifts does not
favour one of them; the median of the rounds' ratios decides.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from ..metrics import Samples
from ..pool.sync import Pool
from . import measure
from .goals import Verdict


@dataclass(frozen=True)
class Goal:
    """What a figure should reach: at most *most*, of the ratio when *over* is named, else of the median."""

    most: float
    over: str | None = None
    unit: str = "x"


@dataclass
class Figure:
    """One figure over all rounds.

    Args:
        name: short, unique.
        label: for the table.
        rounds: milliseconds of single operations, a list a round.
        goals: what it should reach.
    """

    name: str
    label: str
    goals: tuple[Goal, ...] = ()
    rounds: list[list[float]] = field(default_factory=list)

    def medians(self) -> list[float]:
        return [statistics.median(values) for values in self.rounds]

    @property
    def median(self) -> float:
        return statistics.median(self.medians())

    @property
    def p99(self) -> float:
        value = Samples.of([v for values in self.rounds for v in values]).percentile(99)
        assert value is not None
        return value

    def ratios(self, other: Figure) -> list[float]:
        """Median over median, round by round."""
        return [mine / theirs for mine, theirs in zip(self.medians(), other.medians(), strict=True)]


@dataclass
class LocalReport:
    """All figures of one run."""

    rounds: int
    samples: int
    figures: dict[str, Figure]
    held: list[measure.Held]
    machine: Mapping[str, str]

    def verdicts(self) -> list[Verdict]:
        found = []
        for figure in self.figures.values():
            for goal in figure.goals:
                if goal.over is None:
                    rounds, label = figure.medians(), f"{figure.label}, median"
                elif goal.over in self.figures:
                    rounds = figure.ratios(self.figures[goal.over])
                    label = f"{figure.label} over {self.figures[goal.over].label}"
                else:
                    continue
                found.append(Verdict(label, statistics.median(rounds), goal.most, goal.unit, tuple(rounds)))
        for held in self.held:
            found.append(
                Verdict(
                    f"idle sandbox, all told ({held.n} held)", held.mib_each, 1.0, "MiB", (held.mib_each,)
                )
            )
            if held.n >= 1000:
                gib = held.bytes / (1 << 30)
                found.append(Verdict(f"{held.n} held together", gib, 1.5 * held.n / 1000, "GiB", (gib,)))
        return found

    def to_dict(self) -> dict[str, Any]:
        return {
            "machine": dict(self.machine),
            "rounds": self.rounds,
            "samples": self.samples,
            "figures": {
                f.name: {
                    "label": f.label,
                    "median_ms": f.median,
                    "p99_ms": f.p99,
                    "round_medians_ms": f.medians(),
                }
                for f in self.figures.values()
            },
            "held": [
                {
                    "n": h.n,
                    "fill_s": h.fill_s,
                    "bytes": h.bytes,
                    "claim_ms_median": statistics.median(h.claim_ms),
                    "claim_ms_p99": Samples.of(h.claim_ms).percentile(99),
                }
                for h in self.held
            ],
            "goals": [
                {"what": v.label, "reached": v.reached, "at_most": v.most, "unit": v.unit, "ok": v.ok}
                for v in self.verdicts()
            ],
        }


GIT_RATIO = 1 / 50  # a reset is to be fifty times as fast


def figures() -> dict[str, Figure]:
    made = (
        Figure("popen", "Popen, first byte"),
        Figure("warm", "warm claim, first byte", (Goal(1.5, "popen"),)),
        Figure("popen_rested", "Popen after a rest, first byte"),
        Figure("cold", "cold claim, first byte", (Goal(4.0, "popen_rested"),)),
        Figure("popen_rested_2", "Popen after a rest, once more"),
        Figure("first", "cold claim unlike any before"),
        Figure("popen_run", "subprocess.run"),
        Figure("command", "command", (Goal(1.5, "popen_run"),)),
        Figure("reset_clean", "reset, clean"),
        Figure("reset_small", "reset, small dirt", (Goal(1.5, None, "ms"), Goal(GIT_RATIO, "git"))),
        Figure("reset_large", "reset, 2,000 files and daemons"),
        Figure("git", f"git reset + clean of {measure.REPOSITORY_FILES} files"),
    )
    return {figure.name: figure for figure in made}


def run_local(
    *,
    rounds: int = 5,
    samples: int = 50,
    hold: tuple[int, ...] = (),
    progress: Callable[[str], None] = lambda text: None,
) -> LocalReport:
    """Measure this machine.

    Args:
        rounds: interleaved rounds.
        samples: operations of each cheap figure a round; dear ones take fewer.
        hold: numbers of idle sandboxes to hold, each measured once.
        progress: told what is being measured.
    """
    from ..backends.local.state import machine_id

    found = figures()
    few, some = max(2, samples // 10), max(2, samples // 3)
    machine = {"machine": machine_id().split()[0][:8], **_machine()}
    for number in range(rounds):
        with Pool("local", size=4, config=False) as pool:
            pool.wait_ready(4, timeout=60)
            jobs: dict[str, Callable[[], Sequence[list[float] | None]]] = {
                "popen warm": lambda: measure.warm_first_byte(pool, samples),
                "popen_rested cold": lambda: measure.cold_first_byte(some, alike=True),
                "popen_rested_2 first": lambda: measure.cold_first_byte(some, alike=False),
                "popen_run command": lambda: measure.command(pool, samples),
                "reset_clean": lambda: [measure.resets(pool, few, None)],
                "reset_small": lambda: [measure.resets(pool, few, measure.SMALL_DIRT)],
                "reset_large": lambda: [measure.resets(pool, 2, measure.LARGE_DIRT)],
                "git": lambda: [measure.git_resets(3)],
            }
            for names, job in jobs.items():
                measured = [found[name] for name in names.split()]
                progress(f"round {number + 1} of {rounds}: {measured[-1].label}")
                for figure, values in zip(measured, job(), strict=True):
                    if values is not None:
                        figure.rounds.append(values)
    held = []
    for n in hold:
        progress(f"holding {n} idle sandboxes")
        held.append(measure.hold(n))
    kept = {name: figure for name, figure in found.items() if figure.rounds}
    return LocalReport(rounds, samples, kept, held, machine)


def _machine() -> dict[str, str]:
    import os
    import platform

    return {
        "cpus": str(os.cpu_count()),
        "kernel": platform.release(),
        "python": platform.python_version(),
        "architecture": platform.machine(),
    }
