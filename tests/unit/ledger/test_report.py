"""Reports: what the numbers are, what they are not, and how they look."""

from __future__ import annotations

import io
import json
import math
import sys
from pathlib import Path
from typing import Any

import pytest

from rlsandbox.errors import ConfigError, UnsupportedError
from rlsandbox.ledger.records import AttemptLog, Note, Process, RolloutLog
from rlsandbox.ledger.report import COLUMNS, Report
from rlsandbox.results import Failure, Record

INFRA = Failure("sandbox_died", "command", "gone", True, True)
OWN = Failure("policy_error", "policy", "bug", False, False)


def log(
    task: str = "t", index: int = 0, status: str | None = "completed", reward: float | None = None, *,
    failure: Failure | None = None, graded: bool = True, batch: str = "b1", node: str | None = "n1",
    image: str | None = None, begin: float = 100.0, end: float = 101.0, broken: int = 0,
    isolation: str = "auto", ran: bool = True, **more: Any,
) -> RolloutLog:  # fmt: skip
    group = f"{task}@0"
    id_ = f"run/{task}/{index}"
    attempts = [
        AttemptLog(i + 1, begin, begin, end, f"s{i}", node, image, isolation=isolation, failure=INFRA)
        for i in range(broken)
    ]
    if ran:
        attempts.append(
            AttemptLog(
                broken + 1, begin, begin + 0.1, end, "s", node, image, isolation=isolation, failure=failure
            )
        )
    record = None
    if status is not None:
        record = Record(
            task, index, len(attempts), status, reward, None, None, failure, 0.1, group, "run", id_, begin,  # type: ignore[arg-type]
            end, node, image, None, ran,
        )  # fmt: skip
    return RolloutLog(
        id_, "run", task, index, group, batch, begin, graded, image, attempts=attempts, record=record, **more
    )


def test_missing_is_never_nought() -> None:
    report = Report(
        [
            log(index=0, reward=1.0),
            log(index=1, reward=0.0),
            log(index=2, status="failed", failure=INFRA),
            log(index=3, status="lost", failure=INFRA),
            log(index=4, status="cancelled", failure=INFRA, ran=False),
            log(index=5, status="failed", failure=OWN),
            log(index=6, reward=None),
            log(index=7, status=None),
        ]
    )
    assert report.mean_reward == 0.5
    assert report.reward_bounds == (1 / 8, 7 / 8)
    assert report.coverage == 3 / 8
    assert (report.requested, report.completed, len(report.records), len(report.missing)) == (8, 3, 7, 6)
    assert report.outcomes() == {
        "rewarded": 2, "failed_by_infrastructure": 1, "lost": 1, "never_ran": 1, "failed_by_task": 1,
        "unrewarded": 1, "open": 1,
    }  # fmt: skip
    assert any("1 rollouts have no end yet" in w for w in report.warnings)


def test_what_had_no_grader_is_not_missing() -> None:
    report = Report([log("a", graded=False), log("b", reward=0.5)])
    assert report.missing == []
    assert report.reward_bounds == (0.5, 0.5)
    report = Report([log("a", 0, graded=False), log("a", 1, reward=0.5, graded=False)])
    assert len(report.missing) == 1, "its sibling got a reward, from a grader of the policy's own"


def test_nothing_gives_no_number() -> None:
    report = Report([])
    assert math.isnan(report.coverage)
    assert (report.mean_reward, report.reward_bounds, report.batch_completion_s) == (None, None, None)
    assert report.coverage != 1.0, "an empty batch passes no gate"
    assert report.to_dict()["coverage"] is None
    json.dumps(report.to_dict(), allow_nan=False)
    assert "0 of 0" in repr(report)


def test_rewards_outside_the_range_widen_it() -> None:
    logs = [log("a", reward=-3.0), log("b", status="failed", failure=INFRA)]
    assert Report(logs).reward_bounds == (-3.0, -1.0)
    assert Report(logs, reward_range=(-5, 10)).reward_bounds == (-4.0, 3.5)
    with pytest.raises(ConfigError, match="reward_range"):
        Report([], reward_range=(1, 0))


def test_batches() -> None:
    report = Report(
        [
            log("a", begin=10.0, end=12.0, batch="1"),
            log("b", begin=11.0, end=15.0, batch="1"),
            log("a", 1, begin=20.0, end=21.0, batch="2"),
            log("b", 1, begin=20.0, status=None, batch="3"),
        ]
    )
    assert [(b.batch, b.rollouts, b.completion_s) for b in report.batches] == [
        ("1", 2, 5.0),
        ("2", 1, 1.0),
        ("3", 1, None),
    ]
    assert report.batch_completion_s == 3.0


def test_failures_by_everything() -> None:
    report = Report(
        [
            log("a", status="failed", failure=INFRA, node="n2", image="i1"),
            log("a", 1, status="failed", failure=INFRA, node="n2"),
            log("b", status="failed", failure=OWN, node=None),
            log("c", reward=1.0, broken=2),
        ]
    )
    assert report.failures() == {"sandbox_died": 2, "policy_error": 1}
    assert report.failures("phase") == {"command": 2, "policy": 1}
    assert report.failures("image") == {"(base)": 2, "i1": 1}
    assert report.failures("node") == {"n2": 2, "unknown": 1}
    assert report.failures(by="group") == {"a@0": 2, "b@0": 1}
    assert report.failures(attempts=True) == {"sandbox_died": 4, "policy_error": 1}
    assert report.failures("node", attempts=True) == {"n2": 2, "n1": 2, "unknown": 1}
    with pytest.raises(ConfigError, match="by must be one of kind, phase"):
        report.failures("colour")  # type: ignore[arg-type]


def test_an_unisolated_run_says_so_in_every_report() -> None:
    report = Report([log(isolation="none"), log("b")])
    (warning,) = report.warnings
    assert warning.startswith('1 rollouts ran with isolation="none"')
    assert warning in shown(report)
    assert report.to_dict()["warnings"] == [warning]


def shown(report: Any) -> str:
    from rich.console import Console

    out = io.StringIO()
    report.print(Console(file=out, width=120, color_system=None))
    return out.getvalue()


def test_tables() -> None:
    report = Report(
        [
            log("a[b]", status="failed", failure=INFRA, broken=1),
            *(log(f"t{i}", status="failed", failure=OWN) for i in range(30)),
            log("ok", reward=0.25),
        ],
        notes=[Note(1.0, "revoke_failed", "no answer")],
        processes=[Process("run", "/x/run.db", 1.0, 42, "host")],
    )
    text = shown(report)
    for expected in (
        "rollouts asked for", "32", "3.12%", "0.2500", "0.0078 to 0.9766", "failures by kind", "policy_error",
        "failures by group", "(11 more)", "a credential could not be revoked", "process 42 on host", "a[b]@0",
    ):  # fmt: skip
        assert expected in text, expected
    assert "batch completion" in text


def test_to_pandas_and_rows() -> None:
    report = Report([log("a", reward=0.5), log("b", status="failed", failure=OWN), log("c", status=None)])
    frame = report.to_pandas()
    assert list(frame.columns) == COLUMNS
    assert list(frame["status"]) == ["completed", "failed", "open"]
    assert frame["reward"].mean() == 0.5
    assert list(frame["failure_kind"].dropna()) == ["policy_error"]
    assert Report([]).to_pandas().empty


def test_without_pandas_or_matplotlib_the_hint_says_what_to_install(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "pandas", None)
    with pytest.raises(UnsupportedError, match="pip install pandas"):
        Report([]).to_pandas()
    for name in [n for n in sys.modules if n.split(".")[0] == "matplotlib"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(UnsupportedError, match=r"pip install 'rlsandbox-pool\[plots\]'"):
        Report([log()]).plot(tmp_path / "x.png")
    assert not (tmp_path / "x.png").exists()


def test_plot(tmp_path: Path) -> None:
    report = Report([log("a", reward=0.5), log("b", status="failed", failure=OWN), log("c", status=None)])
    report.plot(tmp_path / "x.png")
    assert (tmp_path / "x.png").read_bytes().startswith(b"\x89PNG")
    assert report.plot() is not None
    Report([]).plot(tmp_path / "empty.png")
    with pytest.raises(ConfigError, match="cannot write the plot"):
        report.plot(tmp_path / "no" / "dir" / "x.png")


def test_rollouts_of_several_files_stand_in_the_order_in_which_they_were_asked_for() -> None:
    """Processes write files of their own, side by side; what one of them asked for last is last."""
    from rlsandbox.ledger.records import Event, fold

    def asked(n: int, at: float, rollout: str, source: str) -> Event:
        return Event(n, at, "request", rollout, {"run": "r", "task": rollout}, source)

    one = [asked(1, 10.0, "a", "one"), asked(2, 30.0, "c", "one")]
    two = [asked(1, 20.0, "b", "two"), asked(2, 40.0, "d", "two")]
    assert list(fold([*one, *two]).rollouts) == list(fold([*two, *one]).rollouts) == ["a", "b", "c", "d"]
    back = [asked(1, 30.0, "a", "one"), asked(2, 10.0, "b", "one")]  # a clock was set back
    assert list(fold(back).rollouts) == ["a", "b"]
