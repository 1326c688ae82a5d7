"""Unpacks one image layer into a directory. The tar may come from an enemy.

Two forms. ``overlay``: the directory holds what the layer adds, deletions are overlayfs whiteouts.
``apply``: the directory already holds the layers below and deletions are carried out. Nothing is ever written
outside the directory: every parent of a member is a real directory that this code has made or looked at,
members that say otherwise are refused by name, and nobody else can write there (mode 0700, renamed into
place when whole).
"""

from __future__ import annotations

import errno
import os
import stat
import tarfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO

from ...errors import ImageError
from .archive import holes_of, open_tar
from .trees import remove_tree
from .view import MAX_LINKS, OPAQUE, Found, View, split

MAX_ID = 65535
NOBODY = 65534
MAX_MTIME_NS = (1 << 33) * 10**9
# Paths, sizes, numbers of links that a filesystem does not have.
_ITS_FAULT = {errno.ENAMETOOLONG, errno.EFBIG, errno.EINVAL, errno.EMLINK, errno.EOVERFLOW, errno.ELOOP}
_WH = ".wh."
_OPQ = ".wh..wh..opq"
# Character devices that images carry in /dev and that every episode gets anyway: skipped, all others refused.
_USUAL_DEVICES = {(1, 3), (1, 5), (1, 7), (1, 8), (1, 9), (5, 0), (5, 1), (5, 2)} | {
    (4, n) for n in range(64)
}


@dataclass(frozen=True)
class _Meta:
    mode: int
    uid: int
    gid: int
    mtime_ns: int
    xattrs: Mapping[str, bytes]


class Unpacker:
    """Unpacks layers into *root*.

    Args:
        root: an existing private directory; in form ``apply`` with the layers below in it.
        form: ``overlay`` or ``apply``.
        lowers: unpacked layers below, topmost first (form ``overlay``).
        owners: whether to give files to the owners that the layer names (needs the right to).
        shown: how errors name the layer.
    """

    def __init__(
        self, root: Path, *, form: str, lowers: Sequence[str] = (), owners: bool, shown: str
    ) -> None:
        self._root = os.open(root, os.O_RDONLY | os.O_DIRECTORY)
        self._path = str(root)
        self._overlay = form == "overlay"
        self._below = View(lowers)
        self._lowers = list(lowers)
        self._owners = owners
        self._shown = shown
        self._dirs = {""}  # directories of this layer that were seen: no link is among them
        self._links: set[str] = set()  # links that this layer made
        self._metas: dict[str, _Meta] = {}
        self.count = 0

    def __enter__(self) -> Unpacker:
        return self

    def __exit__(self, *_: object) -> None:
        os.close(self._root)

    def unpack(self, layer: Path) -> None:
        """Unpack the plain tar *layer*, whose digest has been checked.

        Raises:
            ImageError: a member is hostile, or the tar is malformed; it names the member.
        """
        if not layer.stat().st_size:  # without even the blocks that end an archive: nothing is in it
            return
        with open_tar(layer, self._shown) as tar, open(layer, "rb") as data:
            members = tar.getmembers()
            whiteouts = self._whiteouts(members)
            if not self._overlay:
                self._carry_out(whiteouts)
            for member in members:
                try:
                    self._member(member, data)
                except (ValueError, OverflowError) as error:
                    raise self._hostile(member.name, f"it is malformed ({error})") from error
                except OSError as error:
                    if error.errno not in _ITS_FAULT:
                        raise
                    raise self._hostile(
                        member.name, f"no filesystem has such a thing ({error.strerror})"
                    ) from error
            if self._overlay:
                self._mark(whiteouts)
            else:  # what was carried out before its way was led astray is refused as well
                for name, parts, _ in whiteouts:
                    self._directory(name, parts, make=False)
        # The deepest first: a directory's time changes with its entries, and its mode may lock us out.
        for name in sorted(self._metas, key=_depth, reverse=True):
            self._set_meta(name, self._metas[name])

    # Names

    def _split(self, member: str, name: str, what: str = "name") -> list[str]:
        if name.startswith("/") and name.strip("/"):
            raise self._hostile(member, f"its {what} {name!r} is absolute")
        parts = split(name)
        if ".." in parts:
            raise self._hostile(member, f"its {what} {name!r} leads out by '..'")
        if len(name) > 4000 or any(len(os.fsencode(part)) > 255 for part in parts):
            raise self._hostile(member, f"its {what} is too long for a filesystem")
        if "\0" in name:
            raise self._hostile(member, f"its {what} contains a NUL")
        return parts

    def _hostile(self, member: str, why: str) -> ImageError:
        return ImageError(f"{self._shown}: member {member!r} is refused: {why}", kind="image_hostile")

    def _parent(self, member: str, parts: Sequence[str]) -> str:
        """The directory *parts*, made if need be, as a path without links."""
        path = self._directory(member, parts, make=True)
        assert path is not None
        return path

    def _directory(self, member: str, parts: Sequence[str], *, make: bool) -> str | None:
        """The directory *parts* as a path without links; None when it is nowhere and is not to be made."""
        known = "/".join(parts)
        if known in self._dirs:
            return known
        here: list[str] = []
        todo = list(parts)
        hops = 0
        while todo:
            name = todo.pop(0)
            if name == "..":
                here = here[:-1]
                continue
            path = "/".join([*here, name])
            if path not in self._dirs:
                found = self._look(path) or self._below.find([*here, name])
                if found is not None and found.target is not None:
                    if path in self._links:
                        raise self._hostile(member, f"it would be written through the link {path!r}")
                    hops += 1
                    if hops > MAX_LINKS:
                        raise self._hostile(member, f"too many links in its path ({path!r})")
                    if found.target.startswith("/"):
                        here = []
                    todo = split(found.target) + todo
                    continue
                if found is not None and not found.is_dir:
                    raise self._hostile(member, f"{path!r} is a file, not a directory")
                if found is None and not make:
                    return None
                self._make_dir(path, found)
            here.append(name)
        return "/".join(here)

    def _look(self, path: str) -> Found | None:
        """What the own directory has at *path*, whose parents are known to be directories."""
        try:
            status = os.lstat(path, dir_fd=self._root)
        except FileNotFoundError:
            return None
        target = os.readlink(path, dir_fd=self._root) if stat.S_ISLNK(status.st_mode) else None
        return Found(status, target)

    def _make_dir(self, path: str, like: Found | None) -> None:
        """A directory that no member has announced: as it is below, else root's with mode 0755."""
        if self._look(path) is None:
            os.mkdir(path, 0o700, dir_fd=self._root)
            status = like.status if like is not None else None
            self._metas[path] = (
                _Meta(stat.S_IMODE(status.st_mode), status.st_uid, status.st_gid, status.st_mtime_ns, {})
                if status is not None
                else _Meta(0o755, 0, 0, 0, {})
            )
        elif path not in self._metas:  # form apply: a directory of a layer below that we write into
            assert like is not None
            status = like.status
            self._metas[path] = _Meta(
                stat.S_IMODE(status.st_mode), status.st_uid, status.st_gid, status.st_mtime_ns, {}
            )
            os.chmod(path, 0o700, dir_fd=self._root)
        self._dirs.add(path)

    # Members

    def _member(self, info: tarfile.TarInfo, data: IO[bytes]) -> None:
        member = info.name
        parts = self._split(member, member)
        if parts and parts[-1].startswith(_WH):
            return
        self.count += 1
        meta = self._meta(info)
        if not parts:
            if not info.isdir():
                raise self._hostile(member, "it would replace the root directory")
            self._metas[""] = meta
            return
        usual = info.ischr() and (info.devmajor, info.devminor) in _USUAL_DEVICES
        if usual and parts[0] == "dev":
            return
        if info.ischr() or info.isblk():
            raise self._hostile(member, f"it is a device ({info.devmajor}:{info.devminor})")
        parent = self._parent(member, parts[:-1])
        path = f"{parent}/{parts[-1]}" if parent else parts[-1]
        if info.isdir():
            self._dir(path, meta)
            return
        self._make_room(path)
        if info.issym():
            if not info.linkname or "\0" in info.linkname or len(os.fsencode(info.linkname)) > 4095:
                raise self._hostile(member, "it is a link to nowhere")
            os.symlink(info.linkname, path, dir_fd=self._root)
            self._links.add(path)
        elif info.islnk():
            self._hard_link(member, path, info.linkname)
            return
        elif info.isfifo():
            os.mkfifo(path, 0o600, dir_fd=self._root)
        elif info.isreg():
            self._file(path, info, data)
        else:
            raise self._hostile(member, f"it is of an unknown kind ({info.type!r})")
        self._set_meta(path, meta, link=info.issym())

    def _dir(self, path: str, meta: _Meta) -> None:
        found = self._look(path)
        if found is not None and not found.is_dir:
            self._make_room(path)
            found = None
        if found is None:
            os.mkdir(path, 0o700, dir_fd=self._root)
        elif path not in self._dirs:
            os.chmod(path, 0o700, dir_fd=self._root)
        self._dirs.add(path)
        self._metas[path] = meta

    def _file(self, path: str, info: tarfile.TarInfo, data: IO[bytes]) -> None:
        source = data.fileno()
        fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, 0o600, dir_fd=self._root)
        try:
            at = info.offset_data
            holes = holes_of(info)
            for offset, size in holes if holes is not None else [(0, info.size)]:
                if offset < 0 or size < 0 or offset + size > info.size:
                    raise self._hostile(info.name, "its map of holes is wrong")
                os.lseek(fd, offset, os.SEEK_SET)
                while size > 0:
                    sent = os.sendfile(fd, source, at, min(size, 1 << 30))
                    if sent == 0:
                        raise ImageError(f"{self._shown} is cut off in the middle of {info.name!r}")
                    at, size = at + sent, size - sent
            if holes is not None:
                os.ftruncate(fd, info.size)
        finally:
            os.close(fd)

    def _hard_link(self, member: str, path: str, target: str) -> None:
        parts = self._split(member, target, "link target")
        where = "/".join(parts)
        parent = "/".join(parts[:-1])
        # Only directories of this layer that hold no link: the target cannot lie outside.
        found = self._look(where) if parts and self._known_dir(parent) else None
        if found is None or found.is_dir:
            raise self._hostile(member, f"it is a hard link to {target!r}, which is no file of this layer")
        os.link(where, path, src_dir_fd=self._root, dst_dir_fd=self._root, follow_symlinks=False)
        if found.target is not None:
            self._links.add(path)

    def _known_dir(self, path: str) -> bool:
        if path in self._dirs:
            return True
        if self._overlay:
            return False
        here = ""
        for name in split(path):
            here = f"{here}/{name}" if here else name
            found = self._look(here)
            if found is None or not found.is_dir:
                return False
        return True

    def _make_room(self, path: str) -> None:
        found = self._look(path)
        if found is None:
            return
        if found.is_dir:
            self._remove_tree(path)
        else:
            os.unlink(path, dir_fd=self._root)
            self._links.discard(path)

    def _remove_tree(self, path: str) -> None:
        remove_tree(f"{self._path}/{path}")
        inside = path + "/"
        gone = {name for name in (*self._dirs, *self._links) if name == path or name.startswith(inside)}
        self._dirs -= gone
        self._links -= gone
        for name in [name for name in self._metas if name == path or name.startswith(inside)]:
            del self._metas[name]

    # Owners, modes, times

    def _meta(self, info: tarfile.TarInfo) -> _Meta:
        xattrs: dict[str, bytes] = {}
        for key, value in info.pax_headers.items():
            name = key.removeprefix("SCHILY.xattr.")
            # Capabilities mean nothing under no_new_privs; overlay's own marks are not the image's to set.
            if name != key and name.startswith("user.") and not name.startswith("user.overlay."):
                xattrs[name] = value.encode("utf-8", "surrogateescape")
        mtime = min(max(int(float(info.mtime) * 10**9), 0), MAX_MTIME_NS)
        return _Meta(info.mode & 0o7777, _owner(info.uid), _owner(info.gid), mtime, xattrs)

    def _set_meta(self, path: str, meta: _Meta, *, link: bool = False) -> None:
        where = path or "."
        if self._owners:
            os.chown(where, meta.uid, meta.gid, dir_fd=self._root, follow_symlinks=False)
        if not link:
            os.chmod(where, meta.mode, dir_fd=self._root)  # after chown, which takes setuid bits away
            for name, value in meta.xattrs.items():
                try:
                    os.setxattr(f"{self._path}/{path}", name, value, follow_symlinks=False)
                except OSError as error:
                    raise ImageError(f"{self._shown}: {path}: attribute {name}: {error.strerror}") from error
        os.utime(where, ns=(meta.mtime_ns, meta.mtime_ns), dir_fd=self._root, follow_symlinks=False)

    # Deletions

    def _whiteouts(self, members: Sequence[tarfile.TarInfo]) -> list[tuple[str, list[str], str]]:
        """(member, parent's parts, deleted name or "" for all that is below) of each deletion that tells.

        Builders write one for every file of a directory that goes, and one for the directory. What lies below
        something deleted is gone already: a mark of its own would bring back the directories that it is in.
        """
        found: list[tuple[str, list[str], str]] = []
        for info in members:
            if _WH not in info.name:
                continue
            parts = self._split(info.name, info.name)
            if not parts or not parts[-1].startswith(_WH):
                continue
            name = parts[-1].removeprefix(_WH)
            if parts[-1] == _OPQ:
                name = ""
            elif name.startswith(_WH):
                continue  # aufs's own bookkeeping
            elif name in ("", ".", ".."):
                raise self._hostile(info.name, "it deletes nothing that can be named")
            found.append((info.name, parts[:-1], name))
        named = {(*parts, name) for _, parts, name in found if name}
        emptied = {tuple(parts) for _, parts, name in found if not name}

        def said_above(parts: Sequence[str], name: str) -> bool:
            above = [tuple(parts[:depth]) for depth in range(len(parts) + 1)]
            return any(path in named or (path in emptied and (name or path != above[-1])) for path in above)

        return [deletion for deletion in found if not said_above(*deletion[1:])]

    def _carry_out(self, whiteouts: list[tuple[str, list[str], str]]) -> None:
        """Form apply: delete, before anything of this layer is there."""
        for member, parts, name in whiteouts:
            parent = self._directory(member, parts, make=False)
            if parent is None:
                continue
            names = [name] if name else os.listdir(f"{self._path}/{parent}")
            for gone in names:
                self._make_room(f"{parent}/{gone}" if parent else gone)

    def _mark(self, whiteouts: list[tuple[str, list[str], str]]) -> None:
        """Form overlay: write marks, when all of this layer is there: a deletion never hits its own layer."""
        if not self._lowers:
            return
        for member, parts, name in whiteouts:
            parent = self._directory(member, parts, make=False)
            if parent is None:
                continue
            if name:
                self._hide(f"{parent}/{name}" if parent else name)
            elif parent:
                os.setxattr(f"{self._path}/{parent}", OPAQUE, b"y")
            else:  # overlayfs merges the roots of its layers whatever they are marked
                for gone in {gone for lower in self._lowers for gone in os.listdir(lower)}:
                    self._hide(gone)

    def _hide(self, path: str) -> None:
        found = self._look(path)
        if found is None:
            os.mknod(path, stat.S_IFCHR, 0, dir_fd=self._root)
        elif found.is_dir:
            os.setxattr(f"{self._path}/{path}", OPAQUE, b"y")


def _depth(path: str) -> int:
    return path.count("/") + 1 if path else 0


def _owner(number: int) -> int:
    """Ids beyond the range that every sandbox has would be nobody's there: say so on disk already."""
    return number if 0 <= number <= MAX_ID else NOBODY
