"""Unpacking layers: what comes out is what the tar says; hostile members are refused by name."""

from __future__ import annotations

import io
import os
import stat
import subprocess
import tarfile
from pathlib import Path

import pytest

from rlsandbox.backends.local import archive
from rlsandbox.backends.local.jobs import remove
from rlsandbox.backends.local.layers import Unpacker
from rlsandbox.backends.local.view import OPAQUE, View, is_whiteout
from rlsandbox.errors import ImageError
from tests.support.make_image import Entry, d, f, hard, layer, link

AS_ROOT = os.geteuid() == 0
needs_root = pytest.mark.skipif(not AS_ROOT, reason="files of several owners need root")


def unpack(tmp_path: Path, *layers: list[Entry], form: str = "overlay") -> list[Path]:
    """Unpack *layers* bottom first; the directories, topmost first."""
    done: list[Path] = []
    for number, entries in enumerate(layers):
        tar = tmp_path / f"{number}.tar"
        tar.write_bytes(layer(entries))
        root = done[0] if form == "apply" and done else tmp_path / f"layer{number}"
        root.mkdir(exist_ok=True)
        lowers = [str(path) for path in done] if form == "overlay" else []
        with Unpacker(root, form=form, lowers=lowers, owners=AS_ROOT, shown=f"layer {number}") as unpacker:
            unpacker.unpack(tar)
        if root not in done:
            done.insert(0, root)
    return done


def tree(root: Path) -> dict[str, tuple[object, ...]]:
    """Everything under *root* that an image says of a file."""
    found: dict[str, tuple[object, ...]] = {}
    for top, names, files in os.walk(root):
        for name in [*names, *files]:
            path = Path(top, name)
            status = path.lstat()
            kind = stat.S_IFMT(status.st_mode)
            content: object = None
            if stat.S_ISREG(status.st_mode):
                content = path.read_bytes()
            elif stat.S_ISLNK(status.st_mode):
                content = os.readlink(path)
            mode = stat.S_IMODE(status.st_mode)
            times = None if stat.S_ISLNK(status.st_mode) else status.st_mtime_ns
            found[str(path.relative_to(root))] = (kind, mode, status.st_uid, status.st_gid, times, content)
    return found


@needs_root
def test_owner_mode_time_and_links(tmp_path: Path) -> None:
    (root,) = unpack(
        tmp_path,
        [
            d(".", 0o755),
            d("home/agent", 0o750, 1000, 1001),
            f("home/agent/run", b"#!/bin/sh\n", 0o6755, 1000, 1001),
            link("bin", "usr/bin"),
            hard("home/agent/again", "home/agent/run"),
            Entry("fifo", kind="p", mode=0o600),
            f("closed/secret", b"x", 0o000),
            d("closed", 0o500),
        ],
    )
    found = tree(root)
    assert found["home/agent"][:4] == (stat.S_IFDIR, 0o750, 1000, 1001)
    assert found["home/agent/run"][1:4] == (0o6755, 1000, 1001)
    assert found["home/agent/run"][4] == 1_700_000_000 * 10**9
    assert found["bin"][5] == "usr/bin"
    assert (root / "home/agent/again").stat().st_ino == (root / "home/agent/run").stat().st_ino
    assert found["fifo"][0] == stat.S_IFIFO
    assert found["closed"][1] == 0o500
    assert found["closed/secret"][1] == 0
    assert found["home"][1:3] == (0o755, 0), "a directory that no member announces is root's, mode 0755"


def test_names_of_every_length_and_kind(tmp_path: Path) -> None:
    long = "/".join(["d" * 200] * 5) + "/" + "f" * 255
    odd = "a b\nc\td\\\x01"
    (root,) = unpack(tmp_path, [f(long, b"1"), f("ü/日本", b"2"), f(odd, b"3"), f("./dot/./x", b"4")])
    assert (root / long).read_bytes() == b"1"
    assert (root / "ü/日本").read_bytes() == b"2"
    assert (root / odd).read_bytes() == b"3"
    assert (root / "dot/x").read_bytes() == b"4"


def test_user_attributes_are_kept_and_overlay_marks_of_the_image_are_not(tmp_path: Path) -> None:
    pax = {
        "SCHILY.xattr.user.note": "kept",
        f"SCHILY.xattr.{OPAQUE}": "y",
        "SCHILY.xattr.trusted.overlay.opaque": "y",
    }
    (root,) = unpack(tmp_path, [Entry("dir", kind="d", pax=pax), Entry("file", b"x", pax=pax)])
    assert os.getxattr(root / "file", "user.note") == b"kept"
    assert os.listxattr(root / "dir") == ["user.note"]


def test_sparse_files(tmp_path: Path) -> None:
    sparse = tmp_path / "sparse"
    with open(sparse, "wb") as file:
        file.seek(1 << 20)
        file.write(b"middle")
        file.truncate(64 << 20)
    for form in ("gnu", "posix"):
        tar = tmp_path / f"{form}.tar"
        subprocess.run(["tar", "-S", f"--format={form}", "-C", tmp_path, "-cf", tar, "sparse"], check=True)
        assert tar.stat().st_size < 1 << 20, "tar has kept the holes"
        root = tmp_path / form
        root.mkdir()
        with Unpacker(root, form="overlay", owners=False, shown="layer") as unpacker:
            unpacker.unpack(tar)
        status = (root / "sparse").stat()
        assert status.st_size == 64 << 20
        assert status.st_blocks * 512 < 1 << 20
        assert (root / "sparse").read_bytes() == sparse.read_bytes()


LAYERS = [
    [
        d("etc"),
        f("etc/a", "1"),
        f("etc/b", "2"),
        d("opt/x", 0o711),
        f("opt/x/1"),
        f("opt/x/2"),
        d("gone/deep"),
        f("gone/deep/f"),
        *(
            d("went/deep"),
            f("went/deep/f"),
            f("went/g"),
            d("bare/deep"),
            f("bare/deep/f"),
            d("twice"),
            f("twice/f"),
        ),
    ],
    [f("etc/.wh.a"), f("etc/c", "3"), d("opt/x"), f("opt/x/.wh..wh..opq"), f("opt/x/3"), f(".wh.gone")],
    [f("etc/a", "again", 0o600), f("opt/.wh.x"), d("opt/x", 0o700), f("opt/x/4"), d("gone"), f("gone/new")],
    [f("etc/.wh.b"), f("etc/b", "replaced"), f("opt/y", "file"), link("gone/link", "new")],
    [f("opt/.wh.y"), d("opt/y"), f("opt/y/inside"), f("gone/.wh.nothing")],
    # Some builders delete all that lies in a directory, and the directory.
    [
        *(f("went/deep/.wh.f"), f("went/.wh.deep"), f("went/.wh.g"), f(".wh.went")),
        *(f("bare/deep/.wh.f"), f("bare/.wh..wh..opq"), f(".wh.twice"), f("twice/.wh..wh..opq")),
    ],
]
MERGED = {
    *("etc", "etc/a", "etc/b", "etc/c", "opt", "opt/x", "opt/x/4", "opt/y", "opt/y/inside"),
    *("gone", "gone/new", "gone/link", "bare"),
}


def test_deletions_carried_out(tmp_path: Path) -> None:
    (root,) = unpack(tmp_path, *LAYERS, form="apply")
    assert set(tree(root)) == MERGED
    assert (root / "etc/a").read_text() == "again"
    assert (root / "etc/b").read_text() == "replaced"


def test_deletions_marked_for_overlayfs(tmp_path: Path) -> None:
    layers = unpack(tmp_path, *LAYERS)
    assert is_whiteout((layers[-2] / "etc/a").lstat())
    assert os.getxattr(layers[-2] / "opt/x", OPAQUE) == b"y"
    assert os.getxattr(layers[-3] / "opt/x", OPAQUE) == b"y", "deleted and made anew in one layer"
    assert not is_whiteout((layers[-4] / "etc/b").lstat()), "a deletion never hits its own layer"
    view = View([str(path) for path in layers])
    assert {path for path in MERGED if view.find(path.split("/"))} == MERGED
    for path in (
        "opt/x/1",
        "opt/x/3",
        "gone/deep",
        "gone/deep/f",
        "went",
        "twice",
        "bare/deep",
        "etc/a/b",
        "etc/nothing",
    ):
        assert view.find(path.split("/")) is None, path


@needs_root
@pytest.mark.parametrize("option", ["userxattr"])
def test_the_kernel_sees_what_carrying_out_gives(tmp_path: Path, option: str) -> None:
    layers = unpack(tmp_path / "overlay" if (tmp_path / "overlay").mkdir() is None else tmp_path, *LAYERS)
    (tmp_path / "apply").mkdir()
    (flat,) = unpack(tmp_path / "apply", *LAYERS, form="apply")
    seen = tmp_path / "seen"
    merged = tmp_path / "merged"
    merged.mkdir()
    lowers = ":".join(str(path) for path in layers)
    script = f"mount -t overlay o -o {option},lowerdir={lowers} {merged} && cp -a {merged} {seen}"
    subprocess.run(["unshare", "-m", "sh", "-c", script], check=True)
    assert tree(seen) == tree(flat)


def test_a_member_without_its_parents_takes_them_as_they_are_below(tmp_path: Path) -> None:
    base = [
        d("tmp", 0o1777),
        link("bin", "usr/bin"),
        d("usr/bin"),
        link("abs", "/usr"),
        link("up", "../../usr/bin"),
    ]
    layers = unpack(tmp_path, base, [f("tmp/x"), f("bin/tool"), f("abs/lib"), f("up/other")])
    assert stat.S_IMODE((layers[0] / "tmp").lstat().st_mode) == 0o1777
    assert (layers[0] / "usr/bin/tool").exists(), "the link of a lower layer is followed inside the image"
    assert (layers[0] / "usr/lib").exists()
    assert (layers[0] / "usr/bin/other").exists()
    assert not (layers[0] / "bin").exists()
    (tmp_path / "flat").mkdir()
    (flat,) = unpack(tmp_path / "flat", base, [f("tmp/x"), f("bin/tool")], form="apply")
    assert (flat / "usr/bin/tool").exists()
    assert os.readlink(flat / "bin") == "usr/bin"
    assert stat.S_IMODE((flat / "tmp").lstat().st_mode) == 0o1777


HOSTILE = {
    "dotdot": ([f("../evil", "x")], "../evil"),
    "dotdot-inside": ([d("a"), f("a/../../evil", "x")], "a/../../evil"),
    "absolute": ([f("/etc/evil", "x")], "/etc/evil"),
    "through-a-link": ([link("way", "/etc"), f("way/evil", "x")], "way/evil"),
    "through-a-relative-link": ([link("way", "../../etc"), f("way/evil", "x")], "way/evil"),
    "through-a-link-to-the-inside": ([d("real"), link("way", "real"), f("way/x", "x")], "way/x"),
    "directory-through-a-link": ([link("way", "/etc"), d("way/evil")], "way/evil"),
    "link-through-a-link": ([link("way", "/etc"), link("way/evil", "x")], "way/evil"),
    "through-a-link-to-a-link": ([link("a", "/etc"), hard("b", "a"), f("b/evil", "x")], "b/evil"),
    "block-device": ([Entry("sda", kind="b", device=(8, 0))], "sda"),
    "character-device": ([Entry("dev/mem", kind="c", device=(1, 1))], "dev/mem"),
    "null-elsewhere": ([Entry("tmp/null", kind="c", device=(1, 3))], "tmp/null"),
    "made-up-whiteout": ([Entry("w", kind="c", device=(0, 0))], "w"),
    "hard-link-out": ([hard("shadow", "../../etc/shadow")], "shadow"),
    "hard-link-absolute": ([hard("shadow", "/etc/shadow")], "shadow"),
    "hard-link-through-a-link": ([link("way", "/etc"), hard("shadow", "way/shadow")], "shadow"),
    "hard-link-to-nothing": ([hard("x", "missing")], "x"),
    "hard-link-to-a-directory": ([d("a"), hard("x", "a")], "x"),
    "hard-link-to-the-root": ([hard("x", ".")], "x"),
    "path-over-a-file": ([f("a", "file"), f("a/b", "x")], "a/b"),
    "root-as-a-file": ([f(".", "x")], "."),
    "deletes-dotdot": ([f("a/.wh...", "")], "a/.wh..."),
    "deletes-nothing": ([f(".wh.", "")], ".wh."),
    "deletes-above": ([f("../.wh.etc", "")], "../.wh.etc"),
    "deletes-through-a-link": ([link("way", "/"), f("way/.wh.etc", "")], "way/.wh.etc"),
    "empty-link": ([link("x", "")], "x"),
    "long-name": ([f("n" * 256)], "n" * 256),
    "long-path": (
        [f("\u00fc" * 100 + "/" + "a/" * 1850 + "\u00fc" * 100)],
        "\u00fc" * 100 + "/" + "a/" * 1850 + "\u00fc" * 100,
    ),
    "file-that-became-a-link": ([f("a", "x"), link("a", "/etc"), f("a/evil", "x")], "a/evil"),
    "directory-that-became-a-link": ([d("a"), f("a/b", "x"), link("a", "/etc"), f("a/evil", "x")], "a/evil"),
    "hard-link-to-a-link": (
        [link("a", "/etc"), hard("b", "a"), d("c"), hard("c/d", "b"), f("c/d/evil", "x")],
        "c/d/evil",
    ),
    "whiteout-through-a-later-link": ([d("a"), link("a", "/etc"), f("a/.wh.passwd", "")], "a/.wh.passwd"),
    "whiteout-with-a-path": ([Entry("a/.wh.../x", kind="f"), f("../.wh.x")], "../.wh.x"),
    "pax-path-out": ([Entry("fine", b"x", pax={"path": "../evil"})], "../evil"),
    "pax-path-absolute": ([Entry("fine", b"x", pax={"path": "/etc/evil"})], "/etc/evil"),
    "pax-link-out": ([Entry("x", kind="h", link="fine", pax={"linkpath": "../../etc/shadow"})], "x"),
    "surrogates": ([f("\udcff\n/../../evil", "x")], "\udcff\n/../../evil"),
}


@pytest.mark.parametrize("form", ["overlay", "apply"])
@pytest.mark.parametrize("case", HOSTILE)
def test_hostile_members_are_refused_by_name(tmp_path: Path, case: str, form: str) -> None:
    entries, member = HOSTILE[case]
    outside = tmp_path / "evil"
    with pytest.raises(ImageError) as caught:
        unpack(tmp_path, [f("below", "x")], entries, form=form)
    assert repr(member) in caught.value.message
    assert caught.value.kind == "image_hostile"
    assert not caught.value.retryable
    assert not outside.exists()
    assert not os.path.lexists("/etc/evil")
    for root in tmp_path.glob("layer*"):
        remove(str(root))  # too deep for pytest's own clean-up


def test_usual_devices_in_dev_are_left_out(tmp_path: Path) -> None:
    (root,) = unpack(tmp_path, [d("dev"), Entry("dev/null", kind="c", device=(1, 3), mode=0o666)])
    assert os.listdir(root / "dev") == []


def test_a_link_that_was_replaced_is_no_link_any_more(tmp_path: Path) -> None:
    (root,) = unpack(tmp_path, [link("a", "/etc"), d("a"), f("a/x", "inside")])
    assert (root / "a/x").read_text() == "inside"
    assert not (root / "a").is_symlink()


def test_ids_beyond_the_range_become_nobody(tmp_path: Path) -> None:
    if not AS_ROOT:
        pytest.skip("files of several owners need root")
    (root,) = unpack(tmp_path, [f("x", "", 0o644, 4_000_000, 70_000)])
    assert ((root / "x").stat().st_uid, (root / "x").stat().st_gid) == (65534, 65534)


def broken(name: str) -> bytes:
    whole = layer([f("first", b"1" * 1000), f("second", b"2" * 5000)])
    if name == "cut in a member":
        return whole[: 512 + 1024 + 512 + 700]
    if name == "cut in a header":
        return whole[: 512 + 1024 + 300]
    if name == "garbage for a header":
        return whole[: 512 + 1024] + b"\x37" * 512 + whole[512 + 1024 + 512 :]
    if name == "negative size":
        header = bytearray(whole[:512])
        header[124:136] = b"\xff" * 12
        header[148:156] = b" " * 8
        header[148:156] = b"%06o\0 " % sum(header)
        return bytes(header) + whole[512:]
    if name == "not a tar":
        return b"hello" * 1000
    if name == "endless pax chain":
        info = tarfile.TarInfo("x")
        info.pax_headers = {"comment": "y"}
        return info.tobuf(tarfile.PAX_FORMAT)[:1024] * 3000
    assert name == "empty"
    return b""


@pytest.mark.parametrize(
    "name",
    [
        *("cut in a member", "cut in a header", "garbage for a header", "negative size", "not a tar"),
        *("endless pax chain", "empty"),
    ],
)
def test_broken_tars_are_one_clear_error(tmp_path: Path, name: str) -> None:
    tar = tmp_path / "t.tar"
    tar.write_bytes(broken(name))
    with pytest.raises(ImageError, match="the layer"):
        archive.open_tar(tar, "the layer")


def test_a_bad_time_is_an_error_of_its_member(tmp_path: Path) -> None:
    with pytest.raises(ImageError, match="'x' is refused: it is malformed"):
        unpack(tmp_path, [Entry("x", b"", pax={"mtime": "nan"})])
    (root,) = unpack(tmp_path, [Entry("y", b"", pax={"mtime": "-5e20"})])
    assert (root / "y").stat().st_mtime == 0


def test_decompression_is_told_by_content_and_its_faults_are_ours(tmp_path: Path) -> None:
    import bz2
    import gzip
    import lzma

    for pack in (gzip.compress, bz2.compress, lzma.compress):
        whole = pack(b"hello" * 10000)
        assert archive.decompressed(io.BytesIO(whole), "x").read() == b"hello" * 10000
        (tmp_path / "blob").write_bytes(whole[:-9])
        with pytest.raises(ImageError, match=r"blob.* is (cut off or )?damaged"):
            archive.fetch_layer(
                archive.DirectoryStore(tmp_path),
                archive.LayerBlob("blob", "sha256:" + "0" * 64, None),
                tmp_path / "out",
                "blob",
            )


def sparse(size: int, name: str = "big") -> bytes:
    """A GNU sparse file of *size* that stores one byte."""
    info = tarfile.TarInfo("GNUSparseFile.0/" + name)
    stored = b"1\n0\n1\n".ljust(512, b"\0") + b"x"
    info.size = len(stored)
    info.pax_headers = {
        "GNU.sparse.major": "1", "GNU.sparse.minor": "0", "GNU.sparse.name": name, "GNU.sparse.realsize": str(size),
    }  # fmt: skip
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w", format=tarfile.PAX_FORMAT) as tar:
        tar.addfile(info, io.BytesIO(stored))
    return buffer.getvalue()


@pytest.mark.parametrize("size", [1 << 62, (1 << 63) - 1, 1 << 70])
def test_a_sparse_file_beyond_any_filesystem_is_refused(tmp_path: Path, size: int) -> None:
    tar = tmp_path / "t.tar"
    tar.write_bytes(sparse(size))
    (tmp_path / "root").mkdir()
    with (
        pytest.raises(ImageError, match="member 'big' is refused"),
        Unpacker(tmp_path / "root", form="apply", owners=AS_ROOT, shown="t") as unpacker,
    ):
        unpacker.unpack(tar)


def test_twice_the_same_name_is_the_last_of_them(tmp_path: Path) -> None:
    (root,) = unpack(
        tmp_path,
        [
            *(f("a", "1"), f("a", "22")),
            *(d("b"), f("b/inside", "x"), f("b", "a file now")),
            *(f("c", "x"), hard("d", "c"), f("c", "y")),
            *(d("e", 0o700), f("e/kept", "x"), d("e", 0o755)),
            f("with\na line end \udcff", "odd"),
        ],
    )
    assert (root / "a").read_text() == "22"
    assert (root / "b").read_text() == "a file now"
    assert ((root / "c").read_text(), (root / "d").read_text()) == ("y", "x"), (
        "no write goes through the link"
    )
    assert (root / "e/kept").read_text() == "x"
    assert stat.S_IMODE((root / "e").stat().st_mode) == 0o755
    assert (root / "with\na line end \udcff").read_text() == "odd"


@pytest.mark.parametrize("form", ["overlay", "apply"])
def test_a_deletion_of_a_deletion_is_nothing(tmp_path: Path, form: str) -> None:
    roots = unpack(tmp_path, [f("a", "x"), f("b", "x")], [f(".wh..wh.a", ""), f(".wh.b", "")], form=form)
    names = {name for root in roots for name in os.listdir(root)}
    assert "a" in names
    assert not any(name.startswith(".wh.") for name in names)


def test_an_interrupted_removal_leaves_nothing_outside(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    top = tmp_path / "place"
    (top / "a/b/c/d").mkdir(parents=True)
    removed = os.rmdir
    left = [2]

    def rmdir(path: str) -> None:
        if not left[0]:
            raise KeyboardInterrupt
        left[0] -= 1
        removed(path)

    with monkeypatch.context() as patched, pytest.raises(KeyboardInterrupt):
        patched.setattr(os, "rmdir", rmdir)
        remove(str(top))
    assert os.listdir(tmp_path) == ["place"]
    remove(str(top))
    assert os.listdir(tmp_path) == []


def test_a_tree_of_any_depth_is_removed(tmp_path: Path) -> None:
    """An image may hold paths that are deeper than Python's stack, and then be refused."""
    top = tmp_path / "place"
    top.mkdir()
    fd = os.open(top, os.O_RDONLY)
    for n in range(3000):
        os.mkdir("d", 0o700, dir_fd=fd)
        os.close(os.open("file", os.O_CREAT | os.O_WRONLY, dir_fd=fd))
        below = os.open("d", os.O_RDONLY, dir_fd=fd)
        if n % 7 == 0:
            os.chmod("d", 0o500, dir_fd=fd)
        os.close(fd)
        fd = below
    os.symlink("/etc", "link", dir_fd=fd)
    os.close(fd)
    remove(str(top))
    assert os.listdir(tmp_path) == []
    deep = "d/" * 1900
    unpack(tmp_path, [f(deep + "x", "1"), f("d", "a file now")], form="apply")
