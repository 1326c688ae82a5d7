#include "util.h"

#include <fcntl.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <time.h>
#include <unistd.h>

#include "protocol.h"

int fail(struct err *e, int no, const char *fmt, ...)
{
    if (e && !e->no) {
        va_list ap;
        va_start(ap, fmt);
        vsnprintf(e->what, sizeof e->what, fmt, ap); /* a cut-off message is still a message */
        va_end(ap);
        e->no = no ? no : EIO;
    }
    errno = no;
    return -1;
}

int buf_add(struct buf *b, const void *p, size_t n)
{
    size_t max = b->max ? b->max : RLS_MAX_MESSAGE;
    if (n > max || b->len > max - n) {
        errno = EMSGSIZE;
        return -1;
    }
    if (b->len + n > b->cap) {
        size_t cap = b->cap ? b->cap : 256;
        while (cap < b->len + n)
            cap *= 2;
        uint8_t *q = realloc(b->p, cap);
        if (!q) {
            errno = ENOMEM;
            return -1;
        }
        b->p = q;
        b->cap = cap;
    }
    if (n)
        memcpy(b->p + b->len, p, n);
    b->len += n;
    return 0;
}

void buf_free(struct buf *b)
{
    free(b->p);
    b->p = NULL;
    b->len = b->cap = 0;
}

uint32_t get_u32(const uint8_t *p)
{
    return (uint32_t)p[0] | (uint32_t)p[1] << 8 | (uint32_t)p[2] << 16 | (uint32_t)p[3] << 24;
}

uint64_t get_u64(const uint8_t *p)
{
    return (uint64_t)get_u32(p) | (uint64_t)get_u32(p + 4) << 32;
}

void set_u32(uint8_t *p, uint32_t v)
{
    p[0] = (uint8_t)v;
    p[1] = (uint8_t)(v >> 8);
    p[2] = (uint8_t)(v >> 16);
    p[3] = (uint8_t)(v >> 24);
}

int tlv_next(struct tlv_in *in, struct tlv *t)
{
    if (!in->left)
        return 0;
    if (in->left < 6)
        return -1;
    t->tag = (uint16_t)(in->p[0] | in->p[1] << 8);
    t->len = get_u32(in->p + 2);
    if (t->len > in->left - 6)
        return -1;
    t->p = in->p + 6;
    in->p += 6 + (size_t)t->len;
    in->left -= 6 + (size_t)t->len;
    return 1;
}

bool tlv_find(const void *p, size_t n, uint16_t tag, struct tlv *t)
{
    struct tlv_in in = {p, n};
    while (tlv_next(&in, t) == 1)
        if (t->tag == tag)
            return true;
    return false;
}

uint64_t tlv_uint(const struct tlv *t, uint64_t otherwise)
{
    if (t->len == 4)
        return get_u32(t->p);
    if (t->len == 8)
        return get_u64(t->p);
    return otherwise;
}

uint64_t tlv_get(const void *p, size_t n, uint16_t tag, uint64_t otherwise)
{
    struct tlv t;
    return tlv_find(p, n, tag, &t) ? tlv_uint(&t, otherwise) : otherwise;
}

int tlv_str(const void *p, size_t n, uint16_t tag, char *out, size_t cap)
{
    struct tlv t;
    if (!tlv_find(p, n, tag, &t))
        return -1;
    if (t.len >= cap || memchr(t.p, 0, t.len))
        return -2;
    memcpy(out, t.p, t.len);
    out[t.len] = 0;
    return (int)t.len;
}

int put_bytes(struct buf *b, uint16_t tag, const void *p, size_t n)
{
    uint8_t h[6] = {(uint8_t)tag, (uint8_t)(tag >> 8)};
    if (n > RLS_MAX_MESSAGE) {
        errno = EMSGSIZE;
        return -1;
    }
    set_u32(h + 2, (uint32_t)n);
    if (buf_add(b, h, sizeof h) < 0)
        return -1;
    if (buf_add(b, p, n) < 0) {
        b->len -= sizeof h;
        return -1;
    }
    return 0;
}

int put_str(struct buf *b, uint16_t tag, const char *s)
{
    return put_bytes(b, tag, s, strlen(s));
}

int put_fmt(struct buf *b, uint16_t tag, const char *fmt, ...)
{
    char s[1024];
    va_list ap;
    va_start(ap, fmt);
    int n = vsnprintf(s, sizeof s, fmt, ap);
    va_end(ap);
    if (n < 0)
        return -1;
    return put_bytes(b, tag, s, (size_t)n < sizeof s ? (size_t)n : sizeof s - 1);
}

int put_u32(struct buf *b, uint16_t tag, uint32_t v)
{
    uint8_t d[4];
    set_u32(d, v);
    return put_bytes(b, tag, d, sizeof d);
}

int put_u64(struct buf *b, uint16_t tag, uint64_t v)
{
    uint8_t d[8];
    set_u32(d, (uint32_t)v);
    set_u32(d + 4, (uint32_t)(v >> 32));
    return put_bytes(b, tag, d, sizeof d);
}

void fd_close(int *fd)
{
    if (*fd >= 0)
        close(*fd);
    *fd = -1;
}

ssize_t read_all(int fd, void *p, size_t n)
{
    size_t got = 0;
    while (got < n) {
        ssize_t r = read(fd, (char *)p + got, n - got);
        if (r < 0 && errno == EINTR)
            continue;
        if (r < 0)
            return -1;
        if (!r)
            break;
        got += (size_t)r;
    }
    return (ssize_t)got;
}

int write_all(int fd, const void *p, size_t n)
{
    size_t put = 0;
    while (put < n) {
        ssize_t r = write(fd, (const char *)p + put, n - put);
        if (r < 0 && errno == EINTR)
            continue;
        if (r < 0)
            return -1;
        put += (size_t)r;
    }
    return 0;
}

int write_file_at(int dir, const char *path, const char *text)
{
    int fd = openat(dir, path, O_WRONLY | O_CLOEXEC);
    if (fd < 0)
        return -1;
    size_t n = strlen(text);
    ssize_t r = write(fd, text, n);
    int no = r < 0 ? errno : EIO;
    close(fd);
    if (r == (ssize_t)n)
        return 0;
    errno = no;
    return -1;
}

int write_file(const char *path, const char *text)
{
    return write_file_at(AT_FDCWD, path, text);
}

ssize_t read_file_at(int dir, const char *path, char *out, size_t cap)
{
    int fd = openat(dir, path, O_RDONLY | O_CLOEXEC | O_NONBLOCK);
    if (fd < 0)
        return -1;
    ssize_t n = read_all(fd, out, cap - 1);
    int no = errno;
    close(fd);
    errno = no;
    if (n >= 0)
        out[n] = 0;
    return n;
}

int set_nonblock(int fd)
{
    int f = fcntl(fd, F_GETFL);
    return f < 0 ? -1 : fcntl(fd, F_SETFL, f | O_NONBLOCK);
}

int path_join(char *out, size_t cap, const char *fmt, ...)
{
    va_list ap;
    va_start(ap, fmt);
    int n = vsnprintf(out, cap, fmt, ap);
    va_end(ap);
    if (n >= 0 && (size_t)n < cap)
        return 0;
    errno = ENAMETOOLONG;
    return -1;
}

enum { MAX_PASSED = 250 }; /* the kernel's own limit is 253 a message */

ssize_t msg_send(int sock, const void *p, size_t n, const int *fds, size_t nfds)
{
    union {
        struct cmsghdr h;
        char room[CMSG_SPACE(sizeof(int) * MAX_PASSED)];
    } c;
    struct iovec v = {(void *)(uintptr_t)p, n};
    struct msghdr m = {.msg_iov = &v, .msg_iovlen = 1};
    if (nfds > MAX_PASSED) {
        errno = EMSGSIZE;
        return -1;
    }
    if (nfds) {
        memset(&c, 0, CMSG_SPACE(sizeof(int) * nfds));
        m.msg_control = &c;
        m.msg_controllen = CMSG_SPACE(sizeof(int) * nfds);
        c.h.cmsg_level = SOL_SOCKET;
        c.h.cmsg_type = SCM_RIGHTS;
        c.h.cmsg_len = CMSG_LEN(sizeof(int) * nfds);
        memcpy(CMSG_DATA(&c.h), fds, sizeof(int) * nfds);
    }
    ssize_t r;
    do
        r = sendmsg(sock, &m, MSG_NOSIGNAL);
    while (r < 0 && errno == EINTR);
    return r;
}

ssize_t msg_recv(int sock, void *p, size_t n, int *fds, size_t *nfds)
{
    union {
        struct cmsghdr h;
        char room[CMSG_SPACE(sizeof(int) * MAX_PASSED)];
    } c;
    struct iovec v = {p, n};
    struct msghdr m = {.msg_iov = &v, .msg_iovlen = 1, .msg_control = &c, .msg_controllen = sizeof c};
    size_t room = *nfds;
    *nfds = 0;
    ssize_t r;
    do
        r = recvmsg(sock, &m, MSG_CMSG_CLOEXEC);
    while (r < 0 && errno == EINTR);
    if (r < 0)
        return -1;
    struct cmsghdr *h = CMSG_FIRSTHDR(&m); /* a unix socket without credentials sends one header at most */
    if (h && h->cmsg_level == SOL_SOCKET && h->cmsg_type == SCM_RIGHTS) {
        size_t k = (h->cmsg_len - CMSG_LEN(0)) / sizeof(int);
        for (size_t i = 0; i < k; i++) {
            int fd;
            memcpy(&fd, CMSG_DATA(h) + i * sizeof(int), sizeof fd);
            if (*nfds < room)
                fds[(*nfds)++] = fd;
            else
                close(fd);
        }
    }
    if (m.msg_flags & (MSG_TRUNC | MSG_CTRUNC)) {
        for (size_t i = 0; i < *nfds; i++)
            close(fds[i]);
        *nfds = 0;
        errno = EMSGSIZE;
        return -1;
    }
    return r;
}

uint64_t time_ns(struct timespec t)
{
    return (uint64_t)t.tv_sec * 1000000000u + (uint64_t)t.tv_nsec;
}

uint64_t now_ns(void)
{
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return time_ns(t);
}
