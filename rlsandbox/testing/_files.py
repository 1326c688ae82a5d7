"""Conformance: files in and out."""

from __future__ import annotations

import errno
import os
import stat
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from .. import errors
from ..sandbox import Sandbox
from ..spec import Spec
from ..task import Task
from ._fixtures import Fixtures, inner

GIB = 1 << 30


class Files(Fixtures):
    def test_files_write_and_read(self, sandbox: Sandbox) -> None:
        for data in (b"", b"\0\xff\n", b"x" * 5_000_000, os.urandom(100_000)):
            sandbox.write_file("/tmp/f", data)
            assert sandbox.read_file("/tmp/f") == data
        sandbox.write_file("/tmp/f", "né")
        assert sandbox.read_text("/tmp/f") == "né"
        assert sandbox.run("cat /tmp/f").stdout == "né"
        sandbox.write_file("/tmp/f", b"\xff")
        assert sandbox.read_text("/tmp/f") == "�"

    def test_files_parents_and_modes(self, sandbox: Sandbox) -> None:
        sandbox.write_file("/tmp/a/b/c", "x", mode=0o750)
        assert sandbox.run("stat -c '%a %U' /tmp/a/b/c").stdout.split()[0] == "750"
        sandbox.write_file("/tmp/a/b/c", "yy")  # what is there keeps its mode
        assert sandbox.run("stat -c %a /tmp/a/b/c; cat /tmp/a/b/c").stdout == "750\nyy"
        sandbox.write_file("/tmp/plain", "x")
        assert sandbox.run("stat -c %a /tmp/plain").stdout == "644\n"

    def test_files_relative_to_the_workdir(self, make: Callable[..., Sandbox]) -> None:
        sandbox = make(Task(id="w", workdir="/tmp/work", files={"in.txt": "hello"}))
        assert sandbox.read_text("in.txt") == "hello"
        sandbox.write_file("out/put.txt", "x")
        assert sandbox.run("pwd; cat in.txt out/put.txt").stdout == "/tmp/work\nhellox"
        assert sandbox.run("pwd", cwd="out").stdout == "/tmp/work/out\n"
        assert [i.name for i in sandbox.list_dir()] == ["in.txt", "out"]

    def test_files_through_links(self, sandbox: Sandbox) -> None:
        sandbox.run("cd /tmp; echo x >real; ln -s real link; mkdir d; ln -s d dl")
        assert sandbox.read_text("/tmp/link") == "x\n"
        sandbox.write_file("/tmp/dl/f", "y")
        assert sandbox.read_text("/tmp/d/f") == "y"

    def test_files_errors_are_builtin_ones_too(self, sandbox: Sandbox) -> None:
        sandbox.run("cd /tmp; mkdir -p d; echo x >f; ln -sf loop loop; mkfifo fifo")
        cases: list[tuple[type[OSError], str]] = [
            (FileNotFoundError, "/no/such/file"),
            (IsADirectoryError, "/tmp/d"),
            (NotADirectoryError, "/tmp/f/x"),
            (OSError, "/tmp/loop"),
            (OSError, "/tmp/" + "n" * 256),
            (FileNotFoundError, ""),
        ]
        for kind, path in cases:
            with pytest.raises(kind) as caught:
                sandbox.read_file(path)
            assert isinstance(caught.value, errors.SandboxFileError)
            assert not caught.value.infrastructure
            assert caught.value.sandbox == sandbox.id
        for path in ("/tmp/fifo", "/dev/zero", "/dev/null"):
            with pytest.raises(errors.SandboxFileError):  # at once, and never for ever
                sandbox.read_file(path)
        with pytest.raises(IsADirectoryError):
            sandbox.write_file("/tmp/d", "x")
        with pytest.raises(FileNotFoundError):
            sandbox.list_dir("/no/such")
        with pytest.raises(NotADirectoryError):
            sandbox.list_dir("/tmp/f")
        with pytest.raises(errors.ConfigError, match="NUL"):
            sandbox.read_file("/tmp/\0")

    def test_files_without_permission(self, sandbox: Sandbox) -> None:
        sandbox.run("cd /tmp; echo secret >s; chmod 600 s; mkdir c; chmod 700 c")
        if inner(sandbox).one_uid:
            pytest.skip("one uid: there is nobody else to refuse")
        for act in (
            lambda: sandbox.read_file("/tmp/s", user=self.other_user),
            lambda: sandbox.write_file("/tmp/s", "x", user=self.other_user),
            lambda: sandbox.write_file("/tmp/c/x", "x", user=self.other_user),
            lambda: sandbox.list_dir("/tmp/c", user=self.other_user),
        ):
            with pytest.raises(PermissionError) as caught:
                act()
            assert isinstance(caught.value, errors.SandboxFileError)
        assert sandbox.read_text("/tmp/s") == "secret\n"
        sandbox.write_file("/tmp/own", "x", user=self.other_user)
        r = sandbox.run("[ $(stat -c %u /tmp/own) = $(id -u) ]", user=self.other_user)
        assert r.ok

    def test_files_of_the_spec_s_user(self, make: Callable[..., Sandbox]) -> None:
        if inner(make()).one_uid:
            pytest.skip("one uid")
        sandbox = make(Task(id="u"), spec=Spec(user=self.other_user).over(self.spec))
        sandbox.write_file("/tmp/mine", "x")
        assert sandbox.run("[ $(stat -c %u /tmp/mine) = $(id -u) ] && [ $(id -u) != 0 ]").ok
        with pytest.raises(PermissionError):
            sandbox.write_file("/etc/passwd", "x")

    def test_files_names(self, sandbox: Sandbox, tmp_path: Path) -> None:
        names = [
            "n" * 255,
            "né ü",
            "-rf",
            "a\nb",
            "it's",
            "*",
            "\\x",
            b"\xff\xfe".decode("utf-8", "surrogateescape"),
        ]
        for name in names:
            sandbox.write_file(f"/tmp/names/{name}", name.encode("utf-8", "surrogateescape"))
        assert {i.name for i in sandbox.list_dir("/tmp/names")} == set(names)
        sandbox.download("/tmp/names", tmp_path / "out")
        assert {p.name for p in (tmp_path / "out").iterdir()} == set(names)
        sandbox.upload(tmp_path / "out", "/tmp/again")
        assert {i.name for i in sandbox.list_dir("/tmp/again")} == set(names)

    def test_files_long_paths(self, sandbox: Sandbox) -> None:
        path = "/tmp" + "/" + "/".join(["d" * 200] * 20)
        path += "/" + "f" * (4095 - len(path) - 1)
        assert len(path) == 4095
        sandbox.write_file(path, "deep")
        assert sandbox.read_text(path) == "deep"
        with pytest.raises(OSError, match="too long"):
            sandbox.read_file(path + "x")

    def test_files_list_dir(self, sandbox: Sandbox) -> None:
        sandbox.run("mkdir /tmp/l; cd /tmp/l; printf abc >f; chmod 640 f; mkdir d; ln -s nowhere s; mkfifo p")
        infos = {i.name: i for i in sandbox.list_dir("/tmp/l")}
        assert {n: i.kind for n, i in infos.items()} == {
            "d": "dir",
            "f": "file",
            "p": "other",
            "s": "symlink",
        }
        assert (infos["f"].size, infos["f"].mode) == (3, 0o640)
        assert abs(infos["f"].mtime_ns / 1e9 - time.time()) < 3600
        sandbox.run("cd /tmp/l; i=0; while [ $i -lt 3000 ]; do : >many-file-names-$i; i=$((i+1)); done")
        assert len(sandbox.list_dir("/tmp/l")) == 3004

    def test_files_upload_and_download(self, sandbox: Sandbox, tmp_path: Path) -> None:
        top = tmp_path / "src"
        (top / "sub" / "empty").mkdir(parents=True)
        (top / "a").write_bytes(b"\0" * 10)
        (top / "run.sh").write_text("#!/bin/sh\necho ran\n")
        (top / "run.sh").chmod(0o755)
        (top / "sub" / "big").write_bytes(os.urandom(3_000_000))
        (top / "sub" / "private").write_text("p")
        (top / "sub" / "private").chmod(0o600)
        (top / "link").symlink_to("sub/private")
        (top / "dangling").symlink_to("/no/such")
        (top / "locked").mkdir()
        (top / "locked" / "in").write_text("x")
        (top / "locked").chmod(0o555)
        try:
            sandbox.upload(top, "/tmp/up")
            assert sandbox.run("/tmp/up/run.sh").stdout == "ran\n"
            r = sandbox.run(
                "cd /tmp/up; stat -c '%a' sub/private locked; readlink link; readlink dangling; ls sub/empty"
            )
            assert r.stdout == "600\n555\nsub/private\n/no/such\n"
            back = tmp_path / "back"
            sandbox.download("/tmp/up", back)
            assert _tree(back) == _tree(top)
        finally:
            for place in (top, tmp_path / "back"):
                if place.exists():
                    (place / "locked").chmod(0o755)

    def test_files_upload_of_one_file(self, sandbox: Sandbox, tmp_path: Path) -> None:
        local = tmp_path / "f.txt"
        local.write_text("content")
        sandbox.run("mkdir /tmp/into")
        sandbox.upload(local, "/tmp/as.txt")
        sandbox.upload(str(local), "/tmp/into")
        sandbox.upload(local, "/tmp/made/")
        r = sandbox.run("cat /tmp/as.txt /tmp/into/f.txt /tmp/made/f.txt")
        assert r.stdout == "content" * 3
        sandbox.download("/tmp/as.txt", tmp_path / "back.txt")
        (tmp_path / "dir").mkdir()
        sandbox.download("/tmp/as.txt", tmp_path / "dir")
        assert (tmp_path / "back.txt").read_text() == "content"
        assert (tmp_path / "dir" / "as.txt").read_text() == "content"
        with pytest.raises(FileNotFoundError):
            sandbox.upload(tmp_path / "no-such", "/tmp/x")
        with pytest.raises(FileNotFoundError):
            sandbox.download("/no/such", tmp_path / "x")

    def test_files_exclude(self, sandbox: Sandbox, tmp_path: Path) -> None:
        top = tmp_path / "repo"
        for name in (".git/objects/pack/p", ".git/config", "a.pyc", "src/b.pyc", "src/b.py", "docs/x/y/z.md"):
            path = top / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(name)
        exclude = ["*.pyc", ".git/objects/pack", "docs/**/z.md"]
        sandbox.upload(top, "/tmp/repo", exclude=exclude)
        found = sandbox.run("cd /tmp/repo; find . -type f | sort").stdout.split()
        assert found == ["./.git/config", "./src/b.py"]
        sandbox.download("/tmp/repo", tmp_path / "back", exclude=["src"])
        assert [p.name for p in sorted((tmp_path / "back").rglob("*")) if p.is_file()] == ["config"]

    def test_files_progress(self, sandbox: Sandbox, tmp_path: Path) -> None:
        (tmp_path / "d").mkdir()
        for name, size in (("a", 10), ("b", 5_000_000), ("c", 0)):
            (tmp_path / "d" / name).write_bytes(b"x" * size)
        seen: list[tuple[int, int]] = []

        def progress(done: int, total: int) -> None:
            seen.append((done, total))

        for way in ("in", "out"):
            seen.clear()
            if way == "in":
                sandbox.upload(tmp_path / "d", "/tmp/d", progress=progress)
            else:
                sandbox.download("/tmp/d", tmp_path / "e", progress=progress)
            assert seen[-1] == (5_000_010, 5_000_010)
            assert [d for d, _ in seen] == sorted(d for d, _ in seen)
            assert len(seen) >= 4

    def test_files_sparse(self, make: Callable[..., Sandbox], tmp_path: Path) -> None:
        """A file of 1 GB that is nearly all holes costs what is in it: here, on the way, and there."""
        sandbox = make(Task(id="sparse", spec=Spec(disk="64MiB")))
        local = tmp_path / "sparse"
        with open(local, "wb") as file:
            file.seek(500_000_000)
            file.write(b"middle")
            file.truncate(GIB)
        seen: list[int] = []
        sandbox.upload(local, "/tmp/sparse", progress=lambda done, total: seen.append(done))
        assert seen[-1] == GIB
        r = sandbox.run("stat -c %s /tmp/sparse; du -k /tmp/sparse | cut -f1")
        size, used = r.stdout.split()
        assert int(size) == GIB
        assert int(used) < 4096
        back = tmp_path / "back"
        sandbox.download("/tmp/sparse", back)
        assert back.stat().st_size == GIB
        assert back.stat().st_blocks * 512 < 4 << 20
        with open(back, "rb") as file:
            file.seek(500_000_000 - 3)
            assert file.read(12) == b"\0\0\0middle\0\0\0"

    def test_files_sparse_read_whole(self, make: Callable[..., Sandbox]) -> None:
        sandbox = make(Task(id="sparse", spec=Spec(disk="64MiB")))
        sandbox.run("truncate -s 1073741824 /tmp/s; printf end >>/tmp/s", check=True)
        data = sandbox.read_file("/tmp/s")
        assert len(data) == GIB + 3
        assert data.endswith(b"\0end")

    def test_files_full_disk(self, make: Callable[..., Sandbox]) -> None:
        sandbox = make(Task(id="full", spec=Spec(disk="32MiB")))
        if sandbox.limits.means.get("disk", "none") == "none":
            pytest.skip("disk is not limited here, and the facts say so")
        with pytest.raises(OSError, match="No space left") as caught:
            sandbox.write_file("/tmp/big", b"x" * (64 << 20))
        assert isinstance(caught.value, errors.SandboxFileError)
        sandbox.run("rm -f /tmp/big")
        sandbox.write_file("/tmp/small", "fits")
        assert sandbox.read_text("/tmp/small") == "fits"

    def test_files_download_stays_where_it_is_told(self, sandbox: Sandbox, tmp_path: Path) -> None:
        """A sandbox that first gives a link and later a file below it must not write through the link."""
        outside = tmp_path / "outside"
        outside.mkdir()
        (outside / "f").write_text("mine")
        sandbox.run(f"mkdir /tmp/t; ln -s {outside} /tmp/t/d")
        sandbox.download("/tmp/t", tmp_path / "in")
        assert (tmp_path / "in" / "d").is_symlink()
        sandbox.run("rm /tmp/t/d; mkdir /tmp/t/d; echo theirs >/tmp/t/d/f; chmod 4755 /tmp/t/d/f")
        sandbox.download("/tmp/t", tmp_path / "in")
        assert (outside / "f").read_text() == "mine"
        assert (tmp_path / "in" / "d" / "f").read_text() == "theirs\n"
        assert stat.S_IMODE((tmp_path / "in" / "d" / "f").stat().st_mode) == 0o755

    def test_files_do_not_need_the_image_s_tools(self, sandbox: Sandbox, tmp_path: Path) -> None:
        (tmp_path / "d").mkdir()
        (tmp_path / "d" / "f").write_text("x")
        for tool in ("tar", "cat", "ls", "cp", "mkdir", "sh"):
            try:
                sandbox.write_file(f"/usr/local/bin/{tool}", "#!/no/such\n", mode=0o755)
            except PermissionError:
                pytest.skip("the base belongs to somebody that this sandbox has no uid for")
        sandbox.upload(tmp_path / "d", "/tmp/d")
        sandbox.download("/tmp/d", tmp_path / "e")
        assert (tmp_path / "e" / "f").read_text() == "x"

    def test_changes(self, sandbox: Sandbox) -> None:
        if sandbox.reset_mode == "replace":
            with pytest.raises(errors.UnsupportedError, match="mode replace"):
                sandbox.changes()
            return
        assert [c.name for c in sandbox.changes("/tmp")] == []
        sandbox.run("cd /tmp; echo x >new; mkdir dir; ln -s new link; rm -f /etc/hostname /etc/passwd")
        found = {c.name: c.kind for c in sandbox.changes()}
        expected = {"/tmp/new": "file", "/tmp/dir": "dir", "/tmp/link": "symlink"}
        may = sandbox.run("[ -w /etc ]").ok  # else commands are an ordinary user's: nothing happened there
        if may:
            expected["/etc/passwd"] = "deleted"
        assert expected.items() <= found.items()
        assert set(found) - set(expected) <= {"/tmp", "/etc", "/etc/hostname"}
        there = {c.name for c in sandbox.changes("/etc")}
        assert ("/etc/passwd" in there) == may
        assert not any(name.startswith("/tmp") for name in there)

    def test_files_only_files_go_in(self, sandbox: Sandbox, tmp_path: Path) -> None:
        os.mkfifo(tmp_path / "fifo")
        for path in (tmp_path / "fifo", Path("/dev/zero")):  # one would wait for ever, one never end
            with pytest.raises(errors.ConfigError, match="neither a file nor a directory"):
                sandbox.upload(path, "/tmp/in")
        assert sandbox.list_dir("/tmp") == []

    def test_files_of_holes_do_not_eat_the_caller(self, sandbox: Sandbox) -> None:
        assert sandbox.run("dd of=/tmp/big bs=1048576 seek=3145728 count=0").ok
        with pytest.raises(OSError, match="more than read_file") as caught:
            sandbox.read_file("/tmp/big")
        assert caught.value.errno == errno.EFBIG


def _tree(top: Path) -> dict[str, tuple[int, object]]:
    found: dict[str, tuple[int, object]] = {}
    for path in sorted(top.rglob("*")):
        info = path.lstat()
        content: object = None
        if path.is_symlink():
            found[str(path.relative_to(top))] = (0, os.readlink(path))
            continue
        if path.is_file():
            content = path.read_bytes()
        found[str(path.relative_to(top))] = (stat.S_IMODE(info.st_mode), content)
    return found
