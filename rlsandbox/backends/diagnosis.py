"""What ``rlsandbox doctor`` found, whichever backend looked."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any, Literal

Status = Literal["ok", "warn", "fail"]


@dataclass(frozen=True)
class Row:
    """One thing that was looked at.

    Args:
        name: what.
        status: ``ok``, ``warn`` or ``fail``.
        found: what was found, and what it means.
        fix: what to do; empty when there is nothing to do.
    """

    name: str
    status: Status
    found: str
    fix: str = ""


@dataclass(frozen=True)
class Diagnosis:
    """All rows, and whether sandboxes can be made (the CLI's exit status)."""

    rows: tuple[Row, ...]

    @property
    def works(self) -> bool:
        return all(row.status != "fail" for row in self.rows)

    def to_json(self) -> dict[str, Any]:
        return {"works": self.works, "rows": [asdict(row) for row in self.rows]}
