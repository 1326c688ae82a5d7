"""A plan as a plugin: sandboxes are made where their image is."""

from __future__ import annotations

import threading
from collections import Counter, defaultdict
from collections.abc import Sequence

from ..hooks import hookimpl
from ..task import Task
from .plan import Plan


class PlannedPlacement:
    """``Pool(plugins=[PlannedPlacement(plan)])``: the node, of those planned, that lacks most of its part.

    A task whose image is not in the plan is left to the backend.

    Args:
        default_image: of tasks that name none: the pool's.
        cluster: of several behind one pool (:class:`Clusters`), the one that the plan is for.
    """

    def __init__(self, plan: Plan, *, default_image: str | None = None, cluster: str | None = None) -> None:
        self._default = default_image
        self._prefix = f"{cluster}/" if cluster else ""
        self._meant: dict[str, Counter[str]] = defaultdict(Counter)
        for pull in plan.pulls:
            self._meant[pull.image][self._prefix + pull.node] += pull.rollouts
        self._given: dict[str, Counter[str]] = defaultdict(Counter)
        self._lock = threading.Lock()  # hooks run in threads of their own

    @hookimpl
    def rlsandbox_place(self, task: Task, nodes: Sequence[str]) -> str | None:
        image = (task.spec.image if task.spec is not None else None) or task.image or self._default
        meant = self._meant.get(image or "")
        if not meant:
            return None
        with self._lock:
            given = self._given[image or ""]
            able = [name for name in nodes if meant[name] > 0]
            if not able:
                return None
            best = min(able, key=lambda name: (given[name] / meant[name], -meant[name], name))
            given[best] += 1
            return best
