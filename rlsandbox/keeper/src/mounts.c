/* What the keeper mounts in its own mount namespace:
 *   /k          a small tmpfs of its own: directories and mount points, nothing of the episode
 *   /k/l/<i>    the base's directories (and files, for binds), attached from descriptors
 *   /k/dev      the read-only /dev
 *   /k/skel     lowest lower of `/`: the directories that every view needs
 *   /k/u/<gen>  the upper layer of episode number gen: u/<overlay>, w/<overlay>, shm
 *   /k/new      where the next view is put together */
#include <stdio.h>
#include <string.h>
#include <sys/mount.h>
#include <sys/stat.h>

#include "sandbox.h"
#include "shared.h"
#include "skip.h"
#include "sys.h"
#include "trees.h"
#include "worker.h"

enum { LARGE = 2 << 20 }; /* takes longer to free than a fork does */

static int make_dir(const char *path, mode_t mode, struct err *e)
{
    if (mkdir(path, mode) < 0 && errno != EEXIST)
        return fail(e, errno, "make directory %s", path);
    if (chmod(path, mode) < 0)
        return fail(e, errno, "chmod %s", path);
    return 0;
}

/* every directory of `target` below /k/skel, and a file at its end when asked for */
static int skel_add(const char *target, bool file, struct err *e)
{
    char path[TARGET_MAX + 16];
    if (path_join(path, sizeof path, "/k/skel%s", target) < 0)
        return fail(e, ENAMETOOLONG, "mount point %.80s", target);
    for (char *s = path + strlen("/k/skel/"); *s; s++) {
        if (*s != '/')
            continue;
        *s = 0;
        if (mkdir(path, 0755) < 0 && errno != EEXIST)
            return fail(e, errno, "make mount point %s", path + 7);
        *s = '/';
    }
    if (!file)
        return mkdir(path, 0755) < 0 && errno != EEXIST ? fail(e, errno, "make mount point %s", target) : 0;
    int fd = open(path, O_CREAT | O_RDONLY | O_CLOEXEC, 0644);
    if (fd < 0)
        return fail(e, errno, "make mount point %s", target);
    close(fd);
    return 0;
}

int top_below(const struct keeper *k, unsigned i, struct stat *top)
{
    char path[64];
    const struct overlay *o = &k->set.overlay[i];
    if (k->nstack)
        path_join(path, sizeof path, "/k/s/%u/u/%u", k->stack[0], i);
    else
        path_join(path, sizeof path, o->n ? "/k/l/%u" : "/k/skel", o->first);
    if (stat(path, top) < 0)
        return -1;
    if (top->st_uid > 65535 || top->st_gid > 65535 || k->set.one_id) /* not mapped */
        top->st_uid = top->st_gid = 0;
    return 0;
}

static int tops_read(struct keeper *k, struct err *e)
{
    for (unsigned i = 0; i < k->set.overlays; i++) {
        struct overlay *o = &k->set.overlay[i];
        if (top_below(k, i, &o->top) < 0)
            return fail(e, errno, "look at the base of %s", o->target);
        if (!S_ISDIR(o->top.st_mode))
            return fail(e, ENOTDIR, "use the base of %s", o->target);
    }
    return 0;
}

int base_attach(struct keeper *k, const int *lowers, int dev_fd, int disk_fd, struct err *e)
{
    char path[64];
    if (mount("rls", "/k", "tmpfs", MS_NOSUID | MS_NODEV, "mode=0755,size=4m") < 0)
        return fail(e, errno, "mount the keeper's own tmpfs");
    static const char *const dirs[] = {"/k/l", "/k/u", "/k/new", "/k/m", "/k/dev", "/k/skel", "/k/empty", "/k/s"};
    for (size_t i = 0; i < COUNT_OF(dirs); i++)
        if (make_dir(dirs[i], 0755, e) < 0)
            return -1;
    for (unsigned i = 0; i < k->set.lowers; i++) {
        struct stat st;
        if (fstat(lowers[i], &st) < 0)
            return fail(e, errno, "look at base directory %u", i);
        path_join(path, sizeof path, "/k/l/%u", i);
        if (S_ISDIR(st.st_mode)) {
            if (make_dir(path, 0755, e) < 0)
                return -1;
        } else {
            int fd = open(path, O_CREAT | O_RDONLY | O_CLOEXEC, 0644);
            if (fd < 0)
                return fail(e, errno, "make mount point %s", path);
            close(fd);
        }
        if (k_move_mount(lowers[i], "", AT_FDCWD, path) < 0)
            return fail(e, errno, "attach base directory %u", i);
    }
    if (k_move_mount(dev_fd, "", AT_FDCWD, "/k/dev") < 0)
        return fail(e, errno, "attach /dev");
    k->layers.locks = disk_fd >= 0;
    if (disk_fd >= 0 && (make_dir("/k/disk", 0755, e) < 0 || k_move_mount(disk_fd, "", AT_FDCWD, "/k/disk") < 0))
        return fail(e, errno, "attach the directory for upper layers");
    static const char *const needed[] = {"/proc", "/dev", "/sys", "/tmp"};
    for (size_t i = 0; i < COUNT_OF(needed); i++)
        if (skel_add(needed[i], false, e) < 0)
            return -1;
    if (make_dir("/k/skel/tmp", 01777, e) < 0)
        return -1;
    for (unsigned i = 1; i < k->set.overlays; i++)
        if (skel_add(k->set.overlay[i].target, false, e) < 0)
            return -1;
    for (unsigned i = 0; i < k->set.binds; i++) {
        struct bind *b = &k->set.bind[i];
        struct stat st;
        path_join(path, sizeof path, "/k/l/%u", b->lower);
        if (stat(path, &st) < 0)
            return fail(e, errno, "look at what is bound to %s", b->target);
        b->file = !S_ISDIR(st.st_mode);
        if (skel_add(b->target, b->file, e) < 0)
            return -1;
    }
    return 0;
}

/* an overlay's top directory is that of the upper layer: it gets mode, owner and time of the one below */
int top_like(const char *path, const struct stat *st, struct err *e)
{
    struct timespec t[2] = {st->st_mtim, st->st_mtim};
    if (((st->st_uid || st->st_gid) && chown(path, st->st_uid, st->st_gid) < 0) ||
        ((st->st_mode & 07777) != 0755 && chmod(path, st->st_mode & 07777) < 0) || utimensat(AT_FDCWD, path, t, 0) < 0)
        return fail(e, errno, "make the top of an upper layer like what it covers");
    return 0;
}

int place_new(struct keeper *k, const char *path, const char *name, bool limited, struct err *e)
{
    char opt[96], place[64];
    if (make_dir(path, 0755, e) < 0)
        return -1;
    if (k->set.disk) {
        path_join(place, sizeof place, "/k/disk/%s", name);
        if (make_dir(place, 0755, e) < 0)
            return -1;
        return mount(place, path, NULL, MS_BIND, NULL) < 0 ? fail(e, errno, "bind a directory for an upper layer") : 0;
    }
    size_t at = (size_t)snprintf(opt, sizeof opt, "mode=0755");
    if (limited && k->set.upper_bytes)
        at += (size_t)snprintf(opt + at, sizeof opt - at, ",size=%llu", (unsigned long long)k->set.upper_bytes);
    if (limited && k->set.upper_inodes)
        snprintf(opt + at, sizeof opt - at, ",nr_inodes=%llu", (unsigned long long)k->set.upper_inodes);
    const unsigned long flags = MS_NOSUID | (k->set.shared ? 0 : MS_NODEV); /* there the nodes of /dev lie on it */
    int r = mount("rls", path, "tmpfs", flags, opt);
    if (r < 0 && errno == EINVAL && shared_mounts) { /* an old gVisor counts no inodes */
        char *inodes = strstr(opt, ",nr_inodes=");
        if (inodes)
            *inodes = 0;
        r = mount("rls", path, "tmpfs", flags, opt);
    }
    if (r < 0)
        return fail(e, errno, "mount a tmpfs for an upper layer (%s)", opt);
    return 0;
}

int upper_new(struct keeper *k, struct err *e)
{
    char path[96], name[16];
    if (tops_read(k, e) < 0)
        return -1;
    path_join(path, sizeof path, "/k/u/%u", k->generation);
    path_join(name, sizeof name, "%u", k->generation);
    if (skipped("upper") && k->generation > 1) {
        char old[64];
        path_join(old, sizeof old, "/k/u/%u", k->generation - 1);
        return make_dir(path, 0755, e) < 0 ? -1 : mount(old, path, NULL, MS_BIND, NULL);
    }
    if (place_new(k, path, name, true, e) < 0)
        return -1;
    static const char *const dirs[] = {"u", "w"};
    for (size_t d = 0; d < COUNT_OF(dirs); d++) {
        path_join(path, sizeof path, "/k/u/%u/%s", k->generation, dirs[d]);
        if (make_dir(path, 0755, e) < 0)
            return -1;
        for (unsigned i = 0; i < k->set.overlays; i++) {
            path_join(path, sizeof path, "/k/u/%u/%s/%u", k->generation, dirs[d], i);
            if (make_dir(path, 0755, e) < 0 || (d == 0 && top_like(path, &k->set.overlay[i].top, e) < 0))
                return -1;
        }
    }
    path_join(path, sizeof path, "/k/u/%u/shm", k->generation);
    return make_dir(path, 01777, e);
}

void place_drop(struct keeper *k, const char *path, const char *name, bool sealed)
{
    umount2(path, MNT_DETACH);
    rmdir(path);
    int disk = k->set.disk && !sealed ? open("/k/disk", O_RDONLY | O_DIRECTORY | O_CLOEXEC) : -1;
    if (disk >= 0)
        remove_tree(disk, name); /* what is left goes with the sandbox */
    fd_close(&disk);
}

void upper_forget(struct keeper *k, unsigned generation, bool sealed)
{
    char path[64], name[16];
    path_join(path, sizeof path, "/k/u/%u", generation);
    path_join(name, sizeof name, "%u", generation);
    if (k->set.shared)
        shared_view_drop(generation);
    pid_t p = (k->set.disk ? !sealed : tmpfs_used(path) > LARGE) ? helper_fork(k) : -1;
    if (p > 0)
        return;
    if (p == 0)
        helper_keep(NULL, 0); /* no pipe of anybody stays open for it */
    place_drop(k, path, name, sealed);
    if (p == 0)
        _exit(0);
}
