/* Work of the keeper's own, outside the episode, in a forked helper: it may block and may be killed. */
#ifndef RLS_WORKER_H
#define RLS_WORKER_H
#include "command.h"

enum { WORKER_HERE_MAX = RLS_WINDOW - 4096 }; /* goes out without waiting for credit */

struct worker {
    struct keeper *k;
    int in, out, result; /* content in (IMPORT), content out, and the answer */
    const uint8_t *p;    /* the request's fields */
    size_t n;
    struct buf text;     /* not yet written */
    unsigned place; /* IMPORT: where the layer is put down */
    size_t count; /* facts told */
    bool here, full;     /* here: in the keeper itself, `text` is all there will be; full: it does not fit */
};

/* takes over the channel; `fn` runs in the helper */
void worker_start(struct chan *c, bool wants_in, void (*fn)(struct worker *));
void helpers_reap(struct keeper *k);
pid_t helper_fork(struct keeper *k); /* fork, remembered; in the child all else is still open */

void helper_keep(const int *fds, size_t n); /* in a helper: closes all from 3 up but these */

_Noreturn void worker_fail(struct worker *w, const struct err *e);
_Noreturn void worker_done(struct worker *w, const struct buf *fields);
void worker_write(struct worker *w, const void *p, size_t n); /* gathered; ends the helper when nobody reads */
void worker_flush(struct worker *w);

/* facts: a kind, fields, an end of line; fields are escaped */
void fact(struct worker *w, const char *kind);
void field(struct worker *w, const void *p, size_t n);
void field_s(struct worker *w, const char *s);
void field_f(struct worker *w, const char *fmt, ...) PRINTF(2, 3);
void fact_end(struct worker *w);

void work_inspect(struct worker *w);        /* facts.c */
void work_changes(struct worker *w);        /* changes.c */
size_t changes_below(struct worker *w, char *only, size_t cap); /* changes.c: what CHANGES was asked about; 0: all */
void work_outside_read(struct worker *w);   /* outside.c */
void work_outside_remove(struct worker *w); /* outside.c */
void layers_facts(struct worker *w);        /* layers.c */
/* view.c. The request's layer, where it names one: from here on this helper's episode stands on it and no other. Fills
 * `above` (MAX_CHAIN slots) with those that cover it, topmost first; how many. */
unsigned stand_since(struct worker *w, uint16_t *above);
void limits_facts(struct worker *w);        /* limits.c */
int mqueue_open(struct keeper *k);          /* facts.c: the episode's message queues as a directory, or -1 */
void facts_sockets(struct worker *w, int net);
void facts_network(struct worker *w, int net); /* sockets.c: of /proc/<pid>/net */

#endif
