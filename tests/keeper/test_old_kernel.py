"""What the keeper does without openat2, compared with openat2, call by call; and without pidfds."""

from __future__ import annotations

import itertools
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from rawclient import SRC

PROGRAM = r"""
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>

#include "sys.h"

static void tell(int fd)
{
    struct stat st;
    char text[16] = "";
    if (fd < 0)
        printf("%s\n", strerrorname_np(errno));
    else if (fstat(fd, &st) == 0) {
        if (S_ISREG(st.st_mode) && !(fcntl(fd, F_GETFL) & O_PATH) && read(fd, text, sizeof text - 1) < 0)
            text[0] = 0;
        printf("%lu:%lu %s%s\n", (unsigned long)st.st_dev, (unsigned long)st.st_ino, fcntl(fd, F_GETFL) & O_PATH ? "path" : "open", text);
    }
    if (fd >= 0)
        close(fd);
}

int main(int argc, char **argv)
{
    int root = open(argv[1], O_PATH | O_DIRECTORY);
    uint64_t flags = strtoull(argv[2], NULL, 0), resolve = strtoull(argv[3], NULL, 0);
    for (int i = 4; i < argc; i++) {
        tell(k_open_in(root, argv[i], flags, resolve));
        tell(old_open_in(root, argv[i], flags, resolve));
    }
    return fcntl(root + 1, F_GETFD) >= 0; /* nothing stays open */
}
"""

IN_ROOT, NO_SYMLINKS = 0x10, 0x04


def compiled(place: Path, text: str, *with_: str) -> Path:
    compiler = shutil.which("gcc")
    if compiler is None:
        pytest.skip("no gcc")
    source = place / "program.c"
    source.write_text(text)
    command = [compiler, "-fsanitize=address,undefined", "-D_GNU_SOURCE", f"-I{SRC}", "-O1", "-g", *with_]
    done = subprocess.run(
        [*command, "-o", place / "program", source, SRC / "oldsys.c", SRC / "util.c"], capture_output=True, text=True
    )
    if done.returncode != 0 and "sanitize" in done.stderr:
        pytest.skip("no sanitizers")
    assert done.returncode == 0, done.stderr
    return place / "program"


@pytest.fixture(scope="module")
def both(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return compiled(tmp_path_factory.mktemp("old"), PROGRAM)


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    root = tmp_path / "root"
    (root / "a/b/c").mkdir(parents=True)
    (root / "a/file").write_text("inside")
    (root / "file").write_text("top")
    (tmp_path / "file").write_text("outside")
    (root / ("n" * 255)).write_text("long")
    for name, to in {
        "abs": "/a/file", "rel": "a/file", "up": "../file", "a/up2": "../../../file", "dir": "a/b", "a/b/back": "..",
        "loop": "loop2", "loop2": "loop", "none": "missing/x", "slash": "a/", "a/self": ".", "rootlink": "/",
        "chain": "dir/back/up2", "filedir": "file/", "a/b/c/far": "/dir/../../a/b/../file",
    }.items():  # fmt: skip
        (root / name).symlink_to(to)
    os.mkfifo(root / "fifo")
    return root


PATHS = [
    "/", ".", "..", "../..", "a", "a/", "a//b///c", "a/./b/../file", "/../../file", "file", "file/", "file/x", "missing", "missing/",
    "a/missing/..", "abs", "abs/", "rel", "up", "a/up2", "dir", "dir/", "dir/c", "dir/back/file", "a/b/back", "loop", "none", "slash",
    "slash/file", "a/self/self/file", "rootlink", "rootlink/rootlink/a", "chain", "filedir", "a/b/c/far", "a/b/c/../../../../../file",
    "n" * 255, "n" * 256, "a/" * 1500 + "x", "a/self/" + "self/" * 60, "/".join(["a/.."] * 500), "fifo", "x" * 5000,
]  # fmt: skip
FLAGS = [
    os.O_PATH, os.O_PATH | os.O_NOFOLLOW, os.O_PATH | os.O_DIRECTORY, os.O_RDONLY | os.O_NONBLOCK,
    os.O_RDONLY | os.O_DIRECTORY, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK,
]  # fmt: skip


@pytest.mark.parametrize(("flags", "resolve"), list(itertools.product(FLAGS, [IN_ROOT, IN_ROOT | NO_SYMLINKS])))
def test_a_path_leads_to_the_same(both: Path, tree: Path, flags: int, resolve: int) -> None:
    done = subprocess.run(
        [both, tree, str(flags), str(resolve), *PATHS], capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    assert len(lines) == 2 * len(PATHS)
    differ = [
        (path[:40], new, old)
        for path, new, old in zip(PATHS, lines[::2], lines[1::2], strict=True)
        if new != old
    ]
    assert differ == []
    assert "outside" not in done.stdout
    if flags == os.O_RDONLY | os.O_NONBLOCK:
        assert "inside" in done.stdout, "control: what is there is opened"


def test_renames_elsewhere_are_in_no_lookups_way(both: Path, tree: Path, tmp_path: Path) -> None:
    """The kernel refuses a `..` (EAGAIN) when anything at all is renamed or mounted meanwhile."""
    loop = "import os, sys\nos.chdir(sys.argv[1])\nopen('x', 'w').close()\nprint('up', flush=True)\n"
    loop += "while True: os.rename('x', 'y'); os.rename('y', 'x')"
    with subprocess.Popen([sys.executable, "-c", loop, tmp_path], stdout=subprocess.PIPE) as renaming:
        try:
            assert renaming.stdout is not None and renaming.stdout.readline()
            for _ in range(20):
                done = subprocess.run(
                    [both, tree, str(os.O_PATH), str(IN_ROOT), *["/".join(["a/.."] * 500)] * 20],
                    capture_output=True, text=True, timeout=60,
                )  # fmt: skip
                assert done.returncode == 0, done.stderr
                assert set(done.stdout.split()) == {done.stdout.split()[0], "path"}, done.stdout
        finally:
            renaming.kill()


SIGNALS = r"""
#include <poll.h>
#include <signal.h>
#include <stdio.h>
#include <sys/mount.h>
#include <sys/socket.h>
#include <sys/wait.h>

#include "pidfd.h"
#include "sys.h"

int main(int argc, char **argv)
{
    char path[200];
    int sv[2], status;
    pid_t pid = fork();
    if (pid == 0)
        for (;;)
            pause();
    if (socketpair(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0, sv) < 0 || mount("rls", argv[1], "proc", 0, NULL) < 0)
        return 3;
    path_join(path, sizeof path, "%s/%d", argv[1], (int)pid);
    int other = open(path, O_RDONLY | O_DIRECTORY | O_CLOEXEC), own = pidfd_of(pid);
    printf("%d ", pidfd_kill(other, SIGKILL) < 0 && errno == ESRCH); /* nobody to send it */
    pid_t init = fork();
    if (init == 0)
        _exit(pidfd_serve(sv[1]) == 0 ? 7 : 8);
    pidfd_via = sv[0];
    printf("%d ", pidfd_kill(other, SIGSTOP) == 0 && waitpid(pid, &status, WUNTRACED) == pid && WIFSTOPPED(status));
    printf("%d ", waitpid(init, &status, 0) == init && WEXITSTATUS(status) == 7); /* it was asked */
    struct pollfd asked = {sv[1], POLLIN, 0};
    printf("%d ", pidfd_kill(own, SIGKILL) == 0 && waitpid(pid, &status, 0) == pid && WIFSIGNALED(status) && WTERMSIG(status) == SIGKILL);
    printf("%d ", poll(&asked, 1, 0)); /* nobody was */
    printf("%d\n", pidfd_kill(own, SIGKILL) < 0 && errno == ESRCH);
    return 0;
}
"""


def test_a_signal_goes_to_the_namespace_that_the_number_is_of(tmp_path: Path) -> None:
    """A keeper's own helper beside an episode of its own /proc: else a number of one is taken for the other's."""
    if os.geteuid() != 0 or shutil.which("unshare") is None:
        pytest.skip("only root may mount another /proc")
    program = compiled(tmp_path, SIGNALS, "-DRLS_OLD_SYS", str(SRC / "pidfd.c"))
    (tmp_path / "proc").mkdir()
    within = ["unshare", "--mount", "--propagation", "private"]
    done = subprocess.run([*within, program, tmp_path / "proc"], capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stdout) == (0, "1 1 1 1 0 1\n"), done.stderr


LOG = r"""
#include <stdio.h>
#include "sys.h"

int main(int argc, char **argv)
{
    for (int i = 1; i < argc; i++)
        putchar('0' + gvisor_log(argv[i]));
}
"""


def test_whose_log_it_is(tmp_path: Path) -> None:
    """A pod that holds SYS_ADMIN starts under gVisor only; who is on the node can write its name into Linux's log."""
    program = compiled(tmp_path, LOG)
    logs = [
        "<6>[   0.000000] Starting gVisor...\n<6>[   0.316269] Waiting for children...\n",
        "<5>[    0.000000] Linux version 6.1.0\n<6>[   17.3] gVisor[371]: segfault at 0 ip 0 sp 0 error 4\n",
        "<6>[   17.300000] Starting gVisor[371]: segfault at 0 ip 0 sp 0 error 4\n",
        "<3>[   17.300000] tmpfs: Unknown parameter '<6>[   0.000000] Starting gVisor...\n'",
        "<6>[   17.000000] x 0.000000] Starting gVisor...\n",
        "",
    ]
    done = subprocess.run([program, *logs], capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stdout) == (0, "100000"), done.stderr
