"""The C side and the Python side of the protocol have the same numbers."""

from __future__ import annotations

import re
from enum import IntEnum, IntFlag

import pytest
from rawclient import SRC

from rlsandbox.keeper import records, wire

HEADER = (SRC / "protocol.h").read_text()


def numbers(prefix: str) -> dict[str, int]:
    return {name: int(value, 0) for name, value in re.findall(rf"\b{prefix}_(\w+) = (0x[0-9a-fA-F]+|\d+)", HEADER)}


@pytest.mark.parametrize(
    ("prefix", "python"), [("T", wire.Type), ("F", wire.Flag), ("OP", wire.Op), ("TAG", wire.Tag), ("X", wire.ExitFlag)]
)
def test_same_numbers(prefix: str, python: type[IntEnum] | type[IntFlag]) -> None:
    assert numbers(prefix) == {name: int(value) for name, value in python.__members__.items()}


def test_same_sizes() -> None:
    for name in ("VERSION", "MAX_FRAME", "MAX_MESSAGE", "WINDOW", "HEADER"):
        expression = re.search(rf"RLS_{name} = ([\d <]+),", HEADER)
        assert expression, name
        assert eval(expression[1]) == getattr(wire, name)


def test_same_records_of_links() -> None:
    said = re.findall(r"\bL_(\w+) = (\d+),", (SRC / "link.h").read_text())
    assert {name: int(value) for name, value in said} == {kind.name: int(kind) for kind in records.Kind}
    assert f"LINK_MAX = {records.MAX_RECORD}," in (SRC / "link.h").read_text()
