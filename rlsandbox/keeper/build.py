"""Builds the keeper: one static program from the C files in ``src/``.

Used at install by the in-tree build backend, which loads this file by path before the package exists (so: no
imports from the package at module level), and later by :func:`keeper_binary`, which finds a keeper that fits
the sources or makes one. The compiler is ``$CC`` where that is set, else musl's, else the ``ziglang`` wheel
where it is installed (it builds for other architectures too), else the machine's own where it links
statically: with glibc the keeper is three times as large. As a program (``build.py release``) it prints the
flags, for the Makefile.
"""

from __future__ import annotations

import hashlib
import importlib.util
import os
import platform
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Literal

SOURCE = Path(__file__).resolve().parent / "src"
SHIPPED = Path(__file__).resolve().parent / "bin"
ARCHITECTURES = ("x86_64", "aarch64")
LONGEST_S = 1200  # zig compiles its C library first: minutes on a busy machine, once
ZIG = "ziglang"
_SAME = {"amd64": "x86_64", "arm64": "aarch64"}

_FLAGS = ("-std=c11", "-D_GNU_SOURCE", "-Wall", "-Wextra", "-fno-strict-aliasing")
_RELEASE = (
    "-Os",
    "-static",
    "-s",
    "-ffunction-sections",
    "-fdata-sections",
    "-Wl,--gc-sections",
    "-fno-unwind-tables",  # a tenth of the size, and nothing unwinds
    "-fno-asynchronous-unwind-tables",
)
Variant = Literal["release", "skip", "asan"]
VARIANTS: dict[Variant, tuple[str, ...]] = {
    "release": _RELEASE,
    # Leaves out the reset step that RLS_SKIP names: verification's own tests must then find the residue.
    "skip": (*_RELEASE, "-DRLS_SKIP"),
    # Dynamic: the sanitizers' runtime cannot be linked statically.
    "asan": ("-O1", "-g", "-fsanitize=address,undefined", "-fno-sanitize-recover=all"),
}


class KeeperBuildError(RuntimeError):
    """No compiler, or the compiler refused; the message carries what it said."""


def machine() -> str:
    """The machine's own architecture, as the keeper's files are named."""
    name = platform.machine()
    return _SAME.get(name.lower(), name)


def sources() -> list[Path]:
    return sorted(path for path in SOURCE.glob("*.c") if not path.name.startswith("fuzz"))


def source_digest() -> str:
    """16 hex digits over everything that decides what the keeper is: sources, headers, flags."""
    state = hashlib.sha256(repr((_FLAGS, VARIANTS)).encode())
    for path in sorted([*sources(), *SOURCE.glob("*.h")]):
        state.update(path.name.encode() + b"\0" + path.read_bytes() + b"\0")
    return state.hexdigest()[:16]


def compilers(arch: str) -> Iterator[list[str]]:
    """Commands that may compile for *arch*, the best first. None of them has been tried yet."""
    own = arch == machine()
    zig = importlib.util.find_spec(ZIG) is not None
    by_musl = [os.environ.get("CC", "") if own else "", f"{arch}-linux-musl-gcc", "musl-gcc" if own else ""]
    by_glibc = [*(("cc", "gcc", "clang") if own else ()), f"{arch}-linux-gnu-gcc"]
    for command in _found(by_musl):
        yield [*command, *(_kernel_headers() if command[0] == "musl-gcc" else ())]
    if zig:
        yield [sys.executable, "-m", ZIG, "cc", "-target", f"{arch}-linux-musl"]
    yield from _found(by_glibc)


def _found(names: Sequence[str]) -> Iterator[list[str]]:
    for name in names:
        command = name.split()
        if command and shutil.which(command[0]):
            yield command


def _kernel_headers() -> list[str]:
    """Debian's wrapper of gcc for musl does not know where they are."""
    found = _call(["gcc", "-print-multiarch"]).stdout.strip()
    places = ["/usr/include", *([f"/usr/include/{found}"] if found else [])]
    return [word for place in places for word in ("-idirafter", place)]


def links_statically(command: Sequence[str]) -> bool:
    """Whether *command* makes a static program with kernel headers at hand, tried by doing it."""
    text = '#include <stdio.h>\n#include <linux/seccomp.h>\nint main(void) { return puts("") < 0; }\n'
    with tempfile.TemporaryDirectory(prefix="rlsandbox-cc-") as directory:
        program = Path(directory, "t.c")
        program.write_text(text)
        return _call([*command, "-static", "-o", str(program.with_suffix("")), str(program)]).returncode == 0


def find_compiler(arch: str, *, static: bool = True) -> list[str] | None:
    """The first of :func:`compilers` that works for *arch*."""
    for command in compilers(arch):
        if not static and "musl" in command[0]:
            continue  # it has no sanitizers
        if not static or ZIG in command or links_statically(command):
            return command
    return None


def build(arch: str, out: Path, *, variant: Variant = "release") -> Path:
    """Compile the keeper for *arch* into the file *out*, which appears whole or not at all.

    Raises:
        KeeperBuildError: there is no compiler for it, or it failed.
    """
    if arch not in ARCHITECTURES:
        raise KeeperBuildError(f"no keeper for architecture {arch!r}; known: {', '.join(ARCHITECTURES)}")
    files = sources()
    if not files:
        raise KeeperBuildError(f"the keeper's sources are missing from {SOURCE}")
    compiler = find_compiler(arch, static=variant != "asan")
    if compiler is None:
        own = "install gcc with its static C library (Debian: gcc libc6-dev, better musl-tools) or "
        raise KeeperBuildError(
            f"nothing here can compile a static program for {arch}: "
            f"{own if arch == machine() else ''}run: pip install ziglang"
        )
    out.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    half = out.with_name(f".{out.name}.{os.getpid()}.{os.urandom(4).hex()}")
    command = [*compiler, *_FLAGS, *VARIANTS[variant], f'-DRLS_HASH="{source_digest()}"']
    try:
        done = _call([*command, "-o", str(half), *map(str, files)])
        if done.returncode != 0:
            raise KeeperBuildError(f"compiling the keeper for {arch} failed:\n{done.stderr.strip()}")
        half.chmod(0o755)
        half.rename(out)
    finally:
        half.unlink(missing_ok=True)
    return out


def build_shipped(arch: str) -> Path:
    """Compile into the package itself, beside a note of the sources it was made from."""
    SHIPPED.mkdir(exist_ok=True)
    SHIPPED.chmod(0o755)  # whoever may import the package may run it, whatever the installer's umask
    path = build(arch, SHIPPED / f"keeper-{arch}")
    note = SHIPPED / f"keeper-{arch}.digest"
    note.write_text(source_digest() + "\n")
    note.chmod(0o644)
    return path


def keeper_binary(arch: str | None = None, *, variant: Variant = "release") -> Path:
    """A keeper program for *arch* (the machine's own), built from exactly the sources that lie here.

    The one that came with the package when it fits; else one from the cache; else it is compiled into the
    cache, once, which takes about a second with a system compiler.

    Raises:
        UnsupportedError: there is none and none can be made; the hint says what to install.
    """
    from .. import _paths
    from ..errors import UnsupportedError

    arch = machine() if arch is None else _SAME.get(arch, arch)
    override = os.environ.get("RLSANDBOX_KEEPER")
    if override and variant == "release" and arch == machine():
        return Path(override)
    digest = source_digest()
    if variant == "release":
        shipped = SHIPPED / f"keeper-{arch}"
        note = SHIPPED / f"keeper-{arch}.digest"
        wanted = os.X_OK if arch == machine() else os.R_OK  # another machine's is only copied there
        try:
            if note.read_text().strip() == digest and os.access(shipped, wanted):
                return shipped
        except OSError:  # there is none, or none for us
            pass
    cached = (
        _paths.cache() / "keeper" / digest / f"keeper-{arch}{'' if variant == 'release' else '-' + variant}"
    )
    if os.path.exists(cached):  # (what may not be looked at is told next)
        return cached
    _paths.private_directory(cached.parent)
    try:
        return build(arch, cached, variant=variant)
    except KeeperBuildError as error:
        raise UnsupportedError(
            str(error), kind="no_keeper", phase="provision", hint=f"rlsandbox keeper build --arch {arch}"
        ) from error


_DEFAULTS = """
import signal, subprocess, sys
signal.signal(signal.SIGCHLD, signal.SIG_DFL)
code = subprocess.call(sys.argv[2:])
with open(sys.argv[1], "w") as file:
    file.write(str(code))
"""


def _call(command: Sequence[str]) -> subprocess.CompletedProcess[str]:
    """Run *command* to its end. No such program, or too long a time, is told as its failure."""
    try:
        if signal.getsignal(signal.SIGCHLD) != signal.SIG_IGN:
            return _ended(command)
        # Nobody learns how a child of ours ends, and a compiler would inherit that for its own.
        with tempfile.TemporaryDirectory(prefix="rlsandbox-cc-") as directory:
            status = Path(directory, "status")
            done = _ended([sys.executable, "-I", "-S", "-c", _DEFAULTS, str(status), *command])
            done.returncode = int(status.read_text()) if status.exists() else 127
            return done
    except OSError as error:
        return subprocess.CompletedProcess(command, 127, "", str(error))
    except subprocess.TimeoutExpired:
        return subprocess.CompletedProcess(command, 124, "", f"it took over {LONGEST_S} s")


def _ended(command: Sequence[str]) -> subprocess.CompletedProcess[str]:
    return subprocess.run(command, capture_output=True, text=True, timeout=LONGEST_S, check=False)


if __name__ == "__main__":
    print(*_FLAGS, *{str(name): flags for name, flags in VARIANTS.items()}[sys.argv[1]])
