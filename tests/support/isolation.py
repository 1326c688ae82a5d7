"""What an episode tries and must not manage: single system calls and files, and whose processes it may not touch.

An attempt shows something only where its positive control gets through: tests/integration/test_isolation.py.
"""

from __future__ import annotations

from dataclasses import dataclass

from tests.support.place import Place

REFUSED = frozenset({"EPERM", "EACCES", "ENOSYS", "killed 31"})
NO_WAY = REFUSED | {"ENOENT", "EROFS", "ENXIO", "ENODEV", "ENOTDIR", "ENODATA", "EISDIR"}
NO_PEER = REFUSED | {"ECONNREFUSED", "ENETUNREACH", "EHOSTUNREACH", "ETIMEDOUT", "EINPROGRESS", "ENOENT"}
NO_PROCESS = REFUSED | {"ESRCH"}
NO_FAMILY = REFUSED | {"EAFNOSUPPORT", "ESOCKTNOSUPPORT", "EPROTONOSUPPORT"}

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
    Attempt("protect from the OOM killer", "oom", "root", refused=REFUSED | {"EROFS"},
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


def process_attempts(pid: int) -> list[Attempt]:
    words = (f"kill {pid} 0", f"ptrace {pid}", f"vm_read {pid}", f"pidfd_getfd {pid}", f"kcmp {pid}")
    return [Attempt(w, w, "plain", refused=NO_PROCESS, without=NOT_IN_KERNEL) for w in words]


PROC_FILES = (
    "attr/current", "autogroup", "clear_refs", "comm", "coredump_filter", "fail-nth", "gid_map", "loginuid",
    "make-it-fail", "mem", "oom_adj", "oom_score_adj", "projid_map", "sched", "setgroups", "timens_offsets",
    "timerslack_ns", "uid_map", "ns/mnt", "root", "cwd", "exe", "environ", "maps", "map_files", "fd",
    "fdinfo",
    "syscall", "stack", "personality", "io", "auxv",
)  # fmt: skip


async def judge(where: Place, attempts: list[Attempt], user: str | None, program: str = "/try") -> list[str]:
    """One line for every attempt that was not refused; *program* is trysyscall in the sandbox."""
    managed = []
    for attempt in attempts:
        ran = await where.run([program, *attempt.inside.split()], user=user)
        if ran.said not in attempt.refused:
            managed.append(f"{attempt.name}: {ran.said or ran}")
    return managed
