"""The seam between the pool and the places where sandboxes live.

A backend makes and removes *members* (places with a keeper in them) and opens a byte stream to a
member's keeper. Everything else (episodes, commands, files, resets, layers) goes through the keeper's
protocol and is the same everywhere.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from asyncio import StreamReader, StreamWriter
from collections.abc import AsyncGenerator, AsyncIterable, Callable, Mapping, Sequence
from dataclasses import dataclass, field

from ..spec import Spec


@dataclass(frozen=True)
class Capabilities:
    """What a backend can do.

    Args:
        reset_modes: those its members may report.
        adopt: whether :meth:`Backend.adopt` can give members of the place's own warm pool.
        pause: whether members can be paused.
        snapshot: whether uppers can be sealed into layers.
        max_writes_per_s: creations and deletions a second that the place stands; None: no bound.
        shared_layers: whether :meth:`Backend.give_layer` can carry a layer from one member to another.
    """

    reset_modes: frozenset[str]
    adopt: bool
    pause: bool
    snapshot: bool
    max_writes_per_s: float | None
    shared_layers: bool = False


@dataclass(frozen=True)
class Member:
    """A place with a keeper in it.

    Args:
        id: its name, as the pool gave it.
        node: the machine that it is on.
        facts: what is told about it; those that others read: ``workdir`` and ``user`` (where and as whom
            commands run when neither task nor spec says), ``memory_bytes``, ``disk_bytes``, ``pids``
            (limits in force), ``limit.memory`` .. (by which means), ``ids``, ``isolation``.
    """

    id: str
    node: str | None
    facts: Mapping[str, str] = field(default_factory=dict)


Tell = Callable[[str, str, str], object]
"""Told of a member: its id, what is so now (see :meth:`Backend.listen`), why."""


class Backend(ABC):
    """Where sandboxes live. All methods are called on the pool's event loop and must be cancel-safe."""

    name: str

    @abstractmethod
    async def capabilities(self) -> Capabilities:
        """Probed by doing, once; raises UnsupportedError with a hint when nothing works here."""

    @abstractmethod
    async def provision(
        self, spec: Spec, *, member: str, labels: Mapping[str, str], deadline: float
    ) -> Member:
        """Make the member named *member*. *deadline* is in seconds from now. Raises ProvisionError."""

    @abstractmethod
    async def connect(self, member: Member) -> tuple[StreamReader, StreamWriter]:
        """A stream to the member's keeper, before the handshake."""

    @abstractmethod
    async def dispose(self, member: Member) -> None:
        """Remove the member. Removing one that is gone is success."""

    @abstractmethod
    async def list(self, labels: Mapping[str, str]) -> Sequence[Member]:
        """Members that carry all of *labels*; may lag behind."""

    async def adopt(self, spec: Spec, *, labels: Mapping[str, str], deadline: float) -> Member | None:
        """A member of the place's own warm pool, or None."""
        return None

    def nodes(self) -> Sequence[str]:
        """The nodes on which a sandbox may be placed now; empty where there is no choice.

        A backend that names some takes ``node=`` in :meth:`provision`: a wish (of ``rlsandbox_place``), and
        one that cannot be met is no failure.
        """
        return ()

    def listen(self, tell: Tell) -> None:  # noqa: B027 - a place that never tells
        """Tell the pool what becomes of members' places. *tell* is called on the event loop with

        - ``away``: nothing is heard of it; it is handed to nobody, and is not lost either; ``back``: it is;
        - ``leaving``: it is being cleared, so the member's episode is its last; ``staying``: no longer.
        """

    async def give_layer(self, layer: str, member: Member) -> bool:
        """Make a sealed layer of any member available in *member*; False when that cannot be.

        A layer that exists no more is a SandboxError of kind ``layer_gone``: the pool makes it again.
        """
        return False

    max_resetting: int | None = None
    """Sandboxes that may be reset and verified at once, where each takes up something of the place (a
    stream); the turn of others comes. None: no bound."""

    keeps_layers = False
    """Whether :meth:`keep_layer` keeps what it is given: layers that lie in members can be lost with them."""

    async def keep_layer(self, layer: str, tar: AsyncIterable[bytes]) -> None:  # noqa: B027 - nothing is kept
        """Keep a snapshot's layer where it outlives every member, until it is dropped."""

    def kept_layer(self, layer: str) -> AsyncGenerator[bytes, None] | None:
        """What :meth:`keep_layer` was given; None: it is not kept."""
        return None

    async def drop_layer(self, layer: str) -> None:  # noqa: B027 - nothing to forget
        """Forget a sealed layer that no member needs any more."""

    def environment(self, spec: Spec) -> Mapping[str, str]:
        """Environment that every command gets before Spec.env (an image's own, PATH)."""
        return {}

    async def hurry(self, within: float) -> None:  # noqa: B027 - nothing to see to
        """The pool closes and removals take long: end what does not answer *within* so many seconds."""

    async def close(self) -> None:  # noqa: B027 - nothing to give back
        """Give back what the backend itself holds; every member has been disposed of before."""
