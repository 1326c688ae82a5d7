"""Public names are there, come from where they are promised, and errors are what callers catch."""

from __future__ import annotations

import builtins
import importlib
import inspect
import pickle
import subprocess
import sys
from pathlib import Path

import pytest

import rlsandbox as rls
from rlsandbox import errors

NAMES = {
    "rlsandbox": """
        AsyncClaim AsyncEpisode AsyncPool AsyncProcess AsyncRollout AsyncSandbox AsyncSandboxes AsyncSession
        AsyncSnapshot Claim CommandResult Episode Failure FileInfo Grader Limits Metrics Outcome Pool
        PoolRef PoolStats Process Record Report Rollout Sandbox SandboxEnv SandboxVectorEnv Sandboxes Series Session Snapshot Spec
        Summary Task hookimpl load_tasks
    """,
    "rlsandbox.backends": "Backend Capabilities Local Member Simulated keeper_binary",
    "rlsandbox.hooks": "Credentials Inspector Resetter Residue Rollout hookimpl hookspec",
    "rlsandbox.metrics": "export_otel serve_prometheus",
    "rlsandbox.testing": "BackendConformance LyingBackend VirtualClock",
}
TREE = {
    "ConfigError": ("SandboxError", "ValueError"),
    "UnsupportedError": ("SandboxError",),
    "PoolClosedError": ("SandboxError", "RuntimeError"),
    "ClaimTimeoutError": ("SandboxError", "TimeoutError"),
    "ProvisionError": ("SandboxError",),
    "ImageError": ("ProvisionError",),
    "PrimeError": ("SandboxError",),
    "SandboxDiedError": ("SandboxError", "ConnectionError"),
    "SandboxStateError": ("SandboxError",),
    "ProcessesRunningError": ("SandboxStateError",),
    "SessionDiedError": ("SandboxError",),
    "CommandError": ("SandboxError",),
    "CommandTimeoutError": ("CommandError", "TimeoutError"),
    "CommandStartError": ("CommandError",),
    "SandboxFileError": ("SandboxError", "OSError"),
}
PAIRS = [
    (rls.Pool, rls.AsyncPool),
    (rls.Sandbox, rls.AsyncSandbox),
    (rls.Session, rls.AsyncSession),
    (rls.Process, rls.AsyncProcess),
    (rls.Snapshot, rls.AsyncSnapshot),
    (rls.Claim, rls.AsyncClaim),
    (rls.Episode, rls.AsyncEpisode),
]
HOOKS = [
    "prime",
    "reset",
    "verify",
    "classify_failure",
    "record",
    "place",
    "issue_credentials",
    "revoke_credentials",
]


@pytest.mark.parametrize(("module", "name"), [(m, n) for m, names in NAMES.items() for n in names.split()])
def test_the_name_is_there(module: str, name: str) -> None:
    assert getattr(importlib.import_module(module), name) is not None


def test_all_is_what_there_is() -> None:
    for name in rls.__all__:
        assert getattr(rls, name) is not None
    assert set(NAMES["rlsandbox"].split()) <= set(rls.__all__)
    with pytest.raises(AttributeError, match="no attribute 'Pol'"):
        _ = rls.Pol


@pytest.mark.parametrize("name", TREE)
def test_an_error_is_what_callers_catch(name: str) -> None:
    cls = getattr(errors, name)
    for base in TREE[name]:
        assert issubclass(cls, getattr(errors, base, None) or getattr(builtins, base))


def test_file_errors_are_the_builtin_ones_too_wherever_they_travel() -> None:
    import errno

    for number, builtin in ((errno.ENOENT, FileNotFoundError), (errno.EACCES, PermissionError)):
        error = errors.file_error(number, "/x")
        for one in (error, pickle.loads(pickle.dumps(error))):
            assert isinstance(one, errors.SandboxFileError)
            assert isinstance(one, builtin)
            assert one.errno == number
            assert one.kind


def test_an_error_made_of_an_error_says_the_same() -> None:
    """Gymnasium's AsyncVectorEnv raises ``type(error)(error)`` for what a worker raised."""
    fields = {
        "kind": "k",
        "phase": "p",
        "retryable": True,
        "infrastructure": False,
        "hint": "do",
        "task": "t",
    }
    made = [getattr(errors, name)("what happened", **fields) for name in TREE if name != "SandboxFileError"]
    made += [errors.LimitReachedError("no more", limit="wall"), errors.file_error(2, "/x", sandbox="s")]
    for error in made:
        again = type(error)(error)
        assert (str(again), again.__dict__) == (str(error), error.__dict__)
        assert getattr(again, "errno", None) == getattr(error, "errno", None)
        assert str(pickle.loads(pickle.dumps(again))) == str(error)


@pytest.mark.parametrize(("sync", "asynchronous"), PAIRS, ids=lambda c: c.__name__)
def test_both_sides_have_the_same_names(sync: type, asynchronous: type) -> None:
    """What one side can do the other can, with the same parameters and defaults."""
    for name, there in inspect.getmembers(sync, inspect.isfunction):
        if not name.startswith("_"):
            here = getattr(asynchronous, name, None)
            assert here is not None, f"{asynchronous.__name__} has no {name}"
            missing = [p for p in _parameters(there) if p not in _parameters(here)]
            assert missing == [], f"{asynchronous.__name__}.{name}"


INTERNAL = {("claim", "rollout"), ("claim", "ahead")}
"""Parameters that other parts of the package pass, and nobody else."""


@pytest.mark.parametrize(("sync", "asynchronous"), PAIRS, ids=lambda c: c.__name__)
def test_both_sides_say_the_same(sync: type, asynchronous: type) -> None:
    """The same parameters in both directions, and documentation that does not send the reader elsewhere."""
    for name, there in inspect.getmembers(asynchronous, inspect.isfunction):
        here = getattr(sync, name, None)
        if name.startswith("_") or here is None:
            continue
        wanted = [p for p in _parameters(there) if (name, p[0]) not in INTERNAL]
        assert _parameters(here) == wanted, f"{sync.__name__}.{name}"
    for name in dir(sync):
        here, there = (inspect.getattr_static(cls, name, None) for cls in (sync, asynchronous))
        if name.startswith("_") or not (
            inspect.isfunction(here) or isinstance(here, (property, classmethod))
        ):
            continue
        own, theirs = inspect.getdoc(here) or "", inspect.getdoc(there) if there is not None else None
        assert own or not theirs, f"{sync.__name__}.{name} says nothing"
        assert "See :meth:`Async" not in own, f"{sync.__name__}.{name}"


def _parameters(function: object) -> list[tuple[str, object, object]]:
    signature = inspect.signature(function)  # type: ignore[arg-type]
    return [(p.name, p.kind, p.default) for p in signature.parameters.values()]


def test_every_hook_is_specified() -> None:
    from rlsandbox.hooks import Specs

    told = {name.removeprefix("rlsandbox_") for name in vars(Specs) if name.startswith("rlsandbox_")}
    assert told == set(HOOKS)


def test_a_backend_that_is_not_installed_is_a_clear_error() -> None:
    """Asking for it by attribute says the same as asking for it by name."""
    try:
        importlib.import_module("rlsandbox.backends.kubernetes")
    except ImportError:
        with pytest.raises(errors.UnsupportedError, match="kubernetes"):
            _ = rls.backends.Kubernetes


def test_looking_around_loads_nothing_large() -> None:
    code = (
        "import sys, rlsandbox; dir(rlsandbox); rlsandbox.Task(id='t'); "
        "print([m for m in ('torch', 'numpy', 'gymnasium', 'matplotlib', 'rich', 'click') if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "[]\n"


ELSEWHERE = """
import fcntl, os, resource, select, selectors, signal, socket, subprocess, sys, threading
sys.platform = "darwin"
for module, names in (
    (os, "pidfd_open memfd_create setns unshare sched_getaffinity sched_setaffinity O_PATH O_TMPFILE getxattr setxattr "
         "listxattr removexattr eventfd EFD_CLOEXEC posix_fadvise splice copy_file_range pipe2 getresuid P_PIDFD"),
    (resource, "prlimit RUSAGE_THREAD RLIMIT_SIGPENDING RLIMIT_MSGQUEUE"),
    (signal, "pidfd_send_signal sigtimedwait SIGRTMIN SIGRTMAX SIGPOLL SIGSTKFLT"),
    (socket, "SO_PEERCRED SO_PASSCRED AF_NETLINK AF_PACKET SOCK_CLOEXEC SOCK_NONBLOCK"),
    (fcntl, "F_ADD_SEALS F_GET_SEALS F_SEAL_WRITE F_SETPIPE_SZ F_GETPIPE_SZ"),
):
    for name in names.split():
        if hasattr(module, name):
            delattr(module, name)
"""


@pytest.mark.parametrize("elsewhere", ["", ELSEWHERE], ids=["here", "as on a Mac"])
def test_importing_it_does_nothing_else(elsewhere: str, tmp_path: Path) -> None:
    """No thread, nothing written, no connection, no program, no plugin, no noise in the log; also on a Mac."""
    code = f"""{elsewhere}
import sys
from pathlib import Path
said = []
def audit(event, args):
    wrote = event == "open" and args[1] and set(args[1]) & set("wxa+")
    if wrote or event.startswith(("socket.", "subprocess.", "os.fork", "os.exec", "os.posix_spawn", "os.mkdir")):
        said.append((event, args))
sys.addaudithook(audit)
sys.dont_write_bytecode = True
import rlsandbox as rls
import importlib.metadata, logging, threading
log = logging.getLogger("rlsandbox")
log.getChild("pool").warning("nobody asked for this")
rls.Task(id="t", spec=rls.Spec(memory="1GiB"))
print(said, threading.active_count(), [type(h).__name__ for h in log.handlers],
      [n for n in sys.modules if n.startswith("rlsandbox_")])
"""
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, cwd=tmp_path, timeout=120
    )
    assert done.stdout == "[] 1 ['NullHandler'] []\n", done.stderr
    assert done.stderr == ""
    assert list(tmp_path.iterdir()) == []
