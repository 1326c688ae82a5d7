/* Puts views together: the episode's, in its own mount namespace, where it becomes the root; and, for looking from
 * outside, what lies below the episode's upper layer. */
#include <dirent.h>
#include <fcntl.h>
#include <sched.h>
#include <stdio.h>
#include <string.h>
#include <sys/mount.h>
#include <sys/stat.h>
#include <sys/vfs.h>

#include "sandbox.h"
#include "shared.h"
#include "skip.h"
#include "sys.h"
#include "worker.h"

static int attr(int fd, uint64_t set, struct err *e, const char *what)
{
    struct k_mount_attr a = {.attr_set = set};
    return k_mount_setattr(fd, "", AT_EMPTY_PATH, &a) < 0 ? fail(e, errno, "make %s read-only", what) : 0;
}

/* Where `target` is inside the new root, links followed inside it only. */
static int target_open(int root, const char *target, struct err *e)
{
    int fd = k_open_in(root, target, O_PATH, K_RESOLVE_IN_ROOT | K_RESOLVE_NO_MAGICLINKS);
    if (fd < 0)
        fail(e, errno, "open the mount point %s in the sandbox's root", target);
    return fd;
}

/* relative to /k, for short names: without an upper layer where `upper` is false */
static int overlay_mount(struct keeper *k, unsigned i, bool upper, const char *at, struct err *e)
{
    char opt[4000]; /* the kernel takes one page */
    const struct overlay *o = &k->set.overlay[i];
    int n;
    if (!upper && o->n + (i == 0) + k->nstack == 1) { /* an overlay without an upper layer needs two below */
        path_join(opt, sizeof opt, o->n ? "l/%u" : "skel", o->first);
        if (mount(opt, at, NULL, MS_BIND, NULL) < 0)
            return fail(e, errno, "bind the base of %s", o->target);
        return 0;
    }
    if (upper)
        n = snprintf(opt, sizeof opt, "userxattr,upperdir=u/%u/u/%u,workdir=u/%u/w/%u,lowerdir=", k->generation, i, k->generation, i);
    else
        n = snprintf(opt, sizeof opt, "userxattr,lowerdir=");
    size_t at_opt = (size_t)n;
    for (unsigned j = 0; j < k->nstack + o->n + (i == 0); j++) {
        char name[32];
        if (j < k->nstack)
            path_join(name, sizeof name, "s/%u/u/%u", k->stack[j], i);
        else
            path_join(name, sizeof name, j < k->nstack + o->n ? "l/%u" : "skel", o->first + j - k->nstack);
        n = snprintf(opt + at_opt, sizeof opt - at_opt, "%s%s", j ? ":" : "", name);
        at_opt += (size_t)n;
        if (at_opt >= sizeof opt)
            return fail(e, E2BIG, "name the %u lower directories of %s", o->n + k->nstack, o->target);
    }
    if (mount("rls", at, "overlay", upper ? 0 : MS_RDONLY, opt) < 0)
        return fail(e, errno, "mount an overlay for %s (%u lower directories)", o->target, o->n);
    return 0;
}

/* a clone of `path` (in the keeper's part) put on `target` of the new root */
static int place(int root, const char *path, unsigned flags, uint64_t attrs, const char *target, struct err *e)
{
    int from = k_open_tree(AT_FDCWD, path, K_OPEN_TREE_CLONE | flags);
    if (from < 0)
        return fail(e, errno, "clone what belongs on %s", target);
    int to = target_open(root, target, e);
    if (to < 0 || (attrs && attr(from, attrs, e, target) < 0)) {
        close(from);
        fd_close(&to);
        return -1;
    }
    int r = k_move_mount(from, "", to, "");
    if (r < 0)
        fail(e, errno, "mount on %s", target);
    close(from);
    close(to);
    return r;
}

static int fs_on(int root, const char *type, const char *target, unsigned long flags, const char *opt, struct err *e)
{
    int to = target_open(root, target, e);
    if (to < 0)
        return -1;
    int r = fchdir(to);
    if (r == 0)
        r = mount("rls", ".", type, flags, opt);
    if (r < 0)
        fail(e, errno, "mount %s on %s", type, target);
    close(to);
    return r;
}

/* `name` of /proc is empty from now on. What does not exist is fine. */
static int proc_cover(int proc, const char *name, struct err *e)
{
    struct stat st;
    if (fstatat(proc, name, &st, AT_SYMLINK_NOFOLLOW) < 0)
        return 0;
    int fd = k_open_tree(AT_FDCWD, S_ISDIR(st.st_mode) ? "/k/empty" : "/k/dev/null", K_OPEN_TREE_CLONE);
    if (fd < 0)
        return fail(e, errno, "cover /proc/%s", name);
    int r = attr(fd, K_ATTR_RDONLY, e, "a part of /proc");
    if (r == 0 && (r = k_move_mount(fd, "", proc, name)) < 0)
        fail(e, errno, "mount on /proc/%s", name);
    close(fd);
    return r < 0 ? -1 : 0;
}

/* What the machine's root alone may read: in a container's /proc the episode's root would be that one. */
static int proc_cover_roots(int proc, struct err *e)
{
    int fd = openat(proc, ".", O_RDONLY | O_DIRECTORY | O_CLOEXEC);
    DIR *d = fd < 0 ? NULL : fdopendir(fd);
    if (d == NULL) {
        if (fd >= 0)
            close(fd);
        return fail(e, errno, "read /proc");
    }
    int r = 0;
    struct dirent *x;
    while (r == 0 && (x = readdir(d))) {
        struct stat st;
        if (x->d_name[0] == '.' || (x->d_name[0] >= '0' && x->d_name[0] <= '9') || fstatat(proc, x->d_name, &st, AT_SYMLINK_NOFOLLOW) < 0)
            continue;
        if ((S_ISREG(st.st_mode) || S_ISDIR(st.st_mode)) && (st.st_mode & 0444) && !(st.st_mode & 04))
            r = proc_cover(proc, x->d_name, e);
    }
    closedir(d);
    return r;
}

/* Parts of /proc that say or change something about the machine: read-only, or covered. What does not exist is fine. */
static int proc_guard(int proc, bool foreign, struct err *e)
{
    static const char *const read_only[] = {"sys", "irq", "bus", "fs", "sysrq-trigger", "1" /* ours: its root may write there otherwise */};
    static const char *const covered[] = {"kcore", "keys", "key-users", "timer_list", "sched_debug", "latency_stats", "acpi", "scsi"};
    for (size_t i = 0; !foreign && i < COUNT_OF(read_only); i++) { /* a foreign one is read-only as a whole */
        int fd = k_open_tree(proc, read_only[i], K_OPEN_TREE_CLONE);
        if (fd < 0) {
            if (errno == ENOENT)
                continue;
            return fail(e, errno, "clone /proc/%s", read_only[i]);
        }
        int r = attr(fd, K_ATTR_RDONLY | K_ATTR_NOSUID | K_ATTR_NODEV | K_ATTR_NOEXEC, e, "a part of /proc");
        if (r == 0 && (r = k_move_mount(fd, "", proc, read_only[i])) < 0)
            fail(e, errno, "mount on /proc/%s", read_only[i]);
        close(fd);
        if (r < 0)
            return -1;
    }
    for (size_t i = 0; i < COUNT_OF(covered); i++)
        if (proc_cover(proc, covered[i], e) < 0)
            return -1;
    return foreign ? proc_cover_roots(proc, e) : 0;
}

/* all overlays and binds; the root's descriptor, or -1 */
static int trees_build(struct keeper *k, bool upper, struct err *e)
{
    char path[64];
    if (chdir("/k") < 0)
        return fail(e, errno, "chdir to the keeper's directory");
    if (overlay_mount(k, 0, upper, "new", e) < 0)
        return -1;
    int root = open("/k/new", O_PATH | O_DIRECTORY | O_CLOEXEC);
    if (root < 0)
        return fail(e, errno, "open the new root");
    for (unsigned i = 1; i < k->set.overlays; i++) {
        if (overlay_mount(k, i, upper, "m", e) < 0)
            return -1;
        int to = target_open(root, k->set.overlay[i].target, e);
        if (to < 0)
            return -1;
        int r = k_move_mount(AT_FDCWD, "/k/m", to, "");
        close(to);
        if (r < 0)
            return fail(e, errno, "move the overlay to %s", k->set.overlay[i].target);
    }
    for (unsigned i = 0; i < k->set.binds; i++) {
        path_join(path, sizeof path, "/k/l/%u", k->set.bind[i].lower);
        if (place(root, path, K_AT_RECURSIVE, K_ATTR_RDONLY | K_ATTR_NOSUID | K_ATTR_NODEV, k->set.bind[i].target, e) < 0)
            return -1;
    }
    return root;
}

int view_below(struct keeper *k, struct err *e)
{
    if (k->set.shared)
        return shared_below(k, e);
    if (unshare(CLONE_NEWNS) < 0)
        return fail(e, errno, "make a mount namespace for the view below");
    return trees_build(k, false, e);
}

unsigned stand_since(struct worker *w, uint16_t *above)
{
    struct keeper *k = w->k;
    char layer[LAYER_NAME];
    struct err e = {0};
    int n = tlv_str(w->p, w->n, TAG_LAYER, layer, sizeof layer), slot = -1;
    if (n == -1)
        return 0;
    if (n < 0 || (n && (slot = layers_find(&k->layers, layer)) < 0)) {
        fail(&e, ENOENT, "compare with layer %.100s: it is not here", n < 0 ? "" : layer);
        worker_fail(w, &e);
    }
    const struct layer *since = slot < 0 ? NULL : k->layers.at[slot];
    unsigned count = 0, below = since ? since->n : 0;
    for (unsigned i = 0; i < k->nstack; i++) {
        bool known = false;
        for (unsigned j = 0; j < below; j++)
            known |= since->chain[j] == k->stack[i];
        if (!known)
            above[count++] = k->stack[i];
    }
    if (since)
        memcpy(k->stack, since->chain, sizeof k->stack);
    k->nstack = below;
    return count;
}

int view_build(struct keeper *k, int *root_fd, int *proc_fd, bool *foreign_proc, struct err *e)
{
    char path[64];
    if (k->set.shared)
        return shared_view(k, root_fd, proc_fd, e);
    int root = trees_build(k, true, e);
    if (root < 0)
        return -1;
    if (place(root, "/k/dev", K_AT_RECURSIVE, 0, "/dev", e) < 0 ||
        place(root, "/k/empty", 0, K_ATTR_RDONLY, "/sys", e) < 0)
        return -1;
    path_join(path, sizeof path, "/k/u/%u/shm", k->generation);
    if (place(root, path, 0, K_ATTR_NOSUID | K_ATTR_NODEV, "/dev/shm", e) < 0 ||
        fs_on(root, "devpts", "/dev/pts", MS_NOSUID | MS_NOEXEC, k->set.one_id ? "newinstance,ptmxmode=0666,mode=620" : "newinstance,ptmxmode=0666,mode=620,gid=5", e) < 0 ||
        (!(skipped("ipc") && k->generation > 1) && fs_on(root, "mqueue", "/dev/mqueue", MS_NOSUID | MS_NODEV | MS_NOEXEC, NULL, e) < 0))
        return -1;
    if (skipped("mount") && k->generation > 1 && place(root, "/k/empty", 0, K_ATTR_RDONLY, "/sys", e) < 0)
        return -1;
    struct err none = {0};
    if (fs_on(root, "proc", "/proc", MS_NOSUID | MS_NODEV | MS_NOEXEC, NULL, &none) < 0) {
        /* a masked /proc outside forbids a fresh one: show the outer one, and not writable */
        if (place(root, "/proc", K_AT_RECURSIVE, K_ATTR_RDONLY | K_ATTR_NOSUID | K_ATTR_NODEV | K_ATTR_NOEXEC, "/proc", e) < 0)
            return -1;
        *foreign_proc = true;
    }
    int proc = target_open(root, "/proc", e);
    if (proc < 0 || proc_guard(proc, *foreign_proc, e) < 0)
        return -1;
    if (fchdir(root) < 0)
        return fail(e, errno, "chdir to the new root");
    if (root_switch(".", e) < 0)
        return -1;
    *root_fd = root;
    *proc_fd = proc;
    return 0;
}
