/* Bytes between pipes and connection, under credit. */
#include <stdlib.h>
#include <string.h>
#include <sys/epoll.h>
#include <sys/ioctl.h>

#include "command.h"
#include "sys.h"

enum { TAIL_READ = 64 << 10, RING_LIMIT = 64 << 20 };

/* ---- out ---- */

static void ready(struct keeper *k, struct sout *s)
{
    if (s->queued || s->eof_sent)
        return;
    s->queued = true;
    s->next_ready = NULL;
    if (k->ready_tail)
        k->ready_tail->next_ready = s;
    else
        k->ready_head = s;
    k->ready_tail = s;
}

static void unready(struct keeper *k, struct sout *s)
{
    if (!s->queued)
        return;
    struct sout **p = &k->ready_head, *before = NULL;
    while (*p != s) {
        before = *p;
        p = &(*p)->next_ready;
    }
    *p = s->next_ready;
    if (k->ready_tail == s)
        k->ready_tail = before;
    s->queued = false;
}

static void ring_put(struct sout *s, const uint8_t *p, size_t n)
{
    if (n >= s->ring_max) {
        p += n - s->ring_max;
        n = s->ring_max;
    }
    if (s->ring_len + n > s->ring_cap && s->ring_cap < s->ring_max) { /* not wrapped before it is full size */
        size_t cap = s->ring_cap ? s->ring_cap : 16 << 10;
        while (cap < s->ring_len + n && cap < s->ring_max)
            cap *= 2;
        if (cap > s->ring_max)
            cap = s->ring_max;
        uint8_t *q = realloc(s->ring, cap);
        if (q) {
            s->ring = q;
            s->ring_cap = cap;
        } else if (!s->ring_cap)
            return; /* sizes stay true; the tail is lost and the client sees that */
        else
            s->ring_max = s->ring_cap;
    }
    if (n > s->ring_cap) {
        p += n - s->ring_cap;
        n = s->ring_cap;
    }
    while (n) {
        size_t to = (s->ring_at + s->ring_len) % s->ring_cap, k = s->ring_cap - to;
        if (k > n)
            k = n;
        memcpy(s->ring + to, p, k);
        p += k;
        n -= k;
        s->ring_len += k;
        if (s->ring_len > s->ring_cap) {
            s->ring_at = (s->ring_at + s->ring_len - s->ring_cap) % s->ring_cap;
            s->ring_len = s->ring_cap;
        }
    }
}

static uint64_t in_pipe(const struct sout *s)
{
    int n = 0;
    return s && s->src.fd >= 0 && ioctl(s->src.fd, FIONREAD, &n) == 0 && n > 0 ? (uint64_t)n : 0;
}

/* What a command says on its control pipe comes after all that it had printed before. False: not yet. */
static bool control_may_go(struct keeper *k, struct sout *s)
{
    struct sout **o = s->ch->out;
    if (!s->may) {
        s->may = in_pipe(s);
        for (int i = 0; i < 2; i++)
            s->before[i] = o[i] ? o[i]->total + in_pipe(o[i]) : 0;
    }
    s->held = false;
    for (int i = 0; i < 2; i++)
        if (o[i] && !o[i]->eof && o[i]->total < s->before[i]) {
            s->held = true;
            if (o[i]->head_left)
                ready(k, o[i]);
        }
    return !s->held;
}

static void let_control_go(struct keeper *k, struct sout *s)
{
    struct sout *c = s->ch ? s->ch->out[2] : NULL;
    if (c && c != s && c->held)
        ready(k, c);
}

static void pipe_ended(struct keeper *k, struct sout *s)
{
    s->eof = true;
    loop_drop(&k->loop, &s->src);
    ready(k, s);
    let_control_go(k, s);
}

/* Head sent: the rest only passes through the ring, whatever the client's pace. */
static void tail_read(struct keeper *k, struct sout *s)
{
    static uint8_t room[TAIL_READ];
    for (int i = 0; i < 8 && !s->eof; i++) {
        size_t want = s->left < sizeof room ? (size_t)s->left : sizeof room;
        if (!want)
            break;
        ssize_t r = read(s->src.fd, room, want);
        if (r < 0) {
            if (errno == EINTR)
                continue;
            if (errno != EAGAIN)
                pipe_ended(k, s);
            return;
        }
        if (!r) {
            pipe_ended(k, s);
            return;
        }
        s->total += (uint64_t)r;
        if (s->left != UINT64_MAX)
            s->left -= (uint64_t)r;
        ring_put(s, room, (size_t)r);
    }
    let_control_go(k, s);
}

static void discard(struct keeper *k, struct sout *s)
{
    static uint8_t room[TAIL_READ];
    ssize_t r = read(s->src.fd, room, sizeof room);
    if (r > 0 || (r < 0 && (errno == EAGAIN || errno == EINTR)))
        return;
    for (struct sout **p = &k->draining; *p; p = &(*p)->next_draining)
        if (*p == s) {
            *p = s->next_draining;
            break;
        }
    sout_free(k, s);
}

static void on_pipe(struct src *src, uint32_t events)
{
    struct sout *s = (struct sout *)(void *)src;
    struct keeper *k = src->owner;
    (void)events;
    if (!s->ch)
        discard(k, s);
    else if (s->head_left == 0)
        tail_read(k, s);
    else {
        loop_want(&k->loop, src, 0); /* until this piece is sent */
        ready(k, s);
    }
}

int sout_open(struct keeper *k, struct chan *c, unsigned i, uint16_t stream, int fd, uint64_t limit)
{
    struct sout *s = calloc(1, sizeof *s);
    (void)k;
    if (!s) {
        fd_close(&fd);
        return -1;
    }
    s->src.fd = fd;
    s->ch = c;
    s->stream = stream;
    s->credit = RLS_WINDOW;
    s->left = UINT64_MAX;
    if (limit > 2 * (uint64_t)RING_LIMIT)
        limit = 2 * (uint64_t)RING_LIMIT;
    s->head_left = limit ? limit / 2 : UINT64_MAX;
    s->ring_max = limit ? (size_t)(limit - limit / 2) : 0;
    c->out[i] = s;
    return 0;
}

void sout_watch(struct keeper *k, struct sout *s)
{
    if (s->watched)
        return;
    s->watched = true;
    if (loop_add(&k->loop, &s->src, s->src.fd, EPOLLIN, on_pipe, k) < 0)
        pipe_ended(k, s);
}

void sout_finish(struct keeper *k, struct sout *s)
{
    if (s->eof)
        return;
    s->left = in_pipe(s);
    while (s->head_left == 0 && s->left && !s->eof) {
        uint64_t before = s->left;
        tail_read(k, s);
        if (s->left == before)
            break;
    }
    if (!s->eof) {
        loop_want(&k->loop, &s->src, 0);
        ready(k, s);
    }
}

bool sout_credit(struct keeper *k, struct sout *s, uint32_t more)
{
    if (more > UINT32_MAX - s->credit)
        return false;
    s->credit += more;
    if (s->watched && !s->src.events && s->credit)
        ready(k, s);
    return true;
}

void sout_free(struct keeper *k, struct sout *s)
{
    unready(k, s);
    loop_drop(&k->loop, &s->src);
    free(s->ring);
    free(s);
}

void sout_release(struct keeper *k, struct sout *s)
{
    if (s->src.fd < 0 || !s->watched) {
        sout_free(k, s);
        return;
    }
    unready(k, s);
    free(s->ring);
    s->ring = NULL;
    s->ch = NULL;
    s->next_draining = k->draining;
    k->draining = s;
    loop_want(&k->loop, &s->src, EPOLLIN);
}

static void end_out(struct sout *s)
{
    s->eof_sent = true;
    conn_send(&s->ch->k->conn, T_EOF, s->stream, s->ch->id, NULL, 0);
    chan_check(s->ch); /* may free s */
}

bool chan_pump(struct keeper *k)
{
    struct sout *s;
    uint8_t *room = conn_data_room(&k->conn);
    while (room && (s = k->ready_head)) {
        struct chan *c = s->ch;
        unready(k, s);
        bool live = !s->eof && s->left && s->head_left;
        if (!live && !s->eof && s->left == UINT64_MAX) { /* the head is out, the command goes on */
            loop_want(&k->loop, &s->src, EPOLLIN);
            continue;
        }
        if (!live && !s->ring_len) {
            if (!s->eof && s->left) { /* ended with more in the pipe than the head takes */
                tail_read(k, s);
                if (!s->queued)
                    ready(k, s);
                continue;
            }
            end_out(s);
            return true;
        }
        if (!s->credit)
            continue; /* CREDIT makes it ready again */
        size_t n = RLS_MAX_PAYLOAD;
        n = n < s->credit ? n : s->credit;
        if (!live) {
            if (n > s->ring_len)
                n = s->ring_len;
            if (n > s->ring_cap - s->ring_at)
                n = s->ring_cap - s->ring_at;
            memcpy(room, s->ring + s->ring_at, n);
            s->ring_at = (s->ring_at + n) % s->ring_cap;
            s->ring_len -= n;
            s->credit -= (uint32_t)n;
            conn_data_put(&k->conn, F_TAIL, s->stream, c->id, n);
            ready(k, s);
            return true;
        }
        if (s->stream == S_CONTROL_OUT) {
            if (!control_may_go(k, s))
                continue; /* let_control_go makes it ready again */
            if (s->may && n > s->may)
                n = (size_t)s->may;
        }
        if (n > s->head_left)
            n = (size_t)s->head_left;
        if (n > s->left)
            n = (size_t)s->left;
        ssize_t r = read(s->src.fd, room, n);
        if (r < 0 && errno == EINTR) {
            ready(k, s);
            continue;
        }
        if (r < 0 && errno == EAGAIN) {
            if (s->left != UINT64_MAX)
                s->left = 0; /* somebody else read the command's own pipe */
            if (!s->left)
                ready(k, s);
            else
                loop_want(&k->loop, &s->src, EPOLLIN);
            continue;
        }
        if (r <= 0) {
            pipe_ended(k, s);
            continue;
        }
        s->total += (uint64_t)r;
        s->may -= s->may < (uint64_t)r ? s->may : (uint64_t)r;
        let_control_go(k, s);
        s->credit -= (uint32_t)r;
        if (s->head_left != UINT64_MAX)
            s->head_left -= (uint64_t)r;
        if (s->left != UINT64_MAX)
            s->left -= (uint64_t)r;
        conn_data_put(&k->conn, 0, s->stream, c->id, (size_t)r);
        if ((size_t)r < n && s->left == UINT64_MAX)
            loop_want(&k->loop, &s->src, EPOLLIN);
        else
            ready(k, s);
        return true;
    }
    return false;
}

/* ---- in ---- */

static void credit_back(struct keeper *k, struct chan *c, struct sin *s, uint32_t n, uint16_t stream)
{
    uint8_t d[4];
    s->owed += n;
    if (s->owed < RLS_WINDOW / 4)
        return;
    set_u32(d, s->owed);
    s->used -= s->owed;
    s->owed = 0;
    conn_send(&k->conn, T_CREDIT, stream, c->id, d, sizeof d);
}

static void sin_push(struct keeper *k, struct chan *c, struct sin *s)
{
    if (c->standby >= 0)
        return; /* sin_go comes later */
    uint16_t stream = s == &c->in[1] ? S_CONTROL_IN : S_STDIN;
    while (s->src.fd >= 0 && s->at < s->b.len) {
        ssize_t r = write(s->src.fd, s->b.p + s->at, s->b.len - s->at);
        if (r < 0 && errno == EINTR)
            continue;
        if (r < 0 && errno == EAGAIN) {
            loop_want(&k->loop, &s->src, EPOLLOUT);
            break;
        }
        if (r < 0) { /* nobody reads it any more: the rest is taken and thrown away */
            loop_drop(&k->loop, &s->src);
            break;
        }
        s->at += (size_t)r;
        credit_back(k, c, s, (uint32_t)r, stream);
    }
    if (s->src.fd < 0) {
        credit_back(k, c, s, (uint32_t)(s->b.len - s->at), stream);
        buf_free(&s->b);
        s->at = 0;
        return;
    }
    if (s->at == s->b.len) {
        s->at = s->b.len = 0;
        if (s->eof) {
            loop_drop(&k->loop, &s->src);
            buf_free(&s->b);
        } else
            loop_want(&k->loop, &s->src, 0);
    } else if (s->at > RLS_WINDOW / 2) {
        memmove(s->b.p, s->b.p + s->at, s->b.len - s->at);
        s->b.len -= s->at;
        s->at = 0;
    }
}

static void on_sink(struct src *src, uint32_t events)
{
    struct chan *c = src->owner;
    struct sin *s = src == &c->in[1].src ? &c->in[1] : &c->in[0];
    (void)events;
    sin_push(c->k, c, s);
}

int sin_open(struct keeper *k, struct chan *c, unsigned i, int fd)
{
    struct sin *s = &c->in[i];
    s->asked = true;
    s->b.max = 2 * RLS_WINDOW;
    if (loop_add(&k->loop, &s->src, fd, EPOLLOUT, on_sink, c) < 0)
        return -1;
    return loop_want(&k->loop, &s->src, 0);
}

void sin_go(struct keeper *k, struct chan *c, struct sin *s)
{
    if (s->asked)
        sin_push(k, c, s);
}

bool sin_frame(struct keeper *k, struct chan *c, struct sin *s, const struct frame *f)
{
    if (!s->asked || s->eof)
        return c->job != 0 && !s->asked; /* input for a command that has none is thrown away */
    if (f->type == T_EOF) {
        s->eof = true;
        sin_push(k, c, s);
        return true;
    }
    if (f->len > RLS_WINDOW - s->used)
        return false; /* beyond the window */
    s->used += f->len;
    if (s->src.fd < 0) {
        credit_back(k, c, s, f->len, s == &c->in[1] ? S_CONTROL_IN : S_STDIN);
        return true;
    }
    if (buf_add(&s->b, f->p, f->len) < 0)
        return false;
    sin_push(k, c, s);
    return true;
}
