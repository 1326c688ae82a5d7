"""Images made by hand: tar members in, an OCI layout or a ``docker save`` archive out.

No daemon, no registry, no tool: what a test feeds to the unpacker is exactly what it says here.
"""

from __future__ import annotations

import gzip
import hashlib
import io
import json
import os
import shutil
import stat
import subprocess
import tarfile
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

MTIME = 1_700_000_000
PASSWD = (
    "root:x:0:0:root:/root:/bin/sh\ndaemon:x:1:1:daemon:/usr/sbin:/bin/false\n"
    "agent:x:1000:1000:agent:/home/agent:/bin/sh\ntester:x:1001:1001:tester:/home/tester:/bin/sh\n"
    "nobody:x:65534:65534:nobody:/nonexistent:/bin/false\n"
)
GROUP = "root:x:0:\ndaemon:x:1:\nstaff:x:50:agent,tester\nagent:x:1000:\ntester:x:1001:\nnogroup:x:65534:\n"


@dataclass
class Entry:
    """One tar member. *kind* is f (file), d (directory), l (symlink), h (hard link), c, b or p (fifo)."""

    name: str
    data: bytes = b""
    kind: str = "f"
    mode: int | None = None
    uid: int = 0
    gid: int = 0
    link: str = ""
    mtime: int = MTIME
    device: tuple[int, int] = (0, 0)
    pax: Mapping[str, str] = field(default_factory=dict)


_TYPES = {
    "f": tarfile.REGTYPE,
    "d": tarfile.DIRTYPE,
    "l": tarfile.SYMTYPE,
    "h": tarfile.LNKTYPE,
    "c": tarfile.CHRTYPE,
    "b": tarfile.BLKTYPE,
    "p": tarfile.FIFOTYPE,
}


def f(name: str, data: bytes | str = b"", mode: int = 0o644, uid: int = 0, gid: int = 0) -> Entry:
    return Entry(name, data.encode() if isinstance(data, str) else data, mode=mode, uid=uid, gid=gid)


def d(name: str, mode: int = 0o755, uid: int = 0, gid: int = 0) -> Entry:
    return Entry(name, kind="d", mode=mode, uid=uid, gid=gid)


def link(name: str, target: str) -> Entry:
    return Entry(name, kind="l", link=target, mode=0o777)


def hard(name: str, target: str) -> Entry:
    return Entry(name, kind="h", link=target)


def layer(entries: Iterable[Entry]) -> bytes:
    """An uncompressed layer with exactly *entries*, in this order, hostile ones too."""
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w", format=tarfile.PAX_FORMAT) as tar:
        for entry in entries:
            info = tarfile.TarInfo(entry.name)
            info.type = _TYPES[entry.kind]
            info.mode = entry.mode if entry.mode is not None else (0o755 if entry.kind == "d" else 0o644)
            info.uid, info.gid, info.mtime = entry.uid, entry.gid, entry.mtime
            info.linkname = entry.link
            info.devmajor, info.devminor = entry.device
            info.pax_headers = dict(entry.pax)
            info.size = len(entry.data) if entry.kind == "f" else 0
            tar.addfile(info, io.BytesIO(entry.data) if entry.kind == "f" else None)
    return buffer.getvalue()


def sha256(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


def image_config(layers: Sequence[bytes], config: Mapping[str, Any] | None = None) -> bytes:
    """The image's config blob for uncompressed *layers*."""
    return image_config_of(["sha256:" + sha256(data) for data in layers], config)


def image_config_of(diff_ids: Sequence[str], config: Mapping[str, Any] | None = None) -> bytes:
    """The same, of layers that are known by digest."""
    machine = os.uname().machine
    return json.dumps(
        {
            "architecture": {"x86_64": "amd64", "aarch64": "arm64"}.get(machine, machine),
            "os": "linux",
            "config": dict(config or {"Env": ["PATH=/usr/local/bin:/usr/bin:/bin"], "Cmd": ["/bin/sh"]}),
            "rootfs": {"type": "layers", "diff_ids": list(diff_ids)},
        }
    ).encode()


def docker_archive(
    path: Path,
    layers: Sequence[bytes],
    config: Mapping[str, Any] | None = None,
    tag: str = "rlsandbox.test/t:1",
) -> Path:
    """Write *layers* as ``docker save`` does."""
    blob = image_config(layers, config)
    members = [(sha256(blob) + ".json", blob)]
    members += [(f"{sha256(data)}/layer.tar", data) for data in layers]
    manifest = [{"Config": members[0][0], "RepoTags": [tag], "Layers": [name for name, _ in members[1:]]}]
    members.append(("manifest.json", json.dumps(manifest).encode()))
    with tarfile.open(path, "w") as tar:
        for name, data in dict(members).items():
            info = tarfile.TarInfo(name)
            info.size = len(data)
            tar.addfile(info, io.BytesIO(data))
    return path


def oci_layout(
    path: Path,
    layers: Sequence[bytes],
    config: Mapping[str, Any] | None = None,
    tag: str = "latest",
    *,
    compress: bool = True,
) -> Path:
    """Write *layers* as an OCI layout directory, gzipped unless told otherwise."""
    blobs = path / "blobs" / "sha256"
    blobs.mkdir(parents=True, exist_ok=True)

    def blob(data: bytes, media: str) -> dict[str, Any]:
        (blobs / sha256(data)).write_bytes(data)
        return {"mediaType": media, "digest": "sha256:" + sha256(data), "size": len(data)}

    kind = "application/vnd.oci.image."
    packed = [gzip.compress(data, 1, mtime=0) if compress else data for data in layers]
    manifest = json.dumps(
        {
            "schemaVersion": 2,
            "mediaType": kind + "manifest.v1+json",
            "config": blob(image_config(layers, config), kind + "config.v1+json"),
            "layers": [blob(data, kind + "layer.v1.tar" + ("+gzip" if compress else "")) for data in packed],
        }
    ).encode()
    entry = blob(manifest, kind + "manifest.v1+json") | {
        "annotations": {"org.opencontainers.image.ref.name": tag}
    }
    (path / "index.json").write_text(json.dumps({"schemaVersion": 2, "manifests": [entry]}))
    (path / "oci-layout").write_text('{"imageLayoutVersion": "1.0.0"}')
    return path


def busybox() -> Path | None:
    """A statically linked busybox of this machine, or None (Debian: ``apt-get install busybox-static``)."""
    for place in ("/bin/busybox", "/usr/bin/busybox"):
        if os.path.exists(place) and subprocess.run(["ldd", place], capture_output=True).returncode != 0:
            return Path(place)
    return None


NO_BUSYBOX = "no static busybox here (Debian: apt-get install busybox-static)"


def busybox_layer() -> bytes:
    """A small root: ``/bin`` is a link to ``usr/bin``, users, a setuid file, sticky /tmp."""
    program = busybox()
    if program is None:
        raise RuntimeError(NO_BUSYBOX)
    names = subprocess.run([program, "--list"], capture_output=True, text=True, check=True).stdout.split()
    entries = [d(name) for name in ("usr", "usr/bin", "usr/sbin", "usr/lib", "etc", "var", "home", "opt")]
    entries += [d("root", 0o700), d("tmp", 0o1777), d("var/tmp", 0o1777), d("workspace")]
    entries += [d(name) for name in ("proc", "sys", "dev", "run", "mnt")]
    entries += [d("home/agent", 0o755, 1000, 1000), d("home/tester", 0o750, 1001, 1001)]
    entries += [link("bin", "usr/bin"), link("sbin", "usr/sbin"), link("lib", "usr/lib")]
    entries += [f("etc/passwd", PASSWD), f("etc/group", GROUP), f("etc/shadow", "root:*:::::::\n", 0o640)]
    entries += [f("etc/profile", "export PROFILE_READ=1\n"), f("etc/hosts", "127.0.0.1 localhost\n")]
    entries.append(f("usr/bin/busybox", program.read_bytes(), 0o755))
    entries += [link(f"usr/bin/{name}", "busybox") for name in names if name != "busybox"]
    entries.append(f("usr/bin/setuid-busybox", b"#!/bin/busybox sh\nid -u\n", 0o4755))
    entries.append(f("usr/bin/setgid-staff", b"#!/bin/busybox sh\nid -g\n", 0o2755, 0, 50))
    return layer(entries)


def many_files_layer(count: int = 5200) -> bytes:
    """*count* small files of several owners in nested directories, hard links and odd names among them."""
    entries = [d("opt/data", 0o755), d("opt/shared", 0o2775, 0, 50)]
    for n in range(count):
        if n % 100 == 0:
            entries.append(d(f"opt/data/{n // 100:03}", 0o755, n % 2 * 1000, n % 2 * 1000))
        entries.append(f(f"opt/data/{n // 100:03}/file-{n:05}", f"content {n}\n", 0o644, n % 2 * 1000, 50))
    entries.append(hard("opt/data/hard-link", "opt/data/000/file-00000"))
    entries.append(f("opt/data/name with spaces\nand a line end", "odd"))
    entries.append(f("opt/data/" + "long-" * 30 + "x", "a name over 100 bytes"))
    entries.append(f("opt/data/\u00fcn\u00ef-\u65e5\u672c", "not ASCII"))
    return layer(entries)


def program_layer(programs: Sequence[str], trees: Sequence[str] = ()) -> bytes:
    """Programs of this machine with the libraries they need, and whole directories, at their own places."""
    wanted: dict[str, None] = {}
    for program in programs:
        place = shutil.which(program, path="/usr/bin:/bin:/usr/local/bin")
        if place is None:
            raise RuntimeError(f"{program} is not installed")
        real = os.path.realpath(place)
        wanted |= dict.fromkeys((place, real))
        wanted |= dict.fromkeys(_libraries(real))
    for tree in trees:
        for top, _, names in os.walk(tree):
            wanted |= dict.fromkeys(os.path.join(top, name) for name in names if not name.endswith(".pyc"))
            for name in names:
                if name.endswith(".so"):
                    wanted |= dict.fromkeys(_libraries(os.path.join(top, name)))
    entries: dict[str, Entry] = {}
    for path in wanted:
        # In the image /bin and /lib are links into /usr, as they are on any merged-usr system.
        inside = path.lstrip("/")
        if not inside.startswith("usr/"):
            inside = "usr/" + inside
        for parent in list(Path(inside).parents)[-2::-1]:
            entries.setdefault(str(parent), d(str(parent)))
        status = os.lstat(path)
        if stat.S_ISLNK(status.st_mode):
            entries[inside] = link(inside, os.readlink(path))
        elif stat.S_ISREG(status.st_mode):
            entries[inside] = f(inside, Path(path).read_bytes(), stat.S_IMODE(status.st_mode))
    if any(name.startswith("usr/lib64") for name in entries):
        entries["lib64"] = link("lib64", "usr/lib64")
    return layer(entries.values())


def _libraries(program: str) -> list[str]:
    out = subprocess.run(["ldd", program], capture_output=True, text=True).stdout
    found: list[str] = []
    for line in out.splitlines():
        words = line.split()
        path = words[2] if len(words) > 2 and words[1] == "=>" else words[0] if words else ""
        if path.startswith("/"):
            found += [path, os.path.realpath(path)]
    return found


def tools_layers() -> list[bytes]:
    """busybox's root and over it git, bash and (where this machine has them under /usr) python3 with its library."""
    programs = [name for name in ("git", "bash") if shutil.which(name, path="/usr/bin:/bin")]
    trees = ["/usr/lib/git-core"] if "git" in programs else []
    python = shutil.which("python3", path="/usr/bin")
    if python is not None:
        programs.append("python3")
        trees.append("/usr/lib/" + os.path.basename(os.path.realpath(python)))
    layers = [busybox_layer()]
    if programs:
        layers.append(program_layer(programs, [tree for tree in trees if os.path.isdir(tree)]))
    return layers


def changes_layer() -> bytes:
    """What a later layer does to an earlier one: a deletion, an emptied directory, a replaced file."""
    return layer(
        [
            f("opt/data/.wh.001", b""),
            d("opt/data/002"),
            f("opt/data/002/.wh..wh..opq", b""),
            f("opt/data/002/only", "this is all\n"),
            f("opt/data/003/file-00300", "replaced\n", 0o600, 1000, 1000),
        ]
    )


def agents_layer() -> bytes:
    """What an ordinary user cannot make: a place for their repository, and git's own settings."""
    settings = "[safe]\n\tdirectory = *\n[init]\n\tdefaultBranch = main\n"
    return layer(
        [d("work", 0o755, 1000, 1000), d("work/repo", 0o755, 1000, 1000), f("etc/gitconfig", settings)]
    )


def residue_image(path: Path, *, count: int = 5200, tag: str = "latest") -> Path:
    """The image of the residue suite, as an OCI layout in the new directory *path*.

    busybox's tools, git, bash and (where this machine has them under /usr) python3 with its library; users
    root, agent (1000), tester (1001); setuid and setgid files; /bin, /sbin, /lib are links; over 5,000 files.
    """
    busybox_root, *tools = tools_layers()
    layers = [busybox_root, *tools, many_files_layer(count), changes_layer(), agents_layer()]
    config = {"Env": ["PATH=/usr/bin:/usr/sbin", "IMAGE=residue"], "WorkingDir": "/workspace"}
    return oci_layout(path, layers, config, tag)
