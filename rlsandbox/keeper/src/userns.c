/* Mode `userns`: where no overlay of the whole root can be made (it contains mounts: an ordinary pod), each top directory gets
 * an overlay of its own. A directory that contains a mount itself (also one that was given as an overlay: /usr on a machine whose
 * /usr/local is a disk of its own) is built again on a tmpfs: plain files and small trees are copied, larger ones get overlays;
 * one with too much plain content to be copied is bound as it is, read-only, and told. Done once, when the keeper starts. */
#include <dirent.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mount.h>

#include "sandbox.h"
#include "sys.h"
#include "trees.h"

enum { DEPTH = 24, SMALL_ENTRIES = 3000, SMALL_BYTES = 32 << 20 };

/* The directories of the base that together are one directory of the view, topmost first. */
struct parts {
    int fd[MAX_LOWERS + 1];
    unsigned n;
};

static void parts_close(struct parts *p)
{
    for (unsigned i = 0; i < p->n; i++)
        close(p->fd[i]);
    p->n = 0;
}

static int by_name(const void *a, const void *b)
{
    return strcmp(*(char *const *)a, *(char *const *)b);
}

/* every name that is in any part, sorted */
static int names(const struct parts *p, char ***out, size_t *n, struct err *e)
{
    size_t cap = 0;
    *out = NULL;
    *n = 0;
    for (unsigned i = 0; i < p->n; i++) {
        int fd = openat(p->fd[i], ".", O_RDONLY | O_DIRECTORY | O_CLOEXEC);
        DIR *d = fd < 0 ? NULL : fdopendir(fd);
        struct dirent *x;
        if (!d)
            return fail(e, errno, "read a directory of the base");
        while ((x = readdir(d))) {
            bool known = !strcmp(x->d_name, ".") || !strcmp(x->d_name, "..");
            for (size_t j = 0; j < *n && !known; j++)
                known = strcmp((*out)[j], x->d_name) == 0;
            if (known)
                continue;
            if (*n == cap) {
                cap = cap ? cap * 2 : 64;
                char **q = realloc(*out, cap * sizeof *q);
                if (!q) {
                    closedir(d);
                    return fail(e, ENOMEM, "list the base");
                }
                *out = q;
            }
            if (!((*out)[*n] = strdup(x->d_name))) {
                closedir(d);
                return fail(e, ENOMEM, "list the base");
            }
            ++*n;
        }
        closedir(d);
    }
    if (*n)
        qsort(*out, *n, sizeof **out, by_name);
    return 0;
}

/* small enough to be copied, and without a mount in it */
static bool small(int dir, const char *name, dev_t dev, int depth, size_t *entries, uint64_t *bytes)
{
    struct stat st;
    if (fstatat(dir, name, &st, AT_SYMLINK_NOFOLLOW) < 0 || st.st_dev != dev || ++*entries > SMALL_ENTRIES || (*bytes += S_ISREG(st.st_mode) ? (uint64_t)st.st_size : 0) > SMALL_BYTES)
        return false;
    if (!S_ISDIR(st.st_mode))
        return true;
    int fd = open_dir(dir, name);
    DIR *d = fd < 0 ? NULL : fdopendir(fd);
    struct dirent *x;
    bool ok = d && depth < 64;
    while (ok && (x = readdir(d)))
        if (strcmp(x->d_name, ".") && strcmp(x->d_name, ".."))
            ok = small(dirfd(d), x->d_name, dev, depth + 1, entries, bytes);
    if (d)
        closedir(d);
    return ok;
}

static int attach(struct keeper *k, int from, unsigned flags, struct err *e)
{
    char path[64];
    struct stat st;
    unsigned i = k->set.lowers;
    if (i >= MAX_ALL_LOWERS)
        return fail(e, E2BIG, "build the view from parts: over %d of them", MAX_ALL_LOWERS);
    path_join(path, sizeof path, "/k/l/%u", i);
    if (fstat(from, &st) < 0)
        return fail(e, errno, "look at a part of the base");
    if (S_ISDIR(st.st_mode) ? mkdir(path, 0755) < 0 : mknod(path, S_IFREG | 0644, 0) < 0)
        return fail(e, errno, "make mount point %s", path);
    int fd = k_open_tree(from, "", K_OPEN_TREE_CLONE | AT_EMPTY_PATH | flags), no = errno;
    if (fd < 0 || k_move_mount(fd, "", AT_FDCWD, path) < 0) {
        no = fd < 0 ? no : errno;
        fd_close(&fd);
        if (S_ISDIR(st.st_mode))
            rmdir(path);
        else
            unlink(path);
        errno = no; /* EINVAL: there is a mount in it */
        return -1;
    }
    close(fd);
    return (int)k->set.lowers++;
}

/* An overlay of its own for `target`; 1 when that cannot be. What was attached for nothing stays, unused. */
static int own_overlay(struct keeper *k, const struct parts *p, const char *target, struct err *e)
{
    struct overlay *o = &k->set.overlay[k->set.overlays];
    char lower[64];
    if (k->set.overlays == MAX_OVERLAYS || path_join(o->target, sizeof o->target, "%s", target) < 0)
        return 1;
    o->first = k->set.lowers;
    o->n = 0;
    for (unsigned i = 0; i < p->n; i++, o->n++)
        if (attach(k, p->fd[i], 0, e) < 0)
            return e->no ? -1 : 1;
    /* tried by doing it: read-only, two lowers needed */
    path_join(lower, sizeof lower, "lowerdir=/k/l/%u:/k/empty,userxattr", o->first);
    if (mount("rls", "/k/m", "overlay", MS_RDONLY, lower) < 0)
        return 1;
    umount2("/k/m", MNT_DETACH);
    k->set.overlays++;
    return 0;
}

/* The files that lie in the directory itself are more than a copy should take. */
static bool heavy(int dir)
{
    int fd = openat(dir, ".", O_RDONLY | O_DIRECTORY | O_CLOEXEC);
    DIR *d = fd < 0 ? NULL : fdopendir(fd);
    struct dirent *x;
    struct stat st;
    uint64_t bytes = 0;
    size_t entries = 0;
    while (d && (x = readdir(d)))
        if (fstatat(dirfd(d), x->d_name, &st, AT_SYMLINK_NOFOLLOW) == 0 && !S_ISDIR(st.st_mode)) {
            entries++;
            bytes += S_ISREG(st.st_mode) ? (uint64_t)st.st_size : 0;
        }
    if (d)
        closedir(d);
    else
        fd_close(&fd);
    return entries > SMALL_ENTRIES || bytes > SMALL_BYTES;
}

/* All of it, with the mounts in it. */
static bool bind_whole(struct keeper *k, int from, const char *target)
{
    struct bind *b = &k->set.bind[k->set.binds];
    struct k_mount_attr a = {.attr_set = K_ATTR_RDONLY | K_ATTR_NOSUID | K_ATTR_NODEV};
    struct err ignored = {0};
    char path[64];
    int at = k->set.binds < MAX_BINDS && path_join(b->target, sizeof b->target, "%s", target) == 0 ? attach(k, from, K_AT_RECURSIVE, &ignored) : -1;
    if (at < 0 || path_join(path, sizeof path, "/k/l/%d", at) < 0 || k_mount_setattr(AT_FDCWD, path, K_AT_RECURSIVE, &a) < 0)
        return false;
    b->lower = (unsigned)at;
    b->file = false;
    k->set.binds++;
    return true;
}

/* volumes by which the keeper came into a container */
static bool keepers_own(const char *target)
{
    return strncmp(target, "/.rlsandbox", 11) == 0;
}

static bool placed_elsewhere(const struct keeper *k, unsigned given, const char *target)
{
    static const char *const ours[] = {"/proc", "/dev", "/sys"};
    for (size_t i = 0; i < COUNT_OF(ours); i++)
        if (strcmp(target, ours[i]) == 0)
            return true;
    for (unsigned i = 1; i < given; i++)
        if (strcmp(target, k->set.overlay[i].target) == 0)
            return true;
    return false;
}

/* Whether something that the client asked for goes somewhere below: it would be covered. */
static bool given_below(const struct keeper *k, unsigned given, const char *target)
{
    size_t n = strlen(target);
    for (unsigned i = 1; i < given; i++)
        if (strncmp(k->set.overlay[i].target, target, n) == 0 && k->set.overlay[i].target[n] == '/')
            return true;
    for (unsigned i = 0; i < k->set.binds; i++)
        if (strncmp(k->set.bind[i].target, target, n) == 0 && k->set.bind[i].target[n] == '/')
            return true;
    return false;
}

static int rebuild(struct keeper *k, const struct parts *p, int seed, const char *target, unsigned given, int depth, struct err *e);

/* One name of a directory that is being built again. */
static int one(struct keeper *k, const struct parts *p, int seed, const char *dir, const char *name, unsigned given, int depth, struct err *e)
{
    struct parts sub = {.n = 0};
    struct stat st, top = {.st_dev = 0};
    char target[TARGET_MAX];
    unsigned from = 0; /* the part that it is in, when it is in one */
    int r = 0;
    if (path_join(target, sizeof target, "%s/%s", dir, name) == 0 && keepers_own(target))
        return 0;
    if (path_join(target, sizeof target, "%s/%s", dir, name) < 0)
        return fail(e, ENAMETOOLONG, "build the view from parts: %.200s/%.50s", dir, name);
    for (unsigned i = 0; i < p->n; i++) {
        if (fstatat(p->fd[i], name, &st, AT_SYMLINK_NOFOLLOW) < 0)
            continue;
        if (!S_ISDIR(st.st_mode)) {
            struct stat in;
            bool mounted = fstat(p->fd[i], &in) == 0 && in.st_dev != st.st_dev;
            if (sub.n || is_whiteout(&st))
                break;
            if (copy_tree(p->fd[i], name, seed, name, 0) < 0 && !mounted && errno != EACCES)
                return fail(e, errno, "copy %s of the base", target);
            return 0; /* a file that is mounted there is copied as it is now */
        }
        if (!sub.n) {
            top = st;
            from = i;
        }
        int fd = open_dir(p->fd[i], name);
        if (fd < 0) {
            parts_close(&sub);
            return errno == EACCES ? 0 : fail(e, errno, "open %s of the base", target);
        }
        sub.fd[sub.n++] = fd;
        if (is_opaque(fd))
            break;
    }
    if (!sub.n)
        return 0;
    size_t entries = 0;
    uint64_t bytes = 0;
    if (placed_elsewhere(k, given, target) || depth == 0) {
        if (mkdirat(seed, name, 0755) < 0)
            r = fail(e, errno, "make directory %s", target);
        else if (!placed_elsewhere(k, given, target))
            r = own_overlay(k, &sub, target, e);
    } else if (sub.n == 1 && small(sub.fd[0], ".", top.st_dev, 0, &entries, &bytes)) {
        if (copy_tree(p->fd[from], name, seed, name, 0) == 0)
            goto end; /* with its attributes */
        if (errno != EACCES) /* what cannot be read is left out, as a directory that cannot be opened is */
            r = fail(e, errno, "copy %s of the base", target);
    } else if (mkdirat(seed, name, 0755) < 0)
        r = fail(e, errno, "make directory %s", target);
    else
        r = own_overlay(k, &sub, target, e);
    int made = r < 0 ? -1 : open_dir(seed, name);
    if (r == 1 && depth && sub.n == 1 && heavy(sub.fd[0]) && !given_below(k, given, target) && bind_whole(k, sub.fd[0], target))
        r = 0;
    if (r == 1) /* a mount in it, or no room for one more overlay */
        r = depth < DEPTH ? rebuild(k, &sub, made, target, given, depth + 1, e) : fail(e, E2BIG, "build the view from parts: %s has mounts too deep in it", target);
    if (r == 0 && made >= 0 && (fchown(made, top.st_uid > 65535 ? 0 : top.st_uid, top.st_gid > 65535 ? 0 : top.st_gid) < 0 || fchmod(made, top.st_mode & 07777) < 0)) {
        if (!k->set.one_id)
            r = fail(e, errno, "set owner and mode of %s", target);
    }
    fd_close(&made);
end:
    parts_close(&sub);
    return r;
}

static int rebuild(struct keeper *k, const struct parts *p, int seed, const char *target, unsigned given, int depth, struct err *e)
{
    char **list;
    size_t n;
    int r = names(p, &list, &n, e);
    for (size_t i = 0; i < n; i++) {
        if (r == 0)
            r = one(k, p, seed, target, list[i], given, depth, e);
        free(list[i]);
    }
    free(list);
    return r;
}

static int by_depth(const void *a, const void *b)
{
    const struct overlay *x = a, *y = b;
    int nx = 0, ny = 0;
    for (const char *s = x->target; *s; s++)
        nx += *s == '/';
    for (const char *s = y->target; *s; s++)
        ny += *s == '/';
    return nx != ny ? nx - ny : strcmp(x->target, y->target);
}

/* Is there a mount in it? Tried by doing it. */
static bool mountable(const struct overlay *o)
{
    char lower[64];
    for (unsigned i = 0; i < o->n; i++) {
        path_join(lower, sizeof lower, "lowerdir=/k/l/%u:/k/empty,userxattr", o->first + i);
        if (mount("rls", "/k/m", "overlay", MS_RDONLY, lower) < 0)
            return false;
        umount2("/k/m", MNT_DETACH);
    }
    return true;
}

/* A top directory that was given as an overlay and cannot be one. 1: it can. */
static int rebuild_given(struct keeper *k, unsigned i, int seed, unsigned given, struct err *e)
{
    struct parts p = {.n = 0};
    char path[64], target[TARGET_MAX];
    struct stat top;
    strcpy(target, k->set.overlay[i].target);
    if (mountable(&k->set.overlay[i]) || strrchr(target, '/') != target)
        return 1;
    int r = 0, made = open_dir(seed, target + 1);
    for (unsigned j = 0; j < k->set.overlay[i].n && r == 0; j++) {
        path_join(path, sizeof path, "/k/l/%u", k->set.overlay[i].first + j);
        int fd = open(path, O_RDONLY | O_DIRECTORY | O_CLOEXEC);
        if (fd < 0)
            r = -1;
        else
            p.fd[p.n++] = fd;
    }
    if (made < 0 || r < 0 || !p.n || fstat(p.fd[0], &top) < 0)
        r = fail(e, errno, "open %s of the base", target);
    else
        r = rebuild(k, &p, made, target, given, 1, e);
    if (r == 0 && fchmod(made, top.st_mode & 07777) < 0)
        r = fail(e, errno, "set the mode of %s", target);
    fd_close(&made);
    parts_close(&p);
    return r;
}

/* What was bound as it is, as a fact. */
static int tell(struct keeper *k, unsigned first, struct err *e)
{
    struct buf b = {0};
    int r = 0;
    for (unsigned i = first; i < k->set.binds && r == 0; i++)
        r = buf_add(&b, i == first ? "read_only=" : ":", i == first ? 10 : 1) < 0 || buf_add(&b, k->set.bind[i].target, strlen(k->set.bind[i].target)) < 0;
    if (r || (b.len && put_bytes(&k->facts, TAG_FACT, b.p, b.len) < 0))
        r = fail(e, ENOMEM, "tell what is read-only");
    buf_free(&b);
    return r;
}

int userns_plan(struct keeper *k, struct err *e)
{
    unsigned binds = k->set.binds;
    struct parts root = {.n = 0};
    struct overlay *o = &k->set.overlay[0];
    unsigned given = k->set.overlays;
    char path[64];
    if (mkdir("/k/seed", 0755) < 0 || mount("rls", "/k/seed", "tmpfs", MS_NOSUID | MS_NODEV, "mode=0755") < 0)
        return fail(e, errno, "mount a tmpfs to build the view from parts");
    int r = 0;
    for (unsigned i = 0; i <= o->n && r == 0; i++) { /* mount points of our own lie lowest, in every directory */
        path_join(path, sizeof path, i < o->n ? "/k/l/%u" : "/k/skel", o->first + i);
        int fd = open(path, O_RDONLY | O_DIRECTORY | O_CLOEXEC);
        if (fd < 0)
            r = fail(e, errno, "open a directory of the base");
        else
            root.fd[root.n++] = fd;
    }
    int seed = open("/k/seed", O_RDONLY | O_DIRECTORY | O_CLOEXEC);
    if (r == 0 && seed < 0)
        r = fail(e, errno, "open the directory for the view's parts");
    struct stat st;
    if (r == 0)
        r = rebuild(k, &root, seed, "", given, 0, e);
    bool gone[MAX_OVERLAYS] = {false};
    for (unsigned i = 1; i < given && r >= 0; i++)
        gone[i] = (r = rebuild_given(k, i, seed, given, e)) == 0;
    r = r < 0 ? -1 : 0;
    unsigned left = 1;
    for (unsigned i = 1; i < k->set.overlays; i++)
        if (!gone[i])
            k->set.overlay[left++] = k->set.overlay[i];
    k->set.overlays = left;
    if (r == 0 && root.n && fstat(root.fd[0], &st) == 0 && fchmod(seed, st.st_mode & 07777) < 0)
        r = fail(e, errno, "set the mode of the view's root");
    if (r == 0) {
        int at = attach(k, seed, 0, e);
        if (at < 0)
            r = fail(e, errno, "attach the view's parts");
        else {
            o->first = (unsigned)at;
            o->n = 1;
        }
    }
    if (r == 0)
        r = tell(k, binds, e);
    qsort(k->set.overlay + 1, k->set.overlays - 1, sizeof *o, by_depth); /* what lies in another one is mounted after it */
    fd_close(&seed);
    parts_close(&root);
    return r;
}
