/* What an episode's processes may ask of the kernel: capabilities and system calls. */
#include <linux/audit.h>
#include <linux/capability.h>
#include <linux/filter.h>
#include <linux/seccomp.h>
#include <sched.h>
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

enum { ROOM = 400 };
struct prog {
    struct sock_filter f[ROOM];
    unsigned n;
};

static void op(struct prog *p, uint16_t code, uint32_t v, uint8_t jt, uint8_t jf)
{
    if (p->n < ROOM)
        p->f[p->n] = (struct sock_filter){code, jt, jf, v};
    p->n++;
}
static void load(struct prog *p, size_t at) { op(p, BPF_LD | BPF_W | BPF_ABS, (uint32_t)at, 0, 0); }
static void ret(struct prog *p, uint32_t v) { op(p, BPF_RET | BPF_K, v, 0, 0); }
static void if_equal_ret(struct prog *p, uint32_t v, uint32_t r)
{
    op(p, BPF_JMP | BPF_JEQ | BPF_K, v, 0, 1);
    ret(p, r);
}
#define ARG_LOW(i) (offsetof(struct seccomp_data, args) + 8 * (i)) /* little endian */
static const size_t NR = offsetof(struct seccomp_data, nr);

/* for one system call: the low half of an argument masked must (not) be among values */
static void check_arg(struct prog *p, uint32_t nr, unsigned arg, uint32_t mask, const uint32_t *v, size_t n, uint32_t hit,
                      uint32_t otherwise)
{
    op(p, BPF_JMP | BPF_JEQ | BPF_K, nr, 0, (uint8_t)(2 + 2 * n + 1));
    load(p, ARG_LOW(arg));
    op(p, BPF_ALU | BPF_AND | BPF_K, mask, 0, 0);
    for (size_t i = 0; i < n; i++)
        if_equal_ret(p, v[i], hit);
    ret(p, otherwise);
}

int seccomp_install(struct err *e)
{
    struct prog p = {.n = 0};
    load(&p, offsetof(struct seccomp_data, arch));
    op(&p, BPF_JMP | BPF_JEQ | BPF_K, ARCH, 1, 0);
    ret(&p, SECCOMP_RET_KILL_PROCESS);
    load(&p, NR);
#ifdef X32
    op(&p, BPF_JMP | BPF_JGE | BPF_K, X32, 0, 1);
    ret(&p, SECCOMP_RET_KILL_PROCESS);
#endif
    for (size_t i = 0; i < COUNT_OF(refused); i++)
        if_equal_ret(&p, refused[i], R_EPERM);
    for (size_t i = 0; i < COUNT_OF(missing); i++)
        if_equal_ret(&p, missing[i], R_ENOSYS);
    /* clone: no new namespaces */
    static const uint32_t zero[] = {0};
    check_arg(&p, SYS_clone, 0, CLONE_NEWNS | CLONE_NEWCGROUP | CLONE_NEWUTS | CLONE_NEWIPC | CLONE_NEWUSER | CLONE_NEWPID | CLONE_NEWNET, zero, 1, R_ALLOW, R_EPERM);
    /* pushing characters into a terminal's input; the Linux console's paste */
    static const uint32_t tty[] = {0x5412 /* TIOCSTI */, 0x541c /* TIOCLINUX */};
    check_arg(&p, SYS_ioctl, 1, 0xffffffffu, tty, 2, R_EPERM, R_ALLOW);
    /* device nodes */
    static const uint32_t dev[] = {S_IFCHR, S_IFBLK};
#ifdef SYS_mknod
    check_arg(&p, SYS_mknod, 1, S_IFMT, dev, 2, R_EPERM, R_ALLOW);
#endif
    check_arg(&p, SYS_mknodat, 2, S_IFMT, dev, 2, R_EPERM, R_ALLOW);
    /* address families: unix, inet, inet6, netlink; others reach the machine or its hypervisor (vsock) */
    static const uint32_t family[] = {0, 1, 2, 10, 16};
    check_arg(&p, SYS_socket, 0, 0xffffffffu, family, 5, R_ALLOW, SECCOMP_RET_ERRNO | EAFNOSUPPORT);
    /* personality: plain, 32-bit uname, no address randomisation (debuggers), query */
    static const uint32_t persona[] = {0, 8, 0x20000, 0x20008, 0x40000, 0xffffffffu};
    check_arg(&p, SYS_personality, 0, 0xffffffffu, persona, 6, R_ALLOW, R_EPERM);
    ret(&p, R_ALLOW);
    if (p.n > ROOM)
        return fail(e, E2BIG, "write the system call filter");
    if (prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) < 0)
        return fail(e, errno, "set no_new_privs");
    struct sock_fprog prog = {(unsigned short)p.n, p.f};
    if (syscall(SYS_seccomp, SECCOMP_SET_MODE_FILTER, 0, &prog) < 0)
        return fail(e, errno, "install the system call filter");
    return 0;
}
