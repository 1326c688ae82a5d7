"""The suite that every backend runs: what a sandbox promises, whatever it is made of.

class TestMine(BackendConformance):
    skip = {"hibernate": "no store yet"}

    @pytest.fixture
    def backend(self) -> Backend:
        return Mine()
"""

from __future__ import annotations

from ._commands import Commands
from ._files import Files
from ._fixtures import OnePerClass
from ._grading import Grading
from ._lifecycle import Lifecycle
from ._popen import Popens
from ._sessions import Sessions
from ._trust import Trusting

__all__ = ["BackendConformance", "OnePerClass"]


class BackendConformance(Lifecycle, Commands, Popens, Sessions, Files, Grading, Trusting):
    """Subclass it, give the fixture ``backend``, run it with pytest."""
