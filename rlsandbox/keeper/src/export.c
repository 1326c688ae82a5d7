/* EXPORT: an upper layer or a sealed one as a tar stream. */
#include <dirent.h>
#include <limits.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sched.h>
#include <sys/mount.h>
#include <sys/xattr.h>

#include "stack.h"
#include "shared.h"
#include "sys.h"
#include "tar.h"
#include "trees.h"

struct export {
    struct worker *w;
    struct buf path; /* of the directory being written, with a slash at its end unless empty; a zero follows */
    struct links {
        dev_t dev;
        ino_t ino;
        char *path;
    } *links;
    size_t nlinks, cap;
    uint64_t count;
};

static void octal(char *at, size_t n, uint64_t v)
{
    for (size_t i = n - 1; i-- > 0; v >>= 3)
        at[i] = (char)('0' + (v & 7));
    at[n - 1] = 0;
}

/* LENGTH KEY=VALUE\n, where the length counts itself */
static void record(struct buf *b, const char *key, const void *value, size_t n)
{
    char head[400];
    size_t rest = strlen(key) + n + 3, digits = 1; /* space, =, newline */
    for (;;) {
        int d = snprintf(head, sizeof head, "%zu", rest + digits);
        if ((size_t)d == digits)
            break;
        digits = (size_t)d;
    }
    int h = snprintf(head, sizeof head, "%zu %s=", rest + digits, key);
    if (h < 0 || (size_t)h >= sizeof head || buf_add(b, head, (size_t)h) < 0 || buf_add(b, value, n) < 0 || buf_add(b, "\n", 1) < 0)
        _exit(1);
}

static void block(struct worker *w, const char *name, size_t name_len, char type, const struct stat *st, uint64_t size, const char *link, size_t link_len)
{
    char h[TAR_BLOCK] = {0};
    unsigned sum = 0;
    memcpy(h, name, name_len < 100 ? name_len : 100);
    octal(h + 100, 8, st ? st->st_mode & 07777 : 0644);
    octal(h + 108, 8, st && st->st_uid <= 07777777 ? st->st_uid : 0);
    octal(h + 116, 8, st && st->st_gid <= 07777777 ? st->st_gid : 0);
    octal(h + 124, 12, size <= 077777777777ull ? size : 0);
    octal(h + 136, 12, st && st->st_mtim.tv_sec > 0 && st->st_mtim.tv_sec <= 077777777777ll ? (uint64_t)st->st_mtim.tv_sec : 0);
    memset(h + 148, ' ', 8);
    h[156] = type;
    if (link)
        memcpy(h + 157, link, link_len < 100 ? link_len : 100);
    memcpy(h + 257, "ustar\00000", 8);
    for (size_t i = 0; i < sizeof h; i++)
        sum += (unsigned char)h[i];
    snprintf(h + 148, 8, "%06o", sum);
    h[155] = ' ';
    worker_write(w, h, sizeof h);
}

static void pad(struct worker *w, uint64_t n)
{
    static const char zeros[TAR_BLOCK];
    if (n % TAR_BLOCK)
        worker_write(w, zeros, TAR_BLOCK - n % TAR_BLOCK);
}

static void xattrs(struct buf *pax, int fd)
{
    static char names[64 << 10], value[64 << 10];
    ssize_t n = flistxattr(fd, names, sizeof names);
    for (ssize_t at = 0; at < n; at += (ssize_t)strlen(names + at) + 1) {
        char key[300];
        ssize_t v = fgetxattr(fd, names + at, value, sizeof value);
        if (v >= 0 && !is_overlays_own(names + at) && path_join(key, sizeof key, TAR_XATTR "%s", names + at) == 0)
            record(pax, key, value, (size_t)v);
    }
}

/* A header, with an extended one before it where the plain one cannot say it. fd: for attributes, -1 without. */
static void header(struct export *x, const char *name, char type, const struct stat *st, uint64_t size, const char *link, int fd, bool literal)
{
    struct buf pax = {0}, full = {0};
    char text[64];
    if (buf_add(&full, x->path.p, x->path.len) < 0 || buf_add(&full, name, strlen(name)) < 0 || (type == '5' && *name && buf_add(&full, "/", 1) < 0))
        _exit(1);
    if (!full.len && buf_add(&full, "./", 2) < 0)
        _exit(1);
    if (full.len > 100)
        record(&pax, "path", full.p, full.len);
    size_t link_len = link ? strlen(link) : 0;
    if (link_len > 100)
        record(&pax, "linkpath", link, link_len);
    if (size > 077777777777ull) {
        path_join(text, sizeof text, "%llu", (unsigned long long)size);
        record(&pax, "size", text, strlen(text));
    }
    if (st && (st->st_mtim.tv_nsec || st->st_mtim.tv_sec < 0 || st->st_mtim.tv_sec > 077777777777ll)) {
        path_join(text, sizeof text, "%lld.%09ld", (long long)st->st_mtim.tv_sec, st->st_mtim.tv_nsec);
        record(&pax, "mtime", text, strlen(text));
    }
    if (literal)
        record(&pax, TAR_LITERAL, "1", 1);
    if (fd >= 0)
        xattrs(&pax, fd);
    if (pax.len) {
        block(x->w, "pax", 3, 'x', NULL, pax.len, NULL, 0);
        worker_write(x->w, pax.p, pax.len);
        pad(x->w, pax.len);
    }
    block(x->w, (char *)full.p, full.len, type, st, size, link, link_len);
    buf_free(&pax);
    buf_free(&full);
    x->count++;
}

static void content(struct export *x, int fd, uint64_t size)
{
    static uint8_t room[64 << 10];
    uint64_t left = size;
    while (left) {
        ssize_t r = read(fd, room, left < sizeof room ? (size_t)left : sizeof room);
        if (r < 0 && errno == EINTR)
            continue;
        if (r <= 0) { /* it was cut off meanwhile: the header has promised */
            memset(room, 0, sizeof room);
            r = (ssize_t)(left < sizeof room ? left : sizeof room);
        }
        worker_write(x->w, room, (size_t)r);
        left -= (uint64_t)r;
    }
    pad(x->w, size);
}

/* the path under which this file was written before; else it is noted */
static const char *seen(struct export *x, const struct stat *st, const char *name)
{
    for (size_t i = 0; i < x->nlinks; i++)
        if (x->links[i].dev == st->st_dev && x->links[i].ino == st->st_ino)
            return x->links[i].path;
    if (x->nlinks == x->cap) {
        size_t cap = x->cap ? x->cap * 2 : 64;
        struct links *q = realloc(x->links, cap * sizeof *q);
        if (!q)
            return NULL;
        x->links = q;
        x->cap = cap;
    }
    char *full;
    if (asprintf(&full, "%.*s%s", (int)x->path.len, x->path.len ? (char *)x->path.p : "", name) >= 0)
        x->links[x->nlinks++] = (struct links){st->st_dev, st->st_ino, full};
    return NULL;
}

static void directory(struct export *x, int fd, int depth);

static void entry(struct export *x, int dir, const char *name, int depth)
{
    struct stat st;
    char target[PATH_MAX];
    bool literal = strncmp(name, TAR_WHITEOUT, sizeof TAR_WHITEOUT - 1) == 0;
    if (fstatat(dir, name, &st, AT_SYMLINK_NOFOLLOW) < 0)
        return; /* gone meanwhile */
    if (is_whiteout(&st)) {
        char gone[NAME_MAX + 8];
        if (path_join(gone, sizeof gone, TAR_WHITEOUT "%s", name) == 0)
            header(x, gone, '0', NULL, 0, NULL, -1, false);
    } else if (S_ISLNK(st.st_mode)) {
        ssize_t n = readlinkat(dir, name, target, sizeof target - 1);
        if (n < 0)
            return;
        target[n] = 0;
        header(x, name, '2', &st, 0, target, -1, literal);
    } else if (S_ISDIR(st.st_mode)) {
        size_t len = x->path.len;
        int fd = open_dir(dir, name);
        if (fd < 0 && errno == ENOENT)
            return;
        if (fd < 0 || depth >= TREE_DEPTH_MAX) { /* never less than there is, silently */
            struct err e = {0};
            fail(&e, fd < 0 ? errno : ELOOP, "export a directory that lies %d deep", depth + 1);
            worker_fail(x->w, &e);
        }
        header(x, name, '5', &st, 0, NULL, fd, literal);
        if (buf_add(&x->path, name, strlen(name)) == 0 && buf_add(&x->path, "/", 1) == 0) {
            if (is_opaque(fd))
                header(x, TAR_OPAQUE, '0', NULL, 0, NULL, -1, false);
            directory(x, fd, depth + 1);
        }
        x->path.len = len;
        close(fd);
    } else if (S_ISREG(st.st_mode)) {
        const char *first = st.st_nlink > 1 ? seen(x, &st, name) : NULL;
        if (first) {
            header(x, name, '1', &st, 0, first, -1, literal);
            return;
        }
        int fd = openat(dir, name, O_RDONLY | O_NOFOLLOW | O_NONBLOCK | O_CLOEXEC);
        if (fd < 0 || fstat(fd, &st) < 0) {
            fd_close(&fd);
            return;
        }
        header(x, name, '0', &st, (uint64_t)st.st_size, NULL, fd, literal);
        content(x, fd, (uint64_t)st.st_size);
        close(fd);
    } else if (S_ISFIFO(st.st_mode))
        header(x, name, '6', &st, 0, NULL, -1, literal);
    /* a socket is nothing without its process; devices there are none */
}

static void directory(struct export *x, int fd, int depth)
{
    int again = openat(fd, ".", O_RDONLY | O_DIRECTORY | O_CLOEXEC);
    DIR *d = again < 0 ? NULL : fdopendir(again);
    struct dirent *e;
    while (d && (e = readdir(d)))
        if (strcmp(e->d_name, ".") && strcmp(e->d_name, ".."))
            entry(x, fd, e->d_name, depth);
    if (d)
        closedir(d);
}

/* flags 1: with all layers below, in one */
/* slot: of a sealed layer, which is put together with all below it; -1: the live upper */
static void merged(struct worker *w, int slot, char *top, size_t cap, struct err *e)
{
    static char paths[MAX_CHAIN + 1][64];
    const char *from[MAX_CHAIN + 1];
    struct keeper *k = w->k;
    unsigned n = 0;
    if (slot < 0)
        path_join(paths[n++], sizeof paths[0], "/k/u/%u", k->generation);
    const uint16_t *chain = slot < 0 ? k->stack : k->layers.at[slot]->chain;
    for (unsigned i = 0; i < (slot < 0 ? k->nstack : k->layers.at[slot]->n); i++)
        layers_path(&k->layers, chain[i], paths[n++], sizeof paths[0]);
    for (unsigned i = 0; i < n; i++)
        from[i] = paths[i];
    if (k->set.shared) {
        if (shared_scratch(e) == 0 && flatten(k, from, n, ".", e) == 0)
            path_join(top, cap, ".");
    } else if (unshare(CLONE_NEWNS) < 0 || mount("rls", "/k/m", "tmpfs", 0, "mode=0755") < 0)
        fail(e, errno, "mount a tmpfs to put layers together");
    else if (flatten(k, from, n, "/k/m", e) == 0)
        path_join(top, cap, "/k/m");
}

void work_export(struct worker *w)
{
    static const char end[2 * TAR_BLOCK];
    struct keeper *k = w->k;
    struct err e = {0};
    struct buf reply = {0};
    struct export x = {.w = w, .path.max = TAR_PATH_MAX};
    char layer[LAYER_NAME] = "", top[64] = "", path[96];
    int slot = -1;
    if (tlv_str(w->p, w->n, TAG_LAYER, layer, sizeof layer) > 0 && (slot = layers_find(&k->layers, layer)) < 0)
        fail(&e, ENOENT, "export layer %s: it is not here", layer);
    else if (tlv_get(w->p, w->n, TAG_FLAGS, 0) & EXPORT_ALL)
        merged(w, slot, top, sizeof top, &e);
    else if (slot >= 0)
        layers_path(&k->layers, (unsigned)slot, top, sizeof top);
    else
        path_join(top, sizeof top, "/k/u/%u", k->generation);
    for (unsigned i = 0; i < k->set.overlays && !e.no; i++) {
        const char *target = k->set.overlay[i].target + 1;
        struct stat st;
        path_join(path, sizeof path, "%s/u/%u", top, i);
        int fd = open(path, O_RDONLY | O_DIRECTORY | O_CLOEXEC);
        x.path.len = 0;
        if (fd < 0 || fstat(fd, &st) < 0)
            fail(&e, errno, "open the upper layer of /%s", target);
        else if (*target && (buf_add(&x.path, target, strlen(target)) < 0 || buf_add(&x.path, "/", 1) < 0))
            fail(&e, errno, "write a path");
        else {
            header(&x, "", '5', &st, 0, NULL, fd, false);
            directory(&x, fd, 0);
        }
        fd_close(&fd);
    }
    if (e.no)
        worker_fail(w, &e);
    worker_write(w, end, sizeof end);
    put_u64(&reply, TAG_COUNT, x.count);
    worker_done(w, &reply);
}
