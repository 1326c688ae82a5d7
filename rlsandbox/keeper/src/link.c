#include "link.h"

#include <poll.h>
#include <stdlib.h>
#include <string.h>
#include <sys/epoll.h>
#include <sys/mman.h>
#include <sys/socket.h>
#include <unistd.h>

#include "protocol.h"

#ifndef RLS_HASH
#define RLS_HASH "unknown"
#endif

enum { IN_ROOM = LINK_HEAD + LINK_MAX, OUT_ROOM = 2 * (LINK_HEAD + LINK_MAX) };

static void head_put(uint8_t *h, uint8_t kind, size_t n, uint64_t confirmed)
{
    set_u32(h, (uint32_t)n);
    h[4] = kind;
    h[5] = h[6] = h[7] = 0;
    set_u32(h + 8, (uint32_t)confirmed);
    set_u32(h + 12, (uint32_t)(confirmed >> 32));
}

static void say(struct link *l, uint8_t kind, const void *p, size_t n)
{
    uint8_t h[LINK_HEAD];
    head_put(h, kind, n, 0); /* the count is filled in when it goes out */
    if (n <= LINK_MAX && buf_add(&l->control, h, sizeof h) == 0 && n && buf_add(&l->control, p, n) < 0)
        l->control.len -= sizeof h;
}

int link_init(struct link *l, struct loop *loop)
{
    l->loop = loop;
    l->keeper.fd = -1;
    l->control.max = 256 << 10;
    l->in.max = 4 * LINK_MAX;
    /* mapped: pages that were never used cost nothing, and can be given back */
    uint8_t *p = mmap(NULL, LINK_KEPT + OUT_ROOM, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (p == MAP_FAILED)
        return -1;
    l->ring = p;
    l->out = p + LINK_KEPT;
    return 0;
}

static void peer_free(struct link *l, struct link_peer *p)
{
    if (!p)
        return;
    if (l->peer == p) {
        l->peer = NULL;
        l->left_ns = now_ns();
        l->out_at = l->out_len = l->control.len = 0;
        l->sent = l->base;
        if (l->base == l->end)
            madvise(l->ring, LINK_KEPT + OUT_ROOM, MADV_DONTNEED);
    }
    for (size_t i = 0; i < LINK_WAITING; i++)
        if (l->waiting[i] == p)
            l->waiting[i] = NULL;
    loop_drop(l->loop, &p->src);
    free(p->in);
    free(p);
}

/* The only answer on a stream that is not the session's. */
static void refuse(struct link_peer *p, const char *kind, const char *text)
{
    uint8_t room[512];
    struct buf b = {0};
    if (put_str(&b, TAG_KIND, kind) == 0 && put_str(&b, TAG_TEXT, text) == 0 && b.len <= sizeof room - LINK_HEAD) {
        head_put(room, L_REFUSED, b.len, 0);
        memcpy(room + LINK_HEAD, b.p, b.len);
        (void)!send(p->src.fd, room, LINK_HEAD + b.len, MSG_NOSIGNAL | MSG_DONTWAIT);
    }
    buf_free(&b);
}

/* ---- the inner stream ---- */

static void from_keeper(struct src *s, uint32_t events)
{
    struct link *l = s->owner;
    (void)events;
    while (l->end - l->base < LINK_KEPT && (!l->peer || l->end - l->sent < LINK_UNSENT)) {
        size_t at = (size_t)(l->end % LINK_KEPT), room = LINK_KEPT - at, left = LINK_KEPT - (size_t)(l->end - l->base);
        ssize_t r = recv(s->fd, l->ring + at, room < left ? room : left, MSG_DONTWAIT);
        if (r < 0 && (errno == EAGAIN || errno == EINTR))
            break;
        if (r <= 0) {
            loop_drop(l->loop, s); /* whoever reaps it says what happened */
            break;
        }
        l->end += (uint64_t)r;
        if ((size_t)r < room)
            break; /* that was all, most likely */
    }
}

static void to_keeper(struct link *l)
{
    while (l->keeper.fd >= 0 && l->in_at < l->in.len) {
        ssize_t r = send(l->keeper.fd, l->in.p + l->in_at, l->in.len - l->in_at, MSG_NOSIGNAL | MSG_DONTWAIT);
        if (r < 0 && errno == EINTR)
            continue;
        if (r < 0)
            break;
        l->in_at += (size_t)r;
    }
    if (l->in_at == l->in.len)
        l->in_at = l->in.len = 0;
}

static void on_keeper(struct src *s, uint32_t events)
{
    if (events & EPOLLOUT)
        to_keeper(s->owner);
    if (events & ~(uint32_t)EPOLLOUT)
        from_keeper(s, events);
}

int link_keeper(struct link *l, int fd)
{
    loop_drop(l->loop, &l->keeper);
    l->base = l->sent = l->end = l->got = l->told = 0;
    l->in.len = l->in_at = l->out_at = l->out_len = l->control.len = 0;
    l->session[0] = 0;
    l->used = false;
    set_nonblock(fd);
    return loop_add(l->loop, &l->keeper, fd, EPOLLIN, on_keeper, l);
}

/* ---- who is there ---- */

static bool same(const char *a, const char *b)
{
    size_t n = strlen(a);
    unsigned char diff = strlen(b) != n; /* in a time that says nothing of where they differ */
    for (size_t i = 0; i < n && b[i]; i++)
        diff |= (unsigned char)(a[i] ^ b[i]);
    return !diff;
}

static bool attach(struct link *l, struct link_peer *p, const uint8_t *m, size_t n)
{
    char token[sizeof l->token] = "", session[sizeof l->session] = "";
    struct err e = {0};
    if (tlv_get(m, n, TAG_VERSION, 0) != RLS_VERSION || tlv_str(m, n, TAG_TOKEN, token, sizeof token) < 16 || tlv_str(m, n, TAG_KIND, session, sizeof session) < 16) {
        refuse(p, "protocol", "another version, or a token or session that is too short");
        return false;
    }
    if (*l->token && !same(l->token, token)) {
        refuse(p, "token", "somebody else holds this sandbox");
        return false;
    }
    uint64_t has = tlv_get(m, n, TAG_OFFSET, 0);
    bool again = *l->session && strcmp(l->session, session) == 0;
    if (strcmp(l->ended_session, session) == 0) {
        refuse(p, "grace_over", "no client came back in time: what ran was ended");
        return false;
    }
    if (again && (has < l->base || has > l->end)) {
        refuse(p, "protocol", "it asks for bytes that were never sent, or were confirmed");
        return false;
    }
    if (!again && has) {
        refuse(p, "session_gone", "this keeper does not know the session");
        return false;
    }
    if (!again && l->used && l->renew(l, &e) < 0) {
        refuse(p, "renew", e.what);
        return false;
    }
    for (size_t i = 0; i < LINK_WAITING; i++)
        if (l->waiting[i] == p)
            l->waiting[i] = NULL;
    peer_free(l, l->peer); /* one that may be cut without knowing it */
    l->peer = p;
    l->left_ns = 0;
    l->keep_s = 0;
    strcpy(l->token, token);
    strcpy(l->session, session);
    l->used = true;
    l->base = l->sent = has;
    l->out_at = l->out_len = l->control.len = 0;
    struct buf b = {0};
    if (put_u32(&b, TAG_VERSION, RLS_VERSION) < 0 || put_str(&b, TAG_HASH, RLS_HASH) < 0 || put_u64(&b, TAG_OFFSET, l->got) < 0 ||
        buf_add(&b, l->facts->p, l->facts->len) < 0 || b.len > LINK_MAX) {
        buf_free(&b);
        refuse(p, "memory", "what there is to say does not fit");
        return false;
    }
    say(l, L_ATTACHED, b.p, b.len);
    buf_free(&b);
    return true;
}

/* false: this stream is over */
static bool record(struct link *l, struct link_peer *p, uint8_t kind, uint64_t confirmed, const uint8_t *m, size_t n)
{
    if (l->peer != p)
        return kind == L_ATTACH && attach(l, p, m, n);
    if (confirmed > l->sent)
        return false;
    if (confirmed > l->base)
        l->base = confirmed;
    switch (kind) {
    case L_BYTES:
        if (buf_add(&l->in, m, n) < 0)
            return false;
        l->got += n;
        to_keeper(l);
        return true;
    case L_CONFIRM: case L_PONG:
        return true;
    case L_PING:
        say(l, L_PONG, m, n < 64 ? n : 64);
        return true;
    case L_LEAVE:
        if (n != 4)
            return false;
        l->keep_s = get_u32(m);
        return false;
    }
    return false;
}

static void on_peer(struct src *s, uint32_t events)
{
    struct link_peer *p = s->owner;
    struct link *l = p->link;
    (void)events;
    if (events & ~(uint32_t)EPOLLOUT) {
        ssize_t r = recv(s->fd, p->in + p->in_len, IN_ROOM - p->in_len, MSG_DONTWAIT);
        if (r < 0 && (errno == EAGAIN || errno == EINTR))
            return;
        if (r <= 0) {
            peer_free(l, p);
            return;
        }
        p->in_len += (size_t)r;
        p->heard_ns = now_ns();
        size_t at = 0;
        while (p->in_len - at >= LINK_HEAD) {
            const uint8_t *h = p->in + at;
            uint32_t n = get_u32(h);
            if (n > LINK_MAX || h[5] || h[6] || h[7]) {
                peer_free(l, p);
                return;
            }
            if (p->in_len - at < LINK_HEAD + (size_t)n)
                break;
            if (!record(l, p, h[4], get_u64(h + 8), h + LINK_HEAD, n)) {
                peer_free(l, p);
                return;
            }
            at += LINK_HEAD + (size_t)n;
        }
        if (at)
            memmove(p->in, p->in + at, p->in_len -= at);
    }
}

int link_accept(struct link *l, int fd)
{
    struct link_peer *p = calloc(1, sizeof *p);
    size_t i = 0;
    while (i < LINK_WAITING && l->waiting[i])
        i++;
    if (!p || i == LINK_WAITING || !(p->in = malloc(IN_ROOM)) || set_nonblock(fd) < 0) {
        if (p)
            free(p->in);
        free(p);
        close(fd);
        return -1;
    }
    p->link = l;
    p->heard_ns = now_ns();
    l->waiting[i] = p;
    if (loop_add(l->loop, &p->src, fd, EPOLLIN, on_peer, p) < 0) {
        peer_free(l, p);
        return -1;
    }
    return 0;
}

/* ---- out ---- */

static void gather(struct link *l)
{
    size_t at = 0;
    if (l->control.len) { /* never more than the room: records are small but ATTACHED, which comes first and alone */
        while (at < l->control.len) {
            size_t n = LINK_HEAD + get_u32(l->control.p + at);
            if (at + n > OUT_ROOM / 2)
                break;
            at += n;
        }
        if (!at)
            at = LINK_HEAD + get_u32(l->control.p);
        memcpy(l->out, l->control.p, at);
        for (size_t i = 0; i < at; i += LINK_HEAD + get_u32(l->out + i))
            head_put(l->out + i, l->out[i + 4], get_u32(l->out + i), l->got);
        memmove(l->control.p, l->control.p + at, l->control.len -= at);
        l->told = l->got;
    }
    uint64_t left = l->end - l->sent;
    size_t from = (size_t)(l->sent % LINK_KEPT), n = left < LINK_MAX ? (size_t)left : LINK_MAX;
    if (n > LINK_KEPT - from)
        n = LINK_KEPT - from;
    if (n > OUT_ROOM - at - LINK_HEAD)
        n = OUT_ROOM - at - LINK_HEAD;
    if (n) {
        head_put(l->out + at, L_BYTES, n, l->got);
        memcpy(l->out + at + LINK_HEAD, l->ring + from, n);
        l->sent += n;
        at += LINK_HEAD + n;
        l->told = l->got;
    } else if (l->got - l->told >= LINK_CONFIRM) {
        head_put(l->out + at, L_CONFIRM, 0, l->got);
        at += LINK_HEAD;
        l->told = l->got;
    }
    l->out_at = 0;
    l->out_len = at;
}

void link_flush(struct link *l)
{
    bool full = false;
    while (l->peer && !full) {
        if (l->out_at == l->out_len)
            gather(l);
        if (!l->out_len)
            break;
        ssize_t r = send(l->peer->src.fd, l->out + l->out_at, l->out_len - l->out_at, MSG_NOSIGNAL | MSG_DONTWAIT);
        if (r < 0 && errno == EAGAIN)
            full = true;
        else if (r < 0 && errno != EINTR)
            peer_free(l, l->peer);
        else if (r > 0 && (l->out_at += (size_t)r) == l->out_len)
            l->out_at = l->out_len = 0;
    }
    if (l->keeper.fd >= 0) {
        bool room = l->end - l->base < LINK_KEPT && (!l->peer || l->end - l->sent < LINK_UNSENT);
        loop_want(l->loop, &l->keeper, (room ? EPOLLIN : 0) | (l->in_at < l->in.len ? EPOLLOUT : 0));
    }
    if (l->peer) /* what the keeper does not take is not asked for */
        loop_want(l->loop, &l->peer->src, (l->in.len - l->in_at <= LINK_MAX ? EPOLLIN : 0) | (full ? EPOLLOUT : 0));
}

int link_timer(struct link *l)
{
    uint64_t now = now_ns(), next = UINT64_MAX;
    for (size_t i = 0; i < LINK_WAITING + 1; i++) {
        struct link_peer *p = i < LINK_WAITING ? l->waiting[i] : l->peer;
        if (!p)
            continue;
        uint64_t due = p->heard_ns + (uint64_t)(p == l->peer ? LINK_SILENT_MS : LINK_HELLO_MS) * 1000000u;
        if (due <= now)
            peer_free(l, p);
        else if (due < next)
            next = due;
    }
    if (!l->peer && l->left_ns && l->used) {
        uint64_t due = l->left_ns + (uint64_t)(l->keep_s ? l->keep_s : l->grace_s) * 1000000000u;
        if (due <= now) {
            struct err e = {0};
            strcpy(l->ended_session, l->session);
            l->left_ns = 0;
            if (l->renew(l, &e) < 0)
                l->loop->stop = true; /* a sandbox of which nobody can say what it holds */
        } else if (due < next)
            next = due;
    }
    if (next == UINT64_MAX)
        return -1;
    uint64_t ms = (next - now) / 1000000u + 1;
    return ms > 60000 ? 60000 : (int)ms;
}

void link_end(struct link *l, const char *kind, const char *text)
{
    struct buf b = {0};
    from_keeper(&l->keeper, EPOLLIN); /* what it said last */
    if (l->peer && put_str(&b, TAG_KIND, kind) == 0 && put_str(&b, TAG_TEXT, text) == 0) {
        for (uint64_t until = now_ns() + 500000000u; l->peer && now_ns() < until;) {
            link_flush(l);
            if (l->peer && l->sent == l->end && l->out_at == l->out_len) {
                if (!b.len)
                    break;
                say(l, L_ENDED, b.p, b.len);
                b.len = 0;
                continue;
            }
            struct pollfd p = {l->peer ? l->peer->src.fd : -1, POLLOUT, 0};
            poll(&p, 1, 50);
        }
    }
    buf_free(&b);
}
