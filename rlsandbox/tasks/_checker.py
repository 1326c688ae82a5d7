"""Runs hidden checks on a rollout's work: this text with the checks below it is one script.

The work never runs in the process that decides. Its functions are called in a child over a pipe, as
plain data, so that a solution which ends the interpreter, patches ``assert`` or answers with an object that
equals everything gains nothing. The script removes itself before it starts the work, and other
processes of the same user cannot read its memory. (What a root user did to the interpreter itself is
beyond it: ``fresh = true`` grades in a sandbox that the rollout never was in.)

Needs a Python of 3.8 or later in the sandbox, standard library only.
"""

import builtins
import contextlib
import json
import os
import subprocess
import sys
from typing import Any, Callable, Dict, Optional, Tuple, Type, Union  # noqa: UP035 (old Pythons run this)

_CODEC = r"""
class Opaque:
    def __init__(self, text):
        self.text = text

    def __repr__(self):
        return self.text


def pack(value):
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    for tag, kinds in (("l", list), ("t", tuple), ("s", (set, frozenset))):
        if isinstance(value, kinds):
            return [tag] + [pack(item) for item in value]
    if isinstance(value, dict):
        return ["d"] + [[pack(key), pack(item)] for key, item in value.items()]
    if isinstance(value, (bytes, bytearray)):
        return ["b", bytes(value).decode("latin-1")]
    return ["o", repr(value)[:200]]


def unpack(value):
    if not isinstance(value, list):
        return value
    tag, rest = value[0], value[1:]
    if tag == "d":
        return {unpack(key): unpack(item) for key, item in rest}
    if tag == "b":
        return rest[0].encode("latin-1")
    if tag == "o":
        return Opaque(rest[0])
    return {"l": list, "t": tuple, "s": set}[tag](unpack(item) for item in rest)
"""

_SERVE = r"""
import json, os, sys

path, inward, outward = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
sys.path.insert(0, os.path.dirname(os.path.abspath(path)))
space = {"__name__": "solution", "__file__": path}
loaded = False
with os.fdopen(inward) as requests, os.fdopen(outward, "w") as answers:
    for line in requests:
        name, args, options = unpack(json.loads(line))
        try:
            if not loaded:
                with open(path, encoding="utf-8") as file:
                    exec(compile(file.read(), path, "exec"), space)
                loaded = True
            answer = ["ok", pack(space[name](*args, **options))]
        except Exception as error:
            answer = ["error", type(error).__name__, str(error)[:500]]
        answers.write(json.dumps(answer) + "\n")
        answers.flush()
"""

_codec: dict[str, Any] = {}
exec(_CODEC, _codec)


def _guard() -> None:
    with contextlib.suppress(OSError):
        try:
            os.unlink(__file__)
        except PermissionError:  # a directory of ours that the work has made read-only
            os.chmod(os.path.dirname(os.path.abspath(__file__)), 0o700)
            os.unlink(__file__)
    with contextlib.suppress(ImportError, OSError, AttributeError):
        import ctypes

        ctypes.CDLL(None).prctl(4, 0, 0, 0, 0)  # PR_SET_DUMPABLE


class module:
    """The functions of the Python file *path*; each call runs in a child that imports the file once."""

    def __init__(self, path: str) -> None:
        self._path = path
        to_child, from_child = os.pipe(), os.pipe()
        ends = (to_child[0], from_child[1])
        argv = [sys.executable, "-I", "-B", "-c", _CODEC + _SERVE, path, *map(str, ends)]
        self._child = subprocess.Popen(argv, stdin=subprocess.DEVNULL, pass_fds=ends)
        for end in ends:
            os.close(end)
        self._requests, self._answers = os.fdopen(to_child[1], "w"), os.fdopen(from_child[0])

    def __getattr__(self, name: str) -> Callable[..., Any]:
        def call(*args: Any, **options: Any) -> Any:
            line = ""
            with contextlib.suppress(BrokenPipeError):
                self._requests.write(json.dumps(_codec["pack"]([name, args, options])) + "\n")
                self._requests.flush()
                line = self._answers.readline()
            if not line:
                sys.exit(f"{self._path}: the interpreter ended in {name}()")
            answer = json.loads(line)
            if answer[0] == "ok":
                return _codec["unpack"](answer[1])
            kind = getattr(builtins, answer[1], None)
            if not (isinstance(kind, type) and issubclass(kind, Exception)):
                raise RuntimeError(f"{answer[1]}: {answer[2]}")
            try:
                error = kind(answer[2])
            except TypeError:  # UnicodeDecodeError and its like want more
                error = RuntimeError(f"{answer[1]}: {answer[2]}")
            raise error

        return call


class run:
    """A finished program: ``code``, ``out``, ``err``."""

    def __init__(
        self,
        *argv: str,
        stdin: str = "",
        timeout: float = 20,
        env: Optional[Dict[str, str]] = None,  # noqa: UP006, UP045
        cwd: Optional[str] = None,  # noqa: UP045
    ) -> None:
        done = subprocess.run(
            argv,
            input=stdin.encode(),
            capture_output=True,
            timeout=timeout,
            env=None if env is None else dict(os.environ, **env),
            cwd=cwd,
        )
        self.code = done.returncode
        self.out, self.err = done.stdout.decode(errors="replace"), done.stderr.decode(errors="replace")


def raises(
    kind: Union[Type[Exception], Tuple[Type[Exception], ...]],  # noqa: UP006, UP007
    function: Callable[..., Any],
    *args: Any,
) -> bool:
    """Whether *function* raises *kind* for *args*."""
    try:
        function(*args)
    except kind:
        return True
    return False


def write(path: str, text: str) -> None:
    """Make a file for the checks, with its directories."""
    if os.path.dirname(path):
        os.makedirs(os.path.dirname(path), exist_ok=True)
    with open(path, "w", encoding="utf-8") as file:
        file.write(text)


def read(path: str) -> str:
    """The text of a file of the work."""
    with open(path, encoding="utf-8", errors="replace") as file:
        return file.read()


if __name__ == "__main__":
    _guard()
