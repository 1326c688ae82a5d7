/* What an episode's processes may ask of the kernel: capabilities and system calls. */
#include <linux/audit.h>
#include <linux/capability.h>
#include <linux/filter.h>
#include <linux/seccomp.h>
#include <sched.h>
#include <stdlib.h>
#include <string.h>
#include <sys/prctl.h>
#include <sys/stat.h>

#include "sandbox.h"
#include "sys.h"

/* CHOWN DAC_OVERRIDE FOWNER FSETID KILL SETGID SETUID SETPCAP NET_BIND_SERVICE */
static const uint64_t CAPS = 1u << 0 | 1u << 1 | 1u << 3 | 1u << 4 | 1u << 5 | 1u << 6 | 1u << 7 | 1u << 8 | 1u << 10;

int caps_drop(struct err *e)
{
    for (unsigned c = 0; c < 64; c++) {
        if (CAPS >> c & 1)
            continue;
        if (prctl(PR_CAPBSET_DROP, c, 0, 0, 0) < 0) {
            if (errno == EINVAL)
                break; /* beyond the kernel's last capability */
            return fail(e, errno, "drop capability %u from the bounding set", c);
        }
    }
    prctl(PR_CAP_AMBIENT, PR_CAP_AMBIENT_CLEAR_ALL, 0, 0, 0);
    struct __user_cap_header_struct h = {_LINUX_CAPABILITY_VERSION_3, 0};
    struct __user_cap_data_struct d[2] = {{(uint32_t)CAPS, (uint32_t)CAPS, 0}, {0, 0, 0}};
    if (syscall(SYS_capset, &h, d) < 0)
        return fail(e, errno, "give up capabilities");
    return 0;
}

#if defined(__x86_64__)
#define ARCH AUDIT_ARCH_X86_64
#define X32 0x40000000u
#elif defined(__aarch64__)
#define ARCH AUDIT_ARCH_AARCH64
#else
#error "no seccomp table for this architecture"
#endif

enum { R_EPERM = SECCOMP_RET_ERRNO | EPERM, R_ENOSYS = SECCOMP_RET_ERRNO | ENOSYS, R_ALLOW = SECCOMP_RET_ALLOW };

/* Refused whatever their arguments. Numbers from 403 up are the same on every architecture. */
static const uint16_t refused[] = {
    SYS_mount, SYS_umount2, SYS_pivot_root, SYS_chroot, SYS_setns, SYS_unshare, 428 /* open_tree */, 429 /* move_mount */,
    430 /* fsopen */, 431 /* fsconfig */, 432 /* fsmount */, 433 /* fspick */, 442 /* mount_setattr */, 467 /* open_tree_attr */,
    SYS_bpf, SYS_perf_event_open, SYS_keyctl, SYS_add_key, SYS_request_key, SYS_kexec_load, SYS_init_module,
    SYS_finit_module, SYS_delete_module, SYS_userfaultfd, SYS_open_by_handle_at, SYS_reboot,
    SYS_swapon, SYS_swapoff, SYS_settimeofday, SYS_clock_settime, SYS_clock_adjtime, SYS_adjtimex, SYS_acct, SYS_syslog,
    SYS_quotactl, 443 /* quotactl_fd */, SYS_fanotify_init, SYS_fanotify_mark, SYS_sethostname, SYS_setdomainname,
    SYS_vhangup, SYS_nfsservctl, SYS_lookup_dcookie,

#ifdef SYS_kexec_file_load
    SYS_kexec_file_load,
#else
    294, /* kexec_file_load on aarch64 */
#endif
#if defined(__x86_64__)
    SYS_iopl, SYS_ioperm, SYS_modify_ldt, SYS_uselib, SYS_ustat, SYS_sysfs, SYS__sysctl, SYS_create_module,
    SYS_get_kernel_syms, SYS_query_module,
#endif
};
static const uint16_t missing[] = {435 /* clone3 */, 425, 426, 427 /* io_uring */};

/* Allowed or not by an argument: its low half, masked, is among the values or not. (Little endian: the low half is first.) */
static const struct check {
    uint16_t nr;
    uint8_t arg, n;
    uint32_t mask, hit, otherwise, value[6];
} checks[] = {
    /* no new namespaces */
    {SYS_clone, 0, 1, CLONE_NEWNS | CLONE_NEWCGROUP | CLONE_NEWUTS | CLONE_NEWIPC | CLONE_NEWUSER | CLONE_NEWPID | CLONE_NEWNET, R_ALLOW, R_EPERM, {0}},
    /* pushing characters into a terminal's input (TIOCSTI); the Linux console's paste (TIOCLINUX) */
    {SYS_ioctl, 1, 2, 0xffffffffu, R_EPERM, R_ALLOW, {0x5412, 0x541c}},
    /* device nodes */
#ifdef SYS_mknod
    {SYS_mknod, 1, 2, S_IFMT, R_EPERM, R_ALLOW, {S_IFCHR, S_IFBLK}},
#endif
    {SYS_mknodat, 2, 2, S_IFMT, R_EPERM, R_ALLOW, {S_IFCHR, S_IFBLK}},
    /* unix, inet, inet6, netlink; other families reach the machine or its hypervisor (vsock) */
    {SYS_socket, 0, 5, 0xffffffffu, R_ALLOW, SECCOMP_RET_ERRNO | EAFNOSUPPORT, {0, 1, 2, 10, 16}},
    /* limits of the episode's first process: it shares the user of the episode's root, and without descriptors it ends, which
     * would look like an accident of the machine's */
    {SYS_prlimit64, 0, 1, 0xffffffffu, R_EPERM, R_ALLOW, {1}},
    /* plain, 32-bit uname, both, no address randomisation (debuggers), query */
    {SYS_personality, 0, 6, 0xffffffffu, R_ALLOW, R_EPERM, {0, 8, 0x20000, 0x20008, 0x40000, 0xffffffffu}},
};

/* Where a pid namespace does not shield its init from those inside (an old gVisor): a signal to it is lost, as Linux has it. The
 * call says that it was sent. */
static const struct check shields[] = {
    {SYS_kill, 0, 1, 0xffffffffu, SECCOMP_RET_ERRNO, R_ALLOW, {1}},
    {SYS_tkill, 0, 1, 0xffffffffu, SECCOMP_RET_ERRNO, R_ALLOW, {1}},
    {SYS_tgkill, 0, 1, 0xffffffffu, SECCOMP_RET_ERRNO, R_ALLOW, {1}},
    {SYS_rt_sigqueueinfo, 0, 1, 0xffffffffu, SECCOMP_RET_ERRNO, R_ALLOW, {1}},
    {SYS_rt_tgsigqueueinfo, 0, 1, 0xffffffffu, SECCOMP_RET_ERRNO, R_ALLOW, {1}},
    {SYS_ptrace, 1, 1, 0xffffffffu, R_EPERM, R_ALLOW, {1}},
    {SYS_process_vm_readv, 0, 1, 0xffffffffu, R_EPERM, R_ALLOW, {1}},
    {SYS_process_vm_writev, 0, 1, 0xffffffffu, R_EPERM, R_ALLOW, {1}},
    /* F_SETSIG: who owns a descriptor (F_SETOWN) is sent that signal; SIGIO, which it is without, the init ignores */
    {SYS_fcntl, 1, 1, 0xffffffffu, R_EPERM, R_ALLOW, {10}},
};

/* The filter is a search tree over stretches of numbers: the kernel runs it once for every number when it is installed, and
 * a list of comparisons made that a fifth of a reset. */
struct stretch {
    uint32_t from; /* up to where the next begins */
    uint32_t action;
    const struct check *check;
};

enum { ROOM = 600, STRETCHES = 2 * (COUNT_OF(refused) + COUNT_OF(missing) + COUNT_OF(checks) + COUNT_OF(shields)) + 3 };
static struct {
    struct sock_filter f[ROOM];
    unsigned n;
    struct stretch s[STRETCHES];
    unsigned ns;
    bool failed;
} prog;

static void op(uint16_t code, uint32_t v, unsigned jt, unsigned jf)
{
    prog.failed |= prog.n == ROOM || jt > 255 || jf > 255;
    if (!prog.failed)
        prog.f[prog.n++] = (struct sock_filter){code, (uint8_t)jt, (uint8_t)jf, v};
}

static void load(size_t at) { op(BPF_LD | BPF_W | BPF_ABS, (uint32_t)at, 0, 0); }
static void ret(uint32_t v) { op(BPF_RET | BPF_K, v, 0, 0); }

static void leaf(const struct stretch *s)
{
    const struct check *c = s->check;
    if (!c) {
        ret(s->action);
        return;
    }
    load(offsetof(struct seccomp_data, args) + 8 * (size_t)c->arg);
    op(BPF_ALU | BPF_AND | BPF_K, c->mask, 0, 0);
    for (unsigned i = 0; i < c->n; i++) {
        op(BPF_JMP | BPF_JEQ | BPF_K, c->value[i], 0, 1);
        ret(c->hit);
    }
    ret(c->otherwise);
}

static void tree(unsigned lo, unsigned hi)
{
    if (hi - lo == 1) {
        leaf(&prog.s[lo]);
        return;
    }
    unsigned mid = lo + (hi - lo) / 2, at = prog.n;
    op(BPF_JMP | BPF_JGE | BPF_K, prog.s[mid].from, 0, 0);
    tree(lo, mid);
    prog.failed |= prog.n - at - 1 > 255;
    if (!prog.failed)
        prog.f[at].jt = (uint8_t)(prog.n - at - 1);
    tree(mid, hi);
}

static int by_number(const void *a, const void *b)
{
    const struct stretch *x = a, *y = b;
    return x->from < y->from ? -1 : x->from > y->from;
}

static void one(uint32_t nr, uint32_t action, const struct check *c)
{
    prog.s[prog.ns++] = (struct stretch){nr, action, c};
}

int seccomp_prepare(struct err *e)
{
    if (prog.n)
        return 0;
    for (size_t i = 0; i < COUNT_OF(refused); i++)
        one(refused[i], R_EPERM, NULL);
    for (size_t i = 0; i < COUNT_OF(missing); i++)
        one(missing[i], R_ENOSYS, NULL);
    for (size_t i = 0; i < COUNT_OF(checks); i++)
        one(checks[i].nr, 0, &checks[i]);
    for (size_t i = 0; shared_mounts && i < COUNT_OF(shields); i++)
        one(shields[i].nr, 0, &shields[i]);
    unsigned numbers = prog.ns;
    qsort(prog.s, numbers, sizeof *prog.s, by_number);
    /* what lies between is allowed */
    one(0, R_ALLOW, NULL);
    for (unsigned i = 0; i < numbers; i++)
        if (i + 1 == numbers || prog.s[i + 1].from != prog.s[i].from + 1)
            one(prog.s[i].from + 1, R_ALLOW, NULL);
#ifdef X32
    one(X32, SECCOMP_RET_KILL_PROCESS, NULL);
#endif
    qsort(prog.s, prog.ns, sizeof *prog.s, by_number);
    load(offsetof(struct seccomp_data, arch));
    op(BPF_JMP | BPF_JEQ | BPF_K, ARCH, 1, 0);
    ret(SECCOMP_RET_KILL_PROCESS);
    load(offsetof(struct seccomp_data, nr));
    tree(0, prog.ns);
    return prog.failed ? fail(e, E2BIG, "write the system call filter") : 0;
}

int seccomp_install(struct err *e)
{
    if (seccomp_prepare(e) < 0)
        return -1;
    if (prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) < 0)
        return fail(e, errno, "set no_new_privs");
    struct sock_fprog p = {(unsigned short)prog.n, prog.f};
    if (syscall(SYS_seccomp, SECCOMP_SET_MODE_FILTER, 0, &p) < 0)
        return fail(e, errno, "install the system call filter");
    return 0;
}
