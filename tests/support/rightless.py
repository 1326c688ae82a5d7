"""A container in which the keeper may isolate nothing: root with six capabilities, over a directory as its root. Needs root."""

from __future__ import annotations

import asyncio
import atexit
import contextlib
import functools
import io
import os
import shutil
import subprocess
import sys
import tarfile
import tempfile
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path

from rlsandbox.keeper.build import keeper_binary
from tests.support.container import Container, listening
from tests.support.make_image import d, f, layer, link, many_files_layer, tools_layers

ENTER = """
import ctypes, fcntl, os, socket, struct, sys
fcntl.ioctl(socket.socket(), 0x8914, struct.pack("16sh14x", b"lo", 1))
root, uid = sys.argv[1], int(sys.argv[2])
keep = set() if uid else {0, 1, 3, 5, 6, 7}  # CHOWN DAC_OVERRIDE FOWNER KILL SETGID SETUID
libc = ctypes.CDLL(None, use_errno=True)
def mount(what, at, kind, flags=0, data=None):
    if libc.mount(what.encode(), (root + at).encode(), kind.encode(), flags, data and data.encode()):
        raise OSError(ctypes.get_errno(), at)
if len(root.split(":")) == 4:  # lower, upper, work and where to: a root as container runtimes make it
    *dirs, root = root.split(":")
    mount("root", "", "overlay", 0, "lowerdir=%s,upperdir=%s,workdir=%s" % tuple(dirs))
mount("proc", "/proc", "proc")
mount("shm", "/dev/shm", "tmpfs", 6, "mode=1777")
mount("devpts", "/dev/pts", "devpts", 10, "newinstance,ptmxmode=0666,mode=620,gid=5")
mount("mqueue", "/dev/mqueue", "mqueue", 6)
mount("run", "/.rlsandbox-run", "tmpfs", 6, "mode=0777")
os.chroot(root)
os.chdir("/")
libc.prctl(38, 1, 0, 0, 0)
for cap in range(64):
    if cap not in keep:
        libc.prctl(24, cap, 0, 0, 0)
os.closerange(3, 1000)
if uid:
    os.setgroups([])
    os.setresgid(uid, uid, uid)
    os.setresuid(uid, uid, uid)
os.execve("/.rlsandbox/keeper", ["/.rlsandbox/keeper", "init", *sys.argv[3:]], {"PATH": "/usr/bin:/usr/sbin"})
"""
# Of the conformance suite, what a container of nobody cannot have.
NOT_IN_REPLACE = {
    "reset_": "its episode is its only one",
    "pause": "pausing is watched from outside, which there is not",
    "files_without_permission": "commands are nobody already",
}
UNSHARE = ["unshare", "--mount", "--pid", "--ipc", "--net", "--uts", "--fork", "--kill-child"]


def image_root(root: Path, extra: Sequence[bytes] = (), *, count: int = 5200) -> Path:
    """The residue image, unpacked, with what a pod has besides."""
    pod = [
        d("dev/shm", 0o1777), d("dev/mqueue", 0o1777), d("dev/pts"), link("dev/ptmx", "pts/ptmx"), d("proc"), d("tmp", 0o1777), d("var/tmp", 0o1777),
        d("home/agent", 0o750, 1000, 1000), d("work", 0o755, 1000, 1000), d("work/repo", 0o755, 1000, 1000),
        d(".rlsandbox"), d(".rlsandbox-run"), d("root", 0o700),
    ]  # fmt: skip
    root.mkdir(mode=0o755)
    for data in (*tools_layers(), many_files_layer(count), layer(pod), *extra):
        with tarfile.open(fileobj=io.BytesIO(data)) as tar:
            tar.extractall(root, numeric_owner=True, filter="fully_trusted")
    root.chmod(0o755)
    for name, device in (
        ("null", (1, 3)),
        ("zero", (1, 5)),
        ("urandom", (1, 9)),
        ("random", (1, 8)),
        ("full", (1, 7)),
    ):
        with contextlib.suppress(FileExistsError):
            os.mknod(root / "dev" / name, 0o20666, os.makedev(*device))
        (root / "dev" / name).chmod(0o666)
    sanitized = os.environ.get("RLS_TEST_KEEPER") == "keeper-asan"
    keeper = keeper_binary(variant="asan" if sanitized else "release")
    shutil.copy(keeper, root / ".rlsandbox/keeper")
    if sanitized:  # that one is not static, as a rule
        for word in subprocess.run(["ldd", str(keeper)], capture_output=True, text=True).stdout.split():
            if word.startswith("/") and not (root / word[1:]).exists():
                (root / word[1:]).parent.mkdir(parents=True, exist_ok=True)
                shutil.copy(word, root / word[1:])
    return root


class Rightless(Container):
    def __init__(self, process: subprocess.Popen[bytes], root: Path, uid: int) -> None:
        self.uid = uid
        super().__init__(process, root, Path("/.rlsandbox/keeper"))
        self.run = Path("/.rlsandbox-run")

    def connect(self) -> list[str]:
        return [
            "nsenter",
            "-t",
            str(self.pid),
            "-m",
            "-p",
            "-r",
            "-S",
            str(self.uid),
            "-G",
            str(self.uid),
            "/.rlsandbox/keeper",
            "connect",
        ]


@asynccontextmanager
async def rightless(
    root: Path, *options: str, user: str | None = "1000", over: Sequence[Path] = (), uid: int = 0
) -> AsyncIterator[Rightless]:
    """*over*: an overlay's lower, upper and work directories; else *root* is the root itself, and stays as it was left. *uid*:
    the keeper's; none but root has any capability."""
    log = open(f"{root}.log", "wb+")
    if user is not None:
        options = ("--mode", "manifest", "--user", user, *options)
    words = [*UNSHARE, sys.executable, "-c", ENTER, ":".join(map(str, (*over, root))), str(uid), *options]
    process = subprocess.Popen(words, cwd="/", stdin=subprocess.DEVNULL, stdout=log, stderr=log)
    try:
        made = Rightless(process, root, uid)
        async with listening(made, "root/.rlsandbox-run/s/keeper", Path(f"{root}.log"), within_s=30):
            yield made
    finally:
        log.close()


@functools.cache
def _image() -> Path:
    """One for all of a process."""
    top = Path(tempfile.mkdtemp(prefix="rls-container-", dir="/var/tmp"))
    atexit.register(shutil.rmtree, top)
    top.chmod(0o755)
    more = [f("etc/gitconfig", "[safe]\n\tdirectory = *\n"), d("home/u", 0o755, 1000, 1000)]
    return image_root(top / "root", [layer(more)], count=100)


@asynccontextmanager
async def pod_of_its_own(*options: str, uid: int = 0) -> AsyncIterator[Rightless]:
    """For keepers whose options a backend has made."""
    lower = await asyncio.to_thread(_image)
    place = Path(tempfile.mkdtemp(prefix="rls-container-", dir="/var/tmp"))
    try:
        place.chmod(0o755)
        over = [place / "upper", place / "work"]
        for directory in (*over, place / "root"):
            directory.mkdir()
            directory.chmod(0o755)
        async with rightless(place / "root", *options, user=None, over=[lower, *over], uid=uid) as made:
            yield made
    finally:
        await asyncio.to_thread(shutil.rmtree, place)
