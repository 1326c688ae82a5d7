"""Spaces that tell the truth about text from a terminal.

A command can print any bytes; decoded with replacement they are any Unicode text without surrogates. A
Gymnasium ``Text`` over that alphabet would carry 1.1 million characters in three containers and name them
all when printed; :class:`UnicodeText` is the same space with an alphabet that is computed.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator, Sequence, Set
from typing import Any, Final, overload

import numpy as np
from gymnasium import spaces

from ..errors import ConfigError

SAMPLED_LENGTH: Final = 64
"""Samples are no longer: a megabyte of noise would serve nobody."""

_SURROGATES: Final = range(0xD800, 0xE000)
_LAST: Final = 0x10FFFF


class Alphabet(Sequence[str], Set[str]):
    """Unicode's characters in the order of their numbers, without surrogates, with or without NUL."""

    def __init__(self, nul: bool) -> None:
        self.nul = nul
        self._shift = 0 if nul else 1

    def __len__(self) -> int:
        return _LAST + 1 - len(_SURROGATES) - self._shift

    @overload
    def __getitem__(self, index: int) -> str: ...
    @overload
    def __getitem__(self, index: slice) -> Sequence[str]: ...
    def __getitem__(self, index: int | slice) -> str | Sequence[str]:
        if isinstance(index, slice):
            return [self[i] for i in range(*index.indices(len(self)))]
        position = index + len(self) if index < 0 else index
        if not 0 <= position < len(self):
            raise IndexError(f"the alphabet has {len(self)} characters, none at {index}")
        code = int(position) + self._shift
        return chr(code if code < _SURROGATES.start else code + len(_SURROGATES))

    def index(self, value: Any, start: int = 0, stop: int | None = None) -> int:
        if value not in self:
            raise ValueError(f"{value!r} is no character of the alphabet")
        code = ord(value)
        return code - self._shift - (len(_SURROGATES) if code >= _SURROGATES.stop else 0)

    def __contains__(self, value: object) -> bool:
        if not isinstance(value, str) or len(value) != 1 or ord(value) in _SURROGATES:
            return False
        return self.nul or value != "\0"

    def __iter__(self) -> Iterator[str]:
        for code in range(self._shift, _LAST + 1):
            if code not in _SURROGATES:
                yield chr(code)

    def __eq__(self, other: object) -> bool:
        return self.nul == other.nul if isinstance(other, Alphabet) else Set.__eq__(self, other)

    def __hash__(self) -> int:
        return hash((Alphabet, self.nul))

    def __repr__(self) -> str:
        return "Unicode" if self.nul else "Unicode without NUL"


@functools.lru_cache(maxsize=2)
def _as_text(nul: bool) -> str:
    return "".join(Alphabet(nul))


class UnicodeText(spaces.Text):
    """Every string of Unicode text (no lone surrogates) up to a length.

    Args:
        max_length: in characters.
        min_length: in characters.
        nul: whether the NUL character may be part of it; a command's text cannot hold one, output can.
        seed: of :meth:`sample`.
    """

    def __init__(
        self,
        max_length: int,
        *,
        min_length: int = 0,
        nul: bool = True,
        seed: int | np.random.Generator | None = None,
    ) -> None:
        if not 0 <= min_length <= max_length:
            raise ConfigError(
                f"UnicodeText needs 0 <= min_length <= max_length, not {min_length}, {max_length}"
            )
        self.min_length = int(min_length)
        self.max_length = int(max_length)
        self._alphabet = Alphabet(nul)
        # Text's own constructor would spell out the alphabet.
        spaces.Space.__init__(self, dtype=str, seed=seed)

    def contains(self, x: Any) -> bool:
        if not isinstance(x, str) or not self.min_length <= len(x) <= self.max_length:
            return False
        if not self._alphabet.nul and "\0" in x:
            return False
        try:
            x.encode()
        except UnicodeEncodeError:
            return False
        return True

    def sample(self, mask: Any = None, probability: Any = None) -> str:
        """A random member: printable ASCII for the most part, any other character now and then.

        Args:
            mask: as :meth:`gymnasium.spaces.Text.sample` takes it, its array over this alphabet's order.
            probability: likewise.
        """
        if mask is not None and probability is not None:
            raise ConfigError("only one of mask and probability can be given")
        length, weights = (
            mask if mask is not None else probability if probability is not None else (None, None)
        )
        if length is None:
            longest = max(self.min_length, min(self.max_length, SAMPLED_LENGTH))
            length = int(self.np_random.integers(self.min_length, longest + 1))
        elif not self.min_length <= length <= self.max_length:
            raise ConfigError(
                f"the length must lie between {self.min_length} and {self.max_length}, not {length}"
            )
        if weights is not None:
            return self._weighted(length, np.asarray(weights, dtype=np.float64))
        plain = self.np_random.integers(0x20, 0x7F, size=length)
        rare = self.np_random.integers(0, len(self._alphabet), size=length)
        use_rare = self.np_random.random(size=length) < 0.1
        return "".join(
            self._alphabet[int(r)] if odd else chr(p) for p, r, odd in zip(plain, rare, use_rare, strict=True)
        )

    def _weighted(self, length: int, weights: Any) -> str:
        if weights.shape != (len(self._alphabet),) or (weights < 0).any():
            raise ConfigError(f"weights must be {len(self._alphabet)} numbers of at least 0")
        total = weights.sum()
        if total == 0:
            if self.min_length:
                raise ConfigError("all characters are masked out, but the text may not be empty")
            return ""
        chosen = self.np_random.choice(len(self._alphabet), size=length, p=weights / total)
        return "".join(self._alphabet[int(i)] for i in chosen)

    @property
    def character_set(self) -> Any:
        return self._alphabet

    @property
    def character_list(self) -> Any:
        return self._alphabet

    def character_index(self, char: str) -> Any:
        return np.int32(self._alphabet.index(char))

    @property
    def characters(self) -> str:
        return _as_text(self._alphabet.nul)

    def __eq__(self, other: object, /) -> bool:
        return (
            isinstance(other, UnicodeText)
            and (self.min_length, self.max_length) == (other.min_length, other.max_length)
            and self._alphabet == other._alphabet
        )

    __hash__ = None  # type: ignore[assignment]  # as every space: equal ones may differ in their seed

    def __repr__(self) -> str:
        return f"UnicodeText({self.min_length}, {self.max_length}, {self._alphabet!r})"


def fit(text: str, space: UnicodeText) -> str:
    """*text* as a member of *space*: only its characters, the middle left out when too long."""
    clean = text.encode("utf-8", "replace").decode() if not text.isascii() else text
    if not space.character_set.nul:
        clean = clean.replace("\0", "\N{REPLACEMENT CHARACTER}")
    if len(clean) <= space.max_length:
        return clean
    marker = f"\n[... {len(clean) - space.max_length:,} characters and more left out ...]\n"
    room = max(0, space.max_length - len(marker))
    head = room // 2
    kept = clean[:head] + marker + clean[len(clean) - (room - head) :]
    return kept[: space.max_length]
