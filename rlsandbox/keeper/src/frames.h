/* One framed connection: parses what comes in, queues what goes out. Control frames go before DATA frames;
 * a frame that has begun is always finished first. */
#ifndef RLS_FRAMES_H
#define RLS_FRAMES_H
#include "protocol.h"
#include "util.h"

struct frame {
    uint8_t type, flags;
    uint16_t stream;
    uint32_t channel, len;
    const uint8_t *p;
};

struct out {
    struct out *next;
    int fd; /* goes along with the first byte; -1: none */
    size_t len, off;
    uint8_t data[];
};

struct conn {
    int fd;
    bool broken;
    const char *why; /* of broken */
    uint8_t *in;
    size_t in_len;
    struct out *head, *tail;
    size_t queued;
    uint8_t *data; /* one DATA frame under way */
    size_t data_len, data_off;
    /* returns false when the frame breaks the protocol */
    bool (*on_frame)(struct conn *, const struct frame *);
    void *owner;
};

enum { CONN_QUEUE_MAX = 4 << 20 }; /* beyond this the peer is not read until it reads */

int conn_init(struct conn *c, int fd, bool (*on_frame)(struct conn *, const struct frame *), void *owner);
void conn_free(struct conn *c);
void conn_trim(struct conn *c); /* gives back the buffers' memory while nothing is under way */
int conn_read(struct conn *c); /* what is there; 0, or -1 when the stream ended or broke */
int conn_flush(struct conn *c); /* 0: all out; 1: would block; -1: broken */
bool conn_stalled(const struct conn *c);
void conn_send(struct conn *c, uint8_t type, uint16_t stream, uint32_t channel, const void *p, size_t n);
void conn_send_fd(struct conn *c, uint8_t type, uint32_t channel, const void *p, size_t n, int fd); /* takes fd */
/* Room for the next DATA frame's payload, NULL while one is under way or control frames wait. */
uint8_t *conn_data_room(struct conn *c);
void conn_data_put(struct conn *c, uint8_t flags, uint16_t stream, uint32_t channel, size_t n);
void conn_fail(struct conn *c, uint32_t channel, int no, const char *what);

#endif
