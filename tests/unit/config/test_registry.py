"""Backends by name."""

from __future__ import annotations

import importlib.metadata
import sys
import types
from typing import Any

import pytest

from rlsandbox.backends import Backend
from rlsandbox.backends.registry import BUILTIN, backend_names, load_backend
from rlsandbox.errors import ConfigError, UnsupportedError


class Mine(Backend):
    name = "mine"

    def __init__(self, *, depth: int = 1) -> None:
        self.depth = depth

    async def capabilities(self) -> Any: ...
    async def provision(self, *args: Any, **kwargs: Any) -> Any: ...
    async def connect(self, member: Any) -> Any: ...
    async def dispose(self, member: Any) -> None: ...
    async def list(self, labels: Any) -> Any: ...


class Needy(Mine):
    def __init__(self, *, where: str) -> None:
        super().__init__()


@pytest.fixture
def mine(monkeypatch: pytest.MonkeyPatch) -> types.ModuleType:
    module = types.ModuleType("third_party_backend")
    module.Mine, module.Needy = Mine, Needy  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, module.__name__, module)
    points = [
        importlib.metadata.EntryPoint("mine", "third_party_backend:Mine", "rlsandbox.backends"),
        importlib.metadata.EntryPoint("gone", "no_such_package_here:X", "rlsandbox.backends"),
        importlib.metadata.EntryPoint("misspelt", "third_party_backend:Mime", "rlsandbox.backends"),
        importlib.metadata.EntryPoint("needy", "third_party_backend:Needy", "rlsandbox.backends"),
        importlib.metadata.EntryPoint("other", "builtins:dict", "rlsandbox.backends"),
    ]
    monkeypatch.setattr(importlib.metadata, "entry_points", lambda group: points)
    return module


def test_a_third_party_backend_gets_its_options(mine: object) -> None:
    backend = load_backend("mine", {"depth": 3})
    assert isinstance(backend, Mine)
    assert backend.depth == 3
    assert {"mine", *BUILTIN} <= set(backend_names())


@pytest.mark.parametrize(
    ("name", "options", "kind", "said"),
    [
        ("mien", {}, ConfigError, "unknown backend 'mien': did you mean 'mine'"),
        ("lcal", {}, ConfigError, "unknown backend 'lcal': did you mean 'local'"),
        ("mine", {"dept": 1}, ConfigError, "backend 'mine' has no option 'dept': did you mean 'depth'"),
        ("gone", {}, UnsupportedError, "backend 'gone' cannot be loaded: .*pip install no_such_package_here"),
        ("misspelt", {}, ConfigError, "third_party_backend has no 'Mime'"),
        ("needy", {}, ConfigError, "backend 'needy': missing a required .*'where'"),
        ("other", {}, ConfigError, "did not make a Backend but dict"),
    ],
)
def test_what_is_wrong_is_named(
    mine: object, name: str, options: dict[str, Any], kind: type[Exception], said: str
) -> None:
    with pytest.raises(kind, match=said):
        load_backend(name, options)


def test_the_default_backend_is_there() -> None:
    assert load_backend("local").name == "local"
