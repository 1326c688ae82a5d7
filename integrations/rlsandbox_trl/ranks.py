"""One pool for the training processes of a machine: the first of them owns it, the others connect.

So there is one ceiling and one refill, whatever the number of processes, and one place where sandboxes,
claims and resets are counted. On several machines each has a pool of its own.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import rlsandbox as rls
from rlsandbox.errors import ConfigError
from rlsandbox.metrics import Samples, Snapshot

from .tally import Tally

T = TypeVar("T")

OWNERS_ONLY = ("ttfc", "reset", "verify", "prime")
"""Series (and their parts) that the pool's owner has of all processes."""


def _number(name: str, otherwise: int) -> int:
    value = os.environ.get(name, "")
    return int(value) if value.isdigit() else otherwise


def local_processes() -> int:
    """How many training processes this machine has."""
    return _number("LOCAL_WORLD_SIZE", _number("WORLD_SIZE", 1))


def owns_pool() -> bool:
    """Whether this process is the one of its machine that owns the pool."""
    return _number("LOCAL_RANK", _number("RANK", 0)) == 0


def share(rows: Sequence[T]) -> Sequence[T]:
    """What this machine's processes take of a batch that lies there for all ranks, in their order."""
    world, local = _number("WORLD_SIZE", 1), local_processes()
    first = _number("RANK", 0) - _number("LOCAL_RANK", _number("RANK", 0))
    return rows[len(rows) * first // world : len(rows) * (first + local) // world]


def shared_pool(make: Callable[[], rls.Pool]) -> rls.Pool:
    """The pool of this machine's processes. All of them call this at once, with one job or with many."""
    if _number("WORLD_SIZE", 1) == 1:
        return make()
    from torch import distributed

    if not (distributed.is_available() and distributed.is_initialized()):
        raise ConfigError(
            "several training processes share a pool, but they do not know each other yet",
            hint="make GRPOConfig or GRPOTrainer before you use .pool, or hand each process pool=",
        )
    pool = error = None
    if owns_pool():
        try:
            pool = make()
        except Exception as raised:  # the others wait for a word of it
            error = raised
    machine = os.uname().nodename
    mine = (machine, pool.ref if pool is not None else None, error)
    all_of_them: list[Any] = [None] * distributed.get_world_size()
    distributed.all_gather_object(all_of_them, mine)
    if error is not None:
        raise error
    if pool is not None:
        return pool
    for where, ref, failed in all_of_them:
        if where == machine and failed is not None:
            raise failed
        if where == machine and ref is not None:
            return connected(ref)
    raise ConfigError(f"no process of {machine} owns a pool", hint="start them with torchrun or accelerate")


_connected: dict[tuple[int, rls.PoolRef], rls.Pool] = {}
"""By process as well: a forked child has connections of its own."""
_connecting = threading.Lock()


def connected(ref: rls.PoolRef) -> rls.Pool:
    """The pool of another process of this machine: one connection, whatever asks for it."""
    with _connecting:
        key = os.getpid(), ref
        pool = _connected.get(key)
        if pool is None or pool.closed:
            pool = _connected[key] = rls.Pool.connect(ref)
        return pool


def of_all(parts: Sequence[tuple[bool, Snapshot, Tally]]) -> tuple[Snapshot, Tally]:
    """One window out of those of all processes. Each says whether it owns its pool.

    What the owner has of all is not taken from the others. A batch is over when the last process has done
    its part.
    """
    own = [snapshot if owner else _without_shared(snapshot) for owner, snapshot, _ in parts]
    merged = Snapshot.merge(own)
    batches = [snapshot.samples["batch"].values for snapshot in own if "batch" in snapshot.samples]
    if len(batches) > 1:  # all began at once: the collectives of the step before held them together
        merged.samples["batch"] = Samples.of(map(max, zip(*batches, strict=False)))
    return merged, Tally.merge(tally for *_, tally in parts)


def _without_shared(snapshot: Snapshot) -> Snapshot:
    samples = {
        name: found
        for name, found in snapshot.samples.items()
        if not any(name == shared or name.startswith(shared + "_") for shared in OWNERS_ONLY)
    }
    counters = {name: n for name, n in snapshot.counters.items() if name.startswith("failures/")}
    return Snapshot(samples, counters, snapshot.idle)
