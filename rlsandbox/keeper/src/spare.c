/* Moving a process into a cgroup waits for the whole machine (10 ms when nobody else just did it), so a keeper that is in its
 * groups already waits for the next CREATE that wants limits. It moves itself: the descriptors were opened by the hub. */
#include <signal.h>
#include <stdio.h>
#include <string.h>
#include <sys/epoll.h>
#include <sys/socket.h>

#include "cgroups.h"
#include "sys.h"

static void drop(struct hub *h)
{
    struct spare *s = &h->spare;
    if (s->pid > 0)
        kill(s->pid, SIGKILL); /* reaped as nobody's child */
    loop_drop(&h->loop, &s->src);
    fd_close(&s->stream);
    s->pid = 0;
    s->ready = false;
    if (*s->group)
        groups_free(h, s->group);
    *s->group = 0;
}

static void on_spare(struct src *src, uint32_t events)
{
    struct hub *h = src->owner;
    uint8_t room[1024];
    char kind[16] = "";
    size_t none = 0;
    (void)events;
    ssize_t n = msg_recv(src->fd, room, sizeof room, NULL, &none);
    if (n > 0)
        tlv_str(room, (size_t)n, TAG_KIND, kind, sizeof kind);
    if (n > 0 && strcmp(kind, "joined") == 0) {
        uint64_t joined = tlv_get(room, (size_t)n, TAG_COUNT, 0);
        for (unsigned i = 0; i < CG_KINDS; i++)
            if (joined & 1u << i)
                h->spare.in |= h->spare.kinds[i];
        /* of one kind only, perhaps: a real-time process may not be in any group for the CPU */
        h->spare.ready = h->spare.in != 0;
    }
    if (h->spare.ready)
        return;
    h->spare.off = true; /* an older kernel asks who writes, not who opened: the hub moves each itself, then */
    drop(h);
}

void spare_make(struct hub *h)
{
    struct spare *s = &h->spare;
    struct err e = {0};
    struct buf b = {0};
    int stream[2] = {-1, -1}, sock[2] = {-1, -1}, fds[CG_KINDS];
    unsigned n = 0;
    if (s->pid || s->off || h->bare_only || !cgroups_any(h))
        return;
    s->in = 0;
    memset(s->kinds, 0, sizeof s->kinds);
    if (path_join(s->group, sizeof s->group, SPARE_NAME "%u", ++s->count) < 0 || cgroups_open(h, s->group, fds, s->kinds, &n) < 0)
        fail(&e, errno, "make groups for a spare keeper");
    else if (socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0, stream) < 0 || socketpair(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0, sock) < 0)
        fail(&e, errno, "make socket pairs for a spare keeper");
    else if ((s->pid = zygote_fork(h->zygote, sock[1], stream[1], &e)) > 0) {
        s->stream = stream[0];
        stream[0] = -1;
        if (put_str(&b, TAG_KIND, "join") < 0 || msg_send(sock[0], b.p, b.len, fds, n) < 0 || loop_add(&h->loop, &s->src, sock[0], EPOLLIN, on_spare, h) < 0)
            fail(&e, errno, "have a spare keeper join its groups");
        else
            sock[0] = -1;
    }
    for (unsigned i = 0; i < n; i++)
        close(fds[i]);
    buf_free(&b);
    fd_close(&sock[0]);
    fd_close(&sock[1]);
    fd_close(&stream[0]);
    fd_close(&stream[1]);
    if (e.no) {
        s->off = true;
        drop(h);
    }
}

bool spare_take(struct hub *h, struct member *m, unsigned *in, int *sock, int *stream)
{
    struct spare *s = &h->spare;
    if (!s->ready)
        return false;
    m->pid = s->pid;
    *in = s->in;
    memcpy(m->group, s->group, sizeof m->group);
    *sock = fcntl(s->src.fd, F_DUPFD_CLOEXEC, 3);
    *stream = s->stream;
    if (*sock < 0)
        return false;
    loop_drop(&h->loop, &s->src);
    s->stream = -1;
    s->pid = 0;
    s->ready = false;
    *s->group = 0;
    return true;
}

void spare_end(struct hub *h)
{
    h->spare.off = true;
    drop(h);
}
