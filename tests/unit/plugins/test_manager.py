"""Which plugins there are, and what is said of those that are broken."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest

from rlsandbox.errors import ConfigError
from rlsandbox.hooks import hookimpl, plugin_manager


class Mine:
    @hookimpl
    def rlsandbox_reset(self, resetter: Any) -> None:
        pass


def test_plugins_have_names_that_people_know() -> None:
    manager = plugin_manager([Mine(), Mine()], entry_points=False)
    names = [name for name, plugin in manager.list_name_plugin() if isinstance(plugin, Mine)]
    assert sorted(names) == ["Mine", "Mine#2"]


def test_one_that_is_there_twice_is_refused() -> None:
    one = Mine()
    with pytest.raises(ConfigError, match="Mine is there twice"):
        plugin_manager([one, one], entry_points=False)


def test_a_hook_that_there_is_not() -> None:
    class Wrong:
        @hookimpl
        def rlsandbox_reset(self, sandbox: Any) -> None:
            pass

    with pytest.raises(ConfigError, match=r"plugins: Wrong: .*sandbox") as caught:
        plugin_manager([Wrong()], entry_points=False)
    assert "\n" not in str(caught.value)


def test_hooks_that_would_silently_do_nothing_are_refused() -> None:
    class Async:
        @hookimpl
        async def rlsandbox_reset(self, resetter: Any) -> None:
            pass

    class Generator:
        @hookimpl
        def rlsandbox_reset(self, resetter: Any) -> Any:
            yield

    class Fine:
        @hookimpl
        def rlsandbox_verify(self, inspector: Any) -> Any:
            yield

        @hookimpl(wrapper=True)
        def rlsandbox_record(self, record: Any) -> Any:
            return (yield)

    for plugin, how in ((Async(), "async"), (Generator(), "a generator")):
        with pytest.raises(ConfigError, match=f"rlsandbox_reset is {how}.*plain functions"):
            plugin_manager([plugin], entry_points=False)
    plugin_manager([Fine()], entry_points=False)


def test_an_installed_plugin_that_cannot_be_loaded_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "acme_broken.py").write_text("raise RuntimeError('no\\nlicense')\n")
    info = tmp_path / "acme_broken-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: acme-broken\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text("[rlsandbox]\nacme = acme_broken\n")
    monkeypatch.setattr(sys, "path", [str(tmp_path), *sys.path])
    with pytest.raises(ConfigError) as caught:
        plugin_manager()
    assert "'acme' (acme_broken) cannot be loaded: RuntimeError: no license" in str(caught.value)
    assert "block=['acme']" in str(caught.value)
    plugin_manager(block=["acme"])
