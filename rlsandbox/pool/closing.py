"""Closing a pool: once, to its end, by anybody but a policy that the pool runs.

A policy that closes its pool would wait for the closing, which waits for the policy.
"""

from __future__ import annotations

import asyncio
import contextvars
import logging
from typing import Any

from ..errors import SandboxStateError

log = logging.getLogger("rlsandbox.pool")

MORE_S = 30.0
"""What a closing still has when whoever waits for it is cancelled."""
LAST_S = 5.0
"""What it has after that, to break off."""

pool_of_policy: contextvars.ContextVar[Any] = contextvars.ContextVar("rlsandbox_pool_of_policy", default=None)


def refuse_inside_policy(pool: object) -> None:
    """Raise when the caller is a policy that *pool* runs."""
    if pool_of_policy.get() is pool:
        raise SandboxStateError(
            "a policy cannot close the pool that runs it: the closing would wait for the policy",
            kind="closed_by_policy",
            phase="policy",
            hint="close it elsewhere, or leave the loop over pool.rollouts(): that stops the batch",
        )


async def seen_through(closing: asyncio.Task[None]) -> None:
    """Wait for *closing*; whoever is cancelled meanwhile, it goes on to its end, which is then waited for.

    A second cancellation is not resisted: the closing goes on in the loop for as long as that runs.
    """
    try:
        await asyncio.wait({closing})
    except asyncio.CancelledError:
        await asyncio.wait({closing}, timeout=MORE_S)
        if not closing.done():
            closing.cancel()
            await asyncio.wait({closing}, timeout=LAST_S)
        if closing.done() and not closing.cancelled() and closing.exception() is not None:
            log.warning("the pool could not be closed in order: %s", closing.exception())
        raise
    if closing.cancelled():  # on behalf of somebody else, who waits no more: the caller was not cancelled
        log.warning("the pool could not be closed in time: what is left of it is removed by rlsandbox reap")
        return
    closing.result()
