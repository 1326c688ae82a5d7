"""What the keeper tells about an episode from outside: :class:`Facts`.

INSPECT answers in lines ``kind<TAB>field...``; bytes outside printable ASCII, and backslash, come as
``\\xHH`` (:func:`rlsandbox.hooks.fact_fields` undoes it). Parsing is strict about form and indifferent to
kinds it does not know: a newer keeper may tell more.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field

from ..errors import SandboxError
from ..hooks import fact_fields


def shown(text: str, limit: int = 300) -> str:
    """*text* for people and logs: one line of printable characters, cut at *limit*."""
    safe = text
    if not (text.isprintable() and "\\" not in text):
        safe = "".join(map(_shown_char, text))
    return safe if len(safe) <= limit else safe[: limit - 3] + "..."


def _shown_char(char: str) -> str:
    if char.isprintable():
        return char
    return "".join(f"\\x{byte:02x}" for byte in char.encode("utf-8", "surrogateescape"))


@dataclass(frozen=True)
class Facts:
    """One INSPECT answer: the lines of each kind without the kind, in the order told."""

    lines: Mapping[str, tuple[str, ...]] = field(default_factory=dict)

    @classmethod
    def of_lines(cls, told: Iterable[tuple[str, str]]) -> Facts:
        """From pairs of a line's kind and the rest of it."""
        lines: dict[str, list[str]] = {}
        last, of_last = "", list[str]()
        for kind, rest in told:  # facts of one kind come together
            if kind != last:
                last, of_last = kind, lines.setdefault(kind, [])
            of_last.append(rest)
        return cls({kind: tuple(rest) for kind, rest in lines.items()})

    def of(self, kind: str) -> tuple[str, ...]:
        return self.lines.get(kind, ())

    def rows(self, kind: str, least: int) -> Iterator[list[str]]:
        """The fields of every fact of *kind*; one with too few of them is an error, never skipped."""
        for line in self.lines.get(kind, ()):
            row = fact_fields(line)
            if len(row) < least:
                raise _broken(
                    f"the keeper told a {kind} fact with {len(row)} of {least} fields: {shown(line)}"
                )
            yield row

    @property
    def files_clean(self) -> bool:
        """Whether every writable tree of the episode is empty, told by reading its top directory."""
        rows = list(self.rows("upper", 2))
        if not rows:
            raise _broken("the keeper told no upper layer")
        return all(row[1] == "0" for row in rows)


def _broken(message: str) -> SandboxError:
    return SandboxError(message, kind="protocol", phase="verify")
