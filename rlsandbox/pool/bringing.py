"""How a sealed layer comes to a sandbox that the backend cannot give it to: from a copy, or from another."""

from __future__ import annotations

import logging
from collections.abc import AsyncGenerator, Callable, Sequence
from typing import Protocol

from ..errors import SandboxError
from ..keeper.client import KeeperClient, told

log = logging.getLogger("rlsandbox.pool")


class Source(Protocol):
    """A link to a member that has the layer."""

    client: KeeperClient


async def bring(
    layer: str,
    to: KeeperClient,
    kept: AsyncGenerator[bytes, None] | None,
    sources: Callable[[str], Sequence[Source]],
    lost: Callable[[str], bool],
    arriving: Callable[[], object] = lambda: None,
) -> bool:
    """Import *layer* into the sandbox *to*; False when there is nothing to bring it from.

    Args:
        kept: its stream, where the backend has kept it outside of all sandboxes.
        sources: who has it now. Each is asked at most once.
        lost: whether nobody has it any more.
        arriving: called as more of it is on its way: what moves may take as long as it is large.

    Raises:
        SandboxError: *to* failed; or all that have it did (kind ``layer_copy``).
    """
    if kept is not None:
        await to.reset("")
        try:
            await to.import_layer(layer, told(kept, arriving))
        except SandboxError as error:
            if error.kind != "layer_copy" or not sources(layer):
                raise
            log.warning("%s; it is brought from another sandbox", error)
        else:
            return True
        finally:
            await kept.aclose()
    asked: list[KeeperClient] = []
    failed: SandboxError | None = None
    while other := next((source.client for source in sources(layer) if source.client not in asked), None):
        asked.append(other)
        try:
            await to.bring_layer(layer, other, arriving)
        except SandboxError as error:
            if error.kind != "layer_copy":
                raise
            failed = error
            log.warning("sandbox %s does without the help of %s: %s", to.member, other.member, error)
        else:
            return True
    if failed is not None and not lost(layer):
        raise failed
    return False
