"""The state that a reset returns to and verification compares with: :class:`Baseline`.

A baseline is taken of a pristine sandbox only: of one in which something runs or was written it is
refused, because it would bless that as clean for ever. It belongs to one member.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from ..errors import SandboxError
from .facts import Facts, shown
from .inspector import Keeper, inspect


@dataclass(frozen=True)
class Baseline:
    """Facts of a member before its first episode ran anything.

    Args:
        facts: what INSPECT told.
        mode: the member's reset mode.
        layer: name of the layer that must be on top (``""``: none); ``None``: the one that the facts tell.
    """

    facts: Facts
    mode: str
    layer: str | None = None

    def on(self, layer: str | None) -> Baseline:
        """The same member standing on a primed layer (``""``: on its bare base)."""
        return replace(self, layer=layer)


async def take_baseline(keeper: Keeper, *, mode: str, layer: str | None = None) -> Baseline:
    """Take the baseline of a member that was just provisioned, reset, or primed and sealed.

    Raises:
        SandboxError: the sandbox is not pristine (kind ``baseline``), or the keeper's answer makes no sense.
    """
    return baseline_of(await inspect(keeper), mode=mode, layer=layer)


def baseline_of(facts: Facts, *, mode: str, layer: str | None = None) -> Baseline:
    """:func:`take_baseline` from what INSPECT told."""
    for row in facts.rows("process", 6):
        raise _not_pristine(f"process {row[0]} ({shown(row[6] if len(row) > 6 else row[5])}) runs in it")
    if not facts.files_clean:
        dirty = ", ".join(row[0] for row in facts.rows("upper", 2) if row[1] != "0")
        raise _not_pristine(f"files were written under {dirty}")
    return Baseline(facts, mode, layer)


def _not_pristine(why: str) -> SandboxError:
    return SandboxError(
        f"no baseline can be taken of a sandbox in use: {why}",
        kind="baseline",
        phase="prime",
        hint="take it after provisioning, after a reset, or after the primed layer was sealed",
    )
