/* Keepers that wait for the next CREATE. One is in its control groups and no more: moving a process into a group waits for the whole
 * machine (10 ms when nobody else just did it). Where two CREATEs in a row wanted the same, another one stands ready as that, whole
 * but for its name, and is handed over to the next that wants it. They move themselves: the descriptors were opened by the hub. */
#include <poll.h>
#include <signal.h>
#include <stdio.h>
#include <string.h>
#include <sys/epoll.h>
#include <sys/socket.h>

#include "cgroups.h"
#include "sys.h"

enum { RECIPE_MAX = 64 << 10 };

static void drop(struct hub *h, struct spare *s)
{
    if (s->pid > 0)
        kill(s->pid, SIGKILL); /* reaped as nobody's child */
    loop_drop(&h->loop, &s->src);
    fd_close(&s->stream);
    buf_free(&s->seen);
    s->pid = 0;
    s->ready = false;
    if (*s->group)
        groups_free(h, s->group);
    *s->group = 0;
}

/* It could not be made: the next CREATE of that kind says why, and then nobody tries ahead until it went well twice. */
static void give_up(struct hub *h, struct spare *s)
{
    if (s->ahead) {
        buf_free(&h->recipe);
        buf_free(&h->last);
    } else
        s->off = true; /* an older kernel asks who writes, not who opened: the hub moves each itself, then */
    drop(h, s);
}

static int prepare(struct hub *h, struct spare *s, struct err *e)
{
    struct member m = {.hub = h, .pid = s->pid, .src.fd = s->src.fd};
    struct buf b = {0};
    memcpy(m.group, s->group, sizeof m.group);
    int r = put_str(&b, TAG_KIND, "ahead") < 0 || msg_send(s->src.fd, b.p, b.len, NULL, 0) < 0 ? fail(e, errno, "talk to a spare keeper")
                                                                                              : member_equip(&m, s->in, h->recipe.p, h->recipe.len, &s->seen, e);
    buf_free(&b);
    return r;
}

static void on_spare(struct src *src, uint32_t events)
{
    struct spare *s = src->owner;
    struct hub *h = s->hub;
    uint8_t room[1024];
    char kind[16] = "";
    size_t none = 0;
    struct err e = {0};
    (void)events;
    ssize_t n = msg_recv(src->fd, room, sizeof room, NULL, &none);
    if (n > 0)
        tlv_str(room, (size_t)n, TAG_KIND, kind, sizeof kind);
    if (n > 0 && strcmp(kind, "joined") == 0) {
        uint64_t joined = tlv_get(room, (size_t)n, TAG_COUNT, 0);
        for (unsigned i = 0; i < CG_KINDS; i++)
            if (joined & 1u << i)
                s->in |= s->kinds[i];
        /* of one kind only, perhaps: a real-time process may not be in any group for the CPU */
        if (s->ahead ? prepare(h, s, &e) < 0 : !s->in)
            give_up(h, s);
        else
            s->ready = !s->ahead;
    } else if (n > 0 && s->ahead && strcmp(kind, "ahead") == 0)
        s->ready = true;
    else
        give_up(h, s);
}

static void make(struct hub *h, struct spare *s)
{
    struct err e = {0};
    struct buf b = {0};
    int stream[2] = {-1, -1}, sock[2] = {-1, -1}, fds[CG_KINDS];
    unsigned n = 0;
    bool groups = !s->ahead || create_limited(h->recipe.p, h->recipe.len);
    s->in = 0;
    memset(s->kinds, 0, sizeof s->kinds);
    if (groups && (path_join(s->group, sizeof s->group, SPARE_NAME "%u", ++h->spares) < 0 || cgroups_open(h, s->group, fds, s->kinds, &n) < 0))
        fail(&e, errno, "make groups for a spare keeper");
    else if (socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0, stream) < 0 || socketpair(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0, sock) < 0)
        fail(&e, errno, "make socket pairs for a spare keeper");
    else if ((s->pid = zygote_fork(h->zygote, sock[1], stream[1], &e)) > 0) {
        s->stream = stream[0];
        stream[0] = -1;
        if (put_str(&b, TAG_KIND, "join") < 0 || msg_send(sock[0], b.p, b.len, fds, n) < 0 || loop_add(&h->loop, &s->src, sock[0], EPOLLIN, on_spare, s) < 0)
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
    if (e.no)
        give_up(h, s);
}

static bool missing(const struct hub *h, const struct spare *s)
{
    if (s->pid > 0 || s->src.fd >= 0 || s->off || h->bare_only || cgroups_off)
        return false;
    return s->ahead ? h->recipe.len > 0 : cgroups_any(h);
}

bool spare_missing(const struct hub *h)
{
    return missing(h, &h->spare[0]) || missing(h, &h->spare[1]);
}

void spare_make(struct hub *h)
{
    for (size_t i = 0; i < COUNT_OF(h->spare); i++)
        if (missing(h, &h->spare[i]))
            make(h, &h->spare[i]);
}

void spare_begin(struct hub *h)
{
    for (size_t i = 0; i < COUNT_OF(h->spare); i++) {
        h->spare[i].hub = h;
        h->spare[i].src.fd = h->spare[i].stream = -1;
        h->spare[i].ahead = i == 1;
    }
    spare_make(h);
}

static void taken(struct hub *h, struct spare *s)
{
    loop_drop(&h->loop, &s->src);
    fd_close(&s->stream);
    buf_free(&s->seen);
    s->pid = 0;
    s->ready = false;
    *s->group = 0;
}

bool spare_take(struct hub *h, struct member *m, unsigned *in, int *sock, int *stream)
{
    struct spare *s = &h->spare[0];
    if (!s->ready || s->pid <= 0 || (*sock = fcntl(s->src.fd, F_DUPFD_CLOEXEC, 3)) < 0)
        return false;
    m->pid = s->pid;
    *in = s->in;
    memcpy(m->group, s->group, sizeof m->group);
    *stream = s->stream;
    s->stream = -1;
    taken(h, s);
    return true;
}

/* What a CREATE wants, but for the name: only the like of it can be handed over. Empty: nothing can. */
static void wanted(const struct member *m, const uint8_t *p, size_t n, struct buf *b)
{
    struct tlv_in it = {p, n};
    struct tlv t;
    if (m->bare || n > RECIPE_MAX || (tlv_find(p, n, TAG_UPPER, &t) && t.len && (t.len != 5 || memcmp(t.p, "tmpfs", 5)))) /* a place of its own */
        return;
    while (tlv_next(&it, &t) == 1)
        if (t.tag != TAG_MEMBER && put_bytes(b, t.tag, t.p, t.len) < 0) {
            buf_free(b);
            return;
        }
}

static bool same(const struct buf *a, const struct buf *b)
{
    return a->len && a->len == b->len && memcmp(a->p, b->p, a->len) == 0;
}

bool spare_hand_over(struct hub *h, struct member *m, const uint8_t *p, size_t n, int *sock, int *stream)
{
    struct spare *s = &h->spare[1];
    struct buf want = {0}, b = {0};
    wanted(m, p, n, &want);
    struct pollfd quiet = {s->src.fd, POLLIN, 0}; /* it says nothing more, unless that it ends */
    bool ok = s->ready && s->pid > 0 && same(&want, &h->recipe) && poll(&quiet, 1, 0) == 0;
    if (ok && !base_is(h, p, n, &s->seen)) { /* somebody put others there meanwhile */
        drop(h, s);
        ok = false;
    }
    ok = ok && (*sock = fcntl(s->src.fd, F_DUPFD_CLOEXEC, 3)) >= 0;
    if (ok && (put_str(&b, TAG_KIND, "yours") < 0 || put_str(&b, TAG_MEMBER, m->name) < 0 || msg_send(*sock, b.p, b.len, NULL, 0) < 0)) {
        fd_close(sock); /* its death is on the way */
        ok = false;
    }
    if (ok) {
        m->pid = s->pid;
        memcpy(m->group, s->group, sizeof m->group);
        *stream = s->stream;
        s->stream = -1;
        taken(h, s);
    }
    if (same(&want, &h->last) && !same(&want, &h->recipe)) {
        buf_free(&h->recipe);
        h->recipe = want;
        want = (struct buf){0};
        drop(h, s);
    } else {
        buf_free(&h->last);
        h->last = want;
        want = (struct buf){0};
    }
    buf_free(&b);
    return ok;
}

void spare_died(struct hub *h, pid_t pid)
{
    for (size_t i = 0; i < COUNT_OF(h->spare); i++)
        if (h->spare[i].pid == pid) { /* its socket tells the rest */
            h->spare[i].pid = 0;
            h->spare[i].ready = false;
        }
}

void spare_end(struct hub *h)
{
    for (size_t i = 0; i < COUNT_OF(h->spare); i++) {
        h->spare[i].off = true;
        drop(h, &h->spare[i]);
    }
    buf_free(&h->recipe);
    buf_free(&h->last);
}
