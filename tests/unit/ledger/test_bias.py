"""Is what is missing missing by chance? Runs with injected failures, once random, once only on hard tasks."""

from __future__ import annotations

import io
import json
import random
from collections.abc import Callable

import pytest

from rlsandbox.ledger.records import AttemptLog, RolloutLog
from rlsandbox.ledger.report import Report
from rlsandbox.results import Failure, Record

INFRA = Failure("sandbox_died", "command", "gone", True, True)
HARDNESS = {"easy": 0.9, "medium": 0.5, "hard": 0.1}


def run_of(
    missing: Callable[[random.Random, str, int], bool],
    *,
    seed: int,
    told: bool = True,
    tasks: int = 60,
    group: int = 8,
) -> Report:
    """*tasks* tasks, a third of each difficulty, *group* rollouts each; *missing* says which ones broke."""
    rng = random.Random(seed)
    logs = []
    for t in range(tasks):
        difficulty = list(HARDNESS)[t % 3]
        for i in range(group):
            gone = missing(rng, difficulty, t)
            reward = None if gone else float(rng.random() < HARDNESS[difficulty])
            record = Record(
                f"t{t}", i, 1, "failed" if gone else "completed", reward, None, None,
                INFRA if gone else None, 0.1, f"t{t}@0", "run", f"run/t{t}/{i}", 1.0, 2.0,
            )  # fmt: skip
            logs.append(
                RolloutLog(
                    record.id,
                    "run",
                    f"t{t}",
                    i,
                    f"t{t}@0",
                    "b",
                    1.0,
                    True,
                    f"img{t % 2}",
                    {"difficulty": difficulty} if told else {},
                    attempts=[AttemptLog(1, 1.0, 1.1)],
                    record=record,
                )
            )
    return Report(logs)


def at_random(rng: random.Random, difficulty: str, task: int) -> bool:
    return rng.random() < 0.10


def only_hard(rng: random.Random, difficulty: str, task: int) -> bool:
    return difficulty == "hard" and rng.random() < 0.30  # of a third: 10 % of all


@pytest.mark.parametrize("told", [True, False], ids=["difficulty told", "difficulty estimated"])
def test_random_and_hard_only_are_told_apart(told: bool) -> None:
    wrong_alarms = missed = 0
    for seed in range(15):
        chance = run_of(at_random, seed=seed, told=told).bias()
        wrong_alarms += bool(chance.alarming)
        bias = run_of(only_hard, seed=seed, told=told).bias()
        assert 0.05 < bias.missing / bias.requested < 0.15
        if "difficulty" in [factor.name for factor in bias.alarming]:
            assert "hard tasks are missing more often, the mean reward is probably too high" in bias.verdict
        else:
            missed += 1
    assert wrong_alarms <= 1
    assert missed <= (0 if told else 1)


def test_easy_only_says_too_low() -> None:
    bias = run_of(lambda rng, difficulty, t: difficulty == "easy" and rng.random() < 0.3, seed=1).bias()
    assert "easy tasks are missing more often, the mean reward is probably too low" in bias.verdict


def test_one_bad_image_shows() -> None:
    bias = run_of(lambda rng, difficulty, t: t % 2 == 0 and rng.random() < 0.2, seed=1).bias()
    assert "image" in [factor.name for factor in bias.alarming]
    assert "image" in bias.verdict
    assert "difficulty" not in [factor.name for factor in bias.alarming]


def test_whole_groups_missing_show() -> None:
    bias = run_of(lambda rng, difficulty, t: t in (3, 17, 28, 40, 51, 59), seed=1).bias()
    assert "group" in [factor.name for factor in bias.alarming]
    (group,) = [factor for factor in bias.factors if factor.name == "group"]
    assert sum(level.missing == level.requested for level in group.levels) == 6


def test_tasks_that_are_missing_altogether_are_counted() -> None:
    bias = run_of(lambda rng, difficulty, t: difficulty == "hard" and t < 6, seed=1, told=False).bias()
    (factor,) = [f for f in bias.factors if f.name == "difficulty"]
    assert "of 2 tasks nothing is known: all their rewards are missing" in factor.note


def test_the_bounds_hold_the_truth() -> None:
    for seed in range(10):
        truth = run_of(lambda *_: False, seed=seed)
        report = run_of(only_hard, seed=seed + 100)
        assert truth.mean_reward is not None
        low, high = report.bias().reward_bounds or (1.0, 0.0)
        assert low - 0.1 <= truth.mean_reward <= high + 0.1
        for factor in report.bias().factors:
            for level in factor.levels:
                mean = level.mean_reward
                assert mean is None or level.reward_bounds[0] <= mean <= level.reward_bounds[1]
    report = run_of(only_hard, seed=3)
    bias = report.bias()
    assert bias.mean_of_tasks is not None
    assert report.mean_reward is not None
    assert bias.mean_of_tasks < report.mean_reward, "weighing tasks alike mends most of it"


def test_nothing_missing_and_nothing_at_all() -> None:
    assert (
        run_of(lambda *_: False, seed=1).bias().verdict
        == "nothing is missing: the mean reward is what it says"
    )
    assert "nothing to say" in Report([]).bias().verdict
    everything = run_of(lambda *_: True, seed=1, told=False).bias()
    assert everything.mean_reward is None
    assert everything.reward_bounds == (0.0, 1.0)
    assert everything.alarming == []
    assert "too little to tell" in everything.verdict


def test_it_is_the_same_every_time_and_json() -> None:
    one, two = (run_of(only_hard, seed=5).bias().to_dict() for _ in range(2))
    assert one == two
    assert json.loads(json.dumps(one, allow_nan=False)) == one
    assert one["goes_with"]


def test_numbers_as_difficulty_and_large_runs() -> None:
    report = run_of(at_random, seed=1, tasks=1500, group=8)
    for log in report.logs:
        log.metadata["difficulty"] = int(log.task_id[1:]) % 7
    bias = report.bias()
    (factor,) = [f for f in bias.factors if f.name == "difficulty"]
    assert [level.name for level in factor.levels] == [str(i) for i in range(7)]
    assert not bias.alarming


def test_tables() -> None:
    from rich.console import Console

    out = io.StringIO()
    run_of(only_hard, seed=1).bias().print(Console(file=out, width=120, color_system=None))
    text = out.getvalue()
    for expected in (
        "missing by group",
        "missing by difficulty (by chance alone: p < 0.0001)",
        "hard",
        "(40 more)",
    ):
        assert expected in text, text
    assert "what is missing goes with" in text
