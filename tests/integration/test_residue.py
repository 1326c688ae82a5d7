"""Every kind of dirt: found and named by verification while it lies there, gone after a reset."""

from __future__ import annotations

import re
import shutil
from collections.abc import Iterator

import pytest

from rlsandbox.spec import Spec
from tests.support.dirt import EVERY, ROOT, USER
from tests.support.make_image import NO_BUSYBOX, busybox, residue_image
from tests.support.place import local, place
from tests.support.residue import Told, every_kind, primed


@pytest.fixture(scope="module")
def image(tmp_path_factory: pytest.TempPathFactory) -> str:
    if busybox() is None:
        pytest.skip(NO_BUSYBOX)
    return str(residue_image(tmp_path_factory.mktemp("residue") / "image"))


@pytest.fixture(scope="module")
def summary(request: pytest.FixtureRequest) -> Iterator[dict[str, Told]]:
    held: dict[str, Told] = {}
    yield held
    capture = request.config.pluginmanager.getplugin("capturemanager")
    with capture.global_and_fixture_disabled():
        for name, told in held.items():
            print("\n" + told.lines(name))


@pytest.mark.parametrize("user", [ROOT, USER])
@pytest.mark.parametrize("mode", ["overlay", "userns"])
@pytest.mark.parametrize("base", ["host", "image"])
async def test_every_kind_is_found_and_gone(
    base: str, mode: str, user: str, request: pytest.FixtureRequest, summary: dict[str, Told]
) -> None:
    if base == "host" and shutil.which("python3", path="/usr/bin:/bin:/usr/local/bin") is None:
        pytest.skip("the census needs a python3 under /usr")
    image = request.getfixturevalue("image") if base == "image" else None
    told = summary.setdefault(f"{base}, {mode}, as {user}", Told())
    async with local(mode) as backend, place(backend, Spec(image=image, memory="2GiB", pids=400)) as where:
        if user == USER and where.client.welcome.facts.get("ids") == "one":
            pytest.skip("one uid only here: there is no other user")
        # the machine's /usr has a hundred thousand files: once is enough
        whole = base == "image" or (mode, user) == ("overlay", ROOT)
        await every_kind(await primed(where, user), told, whole=whole)
    assert not told.failures, "\n".join(told.failures)
    assert told.planted >= 60, "the suite must plant at least 60 kinds"


def test_the_list_is_long_and_each_kind_is_named_once() -> None:
    names = [dirt.name for dirt in EVERY]
    assert len(set(names)) == len(names) >= 60
    assert all(re.fullmatch(r"[a-z -]+", dirt.kind) for dirt in EVERY)
