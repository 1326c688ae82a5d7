"""Programs that people run in sandboxes and that need more of a system than most: they work."""

from __future__ import annotations

import base64
import hashlib
import io
import os
import shutil
import tarfile
import zipfile
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest

from rlsandbox.spec import Spec
from tests.support.place import PATH, Place, local, place

MODES = ("overlay", "userns")


def needs(*programs: str) -> pytest.MarkDecorator:
    """The host's base shows what is under /usr; what is not there is skipped by name."""
    missing = [name for name in programs if shutil.which(name, path=PATH) is None]
    return pytest.mark.skipif(bool(missing), reason=f"not installed here: {', '.join(missing)}")


@asynccontextmanager
async def sandbox(mode: str, **spec: object) -> AsyncIterator[Place]:
    async with local(mode) as backend, place(backend, Spec(**spec)) as where:  # type: ignore[arg-type]
        yield where


def has_users(where: Place) -> None:
    if where.client.welcome.facts.get("ids") == "one":
        pytest.skip("one uid only here: there is no other user")


def deb() -> bytes:
    """A package of one file and a script that runs at its installation."""

    def tar(files: dict[str, tuple[bytes, int]]) -> bytes:
        held = io.BytesIO()
        with tarfile.open(fileobj=held, mode="w:gz") as archive:
            for name, (data, mode) in files.items():
                info = tarfile.TarInfo(name)
                info.size, info.mode = len(data), mode
                archive.addfile(info, io.BytesIO(data))
        return held.getvalue()

    control = (
        b"Package: rls-hello\nVersion: 1.0\nArchitecture: all\n"
        b"Maintainer: t <t@example.org>\nDescription: hello\n"
    )
    script = b"#!/bin/sh\nid -u > /var/lib/rls-hello\n"
    members = {
        "debian-binary": b"2.0\n",
        "control.tar.gz": tar({"./control": (control, 0o644), "./postinst": (script, 0o755)}),
        "data.tar.gz": tar({"./opt/rls-hello": (b"#!/bin/sh\necho hello\n", 0o755)}),
    }  # fmt: skip
    out = b"!<arch>\n"
    for name, data in members.items():
        out += (
            f"{name:<16}{0:<12}{0:<6}{0:<6}{'100644':<8}{len(data):<10}`\n".encode()
            + data
            + b"\n" * (len(data) % 2)
        )
    return out


@pytest.mark.skipif(
    os.geteuid() != 0,
    reason="to an ordinary user's sandbox the machine's /usr and package records are nobody's: use an image",
)
@needs("dpkg", "dpkg-deb")
@pytest.mark.parametrize("mode", MODES)
async def test_dpkg_installs_and_removes_a_package(mode: str) -> None:
    async with sandbox(mode) as where:
        await where.put("/tmp/hello.deb", deb(), 0o644)
        ran = await where.sh(
            "dpkg -i /tmp/hello.deb && /opt/rls-hello && cat /var/lib/rls-hello && dpkg -s rls-hello"
        )
        assert ran.code == 0, ran
        assert "hello\n0\n" in ran.out
        assert "Status: install ok installed" in ran.out
        ran = await where.sh("dpkg -r rls-hello && test ! -e /opt/rls-hello")
        assert ran.code == 0, ran


@needs("su")
@pytest.mark.parametrize("mode", MODES)
async def test_su_to_another_user(mode: str) -> None:
    async with sandbox(mode) as where:
        has_users(where)
        ran = await where.sh("su user -c 'id -un; id -u; echo $HOME; touch ~/mine && stat -c %U ~/mine'")
        assert ran.out.split() == ["user", "1000", "/home/user", "user"], ran


@needs("strace")
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("user", [None, "user"])
async def test_strace_of_a_child(mode: str, user: str | None) -> None:
    async with sandbox(mode) as where:
        if user:
            has_users(where)
        ran = await where.sh(
            "strace -f -o /tmp/log sh -c 'cat /etc/hostname' && grep -c openat /tmp/log", user=user
        )
        assert ran.code == 0, ran


@needs("gdb")
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("user", [None, "user"])
async def test_gdb_of_a_child(mode: str, user: str | None) -> None:
    async with sandbox(mode) as where:
        if user:
            has_users(where)
        ran = await where.sh(
            "gdb -batch -nx -ex 'break exit' -ex run -ex bt --args sleep 0", user=user, env={"HOME": "/tmp"}
        )
        assert "exited normally" in ran.out or "Breakpoint 1" in ran.out, ran
        attach = "sleep 600 & gdb -batch -nx -p $! -ex 'info registers' | grep -E 'rip|pc'; kill $!"
        ran = await where.sh(attach, user=user, env={"HOME": "/tmp"})
        assert ran.out, ran


@needs("node")
@pytest.mark.parametrize("mode", MODES)
async def test_node(mode: str) -> None:
    script = (
        "const {Worker} = require('worker_threads'); const fs = require('fs');"
        "const {execSync} = require('child_process');"
        "new Worker('require(\"worker_threads\").parentPort.postMessage(6 * 7)', {eval: true})"
        ".on('message', m =>"
        " fs.promises.writeFile('/tmp/n', String(m)).then(() => console.log(execSync('cat /tmp/n') + '')))"
    )
    async with sandbox(mode) as where:
        ran = await where.run(["node", "-e", script])
        assert ran.out.strip() == "42", ran


@needs("java")
@pytest.mark.parametrize("mode", MODES)
async def test_java(mode: str) -> None:
    async with sandbox(mode, memory="2GiB") as where:
        ran = await where.run(["java", "-version"])
        assert ran.code == 0, ran
        if shutil.which("javac", path=PATH) is None:
            return
        source = (
            "public class H { public static void main(String[] a) throws Exception {"
            " Thread t = new Thread(() -> System.out.println(6 * 7)); t.start(); t.join(); } }"
        )
        await where.put("/tmp/H.java", source.encode(), 0o644)
        ran = await where.sh("cd /tmp && javac H.java && java H")
        assert ran.out.strip() == "42", ran


@needs("git")
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("user", [None, "user"])
async def test_git_clone_of_a_local_repository(mode: str, user: str | None) -> None:
    script = (
        "set -e; cd ~; git init -q a; cd a; echo one > f; git add f;"
        "git -c user.name=a -c user.email=a@x commit -qm one; cd ..;"
        "git clone -q a b; git clone -q --no-local a c; git clone -q --shared a d;"
        "cat b/f c/f d/f; cd b; git log --oneline | wc -l; git gc -q; git fsck"
    )
    async with sandbox(mode) as where:
        if user:
            has_users(where)
        ran = await where.sh(script, user=user, env={"HOME": "/home/user" if user else "/root"})
        assert ran.out.split()[:4] == ["one", "one", "one", "1"], ran


def wheel() -> tuple[str, bytes]:
    name = "rls_hello-1.0-py3-none-any.whl"
    files = {
        "rls_hello.py": b"def main():\n    print('hello from a wheel')\n",
        "rls_hello-1.0.dist-info/METADATA": b"Metadata-Version: 2.1\nName: rls-hello\nVersion: 1.0\n",
        "rls_hello-1.0.dist-info/WHEEL": b"Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
        "rls_hello-1.0.dist-info/entry_points.txt": b"[console_scripts]\nrls-hello = rls_hello:main\n",
    }
    record = ""
    for path, data in files.items():
        digest = base64.urlsafe_b64encode(hashlib.sha256(data).digest()).rstrip(b"=").decode()
        record += f"{path},sha256={digest},{len(data)}\n"
    files["rls_hello-1.0.dist-info/RECORD"] = (record + "rls_hello-1.0.dist-info/RECORD,,\n").encode()
    held = io.BytesIO()
    with zipfile.ZipFile(held, "w") as archive:
        for path, data in files.items():
            archive.writestr(path, data)
    return name, held.getvalue()


@needs("python3")
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("user", [None, "user"])
async def test_pip_installs_a_wheel_into_a_venv(mode: str, user: str | None) -> None:
    async with sandbox(mode) as where:
        if user:
            has_users(where)
        home = "/home/user" if user else "/root"
        if (await where.run(["python3", "-c", "import ensurepip"])).code != 0:
            pytest.skip("python3 has no ensurepip here (Debian: apt-get install python3-venv)")
        name, data = wheel()
        await where.put(f"/tmp/{name}", data, 0o644)
        ran = await where.sh(
            f"cd && python3 -m venv v && v/bin/pip install -q --no-index /tmp/{name} && v/bin/rls-hello",
            user=user,
            env={"HOME": home},
            cwd=home,
        )
        assert ran.out.strip() == "hello from a wheel", ran


@needs("tar")
@pytest.mark.parametrize("mode", MODES)
async def test_tar_keeps_owners(mode: str) -> None:
    held = io.BytesIO()
    with tarfile.open(fileobj=held, mode="w") as archive:
        for uid, bits in ((0, 0o4755), (1000, 0o640), (65534, 0o600), (4242, 0o2750)):
            info = tarfile.TarInfo(f"f{uid}")
            info.uid = info.gid = uid
            info.mode = bits
            archive.addfile(info)
    async with sandbox(mode) as where:
        has_users(where)
        await where.put("/tmp/o.tar", held.getvalue(), 0o644)
        ran = await where.sh(
            "cd /tmp && tar --numeric-owner -xpf o.tar && stat -c '%n %u %g %a' f0 f1000 f65534 f4242"
        )
        assert ran.out.splitlines() == [
            "f0 0 0 4755",
            "f1000 1000 1000 640",
            "f65534 65534 65534 600",
            "f4242 4242 4242 2750",
        ], ran
