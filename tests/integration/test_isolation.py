"""What an episode tries and must not manage, single system calls and files, each with its positive control.

An attempt counts only when the very same call gets through without the isolation: plainly on this machine
(``plain``; ``root`` where only root can), or in plain namespaces made by unshare(1) (``userns``). One
whose control does not get through fails, unless a reason stands beside it; those are printed at the end.
"""

from __future__ import annotations

import asyncio
import os
import shlex
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from rlsandbox.spec import Spec
from tests.support.host import Ran, compiled, on_host
from tests.support.place import Place, local, place

AS_ROOT = os.geteuid() == 0
REFUSED = frozenset({"EPERM", "EACCES", "ENOSYS", "killed 31"})
NO_WAY = REFUSED | {"ENOENT", "EROFS", "ENXIO", "ENODEV", "ENOTDIR", "ENODATA", "EISDIR"}
NO_PEER = REFUSED | {"ECONNREFUSED", "ENETUNREACH", "EHOSTUNREACH", "ETIMEDOUT", "EINPROGRESS", "ENOENT"}
NO_PROCESS = REFUSED | {"ESRCH"}
NO_FAMILY = REFUSED | {"EAFNOSUPPORT", "ESOCKTNOSUPPORT", "EPROTONOSUPPORT"}

WRAP = {
    "plain": "{}",
    "root": "{}",
    "userns": "unshare -Ur -m -u -i -n -p -f -- sh -c {quoted}",
}
NOT_IN_KERNEL = "this kernel does not have the call"


@dataclass(frozen=True)
class Attempt:
    """``inside``: arguments of trysyscall; ``control``: shell text with $T, by default the same call."""

    name: str
    inside: str
    how: str
    control: str = ""
    refused: frozenset[str] = REFUSED
    without: str = ""
    """Why there may be no control on some machines."""


NEW = {"mount": 0x20000, "cgroup": 0x2000000, "uts": 0x4000000, "ipc": 0x8000000, "user": 0x10000000,
       "pid": 0x20000000, "net": 0x40000000, "time": 0x80}  # fmt: skip

CALLS = [
    Attempt("mount", "mount", "userns"),
    Attempt("bind mount", "bind /etc /tmp", "userns"),
    Attempt("remount /proc/sys", "remount /proc/sys", "userns",
            "mount -t tmpfs -o ro x /tmp && $T remount /tmp"),
    Attempt("umount", "umount /proc", "userns", "mount -t tmpfs x /tmp && $T umount /tmp"),
    Attempt("pivot_root", "pivot_root", "userns"),
    Attempt("chroot", "chroot /tmp", "userns"),
    *(Attempt(f"unshare {name}", f"unshare {flag}", "userns") for name, flag in NEW.items()),
    *(Attempt(f"clone {name}", f"clone {flag}", "userns") for name, flag in NEW.items() if name != "time"),
    Attempt("setns", "setns /proc/self/ns/uts", "userns"),
    Attempt("setns to the first process", "setns /proc/1/ns/mnt", "userns", "$T setns /proc/self/ns/uts"),
    Attempt("clone3", "clone3", "plain"),
    Attempt("open_tree", "open_tree", "userns"),
    Attempt("fsopen", "fsopen", "userns"),
    Attempt("mount_setattr", "mount_setattr", "userns"),
    Attempt("move_mount", "move_mount", "userns"),
    Attempt("bpf", "bpf", "root"),
    Attempt("perf_event_open", "perf", "root"),
    Attempt("keyctl", "keyctl", "plain"),
    Attempt("keyctl join", "keyctl_join", "plain"),
    Attempt("add_key", "add_key", "plain"),
    Attempt("request_key", "request_key", "plain"),
    Attempt("io_uring", "io_uring", "root", without="switched off by kernel.io_uring_disabled"),
    Attempt("kexec", "kexec", "root", without=NOT_IN_KERNEL),
    Attempt("init_module", "init_module", "root", without=NOT_IN_KERNEL),
    Attempt("finit_module", "finit_module", "root", without=NOT_IN_KERNEL),
    Attempt("delete_module", "delete_module", "root", without=NOT_IN_KERNEL),
    Attempt("userfaultfd", "userfaultfd", "root"),
    Attempt("open by handle", "handle /usr", "root"),
    Attempt("reboot", "reboot", "userns"),
    Attempt("swapon", "swapon", "root", refused=REFUSED),
    Attempt("settimeofday", "settimeofday", "root"),
    Attempt("clock_settime", "clock_settime", "root"),
    Attempt("adjtimex", "adjtimex", "root"),
    Attempt("acct", "acct", "root"),
    Attempt("syslog", "syslog", "root"),
    Attempt("quotactl", "quotactl", "root"),
    Attempt("fanotify", "fanotify", "root"),
    Attempt("sethostname", "sethostname", "userns"),
    Attempt("setdomainname", "setdomainname", "userns"),
    Attempt("block device node", "mknod_block", "root"),
    Attempt("/dev/mem node", "mknod_mem", "root"),
    Attempt("iopl", "iopl", "root", without=NOT_IN_KERNEL),
    Attempt("ioperm", "ioperm", "root", without=NOT_IN_KERNEL),
    Attempt("TIOCSTI", "tiocsti", "root"),
    Attempt("negative nice", "nice", "root"),
    Attempt("realtime scheduling", "realtime", "root"),
    Attempt("raise a hard limit", "nofile", "root", "prlimit --nofile=100:100 $T nofile",
            without="this machine's root has no CAP_SYS_RESOURCE"),
    Attempt("protect from the OOM killer", "oom", "root",
            without="this machine's root has no CAP_SYS_RESOURCE"),
    Attempt("packet socket", "socket 17 3 0", "userns", refused=NO_FAMILY),
    Attempt("raw socket", "socket 2 3 1", "userns", refused=NO_FAMILY),
    Attempt("vsock", "socket 40 1 0", "plain", refused=NO_FAMILY, without="this kernel has no vsock"),
    Attempt("AF_ALG", "socket 38 5 0", "plain", refused=NO_FAMILY, without="this kernel has no AF_ALG"),
    Attempt("AF_KEY", "socket 15 3 2", "root", refused=NO_FAMILY, without="this kernel has no AF_KEY"),
    Attempt("AF_XDP", "socket 44 3 0", "root", refused=NO_FAMILY, without="this kernel has no AF_XDP"),
    Attempt("configure the loopback", "set_if lo", "userns", refused=NO_FAMILY),
    Attempt("executable data by personality", "personality 0x400000", "plain"),
    Attempt("32-bit system calls", "int80", "plain", without="this kernel has no 32-bit entry",
            refused=REFUSED | {"killed 11"}),
    Attempt("x32 system calls", "x32", "plain", without="this kernel has no x32 entry"),
]  # fmt: skip

WRITE = 1
OPENS = [
    *(
        Attempt(f"write {path}", f"open {path} {WRITE}", "root", refused=NO_WAY)
        for path in (
            "/proc/sys/kernel/core_pattern", "/proc/sys/kernel/hostname", "/proc/sys/kernel/modprobe",
            "/proc/sys/kernel/sysrq", "/proc/sys/vm/drop_caches", "/proc/sys/vm/overcommit_memory",
            "/proc/sys/net/ipv4/ip_forward", "/proc/sys/fs/binfmt_misc/register", "/proc/sysrq-trigger",
            "/proc/irq/default_smp_affinity", "/proc/bus/pci/00/00.0", "/sys/kernel/uevent_helper",
            "/sys/kernel/mm/transparent_hugepage/enabled", "/sys/power/state", "/dev/kmsg", "/dev/mem",
            "/dev/port", "/dev/vda", "/dev/sda", "/dev/nvme0n1", "/dev/loop0", "/dev/loop-control",
            "/dev/fuse",
            "/dev/kvm", "/dev/vsock", "/dev/net/tun", "/dev/tty0", "/dev/console", "/dev/ttyS0", "/dev/hwrng",
            "/dev/userfaultfd", "/dev/zram0", "/dev/btrfs-control", "/dev/autofs", "/dev/cpu_dma_latency",
            "/sys/fs/cgroup/release_agent", "/sys/fs/cgroup/memory/release_agent",
            "/sys/fs/cgroup/cgroup.procs",
            "/sys/fs/cgroup/memory/cgroup.procs", "/sys/fs/cgroup/unified/cgroup.procs",
        )
    ),
    *(
        Attempt(f"read {path}", f"read {path}", "root", refused=NO_WAY)
        for path in (
            "/proc/kcore", "/proc/kmsg", "/proc/timer_list", "/proc/key-users", "/proc/sched_debug",
            "/dev/mem",
            "/dev/vda", "/proc/slabinfo", "/proc/vmallocinfo", "/proc/pagetypeinfo",
            "/sys/kernel/notes", "/sys/kernel/vmcoreinfo",
        )
    ),
]  # fmt: skip


class Report:
    """Attempts without a control, told once at the end."""

    def __init__(self) -> None:
        self.without: dict[str, str] = {}


@pytest.fixture(scope="module")
def report(request: pytest.FixtureRequest) -> Iterator[Report]:
    held = Report()
    yield held
    capture = request.config.pluginmanager.getplugin("capturemanager")
    with capture.global_and_fixture_disabled():
        print(f"\nisolation attempts without a positive control here: {len(held.without)}")
        for name, why in sorted(held.without.items()):
            print(f"  {name}: {why}")


@pytest.fixture(scope="module")
def program(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = compiled("trysyscall", tmp_path_factory.mktemp("trysyscall"))
    if made is None:
        pytest.skip("no C compiler that can link statically (Debian: apt-get install gcc libc6-dev)")
    made.parent.chmod(0o755)
    return made


def control_of(attempt: Attempt, program: Path) -> str | None:
    """What the control run says; None when it cannot even be tried here."""
    if attempt.how == "root" and not AS_ROOT:
        return None
    text = (attempt.control or f"$T {attempt.inside}").replace("$T", shlex.quote(str(program)))
    command = WRAP[attempt.how].format(text, quoted=shlex.quote(text))
    done = on_host(["sh", "-c", command])
    return done.said.splitlines()[-1] if done.said else "nothing"


def why_no_control(attempt: Attempt) -> str:
    if attempt.how == "root" and not AS_ROOT:
        return "only root has a control: run the suite as root, too"
    words = attempt.inside.split()
    if words[0] in ("open", "read") and not os.path.exists(words[1]):
        return "this machine has no such file"
    if words[0] in ("open", "read") and words[1].startswith("/dev/"):
        return "the device is not for this machine's root either"
    return attempt.without


async def judge(where: Place, attempts: list[Attempt], user: str | None) -> list[str]:
    """One line for every attempt that was not refused."""
    managed = []
    for attempt in attempts:
        ran = await where.run(["/try", *attempt.inside.split()], user=user)
        if ran.said not in attempt.refused:
            managed.append(f"{attempt.name}: {ran.said or ran}")
    return managed


def modes() -> list[str]:
    return ["overlay", "userns"]


@pytest.mark.parametrize("attempt", CALLS + OPENS, ids=lambda a: a.name)
def test_the_control_gets_through_or_a_reason_is_told(
    attempt: Attempt, program: Path, report: Report
) -> None:
    said = control_of(attempt, program)
    if said is not None and said not in attempt.refused and said != "nothing":
        return
    reason = why_no_control(attempt)
    assert reason, f"the control of {attempt.name!r} does not get through ({said}): the attempt shows nothing"
    report.without[attempt.name] = f"{reason} ({said})" if said else reason


@pytest.mark.parametrize("mode", modes())
@pytest.mark.parametrize("user", [None, "1000"], ids=["as root", "as another user"])
async def test_calls_and_files_are_refused(mode: str, user: str | None, program: Path) -> None:
    async with local(mode) as backend, place(backend) as where:
        if user is not None and where.client.welcome.facts.get("ids") == "one":
            pytest.skip("one uid only here: there is no other user")
        assert where.mode == mode
        await where.put("/try", program.read_bytes())
        assert await judge(where, CALLS + OPENS, user) == []


class Host:
    """What this machine has that no episode may reach."""

    def __init__(self, tmp_path: Path) -> None:
        self.sleeper = subprocess.Popen(["sleep", "600"])
        self.directory = tmp_path

    def close(self) -> None:
        self.sleeper.kill()
        self.sleeper.wait()


@pytest.fixture
def host(tmp_path: Path) -> Iterator[Host]:
    made = Host(tmp_path)
    yield made
    made.close()


def process_attempts(pid: int) -> list[Attempt]:
    words = (f"kill {pid} 0", f"ptrace {pid}", f"vm_read {pid}", f"pidfd_getfd {pid}", f"kcmp {pid}")
    return [Attempt(w, w, "plain", refused=NO_PROCESS, without=NOT_IN_KERNEL) for w in words]


@pytest.mark.parametrize("mode", modes())
async def test_processes_of_the_machine_are_out_of_reach(mode: str, program: Path, host: Host) -> None:
    attempts = process_attempts(host.sleeper.pid)
    for attempt in attempts:
        said = control_of(attempt, program)
        assert said not in attempt.refused, f"no control for {attempt.name}: {said}"
    async with local(mode) as backend, place(backend) as where:
        await where.put("/try", program.read_bytes())
        for pid in (host.sleeper.pid, os.getpid(), os.getppid()):
            # a process of the episode may have this very number in the episode's own numbering
            if (await where.sh(f"test -e /proc/{pid}")).code == 0 and pid < 1000:
                continue
            assert await judge(where, process_attempts(pid), None) == []
        await where.sh("kill -9 -1")
        assert host.sleeper.poll() is None
        assert (await where.sh("echo alive")).out == "alive\n"
        seen = (await where.sh("cat /proc/[0-9]*/cmdline | tr '\\0' ' '")).out
        assert "sleep 600" not in seen
        assert "pytest" not in seen
        assert "sleep 600" in on_host(["sh", "-c", "cat /proc/[0-9]*/cmdline | tr '\\0' ' '"]).out


@pytest.mark.parametrize("mode", modes())
async def test_sockets_of_the_machine_are_out_of_reach(mode: str, program: Path, tmp_path: Path) -> None:
    async def greet(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.close()

    import socket

    inet = await asyncio.start_server(greet, "127.0.0.1", 0)
    port = inet.sockets[0].getsockname()[1]
    abstract = socket.socket(socket.AF_UNIX)
    abstract.bind(f"\0rls-isolation-{os.getpid()}")
    abstract.listen()
    file = Path(f"/tmp/rls-isolation-{os.getpid()}.sock")
    by_path = socket.socket(socket.AF_UNIX)
    by_path.bind(str(file))
    by_path.listen()
    attempts = [
        Attempt("host loopback", f"connect 127.0.0.1 {port}", "plain", refused=NO_PEER),
        Attempt("abstract socket", f"unix @rls-isolation-{os.getpid()}", "plain", refused=NO_PEER),
        Attempt("file socket", f"unix {file}", "plain", refused=NO_PEER),
    ]
    far = Attempt("network", "connect 192.0.2.1 80", "plain", refused=NO_PEER)
    try:
        for attempt in attempts:
            said = await asyncio.to_thread(control_of, attempt, program)
            assert said == "ok", f"no control for {attempt.name}: {said}"
        async with local(mode) as backend, place(backend) as where:
            await where.put("/try", program.read_bytes())
            assert await judge(where, [*attempts, far], None) == []
        async with local(mode) as backend, place(backend, Spec(network="host")) as where:
            await where.put("/try", program.read_bytes())
            # its control from the other side: with the host's network the loopback is the host's
            assert (await where.run(["/try", *attempts[0].inside.split()])).said == "ok"
    finally:
        inet.close()
        abstract.close()
        by_path.close()
        file.unlink()


@pytest.mark.parametrize("mode", modes())
async def test_a_setuid_program_gains_nothing(mode: str, program: Path, tmp_path: Path) -> None:
    async with local(mode) as backend, place(backend) as where:
        if where.client.welcome.facts.get("ids") == "one":
            pytest.skip("one uid only here: there is no other user")
        await where.put("/try", program.read_bytes(), 0o4755)
        made = await where.sh("stat -c %a:%u /try")
        assert made.out.strip() == "4755:0", "the attempt needs a setuid file of the episode's root"
        assert (await where.run(["/try", "euid0"], user="1000")).said == "EPERM"
        assert (await where.run(["/try", "euid0"])).said == "ok"
    if AS_ROOT:
        # control: on a file system that honours setuid the same file gains root
        copy = Path("/var/tmp") / f"rls-setuid-{os.getpid()}"
        copy.write_bytes(program.read_bytes())
        try:
            copy.chmod(0o4755)
            gained: Ran = on_host([str(copy), "euid0"], user=65534, group=65534, extra_groups=[])
            assert gained.said == "ok", f"no control: {gained}"
        finally:
            copy.unlink()
