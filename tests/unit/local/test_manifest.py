"""Images whose JSON lies, or points where it should not."""

from __future__ import annotations

import hashlib
import json
import os
from pathlib import Path
from typing import Any

import pytest

from rlsandbox.backends.local.archive import DirectoryStore, open_store
from rlsandbox.backends.local.manifest import read_info
from rlsandbox.errors import ImageError

DIGEST = "sha256:" + "0" * 64


def said(root: Path) -> str:
    with pytest.raises(ImageError) as caught:
        read_info(DirectoryStore(root), "image", None, "x86_64")
    assert "\n" not in str(caught.value)
    return str(caught.value)


@pytest.mark.parametrize(
    "manifest",
    [
        *(
            [],
            {},
            5,
            None,
            "x",
            [5],
            [{}],
            [{"RepoTags": 5}],
            [{"RepoTags": [[]], "Config": "c", "Layers": []}],
        ),
        [{"Config": "c", "Layers": 5}],
        [{"Config": ["c"], "Layers": []}],
    ],
    ids=repr,
)
def test_a_manifest_of_anything(tmp_path: Path, manifest: Any) -> None:
    (tmp_path / "manifest.json").write_text(json.dumps(manifest))
    (tmp_path / "c").write_text("{}")
    said(tmp_path)


@pytest.mark.parametrize(
    "config",
    [
        *([], 5, {}, {"rootfs": 5}, {"rootfs": {"diff_ids": 5}}, {"rootfs": {"diff_ids": [5]}}),
        {"rootfs": {"diff_ids": [DIGEST]}, "architecture": ["amd64"]},
    ],
    ids=repr,
)
def test_a_config_of_anything(tmp_path: Path, config: Any) -> None:
    (tmp_path / "manifest.json").write_text(json.dumps([{"Config": "c", "Layers": ["l"]}]))
    (tmp_path / "c").write_text(json.dumps(config))
    said(tmp_path)


@pytest.mark.parametrize(
    "index",
    [
        *(5, [], {}, {"manifests": 5}, {"manifests": [5]}, {"manifests": [{"digest": 5}]}, {"manifests": []}),
        *({"manifests": [{"digest": DIGEST, "annotations": {"org.opencontainers.image.ref.name": [1]}}]},),
        {"manifests": [{"digest": DIGEST, "platform": {"architecture": []}}]},
    ],
    ids=repr,
)
def test_an_index_of_anything(tmp_path: Path, index: Any) -> None:
    (tmp_path / "index.json").write_text(json.dumps(index))
    said(tmp_path)


def test_nothing_outside_the_directory_is_read(tmp_path: Path) -> None:
    root = tmp_path / "image"
    root.mkdir()
    outside = tmp_path / "outside.json"
    outside.write_text("{}")
    (root / "link").symlink_to(outside)
    for name in ("../outside.json", str(outside), "link"):
        (root / "manifest.json").write_text(json.dumps([{"Config": name, "Layers": []}]))
        assert "lies outside the image" in said(root)


def test_what_is_no_file_is_not_waited_for(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "fifo")
    (tmp_path / "loop").symlink_to("loop")
    for name, words in (
        ("fifo", "is no file"),
        (".", "is no file"),
        ("loop", "cannot be read"),
        ("a\0b", ""),
    ):
        (tmp_path / "manifest.json").write_text(json.dumps([{"Config": name, "Layers": []}]))
        assert words in said(tmp_path)
    with (
        pytest.raises(ImageError, match="neither a directory nor a file"),
        open_store(tmp_path / "fifo", tmp_path),
    ):
        pass


def test_links_inside_the_directory_are_followed(tmp_path: Path) -> None:
    """As tools that share blobs between layouts write them."""
    raw = json.dumps({"rootfs": {"diff_ids": []}}).encode()
    name = hashlib.sha256(raw).hexdigest() + ".json"
    (tmp_path / "real").write_bytes(raw)
    (tmp_path / name).symlink_to("real")
    (tmp_path / "manifest.json").write_text(json.dumps([{"Config": name, "Layers": []}]))
    assert read_info(DirectoryStore(tmp_path), "image", None, "x86_64").layers == ()
