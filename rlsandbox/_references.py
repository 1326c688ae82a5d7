"""Names of images, as container runtimes read them."""

from __future__ import annotations

import re

from .errors import ConfigError


def split_name(name: str) -> tuple[str, str, str, str]:
    """(registry, repository, tag, digest) of an image's name; the tag is ``latest`` where none is said.

    Raises:
        ConfigError: it is no image's name.
    """
    rest, at, digest = name.partition("@")
    head, slash, tail = rest.partition("/")
    if slash and ("." in head or ":" in head or head == "localhost"):
        host, path = head, tail
    else:
        host, path = "docker.io", rest
    last = path.rpartition("/")[2]
    tag = colon = ""
    if ":" in last:
        path, colon, tag = path.rpartition(":")
    if host == "docker.io" and "/" not in path:
        path = f"library/{path}"
    good = path and not path.startswith("/") and not path.endswith("/") and "//" not in path
    plain = bool(_PATH.match(path)) and (not colon or bool(_TAG.match(tag)))
    if not (good and plain) or any(char.isspace() for char in name) or (at and not DIGEST.match(digest)):
        raise ConfigError(f"{name!r} is no name of an image")
    return host, path, tag or "latest", digest


_PATH = re.compile(r"[a-z0-9]+((\.|_|__|-+)[a-z0-9]+)*(/[a-z0-9]+((\.|_|__|-+)[a-z0-9]+)*)*\Z")
_TAG = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]{0,127}\Z")
DIGEST = re.compile(r"[a-z0-9]+([+._-][a-z0-9]+)*:[0-9a-fA-F]{32,}\Z")
