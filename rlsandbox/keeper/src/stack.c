#include "stack.h"

#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mount.h>
#include <sys/vfs.h>

#include "manifest.h"
#include "procs.h"
#include "standby.h"
#include "sys.h"
#include "trees.h"

int stack_set(struct keeper *k, const char *layer, struct err *e)
{
    int slot = -1;
    if (*layer && (slot = layers_find(&k->layers, layer)) < 0)
        return fail(e, ENOENT, "stand on layer %.100s: it is not here", layer);
    k->nstack = slot < 0 ? 0 : k->layers.at[slot]->n;
    if (slot >= 0)
        memcpy(k->stack, k->layers.at[slot]->chain, sizeof k->stack);
    return 0;
}

void layers_facts(struct worker *w)
{
    for (unsigned i = 0; i < w->k->nstack; i++) {
        fact(w, "layer");
        field_s(w, w->k->layers.at[w->k->stack[i]]->name);
        fact_end(w);
    }
}

size_t episode_living(struct keeper *k)
{
    struct procs ps = {0};
    size_t n = 0;
    standby_settle(k);
    int dir = procs_dir(k);
    pid_t init = k->foreign_proc ? k->init_pid : 1, standby = standby_pid(k);
    if (dir >= 0 && procs_read(dir, &ps) == 0) {
        if (k->foreign_proc)
            procs_mark_tree(&ps, init);
        for (size_t i = 0; i < ps.n; i++)
            n += ps.p[i].pid != init && ps.p[i].pid != standby && ps.p[i].state != 'Z' && ps.p[i].state != 'X' && (ps.p[i].in || !k->foreign_proc);
    }
    procs_free(&ps);
    fd_close(&dir);
    return n;
}

uint64_t tmpfs_used(const char *path)
{
    struct statfs fs;
    return statfs(path, &fs) == 0 ? (uint64_t)(fs.f_blocks - fs.f_bfree) * (uint64_t)fs.f_bsize : 0;
}

static int publish(struct keeper *k, unsigned slot, const char *place, struct err *e)
{
    struct buf b = {0};
    int fds[MAX_CHAIN];
    unsigned n = 0;
    if (k->set.shared) /* no mount can be handed over, and nobody else is there */
        return 0;
    int r = put_str(&b, TAG_KIND, "sealed") < 0 || (k->set.disk && put_str(&b, TAG_PATH, place) < 0) ? fail(e, errno, "describe a layer") : layers_put(&k->layers, slot, &b, fds, &n, e);
    if (r == 0 && k->hub.fd >= 0 && msg_send(k->hub.fd, b.p, b.len, fds, n) < 0)
        r = fail(e, errno, "give the layer to the hub");
    for (unsigned i = 0; i < n; i++)
        close(fds[i]);
    buf_free(&b);
    return r;
}

/* The whole chain in one place, since an overlay of very many layers is slow. Its descriptor, detached. */
static int flattened(struct keeper *k, const char *upper, const char *place, struct err *e)
{
    static char paths[MAX_CHAIN + 1][64];
    const char *from[MAX_CHAIN + 1];
    unsigned n = 1;
    path_join(paths[0], sizeof paths[0], "%s", upper);
    for (; n <= k->nstack; n++)
        layers_path(&k->layers, k->stack[n - 1], paths[n], sizeof paths[n]);
    for (unsigned i = 0; i < n; i++)
        from[i] = paths[i];
    int fd = -1;
    if (place_new(k, "/k/u/flat", place, false, e) == 0 && flatten(k, from, n, "/k/u/flat", e) == 0 && (fd = k_open_tree(AT_FDCWD, "/k/u/flat", K_OPEN_TREE_CLONE)) < 0)
        fail(e, errno, "clone the flattened layer");
    place_drop(k, "/k/u/flat", place, fd >= 0);
    return fd;
}

/* What a sealed layer need not keep: the work directories and /dev/shm. */
static void strip(const char *upper)
{
    int dir = open(upper, O_RDONLY | O_DIRECTORY | O_CLOEXEC);
    if (dir >= 0) {
        remove_tree(dir, "w"); /* what remains is a little memory */
        remove_tree(dir, "shm");
    }
    fd_close(&dir);
}

int layer_make(struct keeper *k, const char *upper, const char *name, struct err *e)
{
    bool flat = k->nstack + 1 > MAX_CHAIN;
    char place[32];
    if (flat)
        path_join(place, sizeof place, "flat%u", ++k->imports);
    else
        path_join(place, sizeof place, "%s", strrchr(upper, '/') + 1);
    int fd = flat ? flattened(k, upper, place, e) : k_open_tree(AT_FDCWD, upper, K_OPEN_TREE_CLONE);
    if (fd < 0)
        return fail(e, errno, "clone the mount of the upper layer");
    if (!flat)
        strip(upper);
    struct k_mount_attr a = {.attr_set = K_ATTR_RDONLY};
    int slot = -1;
    char path[64];
    struct statfs fs;
    uint64_t bytes = k->set.disk ? tree_bytes(fd, 0) : fstatfs(fd, &fs) == 0 ? (uint64_t)(fs.f_blocks - fs.f_bfree) * (uint64_t)fs.f_bsize : 0;
    if (!k->set.shared && k_mount_setattr(fd, "", AT_EMPTY_PATH, &a) < 0)
        fail(e, errno, "make the layer read-only");
    else
        slot = layers_add(&k->layers, name, fd, bytes, k->stack, flat ? 0 : k->nstack, e);
    close(fd);
    if (slot < 0)
        return -1;
    layers_path(&k->layers, (unsigned)slot, path, sizeof path);
    if (publish(k, (unsigned)slot, place, e) < 0) {
        k->layers.at[slot]->named = false;
        layers_gc(&k->layers, k->stack, k->nstack);
        return -1;
    }
    return slot;
}

void op_seal(struct keeper *k, uint32_t channel, const uint8_t *p, size_t n)
{
    char name[LAYER_NAME];
    struct err e = {0}, start = {0};
    struct buf b = {0};
    unsigned old = k->generation;
    int slot = -1;
    bool flat = k->nstack + 1 > MAX_CHAIN; /* then the layer is a copy */
    if (k->set.manifest) {
        manifest_seal(k, channel, p, n);
        return;
    }
    if (tlv_str(p, n, TAG_LAYER, name, sizeof name) <= 0) {
        conn_fail(&k->conn, channel, EINVAL, "seal a layer: it needs a name under 128 bytes");
        return;
    }
    if (layers_find(&k->layers, name) >= 0) {
        conn_fail(&k->conn, channel, EEXIST, "seal a layer: there is one of that name");
        return;
    }
    if (k->init.fd < 0) {
        conn_fail(&k->conn, channel, ESRCH, "seal a layer: there is no episode");
        return;
    }
    if (!(tlv_get(p, n, TAG_FLAGS, 0) & SEAL_KILL) && episode_living(k)) {
        conn_fail(&k->conn, channel, EBUSY, "seal a layer: processes of the episode are running");
        return;
    }
    episode_kill(k);
    chan_end_all(k, ECANCELED, "run in the episode: its files were sealed");
    char upper[64];
    path_join(upper, sizeof upper, "/k/u/%u", k->generation);
    slot = layer_make(k, upper, name, &e);
    if (slot >= 0) {
        k->nstack = k->layers.at[slot]->n;
        memcpy(k->stack, k->layers.at[slot]->chain, sizeof k->stack);
    }
    /* also after a failure: the sandbox lives, on what it stood on */
    if (episode_start(k, &start) < 0 && !e.no)
        e = start;
    if (e.no)
        conn_fail(&k->conn, channel, e.no, e.what);
    else if (put_u64(&b, TAG_BYTES, k->layers.at[slot]->bytes) == 0)
        conn_send(&k->conn, T_REPLY, 0, channel, b.p, b.len);
    else
        k->conn.broken = true;
    buf_free(&b);
    keeper_flush(k);
    upper_forget(k, old, slot >= 0 && !flat);
    layers_gc(&k->layers, k->stack, k->nstack);
}

void op_drop_layer(struct keeper *k, uint32_t channel, const uint8_t *p, size_t n)
{
    char name[LAYER_NAME];
    int slot = tlv_str(p, n, TAG_LAYER, name, sizeof name) > 0 ? layers_find(&k->layers, name) : -1;
    if (k->set.manifest)
        manifest_drop(name);
    if (slot >= 0)
        k->layers.at[slot]->named = false; /* what stands on it keeps it */
    conn_send(&k->conn, T_REPLY, 0, channel, NULL, 0);
    keeper_flush(k);
    layers_gc(&k->layers, k->stack, k->nstack);
}

void layer_given(struct keeper *k, const uint8_t *p, size_t n, int *fds, size_t nfds)
{
    struct err e = {0};
    struct buf b = {0};
    layers_take(&k->layers, p, n, fds, nfds, &e);
    layers_gc(&k->layers, k->stack, k->nstack);
    if (put_str(&b, TAG_KIND, "given") < 0 || put_u64(&b, TAG_COUNT, tlv_get(p, n, TAG_COUNT, 0)) < 0 ||
        (e.no && (put_u32(&b, TAG_ERRNO, (uint32_t)e.no) < 0 || put_str(&b, TAG_WHAT, e.what) < 0)) ||
        msg_send(k->hub.fd, b.p, b.len, NULL, 0) < 0)
        k->loop.stop = true;
    buf_free(&b);
}
