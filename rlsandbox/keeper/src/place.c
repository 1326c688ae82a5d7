/* Where the hub lives: a small root of its own, with the machine's tree under /h, from which it takes what a base needs. */
#include <stdio.h>
#include <string.h>
#include <sys/mount.h>
#include <sys/stat.h>
#include <sys/sysmacros.h>

#include "hub.h"
#include "sandbox.h"
#include "sys.h"

static const struct { const char *name; unsigned major, minor; } devices[] = {
    {"null", 1, 3}, {"zero", 1, 5}, {"full", 1, 7}, {"random", 1, 8}, {"urandom", 1, 9}, {"tty", 5, 0},
};

static int dev_node(struct hub *h, const char *name, dev_t dev, struct err *e)
{
    char path[64], from[64];
    path_join(path, sizeof path, "/dev/%s", name);
    if (h->userns >= 0 && mknod(path, S_IFCHR | 0666, dev) == 0) {
        if (chmod(path, 0666) < 0)
            return fail(e, errno, "chmod %s", path);
        return 0;
    }
    /* not allowed in a user namespace: the machine's own node, bound */
    path_join(from, sizeof from, "/h/dev/%s", name);
    int fd = open(path, O_CREAT | O_RDONLY | O_CLOEXEC, 0666);
    if (fd < 0)
        return fail(e, errno, "make mount point %s", path);
    close(fd);
    if (mount(from, path, NULL, MS_BIND, NULL) < 0)
        return fail(e, errno, "bind %s", name);
    return 0;
}

static int dev_setup(struct hub *h, struct err *e)
{
    static const struct { const char *name, *to; } links[] = {
        {"fd", "/proc/self/fd"}, {"stdin", "/proc/self/fd/0"}, {"stdout", "/proc/self/fd/1"}, {"stderr", "/proc/self/fd/2"},
        {"ptmx", "pts/ptmx"}, {"core", "/dev/null"},
    };
    char path[64];
    if (mount("rls", "/dev", "tmpfs", MS_NOSUID | MS_NOEXEC, "mode=0755,size=64k") < 0)
        return fail(e, errno, "mount a tmpfs for /dev");
    for (size_t i = 0; i < COUNT_OF(devices); i++)
        if (dev_node(h, devices[i].name, makedev(devices[i].major, devices[i].minor), e) < 0)
            return -1;
    for (size_t i = 0; i < COUNT_OF(links); i++) {
        path_join(path, sizeof path, "/dev/%s", links[i].name);
        if (strcmp(links[i].name, "core") && symlink(links[i].to, path) < 0)
            return fail(e, errno, "make link %s", path);
    }
    if (mkdir("/dev/shm", 0755) < 0 || mkdir("/dev/pts", 0755) < 0 || mkdir("/dev/mqueue", 0755) < 0)
        return fail(e, errno, "make directories in /dev");
    struct k_mount_attr a = {.attr_set = K_ATTR_RDONLY};
    if (k_mount_setattr(AT_FDCWD, "/dev", 0, &a) < 0)
        return fail(e, errno, "make /dev read-only");
    return 0;
}

int place_setup(struct hub *h, struct err *e)
{
    static const char *const at[] = {"/tmp", "/mnt", "/run", "/var", "/usr", "/sys" /* every container has one */};
    static const char *const dirs[] = {"h", "proc", "dev", "k", "y"};
    size_t i = 0;
    if (mount(NULL, "/", NULL, MS_REC | MS_PRIVATE, NULL) < 0)
        return fail(e, errno, "make all mounts private");
    while (i < COUNT_OF(at) && mount("rls", at[i], "tmpfs", MS_NOSUID | MS_NODEV, "mode=0755,size=8m") < 0)
        i++;
    if (i == COUNT_OF(at))
        return fail(e, errno, "mount a tmpfs for the hub");
    if (chdir(at[i]) < 0)
        return fail(e, errno, "enter the hub's tmpfs");
    for (size_t d = 0; d < COUNT_OF(dirs); d++)
        if (mkdir(dirs[d], 0755) < 0)
            return fail(e, errno, "make directory %s for the hub", dirs[d]);
#if defined(__SANITIZE_ADDRESS__) /* a sanitizer build is not static: it needs its loader again */
    static const char *const loader[] = {"usr", "lib", "lib64"};
    for (size_t d = 0; d < COUNT_OF(loader); d++) {
        char from[16];
        path_join(from, sizeof from, "/%s", loader[d]);
        if (mkdir(loader[d], 0755) < 0 || mount(from, loader[d], NULL, MS_BIND | MS_REC, NULL) < 0)
            return fail(e, errno, "bind %s", from);
    }
#endif
    /* a fresh one where that is allowed: a container's own has masks, and with only that one at hand no episode may have a fresh one */
    if (mount("rls", "proc", "proc", MS_NOSUID | MS_NODEV | MS_NOEXEC, NULL) < 0 && mount("/proc", "proc", NULL, MS_BIND | MS_REC, NULL) < 0)
        return fail(e, errno, "bind /proc");
    if (root_switch("h", e) < 0)
        return -1;
    h->host = open("/h", O_PATH | O_DIRECTORY | O_CLOEXEC);
    if (h->host < 0)
        return fail(e, errno, "open the machine's root");
    return dev_setup(h, e);
}

/* What is only shown (`shown`) may lie on a filesystem that cannot map ids (a network disk): then its owners are nobody. */
static int idmap(struct hub *h, int fd, unsigned flags, bool shown, struct err *e, const char *path)
{
    struct k_mount_attr a = {.attr_set = K_ATTR_RDONLY | K_ATTR_NOSUID | K_ATTR_NODEV};
    if (strcmp(h->ids, "idmapped") == 0) {
        a.attr_set |= K_ATTR_IDMAP;
        a.userns_fd = (uint64_t)h->userns;
    }
    int r = k_mount_setattr(fd, "", AT_EMPTY_PATH | flags, &a);
    if (r < 0 && errno == EINVAL && shown && a.userns_fd) {
        a.attr_set &= ~(uint64_t)K_ATTR_IDMAP;
        a.userns_fd = 0;
        r = k_mount_setattr(fd, "", AT_EMPTY_PATH | flags, &a);
    }
    return r < 0 ? fail(e, errno, "map the ids of %.200s (its filesystem may not allow it)", path) : 0;
}

int place_open(struct hub *h, const char *path, bool shown, struct err *e)
{
    int at = k_open_in(h->host, path, O_PATH, K_RESOLVE_IN_ROOT | K_RESOLVE_NO_MAGICLINKS);
    if (at < 0)
        return fail(e, errno, "open %.200s", path);
    unsigned flags = shown ? K_AT_RECURSIVE : 0; /* what is mounted inside is part of what somebody wants to see */
    int fd = k_open_tree(at, "", K_OPEN_TREE_CLONE | AT_EMPTY_PATH | flags);
    if (fd < 0 && errno == EINVAL) { /* in a user namespace what is mounted inside cannot be left out */
        flags = K_AT_RECURSIVE;
        fd = k_open_tree(at, "", K_OPEN_TREE_CLONE | K_AT_RECURSIVE | AT_EMPTY_PATH);
    }
    if (fd < 0)
        fail(e, errno, "clone the mount of %.200s", path);
    else if (idmap(h, fd, flags, shown, e, path) < 0)
        fd_close(&fd);
    close(at);
    return fd;
}

int place_dev(struct hub *h, struct err *e)
{
    int fd = k_open_tree(AT_FDCWD, "/dev", K_OPEN_TREE_CLONE | K_AT_RECURSIVE);
    if (fd < 0)
        return fail(e, errno, "clone /dev");
    if (strcmp(h->ids, "idmapped") == 0) {
        struct k_mount_attr a = {.attr_set = K_ATTR_IDMAP, .userns_fd = (uint64_t)h->userns};
        /* only so that its files belong to root inside as well: without it they belong to nobody */
        (void)k_mount_setattr(fd, "", AT_EMPTY_PATH, &a);
    }
    return fd;
}
