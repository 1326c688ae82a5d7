"""Verification against a keeper that leaves one step of the reset out: each must be named.

The keeper is a test build (``-DRLS_SKIP``) that reads RLS_SKIP when its hub starts. Each test dirties the
sandbox, resets it, and asks verification, which has nothing from the code that reset.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from rlsandbox.hooks import Residue, plugin_manager
from rlsandbox.keeper import build
from rlsandbox.reset.baseline import take_baseline
from rlsandbox.reset.runner import run_reset, run_verify
from tests.support.keepers import leaving_out
from tests.support.place import Place, local, place

PY = "python3 -c '{}'"
STEPS = {
    "upper": ("echo x > /tmp/x; echo x > /usr/local/x 2>/dev/null || echo x > /opt/x", {"tmp"}),
    "processes": ("sleep 4711 >/dev/null 2>&1 &", {"process"}),
    "mount": ("true", {"mount"}),
    "ipc": (
        PY.format("import ctypes; assert ctypes.CDLL(None).shmget(0x4711, 4096, 0o1600) >= 0"),
        {"ipc", "namespace"},
    ),
    "keyring": ("true", {"keyring"}),
    "netns": ("true", {"namespace"}),
    "env": ("true", {"environment"}),
    "cwdfd": ("true", {"descriptor", "directory"}),
}


@pytest.fixture
def leave_out(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Callable[[str], None]:
    """Start hubs of the test build, told to leave one step out."""

    def chosen(step: str) -> None:
        script = leaving_out(step, tmp_path)
        monkeypatch.setattr("rlsandbox.backends.local.hubs.keeper_binary", lambda: script)

    return chosen


async def reset_and_verify(where: Place, script: str) -> list[Residue]:
    manager = plugin_manager(entry_points=False)
    base = await take_baseline(where.client, mode=where.mode)
    ran = await where.sh(script, env={"LEFT_BY_THE_LAST_COMMAND": "1"})
    assert ran.code == 0, ran
    await run_reset(where.client, manager, task=None, layer="", baseline=base, deadline_s=60)
    return await run_verify(where.client, manager, task=None, baseline=base, deadline_s=60)


@pytest.mark.parametrize("mode", ["overlay", "userns"])
@pytest.mark.parametrize("step", STEPS)
async def test_a_step_that_was_left_out_is_named(
    step: str, mode: str, leave_out: Callable[[str], None]
) -> None:
    leave_out(step)
    script, kinds = STEPS[step]
    async with local(mode) as backend, place(backend) as where:
        found = await reset_and_verify(where, script)
    assert {item.kind for item in found} & kinds, f"{step} was left out and verification found {found}"


@pytest.mark.parametrize("mode", ["overlay", "userns"])
async def test_the_same_build_leaving_nothing_out_is_clean(
    mode: str, leave_out: Callable[[str], None]
) -> None:
    leave_out("")
    async with local(mode) as backend, place(backend) as where:
        for script, _ in STEPS.values():
            assert await reset_and_verify(where, script) == []


@pytest.mark.parametrize("mode", ["overlay", "userns"])
async def test_a_top_directory_is_compared_with_that_of_the_layer(mode: str) -> None:
    manager = plugin_manager(entry_points=False)
    async with local(mode) as backend, place(backend) as where:
        base = await take_baseline(where.client, mode=where.mode)
        on_layer = base.on("primed")

        async def left() -> list[Residue]:
            return await run_verify(where.client, manager, task=None, baseline=on_layer, deadline_s=60)

        assert (await where.sh("chmod 750 /usr")).code == 0
        await where.client.seal("primed", kill=True)
        await run_reset(where.client, manager, task=None, layer="primed", baseline=base, deadline_s=60)
        assert await left() == []
        assert (await where.sh("chmod 711 /usr")).code == 0  # and no reset
        assert await left() == [Residue("file", "/usr", "is 0711 0 0 -, was 0750 0 0 -")]


async def test_the_build_that_people_get_cannot_leave_anything_out() -> None:
    assert b"RLS_SKIP" not in build.keeper_binary().read_bytes()
    async with local() as backend, place(backend) as where:
        assert await reset_and_verify(where, STEPS["upper"][0]) == []
