/* The hub: one process for all sandboxes of one pool on one machine. */
#ifndef RLS_HUB_H
#define RLS_HUB_H
#include "frames.h"
#include "layers.h"
#include "loop.h"

struct member {
    struct member *next;
    struct hub *hub;
    char name[128];
    char group[128]; /* its cgroups' name */
    pid_t pid;
    uint32_t create_channel, dispose_channel; /* waiting for an answer; 0: none */
    int stream;                               /* the client's end until CREATE is answered */
    struct src src;                           /* socket pair with the keeper */
    int disk; /* directory of its upper layers; 0: on tmpfs */
    bool ready, bare, shared; /* shared: bare as far as the hub goes; the keeper isolates by itself (shared.h) */
};

enum cg_kind { CG_MEMORY, CG_PIDS, CG_CPU, CG_KINDS };
enum { PIDS_SPARE = 16 /* beyond the limit of commands: the init can still start one, read a file */ };
enum { CG_FILES = 4, TAG_CG_FILE = 200 /* between hub and keeper only */ };

struct gone { /* a sandbox whose last processes still die in its cgroups */
    struct gone *next;
    char name[128];
};

#define SPARE_NAME "spare."
struct spare { /* a keeper that waits: in its groups, for the next sandbox with limits; or ahead, as the whole of `recipe` */
    struct hub *hub;
    pid_t pid;
    struct src src;
    int stream;
    char group[128];
    unsigned kinds[CG_KINDS], in; /* of groups, as bits: those it was told to join, one by one; those it is in */
    bool ahead, ready, off;
    struct buf seen; /* ahead: the base it stands on */
};

struct hub {
    struct spare spare[2];
    unsigned spares;         /* made so far */
    struct buf recipe, last; /* what the spare is ahead for; what the last CREATE wanted */
    struct {
        int base[CG_KINDS], dir[CG_KINDS]; /* -1: no limits of this kind */
        bool v2;
        int ice; /* where frozen groups are made, without limits of their own; -1: nowhere */
        int ice_base;
        char name[64];
    } cg;
    struct gone *gone;
    struct loop loop;
    struct conn conn;
    struct src client, client_pid, child;
    struct member *members;
    struct layers layers;
    struct buf request; /* one that comes in several frames */
    uint32_t request_channel;
    int host;    /* the machine's root */
    int self;    /* this program */
    uid_t root_uid; /* what root of a sandbox is on this machine */
    gid_t root_gid;
    int userns;  /* root: the user namespace of every sandbox; else -1 */
    int zygote, bare; /* those who fork keepers: inside the namespaces; outside, for isolation none */
    pid_t zygote_pid, bare_pid;
    bool bare_only;
    char ids[16]; /* idmapped, range, one */
};

/* ids.c */
int ids_setup(struct hub *h, struct err *e);
/* place.c: the hub's own root, /dev, base directories */
int place_setup(struct hub *h, struct err *e);
/* a detached clone of a directory or file of the machine; shown: as a whole, with what is mounted inside */
int place_open(struct hub *h, const char *path, bool shown, struct err *e);
int place_dev(struct hub *h, struct err *e);
/* zygote.c */
int zygote_start(struct hub *h, struct err *e);
int bare_start(struct hub *h, struct err *e); /* before anything else is set up */
pid_t zygote_fork(int zygote, int keeper_sock, int stream, struct err *e);
int zygote_main(int sock);
/* spare.c */
void spare_begin(struct hub *h);
bool spare_missing(const struct hub *h);
void spare_make(struct hub *h);
bool spare_take(struct hub *h, struct member *m, unsigned *in, int *sock, int *stream); /* in: the kinds of groups that it is in */
/* One that is ahead becomes `m`, if that is what it was made for: its sockets; it answers as any other. False: it must be made. */
bool spare_hand_over(struct hub *h, struct member *m, const uint8_t *p, size_t n, int *sock, int *stream);
void spare_died(struct hub *h, pid_t pid);
void spare_end(struct hub *h);
/* hub.c */
int member_equip(struct member *m, unsigned in, const uint8_t *p, size_t n, struct buf *seen, struct err *e); /* in: kinds of groups that it is in */
bool base_is(struct hub *h, const uint8_t *p, size_t n, const struct buf *seen); /* whether the same paths still lead to what was `seen` */
bool create_limited(const uint8_t *p, size_t n);                                  /* whether it wants control groups */
void groups_free(struct hub *h, const char *group);
/* probe.c */
void probe(struct hub *h, struct buf *b);
/* hub.c */
int hub_main(int fd, pid_t client, bool bare);

#endif
