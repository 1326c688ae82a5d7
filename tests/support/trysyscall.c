/* Tries one thing that a sandbox should refuse and says what the kernel answered: "ok", or an errno's name.
 * Usage: trysyscall NAME [ARGUMENT..]; exit status 0: it worked, 1: refused, 2: no such attempt.
 * Static, so that it runs in any root. Where doing it for real would hurt the machine of the control run (modules,
 * kexec, swap), the call carries arguments that fail only after the permission check: another errno than
 * EPERM, EACCES or ENOSYS then tells that the door is open. The clock is set to what it shows. */
#define _GNU_SOURCE
#include <errno.h>
#include <fcntl.h>
#include <linux/bpf.h>
#include <linux/perf_event.h>
#include <net/if.h>
#include <netinet/in.h>
#include <sched.h>
#include <signal.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/ioctl.h>
#include <sys/mount.h>
#include <sys/ptrace.h>
#include <sys/resource.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/time.h>
#include <sys/timex.h>
#include <sys/types.h>
#include <sys/uio.h>
#include <sys/un.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

static const char *arg(int argc, char **argv, int i)
{
    if (i >= argc) {
        fprintf(stderr, "argument %d is missing\n", i);
        exit(2);
    }
    return argv[i];
}
#define A(i) arg(argc, argv, (i))
#define N(i) strtol(A(i), NULL, 0)
#define TRY(name) static long name(int argc, char **argv)
#define UNUSED (void)argc, (void)argv

TRY(t_mount) { UNUSED; mkdir("/tmp/m", 0700); return mount("x", "/tmp/m", "tmpfs", 0, NULL); }
TRY(t_bind) { return mount(A(1), A(2), NULL, MS_BIND, NULL); }
TRY(t_remount) { return mount(NULL, A(1), NULL, MS_REMOUNT | MS_BIND, NULL); }
TRY(t_umount) { return umount2(A(1), MNT_DETACH); }
TRY(t_pivot_root) { UNUSED; return syscall(SYS_pivot_root, ".", "."); }
TRY(t_chroot) { return chroot(A(1)); }
TRY(t_unshare) { return unshare((int)N(1)); }
TRY(t_setns) { int fd = open(A(1), O_RDONLY); return fd < 0 ? -1 : setns(fd, 0); }
TRY(t_clone)
{
    long pid = syscall(SYS_clone, N(1) | SIGCHLD, 0, 0, 0, 0);
    if (pid == 0)
        _exit(0);
    if (pid > 0)
        waitpid((pid_t)pid, NULL, 0);
    return pid;
}
TRY(t_clone3)
{
    UNUSED;
    uint64_t args[11] = {[4] = SIGCHLD}; /* flags pidfd child_tid parent_tid exit_signal .. */
    long pid = syscall(435, args, sizeof args);
    if (pid == 0)
        _exit(0);
    if (pid > 0)
        waitpid((pid_t)pid, NULL, 0);
    return pid;
}
TRY(t_open_tree) { UNUSED; return syscall(428, AT_FDCWD, "/", 1 /* OPEN_TREE_CLONE */); }
TRY(t_fsopen) { UNUSED; return syscall(430, "tmpfs", 0); }
TRY(t_mount_setattr) { UNUSED; uint64_t a[4] = {0}; return syscall(442, AT_FDCWD, "/", 0, a, sizeof a); }
TRY(t_move_mount) { UNUSED; return syscall(429, AT_FDCWD, "/proc", AT_FDCWD, "/tmp", 0); }
TRY(t_bpf)
{
    UNUSED;
    union bpf_attr a = {.map_type = BPF_MAP_TYPE_HASH};
    a.key_size = a.value_size = 4;
    a.max_entries = 1;
    return syscall(SYS_bpf, BPF_MAP_CREATE, &a, sizeof a);
}
TRY(t_perf)
{
    UNUSED;
    struct perf_event_attr a = {.type = PERF_TYPE_SOFTWARE, .size = sizeof a, .config = PERF_COUNT_SW_CPU_CLOCK};
    return syscall(SYS_perf_event_open, &a, 0, -1, -1, 0);
}
TRY(t_keyctl) { UNUSED; return syscall(SYS_keyctl, 0 /* GET_KEYRING_ID */, -4 /* user keyring */, 1); }
TRY(t_keyctl_join) { UNUSED; return syscall(SYS_keyctl, 1 /* JOIN_SESSION_KEYRING */, "rls-test"); }
TRY(t_add_key) { UNUSED; return syscall(SYS_add_key, "user", "rls-test", "x", 1, -2 /* process keyring */); }
TRY(t_request_key) { UNUSED; return syscall(SYS_request_key, "user", "rls-none", NULL, 0); }
TRY(t_io_uring) { UNUSED; char p[120] = {0}; return syscall(425, 1, p); }
TRY(t_kexec) { UNUSED; return syscall(SYS_kexec_load, 0, 17, NULL, 0x7fff0000); }
TRY(t_init_module) { UNUSED; return syscall(SYS_init_module, NULL, 0, NULL); }
TRY(t_finit_module) { UNUSED; return syscall(SYS_finit_module, -1, "", 0); }
TRY(t_delete_module) { UNUSED; return syscall(SYS_delete_module, "rls_no_such_module", O_NONBLOCK); }
TRY(t_userfaultfd) { UNUSED; return syscall(SYS_userfaultfd, 0); }
TRY(t_handle) /* inode 2 of the file system that holds a path: its root, whatever is mounted below */
{
    struct { struct file_handle h; uint32_t ino[2]; } h = {.h.handle_bytes = 8, .h.handle_type = 1, .ino = {2, 0}};
    int fd = open(A(1), O_RDONLY);
    return fd < 0 ? -1 : open_by_handle_at(fd, &h.h, O_RDONLY);
}
TRY(t_reboot) { UNUSED; return syscall(SYS_reboot, 0xfee1dead, 0x28121969, 0x12345678, 0); }
TRY(t_swapon) { UNUSED; return syscall(SYS_swapon, "/rls-no-such-file", 0); }
TRY(t_settimeofday) { UNUSED; struct timeval v; gettimeofday(&v, NULL); return syscall(SYS_settimeofday, &v, NULL); }
TRY(t_clock_settime) { UNUSED; struct timespec v; clock_gettime(CLOCK_REALTIME, &v); return clock_settime(CLOCK_REALTIME, &v); }
TRY(t_adjtimex) { UNUSED; struct timex t = {0}; adjtimex(&t); t.modes = ADJ_TICK; return adjtimex(&t); }
TRY(t_acct) { UNUSED; return syscall(SYS_acct, "/rls-no-such-file"); }
TRY(t_syslog) { UNUSED; return syscall(SYS_syslog, 10 /* size of the buffer */, NULL, 0); }
TRY(t_quotactl) { UNUSED; return syscall(SYS_quotactl, 0x80000100 /* Q_SYNC */, NULL, 0, NULL); }
TRY(t_fanotify) { UNUSED; return syscall(SYS_fanotify_init, 0, O_RDONLY); }
TRY(t_sethostname) { UNUSED; return sethostname("rls-test", 8); }
TRY(t_setdomainname) { UNUSED; return setdomainname("rls-test", 8); }
TRY(t_mknod_block) { UNUSED; unlink("/tmp/rls-b"); long r = mknod("/tmp/rls-b", S_IFBLK | 0600, 0xfe00); int e = errno; unlink("/tmp/rls-b"); errno = e; return r; }
TRY(t_mknod_mem) { UNUSED; unlink("/tmp/rls-c"); long r = mknod("/tmp/rls-c", S_IFCHR | 0600, 0x0101); int e = errno; unlink("/tmp/rls-c"); errno = e; return r; }
TRY(t_iopl) { UNUSED;
#ifdef SYS_iopl
    return syscall(SYS_iopl, 3);
#else
    errno = ENOSYS;
    return -1;
#endif
}
TRY(t_ioperm) { UNUSED;
#ifdef SYS_ioperm
    return syscall(SYS_ioperm, 0x80, 1, 1);
#else
    errno = ENOSYS;
    return -1;
#endif
}
TRY(t_tiocsti)
{
    UNUSED;
    int m = posix_openpt(O_RDWR | O_NOCTTY);
    if (m < 0 || grantpt(m) < 0 || unlockpt(m) < 0)
        return -1;
    char name[64];
    if (ptsname_r(m, name, sizeof name))
        return -1;
    setsid();
    int s = open(name, O_RDWR);
    if (s < 0)
        return -1;
    ioctl(s, TIOCSCTTY, 0);
    char c = 'x';
    return ioctl(s, TIOCSTI, &c);
}
TRY(t_ptrace) { long r = ptrace(PTRACE_SEIZE, (pid_t)N(1), NULL, NULL); return r; }
TRY(t_vm_read)
{
    char c;
    struct iovec l = {&c, 1}, r = {(void *)0x1000, 1};
    return process_vm_readv((pid_t)N(1), &l, 1, &r, 1, 0);
}
TRY(t_kill) { return kill((pid_t)N(1), (int)N(2)); }
TRY(t_pidfd_getfd) { int p = (int)syscall(434, (pid_t)N(1), 0); return p < 0 ? -1 : syscall(438, p, 0, 0); }
TRY(t_kcmp) { return syscall(SYS_kcmp, getpid(), (pid_t)N(1), 1 /* VM */, 0, 0) < 0 ? -1 : 0; }
TRY(t_nice) { UNUSED; return setpriority(PRIO_PROCESS, 0, -20); }
TRY(t_realtime) { UNUSED; struct sched_param p = {1}; return sched_setscheduler(0, SCHED_FIFO, &p); }
TRY(t_nofile) { UNUSED; struct rlimit l; getrlimit(RLIMIT_NOFILE, &l); l.rlim_max += 1; l.rlim_cur = l.rlim_max; return setrlimit(RLIMIT_NOFILE, &l); }
TRY(t_oom) { UNUSED; int fd = open("/proc/self/oom_score_adj", O_WRONLY); return fd < 0 ? -1 : write(fd, "-1000", 5); }
TRY(t_socket) { return socket((int)N(1), (int)N(2), (int)N(3)); }
TRY(t_open) { return open(A(1), (int)N(2) | O_NONBLOCK | O_NOCTTY); }
TRY(t_read) /* a file that is there and empty has been covered */
{
    char c;
    int fd = open(A(1), O_RDONLY | O_NONBLOCK);
    long n = fd < 0 ? -1 : read(fd, &c, 1);
    if (n == 0)
        errno = ENODATA;
    return n > 0 ? 0 : -1;
}
TRY(t_write) { int fd = open(A(1), O_WRONLY); return fd < 0 ? -1 : write(fd, A(2), strlen(A(2))); }
TRY(t_connect)
{
    struct sockaddr_in a = {.sin_family = AF_INET, .sin_port = htons((uint16_t)N(2))};
    unsigned b[4];
    sscanf(A(1), "%u.%u.%u.%u", b, b + 1, b + 2, b + 3);
    a.sin_addr.s_addr = htonl(b[0] << 24 | b[1] << 16 | b[2] << 8 | b[3]);
    int fd = socket(AF_INET, SOCK_STREAM, 0);
    struct timeval t = {3, 0};
    setsockopt(fd, SOL_SOCKET, SO_SNDTIMEO, &t, sizeof t);
    return fd < 0 ? -1 : connect(fd, (void *)&a, sizeof a);
}
TRY(t_unix) /* a leading @ means abstract */
{
    struct sockaddr_un a = {.sun_family = AF_UNIX};
    const char *name = A(1);
    strncpy(a.sun_path, name, sizeof a.sun_path - 1);
    if (name[0] == '@')
        a.sun_path[0] = 0;
    socklen_t n = (socklen_t)(offsetof(struct sockaddr_un, sun_path) + strlen(name) + (name[0] != '@'));
    for (int type = SOCK_STREAM; type <= SOCK_SEQPACKET; type += SOCK_SEQPACKET - SOCK_STREAM) {
        int fd = socket(AF_UNIX, type, 0);
        if (fd < 0)
            return -1;
        if (connect(fd, (void *)&a, n) == 0)
            return 0;
        close(fd);
        if (errno != EPROTOTYPE)
            break;
    }
    return -1;
}
TRY(t_personality) { return syscall(SYS_personality, N(1)) < 0 ? -1 : 0; }
TRY(t_geteuid) { UNUSED; errno = EPERM; return geteuid() == 0 ? 0 : -1; } /* run setuid: did it gain anything? */
TRY(t_set_if) /* the flags it has: allowed or not is what is asked */
{
    struct ifreq r = {0};
    strncpy(r.ifr_name, A(1), IFNAMSIZ - 1);
    int fd = socket(AF_INET, SOCK_DGRAM, 0);
    return fd < 0 || ioctl(fd, SIOCGIFFLAGS, &r) < 0 ? -1 : ioctl(fd, SIOCSIFFLAGS, &r);
}
TRY(t_int80) /* the 32-bit entry: getpid, or a number and a path in the first register of both kinds of calls */
{
#ifdef __x86_64__
    long r, nr = argc > 1 ? atol(argv[1]) : 20;
    const char *path = argc > 2 ? argv[2] : NULL;
    __asm__ volatile("int $0x80" : "=a"(r) : "a"(nr), "b"(path), "D"(path) : "memory", "r8", "r9", "r10", "r11");
    errno = r < 0 ? (int)-r : 0;
    return r < 0 ? -1 : r;
#else
    UNUSED;
    errno = ENOSYS;
    return -1;
#endif
}
TRY(t_x32) { UNUSED; return syscall(0x40000000 | 39 /* getpid */); }

static const struct { const char *name; long (*fn)(int, char **); } table[] = {
    {"mount", t_mount}, {"bind", t_bind}, {"remount", t_remount}, {"umount", t_umount}, {"pivot_root", t_pivot_root},
    {"chroot", t_chroot}, {"unshare", t_unshare}, {"setns", t_setns}, {"clone", t_clone}, {"clone3", t_clone3},
    {"open_tree", t_open_tree}, {"fsopen", t_fsopen}, {"mount_setattr", t_mount_setattr}, {"move_mount", t_move_mount},
    {"bpf", t_bpf}, {"perf", t_perf}, {"keyctl", t_keyctl}, {"keyctl_join", t_keyctl_join}, {"add_key", t_add_key},
    {"request_key", t_request_key}, {"io_uring", t_io_uring}, {"kexec", t_kexec}, {"init_module", t_init_module},
    {"finit_module", t_finit_module}, {"delete_module", t_delete_module}, {"userfaultfd", t_userfaultfd},
    {"handle", t_handle}, {"reboot", t_reboot}, {"swapon", t_swapon}, {"settimeofday", t_settimeofday},
    {"clock_settime", t_clock_settime}, {"adjtimex", t_adjtimex}, {"acct", t_acct}, {"syslog", t_syslog},
    {"quotactl", t_quotactl}, {"fanotify", t_fanotify}, {"sethostname", t_sethostname},
    {"setdomainname", t_setdomainname}, {"mknod_block", t_mknod_block}, {"mknod_mem", t_mknod_mem}, {"iopl", t_iopl},
    {"ioperm", t_ioperm}, {"tiocsti", t_tiocsti}, {"ptrace", t_ptrace}, {"vm_read", t_vm_read}, {"kill", t_kill},
    {"pidfd_getfd", t_pidfd_getfd}, {"kcmp", t_kcmp}, {"nice", t_nice}, {"realtime", t_realtime}, {"nofile", t_nofile},
    {"oom", t_oom}, {"socket", t_socket}, {"open", t_open}, {"read", t_read}, {"write", t_write}, {"connect", t_connect}, {"unix", t_unix},
    {"personality", t_personality}, {"euid0", t_geteuid}, {"set_if", t_set_if}, {"int80", t_int80}, {"x32", t_x32},
};

int main(int argc, char **argv)
{
    for (size_t i = 0; argc > 1 && i < sizeof table / sizeof *table; i++) {
        if (strcmp(table[i].name, argv[1]))
            continue;
        fflush(stdout);
        pid_t child = fork(); /* a filter may kill instead of answering */
        if (child == 0) {
            errno = 0;
            long r = table[i].fn(argc - 1, argv + 1);
            puts(r >= 0 ? "ok" : strerrorname_np(errno) ? strerrorname_np(errno) : "?");
            fflush(stdout);
            _exit(r < 0);
        }
        int status;
        if (child < 0 || waitpid(child, &status, 0) < 0)
            return 2;
        if (WIFSIGNALED(status)) {
            printf("killed %d\n", WTERMSIG(status));
            return 1;
        }
        return WEXITSTATUS(status);
    }
    fprintf(stderr, "no such attempt: %s\n", argc > 1 ? argv[1] : "");
    return 2;
}
