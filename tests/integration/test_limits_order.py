"""Whom the kernel has killed for memory is told right, in whichever order the keeper hears of it."""

from __future__ import annotations

import contextlib
import os
import signal
import time
import uuid
from collections.abc import Iterator

import pytest

import rlsandbox as rls
from tests.support.keepers import cmdline, keeper_of

# argv[1] is there to be found by; takes up argv[2] MiB once it is signalled, and says before that it is up.
HUNGRY = """
import signal, sys, time
signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGUSR1])
print("up", flush=True)
signal.sigwait([signal.SIGUSR1])
x = b"x" * (int(sys.argv[2]) << 20)
time.sleep(60)
"""
HOLDS = """
x = b"x" * (60 << 20)
print("held", flush=True)
input()
print("innocent", flush=True)
"""


@pytest.fixture(scope="module")
def sandbox() -> Iterator[rls.Sandbox]:
    with (
        rls.Pool(size=1, spec=rls.Spec(memory="200MiB"), config=False) as pool,
        pool.claim(rls.Task(id="order"), timeout=60) as lent,
    ):
        if lent.limits.means["memory"] != "cgroup":
            pytest.skip("no cgroup holds the memory limit here: the kernel kills nobody")
        yield lent


class Victim:
    """A command that goes over the limit when it is told to, by a way that the keeper has no part in."""

    def __init__(self) -> None:
        self.mark = uuid.uuid4().hex

    def words(self) -> list[str]:
        return ["python3", "-c", HUNGRY, self.mark, "500"]

    def killed(self) -> None:
        """Once it is up."""
        pid = next(p for p in os.listdir("/proc") if p.isdigit() and cmdline(p)[3:4] == [self.mark])
        os.kill(int(pid), signal.SIGUSR1)
        end = time.monotonic() + 30
        while cmdline(pid):
            assert time.monotonic() < end, "nobody killed it"
            time.sleep(0.005)


@contextlib.contextmanager
def deaf(sandbox: rls.Sandbox) -> Iterator[None]:
    """Meanwhile the keeper hears of nothing; after it, of everything at once."""
    mark = f"sleep 9{uuid.uuid4().int % 10**8}"
    with sandbox.popen(mark.split()) as sleeper:
        keeper = keeper_of(mark, os.getpid())
        sleeper.kill()
    os.kill(keeper, signal.SIGSTOP)
    try:
        yield
    finally:
        os.kill(keeper, signal.SIGCONT)


def up(process: rls.Process) -> None:
    assert next(iter(process))[1] in (b"up\n", b"held\n")


def ended(process: rls.Process) -> tuple[int | None, bool]:
    result = process.wait(timeout=30)
    return result.exit_code, result.oom_killed


def test_who_is_killed_is_told_so_and_not_who_began_last(sandbox: rls.Sandbox) -> None:
    victim = Victim()
    with sandbox.popen(victim.words()) as guilty, sandbox.popen(["python3", "-c", HOLDS]) as other:
        up(guilty)
        up(other)
        with deaf(sandbox):
            victim.killed()
        assert ended(guilty) == (137, True)
        other.write(b"\n")
        assert ended(other) == (0, False)


def test_two_that_are_killed_are_both_told_so(sandbox: rls.Sandbox) -> None:
    one, two = Victim(), Victim()
    with sandbox.popen(one.words()) as first, sandbox.popen(two.words()) as second:
        up(first)
        up(second)
        with deaf(sandbox):
            one.killed()
            two.killed()
        assert ended(first) == ended(second) == (137, True)


def test_a_shell_whose_child_is_killed_ends_beside_another_command(sandbox: rls.Sandbox) -> None:
    victim = Victim()
    with (
        sandbox.popen("read x; echo innocent") as other,
        sandbox.popen(["sh", "-c", '"$@"; sleep 50; echo after', "sh", *victim.words()]) as guilty,
    ):
        up(guilty)
        victim.killed()
        result = guilty.wait(timeout=30)
        assert (result.exit_code, result.oom_killed) == (137, True) and "after" not in result.stdout
        other.write(b"\n")
        assert ended(other) == (0, False)


def test_one_that_ends_meanwhile_is_not_taken_for_the_one_that_was_killed(sandbox: rls.Sandbox) -> None:
    victim = Victim()
    with sandbox.popen(["python3", "-c", HOLDS]) as other, sandbox.popen(victim.words()) as guilty:
        up(other)
        up(guilty)
        other.write(b"\n")
        with deaf(sandbox):
            victim.killed()
        assert ended(other) == (0, False)
        assert ended(guilty) == (137, True)


def test_what_was_killed_before_a_command_is_not_its_doing(sandbox: rls.Sandbox) -> None:
    victim = Victim()
    with sandbox.popen(["sh", "-c", '"$@" & read x', "sh", *victim.words()]) as before:
        up(before)
        before.write(b"\n")
        assert ended(before) == (0, False)
    victim.killed()
    result = sandbox.run("sleep 0.3; echo on")
    assert (result.stdout, result.oom_killed) == ("on\n", False)
