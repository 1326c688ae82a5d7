/* A paused episode: every process but its first stands still. With a version 2 cgroup they are frozen in one, which the hub
 * makes when it is first asked for; else they are stopped, and those that were stopped already are remembered. */
#include "pause.h"

#include <signal.h>
#include <stdlib.h>
#include <string.h>

#include "procs.h"
#include "sys.h"

enum { ROUNDS = 100 };

static bool known(const struct keeper *k, pid_t pid)
{
    for (size_t i = 0; i < k->pause.n; i++)
        if (k->pause.pids[i] == pid)
            return true;
    return false;
}

static int remember(struct keeper *k, pid_t pid)
{
    pid_t *q = realloc(k->pause.pids, (k->pause.n + 1) * sizeof *q);
    if (!q)
        return -1;
    k->pause.pids = q;
    q[k->pause.n++] = pid;
    return 0;
}

/* Moves every process into the frozen group. What they fork meanwhile is born there or found by the next look. */
static int freeze(struct keeper *k, struct err *e)
{
    struct procs ps = {0};
    char text[16];
    int r = 0;
    if (write_all(k->pause.freeze_fd, "1", 1) < 0)
        return fail(e, errno, "freeze the episode's processes");
    int dir = open("/proc", O_RDONLY | O_DIRECTORY | O_CLOEXEC);
    for (int round = 0; r == 0 && round < ROUNDS; round++) {
        size_t new = 0;
        if (dir < 0 || procs_read(dir, &ps) < 0) {
            r = fail(e, errno, "list the episode's processes");
            break;
        }
        procs_mark_tree(&ps, k->init_pid);
        for (size_t i = 0; i < ps.n; i++) {
            struct proc *p = &ps.p[i];
            if (!p->in || p->pid == k->init_pid || p->state == 'Z' || p->state == 'X' || known(k, p->pid))
                continue;
            path_join(text, sizeof text, "%d", (int)p->pid);
            if (write_all(k->pause.procs_fd, text, strlen(text)) < 0 && errno != ESRCH)
                r = fail(e, errno, "move a process into the frozen group");
            else if (remember(k, p->pid) < 0)
                r = fail(e, ENOMEM, "remember which processes are frozen");
            new++;
        }
        if (!new)
            break;
    }
    fd_close(&dir);
    procs_free(&ps);
    k->pause.n = 0;
    if (r < 0)
        (void)!write_all(k->pause.freeze_fd, "0", 1);
    return r;
}

static int stop(struct keeper *k, struct err *e)
{
    struct procs ps = {0};
    int dir = procs_dir(k), r = 0;
    pid_t init = k->foreign_proc ? k->init_pid : 1;
    for (int round = 0; r == 0 && round < ROUNDS; round++) {
        size_t new = 0;
        if (dir < 0 || procs_read(dir, &ps) < 0) {
            r = fail(e, errno, "list the episode's processes");
            break;
        }
        procs_mark_tree(&ps, init);
        for (size_t i = 0; i < ps.n && r == 0; i++) {
            struct proc *p = &ps.p[i];
            /* stopped already, by a debugger too: not ours to start again */
            if (!p->in || p->pid == init || strchr("ZXTt", p->state) || known(k, p->pid))
                continue;
            if (procs_signal(dir, p->pid, SIGSTOP) == 0 && remember(k, p->pid) < 0)
                r = fail(e, ENOMEM, "remember which processes were stopped");
            new++;
        }
        if (!new)
            break;
    }
    fd_close(&dir);
    procs_free(&ps);
    return r;
}

static void thaw(struct keeper *k)
{
    if (k->pause.how == 'f')
        (void)!write_all(k->pause.freeze_fd, "0", 1);
    else {
        int dir = procs_dir(k);
        for (size_t i = 0; dir >= 0 && i < k->pause.n; i++)
            procs_signal(dir, k->pause.pids[i], SIGCONT);
        fd_close(&dir);
    }
    free(k->pause.pids);
    k->pause.pids = NULL;
    k->pause.n = 0;
    k->pause.how = 0;
}

static void shift_deadlines(struct keeper *k)
{
    uint64_t stood = now_ns() - k->pause.since_ns;
    for (size_t i = 0; i < COUNT_OF(k->chans); i++)
        for (struct chan *c = k->chans[i]; c; c = c->next)
            if (c->deadline_ns)
                c->deadline_ns += stood;
}

static void answer(struct keeper *k, uint32_t channel, const struct err *e)
{
    if (e->no)
        conn_fail(&k->conn, channel, e->no, e->what);
    else
        conn_send(&k->conn, T_REPLY, 0, channel, NULL, 0);
}

static void pause_now(struct keeper *k, uint32_t channel)
{
    struct err e = {0};
    if (k->init.fd < 0)
        fail(&e, ESRCH, "pause the episode: there is none");
    else if (!k->pause.how) {
        char how = k->pause.freeze_fd > 0 ? 'f' : 's';
        k->pause.how = how;
        k->pause.since_ns = now_ns();
        if ((how == 'f' ? freeze : stop)(k, &e) < 0)
            thaw(k);
    }
    answer(k, channel, &e);
}

void op_pause(struct keeper *k, uint32_t channel, const uint8_t *p, size_t n)
{
    struct buf b = {0};
    (void)p;
    (void)n;
    if (k->pause.channel) {
        conn_fail(&k->conn, channel, EALREADY, "pause the episode: it is being done");
        return;
    }
    if (!k->pause.asked && k->hub.fd >= 0 && put_str(&b, TAG_KIND, "ice") == 0 && msg_send(k->hub.fd, b.p, b.len, NULL, 0) > 0)
        k->pause.channel = channel; /* pause_ice goes on */
    else
        pause_now(k, channel);
    k->pause.asked = true;
    buf_free(&b);
}

void pause_ice(struct keeper *k, int *fds, size_t nfds)
{
    uint32_t channel = k->pause.channel;
    if (nfds == 2) {
        k->pause.procs_fd = fcntl(fds[0], F_DUPFD_CLOEXEC, 3);
        k->pause.freeze_fd = fcntl(fds[1], F_DUPFD_CLOEXEC, 3);
    }
    k->pause.channel = 0;
    if (channel)
        pause_now(k, channel);
}

void op_resume(struct keeper *k, uint32_t channel, const uint8_t *p, size_t n)
{
    struct err e = {0};
    (void)p;
    (void)n;
    if (k->pause.how) {
        thaw(k);
        shift_deadlines(k);
    }
    answer(k, channel, &e);
}

void pause_forget(struct keeper *k)
{
    if (k->pause.how)
        thaw(k); /* nobody is left to go on */
}
