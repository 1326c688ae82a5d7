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


def layout(root: Path, *entries: tuple[str, dict[str, Any]]) -> None:
    """An OCI layout whose index lists images without layers: what their config's ``Cmd`` is, and what the entry says."""

    def blob(what: Any) -> str:
        raw = json.dumps(what).encode()
        digest = hashlib.sha256(raw).hexdigest()
        (root / "blobs" / "sha256").mkdir(parents=True, exist_ok=True)
        (root / "blobs" / "sha256" / digest).write_bytes(raw)
        return f"sha256:{digest}"

    listed = []
    for name, said_of_it in entries:
        config = blob({"rootfs": {"diff_ids": []}, "config": {"Cmd": [name]}})
        listed.append({"digest": blob({"config": {"digest": config}, "layers": []}), **said_of_it})
    (root / "index.json").write_text(json.dumps({"manifests": listed}))


def tag(name: str) -> dict[str, Any]:
    return {"annotations": {"org.opencontainers.image.ref.name": name}}


def made_for(architecture: str, variant: str | None = None) -> dict[str, Any]:
    platform = {"os": "linux", "architecture": architecture}
    return {"platform": platform if variant is None else platform | {"variant": variant}}


@pytest.mark.parametrize(
    ("entries", "machine"),
    [
        ([("it", tag("a:1")), ("it", tag("a:latest")), ("it", {})], "x86_64"),
        ([("new", made_for("amd64", "v3")), ("it", made_for("amd64"))], "x86_64"),
        ([("it", made_for("amd64", "v1")), ("new", made_for("amd64", "v2"))], "x86_64"),
        ([("it", made_for("arm64", "v8")), ("new", made_for("arm64", "v9"))], "aarch64"),
        ([("other", made_for("amd64")), ("it", made_for("arm64", "v9"))], "aarch64"),
    ],
)
def test_which_image_of_several_entries(
    tmp_path: Path, entries: list[tuple[str, dict[str, Any]]], machine: str
) -> None:
    layout(tmp_path, *entries)
    assert read_info(DirectoryStore(tmp_path), "image", None, machine).config["config"]["Cmd"] == ["it"]


def test_several_images_have_to_be_told_apart(tmp_path: Path) -> None:
    layout(tmp_path, ("one", tag("a:1")), ("two", tag("a:2")), ("two", tag("a:3")))
    assert "holds 2 images (a:1, a:2, a:3)" in said(tmp_path)
    layout(tmp_path, ("one", made_for("amd64", "v3")), ("two", made_for("amd64", "v4")))
    assert "holds 2 images" in said(tmp_path)


def test_an_archive_that_lists_an_image_twice(tmp_path: Path) -> None:
    raw = json.dumps({"rootfs": {"diff_ids": []}}).encode()
    name = hashlib.sha256(raw).hexdigest() + ".json"
    (tmp_path / name).write_bytes(raw)
    twice = [{"Config": name, "Layers": [], "RepoTags": [tag]} for tag in ("a:1", "a:2")]
    (tmp_path / "manifest.json").write_text(json.dumps(twice))
    assert read_info(DirectoryStore(tmp_path), "image", None, "x86_64").layers == ()
