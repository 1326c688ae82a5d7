"""What an image is made of: from its index or manifest to its config and its layers, every digest checked."""

from __future__ import annotations

import hashlib
import json
import posixpath
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from ...errors import ImageError
from .archive import LayerBlob, Store

MAX_JSON = 32 << 20
_DIGEST = re.compile(r"sha256:[0-9a-f]{64}")
_ARCHITECTURES = {"x86_64": "amd64", "aarch64": "arm64"}


@dataclass(frozen=True)
class ImageInfo:
    """What an image says about itself."""

    config: dict[str, Any]
    layers: tuple[LayerBlob, ...]


def read_info(store: Store, shown: str, ref: str | None, machine: str) -> ImageInfo:
    """What the image in *store* is made of; *ref* picks one of several, *machine* one of its platforms."""
    try:
        return _read_info(store, shown, ref, machine)
    except (TypeError, KeyError, AttributeError, ValueError) as error:
        # A list where a name should be, and all else that JSON allows: the image's fault, and it stays so.
        raise ImageError(f"{shown} is no image as the standards have it: {error}") from error


def _read_info(store: Store, shown: str, ref: str | None, machine: str) -> ImageInfo:
    names = store.names()
    if "manifest.json" in names and (ref is not None or "index.json" not in names):
        config_name, layer_names = _docker_manifest(_json(store, "manifest.json", shown), shown, ref)
        raw = _bytes(store, config_name, shown)
        stem = posixpath.basename(config_name).removesuffix(".json")
        if re.fullmatch(r"[0-9a-f]{64}", stem):
            _check("sha256:" + stem, raw, f"{shown}: {config_name}")
        digests: list[str | None] = [None] * len(layer_names)
    elif "index.json" in names:
        manifest = _oci_manifest(store, _json(store, "index.json", shown), shown, ref, machine)
        raw = _blob(store, manifest.get("config"), shown)
        layers = manifest.get("layers")
        if not isinstance(layers, list):
            raise ImageError(f"{shown}: the manifest names no layers")
        digests = [_digest_of(layer, shown) for layer in layers]
        layer_names = [_blob_name(digest) for digest in digests if digest]
    else:
        raise ImageError(
            f"{shown} is no image: neither index.json (OCI layout) nor manifest.json (docker save) is in it"
        )
    config = _parse(raw, f"{shown}: the image's config")
    diff_ids = config.get("rootfs", {}).get("diff_ids") if isinstance(config.get("rootfs"), dict) else None
    if not isinstance(diff_ids, list) or len(diff_ids) != len(layer_names):
        raise ImageError(
            f"{shown}: the config lists {len(diff_ids or [])} layers, the manifest {len(layer_names)}"
        )
    for diff_id in diff_ids:
        if not isinstance(diff_id, str) or not _DIGEST.fullmatch(diff_id):
            raise ImageError(f"{shown}: {diff_id!r} is no sha256 digest")
    wanted = _ARCHITECTURES.get(machine, machine)
    if config.get("architecture") not in (None, "", wanted):
        raise ImageError(f"{shown} is made for {config['architecture']}, this machine is {wanted}")
    blobs = zip(layer_names, diff_ids, digests, strict=True)
    return ImageInfo(config, tuple(LayerBlob(*blob) for blob in blobs))


def chain_ids(layers: Sequence[LayerBlob]) -> list[str]:
    """The OCI chain id of each layer (hex): equal exactly when it and all below are equal."""
    chain: list[str] = []
    for layer in layers:
        text = f"sha256:{chain[-1]} {layer.diff_id}" if chain else layer.diff_id
        chain.append(
            hashlib.sha256(text.encode()).hexdigest() if chain else layer.diff_id.removeprefix("sha256:")
        )
    return chain


def _docker_manifest(data: Any, shown: str, ref: str | None) -> tuple[str, list[str]]:
    images = [item for item in data if isinstance(item, dict)] if isinstance(data, list) else []
    tags = [tag for item in images for tag in item.get("RepoTags") or []]
    if ref is not None:
        images = [item for item in images if ref in (item.get("RepoTags") or [])]
    images = list({json.dumps([item.get("Config"), item.get("Layers")]): item for item in images}.values())
    if len(images) != 1:
        _pick(shown, ref, tags, len(images))
    config, layers = images[0].get("Config"), images[0].get("Layers")
    if not isinstance(config, str) or not isinstance(layers, list):
        raise ImageError(f"{shown}: manifest.json names no config or no layers")
    return config, [str(layer) for layer in layers]


def _oci_manifest(store: Store, index: Any, shown: str, ref: str | None, machine: str) -> dict[str, Any]:
    for _ in range(4):  # an index may point to another one, per platform
        entries = index.get("manifests") if isinstance(index, dict) else None
        if entries is None:
            return index if isinstance(index, dict) else {}
        entries = [entry for entry in entries if isinstance(entry, dict)]
        names = {_ref_name(entry): entry for entry in entries if _ref_name(entry)}
        if ref is not None and names:
            if ref not in names:
                _pick(shown, ref, list(names), 0)
            entries, ref = [names[ref]], None
        wanted = _different(entry for entry in entries if _platform_fits(entry, machine))
        if len(wanted) > 1:
            # Of builds for several generations of one processor the one that runs on all of them is meant.
            wanted = [entry for entry in wanted if _runs_everywhere(entry)] or wanted
        if len(wanted) != 1:
            if entries and not wanted:
                raise ImageError(f"{shown} holds no image for {_ARCHITECTURES.get(machine, machine)}")
            _pick(shown, ref, list(names), len(wanted))
        index = _parse(_blob(store, wanted[0], shown), f"{shown}: a manifest")
    raise ImageError(f"{shown}: indexes are nested too deep")


def _different(entries: Iterable[dict[str, Any]]) -> list[dict[str, Any]]:
    """One of those with the same digest: an image of several tags is listed several times."""
    return list({str(entry.get("digest")): entry for entry in entries}.values())


def _runs_everywhere(entry: dict[str, Any]) -> bool:
    platform = entry.get("platform")
    if not isinstance(platform, dict) or platform.get("variant") in (None, ""):
        return True
    return (platform["architecture"], platform["variant"]) in (("amd64", "v1"), ("arm64", "v8"))


def _ref_name(entry: dict[str, Any]) -> str:
    notes = entry.get("annotations")
    return str(notes.get("org.opencontainers.image.ref.name") or "") if isinstance(notes, dict) else ""


def _platform_fits(entry: dict[str, Any], machine: str) -> bool:
    platform = entry.get("platform")
    if not isinstance(platform, dict):
        return True
    return (
        platform.get("architecture") == _ARCHITECTURES.get(machine, machine) and platform.get("os") == "linux"
    )


def _pick(shown: str, ref: str | None, names: list[str], count: int) -> None:
    known = ", ".join(names) or "none has a name"
    if ref is not None:
        raise ImageError(f"{shown} holds no image {ref!r}; it holds: {known}")
    if count == 0:
        raise ImageError(f"{shown} holds no image")
    raise ImageError(
        f"{shown} holds {count} images ({known})", hint=f"name one: {shown}#{(names or ['NAME'])[0]}"
    )


def _digest_of(entry: Any, shown: str) -> str:
    digest = entry.get("digest") if isinstance(entry, dict) else None
    # Checked before it becomes part of a path.
    if not isinstance(digest, str) or not _DIGEST.fullmatch(digest):
        raise ImageError(f"{shown}: {digest!r} is no sha256 digest")
    return digest


def _blob_name(digest: str) -> str:
    return "blobs/sha256/" + digest.removeprefix("sha256:")


def _blob(store: Store, entry: Any, shown: str) -> bytes:
    digest = _digest_of(entry, shown)
    data = _bytes(store, _blob_name(digest), shown)
    _check(digest, data, f"{shown}: {_blob_name(digest)}")
    return data


def _check(digest: str, data: bytes, what: str) -> None:
    found = "sha256:" + hashlib.sha256(data).hexdigest()
    if found != digest:
        raise ImageError(f"{what} is damaged: its content hashes to {found}")


def _bytes(store: Store, name: str, shown: str) -> bytes:
    with store.open(name) as blob:
        data = blob.read(MAX_JSON + 1)
    if len(data) > MAX_JSON:
        raise ImageError(f"{shown}: {name} is over {MAX_JSON >> 20} MiB, too long for what it should be")
    return data


def _json(store: Store, name: str, shown: str) -> Any:
    data = _bytes(store, name, shown)
    try:
        return json.loads(data)
    except (ValueError, RecursionError) as error:
        raise ImageError(f"{shown}: {name} is no JSON: {error}") from error


def _parse(data: bytes, what: str) -> dict[str, Any]:
    try:
        value = json.loads(data)
    except (ValueError, RecursionError) as error:
        raise ImageError(f"{what} is no JSON: {error}") from error
    if not isinstance(value, dict):
        raise ImageError(f"{what} is no JSON object")
    return value
