/* Small things everybody needs: errors that name what was tried, bounded buffers, TLV fields, descriptors. */
#ifndef RLS_UTIL_H
#define RLS_UTIL_H
#ifndef _GNU_SOURCE
#define _GNU_SOURCE
#endif
#include <errno.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <sys/types.h>
#include <time.h>

#define COUNT_OF(a) (sizeof(a) / sizeof((a)[0]))
#define PRINTF(f, a) __attribute__((format(printf, f, a)))

/* ---- errors: one slot, filled once, by the deepest function that failed ---- */
struct err {
    int no;
    char what[300];
};
int fail(struct err *e, int no, const char *fmt, ...) PRINTF(3, 4); /* returns -1 */

/* ---- bounded growing bytes ---- */
struct buf {
    uint8_t *p;
    size_t len, cap, max; /* max 0: RLS_MAX_MESSAGE */
};
int buf_add(struct buf *b, const void *p, size_t n); /* -1 with errno ENOMEM or EMSGSIZE; b unchanged */
void buf_free(struct buf *b);

/* ---- TLV ---- */
struct tlv {
    uint16_t tag;
    uint32_t len;
    const uint8_t *p;
};
struct tlv_in {
    const uint8_t *p;
    size_t left;
};
int tlv_next(struct tlv_in *in, struct tlv *t); /* 1: got one, 0: end, -1: malformed */
bool tlv_find(const void *p, size_t n, uint16_t tag, struct tlv *t);
uint64_t tlv_uint(const struct tlv *t, uint64_t otherwise); /* u32 or u64 by length */
uint64_t tlv_get(const void *p, size_t n, uint16_t tag, uint64_t otherwise);
int tlv_str(const void *p, size_t n, uint16_t tag, char *out, size_t cap); /* length, -1 absent, -2 too long or NUL inside */
int put_bytes(struct buf *b, uint16_t tag, const void *p, size_t n);
int put_str(struct buf *b, uint16_t tag, const char *s);
int put_fmt(struct buf *b, uint16_t tag, const char *fmt, ...) PRINTF(3, 4);
int put_u32(struct buf *b, uint16_t tag, uint32_t v);
int put_u64(struct buf *b, uint16_t tag, uint64_t v);
uint32_t get_u32(const uint8_t *p);
uint64_t get_u64(const uint8_t *p);
void set_u32(uint8_t *p, uint32_t v);

/* ---- descriptors ---- */
void fd_close(int *fd); /* closes and sets -1; EINTR is no reason to repeat */
ssize_t read_all(int fd, void *p, size_t n);  /* up to n; short only at the end */
int write_all(int fd, const void *p, size_t n);
int write_file(const char *path, const char *text); /* one write; -1 with errno */
int write_file_at(int dir, const char *path, const char *text);
ssize_t read_file_at(int dir, const char *path, char *out, size_t cap); /* NUL-terminated */
int set_nonblock(int fd);
int path_join(char *out, size_t cap, const char *fmt, ...) PRINTF(3, 4); /* -1 ENAMETOOLONG instead of cutting off */
ssize_t msg_send(int sock, const void *p, size_t n, const int *fds, size_t nfds); /* one seqpacket with descriptors */
ssize_t msg_recv(int sock, void *p, size_t n, int *fds, size_t *nfds);             /* nfds: in room, out got */

uint64_t time_ns(struct timespec t);
uint64_t now_ns(void); /* monotonic */

#endif
