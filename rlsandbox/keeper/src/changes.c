/* CHANGES: exactly what differs from the layers below: the upper layer, entry by entry, against what it covers. */
#include <dirent.h>
#include <stdlib.h>
#include <string.h>

#include "entry.h"
#include "sys.h"
#include "trees.h"
#include "worker.h"

struct diff {
    struct worker *w;
    struct buf path; /* of the directory being compared; no zero at its end */
    const char *only;
    size_t only_len;
    int view; /* of a layer that others cover: the episode's own, which has the last word. -1: no other covers it */
    uint64_t limit, count, bytes;
    bool cut; /* there is more in directories that were not looked into */
};

/* 2: it or what is below it is wanted; 1: only something below it may be */
static int wanted(const struct diff *d, const char *name)
{
    size_t n = strlen(name), len = d->path.len + 1 + n;
    if (!d->only_len)
        return 2;
    struct buf full = {0};
    int r = 0;
    if (buf_add(&full, d->path.p, d->path.len) == 0 && buf_add(&full, "/", 1) == 0 && buf_add(&full, name, n) == 0) {
        size_t common = len < d->only_len ? len : d->only_len;
        if (memcmp(full.p, d->only, common) == 0) {
            if (len == d->only_len || (len > d->only_len && full.p[d->only_len] == '/'))
                r = 2;
            else if (len < d->only_len && d->only[len] == '/')
                r = 1;
        }
    }
    buf_free(&full);
    return r;
}

static void tell(struct diff *d, char kind, const struct stat *st, const char *name)
{
    struct buf full = {0}, entry = {0};
    struct stat now;
    if (wanted(d, name) != 2)
        return;
    if (d->view >= 0) {
        bool there = false;
        if (buf_add(&full, d->path.p, d->path.len) == 0 && buf_add(&full, "/", 1) == 0 && buf_add(&full, name, strlen(name) + 1) == 0) {
            int fd = k_open_in(d->view, (char *)full.p, O_PATH | O_NOFOLLOW | O_CLOEXEC, K_RESOLVE_IN_ROOT | K_RESOLVE_NO_SYMLINKS);
            there = fd >= 0 && fstat(fd, &now) == 0;
            fd_close(&fd);
        }
        buf_free(&full);
        if (there == !st)
            return; /* it was changed again since */
        if (there) {
            st = &now;
            kind = entry_kind(now.st_mode);
        }
    }
    if (st && S_ISREG(st->st_mode))
        d->bytes += (uint64_t)st->st_blocks * 512;
    if (d->count++ >= d->limit)
        return;
    if (buf_add(&full, d->path.p, d->path.len) < 0 || buf_add(&full, "/", 1) < 0 || buf_add(&full, name, strlen(name)) < 0 ||
        entry_put(&entry, kind, st, (char *)full.p, full.len) < 0)
        _exit(1);
    worker_write(d->w, entry.p, entry.len);
    buf_free(&full);
    buf_free(&entry);
}

static void compare(struct diff *d, int up, int low, int depth, const struct stat *su, const struct stat *sl, const char *name);

/* What `up` has not of `low`: gone, when `up` hides it. */
static bool hidden(struct diff *d, int up, int low)
{
    int fd = openat(low, ".", O_RDONLY | O_DIRECTORY | O_CLOEXEC);
    DIR *l = fd < 0 ? NULL : fdopendir(fd);
    struct dirent *x;
    struct stat st;
    bool any = false;
    while (l && (x = readdir(l)))
        if (strcmp(x->d_name, ".") && strcmp(x->d_name, "..") && fstatat(up, x->d_name, &st, AT_SYMLINK_NOFOLLOW) < 0) {
            tell(d, 'x', NULL, x->d_name);
            any = true;
        }
    if (l)
        closedir(l);
    return any;
}

/* The entries of one directory of the upper layer; low is -1 where it covers nothing. Whether its own time is explained. */
static bool entries(struct diff *d, int up, int low, int depth)
{
    int fd = openat(up, ".", O_RDONLY | O_DIRECTORY | O_CLOEXEC);
    DIR *u = fd < 0 ? NULL : fdopendir(fd);
    struct dirent *x;
    bool explained = false;
    while (u && (x = readdir(u))) {
        const char *name = x->d_name;
        struct stat su, sl;
        if (!strcmp(name, ".") || !strcmp(name, "..") || !wanted(d, name) || fstatat(up, name, &su, AT_SYMLINK_NOFOLLOW) < 0)
            continue;
        bool below = low >= 0 && fstatat(low, name, &sl, AT_SYMLINK_NOFOLLOW) == 0;
        if (is_whiteout(&su)) {
            if (below)
                tell(d, 'x', NULL, name);
            explained = true;
        } else if (S_ISDIR(su.st_mode))
            compare(d, up, below && S_ISDIR(sl.st_mode) ? low : -1, depth, &su, below && S_ISDIR(sl.st_mode) ? &sl : NULL, name);
        else if (!below || !same_node(up, name, &su, low, name, &sl)) {
            tell(d, entry_kind(su.st_mode), &su, name);
            explained = true;
        }
        explained |= !below;
    }
    if (u)
        closedir(u);
    if (low >= 0 && is_opaque(up))
        explained |= hidden(d, up, low);
    return explained;
}

/* A directory of the upper layer. It is told when it is new, when mode, owner or attributes differ, or when its time
 * does and nothing in it says why. */
static void compare(struct diff *d, int up, int low, int depth, const struct stat *su, const struct stat *sl, const char *name)
{
    size_t len = d->path.len;
    int sub = open_dir(up, name), sublow = low >= 0 ? open_dir(low, name) : -1;
    bool differs = !sl || !same_meta(su, sl) || (sub >= 0 && sublow >= 0 && !same_xattrs(sub, sublow));
    if (differs)
        tell(d, 'd', su, name);
    if (sub < 0 || depth >= TREE_DEPTH_MAX)
        d->cut |= wanted(d, name) != 0;
    else if (buf_add(&d->path, "/", 1) == 0 && buf_add(&d->path, name, strlen(name)) == 0) {
        bool explained = entries(d, sub, sublow, depth + 1);
        d->path.len = len;
        if (!differs && !explained && (su->st_mtim.tv_sec != sl->st_mtim.tv_sec || su->st_mtim.tv_nsec != sl->st_mtim.tv_nsec))
            tell(d, 'd', su, name);
    }
    d->path.len = len;
    fd_close(&sub);
    fd_close(&sublow);
}

static void queues(struct diff *d)
{
    int fd = mqueue_open(d->w->k);
    DIR *q = fd < 0 ? NULL : fdopendir(fd);
    struct dirent *x;
    struct stat st;
    while (q && (x = readdir(q)))
        if (x->d_name[0] != '.' && fstatat(dirfd(q), x->d_name, &st, AT_SYMLINK_NOFOLLOW) == 0)
            tell(d, 'o', &st, x->d_name);
    if (q)
        closedir(q);
}

static void at_target(struct diff *d, const char *target)
{
    d->path.len = 0;
    if (strcmp(target, "/") && buf_add(&d->path, target, strlen(target)) < 0)
        _exit(1);
}

size_t changes_below(struct worker *w, char *only, size_t cap)
{
    struct err e = {0};
    int n = tlv_str(w->p, w->n, TAG_PATH, only, cap);
    while (n > 0 && only[n - 1] == '/')
        only[--n] = 0;
    if (n == -2 || (n > 0 && only[0] != '/')) {
        fail(&e, EINVAL, "list changes: an absolute path is wanted");
        worker_fail(w, &e);
    }
    return n > 0 ? (size_t)n : 0;
}

void work_changes(struct worker *w)
{
    struct err e = {0};
    struct buf reply = {0};
    char only[4096], path[64];
    uint16_t above[MAX_CHAIN];
    struct diff d = {.w = w, .view = -1, .only = only, .limit = tlv_get(w->p, w->n, TAG_LIMIT, UINT64_MAX)};
    d.only_len = changes_below(w, only, sizeof only);
    int view = w->k->root_fd; /* of the episode */
    unsigned more = stand_since(w, above);
    int below = view_below(w->k, &e);
    if (below < 0)
        worker_fail(w, &e);
    for (unsigned i = 0; i < w->k->set.overlays; i++) {
        const char *target = w->k->set.overlay[i].target;
        path_join(path, sizeof path, "/k/u/%u/u/%u", w->k->generation, i);
        int up = open(path, O_RDONLY | O_DIRECTORY | O_CLOEXEC);
        int low = k_open_in(below, target, O_RDONLY | O_DIRECTORY, K_RESOLVE_IN_ROOT);
        if (up < 0 || low < 0) {
            fail(&e, errno, "open the layers of %s", target);
            worker_fail(w, &e);
        }
        at_target(&d, target);
        entries(&d, up, low, 0);
        close(up);
        for (unsigned j = 0; j < more; j++) {
            path_join(path, sizeof path, "/k/s/%u/u/%u", above[j], i);
            if ((up = open(path, O_RDONLY | O_DIRECTORY | O_CLOEXEC)) < 0)
                continue;
            at_target(&d, target);
            d.view = view;
            entries(&d, up, low, 0);
            d.view = -1;
            close(up);
        }
        close(low);
    }
    path_join(path, sizeof path, "/k/u/%u/shm", w->k->generation);
    int shm = open(path, O_RDONLY | O_DIRECTORY | O_CLOEXEC);
    if (shm >= 0) {
        at_target(&d, "/dev/shm");
        entries(&d, shm, -1, 0);
        close(shm);
    }
    at_target(&d, "/dev/mqueue");
    queues(&d);
    put_u64(&reply, TAG_COUNT, d.count);
    put_u64(&reply, TAG_BYTES, d.bytes);
    put_u32(&reply, TAG_FLAGS, d.cut ? C_CUT : 0);
    worker_done(w, &reply);
}
