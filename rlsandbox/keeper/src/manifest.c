#include "manifest.h"

#include <dirent.h>
#include <linux/fs.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/ioctl.h>
#include <sys/mman.h>
#include <sys/statvfs.h>
#include <sys/vfs.h>

#include "sys.h"
#include "trees.h"

enum { DEPTH = 200, MANY = 8 << 20 };

/* ---- every inode, in the order of their paths ---- */

typedef int (*scan_fn)(void *arg, const char *path, int dir, const char *name, const struct stat *st);
struct scan {
    bool whole; /* what is too deep to be listed is an error */
    scan_fn fn;
    void *arg;
    struct buf path;
    struct err *e;
};

/* What is no disk has no files of anybody's; what is read-only cannot be changed. */
static bool foreign(int fd)
{
    static const unsigned long none[] = {0x9fa0 /* proc */, 0x62656572 /* sysfs */, 0x27e0eb /* cgroup */, 0x63677270 /* cgroup2 */,
                                         0x1cd1 /* devpts */, K_MQUEUE_MAGIC /* looked at by itself */};
    struct statfs fs;
    struct statvfs v;
    if (fstatfs(fd, &fs) < 0 || fstatvfs(fd, &v) < 0)
        return false;
    for (size_t i = 0; i < COUNT_OF(none); i++)
        if ((unsigned long)fs.f_type == none[i])
            return true;
    return v.f_flag & ST_RDONLY;
}

static int by_name(const void *a, const void *b)
{
    return strcmp(*(char *const *)a, *(char *const *)b);
}

/* the names in an open directory, sorted; the caller frees */
static int names_of(int fd, char ***out, size_t *n)
{
    size_t cap = 0;
    int again = openat(fd, ".", O_RDONLY | O_DIRECTORY | O_CLOEXEC);
    DIR *d = again < 0 ? NULL : fdopendir(again);
    struct dirent *x;
    *out = NULL;
    *n = 0;
    if (!d) {
        fd_close(&again);
        return -1;
    }
    while ((errno = 0, x = readdir(d))) {
        if (!strcmp(x->d_name, ".") || !strcmp(x->d_name, ".."))
            continue;
        if (*n == cap) {
            cap = cap ? cap * 2 : 32;
            char **q = cap > MANY ? NULL : realloc(*out, cap * sizeof *q);
            if (!q)
                break;
            *out = q;
        }
        if (!((*out)[*n] = strdup(x->d_name)))
            break;
        ++*n;
    }
    int no = x ? ENOMEM : errno;
    closedir(d);
    if (*n)
        qsort(*out, *n, sizeof **out, by_name);
    errno = no;
    return no ? -1 : 0;
}

static int scan_dir(struct scan *s, int fd, dev_t dev, int depth)
{
    char **names;
    size_t n, len = s->path.len;
    int r = names_of(fd, &names, &n);
    if (r < 0)
        fail(s->e, errno, "list a directory of the container: %.200s", len ? (char *)s->path.p : "/");
    for (size_t i = 0; r == 0 && i < n; i++) {
        struct stat st;
        s->path.len = len;
        if (buf_add(&s->path, "/", 1) < 0 || buf_add(&s->path, names[i], strlen(names[i]) + 1) < 0) {
            r = fail(s->e, ENOMEM, "list the container's files");
            break;
        }
        s->path.len--; /* the zero stands behind it */
        if ((len == 0 && strncmp(names[i], ".rlsandbox", 10) == 0) || fstatat(fd, names[i], &st, AT_SYMLINK_NOFOLLOW) < 0)
            continue;
        int sub = S_ISDIR(st.st_mode) ? open_dir(fd, names[i]) : -1;
        if (S_ISDIR(st.st_mode) && sub < 0)
            r = fail(s->e, errno, "open %.200s", (char *)s->path.p);
        else if (sub < 0 || st.st_dev == dev || !foreign(sub)) {
            if ((r = s->fn(s->arg, (char *)s->path.p, fd, names[i], &st)) < 0)
                fail(s->e, errno, "look at %.200s", (char *)s->path.p);
            else if (sub >= 0 && depth < DEPTH)
                r = scan_dir(s, sub, st.st_dev, depth + 1);
            else if (sub >= 0 && s->whole) /* later on it is new, and so is its top */
                r = fail(s->e, ELOOP, "list directories over %d deep: %.200s", DEPTH, (char *)s->path.p);
        }
        fd_close(&sub);
    }
    for (size_t i = 0; i < n; i++)
        free(names[i]);
    free(names);
    s->path.len = len;
    return r;
}

/* every inode of the container but what is no disk, and the keeper's own */
static int scan_all(scan_fn fn, void *arg, bool whole, struct err *e)
{
    struct scan s = {.whole = whole, .fn = fn, .arg = arg, .e = e};
    struct stat st;
    int fd = open("/", O_RDONLY | O_DIRECTORY | O_CLOEXEC), r = -1;
    if (fd < 0 || fstat(fd, &st) < 0 || fn(arg, "/", fd, ".", &st) < 0)
        fail(e, errno, "look at the container's root");
    else
        r = scan_dir(&s, fd, st.st_dev, 0);
    fd_close(&fd);
    buf_free(&s.path);
    return r;
}

/* ---- the list ---- */

/* Its owner may change all of it, a group it may be in as well. Those who may do something to a directory may do it to all in it:
 * a name in it goes away with whatever is below. */
static bool at_risk(const struct stat *st, uid_t uid)
{
    return st->st_uid == uid || ((S_ISREG(st->st_mode) || S_ISDIR(st->st_mode)) && st->st_mode & 022);
}

const char *mark_path(const struct manifest *m, size_t i)
{
    return m->names + m->at[i].path;
}

static void mark_set(struct mark *k, const struct stat *st)
{
    k->mode = st->st_mode;
    k->uid = st->st_uid;
    k->gid = st->st_gid;
    k->dev = (uint64_t)st->st_dev;
    k->ino = (uint64_t)st->st_ino;
    k->size = (uint64_t)st->st_size;
    k->nlink = (uint64_t)st->st_nlink;
    k->mtime = time_ns(st->st_mtim);
    k->ctime = time_ns(st->st_ctim);
}

struct making {
    struct manifest *m;
    uid_t uid;
    bool asked;
    dev_t dev; /* the filesystem that was asked about last */
    bool timeless;
    char under[MANIFEST_PATH]; /* the tree whose copy is being made, with a slash at its end; empty: none */
};

enum { SETTABLE = FS_SECRM_FL | FS_UNRM_FL | FS_COMPR_FL | FS_SYNC_FL | FS_NODUMP_FL | FS_NOATIME_FL | FS_NOCOMP_FL | FS_NOTAIL_FL | FS_DIRSYNC_FL |
                  FS_TOPDIR_FL | FS_NOCOW_FL | FS_PROJINHERIT_FL };

uint32_t inode_flags(int fd)
{
    unsigned long flags = 0; /* an int is written, whatever the call's number says */
    return ioctl(fd, FS_IOC_GETFLAGS, &flags) < 0 ? 0 : (uint32_t)flags & SETTABLE;
}

int inode_flags_set(int fd, uint32_t flags)
{
    unsigned long f = 0;
    if (ioctl(fd, FS_IOC_GETFLAGS, &f) < 0)
        return -1;
    f = (f & ~(unsigned long)SETTABLE) | flags;
    return ioctl(fd, FS_IOC_SETFLAGS, &f);
}

/* Whether a write through a map gives a file another time, tried with a new one; takes fd. */
static bool map_tells(int fd)
{
    struct stat before, after;
    bool told = false;
    volatile char *p = write_all(fd, "x", 1) == 0 ? mmap(NULL, 1, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0) : MAP_FAILED;
    if (p != MAP_FAILED) {
        char c = *p; /* where nobody watches, a page that was read may be written as well */
        usleep(MANIFEST_TICK_US);
        if (fstat(fd, &before) == 0) {
            *p = (char)(c + 1);
            told = fstat(fd, &after) == 0 && time_ns(after.st_ctim) != time_ns(before.st_ctim);
        }
        munmap((void *)p, 1);
    }
    close(fd);
    return told;
}

/* what the times of a file that is kept do not tell */
static int look_closer(struct making *g, struct mark *k, int dir, const char *name, const struct stat *st)
{
    if (!S_ISREG(st->st_mode) && !S_ISDIR(st->st_mode))
        return 0;
    int fd = openat(dir, name, O_RDONLY | O_NOFOLLOW | O_NONBLOCK | O_CLOEXEC);
    if (fd < 0)
        return -1;
    k->flags = inode_flags(fd);
    close(fd);
    if (!S_ISREG(st->st_mode))
        return 0;
    if (!g->asked || g->dev != st->st_dev) {
        int none = openat(dir, ".", O_TMPFILE | O_RDWR | O_CLOEXEC, 0600); /* leaves no trace in the directory */
        struct stat is;
        if (none < 0 && (none = open(MANIFEST_STORE "/map", O_RDWR | O_CREAT | O_TRUNC | O_NOFOLLOW | O_CLOEXEC, 0600)) >= 0)
            (void)unlink(MANIFEST_STORE "/map"); /* an overlay of an older kernel */
        bool here = none >= 0 && fstat(none, &is) == 0 && is.st_dev == st->st_dev; /* else a file is mounted there */
        g->timeless = here ? !map_tells(none) : true;
        if (!here)
            fd_close(&none);
        g->dev = st->st_dev;
        g->asked = true;
    }
    k->timeless = g->timeless;
    return 0;
}

static int directories(const struct manifest *m, const char *path)
{
    char at[MANIFEST_PATH];
    if (pristine_path(m, path, at, sizeof at) < 0)
        return -1;
    for (char *s = at + 1; *s; s++)
        if (*s == '/') {
            *s = 0;
            if (mkdir(at, 0700) < 0 && errno != EEXIST)
                return -1;
            *s = '/';
        }
    return 0;
}

static int make_one(void *arg, const char *path, int dir, const char *name, const struct stat *st)
{
    struct making *g = arg;
    struct manifest *m = g->m;
    size_t n = strlen(path) + 1, under = strlen(g->under);
    char to[MANIFEST_PATH];
    if (m->n == m->cap) {
        size_t cap = m->cap ? m->cap * 2 : 4096;
        struct mark *q = cap > MANY ? NULL : realloc(m->at, cap * sizeof *q);
        if (!q) {
            errno = ENOMEM;
            return -1;
        }
        m->at = q;
        m->cap = cap;
    }
    if (m->len + n > m->room) {
        size_t room = m->room ? m->room * 2 : 1 << 18;
        char *q = room < m->len + n || room > 1u << 31 ? NULL : realloc(m->names, room);
        if (!q) {
            errno = ENOMEM;
            return -1;
        }
        m->names = q;
        m->room = room;
    }
    struct mark *k = &m->at[m->n++];
    *k = (struct mark){.path = (uint32_t)m->len};
    memcpy(m->names + m->len, path, n);
    m->len += n;
    mark_set(k, st);
    if (under && strncmp(path, g->under, under) == 0) {
        k->kept = true;
        return look_closer(g, k, dir, name, st);
    }
    g->under[0] = 0;
    if (!at_risk(st, g->uid))
        return 0;
    k->kept = true;
    if (look_closer(g, k, dir, name, st) < 0)
        return -1;
    if (S_ISDIR(st->st_mode) && path_join(g->under, sizeof g->under, "%s/", path) < 0)
        return -1;
    return directories(m, path) < 0 || pristine_path(m, path, to, sizeof to) < 0 ? -1 : copy_tree(dir, name, AT_FDCWD, to, 0);
}

int manifest_make(struct manifest *m, uid_t uid, struct err *e)
{
    struct stat st;
    if (lstat("/", &st) < 0 || at_risk(&st, uid))
        return fail(e, EPERM, "keep a copy of what commands may change: user %u may change / itself", (unsigned)uid);
    struct making *g = calloc(1, sizeof *g);
    if (!g)
        return fail(e, ENOMEM, "list the container's files");
    *g = (struct making){.m = m, .uid = uid};
    int r = scan_all(make_one, g, true, e);
    free(g);
    return r;
}

void manifest_free(struct manifest *m)
{
    char name[32];
    int store = open(MANIFEST_STORE, O_RDONLY | O_DIRECTORY | O_CLOEXEC);
    path_join(name, sizeof name, "%u", m->number);
    if (store >= 0)
        remove_tree(store, name); /* what is left takes room and does nothing else */
    fd_close(&store);
    free(m->at);
    free(m->names);
    *m = (struct manifest){.n = 0};
}

/* ---- what differs ---- */

/* the order of the list: a directory stands right before what is in it */
static int rank(char c)
{
    return !c ? 0 : c == '/' ? 1 : (unsigned char)c + 1;
}

static int path_cmp(const char *a, const char *b)
{
    while (*a && *a == *b)
        a++, b++;
    return rank(*a) - rank(*b);
}

/* pipes and devices have new times when somebody writes into them */
static bool stored(mode_t mode)
{
    return S_ISREG(mode) || S_ISDIR(mode) || S_ISLNK(mode);
}

/* A directory in which nobody but root may write has another ctime when the container's overlay copies something in it to its
 * upper layer; names in it are compared one by one. */
static bool same(const struct mark *k, const struct stat *st)
{
    return k->dev == (uint64_t)st->st_dev && k->ino == (uint64_t)st->st_ino && k->mode == st->st_mode && k->uid == st->st_uid && k->gid == st->st_gid &&
           (!stored(st->st_mode) || (k->mtime == time_ns(st->st_mtim) && (k->ctime == time_ns(st->st_ctim) || (!k->kept && S_ISDIR(st->st_mode))))) &&
           (S_ISDIR(st->st_mode) || (k->size == (uint64_t)st->st_size && k->nlink == (uint64_t)st->st_nlink));
}

/* bytes too, where times say nothing */
static bool same_bytes_too(const struct manifest *m, const struct mark *k, const char *path, int dir, const char *name, const struct stat *st)
{
    char kept[MANIFEST_PATH];
    struct stat ks;
    return !k->timeless || (pristine_path(m, path, kept, sizeof kept) == 0 && lstat(kept, &ks) == 0 && same_node(dir, name, st, AT_FDCWD, kept, &ks));
}

struct merging {
    struct differ *d;
    size_t i;
};

static int merge_one(void *arg, const char *path, int dir, const char *name, const struct stat *st)
{
    struct merging *g = arg;
    struct differ *d = g->d;
    for (; g->i < d->m->n; g->i++) {
        int c = path_cmp(mark_path(d->m, g->i), path);
        if (c > 0)
            break;
        if (c == 0) {
            size_t i = g->i++;
            return same(&d->m->at[i], st) && same_bytes_too(d->m, &d->m->at[i], path, dir, name, st) ? 0 : d->fn(d->arg, '~', path, st, i);
        }
        if (d->fn(d->arg, '-', mark_path(d->m, g->i), NULL, g->i) < 0)
            return -1;
    }
    return d->fn(d->arg, '+', path, st, 0);
}

int manifest_diff(struct differ *d, struct err *e)
{
    struct merging g = {.d = d};
    if (scan_all(merge_one, &g, false, e) < 0)
        return -1;
    for (; g.i < d->m->n; g.i++)
        if (d->fn(d->arg, '-', mark_path(d->m, g.i), NULL, g.i) < 0)
            return fail(e, errno, "list what is gone");
    return 0;
}
