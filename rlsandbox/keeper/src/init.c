/* `keeper init`: the first process of a container that holds one sandbox. It starts a hub and asks it for the sandbox (the
 * best mode that works here, tried by doing it), listens for clients, reaps what others leave, and ends with the sandbox.
 * It stays in the container's own namespaces: there `keeper connect` is executed and finds its socket. */
#include "container.h"

#include <poll.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/epoll.h>
#include <sys/prctl.h>
#include <sys/signalfd.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/un.h>
#include <sys/wait.h>

#include "frames.h"
#include "link.h"
#include "shared.h"
#include "sys.h"

enum { HUB_MS = 60000, PROBE_SYSLOG = 3 };

extern char **environ;

struct first {
    struct loop loop;
    struct src listener, signals;
    struct link link;
    struct buf wish, facts; /* CREATE's fields; what ATTACHED tells */
    char run[80], mode[16], why[300];
    bool user;   /* commands have one of their own: the next best is mode manifest */
    int hub;
    pid_t hub_pid;
    bool bare, ending, closed; /* closed: network none */
    bool asked, shared; /* whether all processes here share their mounts is known; they do */
};

static struct first *self_of(struct link *l)
{
    return (struct first *)(void *)((char *)l - offsetof(struct first, link));
}

/* ---- the hub, spoken to one request at a time ---- */

static int hub_spawn(struct first *f, bool bare, struct err *e)
{
    int sv[2];
    char fd[16], pid[16];
    if (socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0, sv) < 0)
        return fail(e, errno, "make a socket pair for the hub");
    path_join(fd, sizeof fd, "%d", sv[1]);
    path_join(pid, sizeof pid, "%d", (int)getpid());
    char *argv[] = {"keeper", "hub", "--fd", fd, "--client", pid, "--cgroups", "none", bare ? "--isolation" : NULL, "none", NULL};
    char *env[] = {"PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin", NULL};
    f->hub_pid = fork();
    if (f->hub_pid == 0) {
        sigset_t none;
        sigemptyset(&none);
        sigprocmask(SIG_SETMASK, &none, NULL);
        fcntl(sv[1], F_SETFD, 0);
        if (chdir("/") == 0)
            execve("/proc/self/exe", argv, env);
        _exit(127);
    }
    int no = errno;
    close(sv[1]);
    f->hub = sv[0];
    return f->hub_pid < 0 ? fail(e, no, "start the hub") : 0;
}

static int hub_read(struct first *f, void *p, size_t n, int *fd, struct err *e)
{
    for (size_t at = 0; at < n;) {
        struct pollfd w = {f->hub, POLLIN, 0};
        int r = poll(&w, 1, HUB_MS), fds[1];
        size_t nfds = 1;
        if (r < 0 && errno == EINTR)
            continue;
        if (r == 0)
            return fail(e, ETIMEDOUT, "wait for the hub");
        ssize_t got = msg_recv(f->hub, (uint8_t *)p + at, n - at, fds, &nfds);
        if (got < 0 && errno == EINTR)
            continue;
        if (got <= 0)
            return fail(e, got < 0 ? errno : ECHILD, "talk to the hub: it ended");
        if (nfds == 1) {
            fd_close(fd);
            *fd = fds[0];
        }
        at += (size_t)got;
    }
    return 0;
}

/* One message and its answer, put into `answer`; the descriptor that came along, or -1. */
static int hub_call(struct first *f, uint8_t type, const struct buf *fields, struct buf *answer, int *fd, struct err *e)
{
    uint8_t h[RLS_HEADER] = {0};
    uint32_t channel = type == T_HELLO ? 0 : 1;
    *fd = -1;
    answer->len = 0;
    set_u32(h, (uint32_t)(fields->len + RLS_HEADER - 4));
    h[4] = type;
    set_u32(h + 8, channel);
    if (fields->len > RLS_MAX_PAYLOAD || write_all(f->hub, h, sizeof h) < 0 || write_all(f->hub, fields->p, fields->len) < 0) {
        int no = errno; /* it may have said why before it ended */
        if (fields->len > RLS_MAX_PAYLOAD)
            return fail(e, E2BIG, "ask the hub");
        errno = no;
    }
    for (;;) {
        if (hub_read(f, h, sizeof h, fd, e) < 0)
            return -1;
        uint32_t n = get_u32(h) - (RLS_HEADER - 4);
        size_t at = answer->len;
        uint8_t room[RLS_MAX_PAYLOAD];
        if (n > RLS_MAX_PAYLOAD)
            return fail(e, EPROTO, "understand the hub");
        if (hub_read(f, room, n, fd, e) < 0)
            return -1;
        if (buf_add(answer, room, n) < 0)
            return fail(e, ENOMEM, "keep what the hub says");
        if (h[5] & F_MORE)
            continue;
        if (h[4] == T_FAIL) {
            char what[300] = "do that";
            tlv_str(answer->p + at, answer->len - at, TAG_WHAT, what, sizeof what);
            return fail(e, (int)tlv_get(answer->p + at, answer->len - at, TAG_ERRNO, EIO), "%s", what);
        }
        if (h[4] == T_REPLY || h[4] == T_WELCOME)
            return 0;
        answer->len = 0;
    }
}

static void hub_end(struct first *f)
{
    fd_close(&f->hub);
    if (f->hub_pid > 0) {
        kill(f->hub_pid, SIGKILL);
        while (waitpid(f->hub_pid, NULL, 0) < 0 && errno == EINTR)
            ;
    }
    f->hub_pid = 0;
}

static int hub_begin(struct first *f, bool bare, struct err *e)
{
    struct buf hello = {0}, answer = {0};
    int fd = -1, r = hub_spawn(f, bare, e);
    if (r == 0 && put_u32(&hello, TAG_VERSION, RLS_VERSION) < 0)
        r = fail(e, ENOMEM, "greet the hub");
    if (r == 0)
        r = hub_call(f, T_HELLO, &hello, &answer, &fd, e);
    fd_close(&fd);
    buf_free(&hello);
    buf_free(&answer);
    if (r < 0)
        hub_end(f);
    return r;
}

/* ---- the sandbox ---- */

static int environment(struct buf *b)
{
    static const char *const not_ours[] = {"KUBERNETES_", "HOSTNAME=", "RLSANDBOX_", "HOME=/root", "HOME=/", "TERM="};
    for (char **s = environ; *s; s++) {
        bool skip = false;
        for (size_t i = 0; i < COUNT_OF(not_ours); i++) {
            size_t n = strlen(not_ours[i]);
            skip |= strncmp(*s, not_ours[i], n) == 0 && (i == 0 || i == 1 || i == 2 || i == 5 || !(*s)[n]);
        }
        if (!skip && b->len < LINK_MAX / 2 && put_str(b, TAG_ENV, *s) < 0)
            return -1;
    }
    return 0;
}

enum how { ISOLATED, SHARED, BARE };

static int create(struct first *f, enum how how, int *stream, struct err *e)
{
    struct buf q = {0}, answer = {0};
    char cwd[1024];
    const char *mode = how == SHARED && !*f->mode ? "overlay" : how == BARE && strcmp(f->mode, "manifest") ? "" : f->mode;
    int r = 0;
    if (put_u32(&q, TAG_OP, OP_HUB_CREATE) < 0 || put_str(&q, TAG_MEMBER, "pod") < 0 || buf_add(&q, f->wish.p, f->wish.len) < 0 ||
        (how == BARE && put_str(&q, TAG_ISOLATION, "none") < 0) || (*mode && put_str(&q, TAG_MODE, mode) < 0) ||
        (how == SHARED && (put_str(&q, TAG_ISOLATION, "chroot") < 0 || put_str(&q, TAG_PATH, f->run) < 0)))
        r = fail(e, ENOMEM, "describe the sandbox");
    if (r == 0)
        r = hub_call(f, T_REQ, &q, &answer, stream, e);
    if (r == 0 && *stream < 0)
        r = fail(e, EPROTO, "get the sandbox's stream");
    if (r == 0) {
        f->facts.len = 0;
        if (buf_add(&f->facts, answer.p, answer.len) < 0 || !getcwd(cwd, sizeof cwd) || put_fmt(&f->facts, TAG_FACT, "workdir=%s", cwd) < 0 ||
            put_fmt(&f->facts, TAG_FACT, "uid=%u", (unsigned)geteuid()) < 0 || (*f->why && put_fmt(&f->facts, TAG_FACT, "why=%s", f->why) < 0) ||
            environment(&f->facts) < 0)
            r = fail(e, ENOMEM, "keep what is known of the sandbox");
    }
    buf_free(&q);
    buf_free(&answer);
    return r;
}

/* With isolation where that works; without, where that was not asked for by name and the reason is kept. */
static int sandbox_make(struct first *f, int *stream, struct err *e)
{
    bool only_bare = strcmp(f->mode, "replace") == 0 || strcmp(f->mode, "manifest") == 0;
    struct err first = {0};
    if (!only_bare && !f->bare) {
        if (!f->asked) { /* the usual way would mount over all that is here */
            f->shared = shared_here(f->run);
            f->asked = true;
        }
        if (f->hub >= 0 || hub_begin(f, f->shared, &first) == 0)
            if (create(f, f->shared ? SHARED : ISOLATED, stream, &first) == 0)
                return 0;
        if (*f->mode)
            return fail(e, first.no, "%s", first.what);
        snprintf(f->why, sizeof f->why, "%.200s: %s", first.what, strerror(first.no));
        if (f->closed) /* asked for, and not to be had without a namespace */
            return fail(e, first.no, "hold network none: no isolation works here: %.150s", first.what);
        /* a new hub, without a right that was only there to isolate */
        hub_end(f);
        if (f->shared)
            shared_leave(f->run);
        prctl(PR_CAPBSET_DROP, 21 /* SYS_ADMIN */);
    }
    if (f->hub < 0 && hub_begin(f, true, e) < 0)
        return -1;
    f->bare = true;
    if (f->user && !*f->mode) {
        struct err none = {0};
        strcpy(f->mode, "manifest");
        if (create(f, BARE, stream, &none) == 0)
            return 0;
        *f->mode = 0;
        size_t n = strlen(f->why);
        snprintf(f->why + n, sizeof f->why - n, "; in mode manifest: %.60s", none.what);
    }
    return create(f, BARE, stream, e);
}

static int renew(struct link *l, struct err *e)
{
    struct first *f = self_of(l);
    struct buf q = {0}, answer = {0};
    int fd = -1, r = 0;
    if (strcmp(f->mode, "manifest") == 0) /* a list made now would take what was left here for the image's */
        return fail(e, EBUSY, "give the container to another session: files are as the last one left them");
    if (put_u32(&q, TAG_OP, OP_HUB_DISPOSE) < 0 || put_str(&q, TAG_MEMBER, "pod") < 0)
        r = fail(e, ENOMEM, "end the sandbox");
    if (r == 0)
        r = hub_call(f, T_REQ, &q, &answer, &fd, e);
    fd_close(&fd);
    buf_free(&q);
    buf_free(&answer);
    if (r == 0)
        r = sandbox_make(f, &fd, e);
    if (r == 0 && link_keeper(l, fd) < 0)
        r = fail(e, errno, "watch the sandbox's stream");
    return r;
}

/* ---- life ---- */

static void on_client(struct src *s, uint32_t events)
{
    struct first *f = s->owner;
    (void)events;
    int fd = accept4(s->fd, NULL, NULL, SOCK_CLOEXEC | SOCK_NONBLOCK);
    if (fd >= 0)
        link_accept(&f->link, fd);
}

static void on_signal(struct src *s, uint32_t events)
{
    struct first *f = s->owner;
    struct signalfd_siginfo si;
    (void)events;
    while (read(s->fd, &si, sizeof si) > 0)
        f->ending |= si.ssi_signo != SIGCHLD;
    for (pid_t p; (p = waitpid(-1, NULL, WNOHANG)) > 0;)
        if (p == f->hub_pid) {
            f->hub_pid = 0;
            f->loop.stop = true;
        }
    if (f->ending)
        f->loop.stop = true;
}

static int listen_on(struct first *f, struct err *e)
{
    struct sockaddr_un a = {.sun_family = AF_UNIX};
    char dir[100];
    path_join(dir, sizeof dir, "%s/" CONTAINER_DIR, f->run);
    if (mkdir(dir, 0700) < 0 && errno != EEXIST)
        return fail(e, errno, "make %s (a volume of the pod is wanted there)", dir);
    if (chmod(dir, 0700) < 0 || path_join(a.sun_path, sizeof a.sun_path, "%s/" CONTAINER_SOCKET, f->run) < 0)
        return fail(e, errno, "close %s to others", dir);
    unlink(a.sun_path);
    int s = socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0);
    if (s < 0 || bind(s, (struct sockaddr *)&a, sizeof a) < 0 || listen(s, LINK_WAITING) < 0)
        return fail(e, errno, "listen on %s", a.sun_path);
    return loop_add(&f->loop, &f->listener, s, EPOLLIN, on_client, f) < 0 ? fail(e, errno, "watch the socket") : 0;
}

/* Real power over the node is not needed, so it is not held: an episode that broke out would have it. */
static int powers_check(struct err *e)
{
    static char text[64 << 10];
    unsigned long long caps = 0;
    const char *s = read_file_at(AT_FDCWD, "/proc/self/status", text, sizeof text) > 0 ? strstr(text, "CapEff:") : NULL;
    if (!s || sscanf(s + 7, "%llx", &caps) != 1 || !(caps >> 21 & 1))
        return 0;
    unsigned long inside, outside, n;
    if (read_file_at(AT_FDCWD, "/proc/self/uid_map", text, sizeof text) <= 0 || sscanf(text, "%lu %lu %lu", &inside, &outside, &n) != 3 || outside || n < 0xffffffff)
        return 0; /* the pod has a user namespace of its own */
    long got = syscall(SYS_syslog, PROBE_SYSLOG, text, sizeof text - 1);
    if (got > 0) {
        text[got] = 0;
        if (gvisor_log(text))
            return 0;
    }
    return fail(e, EPERM, "hold SYS_ADMIN over the node: with it the pod needs hostUsers: false (or gVisor)");
}

static int setup(struct first *f, struct err *e)
{
    static const char *const shown[] = {"/etc/hosts", "/etc/resolv.conf", "/etc/hostname"};
    char host[65] = "";
    struct stat st;
    sigset_t set;
    int stream = -1;
    gethostname(host, sizeof host - 1);
    if (put_str(&f->wish, TAG_ROOT, "/") < 0 || put_str(&f->wish, TAG_HOSTNAME, host) < 0)
        return fail(e, ENOMEM, "describe the sandbox");
    for (size_t i = 0; i < COUNT_OF(shown); i++)
        if (stat(shown[i], &st) == 0 && S_ISREG(st.st_mode) && put_fmt(&f->wish, TAG_BIND, "%s=%s", shown[i], shown[i]) < 0)
            return fail(e, ENOMEM, "describe the sandbox");
    if (powers_check(e) < 0)
        return -1;
    sigemptyset(&set);
    sigaddset(&set, SIGCHLD);
    sigaddset(&set, SIGTERM);
    sigaddset(&set, SIGINT);
    sigprocmask(SIG_BLOCK, &set, NULL);
    int sig = signalfd(-1, &set, SFD_CLOEXEC | SFD_NONBLOCK);
    if (sig < 0 || loop_init(&f->loop) < 0 || link_init(&f->link, &f->loop) < 0 || loop_add(&f->loop, &f->signals, sig, EPOLLIN, on_signal, f) < 0)
        return fail(e, errno, "prepare the first process's loop");
    f->link.facts = &f->facts;
    f->link.renew = renew;
    if (sandbox_make(f, &stream, e) < 0)
        return -1;
    if (link_keeper(&f->link, stream) < 0)
        return fail(e, errno, "watch the sandbox's stream");
    return listen_on(f, e);
}

static int option(struct first *f, const char *name, const char *value)
{
    static const struct { const char *name; uint16_t tag; bool wide; } numbers[] = {
        {"--memory", TAG_MEMORY_BYTES, true}, {"--disk", TAG_UPPER_BYTES, true}, {"--inodes", TAG_UPPER_INODES, true},
        {"--pids", TAG_PIDS, false}, {"--nofile", TAG_NOFILE, false},
    };
    char *end;
    unsigned long long v = strtoull(value, &end, 10);
    bool number = *value && !*end;
    for (size_t i = 0; i < COUNT_OF(numbers); i++)
        if (strcmp(name, numbers[i].name) == 0)
            return !number ? -1 : numbers[i].wide ? put_u64(&f->wish, numbers[i].tag, v) : put_u32(&f->wish, numbers[i].tag, (uint32_t)v);
    if (strcmp(name, "--grace") == 0 && number && v && v < 1000000) {
        f->link.grace_s = (uint32_t)v;
        return 0;
    }
    if (strcmp(name, "--network") == 0 && (strcmp(value, "none") == 0 || strcmp(value, "host") == 0)) {
        f->closed = strcmp(value, "none") == 0;
        return put_str(&f->wish, TAG_NETWORK, value);
    }
    if (strcmp(name, "--mode") == 0 && (!*value || strcmp(value, "overlay") == 0 || strcmp(value, "userns") == 0 || strcmp(value, "manifest") == 0 || strcmp(value, "replace") == 0))
        return path_join(f->mode, sizeof f->mode, "%s", value);
    if (strcmp(name, "--user") == 0 && *value && (f->user = true))
        return put_str(&f->wish, TAG_USER, value);
    if (strcmp(name, "--run") == 0 && value[0] == '/')
        return path_join(f->run, sizeof f->run, "%s", value);
    return -1;
}

static void last_words(const char *text)
{
    fprintf(stderr, "keeper init: %s\n", text);
    int fd = open("/dev/termination-log", O_WRONLY | O_NOFOLLOW | O_CLOEXEC); /* what the pod's status will show */
    if (fd >= 0 && write_all(fd, text, strlen(text)) == 0)
        close(fd);
}

int init_main(int argc, char **argv)
{
    static struct first f = {.hub = -1, .run = CONTAINER_RUN, .link.grace_s = CONTAINER_GRACE_S};
    struct err e = {0};
    char text[400];
    for (int i = 2; i < argc; i += 2)
        if (i + 1 == argc || option(&f, argv[i], argv[i + 1]) < 0) {
            fprintf(stderr, "keeper init: cannot understand %s\n", argv[i]);
            return 2;
        }
    umask(022);
    prctl(PR_SET_DUMPABLE, 0);
    prctl(PR_SET_NAME, "rls-init");
    signal(SIGPIPE, SIG_IGN);
    if (setup(&f, &e) < 0) {
        path_join(text, sizeof text, "cannot %s: %s", e.what, strerror(e.no));
        last_words(text);
        return 1;
    }
    while (!f.loop.stop && f.link.keeper.fd >= 0) {
        if (loop_turn(&f.loop, link_timer(&f.link)) < 0)
            break;
        link_flush(&f.link);
    }
    if (!f.ending)
        last_words("the sandbox's keeper ended");
    link_end(&f.link, f.ending ? "terminated" : "keeper_died", f.ending ? "the container was told to end" : "the sandbox's keeper ended");
    fd_close(&f.hub);
    if (f.hub_pid > 0)
        kill(f.hub_pid, SIGKILL);
    return f.ending ? 0 : 1;
}
