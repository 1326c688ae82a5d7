/* A process inside the sandboxes' user namespace from which their keepers are forked. It was executed in there, so that
 * the kernel judges access to keepers by that namespace; its children are the hub's (CLONE_PARENT). */
#include <sched.h>
#include <signal.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mount.h>
#include <sys/prctl.h>
#include <sys/socket.h>
#include <sys/wait.h>

#include "hub.h"
#include "sandbox.h"
#include "skip.h"
#include "sys.h"
#include "worker.h"

static int self_copy(int self)
{
    static char room[64 << 10];
    int fd = (int)syscall(SYS_memfd_create, "keeper", 1);
    ssize_t r;
    if (fd < 0 || lseek(self, 0, SEEK_SET) < 0)
        return -1;
    while ((r = read_all(self, room, sizeof room)) > 0)
        if (write_all(fd, room, (size_t)r) < 0)
            return -1;
    return fd;
}

static _Noreturn void become(struct hub *h, int sock, int report)
{
    struct err e = {0};
#ifdef RLS_SKIP
    char what[64];
    path_join(what, sizeof what, "RLS_SKIP=%.40s", getenv("RLS_SKIP") ? getenv("RLS_SKIP") : "");
    char *argv[] = {"keeper", "zygote", NULL}, *env[] = {what, SKIP_PAD, NULL};
#else
    char *argv[] = {"keeper", "zygote", NULL}, *env[] = {NULL};
#endif
    if (unshare(CLONE_NEWNS) < 0)
        fail(&e, errno, "make the zygote's mount namespace");
    else if (umount2("/h", MNT_DETACH) < 0)
        fail(&e, errno, "leave the machine's tree");
    else if (h->userns >= 0 && setns(h->userns, CLONE_NEWUSER) < 0)
        fail(&e, errno, "enter the sandboxes' user namespace");
    else if ((h->userns >= 0 && syscall(SYS_setgroups, 0, NULL) < 0) || syscall(SYS_setresgid, 0, 0, 0) < 0 || syscall(SYS_setresuid, 0, 0, 0) < 0)
        fail(&e, errno, "become user 0 of the sandboxes' user namespace");
    else {
        /* none of them may be where the socket goes */
        int self = fcntl(h->self, F_DUPFD_CLOEXEC, 10), to = fcntl(report, F_DUPFD_CLOEXEC, 10);
        if (self < 0 || to < 0 || dup2(sock, 3) < 0)
            fail(&e, errno, "place the zygote's socket");
        else {
            report = to;
            fcntl(3, F_SETFD, 0);
            syscall(SYS_execveat, self, "", argv, env, AT_EMPTY_PATH);
            int copy = self_copy(self); /* may lie where that user cannot read */
            if (copy >= 0)
                syscall(SYS_execveat, copy, "", argv, env, AT_EMPTY_PATH);
            fail(&e, errno, "run the keeper in the sandboxes' user namespace");
        }
    }
    (void)!write(report, &e, sizeof e);
    _exit(1);
}

int zygote_start(struct hub *h, struct err *e)
{
    int sv[2], report[2];
    if (socketpair(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0, sv) < 0 || pipe2(report, O_CLOEXEC) < 0)
        return fail(e, errno, "make a socket pair for the zygote");
    pid_t pid = fork();
    if (pid == 0)
        become(h, sv[1], report[1]);
    int no = errno;
    close(sv[1]);
    close(report[1]);
    if (pid < 0)
        return fail(e, no, "fork the zygote");
    struct err theirs;
    ssize_t n = read_all(report[0], &theirs, sizeof theirs);
    close(report[0]);
    if (n == sizeof theirs) {
        waitpid(pid, NULL, 0);
        theirs.what[sizeof theirs.what - 1] = 0;
        return fail(e, theirs.no, "%s", theirs.what);
    }
    h->zygote = sv[0];
    h->zygote_pid = pid;
    return 0;
}

static void defaults(void)
{
    sigset_t none;
    sigemptyset(&none);
    sigprocmask(SIG_SETMASK, &none, NULL);
    for (int s = 1; s < 65; s++)
        if (s != SIGKILL && s != SIGSTOP)
            signal(s, SIG_DFL);
}

/* 0, 1 and 2 are never something else */
static void nulls(void)
{
    for (int fd; (fd = open("/dev/null", O_RDWR)) >= 0;)
        if (fd > 2) {
            close(fd);
            break;
        }
}

/* Where CLONE_PARENT is not known (an old gVisor, which has no pidfds either): a keeper is a child of the hub or nobody's. */
static pid_t fork_here(int keeper_sock, int stream, struct err *e)
{
    pid_t p = fork();
    if (p == 0) {
        int fds[2] = {fcntl(keeper_sock, F_DUPFD_CLOEXEC, 3), fcntl(stream, F_DUPFD_CLOEXEC, 3)};
        if (fds[0] < 0 || fds[1] < 0)
            _exit(1);
        defaults();
        helper_keep(fds, 2);
        k_close_range(0, 2);
        nulls();
        _exit(sandbox_main(fds[0], fds[1]));
    }
    return p < 0 ? fail(e, errno, "fork a keeper") : p;
}

int bare_start(struct hub *h, struct err *e)
{
    int sv[2], self = k_pidfd_open(getpid());
    if (self < 0 && errno == ENOSYS) {
        h->bare = -1;
        return 0;
    }
    fd_close(&self);
    if (socketpair(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0, sv) < 0)
        return fail(e, errno, "make a socket pair");
    h->bare_pid = fork();
    if (h->bare_pid == 0)
        _exit(zygote_main(sv[1]));
    int no = errno;
    close(sv[1]);
    h->bare = sv[0];
    return h->bare_pid < 0 ? fail(e, no, "fork") : 0;
}

pid_t zygote_fork(int zygote, int keeper_sock, int stream, struct err *e)
{
    int fds[2] = {keeper_sock, stream};
    int32_t answer[2];
    size_t none = 0;
    if (zygote < 0)
        return fork_here(keeper_sock, stream, e);
    if (msg_send(zygote, "f", 1, fds, 2) < 0 || msg_recv(zygote, answer, sizeof answer, NULL, &none) != sizeof answer)
        return fail(e, errno, "ask the zygote for a keeper");
    if (answer[0] <= 0)
        return fail(e, answer[1], "fork a keeper");
    return answer[0];
}

int zygote_main(int sock)
{
    prctl(PR_SET_PDEATHSIG, SIGKILL);
    prctl(PR_SET_DUMPABLE, 0);
    prctl(PR_SET_NAME, "rls-zygote");
    defaults();
    /* nothing that was open before belongs here */
    if (!SANITIZED && sock > 0)
        k_close_range(0, (unsigned)sock - 1);
    k_close_range((unsigned)sock + 1, ~0u);
    nulls();
    fcntl(sock, F_SETFD, FD_CLOEXEC);
    for (;;) {
        char c;
        int fds[2];
        size_t n = 2;
        ssize_t r = msg_recv(sock, &c, 1, fds, &n);
        if (r <= 0)
            return 0;
        if (n != 2)
            return 1;
        pid_t p = k_clone(SIGCHLD | CLONE_PARENT, NULL);
        if (p == 0) {
            close(sock);
            _exit(sandbox_main(fds[0], fds[1]));
        }
        int32_t answer[2] = {p, p < 0 ? errno : 0};
        close(fds[0]);
        close(fds[1]);
        if (msg_send(sock, answer, sizeof answer, NULL, 0) < 0)
            return 1;
    }
}
