#include "frames.h"

#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/socket.h>
#include <sys/uio.h>
#include <unistd.h>

enum { IN_ROOM = 64 << 10, DATA_ROOM = 36 << 10, OUT_MOST = 16 };

/* For sanitizers: what has not been received may not be looked at. */
#if defined(__SANITIZE_ADDRESS__)
#include <sanitizer/asan_interface.h>
#define CLOSED(p, n) __asan_poison_memory_region(p, n)
#define OPEN(p, n) __asan_unpoison_memory_region(p, n)
#else
#define CLOSED(p, n) ((void)0)
#define OPEN(p, n) ((void)0)
#endif

static void put_header(uint8_t *h, uint8_t type, uint8_t flags, uint16_t stream, uint32_t channel, size_t n)
{
    set_u32(h, (uint32_t)(n + RLS_HEADER - 4));
    h[4] = type;
    h[5] = flags;
    h[6] = (uint8_t)stream;
    h[7] = (uint8_t)(stream >> 8);
    set_u32(h + 8, channel);
    set_u32(h + 12, 0);
}

int conn_init(struct conn *c, int fd, bool (*on_frame)(struct conn *, const struct frame *), void *owner)
{
    memset(c, 0, sizeof *c);
    c->fd = fd;
    c->on_frame = on_frame;
    c->owner = owner;
    /* mapped, not malloced, so that conn_trim can give the pages back */
    c->in = mmap(NULL, IN_ROOM + DATA_ROOM, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (c->in == MAP_FAILED) {
        c->in = NULL;
        return -1;
    }
    c->data = c->in + IN_ROOM;
    return set_nonblock(fd);
}

void conn_free(struct conn *c)
{
    while (c->head) {
        struct out *o = c->head;
        c->head = o->next;
        fd_close(&o->fd);
        free(o);
    }
    c->tail = NULL;
    c->queued = 0;
    OPEN(c->in, IN_ROOM);
    if (c->in)
        munmap(c->in, IN_ROOM + DATA_ROOM);
    c->in = c->data = NULL;
    fd_close(&c->fd);
}

void conn_trim(struct conn *c)
{
    if (c->in && !c->in_len && !c->data_len)
        madvise(c->in, IN_ROOM + DATA_ROOM, MADV_DONTNEED);
}

static int broken(struct conn *c, const char *why)
{
    c->broken = true;
    c->why = why;
    return -1;
}

bool conn_stalled(const struct conn *c)
{
    return c->queued > CONN_QUEUE_MAX;
}

int conn_read(struct conn *c)
{
    if (c->broken)
        return -1;
    if (conn_stalled(c))
        return 0;
    OPEN(c->in, IN_ROOM);
    ssize_t r = recv(c->fd, c->in + c->in_len, IN_ROOM - c->in_len, 0);
    if (r < 0 && errno == ENOTSOCK)
        r = read(c->fd, c->in + c->in_len, IN_ROOM - c->in_len);
    if (r < 0)
        return errno == EAGAIN || errno == EINTR ? 0 : broken(c, "read failed");
    if (r == 0)
        return broken(c, "end of stream");
    c->in_len += (size_t)r;
    CLOSED(c->in + c->in_len, IN_ROOM - c->in_len);
    size_t at = 0;
    while (c->in_len - at >= RLS_HEADER) {
        const uint8_t *h = c->in + at;
        uint32_t len = get_u32(h);
        if (len < RLS_HEADER - 4 || len > RLS_MAX_FRAME)
            return broken(c, "frame length out of bounds");
        if (get_u32(h + 12))
            return broken(c, "reserved field is not 0");
        if (c->in_len - at < 4 + (size_t)len)
            break;
        struct frame f = {h[4], h[5], (uint16_t)(h[6] | h[7] << 8), get_u32(h + 8), len - (RLS_HEADER - 4), h + RLS_HEADER};
        if (!c->on_frame(c, &f))
            return broken(c, "frame out of place");
        if (c->broken)
            return -1;
        at += 4 + (size_t)len;
    }
    c->in_len -= at;
    if (at && c->in_len)
        memmove(c->in, c->in + at, c->in_len);
    return 0;
}

static void queue(struct conn *c, uint8_t type, uint8_t flags, uint16_t stream, uint32_t channel, const void *p, size_t n,
                  int fd)
{
    struct out *o = malloc(sizeof *o + RLS_HEADER + n);
    if (!o) { /* a frame may not be lost: the stream ends instead */
        fd_close(&fd);
        broken(c, "out of memory");
        return;
    }
    o->next = NULL;
    o->fd = fd;
    o->len = RLS_HEADER + n;
    o->off = 0;
    put_header(o->data, type, flags, stream, channel, n);
    if (n)
        memcpy(o->data + RLS_HEADER, p, n);
    if (c->tail)
        c->tail->next = o;
    else
        c->head = o;
    c->tail = o;
    c->queued += sizeof *o + o->len;
}

void conn_send_fd(struct conn *c, uint8_t type, uint32_t channel, const void *p, size_t n, int fd)
{
    const uint8_t *q = p;
    do {
        size_t k = n < RLS_MAX_PAYLOAD ? n : RLS_MAX_PAYLOAD;
        n -= k;
        queue(c, type, n ? F_MORE : 0, 0, channel, q, k, fd);
        fd = -1;
        q += k;
    } while (n);
}

void conn_send(struct conn *c, uint8_t type, uint16_t stream, uint32_t channel, const void *p, size_t n)
{
    if (n <= RLS_MAX_PAYLOAD)
        queue(c, type, 0, stream, channel, p, n, -1);
    else
        conn_send_fd(c, type, channel, p, n, -1);
}

void conn_fail(struct conn *c, uint32_t channel, int no, const char *what)
{
    struct buf b = {0};
    if (put_u32(&b, TAG_ERRNO, (uint32_t)no) < 0 || put_str(&b, TAG_WHAT, what) < 0 ||
        put_str(&b, TAG_TEXT, strerror(no)) < 0)
        broken(c, "out of memory");
    else
        conn_send(c, T_FAIL, 0, channel, b.p, b.len);
    buf_free(&b);
}

uint8_t *conn_data_room(struct conn *c)
{
    return c->data_len || c->head || c->broken ? NULL : c->data + RLS_HEADER;
}

void conn_data_put(struct conn *c, uint8_t flags, uint16_t stream, uint32_t channel, size_t n)
{
    put_header(c->data, T_DATA, flags, stream, channel, n);
    c->data_len = RLS_HEADER + n;
    c->data_off = 0;
}

/* One write: what does not take a descriptor along goes out together, because each piece may cross half a cluster. */
static ssize_t put(struct conn *c, const struct iovec *v, size_t n, int fd)
{
    ssize_t r = 0;
    if (fd >= 0)
        return msg_send(c->fd, v->iov_base, v->iov_len, &fd, 1);
    struct msghdr m = {.msg_iov = (struct iovec *)(uintptr_t)v, .msg_iovlen = n};
    do
        r = sendmsg(c->fd, &m, MSG_NOSIGNAL);
    while (r < 0 && errno == EINTR);
    if (r < 0 && errno == ENOTSOCK)
        do
            r = writev(c->fd, v, (int)n);
        while (r < 0 && errno == EINTR);
    return r;
}

/* The DATA frame under way, and control frames: one of them that is half out goes first. */
static size_t next_out(const struct conn *c, struct iovec *v, int *fd)
{
    size_t n = 0;
    bool half = c->head && c->head->off;
    *fd = -1;
    if (c->data_len && !half)
        v[n++] = (struct iovec){c->data + c->data_off, c->data_len - c->data_off};
    for (struct out *o = c->head; o && n < OUT_MOST && (o->fd < 0 || !n); o = o->next) {
        v[n++] = (struct iovec){o->data + o->off, o->len - o->off};
        if ((*fd = o->fd) >= 0 || (half && n == 1 && c->data_len))
            break;
    }
    return n;
}

/* So many bytes of what was to go out next are out. */
static void gone(struct conn *c, size_t n)
{
    bool data = c->data_len && !(c->head && c->head->off);
    if (data) {
        size_t k = c->data_len - c->data_off < n ? c->data_len - c->data_off : n;
        c->data_off += k;
        n -= k;
        if (c->data_off < c->data_len)
            return;
        c->data_len = c->data_off = 0;
    }
    while (n) {
        struct out *o = c->head;
        size_t k = o->len - o->off < n ? o->len - o->off : n;
        fd_close(&o->fd);
        o->off += k;
        n -= k;
        if (o->off < o->len)
            return;
        c->head = o->next;
        if (!c->head)
            c->tail = NULL;
        c->queued -= sizeof *o + o->len;
        free(o);
    }
}

int conn_flush(struct conn *c)
{
    if (c->broken)
        return -1;
    while (c->data_len || c->head) {
        struct iovec v[OUT_MOST];
        int fd;
        size_t n = next_out(c, v, &fd);
        ssize_t r = put(c, v, n, fd);
        if (r < 0) {
            if (errno == EAGAIN)
                return 1;
            return broken(c, "write failed");
        }
        gone(c, (size_t)r);
    }
    return 0;
}
