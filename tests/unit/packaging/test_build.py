"""Building the keeper, and the package with the keeper in it."""

from __future__ import annotations

import os
import shutil
import signal
import stat
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest

from rlsandbox.errors import UnsupportedError
from rlsandbox.keeper import build

TREE = Path(__file__).resolve().parents[3]
NO_COMPILER = "no compiler here links statically (Debian: apt-get install gcc libc6-dev)"
needs_compiler = pytest.mark.skipif(build.find_compiler(build.machine()) is None, reason=NO_COMPILER)


@pytest.fixture
def sources(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A keeper of one line, so that compiling takes no time; nothing shipped, an empty cache."""
    place = tmp_path / "src"
    place.mkdir()
    (place / "main.c").write_text("#include <stdio.h>\nint main(void) { puts(RLS_HASH); return 0; }\n")
    (place / "fuzz.c").write_text("#error the fuzzer is no part of the keeper\n")
    monkeypatch.setattr(build, "SOURCE", place)
    monkeypatch.setattr(build, "SHIPPED", tmp_path / "bin")
    monkeypatch.setenv("RLSANDBOX_CACHE", str(tmp_path / "cache"))
    monkeypatch.delenv("RLSANDBOX_KEEPER", raising=False)
    return place


@needs_compiler
def test_a_keeper_is_static_and_knows_its_sources(sources: Path, tmp_path: Path) -> None:
    path = build.keeper_binary()
    assert path.is_relative_to(tmp_path / "cache")
    assert subprocess.run([path], capture_output=True, text=True).stdout.strip() == build.source_digest()
    assert "not a dynamic executable" in subprocess.run(["ldd", path], capture_output=True, text=True).stderr
    made = path.stat().st_mtime_ns
    assert build.keeper_binary() == path
    assert path.stat().st_mtime_ns == made, "made once"


def test_the_real_one_is_small_where_musl_is(tmp_path: Path) -> None:
    compiler = build.find_compiler(build.machine())
    if compiler is None or not ("musl" in compiler[0] or build.ZIG in compiler):
        pytest.skip("neither musl-gcc nor ziglang here")
    assert build.build(build.machine(), tmp_path / "keeper").stat().st_size < 300 << 10


@needs_compiler
def test_a_keeper_is_built_where_nobody_waits_for_children(sources: Path) -> None:
    """Started by a daemon that ignores SIGCHLD: no exit status reaches us, nor the compiler."""
    before = signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    try:
        assert build._call(["/bin/false"]).returncode == 1
        assert build._call(["/nonexistent/cc"]).returncode != 0
        path = build.keeper_binary()
        (sources / "main.c").write_text("int main(void) { return nothing_of_the_kind; }\n")
        with pytest.raises(UnsupportedError, match="nothing_of_the_kind"):
            build.keeper_binary()
    finally:
        signal.signal(signal.SIGCHLD, before)
    assert subprocess.run([path]).returncode == 0


@needs_compiler
def test_changed_sources_make_another_keeper(sources: Path) -> None:
    first = build.keeper_binary()
    (sources / "main.c").write_text("int main(void) { return 7; }\n")
    second = build.keeper_binary()
    assert second != first
    assert subprocess.run([second]).returncode == 7
    (sources / "more.h").write_text("\n")
    assert build.keeper_binary() not in (first, second), "headers count"


@needs_compiler
def test_the_shipped_one_serves_while_it_fits(sources: Path, tmp_path: Path) -> None:
    shipped = build.build_shipped(build.machine())
    assert build.keeper_binary() == shipped
    (sources / "main.c").write_text("int main(void) { return 7; }\n")
    assert build.keeper_binary() != shipped


@needs_compiler
def test_one_for_another_machine_is_only_copied_there(
    sources: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """So it serves without the mode of a program, which some installers do not keep."""
    shipped = build.build_shipped(build.machine())
    shipped.chmod(0o644)
    assert build.keeper_binary() != shipped
    here = build.machine()
    monkeypatch.setattr(build, "machine", lambda: "elsewhere")
    assert build.keeper_binary(here) == shipped


@needs_compiler
def test_the_shipped_one_serves_everybody_whatever_the_installers_umask(
    sources: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Installed by root under 077, run by users; where it cannot be reached all the same, another is made."""
    before = os.umask(0o077)
    try:
        shipped = build.build_shipped(build.machine())
    finally:
        os.umask(before)
    modes = [
        stat.S_IMODE(path.stat().st_mode)
        for path in (shipped.parent, shipped, *shipped.parent.glob("*.digest"))
    ]
    assert modes == [0o755, 0o755, 0o644]
    assert build.keeper_binary() == shipped

    def refused(path: Path, *args: object, **how: object) -> str:
        raise PermissionError(13, "Permission denied", str(path))

    monkeypatch.setattr(Path, "read_text", refused)  # as root there is nothing that cannot be read
    assert build.keeper_binary().is_relative_to(tmp_path / "cache")


@needs_compiler
def test_what_does_not_compile_is_told_and_leaves_nothing(sources: Path, tmp_path: Path) -> None:
    (sources / "main.c").write_text("int main(void) { return missing; }\n")
    with pytest.raises(UnsupportedError, match="missing") as caught:
        build.keeper_binary()
    assert caught.value.kind == "no_keeper"
    assert [path for path in (tmp_path / "cache").rglob("*") if path.is_file()] == []


def test_without_a_compiler_the_error_says_what_to_install(
    sources: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr(build.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(UnsupportedError, match=r"libc6-dev.*pip install ziglang"):
        build.keeper_binary()
    with pytest.raises(UnsupportedError, match="no keeper for architecture 'sparc'"):
        build.keeper_binary("sparc")


def test_a_compiler_that_cannot_link_statically_is_passed_over(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("cc", "gcc"):
        (tmp_path / name).write_text("#!/bin/sh\nexit 1\n")
        (tmp_path / name).chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    monkeypatch.delenv("CC", raising=False)
    monkeypatch.setattr(build.importlib.util, "find_spec", lambda name: None)
    found = build.find_compiler(build.machine())
    assert found is None or found[0] not in ("cc", "gcc")


def test_names_of_architectures() -> None:
    assert build.machine() == {"amd64": "x86_64", "arm64": "aarch64"}.get(
        os.uname().machine, os.uname().machine
    )


@pytest.fixture(scope="module")
def copy(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What is committed or would be: a copy of the tree without what building makes."""
    place = tmp_path_factory.mktemp("tree") / "tree"
    ignored = shutil.ignore_patterns(
        ".git", ".venv*", "bin", "build", "dist", "*.egg-info", "__pycache__", ".*_cache", ".hypothesis"
    )
    shutil.copytree(TREE, place, ignore=ignored, symlinks=True)
    return place


def backend(copy: Path, call: str, **env: str) -> str:
    code = f"import sys; sys.path.insert(0, 'build_backend'); import rlsandbox_build as b; print(b.{call})"
    done = subprocess.run(
        [sys.executable, "-c", code],
        cwd=copy,
        capture_output=True,
        text=True,
        env={**os.environ, **env},
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.strip().splitlines()[-1]


@needs_compiler
def test_a_wheel_carries_the_keeper_and_all_rooms(copy: Path, tmp_path: Path) -> None:
    pytest.importorskip("setuptools")
    name = backend(copy, f"build_wheel({str(tmp_path)!r})")
    assert name.endswith(f"-py3-none-linux_{build.machine()}.whl")
    unpacked = tmp_path / "site"
    with zipfile.ZipFile(tmp_path / name) as wheel:
        names = set(wheel.namelist())
        wheel.extractall(unpacked)
        keeper = f"rlsandbox/keeper/bin/keeper-{build.machine()}"
        (unpacked / keeper).chmod(wheel.getinfo(keeper).external_attr >> 16 & 0o777)  # as pip does
    assert {f"rlsandbox/keeper/bin/keeper-{build.machine()}", "rlsandbox/py.typed"} <= names
    assert "rlsandbox_plugins/__init__.py" in names
    assert {f"rlsandbox/keeper/src/{path.name}" for path in build.sources()} <= names, (
        "for other architectures"
    )
    missing = {
        str(path.relative_to(copy))
        for path in (copy / "rlsandbox").rglob("*")
        if path.is_file() and "bin" not in path.parts and "__pycache__" not in path.parts
    } - names
    assert missing == set(), "package data that no rule names"
    code = "from rlsandbox.keeper.build import keeper_binary; print(keeper_binary())"
    done = subprocess.run(
        [sys.executable, "-c", code],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        env={
            **os.environ,
            "PYTHONPATH": str(unpacked),
            "PATH": "/nonexistent",
            "RLSANDBOX_CACHE": str(tmp_path / "c"),
        },
    )
    assert done.stdout.strip() == str(unpacked / f"rlsandbox/keeper/bin/keeper-{build.machine()}"), (
        done.stderr
    )
    assert not (tmp_path / "c").exists(), "nothing was compiled"


@needs_compiler
def test_the_source_distribution_builds_the_same_wheel(copy: Path, tmp_path: Path) -> None:
    pytest.importorskip("setuptools")
    name = backend(copy, f"build_sdist({str(tmp_path)!r})")
    with tarfile.open(tmp_path / name) as archive:
        names = archive.getnames()
        archive.extractall(tmp_path / "sdist", filter="data")
    assert not any("keeper/bin/" in member for member in names), "no binary travels as source"
    (tree,) = (tmp_path / "sdist").iterdir()
    wheel = backend(tree, f"build_wheel({str(tmp_path)!r})")
    assert wheel.endswith(f"linux_{build.machine()}.whl")


@needs_compiler
def test_zig_is_asked_for_only_where_nothing_else_can(copy: Path, tmp_path: Path) -> None:
    pytest.importorskip("setuptools")
    assert "ziglang" not in backend(copy, "get_requires_for_build_wheel()")
    bare = tmp_path / "path"
    bare.mkdir()
    env = {"PATH": str(bare), "CC": ""}
    # (an installed ziglang would be found as a compiler, as it should)
    code = "_keeper" and "get_requires_for_build_editable()"
    if build.importlib.util.find_spec(build.ZIG) is None:
        assert "ziglang" in backend(copy, code, **env)


@needs_compiler
def test_a_wheel_for_every_platform_carries_what_is_named(copy: Path, tmp_path: Path) -> None:
    pytest.importorskip("setuptools")
    arch = build.machine()
    name = backend(copy, f"build_wheel({str(tmp_path)!r})", RLSANDBOX_KEEPER_ARCHS=arch)
    assert name.endswith("-py3-none-any.whl")
    with zipfile.ZipFile(tmp_path / name) as wheel:
        keepers = [member for member in wheel.namelist() if "/keeper/bin/" in member]
    assert sorted(keepers) == [
        f"rlsandbox/keeper/bin/keeper-{arch}",
        f"rlsandbox/keeper/bin/keeper-{arch}.digest",
    ]


ELF = {"x86_64": 62, "aarch64": 183}
LONG = "compiles zig's C library first, minutes long: RLSANDBOX_TEST_ARCHS=1 (as .ci/run does)"
needs_zig = pytest.mark.skipif(os.environ.get("RLSANDBOX_TEST_ARCHS") != "1", reason=LONG)


def elf_machine(path: Path) -> int:
    head = path.read_bytes()[:20]
    assert head[:4] == b"\x7fELF"
    return int.from_bytes(head[18:20], "little")


@pytest.fixture
def stand_in(tmp_path: Path) -> str:
    """A PATH with a cross compiler for each other architecture: the own one's program, marked as the other's."""
    place = tmp_path / "compilers"
    place.mkdir()
    real = build.find_compiler(build.machine())
    assert real is not None
    for arch in set(build.ARCHITECTURES) - {build.machine()}:
        program = place / f"{arch}-linux-musl-gcc"
        program.write_text(
            f"""#!{sys.executable}
import subprocess, sys
code = subprocess.run([*{real!r}, *sys.argv[1:]]).returncode
if code == 0:
    with open(sys.argv[sys.argv.index("-o") + 1], "r+b") as made:
        made.seek(18)
        made.write(bytes([{ELF[arch]}, 0]))
sys.exit(code)
"""
        )
        program.chmod(0o755)
    return f"{place}:{os.environ['PATH']}"


def check_release_wheel(copy: Path, tmp_path: Path, **env: str) -> None:
    """Build the wheel that carries both, and take each keeper out of it where nothing could compile one."""
    pytest.importorskip("setuptools")
    archs = ",".join(build.ARCHITECTURES)
    name = backend(copy, f"build_wheel({str(tmp_path)!r})", RLSANDBOX_KEEPER_ARCHS=archs, **env)
    assert name.endswith("-py3-none-any.whl"), "one file for every machine"
    site = tmp_path / "site"
    with zipfile.ZipFile(tmp_path / name) as wheel:
        wheel.extractall(site)
        for arch in build.ARCHITECTURES:
            mode = wheel.getinfo(f"rlsandbox/keeper/bin/keeper-{arch}").external_attr >> 16
            assert mode & 0o555 == 0o555, "what pip makes executable"
            (site / f"rlsandbox/keeper/bin/keeper-{arch}").chmod(
                mode & 0o777
            )  # as pip does; zipfile does not
    carried = {path.name for path in (site / "rlsandbox/keeper/bin").iterdir()}
    assert carried == {f"keeper-{arch}{end}" for arch in build.ARCHITECTURES for end in ("", ".digest")}
    code = (
        "import platform, sys; platform.machine = lambda: sys.argv[1]\n"
        "from rlsandbox.keeper.build import keeper_binary\n"
        "print(*[keeper_binary(name) for name in (None, 'x86_64', 'amd64', 'aarch64', 'arm64')], sep='\\n')"
    )
    shipped = {arch: site / f"rlsandbox/keeper/bin/keeper-{arch}" for arch in build.ARCHITECTURES}
    assert {arch: elf_machine(path) for arch, path in shipped.items()} == ELF
    x86, arm = str(shipped["x86_64"]), str(shipped["aarch64"])
    for machine, own in (("x86_64", x86), ("aarch64", arm), ("arm64", arm)):
        done = subprocess.run(
            [sys.executable, "-c", code, machine],
            cwd=tmp_path,
            capture_output=True,
            text=True,
            env={
                **{k: v for k, v in os.environ.items() if k != "RLSANDBOX_KEEPER"},
                "PYTHONPATH": str(site),
                "PATH": "/nonexistent",
                "RLSANDBOX_CACHE": str(tmp_path / "cache"),
            },
        )
        assert done.stdout.split() == [own, x86, x86, arm, arm], done.stderr
    assert not (tmp_path / "cache").exists(), "nothing was compiled"


@needs_compiler
def test_a_release_wheel_carries_both_and_each_machine_takes_its_own(
    copy: Path, tmp_path: Path, stand_in: str
) -> None:
    check_release_wheel(copy, tmp_path, PATH=stand_in)


@needs_zig
def test_a_release_wheel_by_zig(copy: Path, tmp_path: Path) -> None:
    check_release_wheel(copy, tmp_path)


@needs_zig
def test_both_architectures_compile(tmp_path: Path) -> None:
    for arch in build.ARCHITECTURES:
        path = build.build(arch, tmp_path / f"keeper-{arch}")
        assert path.stat().st_size < 300_000, "with musl, as zig has it"
        assert elf_machine(path) == ELF[arch]
