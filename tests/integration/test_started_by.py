"""What the trainer was started with (signals ignored or blocked, as by daemons and `nohup`; limits of its own) is no
matter to its sandboxes."""

from __future__ import annotations

import subprocess
import sys

import pytest

from rlsandbox.keeper.build import keeper_binary

POOL = """
import signal, sys
import rlsandbox as rls
with rls.Pool(size=1, config=False) as pool, pool.claim(rls.Task(id="t")) as sandbox:
    print(sandbox.run(["grep", "-E", "Sig(Blk|Ign)", "/proc/self/status"]).check().stdout.split())
    print(sandbox.run("sleep 0.01 & wait $!; echo $?; sh -c 'exit 3'; echo $?").check().stdout.split())
    print(sandbox.run("sleep 100", timeout=0.1).timed_out)
"""
IGNORES = """
import signal
for number in set(range(1, 65)) - {9, 19, 32, 33}:
    signal.signal(number, signal.SIG_IGN)
"""
BLOCKS = """
import signal
signal.pthread_sigmask(signal.SIG_BLOCK, set(range(1, 65)) - {9, 19, 32, 33})
"""


@pytest.mark.parametrize("before", [IGNORES, BLOCKS], ids=["ignores", "blocks"])
def test_signals_that_the_trainer_ignores_or_blocks(before: str) -> None:
    keeper_binary()  # the compiler's time is another test's
    done = subprocess.run([sys.executable, "-c", before + POOL], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    zero = "0000000000000000"
    assert done.stdout.splitlines() == [str(["SigBlk:", zero, "SigIgn:", zero]), str(["0", "3"]), "True"]


LIMITS = """
import resource
for what, most in (("CPU", 600), ("FSIZE", 1 << 20), ("DATA", 1 << 30), ("AS", 4 << 30), ("STACK", 1 << 20)):
    number = getattr(resource, "RLIMIT_" + what)
    resource.setrlimit(number, (most, HARD or resource.getrlimit(number)[1]))
"""
SHOWN = """
import rlsandbox as rls
with rls.Pool(size=1, config=False) as pool, pool.claim(rls.Task(id="t")) as sandbox:
    ask = "for o in t f d v s; do ulimit -$o; done"
    print(*sandbox.run(ask).check().stdout.split())
"""


@pytest.mark.parametrize("hard", ["0", "most"], ids=["soft", "hard"])
def test_limits_that_the_trainer_has(hard: str) -> None:
    if hard == "most" and subprocess.run(["sh", "-c", "ulimit -t 600 && ulimit -t unlimited"]).returncode:
        pytest.skip("hard limits cannot be lifted here: CAP_SYS_RESOURCE is missing")
    code = LIMITS.replace("HARD", hard) + SHOWN
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == ["unlimited"] * 4 + ["8192"]
