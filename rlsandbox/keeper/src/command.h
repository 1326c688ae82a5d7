/* A channel and its streams. */
#ifndef RLS_COMMAND_H
#define RLS_COMMAND_H
#include "sandbox.h"

enum { RESULT_MAX = 64 << 10, ASSEMBLING_MAX = 64 << 20 };

/* what a command prints, on its way to the client */
struct sout {
    struct src src; /* the pipe */
    struct chan *ch; /* NULL: the command has ended, what still comes is thrown away */
    uint16_t stream;
    bool watched, queued, eof, eof_sent;
    uint32_t credit;
    uint64_t total;
    uint64_t head_left; /* bytes that go out as they come; UINT64_MAX: all */
    uint64_t left;      /* once the command has ended: bytes of its own still in the pipe; else UINT64_MAX */
    uint8_t *ring;      /* the last `ring_max` bytes after the head */
    size_t ring_cap, ring_max, ring_at, ring_len;
    /* control out only: so much of it was in the pipe when stdout and stderr had `before` bytes read or in their pipes */
    uint64_t may, before[2];
    bool held;
    struct sout *next_ready, *next_draining;
};

/* what the client sends, on its way into a command */
struct sin {
    struct src src; /* the pipe; -1: not asked for, or closed */
    struct buf b;   /* not yet written: b.p[at .. b.len] */
    size_t at;
    uint32_t used;  /* bytes sent by the client and not credited back */
    uint32_t owed;  /* of these, consumed */
    bool asked, eof;
};

struct chan {
    struct chan *next;
    struct keeper *k;
    uint32_t id, op, job;
    struct buf msg;
    struct src result;
    struct buf result_data;
    struct sout *out[3];
    struct sin in[2];
    int standby;  /* the request went this way, and it is not yet known whether it was taken; -1 */
    bool touched; /* signalled by the client */
    unsigned place; /* IMPORT, with the layer's name */
    char *layer;
    bool sealed;
    unsigned reads; /* EXPORT of a sealed layer: its slot + 1. It is no part of the episode, and outlives one */
    int pidfd;
    pid_t pid;
    bool forked, result_done, started, ended, finishing, kill_wanted;
    int status;
    uint32_t flags;
    uint64_t started_ns, deadline_ns;
    pid_t *dying; /* of its killed tree: the end is told when they are gone */
    size_t ndying;
    uint64_t dying_until_ns;
    uint64_t used_bytes; /* of memory, by its tree, at the last look (limits.c) */
};

struct chan *chan_find(struct keeper *k, uint32_t id);
void chan_check(struct chan *c);
void chan_kill(struct chan *c);
void chan_refuse(struct chan *c, int no, const char *what); /* FAIL, and the channel is gone */
void chan_message_done(struct chan *c);
void chan_on_result(struct src *s, uint32_t events);

int sout_open(struct keeper *k, struct chan *c, unsigned i, uint16_t stream, int fd, uint64_t limit); /* takes fd */
void sout_watch(struct keeper *k, struct sout *s);
void sout_finish(struct keeper *k, struct sout *s);
bool sout_credit(struct keeper *k, struct sout *s, uint32_t more);
void sout_release(struct keeper *k, struct sout *s); /* its channel goes; the pipe is drained while somebody holds it */
void sout_free(struct keeper *k, struct sout *s);
int sin_open(struct keeper *k, struct chan *c, unsigned i, int fd);
void sin_go(struct keeper *k, struct chan *c, struct sin *s); /* what had to wait until somebody is there to read it */
bool sin_frame(struct keeper *k, struct chan *c, struct sin *s, const struct frame *f);

#endif
