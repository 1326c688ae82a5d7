/* Putting back what a manifest lists. Nothing of the episode runs meanwhile; still no link is ever followed. */
#include <limits.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/xattr.h>

#include "manifest.h"
#include "sys.h"
#include "trees.h"

int pristine_path(const struct manifest *m, const char *path, char *out, size_t cap)
{
    return path_join(out, cap, MANIFEST_STORE "/%u%s", m->number, path);
}

struct restore {
    struct manifest *m;
    const char *only;
    char gone[MANIFEST_PATH], back[MANIFEST_PATH]; /* trees that were removed, and put back, as a whole: with a slash at the end */
    char **news;   /* to remove */
    size_t *marks; /* to put back */
    size_t nnew, nmark, cap_new, cap_mark;
};

static bool wanted(const struct restore *r, const char *path)
{
    size_t n = r->only ? strlen(r->only) : 0;
    return !n || (strncmp(path, r->only, n) == 0 && (!path[n] || path[n] == '/'));
}

static int gather(void *arg, char kind, const char *path, const struct stat *st, size_t i)
{
    struct restore *r = arg;
    (void)st;
    if (!wanted(r, path))
        return 0;
    if (kind == '+') {
        size_t n = strlen(r->gone);
        if (n && strncmp(path, r->gone, n) == 0)
            return 0; /* goes with what it is in */
        if (path_join(r->gone, sizeof r->gone, "%s/", path) < 0)
            return -1;
        if (r->nnew == r->cap_new) {
            size_t cap = r->cap_new ? r->cap_new * 2 : 64;
            char **q = realloc(r->news, cap * sizeof *q);
            if (!q)
                return -1;
            r->news = q;
            r->cap_new = cap;
        }
        if (!(r->news[r->nnew] = strdup(path)))
            return -1;
        r->nnew++;
        return 0;
    }
    if (r->nmark == r->cap_mark) {
        size_t cap = r->cap_mark ? r->cap_mark * 2 : 64;
        size_t *q = realloc(r->marks, cap * sizeof *q);
        if (!q)
            return -1;
        r->marks = q;
        r->cap_mark = cap;
    }
    r->marks[r->nmark++] = i;
    return 0;
}

/* The directory of `path`, opened without following a link anywhere; its last name. */
static int parent_of(const char *path, const char **name)
{
    char dir[MANIFEST_PATH];
    const char *slash = strrchr(path, '/');
    *name = slash + 1;
    int fd = open("/", O_RDONLY | O_DIRECTORY | O_CLOEXEC);
    if (path_join(dir, sizeof dir, "%.*s", (int)(slash - path), path) < 0)
        fd_close(&fd);
    for (char *save = NULL, *s = strtok_r(dir, "/", &save); fd >= 0 && s; s = strtok_r(NULL, "/", &save)) {
        int sub = open_dir(fd, s), no = errno;
        close(fd);
        fd = sub;
        errno = no;
    }
    return fd;
}

static void times(const struct mark *k, struct timespec t[2])
{
    t[0] = (struct timespec){0, UTIME_OMIT};
    t[1] = (struct timespec){(time_t)(k->mtime / 1000000000u), (long)(k->mtime % 1000000000u)};
}

/* the attributes that `from` has, and no others */
static int xattrs_like(int from, int to)
{
    static char names[64 << 10];
    char v[1];
    ssize_t n = flistxattr(to, names, sizeof names);
    for (ssize_t at = 0; at < n; at += (ssize_t)strlen(names + at) + 1)
        if (fgetxattr(from, names + at, v, 0) < 0 && fremovexattr(to, names + at) < 0)
            return -1;
    return 0;
}

/* The same inode: what it holds and says of itself is written again, so that its other names and mounts stay what they are. */
static int mend(const struct manifest *m, const struct mark *k, int dir, const char *name, const char *path)
{
    char from[MANIFEST_PATH];
    struct stat st, is;
    int r = -1;
    if (pristine_path(m, path, from, sizeof from) < 0)
        return -1;
    bool file = S_ISREG(k->mode);
    int a = open(from, O_RDONLY | O_NOFOLLOW | O_NONBLOCK | O_CLOEXEC);
    int b = openat(dir, name, (file ? O_RDWR : O_RDONLY | O_DIRECTORY) | O_NOFOLLOW | O_NONBLOCK | O_CLOEXEC);
    if (b >= 0 && fstat(b, &is) == 0 && file && ((uint64_t)is.st_ino != k->ino || (uint64_t)is.st_dev != k->dev))
        errno = ESTALE; /* somebody put another one there meanwhile */
    else if (a >= 0 && b >= 0 && fstat(a, &st) == 0 && (inode_flags(b) == k->flags || inode_flags_set(b, k->flags) == 0) && (!file || (ftruncate(b, 0) == 0 && copy_bytes(a, b, st.st_size) == 0)) && xattrs_like(a, b) == 0)
        r = copy_meta(a, b, &st);
    int no = errno;
    fd_close(&a);
    fd_close(&b);
    errno = no;
    return r;
}

/* something was put into the directory of this one */
static void touch_parent(struct manifest *m, size_t i)
{
    const char *path = mark_path(m, i);
    size_t n = (size_t)(strrchr(path, '/') - path);
    for (size_t j = i; j-- > 0;)
        if (strncmp(mark_path(m, j), path, n) == 0 && (!mark_path(m, j)[n] || (n == 0 && j == 0))) {
            m->at[j].touched = true;
            return;
        }
}

static int put_back(struct restore *r, size_t i)
{
    struct mark *k = &r->m->at[i];
    const char *path = mark_path(r->m, i), *name;
    size_t back = strlen(r->back);
    char from[MANIFEST_PATH];
    struct stat st;
    k->touched = true;
    if (back && strncmp(path, r->back, back) == 0)
        return 0; /* came back with what it is in */
    int dir = parent_of(path, &name), x = -1;
    if (dir < 0)
        return -1;
    bool there = fstatat(dir, *name ? name : ".", &st, AT_SYMLINK_NOFOLLOW) == 0;
    if (!k->kept || !*name) {
        close(dir);
        /* a directory has another time: the keeper put a file of the grader's there. All else the episode cannot have done */
        if (there && S_ISDIR(st.st_mode) && (uint64_t)st.st_dev == k->dev && (uint64_t)st.st_ino == k->ino && st.st_mode == k->mode &&
            st.st_uid == k->uid && st.st_gid == k->gid)
            return 0;
        errno = EPERM;
        return -1;
    }
    if (there && (uint64_t)st.st_dev == k->dev && (uint64_t)st.st_ino == k->ino && (st.st_mode & S_IFMT) == (k->mode & S_IFMT) &&
        (S_ISREG(k->mode) || S_ISDIR(k->mode))) /* if only the number is the same, because it was free, that is as good */
        x = S_ISDIR(k->mode) ? 0 : mend(r->m, k, dir, name, path); /* a directory when all in it is done */
    else if (!there || remove_tree(dir, name) == 0) {
        touch_parent(r->m, i);
        if (pristine_path(r->m, path, from, sizeof from) == 0)
            x = copy_tree(AT_FDCWD, from, dir, name, 0);
        if (S_ISDIR(k->mode) && x == 0) {
            x = path_join(r->back, sizeof r->back, "%s/", path);
            for (size_t j = i + 1, n = strlen(r->back); j < r->m->n && strncmp(mark_path(r->m, j), r->back, n) == 0; j++)
                r->m->at[j].touched = true;
        }
    }
    int no = errno;
    close(dir);
    errno = no;
    return x;
}

/* Directories' times, innermost first, and of those too in which something was put: then what all of them are now is written down. */
static int settle(struct restore *r, struct err *e)
{
    struct manifest *m = r->m;
    for (size_t i = m->n; i-- > 0;) {
        struct mark *k = &m->at[i];
        const char *path = mark_path(m, i), *name;
        struct stat st;
        if (!k->touched)
            continue;
        int dir = parent_of(path, &name), x = dir < 0 ? -1 : 0;
        struct timespec t[2];
        times(k, t);
        if (x == 0 && S_ISDIR(k->mode))
            x = k->kept ? mend(m, k, dir, name, path) : utimensat(dir, *name ? name : ".", t, AT_SYMLINK_NOFOLLOW);
        if (x == 0 && fstatat(dir, *name ? name : ".", &st, AT_SYMLINK_NOFOLLOW) == 0 && st.st_mode == k->mode && st.st_uid == k->uid && st.st_gid == k->gid &&
            (S_ISDIR(k->mode) || (uint64_t)st.st_size == k->size)) {
            k->dev = (uint64_t)st.st_dev;
            k->ino = (uint64_t)st.st_ino;
            k->ctime = time_ns(st.st_ctim);
        } else if (!e->no)
            fail(e, x < 0 ? errno : EIO, "put back %.200s", path);
        fd_close(&dir);
    }
    return e->no ? -1 : 0;
}

int pristine_restore(struct manifest *m, const char *only, struct err *e)
{
    struct restore *r = calloc(1, sizeof *r);
    struct differ d = {.m = m, .fn = gather, .arg = r};
    if (!r)
        return fail(e, ENOMEM, "put the files back");
    r->m = m;
    r->only = only;
    for (size_t i = 0; i < m->n; i++)
        m->at[i].touched = false;
    int x = manifest_diff(&d, e);
    for (size_t i = 0; x == 0 && i < r->nnew; i++) {
        const char *name;
        int dir = parent_of(r->news[i], &name);
        if ((dir < 0 || remove_tree(dir, name) < 0) && errno != ENOENT)
            x = fail(e, errno, "remove %.200s", r->news[i]);
        fd_close(&dir);
    }
    for (size_t i = 0; x == 0 && i < r->nmark; i++)
        if (put_back(r, r->marks[i]) < 0)
            x = fail(e, errno, "put back %.200s", mark_path(m, r->marks[i]));
    if (x == 0 && (r->nnew || r->nmark)) {
        x = settle(r, e);
        usleep(MANIFEST_TICK_US); /* what the next episode changes must have another time */
    }
    for (size_t i = 0; i < r->nnew; i++)
        free(r->news[i]);
    free(r->news);
    free(r->marks);
    free(r);
    return x;
}
