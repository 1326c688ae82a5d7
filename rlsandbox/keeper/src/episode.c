/* The episode's init: pid 1 of its pid namespace. Builds the view, gives up what it does not need, then only forks
 * when the keeper asks, and reaps. It never reads anything that the episode wrote. */
#include <fcntl.h>
#include <net/if.h>
#include <poll.h>
#include <sched.h>
#include <signal.h>
#include <stdlib.h>
#include <string.h>
#include <sys/ioctl.h>
#include <sys/prctl.h>
#include <sys/signalfd.h>
#include <sys/socket.h>
#include <sys/wait.h>

#include "limits.h"
#include "manifest.h"
#include "pidfd.h"
#include "procs.h"
#include "sandbox.h"
#include "skip.h"
#include "sys.h"

enum { MAX_LIVE = 2 * MAX_CHANNELS };

struct init {
    int ctl, sig;
    struct { pid_t pid; uint32_t job; } live[MAX_LIVE];
    unsigned n;
};

static void say(int ctl, struct emsg *m, size_t n, int fd)
{
    if (msg_send(ctl, m, n, &fd, fd >= 0 ? 1 : 0) < 0)
        _exit(3); /* the keeper is gone */
}

static int loopback_up(struct err *e)
{
    struct ifreq r = {.ifr_flags = IFF_UP | IFF_RUNNING};
    int s = socket(AF_INET, SOCK_DGRAM | SOCK_CLOEXEC, 0);
    if (s < 0)
        return fail(e, errno, "open a socket to bring the loopback interface up");
    strcpy(r.ifr_name, "lo");
    int x = ioctl(s, SIOCSIFFLAGS, &r);
    if (x < 0 && errno == ENOTTY) /* an old gVisor: it is up, or will never be */
        x = ioctl(s, SIOCGIFFLAGS, &r) == 0 && r.ifr_flags & IFF_UP ? 0 : -1;
    if (x < 0)
        fail(e, errno, "bring the loopback interface up");
    close(s);
    return x;
}

/* flags: WNOHANG, or 0 to go on until nobody is left */
static void reap(struct init *in, int flags)
{
    for (;;) {
        int status;
        pid_t p = waitpid(-1, &status, flags | __WALL);
        if (p < 0 && errno == EINTR)
            continue;
        if (p <= 0)
            return;
        for (unsigned i = 0; i < in->n; i++) {
            if (in->live[i].pid != p)
                continue;
            struct emsg m = {.kind = E_EXITED, .job = in->live[i].job, .pid = p, .status = status};
            in->live[i] = in->live[--in->n];
            say(in->ctl, &m, EMSG_HEAD, -1);
            break;
        }
    }
}

static bool unshielded; /* where signals from inside reach an init: seccomp.c */

static void start(struct init *in, struct emsg *m, uint8_t *body, size_t n, int *fds, size_t nfds)
{
    struct emsg back = {.kind = E_NOT_FORKED, .job = m->job, .status = EAGAIN};
    int pidfd = -1;
    if (in->n < MAX_LIVE) {
        pid_t p = k_clone(SIGCHLD | CLONE_PIDFD, &pidfd);
        if (p == 0) {
            sigset_t none;
            sigemptyset(&none);
            sigprocmask(SIG_SETMASK, &none, NULL);
            if (unshielded)
                signal(SIGIO, SIG_DFL);
            if (m->kind == E_STANDBY && nfds == 1)
                inside_wait(fds[0]);
            inside_run(m, body, n, fds);
        }
        if (p > 0) {
            in->live[in->n].pid = p;
            in->live[in->n++].job = m->job;
            if (pidfd < 0) /* the flag was not known */
                pidfd = pidfd_of(p);
            back.kind = E_FORKED;
            back.pid = p;
            back.status = 0;
        } else
            back.status = errno;
    }
    for (size_t i = 0; i < nfds; i++)
        close(fds[i]);
    say(in->ctl, &back, EMSG_HEAD, pidfd);
    fd_close(&pidfd);
}

static bool bare; /* isolation none: an ordinary process that its orphans come back to */
static struct keeper *steady; /* mode manifest; else NULL */

/* All that was started here and did not get away: stopped first, so that nobody forks meanwhile, then killed. */
static void bare_end(void)
{
    struct procs ps = {0};
    if (steady) {
        manifest_end_all(steady);
        return;
    }
    int dir = open("/proc", O_RDONLY | O_DIRECTORY | O_CLOEXEC);
    for (int round = 0; dir >= 0 && round < 400; round++) {
        size_t live = 0;
        if (procs_read(dir, &ps) < 0 || (procs_subreaper() ? procs_mark_tree(&ps, getpid()) <= 1 : procs_mark_container(&ps, getpid()) <= 0))
            break;
        for (size_t i = 0; i < ps.n; i++)
            if (ps.p[i].in && ps.p[i].pid != getpid() && !strchr("ZX", ps.p[i].state)) {
                procs_signal(dir, ps.p[i].pid, round < 3 ? SIGSTOP : SIGKILL);
                live++;
            }
        if (!live)
            break;
        if (round > 10)
            usleep(1000);
    }
    fd_close(&dir);
    procs_free(&ps);
}

static void serve(struct init *in)
{
    static union {
        struct emsg m;
        uint8_t room[EMSG_HEAD + EMSG_INLINE + 64];
    } u;
    int fds[FD_KINDS + 1];
    size_t nfds = COUNT_OF(fds);
    ssize_t n = msg_recv(in->ctl, &u, sizeof u, fds, &nfds);
    if (n <= 0) {
        if (bare)
            bare_end();
        _exit(n < 0 ? 4 : 0); /* the keeper is gone: this ends the namespace */
    }
    if ((size_t)n < EMSG_HEAD || u.m.body > (size_t)n - EMSG_HEAD)
        _exit(5);
    if (u.m.kind == E_KILL_ALL) {
        struct emsg back = {.kind = E_KILLED, .job = u.m.job};
        if (bare)
            bare_end();
        else
            kill(-1, SIGKILL); /* at once, all of them: nobody forks away from it */
        reap(in, 0);
        say(in->ctl, &back, EMSG_HEAD, -1);
    } else
        start(in, &u.m, u.room + EMSG_HEAD, u.m.body, fds, nfds);
}

/* A session keyring of the episode's own, empty: keys that the trainer's session holds are not for it, nor are those of
 * an earlier episode. 0: no more are allowed (or the kernel has none); then nothing can be put there either, since all
 * three calls are refused. */
static int session_key(void)
{
    long r = skipped("keyring") ? syscall(SYS_keyctl, 0 /* KEYCTL_GET_KEYRING_ID */, -3 /* session */, 0)
                                : syscall(SYS_keyctl, 1 /* KEYCTL_JOIN_SESSION_KEYRING */, NULL);
    return r > 0 ? (int)r : 0;
}

static int bare_begin(struct keeper *k, int *root, int *proc, struct err *e)
{
    struct procs ps = {0};
    int dir = open("/proc", O_RDONLY | O_DIRECTORY | O_CLOEXEC);
    bool known = procs_subreaper() ? prctl(PR_SET_CHILD_SUBREAPER, 1) == 0
                                   : dir >= 0 && procs_read(dir, &ps) == 0 && procs_mark_container(&ps, getpid()) >= 0;
    fd_close(&dir);
    procs_free(&ps);
    if (!known)
        return fail(e, ENOSYS, "find every process again that a command leaves");
    if (k->set.manifest) {
        steady = k;
        inside_user = k->set.user;
        inside_parent = getpid();
        if (seccomp_install(e) < 0)
            return -1;
    }
    if (limits_inside(k, e) < 0)
        return -1;
    if ((*root = open("/", O_PATH | O_DIRECTORY | O_CLOEXEC)) < 0 || (*proc = open("/proc", O_PATH | O_DIRECTORY | O_CLOEXEC)) < 0)
        return fail(e, errno, *root < 0 ? "open /" : "open /proc");
    return 0;
}

_Noreturn void episode_main(struct keeper *k, int ctl)
{
    struct err e = {0};
    struct emsg m = {.kind = E_VIEW_FAILED};
    static struct init in;
    char go;
    int root = -1, proc = -1;
    bool foreign = false;
    in.ctl = ctl;
    if (!k->set.bare)
        prctl(PR_SET_PDEATHSIG, SIGKILL);
    prctl(PR_SET_NAME, "rls-init");
    sigset_t set;
    sigemptyset(&set);
    sigaddset(&set, SIGCHLD);
    sigprocmask(SIG_BLOCK, &set, NULL);
    for (int s = 1; s < 65; s++) /* for all that is forked here */
        if (s != SIGKILL && s != SIGSTOP)
            signal(s, SIG_DFL);
    unshielded = k->set.shared;
    if (unshielded)
        signal(SIGIO, SIG_IGN);
    bare = k->set.bare;
    bool shares_net = k->set.host_network || (skipped("netns") && k->generation > 1);
    in.sig = signalfd(-1, &set, SFD_CLOEXEC | SFD_NONBLOCK);
    if (in.sig < 0)
        fail(&e, errno, "open a signalfd");
    else if (setsid() < 0 && errno != EPERM)
        fail(&e, errno, "setsid");
    else if (!bare && *k->set.hostname && sethostname(k->set.hostname, strlen(k->set.hostname)) < 0)
        fail(&e, errno, "set the host name");
    else if (bare || shares_net || loopback_up(&e) == 0) {
        /* so far without ids: they are mapped meanwhile. A keeper that died gives end of file */
        if (recv(ctl, &go, 1, 0) != 1)
            _exit(2);
        if (bare ? bare_begin(k, &root, &proc, &e) == 0
                 : view_build(k, &root, &proc, &foreign, &e) == 0 && ((m.pid = session_key()), limits_inside(k, &e) == 0) && caps_drop(&e) == 0 && seccomp_install(&e) == 0)
            m.kind = E_READY;
    }
    if (m.kind != E_READY || prctl(PR_SET_DUMPABLE, 0) < 0) {
        m.kind = E_VIEW_FAILED;
        m.status = e.no ? e.no : EIO;
        memcpy(m.what, e.what, sizeof m.what);
        say(ctl, &m, sizeof m, -1);
        _exit(1);
    }
    int fds[2] = {root, proc}, side = k->side_init;
    m.status = foreign || bare;
    if (msg_send(ctl, &m, EMSG_HEAD, fds, 2) < 0)
        _exit(3);
    /* nothing of the keeper's comes along: only the control socket and the signal descriptor stay, always as 3 and 4, and where
     * the keeper cannot signal by itself, as 5, what it asks for that on */
    int c = fcntl(ctl, F_DUPFD_CLOEXEC, 6), g = fcntl(in.sig, F_DUPFD_CLOEXEC, 6), s = side < 0 ? -1 : fcntl(side, F_DUPFD_CLOEXEC, 6);
    if (c < 0 || g < 0 || dup3(c, 3, O_CLOEXEC) < 0 || dup3(g, 4, O_CLOEXEC) < 0 || (side >= 0 && (s < 0 || dup3(s, 5, O_CLOEXEC) < 0)))
        _exit(7);
#ifdef RLS_SKIP
    if (skipped("cwdfd") && k->left_root >= 0 && fchdir(k->left_root) < 0)
        _exit(7);
#endif
    if (!SANITIZED)
        k_close_range(0, 2);
    k_close_range(side < 0 ? 5 : 6, ~0u);
    in.ctl = ctl = 3;
    in.sig = 4;
    m.kind = E_SETTLED;
    say(ctl, &m, EMSG_HEAD, -1);
    struct pollfd p[3] = {{ctl, POLLIN, 0}, {in.sig, POLLIN, 0}, {side < 0 ? -1 : 5, POLLIN, 0}};
    for (;;) {
        if (poll(p, 3, -1) < 0) {
            if (errno != EINTR)
                _exit(6);
            continue; /* what it last told is over */
        }
        if (p[1].revents) {
            struct signalfd_siginfo si;
            while (read(in.sig, &si, sizeof si) > 0)
                ;
            reap(&in, WNOHANG);
        }
        if (p[2].revents && pidfd_serve(5) < 0)
            _exit(8);
        if (p[0].revents)
            serve(&in);
    }
}
