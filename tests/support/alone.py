"""What a script runs in that is to see nothing of its developer's: a state of its own, this tree, no window."""

from __future__ import annotations

import os
from pathlib import Path

from rlsandbox import _paths

ROOT = Path(__file__).parents[2]


def alone(state: Path) -> dict[str, str]:
    return {
        **os.environ,
        "RLSANDBOX_HOME": str(state),
        "RLSANDBOX_CACHE": str(_paths.cache()),
        "PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")]),
        "MPLBACKEND": "Agg",
    }
