"""Git repositories, wherever they lie, as files read from outside: git itself is never run.

Named apart: hooks, configuration (filters, includes), refs, reflog, stash, notes, replace refs, alternates,
other working trees, ignore and attribute rules, and entries of the index that hide edits (skip-worktree,
assume-unchanged).
"""

from __future__ import annotations

import struct
from collections.abc import Iterator

from rlsandbox.hooks import Inspector, Resetter, Residue, hookimpl

from ._common import how, undo

MAX_INDEX = 64 << 20
HOME_FILES = ("/.gitconfig", "/.git-credentials", "/.gitignore_global", "/.gitattributes_global")

# The first entry that fits wins; each is a piece of the path below the repository's directory.
_WORDS = (
    ("hooks/", "hook"),
    ("config", "configuration"),
    ("logs/", "reflog"),
    ("refs/stash", "stash"),
    ("refs/notes/", "notes"),
    ("refs/replace/", "replace ref"),
    ("refs/", "ref"),
    ("packed-refs", "ref"),
    ("reftable/", "ref"),
    ("objects/info/alternates", "alternates"),
    ("objects/info/http-alternates", "alternates"),
    ("info/grafts", "grafts"),
    ("info/exclude", "ignore rules"),
    ("info/attributes", "attributes"),
    ("info/sparse-checkout", "sparse checkout"),
    ("shallow", "shallow boundary"),
    ("worktrees/", "working tree"),
    ("modules/", "submodule"),
    ("rebase-", "unfinished rebase"),
    ("sequencer/", "unfinished sequence"),
    ("MERGE_", "unfinished merge"),
    ("CHERRY_PICK_HEAD", "unfinished cherry-pick"),
    ("BISECT_", "bisect"),
    ("index.lock", "lock"),
    ("index", "index"),
    ("objects/", "object"),
    ("", "HEAD or other state"),
)


@hookimpl
def rlsandbox_reset(resetter: Resetter) -> None:
    undo(resetter, lambda path: _inside(path) is not None or path.endswith(HOME_FILES) or _global(path))


@hookimpl
def rlsandbox_verify(inspector: Inspector) -> Iterator[Residue]:
    for change in inspector.changed("/"):
        path = change.name
        inside = _inside(path)
        if inside is not None:
            yield Residue("git", path, f"{_word(inside)}: {how(change)}")
            if inside == "index" and change.kind == "file":
                yield from _hidden(inspector, path)
        elif path.endswith(HOME_FILES) or _global(path):
            yield Residue("git", path, f"configuration of every repository: {how(change)}")
        elif path.endswith((".gitattributes", ".gitignore", ".gitmodules", ".mailmap")):
            yield Residue("git", path, f"rules in the working tree: {how(change)}")


def _inside(path: str) -> str | None:
    """The path below a ``.git`` directory, or below a bare repository called ``*.git``."""
    head, mark, rest = path.partition("/.git/")
    if mark:
        return rest
    if path.endswith("/.git"):
        return ""
    head, mark, rest = path.partition(".git/")
    return rest if mark and not head.endswith("/") else None


def _global(path: str) -> bool:
    return (
        path.startswith(("/etc/gitconfig", "/etc/gitattributes", "/usr/share/git-core/"))
        or "/.config/git/" in path
    )


def _word(inside: str) -> str:
    if inside.startswith("worktrees/"):
        return "working tree"
    return next(word for piece, word in _WORDS if inside.startswith(piece))


def _hidden(inspector: Inspector, path: str) -> Iterator[Residue]:
    try:
        now = hidden_entries(inspector.read(path, MAX_INDEX) or b"")
    except ValueError as error:
        yield Residue("git", path, f"index: cannot be read: {error}")
        return
    try:
        then = hidden_entries(inspector.baseline(path) or b"")
    except ValueError:
        then = {}
    for name, flag in now.items():
        if then.get(name) != flag:
            yield Residue("git", f"{path}: {name}", f"edits are hidden by {flag}")


def hidden_entries(raw: bytes) -> dict[str, str]:
    """Entries of an index (versions 2 to 4) that are marked skip-worktree or assume-unchanged.

    Raises:
        ValueError: it is not an index, or is cut off.
    """
    if not raw:
        return {}
    for oid in (20, 32):
        try:
            return _parse(raw, oid)
        except (struct.error, IndexError, ValueError) as error:
            why = error
    raise ValueError(str(why))


def _parse(raw: bytes, oid: int) -> dict[str, str]:
    magic, version, count = struct.unpack_from(">4sII", raw)
    if magic != b"DIRC" or not 2 <= version <= 4:
        raise ValueError(f"no index of version 2 to 4 ({magic!r}, {version})")
    at, name, found = 12, b"", {}
    end = len(raw) - oid
    for _ in range(count):
        start = at
        at += 40 + oid
        (flags,) = struct.unpack_from(">H", raw, at)
        at += 2
        extended = 0
        if flags & 0x4000:
            (extended,) = struct.unpack_from(">H", raw, at)
            at += 2
        if version == 4:
            strip, at = _offset(raw, at)
            if strip > len(name):
                raise ValueError("a name is shorter than nothing")
            stop = raw.index(b"\0", at)
            name = name[: len(name) - strip] + raw[at:stop]
            at = stop + 1
        else:
            stop = raw.index(b"\0", at)
            name = raw[at:stop]
            at = start + (stop - start + 8) // 8 * 8
        if at > end or not name:
            raise ValueError("it is cut off")
        if extended & 0x4000:
            found[name.decode("utf-8", "surrogateescape")] = "skip-worktree"
        elif flags & 0x8000:
            found[name.decode("utf-8", "surrogateescape")] = "assume-unchanged"
    return found


def _offset(raw: bytes, at: int) -> tuple[int, int]:
    byte = raw[at]
    at += 1
    value = byte & 0x7F
    while byte & 0x80:
        byte = raw[at]
        at += 1
        value = ((value + 1) << 7) | (byte & 0x7F)
    return value, at
