/* The keeper of one sandbox: its life, its loop, its first words. */
#include "sandbox.h"
#include "skip.h"

#include <poll.h>
#include <sched.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/epoll.h>
#include <sys/prctl.h>
#include <sys/resource.h>

#include "limits.h"
#include "manifest.h"
#include "pause.h"
#include "pidfd.h"
#include "procs.h"
#include "shared.h"
#include "sys.h"
#include "stack.h"
#include "standby.h"

#ifndef RLS_HASH
#define RLS_HASH "unknown"
#endif

/* So long after the last event nobody waits; and so long after it, without anything that runs, others' commands are over as well:
 * to make an episode takes the machine longer than most commands do. */
enum { REST_MS = 1, LONG_REST_MS = 20 };

static bool hello(struct keeper *k, const struct frame *f)
{
    char token[128] = "";
    struct buf b = {0};
    if (f->channel || f->flags || tlv_get(f->p, f->len, TAG_VERSION, 0) != RLS_VERSION)
        return false;
    if (*k->set.token && (tlv_str(f->p, f->len, TAG_TOKEN, token, sizeof token) < 0 || strcmp(token, k->set.token)))
        return false;
    bool ok = put_u32(&b, TAG_VERSION, RLS_VERSION) == 0 && put_str(&b, TAG_HASH, RLS_HASH) == 0 &&
              put_str(&b, TAG_MODE, k->set.mode) == 0 && put_str(&b, TAG_MEMBER, k->set.member) == 0 &&
              buf_add(&b, k->facts.p, k->facts.len) == 0;
    if (ok)
        conn_send(&k->conn, T_WELCOME, 0, 0, b.p, b.len);
    buf_free(&b);
    k->greeted = ok;
    return ok;
}

static bool on_frame(struct conn *c, const struct frame *f)
{
    struct keeper *k = c->owner;
    if (f->type == T_HELLO)
        return hello(k, f);
    if (!k->greeted)
        return false;
    if (f->type == T_PING || f->type == T_PONG) {
        if (f->channel || f->len > 64)
            return false;
        if (f->type == T_PING)
            conn_send(c, T_PONG, 0, 0, f->p, f->len);
        return true;
    }
    return chan_frame(k, f);
}

void keeper_flush(struct keeper *k)
{
    uint32_t want = conn_stalled(&k->conn) ? 0 : EPOLLIN;
    for (int i = 0;; i++) {
        int r = conn_flush(&k->conn);
        if (r < 0) {
            k->loop.stop = true;
            return;
        }
        if (r == 1 || i == 64) { /* 64: others want a turn */
            want |= EPOLLOUT;
            break;
        }
        if (!chan_pump(k))
            break;
    }
    loop_want(&k->loop, &k->client, want);
}

static void on_client(struct src *s, uint32_t events)
{
    struct keeper *k = s->owner;
    if ((events & ~(uint32_t)EPOLLOUT) && conn_read(&k->conn) < 0)
        k->loop.stop = true;
}

static void on_hub(struct src *s, uint32_t events)
{
    struct keeper *k = s->owner;
    uint8_t room[16 << 10];
    char kind[16];
    int fds[MAX_CHAIN];
    size_t nfds = COUNT_OF(fds);
    (void)events;
    ssize_t n = msg_recv(s->fd, room, sizeof room, fds, &nfds);
    if (n <= 0) {
        k->loop.stop = true; /* the hub is gone, or wants an end */
        return;
    }
    if (tlv_str(room, (size_t)n, TAG_KIND, kind, sizeof kind) <= 0)
        kind[0] = 0;
    if (strcmp(kind, "give") == 0)
        layer_given(k, room, (size_t)n, fds, nfds);
    else if (strcmp(kind, "ice") == 0)
        pause_ice(k, fds, nfds);
    for (size_t i = 0; i < nfds; i++)
        close(fds[i]);
}

static int answer_hub(struct keeper *k, int hub, const struct err *e)
{
    struct buf b = {0};
    int r;
    if (e->no)
        r = put_u32(&b, TAG_ERRNO, (uint32_t)e->no) < 0 || put_str(&b, TAG_WHAT, e->what) < 0;
    else {
        r = put_fmt(&k->facts, TAG_FACT, "proc=%s", k->foreign_proc ? "foreign" : "own") < 0 ||
            ((k->set.bare || k->set.shared) && put_fmt(&k->facts, TAG_FACT, "trees=%s", procs_subreaper() ? "whole" : "session") < 0) ||
            put_fmt(&k->facts, TAG_FACT, "reset_mode=%s", k->set.mode) < 0 || put_str(&b, TAG_MODE, k->set.mode) < 0 ||
            buf_add(&b, k->facts.p, k->facts.len) < 0;
    }
    if (r == 0)
        r = msg_send(hub, b.p, b.len, NULL, 0) < 0;
    buf_free(&b);
    return r ? -1 : 0;
}

/* A spare keeper is put into cgroups before it knows what for. */
static int groups_join(int hub, const int *fds, size_t n)
{
    struct buf b = {0};
    uint32_t joined = 0;
    for (size_t i = 0; i < n; i++) {
        if (i < 32 && write_all(fds[i], "0", 1) == 0)
            joined |= 1u << i;
        close(fds[i]);
    }
    int r = put_str(&b, TAG_KIND, "joined") < 0 || put_u32(&b, TAG_COUNT, joined) < 0 || msg_send(hub, b.p, b.len, NULL, 0) < 0 ? -1 : 0;
    buf_free(&b);
    return r;
}

/* Whole, but nobody's yet: until the hub tells a name. -1: nobody wants it any more, or its episode died. */
static int await_owner(struct keeper *k, int hub, uint8_t *room, size_t cap)
{
    struct buf facts = {0}, b = {0};
    standby_ask(k);
    standby_settle(k);
    facts_here(k, &facts); /* the first look takes the kernel longer than the next: the one that counts is still to come */
    buf_free(&facts);
    if (k->loop.stop || k->init.fd < 0)
        return -1;
    int r = put_str(&b, TAG_KIND, "ahead") < 0 || msg_send(hub, b.p, b.len, NULL, 0) < 0;
    buf_free(&b);
    if (r)
        return -1;
    prctl(PR_SET_NAME, "rls-ahead");
    for (;;) {
        struct pollfd p[] = {{k->init.fd, POLLIN, 0}, {hub, POLLIN, 0}};
        size_t none = 0;
        if (poll(p, COUNT_OF(p), -1) < 0 && errno != EINTR)
            return -1;
        if (p[0].revents)
            k->init.fn(&k->init, EPOLLIN);
        if (k->loop.stop || k->init.fd < 0)
            return -1;
        if (!p[1].revents)
            continue;
        ssize_t n = msg_recv(hub, room, cap, NULL, &none);
        if (n <= 0 || tlv_str(room, (size_t)n, TAG_MEMBER, k->set.member, sizeof k->set.member) <= 0)
            return -1;
        prctl(PR_SET_NAME, "rls-keeper");
        return 0;
    }
}

int sandbox_main(int hub_fd, int client_fd)
{
    static struct keeper k;
    static uint8_t room[192 << 10];
    int fds[MAX_LOWERS + 8];
    size_t nfds = COUNT_OF(fds);
    struct err e = {0};
    k.layers.dir = "/k/s";
    k.hub.fd = -1;
    k.init.fd = k.root_fd = k.proc_fd = k.mnt_fd = k.side = k.side_init = k.before = -1;
#ifdef RLS_SKIP
    k.left_root = k.left_ns = -1;
    if (skipped("keyring"))
        syscall(SYS_keyctl, 1 /* JOIN_SESSION_KEYRING: all episodes will have this one */, NULL);
#endif
    prctl(PR_SET_DUMPABLE, 0);
    prctl(PR_SET_NAME, "rls-keeper");
    signal(SIGPIPE, SIG_IGN);
    ssize_t n;
    char word[16];
    bool ahead = false; /* made before anybody asked for it */
    for (;;) {
        nfds = COUNT_OF(fds);
        n = msg_recv(hub_fd, room, sizeof room, fds, &nfds);
        if (n <= 0)
            return 1;
        if (tlv_str(room, (size_t)n, TAG_KIND, word, sizeof word) <= 0)
            break;
        if (strcmp(word, "ahead") == 0)
            ahead = true;
        else if (strcmp(word, "join"))
            break;
        else if (groups_join(hub_fd, fds, nfds) < 0)
            return 1;
        prctl(PR_SET_NAME, "rls-spare");
    }
    if (!ahead)
        prctl(PR_SET_NAME, "rls-keeper");
    struct rlimit rl;
    if (getrlimit(RLIMIT_NOFILE, &rl) == 0) {
        rl.rlim_cur = rl.rlim_max;
        setrlimit(RLIMIT_NOFILE, &rl);
    }
    configure(&k, room, (size_t)n, &e);
    /* the base's directories, /dev, where upper layers go on a disk, then cgroup files; without isolation only those */
    size_t base = k.set.bare || k.set.shared ? 0 : k.set.lowers + 1 + k.set.disk;
    if (!k.set.bare)
        prctl(PR_SET_PDEATHSIG, SIGKILL); /* else there would be nobody to end what it started */
    if (!e.no && nfds < base)
        fail(&e, EINVAL, "count the descriptors of the base: %zu for %zu", nfds, base);
    if (!e.no && k.set.shared)
        shared_enter(&k, &e);
    else if (!e.no && !k.set.bare && unshare(CLONE_NEWNS) < 0)
        fail(&e, errno, "make the keeper's mount namespace");
    if (!e.no && limits_setup(&k, room, (size_t)n, fds + base, nfds - base, &e) == 0 && 
        (k.set.manifest ? manifest_begin(&k, &e) == 0 : k.set.bare || k.set.shared || (facts_begin(&k, &e) == 0 && base_attach(&k, fds, fds[k.set.lowers], k.set.disk ? fds[base - 1] : -1, &e) == 0))) {
        for (size_t i = 0; i < nfds; i++)
            close(fds[i]);
        bool chosen = *k.set.mode;
        if (!chosen)
            strcpy(k.set.mode, "overlay");
        if (seccomp_prepare(&e) < 0 || loop_init(&k.loop) < 0 || conn_init(&k.conn, client_fd, on_frame, &k) < 0)
            fail(&e, errno, "prepare the keeper's loop");
        else if (strcmp(k.set.mode, "userns") || userns_plan(&k, &e) == 0) {
            struct err again = {0};
            if (episode_start(&k, &e) < 0 && !chosen && userns_plan(&k, &again) == 0 && episode_start(&k, &again) == 0) {
                strcpy(k.set.mode, "userns"); /* the next best */
                e.no = 0;
            } else if (again.no && strlen(e.what) < sizeof e.what / 2) /* both are worth knowing */
                snprintf(e.what + strlen(e.what), sizeof e.what - strlen(e.what), "; in mode userns: %.140s: %s", again.what, strerror(again.no));
        }
    }
    if (ahead && !e.no && await_owner(&k, hub_fd, room, sizeof room) < 0)
        return 1;
    if (answer_hub(&k, hub_fd, &e) < 0 || e.no)
        return 1;
    if (loop_add(&k.loop, &k.client, client_fd, EPOLLIN, on_client, &k) < 0 ||
        loop_add(&k.loop, &k.hub, hub_fd, EPOLLIN, on_hub, &k) < 0)
        return 1;
    if (!k.set.bare) { /* the client is busy with the answer: what it will want first takes the longest */
        facts_here(&k, &k.look);
        standby_ask(&k);
    }
    while (!k.loop.stop) {
        int due = chan_timers(&k), look = limits_timer(&k);
        if (look >= 0 && (due < 0 || look < due))
            due = look;
        bool stage = episode_may_stage(&k), soon = k.nold || k.gc || standby_wanted(&k) || (stage && k.nchans);
        int rest = soon ? REST_MS : stage ? LONG_REST_MS : -1;
        bool early = rest < 0 || (due >= 0 && due < rest);
        int r = loop_turn(&k.loop, early ? due : rest);
        if (r < 0)
            break;
        if (r == 0 && !early) {
            bool busy = k.nchans || !soon;
            standby_ask(&k);
            episode_sweep(&k);
            if (busy)
                episode_stage(&k);
        }
        keeper_flush(&k);
        if (k.standby.soon)
            standby_ask(&k);
        helpers_reap(&k);
    }
    episode_kill(&k);
    return 0;
}
