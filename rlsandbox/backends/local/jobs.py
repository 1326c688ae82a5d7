"""What the worker process does. Imports only the standard library and its own few modules."""

from __future__ import annotations

import ctypes
import errno
import fcntl
import hashlib
import json
import os
import shutil
import stat
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

from ...errors import ImageError, SandboxError
from . import archive, base, fitting, manifest
from .layers import Unpacker
from .trees import remove_tree
from .view import OPAQUE

CLONE_NEWUSER = 0x10000000
_NO_PLACE = (errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EACCES)
_DOING = {
    "image": "unpacking the image", "remove": "removing files", "host": "making the host's base",
    "fit": "fitting the image",
}  # fmt: skip
UNPACKING = 2
"""One more whenever another tree comes out of the same layers: what older code unpacked is left alone."""
MAX_LOWERS = 16  # of one image: every lookup that misses asks each of them


def main() -> None:
    """One request on stdin, one answer on stdout; ends when the parent is gone."""
    request = json.loads(_line())
    if request["namespace"]:
        _enter_namespace()
    threading.Thread(target=_watch, daemon=True).start()
    os.umask(0o022)
    try:
        answer: dict[str, Any] = {"result": JOBS[request["job"]](**request["arguments"])}
    except SandboxError as error:
        kind = "image" if isinstance(error, ImageError) else "provision"
        answer = {"error": kind, "message": error.message, "kind": error.kind, "hint": error.hint}
    except OSError as error:
        where = error.filename or request["arguments"].get("cache", "")
        answer = {"error": "provision", "kind": "", "hint": ""}
        if error.errno in _NO_PLACE:  # trying again at once cannot help
            answer["hint"] = "free some space there, or set RLSANDBOX_CACHE to a directory with room"
            answer |= {"kind": "no_room", "retryable": False}
        answer["message"] = f"{_DOING[request['job']]} failed at {where}: {error.strerror or error}"
    sys.stdout.write(json.dumps(answer))
    sys.stdout.flush()
    os._exit(0)  # the watching thread sits in a read


def _line() -> bytes:
    """A line of stdin and not a byte more: what follows is the watching thread's."""
    line = b""
    while not line.endswith(b"\n"):
        byte = os.read(0, 1)
        if not byte:
            os._exit(1)
        line += byte
    return line


def _enter_namespace() -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.unshare(CLONE_NEWUSER) != 0:
        raise OSError(ctypes.get_errno(), "unshare(CLONE_NEWUSER) failed")
    print("map", flush=True)
    if _line() != b"go\n":
        sys.exit(1)
    os.setgroups([])
    os.setresgid(0, 0, 0)
    os.setresuid(0, 0, 0)


def _watch() -> None:
    while os.read(0, 1 << 10):
        pass
    os._exit(1)  # the parent is gone, or has given the job up


@contextmanager
def locked(path: Path) -> Iterator[None]:
    """An exclusive lock between processes; the file stays."""
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    with open(path, "w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


@contextmanager
def scratch(cache: Path) -> Iterator[Path]:
    """A private directory that is removed at the end; those of killed workers are removed now."""
    top = cache / "tmp"
    top.mkdir(mode=0o700, parents=True, exist_ok=True)
    for left in top.glob("*.lock"):
        with open(left) as lock:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                continue
            remove(str(left.with_suffix("")))
            left.unlink(missing_ok=True)
    place = top / f"{os.getpid()}-{os.urandom(4).hex()}"
    with open(place.with_suffix(".new"), "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        os.rename(place.with_suffix(".new"), place.with_suffix(".lock"))  # nobody sees it unlocked
        place.mkdir(mode=0o700)
        try:
            yield place
        finally:
            remove(str(place))
            place.with_suffix(".lock").unlink(missing_ok=True)


def image(*, path: str, ref: str | None, machine: str, cache: str, key: str, owners: bool) -> dict[str, Any]:
    """Unpack what is missing of an image; its config and its lower directories, topmost first.

    All that was missing appears at once, after it has reached the disk, or none of it does.
    """
    top = Path(cache)
    with scratch(top) as place, archive.open_store(Path(path), place) as store, ExitStack() as locks:
        info = manifest.read_info(store, path, ref, machine)
        form = "overlay" if _overlay_marks(place) else "apply"
        home = top / "layers" / f"{key}-{form}-{UNPACKING}"
        chains = manifest.chain_ids(info.layers)
        lowers: list[str] = []
        made: list[tuple[Path, Path]] = []
        for first, last in _steps(len(chains), form):
            name = chains[last - 1] if last - first == 1 else f"{chains[last - 1]}-flat"
            # From the bottom to the top in every process, so that two of them cannot wait for each other.
            locks.enter_context(locked(top / "locks" / f"{key}-{form}-{name}"))
            entry = home / name
            if not entry.is_dir():
                made.append((place / name, entry))
                entry = place / name
                entry.mkdir(mode=0o700)
                (entry / "root").mkdir(mode=0o755)
                for layer in info.layers[first:last]:
                    _unpack(store, layer, entry / "root", place, path, lowers, owners, last - first > 1)
            if next(os.scandir(entry / "root"), None) is not None:
                lowers.insert(0, str(entry / "root"))
        _finish(made, home)
        moved = {str(fill / "root"): str(done / "root") for fill, done in made}
        lowers = [moved.get(lower, lower) for lower in lowers]
        if not lowers:  # an image of nothing is an image
            empty = home / "empty" / "root"
            empty.mkdir(mode=0o755, parents=True, exist_ok=True)
            lowers = [str(empty)]
    config = info.config.get("config")
    return {
        "config": config if isinstance(config, dict) else {},
        "lowers": lowers,
        "digest": chains[-1] if chains else "",
    }


def _steps(count: int, form: str) -> list[tuple[int, int]]:
    """Which layers share a directory: the bottom ones of too many, all of them where marks do not work."""
    if not count:
        return []
    together = count if form == "apply" else max(1, count - MAX_LOWERS + 1)
    return [(0, together), *((n, n + 1) for n in range(together, count))]


def _unpack(
    store: archive.Store,
    layer: archive.LayerBlob,
    root: Path,
    place: Path,
    shown: str,
    lowers: list[str],
    owners: bool,
    together: bool,
) -> None:
    tar = place / "layer.tar"
    archive.fetch_layer(store, layer, tar, shown)
    what = f"{shown}: layer {layer.name}"
    form = "apply" if together else "overlay"
    with Unpacker(root, form=form, lowers=[] if together else lowers, owners=owners, shown=what) as unpacker:
        unpacker.unpack(tar)
    tar.unlink()


def _finish(made: list[tuple[Path, Path]], home: Path) -> None:
    """Move whole entries to their names, after their content is on the disk."""
    if not made:
        return
    home.mkdir(mode=0o700, parents=True, exist_ok=True)
    fd = os.open(made[0][0], os.O_RDONLY)
    try:
        ctypes.CDLL(None).syncfs(fd)  # a name that outlives a power cut must not outlive its content
    finally:
        os.close(fd)
    for fill, done in made:
        os.rename(fill, done)


def _overlay_marks(place: Path) -> bool:
    """Whether whiteouts and opaque directories can be made here, by making them."""
    sample = place / "mark"
    sample.mkdir()
    try:
        os.setxattr(sample, OPAQUE, b"y")
        os.mknod(sample / "whiteout", stat.S_IFCHR, 0)
    except OSError:
        return False
    finally:
        shutil.rmtree(sample)
    return True


def remove(path: str) -> None:
    """Remove the tree *path*, whatever the modes of its directories. What is gone is no error."""
    if not os.path.isdir(path) or os.path.islink(path):
        Path(path).unlink(missing_ok=True)
        return
    remove_tree(path)


def host(*, cache: str, key: str, owners: bool, network: str) -> dict[str, Any]:
    """The host's base for *network*, made when it is not there yet or this machine's /etc has changed."""
    items, overlays = base.plan(network)
    digest = base.digest(items, overlays)
    root = _made(Path(cache), "base", key, digest, lambda place: base.make(items, place, owners))
    return {"lowers": [root], "overlays": overlays, "digest": digest}


def fit(
    *,
    cache: str,
    key: str,
    owners: bool,
    lowers: list[str],
    points: list[list[str]],
    network: str,
    whole: bool,
    workdir: str = "",
) -> dict[str, Any]:
    """A top layer with the mount *points* [path, kind] for *lowers*; *whole*: and what any root needs."""
    shown = [(path, kind) for path, kind in points]
    items, targets = fitting.plan(lowers, shown, network, whole=whole, workdir=workdir)
    if not items:
        return {"lowers": lowers, "targets": targets}
    digest = hashlib.sha256(repr((fitting.VERSION, items)).encode()).hexdigest()[:32]
    root = _made(Path(cache), "fit", key, digest, lambda place: base.make(items, place, owners))
    return {"lowers": [root, *lowers], "targets": targets}


def _made(top: Path, kind: str, key: str, digest: str, fill: Callable[[Path], None]) -> str:
    """The directory ``root`` of the cache entry for *digest*, filled once.

    Entries are made anew after the machine's restart: cheaper than to wait for the disk.
    """
    boot = hashlib.sha256(Path("/proc/sys/kernel/random/boot_id").read_bytes()).hexdigest()[:8]
    done = top / kind / f"{key}-{boot}" / digest
    with locked(top / "locks" / f"{kind}-{key}-{digest}"):
        if not done.is_dir():
            with scratch(top) as place:
                root = place / "entry" / "root"
                root.mkdir(mode=0o755, parents=True)
                fill(root)
                done.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
                os.rename(place / "entry", done)
    return str(done / "root")


JOBS: dict[str, Callable[..., Any]] = {"image": image, "remove": remove, "host": host, "fit": fit}
