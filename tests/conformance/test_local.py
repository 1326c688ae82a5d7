"""The conformance suite on the local backend."""

from __future__ import annotations

import os
import signal

import pytest

from rlsandbox.backends import Backend, Local
from rlsandbox.sandbox import Sandbox
from rlsandbox.testing.conformance import BackendConformance
from rlsandbox.testing.lone import LoneHost


class TestLocal(BackendConformance):
    @pytest.fixture
    def backend(self) -> Backend:
        return Local()
