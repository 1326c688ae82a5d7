from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.pool_double import DoublePool


@pytest.fixture
def pool(tmp_path: Path) -> Iterator[DoublePool]:
    made = DoublePool(tmp_path)
    yield made
    held = {sandbox.id for sandbox in made.held}
    made.close()
    assert not held, "sandboxes were not given back"
