/* The stream between a client and a sandbox's keeper in a container, over transports that may be cut: a session that goes
 * on where it was. Both sides count the bytes of the inner stream, keep what the other has not confirmed, and send it
 * again after a cut; so nothing is lost and nothing comes twice, whatever the bytes mean. docs/protocol.md, "Links". */
#ifndef RLS_LINK_H
#define RLS_LINK_H
#include "loop.h"

enum {
    LINK_HEAD = 16,           /* u32 length of what follows the head | u8 kind | 3 zero | u64 confirmed */
    LINK_MAX = 32768,         /* of what follows the head */
    LINK_KEPT = 1 << 20,      /* sent and not confirmed: beyond it the keeper is not read */
    LINK_UNSENT = 64 << 10,   /* read from the keeper and not sent: more would delay what is urgent */
    LINK_CONFIRM = 64 << 10,  /* confirmed at least so often */
    LINK_WAITING = 8,         /* streams that have not yet said who they are */
    LINK_HELLO_MS = 10000,
    LINK_SILENT_MS = 45000,   /* a client pings every 10 s */
};

enum link_kind {
    L_ATTACH = 1,   /* client: TLV version token session offset */
    L_ATTACHED = 2, /* keeper: TLV version hash mode offset fact* env* */
    L_REFUSED = 3,  /* keeper: TLV kind text; the end of this stream */
    L_BYTES = 4,    /* both: of the inner stream */
    L_CONFIRM = 5,  /* both: only its head counts */
    L_PING = 6, L_PONG = 7,
    L_LEAVE = 8,    /* client: u32 seconds that the session is to be kept without it */
    L_ENDED = 9,    /* keeper: TLV kind text: the inner stream has ended */
};

struct link;

struct link_peer { /* a stream on which somebody may be */
    struct src src;
    struct link *link;
    uint8_t *in;
    size_t in_len;
    uint64_t heard_ns;
};

struct link {
    struct loop *loop;
    struct link_peer *peer, *waiting[LINK_WAITING];
    struct src keeper;
    char token[128], session[64];
    char ended_session[64]; /* whose commands were ended since nobody came back */
    uint32_t grace_s, keep_s; /* keep_s: for the stream that is gone, or 0: grace_s */
    uint64_t left_ns;         /* since when nobody is attached; 0: somebody is, or nobody ever was */
    /* to the client */
    uint8_t *ring;
    uint64_t base, sent, end; /* confirmed up to; sent up to; read up to */
    uint8_t *out; /* records on their way, out_at of out_len are through */
    size_t out_at, out_len;
    struct buf control;
    /* from the client */
    struct buf in; /* that the keeper has not taken yet, from in_at on */
    size_t in_at;
    uint64_t got, told; /* taken from the client; confirmed to it */
    bool used;          /* something has been said to this keeper */
    const struct buf *facts; /* what ATTACHED tells besides */
    int (*renew)(struct link *l, struct err *e); /* a new keeper, its stream put in with link_keeper */
};

int link_init(struct link *l, struct loop *loop);
int link_keeper(struct link *l, int fd); /* takes fd: a keeper that nobody has spoken to yet */
int link_accept(struct link *l, int fd); /* takes fd */
int link_timer(struct link *l);          /* does what is due; ms until the next, -1: nothing */
void link_flush(struct link *l);         /* after every turn of the loop */
void link_end(struct link *l, const char *kind, const char *text); /* says why to who is there; blocks for a moment */

#endif
