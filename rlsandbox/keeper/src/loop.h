/* The event loop: sources embedded in their owners, level triggered. */
#ifndef RLS_LOOP_H
#define RLS_LOOP_H
#include "util.h"

struct src {
    int fd;          /* -1: not watched */
    uint32_t events; /* EPOLLIN | EPOLLOUT wanted */
    void (*fn)(struct src *, uint32_t events);
    void *owner;
};

struct loop {
    int ep;
    bool stop;
    bool stale; /* a source went away while a batch was being handled: take a fresh batch */
};

int loop_init(struct loop *l);
int loop_add(struct loop *l, struct src *s, int fd, uint32_t events, void (*fn)(struct src *, uint32_t), void *owner);
int loop_want(struct loop *l, struct src *s, uint32_t events);
void loop_drop(struct loop *l, struct src *s); /* stops watching; closes the descriptor */
int loop_turn(struct loop *l, int timeout_ms); /* waits once and calls; how many had something, -1 on error */

#endif
