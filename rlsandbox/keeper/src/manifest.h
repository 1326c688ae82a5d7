/* Mode `manifest`, for pods in which no view can be made: commands run under another uid than the keeper, which is root of the
 * container. A manifest lists every inode; what that uid may change has a pristine copy where it cannot go. */
#ifndef RLS_MANIFEST_H
#define RLS_MANIFEST_H
#include <sys/stat.h>

#include "layers.h"
#include "util.h"

struct keeper;
struct worker;

struct mark { /* an inode of the baseline. Its ctime cannot be set by anybody, so whatever was done to it shows there */
    uint32_t path; /* in `names` */
    uint32_t mode, uid, gid;
    uint64_t dev, ino, size, nlink, mtime, ctime;
    uint32_t flags; /* chattr's, of what has a copy */
    bool kept;    /* there is a copy of it */
    bool timeless; /* of a filesystem (one in memory) whose files keep their times when they are written through a map */
    bool touched; /* put back a moment ago */
};

struct manifest {
    char name[LAYER_NAME]; /* empty: the image */
    unsigned number;       /* of its copies' directory */
    struct mark *at;       /* in the order in which they are found: by path, `/` before all else */
    size_t n, cap;
    char *names;
    size_t len, room;
};

#define MANIFEST_STORE "/.rlsandbox-pristine" /* 0700 */
enum {
    MANIFEST_PATH = 5000, /* a path of the list and one name more */
    MANIFEST_TICK_US = 20000, /* longer than the kernel's clock for times of files stands still */
};

/* manifest.c: listing */
uint32_t inode_flags(int fd); /* those of chattr's that an owner may set; 0 where the filesystem has none */
int inode_flags_set(int fd, uint32_t flags); /* -1 with errno */
int manifest_make(struct manifest *m, uid_t uid, struct err *e); /* nothing may run under that uid */
void manifest_free(struct manifest *m);
const char *mark_path(const struct manifest *m, size_t i);

struct differ {
    const struct manifest *m;
    int (*fn)(void *arg, char kind, const char *path, const struct stat *st, size_t i); /* + new, - gone, ~ changed; i: its mark */
    void *arg;
};
int manifest_diff(struct differ *d, struct err *e);

/* pristine.c: putting back */
int pristine_path(const struct manifest *m, const char *path, char *out, size_t cap);
int pristine_restore(struct manifest *m, const char *only, struct err *e); /* only: this path and what is below it; NULL: all */

/* steady.c: the mode itself */
int manifest_begin(struct keeper *k, struct err *e);
void manifest_end_all(struct keeper *k); /* of the commands' uid, wherever it hides */
void manifest_reset(struct keeper *k, uint32_t channel, const uint8_t *p, size_t n);
void manifest_seal(struct keeper *k, uint32_t channel, const uint8_t *p, size_t n);
void manifest_drop(const char *name);
void manifest_facts(struct worker *w);
void manifest_changes(struct worker *w);
int manifest_restore(const uint8_t *p, size_t n, struct err *e); /* OUTSIDE_REMOVE; in the keeper, whose list it changes */
int manifest_source(const char *path, bool baseline, char *out, size_t cap); /* where to read what is, or was, at `path` */

#endif
