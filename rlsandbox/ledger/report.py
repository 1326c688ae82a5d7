"""What became of the rollouts that were asked for: :class:`Report`.

Missing is missing: a rollout without a reward never counts as 0. The mean is over the rewards there are, and
beside it stands how far the missing ones could move it.
"""

from __future__ import annotations

import math
import os
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

from ..errors import ConfigError, UnsupportedError
from ..results import Failure, Record
from .records import Book, Note, Process, RolloutLog, to_dict

if TYPE_CHECKING:
    from .bias import Bias

By = Literal["kind", "phase", "image", "node", "group"]
BY: tuple[By, ...] = ("kind", "phase", "image", "node", "group")


@dataclass(frozen=True)
class BatchTime:
    """A batch: its size and the seconds from its first claim request until its last record."""

    batch: str
    rollouts: int
    completion_s: float | None
    """None while one of its rollouts has no record."""


class Report:
    """A batch, a run, or several.

    Args:
        logs: the rollouts, in the order in which they were asked for.
        reward_range: between which values a reward may lie; widened by rewards that were seen outside.
        left_out: how many of them had completed before and were not run again (``resume=True``).
    """

    def __init__(
        self,
        logs: Iterable[RolloutLog],
        *,
        notes: Sequence[Note] = (),
        processes: Sequence[Process] = (),
        reward_range: tuple[float, float] = (0.0, 1.0),
        left_out: int = 0,
    ) -> None:
        low, high = reward_range
        if not (math.isfinite(low) and math.isfinite(high) and low <= high):
            raise ConfigError(f"reward_range must be two numbers, the lower first, not {reward_range!r}")
        self.logs = list(logs)
        self.left_out = left_out
        self.notes = list(notes)
        self.processes = list(processes)
        seen = [r.reward for r in self.records if r.reward is not None]
        self.reward_range = (min([low, *seen]), max([high, *seen]))

    @classmethod
    def of(cls, book: Book, *, reward_range: tuple[float, float] = (0.0, 1.0)) -> Report:
        return cls(
            book.rollouts.values(), notes=book.notes, processes=book.processes, reward_range=reward_range
        )

    def __repr__(self) -> str:
        mean = "no reward" if self.mean_reward is None else f"mean reward {self.mean_reward:.4g}"
        return f"<Report {self.completed} of {self.requested} rollouts completed, {mean}>"

    # ------------------------------------------------------------------ numbers

    @property
    def runs(self) -> list[str]:
        """The names of the runs, also of those that have asked for nothing."""
        return sorted({log.run for log in self.logs} | {process.run for process in self.processes})

    @property
    def records(self) -> list[Record]:
        """The ends, in the order in which the rollouts were asked for."""
        return [log.record for log in self.logs if log.record is not None]

    @property
    def requested(self) -> int:
        return len(self.logs)

    @property
    def completed(self) -> int:
        return sum(record.status == "completed" for record in self.records)

    @property
    def coverage(self) -> float:
        """Completed rollouts of those that were asked for; NaN when none was."""
        return self.completed / self.requested if self.logs else math.nan

    @property
    def mean_reward(self) -> float | None:
        """Over the rewards there are."""
        rewards = [r.reward for r in self.records if r.reward is not None]
        return math.fsum(rewards) / len(rewards) if rewards else None

    @property
    def rewardable(self) -> list[RolloutLog]:
        """Rollouts of which a reward was to be expected: they have a grader, or a sibling that got one."""
        rewarded = {r.task_id for r in self.records if r.reward is not None}
        return [log for log in self.logs if log.expects_reward or log.task_id in rewarded]

    @property
    def missing(self) -> list[RolloutLog]:
        """Those of :attr:`rewardable` that have no reward."""
        return [log for log in self.rewardable if log.record is None or log.record.reward is None]

    @property
    def reward_bounds(self) -> tuple[float, float] | None:
        """Where the mean reward would lie had all missing rewards been the least or the most possible."""
        n = len(self.rewardable)
        if not n:
            return None
        rewards = math.fsum(r.reward for r in self.records if r.reward is not None)
        missing = len(self.missing)
        low, high = self.reward_range
        return (rewards + low * missing) / n, (rewards + high * missing) / n

    @property
    def batches(self) -> list[BatchTime]:
        """In the order of their first requests."""
        grouped: dict[str, list[RolloutLog]] = {}
        for log in self.logs:
            grouped.setdefault(log.batch, []).append(log)
        return [BatchTime(batch, len(logs), _completion(logs)) for batch, logs in grouped.items()]

    @property
    def batch_completion_s(self) -> float | None:
        """From the first claim request to the last record; the mean over batches; None: there is none yet."""
        times = [batch.completion_s for batch in self.batches if batch.completion_s is not None]
        return math.fsum(times) / len(times) if times else None

    def outcomes(self) -> dict[str, int]:
        """Rollouts by :attr:`rlsandbox.Record.outcome`, and ``open`` for those without a record."""
        counts = Counter("open" if log.record is None else log.record.outcome for log in self.logs)
        return dict(counts.most_common())

    def failures(self, by: By = "kind", *, attempts: bool = False) -> dict[str, int]:
        """Rollouts that did not complete, most frequent first.

        Args:
            by: ``kind``, ``phase``, ``image``, ``node`` or ``group``.
            attempts: count broken attempts instead, of rollouts that completed after a retry too.
        """
        if by not in BY:
            raise ConfigError(f"by must be one of {', '.join(BY)}, not {by!r}")
        counts: Counter[str] = Counter()
        for log in self.logs:
            if attempts:
                for attempt in log.attempts:
                    if attempt.failure is not None:
                        counts[_key(by, attempt.failure, attempt.node, attempt.image or log.image, log)] += 1
            elif log.record is not None and log.record.failure is not None:
                record = log.record
                counts[_key(by, log.record.failure, record.node, record.image, log)] += 1
        return dict(counts.most_common())

    def examples(self) -> dict[str, str]:
        """One cause of each kind of failure."""
        found: dict[str, str] = {}
        for log in self.logs:
            ended = log.record.failure if log.record is not None else None
            for failure in (ended, *(attempt.failure for attempt in log.attempts)):
                if failure is not None:
                    found.setdefault(failure.kind, failure.cause)
        return found

    @property
    def warnings(self) -> list[str]:
        """What a reader of the numbers must know."""
        out = []
        bare = {log.id for log in self.logs if any(a.isolation == "none" for a in log.attempts)}
        if bare:
            out.append(
                f'{len(bare)} rollouts ran with isolation="none": on the bare machine, able to see and change'
                " one another's files and the trainer's"
            )
        still = sum(log.record is None for log in self.logs)
        if still:
            out.append(
                f"{still} rollouts have no end yet: they run, or `rlsandbox ledger reconcile` closes them"
            )
        if not self.logs:
            out.append("no rollout was asked for: there is nothing to report")
        kinds = Counter(note.kind for note in self.notes)
        for kind, text in _GRAVE.items():
            if kinds[kind]:
                out.append(f"{kinds[kind]} x {text}")
        return out

    def bias(self, *, seed: int = 0) -> Bias:
        """Whether what is missing goes with group, difficulty or image."""
        from .bias import bias_of

        return bias_of(self, seed=seed)

    # ------------------------------------------------------------------ for people and programs

    def to_dict(self) -> dict[str, Any]:
        """JSON-able; numbers that do not exist are None."""
        bounds = self.reward_bounds
        return {
            "runs": self.runs,
            "requested": self.requested,
            "completed": self.completed,
            "left_out": self.left_out,
            "coverage": None if math.isnan(self.coverage) else self.coverage,
            "mean_reward": self.mean_reward,
            "reward_bounds": None if bounds is None else list(bounds),
            "missing_rewards": len(self.missing),
            "batches": len(self.batches),
            "batch_completion_s": self.batch_completion_s,
            "attempts": sum(len(log.attempts) for log in self.logs),
            "outcomes": self.outcomes(),
            "failures": {by: self.failures(by) for by in BY},
            "attempt_failures": {by: self.failures(by, attempts=True) for by in BY},
            "notes": dict(Counter(note.kind for note in self.notes)),
            "warnings": self.warnings,
        }

    def print(self, console: Any = None) -> None:
        """Tables for a terminal."""
        from .tables import print_report

        print_report(self, console)

    def plot(self, path: str | os.PathLike[str] | None = None) -> Any:
        """The distribution of TTFC and the timeline of the rollouts: a matplotlib figure, also at *path*."""
        from ..metrics.plots import save_run

        return save_run(self.records, path)

    def to_pandas(self) -> Any:
        """A DataFrame with a row a rollout."""
        try:
            import pandas as pd
        except ImportError as error:
            raise UnsupportedError(
                "to_pandas() needs pandas", kind="missing_extra", hint="pip install pandas"
            ) from error
        return pd.DataFrame(self.rows(), columns=COLUMNS)

    def rows(self) -> list[dict[str, Any]]:
        """Flat data, a row a rollout, with the columns :data:`COLUMNS`."""
        return [_row(log) for log in self.logs]


COLUMNS = [
    "id", "run", "task_id", "index", "group", "batch", "status", "outcome", "reward", "passed", "attempts",
    "ttfc_s", "started_at", "ended_at", "node", "image", "truncated", "failure_kind", "failure_phase",
    "failure_cause", "failure_error", "retryable", "infrastructure", "value",
]  # fmt: skip


def _row(log: RolloutLog) -> dict[str, Any]:
    record = log.record
    blank = Record(log.task_id, log.index, len(log.attempts), "lost", run=log.run, id=log.id, group=log.group)
    data = {**to_dict(record or blank), "batch": log.batch}
    failure = record.failure if record else None
    data["status"] = record.status if record else "open"
    data["outcome"] = record.outcome if record else "open"
    data["started_at"] = data["started_at"] if record else log.requested_at
    data["ended_at"] = data["ended_at"] if record else None
    if failure is not None:
        data |= {
            "failure_kind": failure.kind,
            "failure_phase": failure.phase,
            "failure_cause": failure.cause,
            "failure_error": failure.error or None,
            "retryable": failure.retryable,
            "infrastructure": failure.infrastructure,
        }
    return {name: data.get(name) for name in COLUMNS}


_GRAVE = {
    "revoke_failed": "a credential could not be revoked: it may still be valid",
    "checkpoint_lost": "a checkpoint was lost: the next attempt started afresh",
}


def _key(by: By, failure: Failure, node: str | None, image: str | None, log: RolloutLog) -> str:
    values = {
        "kind": failure.kind,
        "phase": failure.phase,
        "node": node,
        "image": image or "(base)",
        "group": log.group,
    }
    return values[by] or "unknown"


def _completion(logs: list[RolloutLog]) -> float | None:
    ends = [log.record.ended_at for log in logs if log.record is not None]
    starts = [attempt.asked_at for log in logs for attempt in log.attempts]
    if len(ends) < len(logs) or not starts:
        return None
    return max(0.0, max(ends) - min(starts))
