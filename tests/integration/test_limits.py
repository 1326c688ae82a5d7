"""Limits hold, by whichever means this machine has, and the sandbox outlives reaching them."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

import rlsandbox as rls

STORM = """
import os, time
while True:
    try:
        os.fork()
    except OSError:
        time.sleep(0.01)
"""


@pytest.fixture(scope="module")
def sandbox() -> Iterator[rls.Sandbox]:
    spec = rls.Spec(memory="200MiB", pids=64, cpu=0.5)
    with (
        rls.Pool(size=1, spec=spec, config=False) as pool,
        pool.claim(rls.Task(id="limits"), timeout=60) as lent,
    ):
        yield lent


def python(code: str) -> list[str]:
    return ["python3", "-c", code]


def test_who_holds_which_limit_is_said(sandbox: rls.Sandbox) -> None:
    means = sandbox.limits.means
    assert means["memory"] in ("cgroup", "watchdog")
    assert means["pids"] in ("cgroup", "rlimit")
    assert means["cpu"] in ("cgroup", "none")
    assert means["nofile"] == "rlimit"
    assert means["disk"] == "tmpfs"


def test_over_memory_the_command_ends_and_the_sandbox_lives(sandbox: rls.Sandbox) -> None:
    result = sandbox.run(python("x = bytearray(500 << 20); print('held')"))
    assert (result.exit_code, result.oom_killed) == (137, True)
    assert "held" not in result.stdout
    assert sandbox.run("echo on").stdout == "on\n"


def test_a_shell_whose_child_went_over_memory_ends_with_it(sandbox: rls.Sandbox) -> None:
    result = sandbox.run("python3 -c 'x = bytearray(500 << 20)'; sleep 5; echo after")
    assert (result.exit_code, result.oom_killed) == (137, True)
    assert "after" not in result.stdout


def test_processes_count_together(sandbox: rls.Sandbox) -> None:
    one = "python3 -c 'import time; x = bytearray(60 << 20); time.sleep(60)'"
    result = sandbox.run(f"for i in 1 2 3 4 5 6; do {one} & done; wait; echo all", timeout=50)
    assert (result.exit_code, result.oom_killed) == (137, True)
    assert "all" not in result.stdout


def test_only_the_guilty_command_ends(sandbox: rls.Sandbox) -> None:
    with sandbox.popen("sleep 3; echo innocent") as other:
        assert sandbox.run(python("x = bytearray(500 << 20)")).oom_killed
        result = other.wait(timeout=30)
    assert (result.exit_code, result.stdout, result.oom_killed) == (0, "innocent\n", False)


def test_a_fork_storm_is_held_and_the_sandbox_answers_after_it(sandbox: rls.Sandbox) -> None:
    result = sandbox.run(python(STORM), timeout=2)
    assert result.timed_out
    assert sandbox.run("ls -d /proc/[0-9]* | wc -l").stdout.strip().isdigit()
    count = int(sandbox.run("ls -d /proc/[0-9]* | wc -l").stdout)
    assert count <= 5


def test_the_storm_never_was_larger_than_the_limit(sandbox: rls.Sandbox) -> None:
    code = """
import os, time
made = []
try:
    while len(made) < 500:
        pid = os.fork()
        if pid == 0:
            time.sleep(60)
        made.append(pid)
except OSError:
    pass
print(len(made), flush=True)
for pid in made:
    os.kill(pid, 9)
"""
    made = int(sandbox.run(python(code), timeout=30).stdout)
    assert 40 <= made <= 66


def test_a_full_disk_is_no_space_left(sandbox: rls.Sandbox) -> None:
    for place in ("/tmp", "/dev/shm"):
        result = sandbox.run(f"dd if=/dev/zero of={place}/big bs=1M count=400 2>&1; echo; rm {place}/big")
        assert "No space left" in result.stdout
        assert not result.oom_killed
    assert sandbox.run("echo on > /tmp/small && cat /tmp/small").stdout == "on\n"


def test_cpu_is_shared_out(sandbox: rls.Sandbox) -> None:
    if sandbox.limits.means["cpu"] == "none":
        pytest.skip(
            "no cgroup that may be written here: nothing holds the cpu limit, and limits.means says so"
        )
    code = """
import time
end = time.monotonic() + 2
while time.monotonic() < end:
    pass
print(time.process_time())
"""
    assert (
        float(sandbox.run(python(code)).stdout) <= 1.4
    )  # half a core for two seconds, plus one period's slack


PRLIMIT = """
import resource
for what in range(16):
    try:
        resource.prlimit(1, what, (0, 0))
    except (OSError, ValueError):
        pass
"""
IN_FLIGHT = """
import array, os, socket, time
null, kept = os.open("/dev/null", 0), []
try:
    for n in range(2000):
        a, b = socket.socketpair(socket.AF_UNIX, socket.SOCK_DGRAM)
        a.setblocking(False)
        kept.append((a, b))
        try:
            while True:
                a.sendmsg([b"x"], [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", [null] * 250))])
        except BlockingIOError:
            pass
except OSError as error:
    print(error)
if os.fork() == 0:
    time.sleep(60)
"""


@pytest.mark.parametrize("code", [PRLIMIT, IN_FLIGHT], ids=["limits of the first process", "in flight"])
def test_no_end_that_looks_like_the_machine_s_fault(code: str) -> None:
    """What a rollout does to itself is its own failure: infrastructure's are tried again, and never scored."""
    with rls.Pool(size=1, config=False) as pool, pool.claim(rls.Task(id="t"), timeout=60) as sandbox:
        sandbox.run(python(code), timeout=60)
        for _ in range(3):
            assert sandbox.run("echo on", timeout=20).stdout == "on\n"
        sandbox.write_file("/tmp/f", b"x" * 100_000)
        assert sandbox.run("ulimit -n", timeout=20).stdout.strip() != "0"
