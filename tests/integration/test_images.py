"""Images from files to sandboxes: both formats, all that can be broken, what they look like inside."""

from __future__ import annotations

import asyncio
import contextlib
import glob
import gzip
import io
import json
import os
import shutil
import signal
import subprocess
import sys
import tarfile
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from rlsandbox.backends.local import Local
from rlsandbox.backends.local import image as image_module
from rlsandbox.backends.local.ids import detect
from rlsandbox.backends.local.image import Images
from rlsandbox.errors import ImageError
from rlsandbox.spec import Spec
from tests.support import make_image
from tests.support.inside import inside
from tests.support.make_image import d, docker_archive, f, layer, link, oci_layout, sha256
from tests.support.ordinary import USER, Ordinary, make_ordinary

needs_busybox = pytest.mark.skipif(make_image.busybox() is None, reason=make_image.NO_BUSYBOX)
CONFIG = {
    "Env": ["PATH=/opt/bin:/bin", "GREETING=hello world", "EMPTY="],
    "WorkingDir": "/srv/app",
    "User": "1000:50",
    "Entrypoint": ["/bin/tini", "--"],
    "Cmd": ["sh"],
}


@pytest.fixture
def images(tmp_path: Path) -> Images:
    return Images(detect(), tmp_path / "cache")


def small(name: str = "file") -> list[bytes]:
    return [layer([d("etc"), f("etc/" + name, "content")])]


def nothing_left(cache: Path) -> None:
    """No entry, whole or half, and nothing temporary."""
    assert list((cache / "layers").glob("*/*")) == [] if (cache / "layers").exists() else True
    assert list((cache / "tmp").glob("*")) == [] if (cache / "tmp").exists() else True


# Formats


@pytest.mark.parametrize("form", ["docker", "docker-gz", "oci", "oci-plain", "oci-tar"])
async def test_every_format(tmp_path: Path, images: Images, form: str) -> None:
    layers = [*small(), layer([f("etc/other", "2")])]
    if form.startswith("docker"):
        path = docker_archive(tmp_path / "i.tar", layers, CONFIG)
    else:
        path = oci_layout(tmp_path / "i", layers, CONFIG, compress=form != "oci-plain")
    if form == "docker-gz":
        packed = tmp_path / "i.tar.gz"
        packed.write_bytes(gzip.compress(path.read_bytes()))
        path = packed
    if form == "oci-tar":
        with tarfile.open(tmp_path / "oci.tar", "w") as tar:
            for name in os.listdir(path):
                tar.add(path / name, name)
        path = tmp_path / "oci.tar"
    image = await images.get(str(path))
    assert [sorted(os.listdir(lower + "/etc")) for lower in image.lowers] == [["other"], ["file"]]
    assert image.env == {"PATH": "/opt/bin:/bin", "GREETING": "hello world", "EMPTY": ""}
    assert (image.workdir, image.user) == ("/srv/app", "1000:50")
    assert (image.entrypoint, image.cmd) == (("/bin/tini", "--"), ("sh",))


async def test_layers_are_shared_between_images_and_unpacked_once(tmp_path: Path, images: Images) -> None:
    base = small()
    one = await images.get(str(docker_archive(tmp_path / "1.tar", [*base, layer([f("a", "1")])])))
    before = os.stat(one.lowers[1]).st_mtime_ns, os.stat(one.lowers[1]).st_ino
    two = await images.get(str(oci_layout(tmp_path / "2", [*base, layer([f("b", "2")])])))
    assert one.lowers[1] == two.lowers[1]
    assert (os.stat(two.lowers[1]).st_mtime_ns, os.stat(two.lowers[1]).st_ino) == before
    assert one.lowers[0] != two.lowers[0]


async def test_empty_layers_cost_no_lower_directory(tmp_path: Path, images: Images) -> None:
    empty = layer([])
    image = await images.get(str(docker_archive(tmp_path / "i.tar", [empty, *small(), b"", empty])))
    assert len(image.lowers) == 1
    image = await images.get(str(docker_archive(tmp_path / "none.tar", [])))
    assert [os.listdir(lower) for lower in image.lowers] == [[]]


async def test_many_layers_become_few_directories(tmp_path: Path, images: Images) -> None:
    layers = [layer([f(f"dir/{n}", str(n)), *([f(f"dir/.wh.{n - 2}")] if n > 1 else [])]) for n in range(60)]
    image = await images.get(str(docker_archive(tmp_path / "i.tar", layers)))
    assert len(image.lowers) == 16
    flat = sorted(os.listdir(image.lowers[-1] + "/dir"))
    assert flat == ["43", "44"], "the bottom 45 lie in one directory, deletions carried out"


async def test_an_image_is_picked_by_name(tmp_path: Path, images: Images) -> None:
    one = docker_archive(tmp_path / "1.tar", small("one"), tag="a:1")
    two = docker_archive(tmp_path / "2.tar", small("two"), tag="b:2")
    both = tmp_path / "both.tar"
    manifests = []
    with tarfile.open(both, "w") as out:
        for path in (one, two):
            with tarfile.open(path) as tar:
                for member in tar.getmembers():
                    data = tar.extractfile(member)
                    assert data is not None
                    if member.name == "manifest.json":
                        manifests += json.load(data)
                    else:
                        out.addfile(member, data)
        text = json.dumps(manifests).encode()
        info = tarfile.TarInfo("manifest.json")
        info.size = len(text)
        out.addfile(info, io.BytesIO(text))
    image = await images.get(f"{both}#b:2")
    assert os.listdir(image.lowers[0] + "/etc") == ["two"]
    with pytest.raises(ImageError, match="holds 2 images") as caught:
        await images.get(str(both))
    assert f"{both}#a:1" in caught.value.hint
    with pytest.raises(ImageError, match="holds no image 'c'; it holds: a:1, b:2"):
        await images.get(f"{both}#c")


async def test_the_platform_that_fits_is_taken(tmp_path: Path, images: Images) -> None:
    path = oci_layout(tmp_path / "i", small())
    index = json.loads((path / "index.json").read_text())
    mine = {"x86_64": "amd64", "aarch64": "arm64"}[os.uname().machine]
    other = dict(
        index["manifests"][0], digest="sha256:" + "0" * 64, platform={"architecture": "s390x", "os": "linux"}
    )
    index["manifests"] = [other, dict(index["manifests"][0], platform={"architecture": mine, "os": "linux"})]
    (path / "index.json").write_text(json.dumps(index))
    assert len((await images.get(str(path))).lowers) == 1
    index["manifests"] = [other]
    (path / "index.json").write_text(json.dumps(index))
    with pytest.raises(ImageError, match=f"holds no image for {mine}"):
        await images.get(str(path))


# Broken ones


async def test_what_is_no_image_is_told(tmp_path: Path, images: Images) -> None:
    (tmp_path / "empty").mkdir()
    (tmp_path / "text.tar").write_text("this is no archive at all\n" * 100)
    with tarfile.open(tmp_path / "other.tar", "w") as tar:
        tar.addfile(tarfile.TarInfo("a"))
    cases = {
        str(tmp_path / "missing.tar"): "no such file or directory",
        "./missing": "no such file or directory",
        str(tmp_path / "empty"): "neither index.json .OCI layout. nor manifest.json",
        str(tmp_path / "text.tar"): "no readable tar archive",
        str(tmp_path / "other.tar"): "neither index.json",
    }
    for image, message in cases.items():
        with pytest.raises(ImageError, match=message) as caught:
            await images.get(image)
        assert "\n" not in str(caught.value)
        assert image in str(caught.value)
        assert not caught.value.retryable
    nothing_left(tmp_path / "cache")


@pytest.mark.parametrize("form", ["docker", "oci", "docker-gz"])
async def test_an_archive_cut_off_anywhere_leaves_nothing(tmp_path: Path, images: Images, form: str) -> None:
    layers = [layer([f("one", os.urandom(30_000))]), layer([f("two", os.urandom(30_000))])]
    whole = docker_archive(tmp_path / "i.tar", layers).read_bytes()
    if form == "docker-gz":
        whole = gzip.compress(whole)
    blobs = oci_layout(tmp_path / "i", layers)
    for n, part in enumerate((0.02, 0.3, 0.5, 0.8, 0.99)):
        if form == "oci":
            path = tmp_path / f"cut{n}"
            shutil.copytree(blobs, path)
            biggest = max((path / "blobs/sha256").iterdir(), key=lambda blob: blob.stat().st_size)
            os.truncate(biggest, int(biggest.stat().st_size * part))
        else:
            path = tmp_path / f"cut{n}.tar"
            # (tar's own end marks are padding: a cut there takes nothing away)
            path.write_bytes(whole[: int(len(whole) * part * 0.9)])
        with pytest.raises(ImageError) as caught:
            await images.get(str(path))
        assert str(path) in caught.value.message
    nothing_left(tmp_path / "cache")


@pytest.mark.parametrize("what", ["layer", "config", "manifest", "index", "diff_id", "digest-syntax"])
async def test_damage_is_found_and_named(tmp_path: Path, images: Images, what: str) -> None:
    path = oci_layout(tmp_path / "i", small(), compress=False)
    index = json.loads((path / "index.json").read_text())
    manifest_blob = path / "blobs/sha256" / index["manifests"][0]["digest"].removeprefix("sha256:")
    manifest = json.loads(manifest_blob.read_text())
    blob = {
        "layer": path / "blobs/sha256" / manifest["layers"][0]["digest"].removeprefix("sha256:"),
        "config": path / "blobs/sha256" / manifest["config"]["digest"].removeprefix("sha256:"),
        "manifest": manifest_blob,
    }
    message = "is damaged"
    if what in blob:
        data = bytearray(blob[what].read_bytes())
        data[len(data) // 2] ^= 1
        blob[what].write_bytes(data)
    elif what == "index":
        (path / "index.json").write_text("{")
        message = "is no JSON"
    elif what == "diff_id":
        config = json.loads(blob["config"].read_text())
        config["rootfs"]["diff_ids"] = ["sha256:" + "1" * 64]
        text = json.dumps(config).encode()
        (path / "blobs/sha256" / sha256(text)).write_bytes(text)
        manifest["config"]["digest"] = "sha256:" + sha256(text)
        text = json.dumps(manifest).encode()
        (path / "blobs/sha256" / sha256(text)).write_bytes(text)
        index["manifests"][0]["digest"] = "sha256:" + sha256(text)
        (path / "index.json").write_text(json.dumps(index))
    else:
        index["manifests"][0]["digest"] = "sha256:../../../../etc/passwd"
        (path / "index.json").write_text(json.dumps(index))
        message = "is no sha256 digest"
    with pytest.raises(ImageError, match=message):
        await images.get(str(path))
    nothing_left(tmp_path / "cache")


async def test_a_hostile_image_names_its_member_and_leaves_nothing(tmp_path: Path, images: Images) -> None:
    bad = [link("way", "/etc"), f("way/cron.d/evil", "x")]
    path = docker_archive(tmp_path / "i.tar", [layer(bad)])
    with pytest.raises(ImageError, match=r"member 'way/cron\.d/evil' is refused") as caught:
        await images.get(str(path))
    assert caught.value.kind == "image_hostile"
    assert not os.path.exists("/etc/cron.d/evil")
    nothing_left(tmp_path / "cache")


async def test_zstd_is_read_where_python_can_and_else_told(tmp_path: Path, images: Images) -> None:
    path = oci_layout(tmp_path / "i", small(), compress=False)
    index = json.loads((path / "index.json").read_text())
    manifest_blob = path / "blobs/sha256" / index["manifests"][0]["digest"].removeprefix("sha256:")
    manifest = json.loads(manifest_blob.read_text())
    plain = path / "blobs/sha256" / manifest["layers"][0]["digest"].removeprefix("sha256:")
    try:
        import zstandard

        packed = zstandard.ZstdCompressor().compress(plain.read_bytes())
        readable = True
    except ImportError:
        # One raw block: magic, a frame header without a size, the block's header.
        data = plain.read_bytes()[:1024]
        packed = b"\x28\xb5\x2f\xfd\x00\x58" + ((len(data) << 3) | 1).to_bytes(3, "little") + data
        readable = sys.version_info >= (3, 14)
    (path / "blobs/sha256" / sha256(packed)).write_bytes(packed)
    manifest["layers"][0] = {"digest": "sha256:" + sha256(packed), "size": len(packed), "mediaType": "x+zstd"}
    text = json.dumps(manifest).encode()
    (path / "blobs/sha256" / sha256(text)).write_bytes(text)
    index["manifests"][0]["digest"] = "sha256:" + sha256(text)
    (path / "index.json").write_text(json.dumps(index))
    if readable and len(packed) > 1100:
        assert len((await images.get(str(path))).lowers) == 1
        return
    with pytest.raises(ImageError, match="zstd") as caught:
        await images.get(str(path))
    assert caught.value.hint == "pip install zstandard"


async def test_another_machines_image_is_refused(tmp_path: Path, images: Images) -> None:
    path = docker_archive(tmp_path / "i.tar", small())
    data = path.read_bytes()
    mine = {"x86_64": b'"amd64"', "aarch64": b'"arm64"'}[os.uname().machine]
    with tarfile.open(path) as tar:
        name = next(member.name for member in tar.getmembers() if member.name.endswith(".json"))
    assert mine in data
    broken = data.replace(mine, b'"s390x"'.ljust(len(mine)))
    (tmp_path / "j.tar").write_bytes(broken)
    with pytest.raises(ImageError, match=r"damaged|s390x"):
        await images.get(str(tmp_path / "j.tar"))
    assert name


async def test_a_reference_without_skopeo_says_what_to_do(
    images: Images, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(ImageError, match=r"skopeo.*not installed") as caught:
        await images.get("debian:12")
    assert "install skopeo" in caught.value.hint


async def test_skopeo_pulls_once(images: Images, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    layout = oci_layout(tmp_path / "registry", small())
    tool = tmp_path / "bin/skopeo"
    tool.parent.mkdir()
    tool.write_text(
        "#!/bin/sh\n"
        f'echo "$@" >> {tmp_path}/calls\n'
        'case "$3" in *broken*) echo "manifest unknown" >&2; exit 1;; esac\n'
        f'to=${{4#oci:}}; cp -r {layout} "${{to%:image}}"\n'
    )
    tool.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tool.parent}:{os.environ['PATH']}")
    results = await asyncio.gather(*(images.get("registry.test/group/name:1.2") for _ in range(4)))
    assert len({image.digest for image in results}) == 1
    assert (tmp_path / "calls").read_text().count("docker://registry.test/group/name:1.2") == 1
    for handler in (signal.SIG_DFL, signal.SIG_IGN):  # ignored: no exit status reaches us
        before = signal.signal(signal.SIGCHLD, handler)
        try:
            with pytest.raises(ImageError, match=r"skopeo could not pull 'broken:1': manifest unknown"):
                await images.get("broken:1")
            assert (await images.get("registry.test/group/name:1.2")).digest == results[0].digest
        finally:
            signal.signal(signal.SIGCHLD, before)
        if handler == signal.SIG_DFL:
            shutil.rmtree(tmp_path / "cache/pulls")
    (pulled,) = (tmp_path / "cache/pulls").iterdir()
    dead = subprocess.Popen(["true"])
    dead.wait()
    killed = [pulled.with_name(f"{pulled.name}.{pid}.aa") for pid in (dead.pid, os.getpid())]
    young = pulled.with_name(f"{pulled.name}.{dead.pid}.bb")
    long_ago = time.time() - 2 * image_module.STALE_S
    for half in (*killed, young):
        (half / "blobs/sha256").mkdir(parents=True)
        for place in (half / "blobs/sha256", half / "blobs", half):
            os.utime(place, (long_ago, long_ago))
    (young / "blobs/sha256/x").write_text("just now")
    shutil.rmtree(pulled)
    fresh = Images(detect(), tmp_path / "cache")
    await fresh.get("registry.test/group/name:1.2")
    assert {path.name for path in pulled.parent.iterdir()} == {pulled.name, killed[1].name, young.name}


# Several at once, and half-way


async def test_many_at_once_unpack_once(tmp_path: Path) -> None:
    path = str(docker_archive(tmp_path / "i.tar", [layer([f(f"f{n}", "x") for n in range(500)])]))
    each = [Images(detect(), tmp_path / "cache") for _ in range(4)]
    results = await asyncio.gather(*(images.get(path) for images in each for _ in range(3)))
    assert len({image.lowers for image in results}) == 1
    assert len(os.listdir(results[0].lowers[0])) == 500
    assert os.listdir(tmp_path / "cache/tmp") == []


async def test_a_cancelled_unpacking_ends_its_worker_and_leaves_nothing(
    tmp_path: Path, images: Images
) -> None:
    path = str(docker_archive(tmp_path / "i.tar", [layer([f(f"f{n}", "x" * 100) for n in range(20_000)])]))
    before = children(os.getpid())  # multiprocessing keeps one for as long as we live
    task = asyncio.create_task(images.get(path))
    while not glob.glob(f"{tmp_path}/cache/tmp/*/*/root/*"):
        assert not task.done(), "it was too fast to be cancelled"
        await asyncio.sleep(0.002)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert list((tmp_path / "cache/layers").glob("*/*")) == []
    assert set(children(os.getpid())) <= set(before)
    # What the killed worker had half made goes when the next one comes.
    image = await images.get(path)
    assert len(os.listdir(image.lowers[0])) == 20_000
    assert os.listdir(tmp_path / "cache/tmp") == []


def children(pid: int) -> list[int]:
    found: list[int] = []
    for task in os.listdir(f"/proc/{pid}/task"):
        with contextlib.suppress(FileNotFoundError):  # a thread that has ended
            found += map(int, Path(f"/proc/{pid}/task/{task}/children").read_text().split())
    return found


# As an ordinary user


@pytest.fixture
def ordinary() -> Iterator[Ordinary]:
    with make_ordinary() as user:
        yield user


UNPACK = """
import asyncio, json, os, sys
from pathlib import Path
from rlsandbox.backends.local import image as image_module
from rlsandbox.backends.local.ids import detect
from rlsandbox.backends.local.image import Images
from rlsandbox.backends.local import worker
async def main():
    ids = detect()
    image = await Images(ids).get({path!r})
    def see(path):
        s = os.lstat(path)
        return [oct(s.st_mode), s.st_uid, s.st_gid, s.st_rdev]
    found = {{os.path.join(top, n)[len(lower):]: see(os.path.join(top, n))
             for lower in image.lowers for top, ds, fs in os.walk(lower) for n in ds + fs}}
    print(json.dumps([ids.kind, ids.uids, found]))
    await worker.call("remove", {{"path": str(Path(os.environ["RLSANDBOX_HOME"], "cache"))}}, ids)
    print(os.path.exists(os.environ["RLSANDBOX_HOME"] + "/cache"))
asyncio.run(main())
"""
OWNED = [
    [
        d("home/a", 0o700, 1000, 1000),
        f("home/a/f", "1", 0o600, 1000, 50),
        f("suid", "x", 0o4755),
        d("shut", 0o500),
    ],
    [f("home/a/.wh.f"), f("shut/inside", "x", 0o000), f("late", "x", 0o644, 0, 7)],
]


@pytest.mark.parametrize("before", ["", "import signal; signal.signal(signal.SIGCHLD, signal.SIG_IGN)\n"])
def test_a_user_with_a_range_keeps_owners(ordinary: Ordinary, before: str) -> None:
    if shutil.which("newuidmap") is None or not any(
        line.startswith(f"{USER}:") for line in Path("/etc/subuid").read_text().splitlines()
    ):
        pytest.skip("newuidmap (package uidmap) or the user's range in /etc/subuid is missing")
    path = docker_archive(ordinary.place / "i.tar", [layer(entries) for entries in OWNED])
    out = ordinary.program(before + UNPACK.format(path=str(path))).splitlines()
    kind, uids, found = json.loads(out[0])
    start = uids[1][1]
    assert kind == "range"
    assert found["/suid"][:2] == ["0o104755", uids[0][1]]
    assert found["/home/a"][:3] == ["0o40700", start + 999, start + 999]
    assert found["/late"][2] == start + 6
    assert out[1] == "False", "files of foreign ids are removed from within the namespace"


def test_a_user_without_a_range_owns_all(ordinary: Ordinary) -> None:
    path = docker_archive(ordinary.place / "i.tar", [layer(entries) for entries in OWNED])
    hidden = (
        shutil.which("unshare") or "unshare",
        "-m",
        "sh",
        "-c",
        'mount --bind /dev/null /etc/subuid; exec "$@"',
        "sh",
    )
    done = ordinary.run("-c", UNPACK.format(path=str(path)), through=hidden)
    assert done.returncode == 0, done.stderr
    out = done.stdout.splitlines()
    kind, uids, found = json.loads(out[0])
    assert kind == "one"
    assert {(status[1], status[2]) for status in found.values()} == {(uids[0][1], uids[0][1])}
    assert found["/suid"][0] == "0o104755"
    assert out[1] == "False"


UNREADABLE = """
import asyncio, sys
import rlsandbox as rls
from rlsandbox.errors import ImageError
for image in {images!r}:
    with rls.Pool(size=1, config=False) as pool:
        try:
            pool.claim(rls.Task(id="t", image=image), timeout=60)
        except ImageError as error:
            print(error.kind, error.retryable, error.message)
"""


def test_an_image_that_a_user_may_not_read_is_told_at_once(ordinary: Ordinary) -> None:
    shut = ordinary.place / "shut"
    shut.mkdir(mode=0o700)
    archive, packed = (ordinary.place / name for name in ("i.tar", "p.tar.gz"))
    docker_archive(archive, [layer([f("x", "1")])])
    packed.write_bytes(gzip.compress(archive.read_bytes()))
    layout, inner = ordinary.place / "layout", ordinary.place / "inner"
    for directory in (layout, inner):
        oci_layout(directory, [layer([f("x", "1")])])
    layout.chmod(0o700)
    (inner / "index.json").chmod(0o600)
    archive.chmod(0o600)
    packed.chmod(0o600)
    names = [
        str(path) for path in (archive, packed, layout, inner, shut / "i.tar", ordinary.place / ("x" * 300))
    ]
    told = ordinary.program(UNREADABLE.format(images=names)).splitlines()
    assert len(told) == len(names)
    for name, line in zip(names, told, strict=True):
        assert " False " in line
        assert "Permission denied" in line or "File name too long" in line
        assert name[:200] in line


# Inside


@needs_busybox
async def test_an_image_from_inside(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RLSANDBOX_CACHE", str(tmp_path / "cache"))
    path = make_image.residue_image(tmp_path / "image", count=5200)
    backend = Local()
    try:
        async with inside(backend, Spec(image=str(path))) as box:
            assert box.member.facts["workdir"] == "/workspace"
            assert box.env["IMAGE"] == "residue"
            assert await box.out("readlink /bin") == "usr/bin"
            assert int(await box.out("find /opt/data -type f | wc -l")) > 4900
            assert await box.out("cat /opt/data/002/only; ls /opt/data/002") == "this is all\nonly"
            assert (await box.sh("test -e /opt/data/001"))[0] == 1, "deleted by a later layer"
            assert await box.out("stat -c '%a %u %g' /opt/data/003/file-00300") == "600 1000 1000"
            assert await box.out("stat -c '%a %u' /usr/bin/setuid-busybox /home/tester") == "4755 0\n750 1001"
            assert (
                await box.out("cat /etc/hosts")
                == "127.0.0.1\tlocalhost\n::1\tlocalhost ip6-localhost ip6-loopback"
            )
            assert await box.out("id -un; id -u", user="agent") == "agent\n1000"
            assert (await box.sh("echo x > /home/tester/f", user="agent"))[0] != 0
            assert (
                await box.out("echo x > /home/tester/f && stat -c %u /home/tester/f", user="tester") == "1001"
            )
            assert "/root/.profile" not in await box.out("ls -a /root"), "nothing of this machine is in it"
    finally:
        await backend.close()
