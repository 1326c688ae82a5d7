"""The host's base: what of this machine an episode sees when no image is named, by an allow-list.

``/usr`` (with ``/bin``, ``/sbin``, ``/lib*`` as they are) and the package manager's own records are lower
directories of overlays, so programs and packages are the machine's own. Everything else is a small directory
made here: an ``/etc`` of chosen, world-readable files, accounts of the system only and without passwords, an
empty ``/home``, ``/root``, ``/tmp``, ``/var``, ``/workspace``. Runs in the worker process.
"""

from __future__ import annotations

import hashlib
import os
import re
import stat
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

VERSION = 1
USER = ("user", 1000)
MAX_FILE = 8 << 20

# Of /etc: files, directories (whole), patterns. What is not readable by everybody is never copied.
ETC = (
    *(
        "ssl/certs",
        "ssl/openssl.cnf",
        "pki/tls/certs",
        "pki/ca-trust",
        "ca-certificates",
        "ca-certificates.conf",
    ),
    *("ld.so.cache", "ld.so.conf", "ld.so.conf.d", "alternatives", "localtime", "timezone", "locale.*"),
    *("default/locale", "default/useradd", "login.defs", "adduser.conf", "deluser.conf", "shells", "skel"),
    *("pam.d", "pam.conf", "security/*.conf", "profile", "profile.d", "bash.bashrc", "bashrc", "inputrc"),
    *(
        "protocols",
        "services",
        "rpc",
        "networks",
        "host.conf",
        "gai.conf",
        "ethertypes",
        "mime.types",
        "magic*",
    ),
    *("debian_version", "os-release", "*-release", "issue", "terminfo", "debconf.conf"),
    *(
        "dpkg",
        "apt",
        "rpm",
        "yum.repos.d",
        "apk",
        "pacman.conf",
        "python*",
        "perl",
        "java*",
        ".java",
        "maven",
    ),
    *("emacs", "vim", "nanorc", "fonts", "X11/rgb.txt", "X11/xkb", "groff", "manpath.config", "gdb"),
    *("bash_completion.d", "bindresvport.blacklist", "mke2fs.conf", "gss", "gprofng.rc"),
)
# Credentials that people write into world-readable files: none of these names, no file with a password in a
# URL, and in the directories that sites fill themselves none that seems to set one.
_NEVER = re.compile(r"^auth\.conf|credential|secret|\.key$|token|netrc", re.IGNORECASE)
_URL_PASSWORD = re.compile(rb"://[^/\s:@]+:[^/\s@]+@")
_SETS_ONE = re.compile(rb"(?i)(password|passwd|secret|token|api[_-]?key)[\w-]*\s*[=:>]\s*[\"']?[\w$]")
_BY_SITES = ("apt", "yum.repos.d", "profile.d", "maven", "profile", "bash.bashrc", "bashrc", "skel")

PACKAGES = ("/var/lib/dpkg", "/var/lib/rpm", "/var/lib/pacman")

NSSWITCH = "passwd: files\ngroup: files\nshadow: files\nhosts: files dns\nservices: files\nprotocols: files\n"
HOSTS = "127.0.0.1\tlocalhost\n::1\tlocalhost ip6-localhost ip6-loopback\n"

_DIRECTORIES = {
    **dict.fromkeys(("usr", "etc", "home", "proc", "sys", "dev", "run", "mnt", "media", "srv", "opt"), 0o755),
    **dict.fromkeys(
        ("var", "var/cache", "var/lib", "var/log", "var/spool", "var/mail", "var/backups"), 0o755
    ),
    **dict.fromkeys(("tmp", "var/tmp", "run/lock"), 0o1777),
    "root": 0o700,
    "workspace": 0o777,  # any user's commands work here
}


@dataclass(frozen=True)
class Item:
    """One thing of the base: a directory, a link, made content, or a copy of a file of this machine."""

    path: str
    kind: str  # d l f c
    mode: int = 0o644
    owner: int = 0
    group: int = 0
    content: str = ""  # f: the text, l: the target, c: the file it is copied from


def plan(network: str, root: str = "/") -> tuple[list[Item], list[tuple[str, str]]]:
    """What the base is made of, and its overlays as (target, lower). *root* is this machine's (tests)."""
    items = [Item(path, "d", mode) for path, mode in _DIRECTORIES.items()]
    items += [Item("var/run", "l", content="/run"), Item("var/lock", "l", content="/run/lock")]
    overlays = [("/usr", os.path.join(root, "usr"))]
    for name in sorted(os.listdir(root)):
        if not re.fullmatch(r"s?bin|lib\w*", name):
            continue
        place = os.path.join(root, name)
        if os.path.islink(place):
            items.append(Item(name, "l", content=os.readlink(place)))
        elif os.path.isdir(place):
            items.append(Item(name, "d", 0o755))
            overlays.append(("/" + name, place))
    for path in PACKAGES:
        place = os.path.join(root, path.lstrip("/"))
        if os.path.isdir(place) and os.access(place, os.R_OK | os.X_OK):
            items.append(Item(path.lstrip("/"), "d", 0o755))
            overlays.append((path, place))
    items += _etc(os.path.join(root, "etc"))
    items += _accounts(os.path.join(root, "etc"))
    items += _homes(os.path.join(root, "etc/skel"))
    items += [Item("etc/nsswitch.conf", "f", content=NSSWITCH), Item("etc/fstab", "f")]
    items += names(network, root)
    items.append(Item("etc/mtab", "l", content="/proc/self/mounts"))
    return items, overlays


def names(network: str, root: str = "/") -> list[Item]:
    """hosts, hostname and resolv.conf: with the host's network the host's own, else the loopback's only."""
    hosts, resolv = HOSTS, ""
    if network == "host":
        hosts = _text(os.path.join(root, "etc/hosts")) or HOSTS
        resolv = _text(os.path.join(root, "etc/resolv.conf"))
    made = (("hosts", hosts), ("resolv.conf", resolv), ("hostname", "sandbox\n"))
    return [Item(f"etc/{name}", "f", content=text) for name, text in made]


def digest(items: list[Item], overlays: list[tuple[str, str]]) -> str:
    """Equal exactly for bases with the same content (copied files: by size, time and inode)."""
    state = hashlib.sha256(f"{VERSION}{overlays!r}".encode())
    for item in items:
        state.update(repr(item).encode())
        if item.kind == "c":
            status = os.stat(item.content)
            state.update(repr((status.st_size, status.st_mtime_ns, status.st_ino)).encode())
    return state.hexdigest()[:32]


def make(items: list[Item], root: Path, owners: bool) -> None:
    """Make *items* in the existing directory *root*."""
    made: set[str] = {""}
    for item in sorted(items, key=lambda item: item.path.split("/")):
        path = root / item.path
        for parent in [str(parent) for parent in Path(item.path).parents][-2::-1]:
            if parent not in made:
                (root / parent).mkdir(mode=0o755, exist_ok=True)
                made.add(parent)
        if item.kind == "d":
            path.mkdir(mode=0o755, exist_ok=True)
            made.add(item.path)
        elif item.kind == "l":
            path.symlink_to(item.content)
        else:
            data = Path(item.content).read_bytes() if item.kind == "c" else item.content.encode()
            path.write_bytes(data)
    for item in items:
        path = root / item.path
        if owners and (item.owner or item.group):
            os.chown(path, item.owner, item.group, follow_symlinks=False)
        if item.kind != "l":
            path.chmod(item.mode)


def _etc(etc: str) -> Iterator[Item]:
    found: set[str] = set()
    for pattern in ETC:
        for path in Path(etc).glob(pattern):
            for item in _tree(etc, path):
                if item.path not in found:
                    found.add(item.path)
                    yield item


def _tree(etc: str, path: Path) -> Iterator[Item]:
    inside = "etc/" + str(path.relative_to(etc))
    try:
        status = path.lstat()
        if stat.S_ISLNK(status.st_mode):
            target = os.readlink(path)
            yield Item(inside, "l", content=target)
        elif stat.S_ISDIR(status.st_mode):
            if status.st_mode & 0o005 == 0o005:
                yield Item(inside, "d", 0o755)
                for name in sorted(os.listdir(path)):
                    yield from _tree(etc, path / name)
        elif _public(path, status, by_site=path.relative_to(etc).parts[0] in _BY_SITES):
            yield Item(inside, "c", status.st_mode & 0o755, content=str(path))
    except FileNotFoundError:
        return  # removed while we looked


def _public(path: Path, status: os.stat_result, *, by_site: bool) -> bool:
    if not stat.S_ISREG(status.st_mode) or not status.st_mode & 0o004 or status.st_size > MAX_FILE:
        return False
    if _NEVER.search(path.name) or "auth.conf.d" in path.parts:
        return False
    data = path.read_bytes()
    return not _URL_PASSWORD.search(data) and not (by_site and _SETS_ONE.search(data))


def _accounts(etc: str) -> list[Item]:
    """passwd, group, shadow: the system's own accounts, all locked, and one ordinary user."""
    users: dict[str, list[str]] = {}
    for fields in _lines(os.path.join(etc, "passwd"), 7):
        if int(fields[2]) < 1000 or int(fields[2]) == 65534:
            users.setdefault(fields[0], [fields[0], "x", *fields[2:]])
    users.setdefault("root", ["root", "x", "0", "0", "root", "/root", "/bin/sh"])
    users["nobody"] = users.get("nobody") or [
        "nobody",
        "x",
        "65534",
        "65534",
        "",
        "/nonexistent",
        "/bin/false",
    ]
    name, uid = USER
    shell = "/bin/bash" if os.path.exists("/bin/bash") else "/bin/sh"
    users[name] = [name, "x", str(uid), str(uid), "", f"/home/{name}", shell]
    groups: dict[str, list[str]] = {}
    for fields in _lines(os.path.join(etc, "group"), 4):
        if int(fields[2]) < 1000 or int(fields[2]) == 65534:
            members = ",".join(member for member in fields[3].split(",") if member in users)
            groups.setdefault(fields[0], [fields[0], "x", fields[2], members])
    groups.setdefault("root", ["root", "x", "0", ""])
    groups[name] = [name, "x", str(uid), ""]
    shadow_group = int(groups["shadow"][2]) if "shadow" in groups else 0
    locked = "".join(f"{user}:*:19000:0:99999:7:::\n" for user in users)
    gshadow = "".join(f"{group}:*::{fields[3]}\n" for group, fields in groups.items())
    return [
        Item("etc/passwd", "f", content="".join(":".join(fields) + "\n" for fields in users.values())),
        Item("etc/group", "f", content="".join(":".join(fields) + "\n" for fields in groups.values())),
        Item("etc/shadow", "f", 0o640, 0, shadow_group, locked),
        Item("etc/gshadow", "f", 0o640, 0, shadow_group, gshadow),
    ]


def _lines(path: str, count: int) -> Iterator[list[str]]:
    for line in _text(path).splitlines():
        fields = line.split(":")
        if len(fields) == count and fields[0] and fields[2].isdigit():
            yield fields


def _homes(skel: str) -> Iterator[Item]:
    name, uid = USER
    yield Item(f"home/{name}", "d", 0o755, uid, uid)
    for file in sorted(Path(skel).glob("*") if os.path.isdir(skel) else []):
        status = file.lstat()
        if _public(file, status, by_site=True):
            yield Item(f"root/{file.name}", "c", 0o644, content=str(file))
            yield Item(f"home/{name}/{file.name}", "c", 0o644, uid, uid, str(file))


def _text(path: str) -> str:
    try:
        return Path(path).read_text(errors="replace")
    except OSError:
        return ""
