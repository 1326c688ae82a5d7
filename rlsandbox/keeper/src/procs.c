#include "procs.h"

#include <dirent.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/prctl.h>

#include "pidfd.h"
#include "sys.h"

static const uint64_t DYING_NS = 2000000000;
enum { MAX_PROCS = 1 << 20, STOP_ROUNDS = 100, KILL_ROUNDS = 200 };

int procs_dir(struct keeper *k)
{
    return k->foreign_proc ? open("/proc", O_RDONLY | O_DIRECTORY | O_CLOEXEC)
                           : openat(k->proc_fd, ".", O_RDONLY | O_DIRECTORY | O_CLOEXEC);
}

static bool stat_read(int dir, const char *name, struct proc *p)
{
    char path[32], text[1024];
    if (path_join(path, sizeof path, "%s/stat", name) < 0 || read_file_at(dir, path, text, sizeof text) <= 0)
        return false;
    char *s = strrchr(text, ')'); /* the name before it may hold anything */
    int ppid, session;
    if (!s || sscanf(s + 1, " %c %d %*d %d", &p->state, &ppid, &session) != 3)
        return false;
    p->pid = (pid_t)strtol(name, NULL, 10);
    p->ppid = ppid;
    p->session = session;
    p->in = false;
    return true;
}

int procs_read(int dir, struct procs *ps)
{
    int fd = openat(dir, ".", O_RDONLY | O_DIRECTORY | O_CLOEXEC);
    DIR *d = fd < 0 ? NULL : fdopendir(fd);
    struct dirent *x;
    ps->n = 0;
    if (!d) {
        fd_close(&fd);
        return -1;
    }
    while ((x = readdir(d))) {
        if (x->d_name[0] < '1' || x->d_name[0] > '9')
            continue;
        if (ps->n == ps->cap) {
            size_t cap = ps->cap ? ps->cap * 2 : 64;
            struct proc *q = cap > MAX_PROCS ? NULL : realloc(ps->p, cap * sizeof *q);
            if (!q) {
                closedir(d);
                errno = ENOMEM;
                return -1;
            }
            ps->p = q;
            ps->cap = cap;
        }
        if (stat_read(dir, x->d_name, &ps->p[ps->n]))
            ps->n++;
    }
    closedir(d);
    return 0;
}

void procs_free(struct procs *ps)
{
    free(ps->p);
    *ps = (struct procs){0};
}

static int by_pid(const void *a, const void *b)
{
    pid_t x = ((const struct proc *)a)->pid, y = ((const struct proc *)b)->pid;
    return x < y ? -1 : x > y;
}

static struct proc *find(struct procs *ps, pid_t pid)
{
    struct proc key = {.pid = pid};
    return ps->n ? bsearch(&key, ps->p, ps->n, sizeof key, by_pid) : NULL;
}

bool procs_subreaper(void)
{
    static int known = -1;
    if (known < 0) {
        known = prctl(PR_SET_CHILD_SUBREAPER, 1) == 0;
        if (known)
            prctl(PR_SET_CHILD_SUBREAPER, 0);
    }
    return known;
}

ssize_t procs_mark_container(struct procs *ps, pid_t self)
{
    ssize_t n = 0;
    procs_mark_tree(ps, 1);
    struct proc *me = find(ps, self), *keeper = me ? find(ps, me->ppid) : NULL, *hub = keeper ? find(ps, keeper->ppid) : NULL;
    if (!hub || hub->ppid != 1)
        return -1;
    for (size_t i = 0; i < ps->n; i++) {
        struct proc *p = &ps->p[i];
        p->in = p->in && p->pid != 1 && p != me && p != hub && p->ppid != hub->pid;
        n += p->in;
    }
    return n;
}

size_t procs_mark_tree(struct procs *ps, pid_t root)
{
    size_t n = 0;
    bool more = true, strays = root != 1 && !procs_subreaper();
    if (ps->n)
        qsort(ps->p, ps->n, sizeof *ps->p, by_pid);
    struct proc *r = find(ps, root);
    if (!r)
        return 0;
    r->in = true;
    n = 1;
    while (more) { /* as many rounds as the tree is deep, in the worst order */
        more = false;
        for (size_t i = 0; i < ps->n; i++) {
            struct proc *p = &ps->p[i], *parent;
            if (p->in || ((!(parent = find(ps, p->ppid)) || !parent->in) && !(strays && p->ppid == 1 && p->session == root)))
                continue;
            p->in = more = true;
            n++;
        }
    }
    return n;
}

pid_t procs_number(struct keeper *k, int pidfd, pid_t inside)
{
    return k->foreign_proc ? pidfd_number(pidfd) : inside;
}

bool procs_dying(int dir, pid_t pid)
{
    enum { EXITING = 4 }; /* PF_EXITING of the kernel's process flags */
    char path[32], text[4096];
    unsigned flags;
    char state;
    path_join(path, sizeof path, "%d/stat", (int)pid);
    char *s = read_file_at(dir, path, text, 1024) > 0 ? strrchr(text, ')') : NULL;
    if (!s || sscanf(s + 1, " %c %*d %*d %*d %*d %*d %u", &state, &flags) != 2 || state == 'Z' || state == 'X' || flags & EXITING)
        return true;
    path_join(path, sizeof path, "%d/status", (int)pid);
    if (read_file_at(dir, path, text, sizeof text) <= 0)
        return true;
    s = strstr(text, "\nSigPnd:"); /* a name has no newline in it here: the kernel writes it as \n */
    return s && strtoull(s + sizeof "\nSigPnd:" - 1, NULL, 16) >> (SIGKILL - 1) & 1;
}

int procs_signal(int dir, pid_t pid, int sig)
{
    char name[16];
    path_join(name, sizeof name, "%d", (int)pid);
    int fd = openat(dir, name, O_RDONLY | O_DIRECTORY | O_CLOEXEC);
    if (fd < 0)
        return -1;
    int r = pidfd_kill(fd, sig);
    int no = errno;
    close(fd);
    errno = no;
    return r;
}

/* ---- trees ---- */

/* A main process gathers its orphans (it is their subreaper), so as long as it lives its tree is all that the command
 * started. Hence: stop all of it, until a look finds nobody new; then kill the others, and the main process last. */
void tree_kill(struct chan *c)
{
    struct procs ps = {0}, seen = {0};
    int dir = procs_dir(c->k);
    pid_t root = procs_number(c->k, c->pidfd, c->pid);
    pidfd_kill(c->pidfd, SIGSTOP);
    for (int round = 0; dir >= 0 && round < STOP_ROUNDS; round++) {
        size_t new = 0;
        if (procs_read(dir, &ps) < 0 || !procs_mark_tree(&ps, root))
            break;
        for (size_t i = 0; i < ps.n; i++) {
            struct proc *p = &ps.p[i];
            if (!p->in || p->pid == root || p->state == 'Z' || p->state == 'X' || find(&seen, p->pid))
                continue;
            procs_signal(dir, p->pid, SIGSTOP);
            new++;
        }
        struct procs swap = seen; /* what was seen now is what was seen before, next time */
        seen = ps;
        ps = swap;
        if (!new)
            break;
    }
    for (int round = 0; dir >= 0 && round < KILL_ROUNDS; round++) {
        size_t live = 0;
        if (procs_read(dir, &ps) < 0 || procs_mark_tree(&ps, root) <= 1)
            break;
        for (size_t i = 0; i < ps.n; i++) {
            struct proc *p = &ps.p[i];
            if (!p->in || p->pid == root || p->state == 'Z' || p->state == 'X')
                continue;
            procs_signal(dir, p->pid, SIGKILL);
            live++;
        }
        if (!live)
            break;
    }
    pidfd_kill(c->pidfd, SIGKILL);
    /* a killed process still needs a processor to die on */
    pid_t *q = seen.n ? realloc(c->dying, seen.n * sizeof *q) : NULL;
    if (q) {
        c->dying = q;
        c->ndying = 0;
        c->dying_until_ns = now_ns() + DYING_NS;
        for (size_t i = 0; i < seen.n; i++)
            if (seen.p[i].in && seen.p[i].pid != root)
                q[c->ndying++] = seen.p[i].pid;
    }
    fd_close(&dir);
    procs_free(&ps);
    procs_free(&seen);
}

bool tree_gone(struct chan *c)
{
    char path[32];
    struct stat st;
    int dir = c->ndying ? procs_dir(c->k) : -1;
    for (size_t i = 0; dir >= 0 && i < c->ndying;) {
        path_join(path, sizeof path, "%d", (int)c->dying[i]);
        if (fstatat(dir, path, &st, 0) < 0)
            c->dying[i] = c->dying[--c->ndying];
        else
            i++;
    }
    fd_close(&dir);
    return !c->ndying || now_ns() > c->dying_until_ns;
}

void tree_signal(struct chan *c, int sig)
{
    struct procs ps = {0};
    int dir = procs_dir(c->k);
    pid_t root = procs_number(c->k, c->pidfd, c->pid);
    bool listed = dir >= 0 && procs_read(dir, &ps) == 0 && procs_mark_tree(&ps, root);
    pidfd_kill(c->pidfd, sig); /* first: a shell should not see its children die of it and end in another way */
    for (size_t i = 0; listed && i < ps.n; i++)
        if (ps.p[i].in && ps.p[i].pid != root)
            procs_signal(dir, ps.p[i].pid, sig);
    fd_close(&dir);
    procs_free(&ps);
}
