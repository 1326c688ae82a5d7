"""The conformance suite on the local backend."""

from __future__ import annotations

import pytest

from rlsandbox.backends import Backend, Local
from rlsandbox.testing.conformance import BackendConformance


class TestLocal(BackendConformance):
    @pytest.fixture
    def backend(self) -> Backend:
        return Local()
