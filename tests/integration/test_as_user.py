"""The suites that look at what a sandbox lets through, once more as an ordinary user of this machine."""

from __future__ import annotations

import pytest

from tests.support.ordinary import make_ordinary

SUITES = {
    "isolation": ["tests/integration/test_isolation.py", "tests/integration/test_isolation_view.py"],
    "limits": ["tests/integration/test_limits.py"],
    "programs": ["tests/integration/test_programs.py"],
    # What takes minutes does not depend on who one is.
    "conformance": ["tests/conformance/test_local.py", "-k", "TestOverlay and not no_hidden and not much"],
}


@pytest.mark.parametrize("suite", SUITES)
def test_as_an_ordinary_user(suite: str) -> None:
    options = ["-q", "-p", "no:cacheprovider", "-p", "pytest_timeout"]
    with make_ordinary() as ordinary:
        done = ordinary.run("-m", "pytest", *options, *SUITES[suite])
    print(done.stdout)
    assert done.returncode == 0, done.stdout[-8000:] + done.stderr[-2000:]
    assert " passed" in done.stdout
