"""The ledger: every rollout that was asked for, and how it ended. See docs/ledger.md."""

from __future__ import annotations

from . import redact
from .elsewhere import LedgerWarning
from .failures import failure_of
from .places import new_run_name
from .reconcile import Reconciled, reconcile
from .recorder import Attempt, Entry, Ledger
from .records import AttemptLog, Note, RolloutLog

__all__ = [
    "Attempt", "AttemptLog", "Entry", "Ledger", "LedgerWarning", "Note", "Reconciled", "RolloutLog",
    "failure_of", "new_run_name", "reconcile", "redact",
]  # fmt: skip
