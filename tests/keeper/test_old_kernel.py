"""What the keeper does without openat2, compared with openat2, call by call."""

from __future__ import annotations

import itertools
import os
import shutil
import subprocess
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
        struct k_open_how how = {flags | O_CLOEXEC, 0, resolve};
        tell((int)syscall(openat2_nr, root, argv[i], &how, sizeof how));
        tell(old_open_in(root, argv[i], flags, resolve));
    }
    return fcntl(root + 1, F_GETFD) >= 0; /* nothing stays open */
}
"""

IN_ROOT, NO_SYMLINKS = 0x10, 0x04


@pytest.fixture(scope="module")
def both(tmp_path_factory: pytest.TempPathFactory) -> Path:
    compiler = shutil.which("gcc")
    if compiler is None:
        pytest.skip("no gcc")
    place = tmp_path_factory.mktemp("old")
    source = place / "both.c"
    source.write_text(PROGRAM)
    command = [compiler, "-fsanitize=address,undefined", "-D_GNU_SOURCE", f"-I{SRC}", "-O1", "-g"]
    done = subprocess.run(
        [*command, "-o", place / "both", source, SRC / "oldsys.c", SRC / "util.c"], capture_output=True, text=True
    )
    if done.returncode != 0 and "sanitize" in done.stderr:
        pytest.skip("no sanitizers")
    assert done.returncode == 0, done.stderr
    return place / "both"


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
