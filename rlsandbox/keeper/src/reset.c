/* Starting and ending episodes, seen from the keeper. */
#include <poll.h>
#include <sched.h>
#include <signal.h>
#include <string.h>
#include <sys/prctl.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <stdio.h>

#include "limits.h"
#include "manifest.h"
#include "pause.h"
#include "pidfd.h"
#include "shared.h"
#include "skip.h"
#include "stack.h"
#include "standby.h"
#include "sys.h"

enum { START_TIMEOUT_MS = 20000 };

static int map_ids(const struct keeper *k, pid_t pid, struct err *e)
{
    char path[64];
    /* two extents: one may not span two of the namespace above */
    const char *map = k->set.one_id ? "0 0 1" : "0 0 1\n1 1 65535";
    static const char *const files[] = {"uid_map", "gid_map"};
    for (size_t i = 0; i < COUNT_OF(files); i++) {
        path_join(path, sizeof path, "/proc/%d/%s", (int)pid, files[i]);
        if (write_file(path, map) < 0)
            return fail(e, errno, "write %s of the episode's user namespace", files[i]);
    }
    return 0;
}

/* Without a word: the machine's out-of-memory killer, or somebody who may. */
static int died(pid_t pid, struct err *e)
{
    siginfo_t si = {0};
    while (waitid(P_PID, (id_t)pid, &si, WEXITED | WNOWAIT) < 0 && errno == EINTR)
        ;
    if (si.si_code == CLD_EXITED)
        return fail(e, ESRCH, "start the episode's init: it ended with status %d", si.si_status);
    return fail(e, ESRCH, "start the episode's init: signal %d ended it", si.si_status);
}

static int await_ready(struct keeper *k, int sock, struct err *e)
{
    static struct emsg m;
    char path[64];
    int fds[2];
    size_t n = 2;
    struct pollfd p = {sock, POLLIN, 0};
    int r;
    do
        r = poll(&p, 1, START_TIMEOUT_MS);
    while (r < 0 && errno == EINTR);
    if (r == 0)
        return fail(e, ETIMEDOUT, "wait for the episode's init");
    ssize_t got = msg_recv(sock, &m, sizeof m, fds, &n);
    if (got == 0 || (got < 0 && errno == ECONNRESET)) /* the latter: with our word unread */
        return died(k->init_pid, e);
    if (got < (ssize_t)EMSG_HEAD)
        return fail(e, got < 0 ? errno : EPROTO, "hear from the episode's init");
    if (m.kind == E_VIEW_FAILED) {
        m.what[sizeof m.what - 1] = 0;
        return fail(e, m.status, "%s", m.what);
    }
    if (m.kind != E_READY || n != 2)
        return fail(e, EPROTO, "start the episode's init");
    k->root_fd = fds[0];
    k->proc_fd = fds[1];
    k->foreign_proc = m.status != 0;
    k->session_key = m.pid;
    do /* it has closed what it does not need */
        r = poll(&p, 1, START_TIMEOUT_MS);
    while (r < 0 && errno == EINTR);
    if (r <= 0 || recv(sock, &m, sizeof m, 0) < (ssize_t)EMSG_HEAD || m.kind != E_SETTLED)
        return fail(e, r == 0 ? ETIMEDOUT : ESRCH, "start the episode's init: it did not settle");
    path_join(path, sizeof path, "/proc/%d/ns/mnt", (int)k->init_pid);
    k->mnt_fd = k->set.bare ? -1 : open(path, O_RDONLY | O_CLOEXEC); /* without it an end takes longer */
    return 0;
}

static void from_init(struct src *s, uint32_t events)
{
    struct keeper *k = s->owner;
    struct emsg m;
    int fd = -1;
    size_t n = 1;
    if (events & 4 /* EPOLLOUT */)
        ereq_flush(k);
    if (!(events & ~4u))
        return;
    ssize_t got = msg_recv(s->fd, &m, sizeof m, &fd, &n);
    if (got < 0 && errno == EAGAIN)
        return;
    if (got < (ssize_t)EMSG_HEAD) {
        episode_kill(k);
        /* said first: what ran was ended by this, and did not end by itself */
        struct buf b = {0};
        if (put_str(&b, TAG_KIND, "episode_died") == 0 && put_str(&b, TAG_TEXT, "the episode's first process died") == 0)
            conn_send(&k->conn, T_EVENT, 0, 0, b.p, b.len);
        buf_free(&b);
        chan_end_all(k, ESRCH, "run in the episode: its first process died");
    } else
        chan_from_init(k, &m, n ? fd : -1);
}

/* Everything of the episode is told to end; its init, which is not waited for yet. */
static pid_t let_go(struct keeper *k)
{
    pid_t pid = k->init_pid;
    standby_drop(k);
    buf_free(&k->look);
    k->standby.off = k->standby.soon = false;
    fd_close(&k->root_fd);
    if (k->set.shared && k->proc_fd >= 0) {
        fd_close(&k->before);
        k->before = k->proc_fd;
        k->proc_fd = -1;
    }
    fd_close(&k->proc_fd);
    fd_close(&k->side);
    pidfd_via = -1;
    loop_drop(&k->loop, &k->init);
    while (k->ereq_head) {
        struct ereq *r = k->ereq_head;
        k->ereq_head = r->next;
        ereq_drop(r);
    }
    k->ereq_tail = NULL;
    if (pid > 0 && k->set.bare && !k->set.manifest) {
        siginfo_t si = {0};
        /* without isolation its own end must end the others, and that takes a moment */
        for (int i = 0; i < 3000 && waitid(P_PID, (id_t)pid, &si, WEXITED | WNOHANG | WNOWAIT) == 0 && !si.si_pid; i++)
            usleep(1000);
    }
    if (pid > 0)
        kill(pid, SIGKILL);
    k->init_pid = 0;
    pause_forget(k);
    return pid;
}

/* The kernel ends a pid namespace's init last: once it is reaped nothing of the episode is left. */
static void reap(pid_t pid)
{
    int status;
    while (pid > 0 && waitpid(pid, &status, 0) < 0 && errno == EINTR)
        ;
}

/* Until it has ended, and with it all of the namespace. The kernel takes as long again to take it apart, when it is reaped. */
static void await_end(pid_t pid)
{
    siginfo_t si;
    while (pid > 0 && waitid(P_PID, (id_t)pid, &si, WEXITED | WNOWAIT) < 0 && errno == EINTR)
        ;
}

void episode_kill(struct keeper *k)
{
    struct err e = {0};
    reap(let_go(k));
    fd_close(&k->mnt_fd);
    if (k->set.shared && shared_end(k, &e) < 0)
        k->loop.stop = true; /* never go on beside them */
}

/* Upper layer, namespaces, ids: what it takes until the init of an episode goes on by itself. -2: there was one already. */
static int begin(struct keeper *k, pid_t *pid, int *sock, int *to_init, struct err *e)
{
    int sv[2], side[2] = {-1, -1};
    if (!k->set.bare && upper_new(k, e) < 0)
        return -1;
    if (k->set.shared && socketpair(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0, side) < 0)
        return fail(e, errno, "make a socket pair for signals");
    if (socketpair(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0, sv) < 0) {
        fail(e, errno, "make a socket pair for the episode's init");
        fd_close(&side[0]);
        fd_close(&side[1]);
        return -1;
    }
    unsigned long flags = SIGCHLD | CLONE_NEWNS | CLONE_NEWPID | CLONE_NEWIPC | CLONE_NEWUTS | CLONE_NEWCGROUP | CLONE_NEWUSER;
    if (k->set.shared)
        flags = SIGCHLD | CLONE_NEWPID | CLONE_NEWIPC | CLONE_NEWUTS;
    if (!k->set.host_network)
        flags |= CLONE_NEWNET;
    k->side_init = side[1];
    *pid = k->set.bare ? k_clone(SIGCHLD, NULL) : skip_clone(k, flags);
    if (*pid == 0) {
        close(sv[0]);
        fd_close(&side[0]);
        episode_main(k, sv[1]);
    }
    int no = errno;
    close(sv[1]);
    fd_close(&k->side_init);
    if (*pid < 0)
        fail(e, no, "clone the episode's init with new namespaces");
    else if ((k->set.bare || k->set.shared || map_ids(k, *pid, e) == 0) && send(sv[0], "g", 1, MSG_NOSIGNAL) == 1) {
        *sock = sv[0];
        *to_init = side[0];
        return 0;
    }
    fail(e, errno, "talk to the episode's init");
    close(sv[0]);
    fd_close(&side[0]);
    if (*pid > 0) {
        kill(*pid, SIGKILL);
        reap(*pid);
    }
    return *pid > 0 ? -2 : -1;
}

/* The init that was begun becomes the episode's, once it is ready. */
static int adopt(struct keeper *k, pid_t pid, int sock, int side, struct err *e)
{
    k->init_pid = pid;
    k->side = k->set.shared ? side : -1;
    pidfd_via = k->side;
    if (await_ready(k, sock, e) < 0 || set_nonblock(sock) < 0 || loop_add(&k->loop, &k->init, sock, 1 /* EPOLLIN */, from_init, k) < 0) {
        fail(e, errno, "watch the episode's init");
        if (k->init.fd != sock)
            close(sock);
        episode_kill(k);
        return -1;
    }
    return 0;
}

static void next_drop(struct keeper *k)
{
    pid_t pid = k->next.pid;
    if (pid <= 0)
        return;
    k->next.pid = 0;
    fd_close(&k->next.sock);
    fd_close(&k->next.side);
    kill(pid, SIGKILL);
    reap(pid);
    upper_forget(k, k->next.generation, false);
}

/* While a used episode does nothing, the next one is made ready: a reset then only ends the old one. An episode that was never
 * used needs no reset, so a sandbox that only waits does not hold two. */
bool episode_may_stage(const struct keeper *k)
{
#ifdef RLS_SKIP
    (void)k;
    return false; /* what is left out is left out of the way from one to the next */
#else
    return k->used && !k->next.pid && !k->next.failed && !k->set.bare && !k->pause.how && k->init.fd >= 0;
#endif
}

void episode_stage(struct keeper *k)
{
    struct err e = {0};
    unsigned now = k->generation;
    if (!episode_may_stage(k))
        return;
    if (limits_near(k)) { /* what it takes would be taken from the episode */
        k->next.failed = true;
        return;
    }
    k->generation = k->next.generation = ++k->generations;
    if (begin(k, &k->next.pid, &k->next.sock, &k->next.side, &e) < 0) {
        k->next.pid = 0;
        k->next.failed = true; /* the reset will say why */
        upper_forget(k, k->generation, false);
    }
    memcpy(k->next.stack, k->stack, sizeof k->stack);
    k->next.nstack = k->nstack;
    k->generation = now;
}

int episode_start(struct keeper *k, struct err *e)
{
    pid_t pid;
    int sock = -1, side = -1;
    k->episode++;
    k->used = k->next.failed = false;
    if (k->next.pid > 0 && k->next.nstack == k->nstack && memcmp(k->next.stack, k->stack, k->nstack * sizeof *k->stack) == 0) {
        struct err ignored = {0};
        siginfo_t si = {0};
        pid = k->next.pid;
        /* what it said before it died can still be read */
        if (waitid(P_PID, (id_t)pid, &si, WEXITED | WNOHANG | WNOWAIT) == 0 && !si.si_pid) {
            k->generation = k->next.generation;
            k->next.pid = 0;
            if (adopt(k, pid, k->next.sock, k->next.side, &ignored) == 0)
                return 0;
            upper_forget(k, k->generation, false);
        } /* else it died meanwhile: another one */
    }
    next_drop(k);
    k->generation = ++k->generations;
    struct err first = {0};
    int r = begin(k, &pid, &sock, &side, &first);
    if (r == 0 && adopt(k, pid, sock, side, &first) == 0)
        return 0;
    if ((r == -2 || first.no == ESRCH) && !k->set.bare) { /* perhaps somebody ended it: another one, once */
        struct err ignored = {0};
        upper_forget(k, k->generation, false);
        k->generation = ++k->generations;
        if (begin(k, &pid, &sock, &side, &ignored) == 0 && adopt(k, pid, sock, side, &ignored) == 0)
            return 0;
    }
    return fail(e, first.no, "%s", first.what);
}

/* What a reset leaves to be done when nobody waits. */
void episode_sweep(struct keeper *k)
{
    while (k->nold) {
        fd_close(&k->old[--k->nold].mnt);
        upper_forget(k, k->old[k->nold].generation, false);
    }
    if (k->gc)
        layers_gc(&k->layers, k->stack, k->nstack);
    k->gc = false;
}

void op_reset(struct keeper *k, uint32_t channel, const uint8_t *p, size_t n)
{
    struct err e = {0};
    struct buf b = {0};
    unsigned old = k->generation;
    uint64_t t0 = now_ns(), t1;
    char layer[LAYER_NAME] = "";
    if (k->set.manifest) {
        manifest_reset(k, channel, p, n);
        return;
    }
    if (k->set.bare)
        fail(&e, EOPNOTSUPP, "reset the sandbox: without isolation nothing can be put back");
    if (tlv_str(p, n, TAG_LAYER, layer, sizeof layer) == -2)
        fail(&e, EINVAL, "read a layer's name: it is too long");
    if (e.no || stack_set(k, layer, &e) < 0) {
        conn_fail(&k->conn, channel, e.no, e.what);
        return;
    }
    skip_keep(k);
    /* the next one is made while the old one dies: they share nothing */
    pid_t before = let_go(k);
    int mnt = k->mnt_fd, left = 0;
    k->mnt_fd = -1;
    chan_end_all(k, ECANCELED, "run in the episode: it was reset");
    t1 = now_ns();
    if (k->set.shared) { /* nobody begins beside its processes, which outlive its init */
        await_end(before);
        left = shared_end(k, &e);
    }
    int r = left < 0 ? -1 : episode_start(k, &e);
    await_end(before);
    if (r < 0 && left == 0) { /* the old one may have been in the way of a limit */
        reap(before);
        before = 0;
        fd_close(&mnt);
        upper_forget(k, k->generation, false);
        episode_sweep(k);
        e.no = 0;
        r = episode_start(k, &e);
    }
    if (r < 0)
        conn_fail(&k->conn, channel, e.no, e.what);
    else if (put_fmt(&b, TAG_FACT, "ns_end=%llu", (unsigned long long)(t1 - t0)) == 0 &&
             put_fmt(&b, TAG_FACT, "ns_start=%llu", (unsigned long long)(now_ns() - t1)) == 0)
        conn_send(&k->conn, T_REPLY, 0, channel, b.p, b.len);
    else
        k->conn.broken = true; /* an answer may not be lost */
    buf_free(&b);
    keeper_flush(k);
    reap(before); /* before anybody can look at what is here */
    if (k->nold == COUNT_OF(k->old))
        episode_sweep(k);
    k->old[k->nold].mnt = mnt;
    k->old[k->nold++].generation = old;
    k->gc = true;
}
