/* Over memory a command's whole tree ends and the sandbox lives. With a cgroup the kernel kills one process and counts it;
 * which command it belonged to is told by whose end follows, or by who used most when we last looked. Without, the keeper looks and
 * kills itself; in a container with a limit the kernel may be faster. */
#include "limits.h"

#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/resource.h>
#include <sys/statvfs.h>

#include "procs.h"
#include "standby.h"
#include "sys.h"
#include "worker.h"

enum { TICK_MS = 20, IDLE_TICK_MS = 500, NEAR = 8 << 20 };
static const uint64_t LEFT_NS = 1000000000;

/* A number in a small kernel file, after `key` where there is one. */
static uint64_t number(int fd, const char *key)
{
    char text[1024], *s = text;
    ssize_t n = fd < 0 ? -1 : pread(fd, text, sizeof text - 1, 0);
    if (n <= 0)
        return 0;
    text[n] = 0;
    if (key && (s = strstr(text, key)))
        s += strlen(key);
    return s ? strtoull(s, NULL, 10) : 0;
}

int limits_setup(struct keeper *k, const uint8_t *p, size_t n, const int *fds, size_t nfds, struct err *e)
{
    struct limits *l = &k->lim;
    struct tlv_in it = {p, n};
    struct tlv t;
    size_t i = 0;
    l->oom_fd = l->memory_fd = l->pids_fd = -1;
    while (tlv_next(&it, &t) == 1) {
        if (t.tag == TAG_FACT) {
            l->memory_cg |= t.len == 19 && memcmp(t.p, "limit.memory=cgroup", 19) == 0;
            l->pids_cg |= t.len == 17 && memcmp(t.p, "limit.pids=cgroup", 17) == 0;
        }
        if (t.tag != TAG_CG_FILE)
            continue;
        if (i == nfds)
            return fail(e, EINVAL, "count the cgroup files of a sandbox");
        int *to = t.len == 3 ? &l->oom_fd : t.len == 6 ? &l->memory_fd : &l->pids_fd;
        if ((*to = fcntl(fds[i++], F_DUPFD_CLOEXEC, 3)) < 0)
            return fail(e, errno, "keep a cgroup file");
    }
    l->oom_seen = number(l->oom_fd, "oom_kill ");
    const struct settings *s = &k->set;
    bool ok = (l->memory_cg || !s->memory_bytes || put_str(&k->facts, TAG_FACT, "limit.memory=watchdog") == 0) &&
              (l->pids_cg || !s->pids || put_str(&k->facts, TAG_FACT, s->bare ? "limit.pids=none" : s->shared ? "limit.pids=watchdog" : "limit.pids=rlimit") == 0) &&
              (!s->upper_bytes || put_str(&k->facts, TAG_FACT, s->disk || s->bare ? "limit.disk=none" : "limit.disk=tmpfs") == 0) &&
              (!s->nofile || put_str(&k->facts, TAG_FACT, "limit.nofile=rlimit") == 0);
    return ok ? 0 : fail(e, ENOMEM, "keep facts");
}

enum { IN_FLIGHT = 4096 };

static int set(int what, const char *name, rlim_t soft, struct err *e)
{
    struct rlimit r;
    if (getrlimit(what, &r) < 0)
        return fail(e, errno, "read the limit %s", name);
    if (r.rlim_max < soft)
        soft = r.rlim_max;
    r = (struct rlimit){soft, soft};
    if (setrlimit(what, &r) < 0)
        return fail(e, errno, "set the limit %s to %llu", name, (unsigned long long)soft);
    return 0;
}

int limits_inside(struct keeper *k, struct err *e)
{
    const struct settings *s = &k->set;
    struct rlimit own;
    if (s->nofile && s->bare && set(RLIMIT_NOFILE, "nofile", s->nofile, e) < 0)
        return -1;
    /* Descriptors in flight over sockets are counted by user, the keeper's, the init's and the commands' together, and whoever
     * finds more of them than its own limit can send none: that of commands is the smaller one. */
    if (s->nofile && !s->bare && getrlimit(RLIMIT_NOFILE, &own) == 0) {
        rlim_t room = own.rlim_max > 2 * IN_FLIGHT ? own.rlim_max - IN_FLIGHT : own.rlim_max / 2;
        inside_nofile = (uint32_t)(s->nofile < room ? s->nofile : room);
    }
    /* counted by user and user namespace, so by sandbox; a cgroup counts all users together. The init may go a little
     * further than the commands that it starts. */
    if (s->pids && !s->bare && !s->shared) { /* an old gVisor counts none */
        if (set(RLIMIT_NPROC, "nproc", s->pids + 2 + PIDS_SPARE, e) < 0)
            return -1;
        inside_nproc = s->pids + 2; /* the init, and a standby */
    }
    return set(RLIMIT_CORE, "core", 0, e);
}

/* ---- who uses how much ---- */

struct use {
    pid_t pid;
    uint64_t bytes;
};

static uint64_t private_bytes(int dir, pid_t pid)
{
    char path[32], text[128];
    unsigned long long size, resident, shared;
    path_join(path, sizeof path, "%d/statm", (int)pid);
    if (read_file_at(dir, path, text, sizeof text) <= 0 || sscanf(text, "%llu %llu %llu", &size, &resident, &shared) != 3)
        return 0;
    return (resident > shared ? resident - shared : 0) * 4096ull; /* shared pages would be counted once a process */
}

static uint64_t tmpfs_bytes(const struct keeper *k)
{
    struct statvfs v;
    char path[32];
    path_join(path, sizeof path, "/k/u/%u", k->generation);
    return !k->set.disk && statvfs(path, &v) == 0 ? (uint64_t)(v.f_blocks - v.f_bfree) * v.f_frsize : 0;
}

struct look {
    uint64_t total; /* all processes of the episode and its files */
    size_t count;
    pid_t largest;
    uint64_t largest_bytes;
};

/* A command whose main process is there, though we may not have heard yet that it started. */
static bool runs(const struct chan *c)
{
    return c->op == OP_SPAWN && (c->started || c->pidfd >= 0) && !c->ended;
}

/* Looks at every process; each running command learns what its tree uses. */
static void look(struct keeper *k, struct look *l)
{
    struct procs ps = {0};
    int dir = procs_dir(k);
    pid_t init = k->foreign_proc ? k->init_pid : 1, standby = standby_pid(k);
    *l = (struct look){.total = tmpfs_bytes(k)};
    if (dir < 0 || procs_read(dir, &ps) < 0)
        goto out;
    uint64_t *bytes = calloc(ps.n ? ps.n : 1, sizeof *bytes);
    if (!bytes)
        goto out;
    procs_mark_tree(&ps, init); /* sorts; after this the order stays */
    for (size_t i = 0; i < ps.n; i++) {
        if (!ps.p[i].in || ps.p[i].pid == init || ps.p[i].pid == standby)
            continue;
        bytes[i] = private_bytes(dir, ps.p[i].pid);
        l->total += bytes[i];
        l->count++;
        if (bytes[i] > l->largest_bytes) {
            l->largest_bytes = bytes[i];
            l->largest = ps.p[i].pid;
        }
    }
    for (size_t i = 0; i < COUNT_OF(k->chans); i++)
        for (struct chan *c = k->chans[i]; c; c = c->next) {
            if (!runs(c))
                continue;
            for (size_t j = 0; j < ps.n; j++)
                ps.p[j].in = false;
            procs_mark_tree(&ps, procs_number(k, c->pidfd, c->pid));
            uint64_t was = c->used_bytes;
            c->used_bytes = 0;
            for (size_t j = 0; j < ps.n; j++)
                if (ps.p[j].in)
                    c->used_bytes += bytes[j];
            /* what the kernel has just killed holds nothing any more, and is still the one that had it */
            if (k->lim.memory_cg && c->used_bytes < was - was / 8)
                c->used_bytes = was - was / 8;
        }
    free(bytes);
out:
    procs_free(&ps);
    fd_close(&dir);
}

static size_t running(struct keeper *k)
{
    size_t n = 0;
    for (size_t i = 0; i < COUNT_OF(k->chans); i++)
        for (struct chan *c = k->chans[i]; c; c = c->next)
            n += runs(c);
    return n;
}

/* The running command that used most when we last looked, of several the last one that began: what fills the memory between
 * two looks is seldom what had run before. NULL when none runs. With `early`, also one of whose start we have not heard yet. */
static struct chan *guilty(struct keeper *k, bool early)
{
    struct chan *most = NULL;
    for (size_t i = 0; i < COUNT_OF(k->chans); i++)
        for (struct chan *c = k->chans[i]; c; c = c->next)
            if (runs(c) && (early || c->started) &&
                (!most || c->used_bytes > most->used_bytes || (c->used_bytes == most->used_bytes && c->started_ns > most->started_ns)))
                most = c;
    return most;
}

static void end_for_memory(struct chan *c)
{
    c->flags |= X_OOM;
    chan_kill(c);
}

/* ---- ticks ---- */

/* Whether the kernel has killed for memory and no command's end explains it yet. One kill may end several commands' processes, or
 * several kills a single command: what is left over explains further ends by SIGKILL for a while, and blames nobody. */
static bool oom_open(struct keeper *k)
{
    struct limits *l = &k->lim;
    uint64_t seen = number(l->oom_fd, "oom_kill "), now = now_ns();
    if (seen > l->oom_seen) {
        l->oom_left += seen - l->oom_seen;
        l->oom_seen = seen;
        l->oom_ns = now;
        l->oom_due = true;
    } else if (!l->oom_due && now - l->oom_ns > LEFT_NS)
        l->oom_left = 0;
    return l->oom_left > 0;
}

void limits_begin(struct chan *c)
{
    struct keeper *k = c->k;
    for (size_t i = 0; i < COUNT_OF(k->chans); i++)
        for (struct chan *o = k->chans[i]; o; o = o->next)
            if (o != c && o->op == OP_SPAWN && o->job && !o->ended)
                return;
    k->lim.oom_seen = number(k->lim.oom_fd, "oom_kill ");
    k->lim.oom_left = 0;
    k->lim.oom_due = false;
}

/* Whether the main process of a running command is dying: then its end, which is on the way, says whom the kernel has killed. */
static bool end_is_near(struct keeper *k)
{
    int dir = procs_dir(k);
    bool near = false;
    for (size_t i = 0; dir >= 0 && i < COUNT_OF(k->chans); i++)
        for (struct chan *c = k->chans[i]; c && !near; c = c->next)
            near = runs(c) && procs_dying(dir, procs_number(k, c->pidfd, c->pid));
    fd_close(&dir);
    return near;
}

void limits_ended(struct chan *c)
{
    struct keeper *k = c->k;
    struct limits *l = &k->lim;
    if (c->op != OP_SPAWN || c->flags || l->oom_fd < 0 || !oom_open(k))
        return;
    /* killed itself, or a shell that says so of its child */
    if ((c->status & 0x7f) == SIGKILL || (c->status & 0xff7f) == (128 + SIGKILL) << 8)
        l->oom_left--;
    else {
        struct chan *other = guilty(k, false); /* c itself does not run any more */
        if (!l->oom_due || (other && (other->used_bytes > c->used_bytes || end_is_near(k))))
            return; /* the timer finds somebody, unless an end does */
        l->oom_left = 0;
    }
    l->oom_due = false;
    c->flags |= X_OOM;
    c->status = SIGKILL; /* what it went on to do after its child was killed is no result */
}

/* A look after the one that found a kill, so that who was killed has begun to die. */
static void find_guilty(struct keeper *k)
{
    struct limits *l = &k->lim;
    bool known = l->oom_due;
    if (!oom_open(k) || !known || end_is_near(k))
        return;
    struct chan *c = guilty(k, false);
    l->oom_due = false;
    l->oom_left = 0;
    if (c)
        end_for_memory(c);
}

static void watch(struct keeper *k, const struct look *l)
{
    const struct settings *s = &k->set;
    bool memory = s->memory_bytes && !k->lim.memory_cg && l->total > s->memory_bytes;
    bool pids = s->pids && !k->lim.pids_cg && l->count > s->pids + PIDS_SPARE; /* several users may each have their number */
    if (!memory && !pids)
        return;
    struct chan *c = guilty(k, true);
    if (c && (pids || c->used_bytes >= l->largest_bytes)) {
        if (memory)
            c->flags |= X_OOM;
        chan_kill(c);
        return;
    }
    int dir = procs_dir(k); /* what a background process uses has no command any more */
    if (dir >= 0 && l->largest > 0)
        procs_signal(dir, l->largest, SIGKILL);
    fd_close(&dir);
}

int limits_timer(struct keeper *k)
{
    struct limits *l = &k->lim;
    size_t busy = running(k);
    bool dog = (k->set.memory_bytes && !l->memory_cg) || (k->set.pids && !l->pids_cg);
    if (k->pause.how || k->init_pid <= 0 || (!busy && !(dog && l->crowd)) || (!dog && l->oom_fd < 0))
        return -1;
    uint64_t now = now_ns(), every = (uint64_t)(busy ? TICK_MS : IDLE_TICK_MS) * 1000000u;
    if (l->last_ns && now - l->last_ns < every)
        return (int)((every - (now - l->last_ns)) / 1000000u) + 1;
    l->last_ns = now;
    if (l->oom_fd >= 0)
        find_guilty(k);
    if (dog || (!l->oom_due && busy > 1 && number(l->memory_fd, NULL) > k->set.memory_bytes / 2)) {
        struct look seen;
        look(k, &seen);
        l->crowd = seen.count > 0;
        if (dog)
            watch(k, &seen);
    }
    return busy ? TICK_MS : IDLE_TICK_MS;
}

bool limits_near(const struct keeper *k)
{
    return k->lim.memory_fd >= 0 && number(k->lim.memory_fd, NULL) + NEAR > k->set.memory_bytes;
}

void limits_facts(struct worker *w)
{
    const struct limits *l = &w->k->lim;
    if (l->oom_fd >= 0) {
        fact(w, "oom");
        field_f(w, "%llu", (unsigned long long)number(l->oom_fd, "oom_kill "));
        fact_end(w);
    }
    if (l->pids_fd >= 0) {
        fact(w, "pids");
        field_f(w, "%llu", (unsigned long long)number(l->pids_fd, NULL));
        fact_end(w);
    }
}
