"""Calls the command line in this process."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from rlsandbox.cli import main


@dataclass
class Ended:
    status: int
    out: str
    err: str

    @property
    def json(self) -> Any:
        return json.loads(self.out)


Cli = Callable[..., Ended]


@pytest.fixture
def cli(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Cli:
    """``cli("run", "--tasks", "x")`` in an empty directory, without the developer's own settings."""
    for name in ("RLSANDBOX_CONFIG", "RLSANDBOX_PROFILE", "KUBECONFIG"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.setenv("RLSANDBOX_HOME", str(tmp_path / "state"))
    work = tmp_path / "work"
    work.mkdir()
    monkeypatch.chdir(work)

    def call(*argv: str) -> Ended:
        status = main(argv)
        out, err = capsys.readouterr()
        return Ended(status, out, err)

    return call
