#include "loop.h"

#include <sys/epoll.h>
#include <unistd.h>

int loop_init(struct loop *l)
{
    *l = (struct loop){.ep = epoll_create1(EPOLL_CLOEXEC)};
    return l->ep < 0 ? -1 : 0;
}

int loop_add(struct loop *l, struct src *s, int fd, uint32_t events, void (*fn)(struct src *, uint32_t), void *owner)
{
    struct epoll_event e = {.events = events, .data.ptr = s};
    s->fd = fd;
    s->events = events;
    s->fn = fn;
    s->owner = owner;
    return epoll_ctl(l->ep, EPOLL_CTL_ADD, fd, &e);
}

int loop_want(struct loop *l, struct src *s, uint32_t events)
{
    if (s->fd < 0 || s->events == events)
        return 0;
    /* without any interest even a hang-up would wake the loop for ever: out of the set altogether */
    struct epoll_event e = {.events = events, .data.ptr = s};
    int op = !events ? EPOLL_CTL_DEL : !s->events ? EPOLL_CTL_ADD : EPOLL_CTL_MOD;
    s->events = events;
    return epoll_ctl(l->ep, op, s->fd, &e);
}

void loop_drop(struct loop *l, struct src *s)
{
    if (s->fd < 0)
        return;
    if (s->events)
        epoll_ctl(l->ep, EPOLL_CTL_DEL, s->fd, NULL);
    s->events = 0;
    fd_close(&s->fd);
    l->stale = true;
}

int loop_turn(struct loop *l, int timeout_ms)
{
    struct epoll_event ev[64];
    int n = epoll_wait(l->ep, ev, COUNT_OF(ev), timeout_ms);
    if (n < 0)
        return errno == EINTR ? 0 : -1;
    l->stale = false;
    for (int i = 0; i < n && !l->stale && !l->stop; i++) {
        struct src *s = ev[i].data.ptr;
        s->fn(s, ev[i].events);
    }
    return n;
}
