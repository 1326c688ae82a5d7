"""Layers copied out of the places that made them: exact, each content once, never half."""

from __future__ import annotations

import asyncio
import io
import os
import random
import tarfile
import time
from collections.abc import AsyncGenerator, Awaitable, Callable
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from rlsandbox.backends.copies import LARGE, LayerCopies
from rlsandbox.errors import ConfigError, SandboxError


def tar_of(files: dict[str, bytes], **how: object) -> bytes:
    out = io.BytesIO()
    with tarfile.open(fileobj=out, mode="w", format=tarfile.PAX_FORMAT) as tar:
        for name, data in files.items():
            info = tarfile.TarInfo(name)
            info.size = len(data)
            info.pax_headers = {"SCHILY.xattr.user.note": "x" * 700} if how.get("xattrs") else {}
            tar.addfile(info, io.BytesIO(data))
        link = tarfile.TarInfo("link")
        link.type, link.linkname = tarfile.SYMTYPE, "a"
        tar.addfile(link)
    return out.getvalue()


async def stream(data: bytes, cuts: list[int] | None = None) -> AsyncGenerator[bytes, None]:
    at = 0
    for cut in [*(cuts or [32768]), 1 << 30]:
        while at < len(data):
            yield data[at : at + cut]
            at += cut
            if cuts is not None:
                break


async def whole(copies: LayerCopies, layer: str) -> bytes:
    return b"".join([piece async for piece in copies.read(layer)])


def run(body: Callable[[], Awaitable[None]]) -> None:
    async def main() -> None:
        async with asyncio.timeout(60):
            await body()

    asyncio.run(main())


def files_in(path: Path) -> list[str]:
    return sorted(str(p.relative_to(path)) for p in path.rglob("*") if p.is_file() and p.name != "lock")


BIG = random.Random(1).randbytes(LARGE * 3 + 77)


def test_what_comes_back_is_what_went_in_and_content_lies_once(tmp_path: Path) -> None:
    async def body() -> None:
        copies = LayerCopies(tmp_path, "r")
        first = tar_of({"a": b"small", "big": BIG, "again": BIG}, xattrs=True)
        second = tar_of({"b": b"else", "x/big": BIG})
        await copies.save("s1", stream(first))
        await copies.save("s2", stream(second, [1, 511, 513, 100, 7]))
        assert await whole(copies, "s1") == first
        assert await whole(copies, "s2") == second
        (root,) = (p for p in tmp_path.iterdir())
        assert len(list((root / "blobs").iterdir())) == 1
        assert len(BIG) < copies.bytes < 2 * len(BIG)
        await copies.drop("s1")
        await copies.drop("s1")
        assert await whole(copies, "s2") == second and "s1" not in copies
        await copies.drop("s2")
        assert not files_in(tmp_path)
        await copies.close()
        assert not list(tmp_path.iterdir())

    run(body)


@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    sizes=st.lists(
        st.sampled_from([0, 1, 511, 512, 513, LARGE - 1, LARGE, LARGE + 1, 3 * LARGE]), max_size=6
    ),
    cuts=st.lists(st.integers(1, 70000), max_size=40),
    xattrs=st.booleans(),
)
def test_any_tar_in_any_pieces(tmp_path: Path, sizes: list[int], cuts: list[int], xattrs: bool) -> None:
    async def body() -> None:
        copies = LayerCopies(tmp_path, "r")
        data = tar_of({f"f{n}": bytes([n + 65]) * size for n, size in enumerate(sizes)}, xattrs=xattrs)
        await copies.save("s", stream(data, cuts))
        assert await whole(copies, "s") == data
        await copies.close()

    run(body)


@pytest.mark.parametrize("at", [100, 512 + 40, 1536, 1536 + LARGE])
def test_a_stream_that_breaks_off_leaves_nothing(tmp_path: Path, at: int) -> None:
    async def body() -> None:
        copies = LayerCopies(tmp_path, "r")
        data = tar_of({"a": b"small", "big": BIG})

        async def broken() -> AsyncGenerator[bytes, None]:
            yield data[:at]
            raise SandboxError("it died", kind="sandbox_died")

        with pytest.raises(SandboxError, match="it died"):
            await copies.save("s", broken())
        assert "s" not in copies and not files_in(tmp_path)

    run(body)


def test_one_that_ends_early_or_is_no_tar(tmp_path: Path) -> None:
    async def body() -> None:
        copies = LayerCopies(tmp_path, "r")
        data = tar_of({"big": BIG})
        for bad in (data[: LARGE * 2], b"9" * 1024, data[:124] + b"zzzzzzzzzzz\0" + data[136:]):
            with pytest.raises(SandboxError) as caught:
                await copies.save("s", stream(bad))
            assert caught.value.kind == "layer_copy"
            assert "s" not in copies and not files_in(tmp_path)

    run(body)


def test_cancelled_in_mid_stream_nothing_is_left(tmp_path: Path) -> None:
    async def body() -> None:
        copies = LayerCopies(tmp_path, "r")
        data = tar_of({"a": BIG, "b": BIG[1:]})

        async def slow() -> AsyncGenerator[bytes, None]:
            yield data[: LARGE * 4]
            await asyncio.sleep(60)

        task = asyncio.create_task(copies.save("s", slow()))
        await asyncio.sleep(0.05)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert not files_in(tmp_path)
        await copies.save("s", stream(data))
        assert await whole(copies, "s") == data

    run(body)


def test_a_damaged_copy_is_no_copy(tmp_path: Path) -> None:
    async def body() -> None:
        copies = LayerCopies(tmp_path, "r")
        await copies.save("s", stream(tar_of({"big": BIG})))
        (root,) = tmp_path.iterdir()
        (blob,) = (root / "blobs").iterdir()
        blob.write_bytes(b"0" + blob.read_bytes()[1:])
        with pytest.raises(SandboxError, match="is damaged"):
            await whole(copies, "s")
        (skeleton,) = (root / "layers").iterdir()
        skeleton.write_bytes(skeleton.read_bytes()[:3])
        with pytest.raises(SandboxError, match="cannot be read"):
            await whole(copies, "s")
        skeleton.unlink()
        with pytest.raises(SandboxError, match="cannot be read"):
            await whole(copies, "s")

    run(body)


def test_places_that_cannot_be_used(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match="cannot be used"):
        LayerCopies(tmp_path / "file", "r")
    pytest.importorskip("fsspec", reason="needs fsspec")
    with pytest.raises(ConfigError, match=r"nowhere://x/r-\w+ cannot be used"):
        LayerCopies("nowhere://x", "r")


def test_an_object_store() -> None:
    fsspec = pytest.importorskip("fsspec", reason="needs fsspec")

    async def body() -> None:
        copies = LayerCopies("memory://layers", "r")
        data = tar_of({"a": b"1", "big": BIG})
        await copies.save("s", stream(data))
        assert await whole(copies, "s") == data
        assert len(fsspec.filesystem("memory").find("/layers")) == 2
        await copies.close()
        assert not fsspec.filesystem("memory").find("/layers")

    run(body)


def test_what_a_dead_run_left_is_removed_and_no_live_one_s(tmp_path: Path) -> None:
    async def body() -> None:
        live = LayerCopies(tmp_path, "live")
        dead = tmp_path / "dead-x"
        (dead / "blobs").mkdir(parents=True)
        (dead / "lock").write_text("")
        for lock in tmp_path.glob("*/lock"):
            os.utime(lock, (time.time() - 3600,) * 2)
        LayerCopies(tmp_path, "new")
        assert not dead.exists()
        await live.save("s", stream(tar_of({})))

    run(body)
