"""Does what is missing go with something? :func:`bias_of` asks that of groups, difficulty and images.

A mean over the rewards there are is fair only when rollouts go missing by chance. When they go missing more
often on hard tasks, it is too high. The tests are permutation tests: the missing ones are dealt anew over all
rollouts many times, and it is counted how often chance alone makes a picture as uneven as the real one.

Difficulty is the task's own (``metadata["difficulty"]``: a number, or easy, medium, hard); without one it is
estimated as 1 - mean reward of the task's rollouts that have a reward. Of a task that is missing altogether
nothing can be estimated: such tasks are counted, and the bounds tell how much they matter.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from .records import RolloutLog

if TYPE_CHECKING:
    from .report import Report

ALPHA = 0.01
"""Of all tests together: chance alone raises the alarm in one report of a hundred."""
DEALS, FEWEST_DEALS = 10_000, 1_000
_WORDS = {
    "trivial": 0.0,
    "easy": 1.0,
    "medium": 2.0,
    "normal": 2.0,
    "hard": 3.0,
    "difficult": 3.0,
    "expert": 4.0,
}


@dataclass(frozen=True)
class Level:
    """A group, a difficulty, an image: how many were asked for, how many have no reward."""

    name: str
    requested: int
    missing: int
    mean_reward: float | None
    reward_bounds: tuple[float, float]

    @property
    def share(self) -> float:
        return self.missing / self.requested


@dataclass(frozen=True)
class Factor:
    """Something that missing rewards may go with. ``p``: how probable chance makes it; None: untestable."""

    name: str
    levels: tuple[Level, ...]
    p: float | None
    direction: float | None = None
    """For difficulty: by how much the missing are harder (above 0) than the rest."""
    note: str = ""


@dataclass(frozen=True)
class Bias:
    """What is missing, with what it goes, and how far the mean reward may be off."""

    requested: int
    missing: int
    by_outcome: dict[str, int]
    mean_reward: float | None
    reward_bounds: tuple[float, float] | None
    mean_of_tasks: float | None
    """The mean of the tasks' means: what is left when rollouts are missing by chance *within* tasks."""
    factors: tuple[Factor, ...] = field(default=())

    @property
    def alarming(self) -> list[Factor]:
        """Factors that missing rewards go with, beyond chance."""
        tested = [factor for factor in self.factors if factor.p is not None]
        return [factor for factor in tested if factor.p is not None and factor.p * len(tested) < ALPHA]

    @property
    def verdict(self) -> str:
        """One sentence."""
        if not self.requested:
            return "no rollout with a grader was asked for: there is nothing to say"
        if not self.missing:
            return "nothing is missing: the mean reward is what it says"
        found = self.alarming
        if not found:
            tested = ", ".join(factor.name for factor in self.factors if factor.p is not None)
            if not tested:
                return "rewards are missing, and there is too little to tell with what that goes"
            return f"no sign that what is missing goes with anything that was looked at ({tested})"
        names = " and ".join(factor.name for factor in found)
        hard = next((f.direction for f in found if f.direction is not None), None)
        way = ""
        if hard is not None:
            way = ": hard tasks are missing more often, the mean reward is probably too " + (
                "high" if hard > 0 else "low"
            )
            if hard <= 0:
                way = way.replace("hard tasks", "easy tasks")
        return f"what is missing goes with {names}{way}"

    def to_dict(self) -> dict[str, Any]:
        """JSON-able."""
        return {
            "requested": self.requested,
            "missing": self.missing,
            "by_outcome": self.by_outcome,
            "mean_reward": self.mean_reward,
            "mean_of_tasks": self.mean_of_tasks,
            "reward_bounds": None if self.reward_bounds is None else list(self.reward_bounds),
            "verdict": self.verdict,
            "goes_with": [factor.name for factor in self.alarming],
            "factors": [
                {
                    "name": factor.name,
                    "p": factor.p,
                    "direction": factor.direction,
                    "note": factor.note,
                    "levels": [
                        {
                            "name": level.name,
                            "requested": level.requested,
                            "missing": level.missing,
                            "mean_reward": level.mean_reward,
                            "reward_bounds": list(level.reward_bounds),
                        }
                        for level in factor.levels
                    ],
                }
                for factor in self.factors
            ],
        }

    def print(self, console: Any = None) -> None:
        """Tables for a terminal."""
        from .tables import print_bias

        print_bias(self, console)


def bias_of(report: Report, *, seed: int = 0) -> Bias:
    """Look at the rollouts of *report* that have a reward or should have one."""
    logs = report.rewardable
    missing = report.missing
    by_outcome: dict[str, int] = {}
    for log in missing:
        name = "open" if log.record is None else log.record.outcome
        by_outcome[name] = by_outcome.get(name, 0) + 1
    task_means = [m for m in _task_means(logs).values() if m is not None]
    factors = tuple(
        factor
        for factor in (
            _categories("group", logs, lambda log: log.group, report.reward_range, seed),
            _difficulty(logs, report.reward_range, seed),
            _categories("image", logs, lambda log: log.image or "(base)", report.reward_range, seed),
        )
        if factor is not None
    )
    return Bias(
        requested=len(logs),
        missing=len(missing),
        by_outcome=by_outcome,
        mean_reward=report.mean_reward,
        reward_bounds=report.reward_bounds,
        mean_of_tasks=math.fsum(task_means) / len(task_means) if task_means else None,
        factors=factors,
    )


def _reward(log: RolloutLog) -> float | None:
    return None if log.record is None else log.record.reward


def _task_means(logs: Sequence[RolloutLog]) -> dict[str, float | None]:
    rewards: dict[str, list[float]] = {}
    for log in logs:
        found = rewards.setdefault(log.task_id, [])
        reward = _reward(log)
        if reward is not None:
            found.append(reward)
    return {task: math.fsum(found) / len(found) if found else None for task, found in rewards.items()}


def _levels(
    logs: Sequence[RolloutLog], name_of: Callable[[RolloutLog], str], reward_range: tuple[float, float]
) -> tuple[Level, ...]:
    grouped: dict[str, list[RolloutLog]] = {}
    for log in logs:
        grouped.setdefault(name_of(log), []).append(log)
    low, high = reward_range
    levels = []
    for name, members in grouped.items():
        rewards = [reward for reward in map(_reward, members) if reward is not None]
        n, total, gone = len(members), math.fsum(rewards), len(members) - len(rewards)
        mean = total / len(rewards) if rewards else None
        levels.append(Level(name, n, gone, mean, ((total + low * gone) / n, (total + high * gone) / n)))
    return tuple(levels)


def _categories(
    name: str,
    logs: Sequence[RolloutLog],
    name_of: Callable[[RolloutLog], str],
    reward_range: tuple[float, float],
    seed: int,
) -> Factor | None:
    levels = _levels(logs, name_of, reward_range)
    if len(levels) < 2:
        return None
    sizes = [level.requested for level in levels]
    p = None
    note = ""
    if max(sizes) < 2:
        note = f"every {name} has one rollout: nothing to compare"
    else:
        p = _uneven(sizes, [level.missing for level in levels], seed)
    return Factor(name, levels, p, note=note)


def _difficulty(logs: Sequence[RolloutLog], reward_range: tuple[float, float], seed: int) -> Factor | None:
    """Difficulty has an order: the test asks whether the missing are harder or easier than the rest."""
    own: dict[str, float] = {}
    names: dict[str, str] = {}
    for log in logs:
        told = log.metadata.get("difficulty")
        if isinstance(told, str) and told.strip().lower() in _WORDS:
            own[log.task_id], names[log.task_id] = _WORDS[told.strip().lower()], told.strip().lower()
        elif isinstance(told, (int, float)) and not isinstance(told, bool) and math.isfinite(told):
            own[log.task_id], names[log.task_id] = float(told), f"{told:g}"
    if own:
        known = [log for log in logs if log.task_id in own]
        score = own
        note = "as the tasks' metadata says"
        name_of = dict(names)
    else:
        low, high = reward_range
        means = _task_means(logs)
        span = (high - low) or 1.0
        score = {task: (high - mean) / span for task, mean in means.items() if mean is not None}
        known = [log for log in logs if log.task_id in score]
        note = "estimated from the rewards there are"
        thirds = ("easy (mean reward in the top third)", "medium", "hard (mean reward in the bottom third)")
        name_of = {task: thirds[min(2, int(value * 3))] for task, value in score.items()}
    unknown = len({log.task_id for log in logs} - set(score))
    if unknown:
        note += f"; of {unknown} tasks nothing is known" + ("" if own else ": all their rewards are missing")
    if len(set(score.values())) < 2:
        return None
    levels = _levels(known, lambda log: name_of[log.task_id], reward_range)
    rank = {name: score[task] for task, name in name_of.items()}
    levels = tuple(sorted(levels, key=lambda level: rank[level.name]))
    values = sorted(set(score.values()))
    at = {value: i for i, value in enumerate(values)}
    sizes, gone = [0] * len(values), [0] * len(values)
    for log in known:
        sizes[at[score[log.task_id]]] += 1
        gone[at[score[log.task_id]]] += _reward(log) is None
    p, direction = _shifted(values, sizes, gone, seed)
    return Factor("difficulty", levels, p, direction, note)


def _uneven(sizes: list[int], missing: list[int], seed: int) -> float | None:
    """How often chance deals the missing over the levels at least as unevenly (chi square)."""
    import numpy as np

    n, gone = sum(sizes), sum(missing)
    if not 0 < gone < n:
        return None
    expected = np.asarray(sizes) * (gone / n)
    real = float((((np.asarray(missing) - expected) ** 2) / expected).sum())
    at_least = total = 0
    for dealt in _deals(sizes, gone, seed):
        at_least += int(((((dealt - expected) ** 2) / expected).sum(axis=1) >= real - 1e-9).sum())
        total += len(dealt)
    return (at_least + 1) / (total + 1)


def _shifted(
    values: list[float], sizes: list[int], missing: list[int], seed: int
) -> tuple[float | None, float | None]:
    """How often chance shifts the mean value of the missing at least as far, and how far it is shifted."""
    import numpy as np

    n, gone = sum(sizes), sum(missing)
    if not 0 < gone < n:
        return None, None
    value = np.asarray(values)
    overall = float((value * np.asarray(sizes)).sum()) / n
    real = float((value * np.asarray(missing)).sum()) / gone - overall
    at_least = total = 0
    for dealt in _deals(sizes, gone, seed):
        shift = (dealt * value).sum(axis=1) / gone - overall
        at_least += int((np.abs(shift) >= abs(real) - 1e-12).sum())
        total += len(dealt)
    return (at_least + 1) / (total + 1), real * n / (n - gone)


def _deals(sizes: list[int], gone: int, seed: int) -> Iterator[Any]:
    """*gone* missing ones dealt by chance over levels of these *sizes*, many times: arrays, a row a deal."""
    import numpy as np

    rng = np.random.default_rng(seed)
    left = max(FEWEST_DEALS, min(DEALS, 4_000_000 // len(sizes)))
    while left:
        k = min(left, max(1, 1_000_000 // len(sizes)))
        yield rng.multivariate_hypergeometric(sizes, gone, size=k, method="marginals")
        left -= k
