/* System calls and constants that older C libraries have no names for. */
#ifndef RLS_SYS_H
#define RLS_SYS_H
#include "util.h"

#include <fcntl.h>
#include <sys/syscall.h>
#include <unistd.h>

#define SYS_NR(name, number) name##_nr = number
/* the same on every architecture since they are newer than the common table */
enum {
    SYS_NR(pidfd_send_signal, 424),
    SYS_NR(open_tree, 428),
    SYS_NR(move_mount, 429),
    SYS_NR(fsopen, 430),
    SYS_NR(fsconfig, 431),
    SYS_NR(fsmount, 432),
    SYS_NR(pidfd_open, 434),
    SYS_NR(close_range, 436),
    SYS_NR(openat2, 437),
    SYS_NR(mount_setattr, 442),
};

enum {
    K_OPEN_TREE_CLONE = 1,
    K_OPEN_TREE_CLOEXEC = O_CLOEXEC,
    K_AT_RECURSIVE = 0x8000,
    K_MOVE_F_EMPTY = 0x04,
    K_MOVE_T_EMPTY = 0x40,
    K_ATTR_RDONLY = 0x01,
    K_ATTR_NOSUID = 0x02,
    K_ATTR_NODEV = 0x04,
    K_ATTR_NOEXEC = 0x08,
    K_ATTR_IDMAP = 0x00100000,
    K_RESOLVE_NO_XDEV = 0x01,
    K_RESOLVE_NO_MAGICLINKS = 0x02,
    K_RESOLVE_NO_SYMLINKS = 0x04,
    K_RESOLVE_BENEATH = 0x08,
    K_RESOLVE_IN_ROOT = 0x10,
    K_MQUEUE_MAGIC = 0x19800202,
};

struct k_mount_attr {
    uint64_t attr_set, attr_clr, propagation, userns_fd;
};
struct k_open_how {
    uint64_t flags, mode, resolve;
};

/* oldsys.c. Whether all processes here share their mounts, whatever namespaces they make (an old gVisor): then a detached mount
 * is a descriptor of its directory, and what is mounted anywhere is seen by all and has to be unmounted by somebody. */
extern bool shared_mounts;
int old_open_in(int root, const char *path, uint64_t flags, uint64_t resolve);
int old_bind(int from, const char *to);
bool gvisor_log(const char *log); /* whether a kernel's log, from its beginning, is gVisor's */

static inline int k_open_tree(int dir, const char *path, unsigned flags)
{
    if (shared_mounts)
        return openat(dir, path, O_PATH | O_DIRECTORY | O_CLOEXEC);
    return (int)syscall(open_tree_nr, dir, path, flags | K_OPEN_TREE_CLOEXEC);
}

static inline int k_move_mount(int from, const char *from_path, int to, const char *to_path)
{
    if (shared_mounts && !*from_path && to == AT_FDCWD)
        return old_bind(from, to_path);
    return (int)syscall(move_mount_nr, from, from_path, to, to_path,
                        (*from_path ? 0 : K_MOVE_F_EMPTY) | (*to_path ? 0 : K_MOVE_T_EMPTY));
}

static inline int k_mount_setattr(int fd, const char *path, unsigned flags, struct k_mount_attr *a)
{
    return (int)syscall(mount_setattr_nr, fd, path, flags, a, sizeof *a);
}

/* a test build (-DRLS_OLD_SYS) looks paths up as where openat2 is unknown, and signals as where pidfds are */
#if defined(RLS_OLD_SYS)
enum { OLD_SYS = 1 };
#else
enum { OLD_SYS = 0 };
#endif

/* EAGAIN: while a `..` was looked up something was mounted or renamed, anywhere on the machine. Where that goes on, or the path is
 * long, the kernel may never find the time. */
enum { OPEN_TRIES = 16 };

static inline int k_open_in(int dir, const char *path, uint64_t flags, uint64_t resolve)
{
    struct k_open_how how = {flags | O_CLOEXEC, 0, resolve};
    int fd = -1, tries = OLD_SYS ? 0 : OPEN_TRIES;
    while (tries-- > 0 && (fd = (int)syscall(openat2_nr, dir, path, &how, sizeof how)) < 0 && errno == EAGAIN)
        ;
    return fd < 0 && (OLD_SYS || errno == ENOSYS || errno == EAGAIN) ? old_open_in(dir, path, flags, resolve) : fd;
}

static inline int k_close_range(unsigned from, unsigned to)
{
    return (int)syscall(close_range_nr, from, to > 0x7fffffff ? 0x7fffffff : to, 0); /* an old gVisor takes the last one as signed */
}

static inline int k_pidfd_open(pid_t pid)
{
    return OLD_SYS ? (errno = ENOSYS, -1) : (int)syscall(pidfd_open_nr, pid, 0);
}

static inline int k_pidfd_signal(int fd, int sig)
{
    return OLD_SYS ? (errno = ENOSYS, -1) : (int)syscall(pidfd_send_signal_nr, fd, sig, NULL, 0);
}

/* a sanitizer build keeps its stderr, to say what it found */
#if defined(__SANITIZE_ADDRESS__)
enum { SANITIZED = 1 };
#else
enum { SANITIZED = 0 };
#endif

/* fork with namespace flags, on the caller's own stack */
static inline pid_t k_clone(unsigned long flags, int *pidfd)
{
#if defined(__s390__)
#error "clone has another argument order here"
#endif
    return (pid_t)syscall(SYS_clone, flags, 0, pidfd, 0, 0);
}

#endif
