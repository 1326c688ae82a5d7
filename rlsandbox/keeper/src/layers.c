#include "layers.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/file.h>
#include <sys/mount.h>
#include <sys/stat.h>

#include "protocol.h"
#include "sys.h"

int layers_find(const struct layers *l, const char *name)
{
    for (int i = 0; i < MAX_LAYERS; i++)
        if (l->at[i] && l->at[i]->named && strcmp(l->at[i]->name, name) == 0)
            return i;
    return -1;
}

int layers_path(const struct layers *l, unsigned slot, char *out, size_t cap)
{
    return path_join(out, cap, "%s/%u", l->dir, slot);
}

int layers_add(struct layers *l, const char *name, int fd, uint64_t bytes, const uint16_t *chain, unsigned n, struct err *e)
{
    char path[64];
    int slot = 0;
    while (slot < MAX_LAYERS && l->at[slot])
        slot++;
    if (slot == MAX_LAYERS || n >= MAX_CHAIN || strlen(name) >= LAYER_NAME)
        return fail(e, E2BIG, "keep layer %.100s", name);
    struct layer *y = calloc(1, sizeof *y);
    if (!y)
        return fail(e, ENOMEM, "keep layer %s", name);
    layers_path(l, (unsigned)slot, path, sizeof path);
    if ((mkdir(path, 0755) < 0 && errno != EEXIST) || k_move_mount(fd, "", AT_FDCWD, path) < 0) {
        free(y);
        return fail(e, errno, "mount layer %s", name);
    }
    strcpy(y->name, name);
    y->named = true;
    y->bytes = bytes;
    y->n = n + 1;
    y->chain[0] = (uint16_t)slot;
    if (n)
        memcpy(y->chain + 1, chain, n * sizeof *chain);
    if (l->locks && ((y->lock = open(path, O_RDONLY | O_DIRECTORY | O_CLOEXEC)) < 0 || flock(y->lock, LOCK_SH | LOCK_NB) < 0)) {
        int no = errno;
        fd_close(&y->lock);
        umount2(path, MNT_DETACH);
        free(y);
        return fail(e, no, "hold layer %s", name); /* it is being removed */
    }
    l->at[slot] = y;
    return slot;
}

int layers_same(struct layers *l, const char *name, int fd)
{
    char path[64];
    struct stat a, b;
    for (int i = 0; i < MAX_LAYERS; i++) {
        if (!l->at[i] || strcmp(l->at[i]->name, name))
            continue;
        layers_path(l, (unsigned)i, path, sizeof path);
        if (stat(path, &a) == 0 && fstat(fd, &b) == 0 && a.st_dev == b.st_dev && a.st_ino == b.st_ino)
            return i;
        l->at[i]->named = false;
    }
    return -1;
}

void layers_gc(struct layers *l, const uint16_t *keep, unsigned n)
{
    static bool wanted[MAX_LAYERS];
    char path[64];
    memset(wanted, 0, sizeof wanted);
    for (unsigned i = 0; i < n; i++)
        wanted[keep[i]] = true;
    for (unsigned i = 0; i < MAX_LAYERS; i++)
        for (unsigned j = 0; l->at[i] && (l->at[i]->named || l->at[i]->readers) && j < l->at[i]->n; j++)
            wanted[l->at[i]->chain[j]] = true;
    for (unsigned i = 0; i < MAX_LAYERS; i++)
        if (l->at[i] && !wanted[i]) {
            layers_path(l, i, path, sizeof path);
            umount2(path, MNT_DETACH);
            rmdir(path);
            if (l->gone)
                l->gone(l, l->at[i]);
            if (l->at[i]->lock > 0)
                close(l->at[i]->lock);
            free(l->at[i]);
            l->at[i] = NULL;
        }
}

int layers_clone(const struct layers *l, unsigned slot, struct err *e)
{
    char path[64];
    layers_path(l, slot, path, sizeof path);
    int fd = k_open_tree(AT_FDCWD, path, K_OPEN_TREE_CLONE);
    return fd < 0 ? fail(e, errno, "clone the mount of layer %s", l->at[slot]->name) : fd;
}

int layers_put(const struct layers *l, unsigned slot, struct buf *b, int *fds, unsigned *n, struct err *e)
{
    const struct layer *y = l->at[slot];
    *n = 0;
    for (unsigned i = 0; i < y->n; i++) {
        const struct layer *part = l->at[y->chain[i]];
        int fd = layers_clone(l, y->chain[i], e);
        if (fd < 0)
            return -1;
        fds[(*n)++] = fd;
        if (put_str(b, TAG_LAYER, part->name) < 0 || put_u64(b, TAG_BYTES, part->bytes) < 0 || put_u32(b, TAG_FLAGS, part->named) < 0)
            return fail(e, errno, "describe layer %s", y->name);
    }
    return 0;
}

int layers_take(struct layers *l, const void *p, size_t len, int *fds, size_t nfds, struct err *e)
{
    struct tlv_in it = {p, len};
    struct tlv t;
    char names[MAX_CHAIN][LAYER_NAME];
    uint64_t bytes[MAX_CHAIN] = {0};
    bool named[MAX_CHAIN] = {false};
    uint16_t below[MAX_CHAIN];
    unsigned n = 0, have = 0;
    int slot = -1;
    while (tlv_next(&it, &t) == 1) {
        if (t.tag == TAG_LAYER) {
            if (n == MAX_CHAIN || t.len >= LAYER_NAME || memchr(t.p, 0, t.len))
                return fail(e, EINVAL, "read the description of a layer");
            memcpy(names[n], t.p, t.len);
            names[n++][t.len] = 0;
        } else if (t.tag == TAG_BYTES && n)
            bytes[n - 1] = tlv_uint(&t, 0);
        else if (t.tag == TAG_FLAGS && n)
            named[n - 1] = tlv_uint(&t, 0);
    }
    if (!n || n != nfds)
        return fail(e, EINVAL, "take over a layer: %u parts, %zu mounts", n, nfds);
    for (unsigned i = n; i-- > 0;) { /* from the bottom; below[] is kept topmost first */
        slot = layers_same(l, names[i], fds[i]);
        if (slot < 0 && (slot = layers_add(l, names[i], fds[i], bytes[i], below, have, e)) < 0)
            return -1;
        l->at[slot]->named |= i == 0 || named[i];
        if (i && !named[i] && layers_find(l, names[i]) == slot)
            l->at[slot]->named = false;
        memmove(below + 1, below, have * sizeof *below);
        below[0] = (uint16_t)slot;
        have++;
    }
    return slot;
}
