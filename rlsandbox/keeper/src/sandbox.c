/* The keeper of one sandbox: its life, its loop, its first words. */
#include "sandbox.h"
#include "skip.h"

#include <sched.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/epoll.h>
#include <sys/prctl.h>
#include <sys/resource.h>

#include "limits.h"
#include "pause.h"
#include "sys.h"
#include "stack.h"

#ifndef RLS_HASH
#define RLS_HASH "unknown"
#endif

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

static int target_copy(char *out, const uint8_t *p, size_t n, struct err *e)
{
    if (!n || n >= TARGET_MAX || p[0] != '/' || memchr(p, 0, n))
        return fail(e, EINVAL, "read a mount point: it must be an absolute path under %d bytes", TARGET_MAX);
    memcpy(out, p, n);
    out[n] = 0;
    return 0;
}

/* Every ROOT, every lower of an OVERLAY and every BIND has its descriptor, in the order of the fields. */
static int configure(struct keeper *k, const uint8_t *p, size_t n, struct err *e)
{
    struct settings *s = &k->set;
    struct tlv_in it = {p, n};
    struct tlv t;
    char word[32];
    int r;
    s->overlays = 1;
    strcpy(s->overlay[0].target, "/");
    while ((r = tlv_next(&it, &t)) == 1)
        if (t.tag == TAG_ROOT) {
            s->overlay[0].n++;
            s->lowers++;
        }
    it = (struct tlv_in){p, n};
    while (r == 0 && tlv_next(&it, &t) == 1) {
        const uint8_t *eq = memchr(t.p, '=', t.len);
        if (t.tag == TAG_OVERLAY) {
            if (s->overlays == MAX_OVERLAYS || !eq)
                return fail(e, EINVAL, "read an overlay: over %d, or no `=`", MAX_OVERLAYS);
            struct overlay *o = &s->overlay[s->overlays++];
            if (target_copy(o->target, t.p, (size_t)(eq - t.p), e) < 0)
                return -1;
            o->first = s->lowers;
            o->n = 1;
            for (const uint8_t *c = eq + 1; c < t.p + t.len; c++)
                o->n += *c == ':';
            s->lowers += o->n;
        } else if (t.tag == TAG_BIND) {
            if (s->binds == MAX_BINDS || !eq)
                return fail(e, EINVAL, "read a bind: over %d, or no `=`", MAX_BINDS);
            struct bind *b = &s->bind[s->binds++];
            if (target_copy(b->target, t.p, (size_t)(eq - t.p), e) < 0)
                return -1;
            b->lower = s->lowers++;
        } else if (t.tag == TAG_FACT && put_bytes(&k->facts, TAG_FACT, t.p, t.len) < 0)
            return fail(e, ENOMEM, "keep facts");
    }
    if (r < 0 || s->lowers > MAX_LOWERS)
        return fail(e, EINVAL, "read the sandbox's settings: over %d base directories, or broken", MAX_LOWERS);
    tlv_str(p, n, TAG_MEMBER, s->member, sizeof s->member);
    tlv_str(p, n, TAG_HOSTNAME, s->hostname, sizeof s->hostname);
    tlv_str(p, n, TAG_TOKEN, s->token, sizeof s->token);
    if (tlv_str(p, n, TAG_MODE, s->mode, sizeof s->mode) <= 0)
        strcpy(s->mode, "overlay");
    s->host_network = tlv_str(p, n, TAG_NETWORK, word, sizeof word) > 0 && strcmp(word, "host") == 0;
    s->upper_bytes = tlv_get(p, n, TAG_UPPER_BYTES, 0);
    s->upper_inodes = tlv_get(p, n, TAG_UPPER_INODES, 0);
    s->memory_bytes = tlv_get(p, n, TAG_MEMORY_BYTES, 0);
    s->pids = (uint32_t)tlv_get(p, n, TAG_PIDS, 0);
    s->nofile = (uint32_t)tlv_get(p, n, TAG_NOFILE, 0);
    s->one_id = tlv_str(p, n, TAG_KIND, word, sizeof word) > 0 && strcmp(word, "one") == 0;
    return 0;
}

static int answer_hub(struct keeper *k, int hub, const struct err *e)
{
    struct buf b = {0};
    int r;
    if (e->no)
        r = put_u32(&b, TAG_ERRNO, (uint32_t)e->no) < 0 || put_str(&b, TAG_WHAT, e->what) < 0;
    else {
        r = put_fmt(&k->facts, TAG_FACT, "proc=%s", k->foreign_proc ? "foreign" : "own") < 0 ||
            put_fmt(&k->facts, TAG_FACT, "reset_mode=%s", k->set.mode) < 0 || put_str(&b, TAG_MODE, k->set.mode) < 0 ||
            buf_add(&b, k->facts.p, k->facts.len) < 0;
    }
    if (r == 0)
        r = msg_send(hub, b.p, b.len, NULL, 0) < 0;
    buf_free(&b);
    return r ? -1 : 0;
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
    k.init.fd = k.root_fd = k.proc_fd = -1;
#ifdef RLS_SKIP
    k.left_root = k.left_ns = -1;
    if (skipped("keyring"))
        syscall(SYS_keyctl, 1 /* JOIN_SESSION_KEYRING: all episodes will have this one */, NULL);
#endif
    prctl(PR_SET_PDEATHSIG, SIGKILL);
    prctl(PR_SET_DUMPABLE, 0);
    prctl(PR_SET_NAME, "rls-keeper");
    signal(SIGPIPE, SIG_IGN);
    ssize_t n = msg_recv(hub_fd, room, sizeof room, fds, &nfds);
    if (n <= 0)
        return 1;
    struct rlimit rl;
    if (getrlimit(RLIMIT_NOFILE, &rl) == 0) {
        rl.rlim_cur = rl.rlim_max;
        setrlimit(RLIMIT_NOFILE, &rl);
    }
    if (unshare(CLONE_NEWNS) < 0)
        fail(&e, errno, "make the keeper's mount namespace");
    else if (configure(&k, room, (size_t)n, &e) == 0 && nfds < k.set.lowers + 1)
        fail(&e, EINVAL, "count the descriptors of the base: %zu for %u", nfds, k.set.lowers + 1);
    size_t base = k.set.lowers + 1; /* the last of them is /dev; cgroup files follow */
    if (!e.no && limits_setup(&k, room, (size_t)n, fds + base, nfds - base, &e) == 0 && facts_begin(&k, &e) == 0 &&
        base_attach(&k, fds, fds[base - 1], &e) == 0) {
        for (size_t i = 0; i < nfds; i++)
            close(fds[i]);
        if (loop_init(&k.loop) < 0 || conn_init(&k.conn, client_fd, on_frame, &k) < 0)
            fail(&e, errno, "prepare the keeper's loop");
        else
            episode_start(&k, &e);
    }
    if (answer_hub(&k, hub_fd, &e) < 0 || e.no)
        return 1;
    if (loop_add(&k.loop, &k.client, client_fd, EPOLLIN, on_client, &k) < 0 ||
        loop_add(&k.loop, &k.hub, hub_fd, EPOLLIN, on_hub, &k) < 0)
        return 1;
    while (!k.loop.stop) {
        int due = chan_timers(&k), look = limits_timer(&k);
        if (loop_turn(&k.loop, look >= 0 && (due < 0 || look < due) ? look : due) < 0)
            break;
        keeper_flush(&k);
        helpers_reap(&k);
    }
    episode_kill(&k);
    return 0;
}
