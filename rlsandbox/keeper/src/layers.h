/* Sealed upper layers. A layer is a tmpfs with u/<overlay> directories, mounted at <dir>/<slot>; its chain is itself and
 * what it needs below, topmost first. Kept by the keeper of a sandbox (/k/s) and by the hub (/y). */
#ifndef RLS_LAYERS_H
#define RLS_LAYERS_H
#include "util.h"

enum { MAX_LAYERS = 4096, MAX_CHAIN = 32, LAYER_NAME = 128 };

struct layer {
    char name[LAYER_NAME];
    bool named; /* else only kept since others stand on it */
    uint64_t bytes;
    int lock, disk; /* on a disk: the keeper's shared lock on it; the hub's descriptor of it. 0: none */
    unsigned readers; /* helpers that send it to somebody: it stays where it is while there are any */
    unsigned n; /* chain[0] is the layer's own slot */
    uint16_t chain[MAX_CHAIN];
};

struct layers {
    const char *dir;
    bool locks; /* hold a shared lock on each: they lie on a disk */
    void (*gone)(struct layers *, struct layer *); /* before one is forgotten */
    struct layer *at[MAX_LAYERS];
};

int layers_find(const struct layers *l, const char *name); /* slot, or -1 */
int layers_path(const struct layers *l, unsigned slot, char *out, size_t cap);
/* Mounts `fd` (a detached mount) and remembers it. chain: what is below, without the layer itself. Slot, or -1. */
int layers_add(struct layers *l, const char *name, int fd, uint64_t bytes, const uint16_t *chain, unsigned n, struct err *e);
/* Another layer of that name than the mount `fd`? Then the name is taken away from it. Slot of the same one, or -1. */
int layers_same(struct layers *l, const char *name, int fd);
void layers_gc(struct layers *l, const uint16_t *keep, unsigned n); /* unmounts what has no name, no reader and is in no chain */
int layers_clone(const struct layers *l, unsigned slot, struct err *e); /* a detached mount of it */

/* Messages about layers between hub and keeper: descriptors of the chain, topmost first, come along. */
int layers_put(const struct layers *l, unsigned slot, struct buf *b, int *fds, unsigned *n, struct err *e);
int layers_take(struct layers *l, const void *p, size_t len, int *fds, size_t nfds, struct err *e); /* slot; leaves fds open */

#endif
