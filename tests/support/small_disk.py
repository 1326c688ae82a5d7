"""A disk of a few MiB: a tmpfs, mounted for a test."""

from __future__ import annotations

import contextlib
import os
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest


@contextlib.contextmanager
def small_disk(where: Path, size: str) -> Iterator[Path]:
    if os.geteuid() != 0:
        pytest.skip("mounting a small tmpfs needs root")
    where.mkdir()
    done = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", f"size={size}", "tmpfs", where],
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode:
        pytest.skip(f"no tmpfs may be mounted here: {done.stderr.strip()}")
    try:
        yield where
    finally:
        subprocess.run(["umount", "-l", where], check=True)


def takes_uppers(where: Path) -> None:
    """Skip where the disk is itself an overlay, as in a container, that the kernel lets no other write to."""
    kind = subprocess.run(["stat", "-f", "-c", "%T", where], capture_output=True, text=True, check=True)
    if kind.stdout.strip() != "overlayfs":
        return
    with tempfile.TemporaryDirectory(dir=where) as place:
        for name in ("lower", "upper", "work", "whole"):
            (Path(place) / name).mkdir()
        options = f"lowerdir={place}/lower,upperdir={place}/upper,workdir={place}/work,userxattr"
        mount = ["unshare", "-rm", "mount", "-t", "overlay", "-o", options, "overlay", f"{place}/whole"]
        done = subprocess.run(mount, capture_output=True, text=True, check=False)
        if done.returncode:
            pytest.skip(f"{where} is on an overlay that takes no upper layer: {done.stderr.strip()}")


def fill(where: Path, *, leave: int = 0) -> Path:
    """Use up the disk but for *leave* bytes; returns the file that does."""
    blob = where / "filler"
    with open(blob, "wb", buffering=0) as file:
        try:
            while True:
                file.write(b"x" * 65536)
        except OSError:
            pass
        try:
            while True:
                file.write(b"x" * 512)
        except OSError:
            pass
        if leave:
            file.truncate(file.tell() - leave)
    return blob
