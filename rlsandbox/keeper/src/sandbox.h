/* The sandbox's keeper: outside the episode's pid namespace, speaks the protocol, owns the upper layer.
 * It works on a stream pair and a prepared base and knows nothing of the hub but the socket it was configured by. */
#ifndef RLS_SANDBOX_H
#define RLS_SANDBOX_H
#include <sys/stat.h>

#include "frames.h"
#include "layers.h"
#include "loop.h"

enum {
    MAX_LOWERS = 200,   /* all base directories together; they travel as descriptors in one message */
    MAX_ALL_LOWERS = 4000, /* with those that mode userns takes apart */
    MAX_OVERLAYS = 64,
    MAX_BINDS = 100,
    MAX_CHANNELS = 1024,
    TARGET_MAX = 512,
    NS_KINDS = 8,
    MAX_HELPERS = 64,
};

/* An overlay of the episode's view: `/` is number 0. Its lowers are mounts k/l/<first> .. */
struct overlay {
    char target[TARGET_MAX];
    unsigned first, n;
    struct stat top; /* of the topmost directory below the upper layer */
};
struct bind {
    char target[TARGET_MAX];
    unsigned lower;
    bool file;
};

struct settings {
    char member[128], hostname[65], mode[16], token[128], upper[16];
    uint64_t upper_bytes, upper_inodes, memory_bytes;
    uint32_t pids, nofile;
    bool host_network, one_id;
    bool disk; /* upper layers lie on a disk */
    bool shared; /* all processes of the container share their mounts: shared.h */
    char place[80]; /* and then: a directory of a volume, for the keeper's own */
    bool bare; /* isolation none: plain processes of the machine, nothing can be put back */
    bool manifest; /* and then: but for files, by a list of all inodes; commands are another user's */
    char user[128];
    uid_t uid; /* that user */
    gid_t gid;
    struct overlay overlay[MAX_OVERLAYS];
    unsigned overlays;
    struct bind bind[MAX_BINDS];
    unsigned binds, lowers;
};

struct chan;

struct limits { /* limits.c */
    bool memory_cg, pids_cg;
    bool crowd; /* the last look found processes */
    int oom_fd, memory_fd, pids_fd;
    uint64_t oom_seen, last_ns;
    uint64_t oom_left, oom_ns; /* kills by the kernel that no end of a command has explained; when the last of them was seen */
    bool oom_due;              /* and somebody has to be found for them */
};

struct keeper {
    struct loop loop;
    struct conn conn;
    struct src client, hub;
    struct settings set;
    struct limits lim;
    struct {
        char how; /* f frozen, s stopped, 0 not paused */
        bool asked;
        uint32_t channel; /* that waits for the hub's answer */
        int procs_fd, freeze_fd; /* 0: none */
        uint64_t since_ns;
        pid_t *pids; /* those that were stopped by us */
        size_t n;
    } pause;
    struct layers layers;      /* sealed ones that are here */
    uint16_t stack[MAX_CHAIN]; /* those the episode stands on, topmost first */
    unsigned nstack, imports;
    struct ns_seen { /* a namespace of the episode at the last look, and in which episode it was first seen */
        int fd; /* keeps the number from being given to a new one */
        uint64_t id;
        unsigned first;
    } ns[NS_KINDS];
    int own_ipc, own_uts;           /* to come back to */
    int session_key, key_seen;      /* the episode's session keyring, 0: it has none of its own; that of the last look */
    unsigned key_first;
    struct buf facts; /* TLV facts for WELCOME */
    bool greeted;
    /* the episode */
    unsigned generation, episode; /* of the upper layer; of the episode */
    unsigned generations;         /* the highest number given to an upper layer */
    bool used;                    /* the episode was asked to do something */
    struct buf look;              /* at the first episode, before anything was asked for: made while the client reads that it is there */
    struct {
        pid_t pid; /* 0: none */
        int sock, side;
        unsigned generation, nstack;
        uint16_t stack[MAX_CHAIN];
        bool failed;
    } next; /* the episode that a reset will go on with, made ahead */
    struct {
        unsigned generation;
        int mnt;
    } old[8]; /* ended episodes' upper layers and mount namespaces, to be freed when nobody waits */
    unsigned nold;
    bool gc;
    pid_t init_pid, helpers[MAX_HELPERS]; /* forked by the keeper for its own work; 0: none */
    int root_fd, proc_fd; /* O_PATH of the episode's / and /proc */
    int side, side_init; /* to its init, for signals (pidfd.h), where those need one; the end of the one that is being begun */
    int before; /* where mounts are shared: /proc of the episode before; -1: none */
    int mnt_fd; /* its mount namespace: taking that apart takes longer than all else of an end */
    bool foreign_proc;
    struct src init;
    struct ereq *ereq_head, *ereq_tail; /* requests that the episode's init has not taken yet */
    /* channels */
    struct chan *chans[256];
    struct sout *ready_head, *ready_tail; /* output that could be sent now */
    struct sout *draining;                /* pipes of ended commands that background children still hold */
    unsigned nchans;
    uint32_t next_job;
    struct {
        uint32_t job; /* 0: none */
        pid_t pid;    /* 0: not yet told */
        int sock, pidfd;
        bool off, soon;
    } standby;
#ifdef RLS_SKIP
    int left_root, left_ns; /* of the episode before; -1: none */
#endif
    size_t assembling; /* bytes of unfinished messages, all channels */
};

/* ---- messages between keeper and the episode's init (SOCK_SEQPACKET) ---- */
enum { E_SPAWN = 1, E_FILE = 2, E_KILL_ALL = 3, E_STANDBY = 4 };        /* keeper -> init */
enum { E_READY = 10, E_VIEW_FAILED = 11, E_FORKED = 12, E_EXITED = 13, E_NOT_FORKED = 14, E_KILLED = 15, E_SETTLED = 16 }; /* back */

/* descriptors that come with a request, in this order, when their bit is set */
enum { FD_RESULT = 1, FD_IN = 2, FD_OUT = 4, FD_ERR = 8, FD_CTL_IN = 16, FD_CTL_OUT = 32, FD_BODY = 64, FD_KINDS = 7 };

struct emsg { /* both ways; a request's TLV body follows, or comes as FD_BODY */
    uint32_t kind, job, fds, op;
    int32_t pid, status; /* status: wait status or errno */
    uint32_t body;
    char what[300];
};
enum { EMSG_HEAD = offsetof(struct emsg, what), EMSG_INLINE = 16 << 10 };

struct ereq {
    struct ereq *next;
    int fds[FD_KINDS];
    size_t nfds, len;
    uint8_t data[];
};

/* sandbox.c */
int sandbox_main(int hub_fd, int client_fd);
void keeper_flush(struct keeper *k);

/* settings.c */
int configure(struct keeper *k, const uint8_t *p, size_t n, struct err *e);

/* mounts.c: in the keeper's own mount namespace */
int base_attach(struct keeper *k, const int *lowers, int dev_fd, int disk_fd, struct err *e); /* disk_fd -1: tmpfs */
int upper_new(struct keeper *k, struct err *e);
/* A writable place at `path` for a layer: a tmpfs, or the directory `name` on the disk. And an end of it. */
int place_new(struct keeper *k, const char *path, const char *name, bool limited, struct err *e);
void place_drop(struct keeper *k, const char *path, const char *name, bool sealed);
/* large ones are freed by a helper; on a disk a sealed one stays */
void upper_forget(struct keeper *k, unsigned generation, bool sealed);
int top_below(const struct keeper *k, unsigned i, struct stat *top); /* what overlay i's top must be like: the layer's or base's */
int top_like(const char *path, const struct stat *st, struct err *e);
uint64_t tmpfs_used(const char *path);

/* root.c */
int root_switch(const char *old, struct err *e);

/* userns.c */
int userns_plan(struct keeper *k, struct err *e); /* takes the root apart, once, after base_attach */

/* reset.c */
int episode_start(struct keeper *k, struct err *e);
void episode_kill(struct keeper *k);
size_t episode_living(struct keeper *k); /* how many of its processes there are (stack.c) */
bool episode_may_stage(const struct keeper *k);
void episode_stage(struct keeper *k); /* in a moment of rest: the next one ahead */
void episode_sweep(struct keeper *k); /* and what the last one left */

/* view.c and episode.c: in the episode's init */
int view_below(struct keeper *k, struct err *e); /* in a helper: what the upper layer covers; its root, opened */
int view_build(struct keeper *k, int *root_fd, int *proc_fd, bool *foreign_proc, struct err *e);
_Noreturn void episode_main(struct keeper *k, int ctl);

/* inside.c: in a child of the episode's init, never returns */
extern uint32_t inside_nofile; /* how many descriptors a command may have; 0: as many as the init */
extern uint32_t inside_nproc; /* how many processes a command's user may have; 0: no limit */
extern pid_t inside_parent; /* the episode's init, when inside_user is set */
extern const char *inside_user; /* whom all commands run as, and nobody else; NULL: as is asked for */
int inside_ids(const char *user, uid_t *uid, gid_t *gid, char name[64], struct err *e);
_Noreturn void inside_run(const struct emsg *m, uint8_t *body, size_t n, const int *fds);
_Noreturn void inside_wait(int sock); /* for one request */

/* seccomp.c */
int seccomp_prepare(struct err *e); /* once, before the first episode: they inherit it */
int seccomp_install(struct err *e);
int caps_drop(struct err *e);

/* command.c */
bool chan_frame(struct keeper *k, const struct frame *f);
void chan_from_init(struct keeper *k, const struct emsg *m, int pidfd);
bool chan_pump(struct keeper *k); /* puts one DATA frame into the connection; false: nothing to put */
int chan_timers(struct keeper *k); /* handles what is due; ms until the next, -1 none */
void chan_end_all(struct keeper *k, int no, const char *what);
struct ereq *ereq_new(uint32_t kind, uint32_t job, uint32_t op, const uint8_t *body, size_t n);
void ereq_fd(struct ereq *r, uint32_t bit, int fd); /* takes fd */
void ereq_push(struct keeper *k, struct ereq *r);
void ereq_flush(struct keeper *k);
void ereq_drop(struct ereq *r);

/* facts.c */
extern const char *const ns_names[NS_KINDS];
int facts_begin(struct keeper *k, struct err *e);       /* once, before the first episode */
bool facts_here(struct keeper *k, struct buf *text);    /* INSPECT without a helper; false: it needs one */

void op_reset(struct keeper *k, uint32_t channel, const uint8_t *p, size_t n);

#endif
