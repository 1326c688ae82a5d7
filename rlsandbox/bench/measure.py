"""What the local benchmark measures, one function a figure; each gives milliseconds of single operations.

Every figure stands beside the plain thing a user would do without sandboxes (``subprocess.Popen``,
``git reset``), measured in the same round on the same machine: the ratio is what can be compared.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from tempfile import TemporaryDirectory

from ..errors import SandboxError
from ..pool.sync import Pool
from ..spec import Spec
from ..task import Task

ECHO = ["/bin/echo", "hi"]
TRUE = ["/bin/true"]
REPOSITORY_FILES = 7000
KERNEL_STACK = 16 << 10
TASK = Task(id="bench")
REST_S = 0.05  # what follows from the removal of a sandbox is over

Clock = Callable[[], float]


def _timed(operation: Callable[[], object], n: int) -> list[float]:
    times = []
    for _ in range(n):
        start = time.perf_counter()
        operation()
        times.append((time.perf_counter() - start) * 1e3)
    return times


def _popen_first_byte() -> float:
    start = time.perf_counter()
    with subprocess.Popen(ECHO, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        process.stdout.read(1)
        return (time.perf_counter() - start) * 1e3


def _claim_first_byte(pool: Pool, task: Task, *, discard: bool = False) -> float:
    start = time.perf_counter()
    sandbox = pool.claim(task, timeout=60)
    process = sandbox.popen(ECHO)
    next(iter(process))
    taken = (time.perf_counter() - start) * 1e3
    process.wait()
    sandbox.release(discard=discard)
    return taken


Pair = tuple[list[float], list[float]]
"""What plain programs took and what ours did, in turns: both meet the same machine and the same caches."""


def warm_first_byte(pool: Pool, n: int) -> Pair:
    """Claim a ready sandbox, start a program in it, read its first byte; and the same by Popen."""
    plain, ours = [], []
    for _ in range(n):
        pool.wait_ready(timeout=60)  # all of them: the reset of the one before is no part of this claim
        plain.append(_popen_first_byte())
        pool.wait_ready(timeout=60)
        ours.append(_claim_first_byte(pool, TASK))
    return plain, ours


def cold_first_byte(n: int, *, alike: bool) -> Pair:
    """The same where no sandbox is ready: it is made for the claim, when the one before is gone.

    Both after the same rest, in turns: what wakes a machine up is part of either.

    Args:
        alike: each wants the same of the machine as the one before, as when a pool grows; else each has
            another limit, so that nothing can have been made ahead for it.
    """
    plain, ours = [], []
    with Pool("local", size=1, max_size=n + 1, config=False) as pool:
        pool.wait_ready(1, timeout=60)
        for i in range(n):
            # a spec of its own each time, so that nothing that is ready fits
            task = Task(id=f"cold-{i}", spec=Spec(labels={"bench": str(i)}, pids=None if alike else 900 + i))
            while pool.stats().terminating:
                time.sleep(0.001)
            time.sleep(REST_S)
            plain.append(_popen_first_byte())
            time.sleep(REST_S)
            ours.append(_claim_first_byte(pool, task, discard=True))
    return plain, ours


def command(pool: Pool, n: int) -> Pair:
    """A command in a claimed sandbox, to its end; and the same by subprocess.run."""
    plain, ours = [], []
    with pool.claim(TASK, timeout=60) as sandbox:
        sandbox.run(ECHO)
        for _ in range(n):
            plain += _timed(lambda: subprocess.run(ECHO, stdout=subprocess.PIPE, check=True), 1)
            ours += _timed(lambda: sandbox.run(ECHO), 1)
    return plain, ours


def resets(pool: Pool, n: int, dirt: str | None) -> list[float]:
    """What a reset takes, after *dirt* (a script) was done in the sandbox."""
    before = len(pool.metrics.reset.values())
    for _ in range(n):
        with pool.claim(TASK, timeout=60) as sandbox:
            if dirt is not None:
                sandbox.run(dirt).check()
        pool.wait_ready(timeout=60)  # one at a time
    deadline = time.monotonic() + 60
    while len(values := pool.metrics.reset.values()) < before + n:
        if time.monotonic() > deadline:
            raise SandboxError("the pool did not report its resets", kind="bench", phase="reset")
        time.sleep(0.01)
    return [value * 1e3 for value in values[before:]]


SMALL_DIRT = "cd /tmp && for i in 1 2 3 4 5 6 7 8 9 10; do echo $i > f$i; done; mkdir d && cp f1 d/"
LARGE_DIRT = (
    "mkdir /tmp/big && cd /tmp/big && i=0; while [ $i -lt 2000 ]; do echo $i > f$i; i=$((i+1)); done; "
    "(sleep 600 &) ; (setsid sleep 600 &)"
)


def git_resets(n: int) -> list[float] | None:
    """``git reset --hard && git clean -fdx`` of a repository with small dirt; None without git."""
    if shutil.which("git") is None:
        return None
    with TemporaryDirectory(prefix="rlsandbox-bench-") as name:
        top = Path(name)
        for i in range(REPOSITORY_FILES):
            file = top / f"d{i % 70}" / f"f{i}.txt"
            file.parent.mkdir(exist_ok=True)
            file.write_text(f"{i}\n")

        def git(*words: str) -> None:
            identity = ("-c", "user.name=bench", "-c", "user.email=bench@example.invalid", "-c", "gc.auto=0")
            subprocess.run(["git", *identity, *words], cwd=top, check=True, stdout=subprocess.DEVNULL)

        git("init", "-q")
        git("add", "-A")
        git("commit", "-q", "-m", "bench")
        times = []
        for _ in range(n):
            for i in range(10):
                (top / f"new{i}").write_text("x")
            (top / "d0" / "f0.txt").write_text("changed\n")
            start = time.perf_counter()
            git("reset", "-q", "--hard")
            git("clean", "-q", "-f", "-d", "-x")
            times.append((time.perf_counter() - start) * 1e3)
        return times


def memory_available() -> int:
    """Bytes that the machine could still give to programs, as the kernel estimates it."""
    with open("/proc/meminfo") as file:
        for line in file:
            if line.startswith("MemAvailable:"):
                return int(line.split()[1]) * 1024
    raise SandboxError("/proc/meminfo does not tell MemAvailable", kind="bench")


def memory_of_children() -> int:
    """Bytes that processes below this one cannot share, with their page tables and kernel stacks.

    Less than the truth (namespaces, mounts and pipes are the kernel's own), but nobody else's doing.
    """
    page, todo, total = os.sysconf("SC_PAGE_SIZE"), [os.getpid()], 0
    while todo:
        pid = todo.pop()
        try:
            below = [int(c) for t in Path(f"/proc/{pid}/task").iterdir() for c in _words(t / "children")]
            if pid != os.getpid():
                _, resident, shared = _words(f"/proc/{pid}/statm")[:3]
                lines = Path(f"/proc/{pid}/status").read_text().splitlines()
                tables = sum(int(line.split()[1]) << 10 for line in lines if line.startswith("VmPTE:"))
                total += (int(resident) - int(shared)) * page + tables + KERNEL_STACK
        except (FileNotFoundError, ProcessLookupError):
            continue  # it has ended meanwhile
        todo += below
    return total


def _words(path: str | Path) -> list[str]:
    return Path(path).read_text().split()


class Held:
    """What holding many idle sandboxes costs, all told: processes, kernel, files, the client's share.

    By what the machine has less of; what others free meanwhile would be taken off that, so it is never less
    than what the sandboxes' own processes hold.
    """

    def __init__(self, n: int, fill_s: float, bytes_: int, claim_ms: list[float]) -> None:
        self.n, self.fill_s, self.bytes, self.claim_ms = n, fill_s, bytes_, claim_ms

    @property
    def mib_each(self) -> float:
        return self.bytes / self.n / (1 << 20)


@contextlib.contextmanager
def _filled(n: int) -> Iterator[tuple[Pool, float, int]]:
    before, below = memory_available(), memory_of_children()
    start = time.perf_counter()
    # claims take no part here, so making them may use all the machine has
    pool = Pool("local", size=n, max_size=n, max_creating=16, config=False)
    try:
        ready = pool.wait_ready(n, timeout=600)
        if ready < n:
            raise SandboxError(f"only {ready} of {n} sandboxes became ready", kind="bench", phase="provision")
        seconds = time.perf_counter() - start
        yield pool, seconds, max(memory_of_children() - below, before - memory_available())
    finally:
        pool.close(timeout=120)


def hold(n: int) -> Held:
    """Fill a pool of *n*, see what it costs, claim and use every tenth."""
    with _filled(n) as (pool, fill_s, bytes_):
        times = []
        for _ in range(max(1, n // 10)):
            start = time.perf_counter()
            with pool.claim(TASK, timeout=60) as sandbox:
                sandbox.run(TRUE).check()
                times.append((time.perf_counter() - start) * 1e3)
        return Held(n, fill_s, bytes_, times)
