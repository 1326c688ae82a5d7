/* IMPORT: a tar stream becomes a sealed layer on top of those that the episode stands on. Nothing in the stream is trusted:
 * paths are walked a part at a time without links, below the layer's own directories. */
#include <limits.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mount.h>
#include <sys/statvfs.h>
#include <sys/xattr.h>

#include "stack.h"
#include "sys.h"
#include "tar.h"
#include "trees.h"

struct member {
    char type;
    struct buf path, link; /* zero at the end, not counted */
    uint64_t size;
    mode_t mode;
    uid_t uid;
    gid_t gid;
    struct timespec mtime;
    bool literal;
    struct buf xattrs; /* name, zero, u32 length, value; repeated */
};

/* directories get their times when all is in them */
struct later {
    char *path;
    unsigned overlay;
    struct timespec mtime;
};

struct import {
    struct worker *w;
    struct err e;
    int top[MAX_OVERLAYS];
    struct later *later;
    size_t nlater, cap;
    struct buf name, linkname; /* from GNU long name headers */
};

static _Noreturn void bad(struct import *m, int no, const char *what, const char *path)
{
    fail(&m->e, no, "import a layer: %s%s%.200s", what, *path ? ": " : "", path);
    worker_fail(m->w, &m->e);
}

static void bytes(struct import *m, void *p, size_t n)
{
    ssize_t r = read_all(m->w->in, p, n);
    if (r != (ssize_t)n)
        bad(m, r < 0 ? errno : EPIPE, "the stream ends in the middle", "");
}

static void skip(struct import *m, uint64_t n)
{
    char room[TAR_BLOCK];
    for (n = (n + TAR_BLOCK - 1) / TAR_BLOCK; n; n--)
        bytes(m, room, sizeof room);
}

static uint64_t numeric(struct import *m, const uint8_t *p, size_t n)
{
    uint64_t v = 0;
    if (p[0] & 0x80) { /* big endian instead of octal */
        for (size_t i = 1; i < n; i++) {
            if (v >> 56)
                bad(m, EOVERFLOW, "a number is too large", "");
            v = v << 8 | p[i];
        }
        return v;
    }
    for (size_t i = 0; i < n && p[i]; i++) {
        if (p[i] == ' ')
            continue;
        if (p[i] < '0' || p[i] > '7' || v >> 61)
            bad(m, EINVAL, "a number in a header is none", "");
        v = v << 3 | (uint64_t)(p[i] - '0');
    }
    return v;
}

static void set(struct import *m, struct buf *b, const void *p, size_t n)
{
    b->len = 0;
    b->max = TAR_PATH_MAX + 1;
    if (n > TAR_PATH_MAX || memchr(p, 0, n) || buf_add(b, p, n) < 0 || buf_add(b, "", 1) < 0)
        bad(m, ENAMETOOLONG, "a path is too long or has a zero in it", "");
    b->len--;
}

static void pax_time(struct import *m, struct timespec *t, const char *s)
{
    char *end;
    errno = 0;
    long long sec = strtoll(s, &end, 10);
    long nsec = 0;
    if (*end == '.')
        for (long unit = 100000000, i = 0; i < 9 && end[1 + i] >= '0' && end[1 + i] <= '9'; i++, unit /= 10)
            nsec += (end[1 + i] - '0') * unit;
    if (errno || end == s)
        bad(m, EINVAL, "a time is none", s);
    *t = (struct timespec){sec, nsec};
}

struct pax {
    bool path, link, size, mtime;
};

static void pax_record(struct import *m, struct member *x, struct pax *has, char *key, char *value, size_t n)
{
    if (strcmp(key, "path") == 0) {
        set(m, &x->path, value, n);
        has->path = true;
    } else if (strcmp(key, "linkpath") == 0) {
        set(m, &x->link, value, n);
        has->link = true;
    } else if (strcmp(key, "size") == 0) {
        x->size = strtoull(value, NULL, 10);
        has->size = true;
    } else if (strcmp(key, "mtime") == 0) {
        pax_time(m, &x->mtime, value);
        has->mtime = true;
    } else if (strcmp(key, TAR_LITERAL) == 0)
        x->literal = true;
    else if (strncmp(key, TAR_XATTR, sizeof TAR_XATTR - 1) == 0) {
        const char *name = key + sizeof TAR_XATTR - 1;
        uint8_t len[4];
        set_u32(len, (uint32_t)n);
        x->xattrs.max = 2 * TAR_HEADERS_MAX;
        if (!is_overlays_own(name) && (buf_add(&x->xattrs, name, strlen(name) + 1) < 0 || buf_add(&x->xattrs, len, 4) < 0 || buf_add(&x->xattrs, value, n) < 0))
            bad(m, ENOMEM, "attributes are too large", "");
    }
}

static void pax_read(struct import *m, struct member *x, struct pax *has, uint64_t size)
{
    if (size > TAR_HEADERS_MAX)
        bad(m, E2BIG, "an extended header is too large", "");
    size_t n = (size_t)size, padded = (n + TAR_BLOCK - 1) / TAR_BLOCK * TAR_BLOCK;
    char *text = malloc(padded + 1);
    if (!text)
        bad(m, ENOMEM, "an extended header is too large", "");
    bytes(m, text, padded);
    text[n] = 0;
    for (size_t at = 0; at < n;) {
        char *end;
        unsigned long len = strtoul(text + at, &end, 10);
        size_t digits = (size_t)(end - (text + at));
        char *eq = *end == ' ' && len > digits + 2 && len <= n - at && text[at + len - 1] == '\n' ? memchr(end, '=', len - digits) : NULL;
        if (!eq)
            bad(m, EINVAL, "an extended header is broken", "");
        *eq = 0;
        char *value = eq + 1;
        size_t value_len = (size_t)(text + at + len - 1 - value);
        text[at + len - 1] = 0;
        pax_record(m, x, has, end + 1, value, value_len);
        at += len;
    }
    free(text);
}

static void long_name(struct import *m, struct buf *to, uint64_t size)
{
    if (size > TAR_PATH_MAX)
        bad(m, ENAMETOOLONG, "a path is too long", "");
    char *text = calloc(1, (size_t)size + TAR_BLOCK + 1);
    if (!text)
        bad(m, ENOMEM, "a path is too long", "");
    bytes(m, text, ((size_t)size + TAR_BLOCK - 1) / TAR_BLOCK * TAR_BLOCK);
    text[size] = 0;
    set(m, to, text, strlen(text));
    free(text);
}

/* The next member with all its headers; false at the end. */
static bool next(struct import *m, struct member *x)
{
    uint8_t h[TAR_BLOCK];
    struct pax has = {0};
    bool named = false, linked = false;
    x->xattrs.len = 0;
    x->literal = false;
    for (;;) {
        ssize_t r = read_all(m->w->in, h, sizeof h);
        if (r == 0)
            return false; /* some leave the end's two blocks out */
        if (r != sizeof h)
            bad(m, r < 0 ? errno : EPIPE, "the stream ends in the middle", "");
        unsigned sum = 0, all = 0;
        for (size_t i = 0; i < sizeof h; i++) {
            sum += i >= 148 && i < 156 ? ' ' : h[i];
            all |= h[i];
        }
        if (!all)
            return false;
        if (numeric(m, h + 148, 8) != sum)
            bad(m, EINVAL, "a header's checksum is wrong", "");
        uint64_t size = numeric(m, h + 124, 12);
        char type = (char)h[156];
        if (type == 'x') {
            pax_read(m, x, &has, size);
            continue;
        }
        if (type == 'g') {
            skip(m, size);
            continue;
        }
        if (type == 'L' || type == 'K') {
            long_name(m, type == 'L' ? &m->name : &m->linkname, size);
            named |= type == 'L';
            linked |= type == 'K';
            continue;
        }
        x->type = type ? type : '0';
        if (!has.size)
            x->size = size;
        x->mode = (mode_t)numeric(m, h + 100, 8) & 07777;
        x->uid = (uid_t)numeric(m, h + 108, 8);
        x->gid = (gid_t)numeric(m, h + 116, 8);
        if (!has.mtime)
            x->mtime = (struct timespec){(time_t)numeric(m, h + 136, 12), 0};
        if (!has.path && named)
            set(m, &x->path, m->name.p, m->name.len);
        else if (!has.path) {
            size_t n = strnlen((char *)h, 100), prefix = memcmp(h + 257, "ustar\0", 6) == 0 ? strnlen((char *)h + 345, 155) : 0;
            char full[300];
            path_join(full, sizeof full, "%.*s%s%.*s", (int)prefix, h + 345, prefix ? "/" : "", (int)n, h);
            set(m, &x->path, full, strlen(full));
        }
        if (!has.link && linked)
            set(m, &x->link, m->linkname.p, m->linkname.len);
        else if (!has.link)
            set(m, &x->link, h + 157, strnlen((char *)h + 157, 100));
        return true;
    }
}

/* ---- putting it down ---- */

/* Cleans a path in place: no leading slash or dots, single slashes. */
static void clean(struct import *m, char *path)
{
    char *to = path, *s = path;
    while (*s) {
        size_t n = strcspn(s, "/");
        if (n == 2 && s[0] == '.' && s[1] == '.')
            bad(m, EINVAL, "a path goes up", path);
        if (n && !(n == 1 && *s == '.')) {
            if (to != path)
                *to++ = '/';
            memmove(to, s, n);
            to += n;
        }
        s += n;
        s += *s == '/';
    }
    *to = 0;
}

static unsigned overlay_of(const struct import *m, char **path)
{
    const struct settings *s = &m->w->k->set;
    unsigned best = 0;
    size_t best_len = 0;
    for (unsigned i = 1; i < s->overlays; i++) {
        const char *t = s->overlay[i].target + 1;
        size_t n = strlen(t);
        if (n > best_len && strncmp(*path, t, n) == 0 && ((*path)[n] == '/' || !(*path)[n])) {
            best = i;
            best_len = n;
        }
    }
    *path += best_len;
    *path += **path == '/';
    return best;
}

/* The open directory in which the path's last part lies; that part in *name. Missing directories are made. */
static int parent(struct import *m, unsigned overlay, char *path, char **name)
{
    int dir = fcntl(m->top[overlay], F_DUPFD_CLOEXEC, 3);
    char *slash;
    while (dir >= 0 && (slash = strchr(path, '/'))) {
        *slash = 0;
        if (mkdirat(dir, path, 0755) < 0 && errno != EEXIST)
            bad(m, errno, "make directory", path);
        int sub = open_dir(dir, path);
        if (sub < 0)
            bad(m, errno, "enter what should be a directory", path);
        close(dir);
        dir = sub;
        path = slash + 1;
    }
    *name = path;
    if (dir < 0)
        bad(m, errno, "open a directory", "");
    if (strlen(path) > NAME_MAX)
        bad(m, ENAMETOOLONG, "a name is too long", path);
    return dir;
}

static void attributes(struct import *m, const struct member *x, int fd, const char *path)
{
    struct timespec t[2] = {x->mtime, x->mtime};
    if (fchown(fd, x->uid, x->gid) < 0 && !m->w->k->set.one_id)
        bad(m, errno, "set the owner of", path);
    if (fchmod(fd, x->mode) < 0)
        bad(m, errno, "set the mode of", path);
    for (size_t at = 0; at < x->xattrs.len;) {
        const char *name = (char *)x->xattrs.p + at;
        at += strlen(name) + 1;
        uint32_t n = get_u32(x->xattrs.p + at);
        at += 4;
        if (fsetxattr(fd, name, x->xattrs.p + at, n, 0) < 0 && errno != ENOTSUP && errno != EPERM)
            bad(m, errno, "set an attribute of", path);
        at += n;
    }
    if (futimens(fd, t) < 0)
        bad(m, errno, "set the time of", path);
}

static void content(struct import *m, int fd, uint64_t size, const char *path)
{
    static uint8_t room[64 << 10];
    static const uint8_t zeros[4096];
    for (uint64_t left = size; left;) {
        size_t n = left < sizeof room ? (size_t)left : sizeof room;
        bytes(m, room, n);
        for (size_t at = 0; at < n; at += sizeof zeros) {
            size_t k = n - at < sizeof zeros ? n - at : sizeof zeros;
            bool hole = memcmp(room + at, zeros, k) == 0;
            if (hole ? lseek(fd, (off_t)k, SEEK_CUR) < 0 : write_all(fd, room + at, k) < 0)
                bad(m, errno, "write", path);
        }
        left -= n;
    }
    if (size % TAR_BLOCK)
        bytes(m, room, TAR_BLOCK - size % TAR_BLOCK);
    if (size > INT64_MAX || ftruncate(fd, (off_t)size) < 0)
        bad(m, errno, "set the size of", path);
}

static void later(struct import *m, unsigned overlay, const char *path, struct timespec mtime)
{
    if (m->nlater == m->cap) {
        m->cap = m->cap ? m->cap * 2 : 256;
        m->later = realloc(m->later, m->cap * sizeof *m->later);
        if (!m->later)
            bad(m, ENOMEM, "remember directories", "");
    }
    m->later[m->nlater] = (struct later){strdup(path), overlay, mtime};
    if (!m->later[m->nlater++].path)
        bad(m, ENOMEM, "remember directories", "");
}

static void link_one(struct import *m, struct member *x, unsigned overlay, int dir, const char *name)
{
    char *from = (char *)x->link.p, *last;
    clean(m, from);
    if (overlay_of(m, &from) != overlay)
        bad(m, EXDEV, "a hard link goes to another part of the view", from);
    int other = parent(m, overlay, from, &last);
    struct stat st;
    if (fstatat(other, last, &st, AT_SYMLINK_NOFOLLOW) < 0 || !S_ISREG(st.st_mode) || linkat(other, last, dir, name, 0) < 0)
        bad(m, errno ? errno : EINVAL, "make a hard link to", last);
    close(other);
}

static void put_down(struct import *m, struct member *x)
{
    char *path = (char *)x->path.p, *full, *name;
    clean(m, path);
    full = strdup(path);
    if (!full)
        bad(m, ENOMEM, "remember a path", "");
    unsigned o = overlay_of(m, &path);
    if (!*path) { /* the top of an overlay itself */
        if (x->type != '5')
            bad(m, EINVAL, "the top of the view is no directory in it", full);
        attributes(m, x, m->top[o], full);
        later(m, o, "", x->mtime);
        free(full);
        return;
    }
    char *rest = strdup(path);
    if (!rest)
        bad(m, ENOMEM, "remember a path", "");
    int dir = parent(m, o, path, &name), fd = -1;
    bool special = x->type == '0' && !x->literal && strncmp(name, TAR_WHITEOUT, sizeof TAR_WHITEOUT - 1) == 0;
    struct stat st;
    if (special) {
        const char *gone = name + sizeof TAR_WHITEOUT - 1;
        skip(m, x->size);
        if (strcmp(name, TAR_OPAQUE) == 0) {
            if (set_opaque(dir) < 0)
                bad(m, errno, "hide what is below", full);
        } else if (!*gone || !strcmp(gone, ".") || !strcmp(gone, "..") || (remove_tree(dir, gone) < 0 && errno != ENOENT) || mknodat(dir, gone, S_IFCHR, 0) < 0)
            bad(m, errno ? errno : EINVAL, "note a deletion", full);
        goto end;
    }
    bool there = fstatat(dir, name, &st, AT_SYMLINK_NOFOLLOW) == 0;
    if (there && !(S_ISDIR(st.st_mode) && x->type == '5') && remove_tree(dir, name) < 0)
        bad(m, errno, "replace", full);
    switch (x->type) {
    case '0': case '7':
        fd = openat(dir, name, O_WRONLY | O_CREAT | O_EXCL | O_NOFOLLOW | O_CLOEXEC, 0600);
        if (fd < 0)
            bad(m, errno, "make file", full);
        content(m, fd, x->size, full);
        attributes(m, x, fd, full);
        break;
    case '5':
        if ((mkdirat(dir, name, 0700) < 0 && errno != EEXIST) || (fd = open_dir(dir, name)) < 0)
            bad(m, errno, "make directory", full);
        attributes(m, x, fd, full);
        later(m, o, rest, x->mtime);
        skip(m, x->size);
        break;
    case '1':
        link_one(m, x, o, dir, name);
        skip(m, x->size);
        break;
    case '2':
    case '6':
        if (x->type == '2' ? symlinkat((char *)x->link.p, dir, name) < 0 : mknodat(dir, name, S_IFIFO | x->mode, 0) < 0)
            bad(m, errno, "make link or pipe", full);
        if (fchownat(dir, name, x->uid, x->gid, AT_SYMLINK_NOFOLLOW) < 0 && !m->w->k->set.one_id)
            bad(m, errno, "set the owner of", full);
        struct timespec t[2] = {x->mtime, x->mtime};
        utimensat(dir, name, t, AT_SYMLINK_NOFOLLOW);
        skip(m, x->size);
        break;
    default:
        bad(m, EINVAL, "a device or something unknown", full);
    }
end:
    fd_close(&fd);
    close(dir);
    free(full);
    free(rest);
}

static const char *place_path(unsigned place, char *out, size_t cap)
{
    path_join(out, cap, "/k/u/import%u", place);
    return out + strlen("/k/u/"); /* its name on a disk */
}

void work_import(struct worker *w)
{
    struct import m = {.w = w};
    struct member x = {0};
    struct buf reply = {0};
    char top[64], path[96], *name;
    uint64_t n = 0;
    place_path(w->place, top, sizeof top);
    for (unsigned i = 0; i < w->k->set.overlays; i++) {
        path_join(path, sizeof path, "%s/u/%u", top, i);
        if ((m.top[i] = open(path, O_RDONLY | O_DIRECTORY | O_CLOEXEC)) < 0)
            bad(&m, errno, "open its place", "");
    }
    for (; next(&m, &x); n++)
        put_down(&m, &x);
    while (m.nlater--) {
        struct later *l = &m.later[m.nlater];
        struct timespec t[2] = {l->mtime, l->mtime};
        if (!*l->path) {
            futimens(m.top[l->overlay], t);
            continue;
        }
        int dir = parent(&m, l->overlay, l->path, &name);
        utimensat(dir, name, t, AT_SYMLINK_NOFOLLOW);
        close(dir);
    }
    char room[TAR_BLOCK];
    while (read(w->in, room, sizeof room) > 0) /* the end's second block, padding */
        ;
    put_u64(&reply, TAG_COUNT, n);
    worker_done(w, &reply);
}

/* ---- in the keeper ---- */

int import_begin(struct keeper *k, struct chan *c, struct err *e)
{
    char name[LAYER_NAME], top[64], path[96];
    if (tlv_str(c->msg.p, c->msg.len, TAG_LAYER, name, sizeof name) <= 0)
        return fail(e, EINVAL, "import a layer: it needs a name under %d bytes", LAYER_NAME);
    if (layers_find(&k->layers, name) >= 0)
        return fail(e, EEXIST, "import layer %s", name);
    c->place = ++k->imports;
    if (!(c->layer = strdup(name)))
        return fail(e, ENOMEM, "import a layer");
    if (place_new(k, top, place_path(c->place, top, sizeof top), false, e) < 0)
        return -1;
    path_join(path, sizeof path, "%s/u", top);
    if (mkdir(path, 0755) < 0)
        return fail(e, errno, "make the layer's directories");
    for (unsigned i = 0; i < k->set.overlays; i++) {
        path_join(path, sizeof path, "%s/u/%u", top, i);
        if (mkdir(path, 0755) < 0 || top_like(path, &k->set.overlay[i].top, e) < 0)
            return fail(e, errno, "make the layer's directories");
    }
    return 0;
}

int import_finish(struct chan *c, struct buf *reply, struct err *e)
{
    char top[64];
    place_path(c->place, top, sizeof top);
    int slot = layer_make(c->k, top, c->layer, e);
    c->sealed = slot >= 0;
    return slot < 0 ? -1 : put_u64(reply, TAG_BYTES, c->k->layers.at[slot]->bytes);
}

void import_drop(struct keeper *k, unsigned place, bool sealed)
{
    char top[64];
    const char *name = place_path(place, top, sizeof top);
    place_drop(k, top, name, sealed); /* a layer made of it has a mount of its own */
}
