/* A process that waits for the episode's next command: forked by the episode's init when nobody waits for it, with all done that
 * is the same for every command. It takes the request from the keeper itself, so that a start costs no fork and no hop. What
 * the episode can do to it, it can do to the init's other children as well; a dead one is noticed, and the init forks then. */
#include "standby.h"

#include <poll.h>
#include <signal.h>
#include <sys/socket.h>

#include "pidfd.h"
#include "procs.h"
#include "sys.h"

enum { SETTLE_MS = 1000 };

bool standby_wanted(const struct keeper *k)
{
    return !k->standby.job && !k->standby.off && !k->set.bare && !k->pause.how && k->init.fd >= 0;
}

void standby_ask(struct keeper *k)
{
    int sv[2];
    k->standby.soon = false;
    if (!standby_wanted(k))
        return;
    struct ereq *r = ereq_new(E_STANDBY, k->next_job + 1, 0, NULL, 0);
    if (!r || socketpair(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0, sv) < 0) {
        if (r)
            ereq_drop(r);
        k->standby.off = true; /* without one the init forks */
        return;
    }
    set_nonblock(sv[0]);
    k->standby.job = ++k->next_job;
    k->standby.sock = sv[0];
    ereq_fd(r, FD_IN, sv[1]);
    ereq_push(k, r);
}

void standby_drop(struct keeper *k)
{
    if (!k->standby.job)
        return;
    fd_close(&k->standby.sock); /* it ends by that, if it lives */
    if (k->standby.pid)
        fd_close(&k->standby.pidfd);
    k->standby.job = 0;
    k->standby.pid = 0;
}

void standby_told(struct keeper *k, const struct emsg *m, int pidfd)
{
    if (m->kind == E_FORKED && pidfd >= 0) {
        k->standby.pid = m->pid;
        k->standby.pidfd = pidfd;
        return;
    }
    fd_close(&pidfd);
    standby_drop(k);
    k->standby.off = true; /* until the next command ends: an episode that kills each of them has none */
}

bool standby_take(struct chan *c, const struct ereq *r)
{
    struct keeper *k = c->k;
    if (!k->standby.pid || k->pause.how) /* it stands still as well */
        return false;
    pidfd_kill(k->standby.pidfd, SIGCONT); /* the episode may have stopped whatever it saw */
    if (msg_send(k->standby.sock, r->data, r->len, r->fds, r->nfds) < 0) {
        standby_drop(k);
        return false;
    }
    c->standby = k->standby.sock;
    k->standby.sock = -1;
    c->job = k->standby.job; /* its end is told under this number */
    c->pid = k->standby.pid;
    c->pidfd = k->standby.pidfd;
    c->forked = true;
    k->standby.pid = 0;
    standby_drop(k);
    return true;
}

bool standby_lost(int sock)
{
    char c;
    ssize_t r;
    do
        r = recv(sock, &c, 1, MSG_DONTWAIT);
    while (r < 0 && errno == EINTR);
    return r == 0 || (r < 0 && errno != EAGAIN);
}

void standby_settle(struct keeper *k)
{
    struct pollfd p = {k->init.fd, POLLIN, 0};
    while (k->standby.job && !k->standby.pid && k->init.fd >= 0 && poll(&p, 1, SETTLE_MS) > 0)
        k->init.fn(&k->init, POLLIN);
}

pid_t standby_pid(struct keeper *k)
{
    return k->standby.pid ? procs_number(k, k->standby.pidfd, k->standby.pid) : 0;
}
