/* INSPECT: what there is of an episode, seen from outside. Nothing here asks a process of the episode, and what is read
 * of its /proc is the kernel's word. docs/protocol.md lists the facts. */
#include <dirent.h>
#include <mqueue.h>
#include <sched.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/ioctl.h>
#include <sys/stat.h>
#include <sys/utsname.h>
#include <sys/vfs.h>
#include <sys/xattr.h>
#include <time.h>

#include "manifest.h"
#include "procs.h"
#include "shared.h"
#include "standby.h"
#include "sys.h"
#include "trees.h"
#include "worker.h"

const char *const ns_names[NS_KINDS] = {"pid", "mnt", "ipc", "net", "uts", "user", "cgroup", "time"};

static int init_dir(struct keeper *k)
{
    char name[16];
    path_join(name, sizeof name, "%d", k->foreign_proc ? (int)k->init_pid : 1);
    int proc = procs_dir(k), fd = proc < 0 ? -1 : openat(proc, name, O_RDONLY | O_DIRECTORY | O_CLOEXEC);
    fd_close(&proc);
    return fd;
}

/* Numbers of namespaces are used again at once, the lowest free one first, so "the same number" says nothing unless the
 * old one is still there: a namespace seen is held open until the next look. The mount namespace is not held (a thrown-away
 * upper layer would live on in it); it has a number of its own that is never used again, where the kernel tells it. */
static void namespaces(struct worker *w, int dir)
{
    char path[32];
    struct stat st, own;
    for (int i = 0; i < NS_KINDS && !w->k->set.shared; i++) { /* an old gVisor tells every process others, whatever they are */
        struct ns_seen *s = &w->k->ns[i];
        path_join(path, sizeof path, "ns/%s", ns_names[i]);
        int fd = openat(dir, path, O_RDONLY | O_CLOEXEC);
        if (fd < 0 || fstat(fd, &st) < 0) {
            fd_close(&fd);
            continue;
        }
        uint64_t id = st.st_ino;
        bool mount = strcmp(ns_names[i], "mnt") == 0;
        if (mount && ioctl(fd, _IOR(0xb7, 5, uint64_t) /* NS_GET_MNTNS_ID */, &id) < 0) {
            close(fd);
            continue;
        }
        if (!s->first || s->id != id) {
            s->id = id;
            s->first = w->k->episode;
        }
        if (!mount) {
            if (s->fd > 0)
                close(s->fd);
            s->fd = fd;
        } else
            close(fd);
        path_join(path, sizeof path, "/proc/self/ns/%s", ns_names[i]);
        fact(w, "ns");
        field_s(w, ns_names[i]);
        field_f(w, "%llu", (unsigned long long)id);
        field_f(w, "%u", s->first);
        if (stat(path, &own) == 0 && own.st_ino == st.st_ino)
            field_s(w, "shared");
        fact_end(w);
    }
}

/* ---- processes ---- */

static void link_field(struct worker *w, int dir, const char *name)
{
    char to[4096];
    ssize_t n = readlinkat(dir, name, to, sizeof to - 1);
    size_t at = 0;
    to[n > 0 ? n : 0] = 0;
    if (w->k->set.shared && strncmp(to, SHARED_VIEWS, sizeof SHARED_VIEWS - 1) == 0) { /* as the episode sees it */
        at = sizeof SHARED_VIEWS - 1;
        at += strcspn(to + at, "/");
        if (!to[at])
            strcpy(to + at, "/");
    }
    field_s(w, to + at);
}

static void process(struct worker *w, int proc, const struct proc *p)
{
    char name[16], stat[1024], status[4096], *s, *uid;
    static char argv[64 << 10];
    path_join(name, sizeof name, "%d", (int)p->pid);
    int dir = openat(proc, name, O_RDONLY | O_DIRECTORY | O_CLOEXEC);
    if (dir < 0)
        return;
    if (read_file_at(dir, "stat", stat, sizeof stat) > 0 && read_file_at(dir, "status", status, sizeof status) > 0) {
        char *open = strchr(stat, '('), *close = strrchr(stat, ')');
        uid = strstr(status, "\nUid:");
        ssize_t n = read_file_at(dir, "cmdline", argv, sizeof argv);
        fact(w, "process");
        field_f(w, "%d", (int)p->pid);
        field_f(w, "%d", (int)p->ppid);
        field_f(w, "%ld", uid ? strtol(uid + 5, NULL, 10) : -1);
        field(w, &p->state, 1);
        s = open ? open + 1 : stat;
        field(w, s, close && close > s ? (size_t)(close - s) : 0);
        field(w, argv, n > 0 ? (size_t)n : 0);
        link_field(w, dir, "exe");
        link_field(w, dir, "cwd");
        fact_end(w);
    }
    close(dir);
}

static bool helper(const struct keeper *k, pid_t pid)
{
    for (size_t i = 0; i < COUNT_OF(k->helpers); i++)
        if (k->helpers[i] == pid)
            return true;
    return pid == getpid();
}

/* Children of the keeper that are neither this episode's first process nor helpers: what an earlier one left. */
static void strays(struct worker *w, struct err *e)
{
    char path[64], text[4096], *s, *end;
    struct procs ps = {0};
    int proc = open("/proc", O_RDONLY | O_DIRECTORY | O_CLOEXEC);
    pid_t keeper = w->here ? getpid() : getppid();
    if (w->k->set.shared) { /* there is no list of children, and an orphan may be nobody's */
        if (shared_leftovers(w->k, &ps) < 0)
            fail(e, errno, "look for what the episode before left");
        for (size_t i = 0; i < ps.n; i++)
            if (ps.p[i].in)
                process(w, w->k->before, &ps.p[i]);
        procs_free(&ps);
        fd_close(&proc);
        return;
    }
    path_join(path, sizeof path, "%d/task/%d/children", (int)keeper, (int)keeper);
    if (proc >= 0 && read_file_at(proc, path, text, sizeof text) > 0)
        for (s = text;; s = end) {
            pid_t pid = (pid_t)strtol(s, &end, 10);
            if (end == s)
                break;
            if (pid == w->k->init_pid || pid == w->k->next.pid || helper(w->k, pid))
                continue;
            if (procs_read(proc, &ps) == 0 && procs_mark_tree(&ps, pid))
                for (size_t i = 0; i < ps.n; i++)
                    if (ps.p[i].in)
                        process(w, proc, &ps.p[i]);
        }
    procs_free(&ps);
    fd_close(&proc);
}

static void processes(struct worker *w, struct err *e)
{
    struct procs ps = {0};
    int proc = procs_dir(w->k);
    pid_t init = w->k->foreign_proc ? w->k->init_pid : 1, standby = standby_pid(w->k);
    if (proc >= 0 && procs_read(proc, &ps) == 0) {
        procs_mark_tree(&ps, init);
        for (size_t i = 0; i < ps.n; i++)
            if (ps.p[i].pid != init && ps.p[i].pid != standby && (ps.p[i].in || !w->k->foreign_proc))
                process(w, proc, &ps.p[i]);
    }
    procs_free(&ps);
    fd_close(&proc);
    strays(w, e);
}

/* ---- the first process: what commands start from ---- */

static void environment(struct worker *w, int dir)
{
    static char text[256 << 10];
    ssize_t n = read_file_at(dir, "environ", text, sizeof text);
    for (ssize_t at = 0; at < n;) {
        size_t len = strnlen(text + at, (size_t)(n - at));
        if (len) {
            fact(w, "env");
            field(w, text + at, len);
            fact_end(w);
        }
        at += (ssize_t)len + 1;
    }
}

static void directory(struct worker *w, int dir, const char *name, const struct stat *root)
{
    struct stat st;
    fact(w, name);
    link_field(w, dir, name);
    field_s(w, fstatat(dir, name, &st, 0) == 0 && root && st.st_dev == root->st_dev && st.st_ino == root->st_ino ? "current" : "other");
    fact_end(w);
}

static void descriptors(struct worker *w, int dir, const struct stat *root)
{
    struct stat st;
    int fd = openat(dir, "fd", O_RDONLY | O_DIRECTORY | O_CLOEXEC);
    DIR *d = fd < 0 ? NULL : fdopendir(fd);
    struct dirent *x;
    while (d && (x = readdir(d))) {
        char to[4096], *s;
        if (x->d_name[0] == '.')
            continue;
        ssize_t n = readlinkat(dirfd(d), x->d_name, to, sizeof to - 1);
        to[n > 0 ? n : 0] = 0;
        if ((s = strstr(to, ":[")) && strncmp(to, "anon_inode:", 11)) /* socket:[123]: the number says nothing */
            *s = 0;
        bool other = fstatat(dirfd(d), x->d_name, &st, 0) == 0 && S_ISDIR(st.st_mode) && (st.st_dev != root->st_dev || st.st_ino != root->st_ino);
        fact(w, "fd");
        field_s(w, x->d_name);
        field_f(w, "%s%s", to, other ? " (a directory of another view)" : "");
        fact_end(w);
    }
    if (d)
        closedir(d);
}

static void limits(struct worker *w, int dir)
{
    char text[8192], *save = NULL;
    if (read_file_at(dir, "limits", text, sizeof text) <= 0)
        return;
    char *line = strtok_r(text, "\n", &save); /* the heading */
    while (line && (line = strtok_r(NULL, "\n", &save))) {
        char name[27], soft[32], hard[32];
        if (strlen(line) < 27)
            continue;
        memcpy(name, line, 26);
        name[26] = 0;
        for (size_t n = 26; n && name[n - 1] == ' '; n--)
            name[n - 1] = 0;
        if (sscanf(line + 26, "%31s %31s", soft, hard) != 2)
            continue;
        fact(w, "limit");
        field_s(w, name);
        field_s(w, soft);
        field_s(w, hard);
        fact_end(w);
    }
}

static void status(struct worker *w, int dir)
{
    static const char *const wanted[] = {"Umask", "Uid", "Gid", "Groups", "SigBlk", "SigIgn", "SigCgt", "CapInh", "CapPrm", "CapEff", "CapBnd", "CapAmb", "NoNewPrivs", "Seccomp", "Cpus_allowed"};
    char text[8192], *save = NULL;
    if (read_file_at(dir, "status", text, sizeof text) <= 0)
        return;
    for (char *line = strtok_r(text, "\n", &save); line; line = strtok_r(NULL, "\n", &save)) {
        char *colon = strchr(line, ':');
        if (!colon)
            continue;
        *colon++ = 0;
        while (*colon == '\t' || *colon == ' ')
            colon++;
        for (size_t i = 0; i < COUNT_OF(wanted); i++)
            if (strcmp(line, wanted[i]) == 0) {
                for (char *s = colon; *s; s++)
                    if (*s == '\t')
                        *s = ' ';
                fact(w, "status");
                field_s(w, line);
                field_s(w, colon);
                fact_end(w);
            }
    }
}

static void told(struct worker *w, const char *name, const char *value)
{
    fact(w, "status");
    field_s(w, name);
    field_s(w, value);
    fact_end(w);
}

/* What a command gets from the process that it is started from, beyond its status. */
static void scheduling(struct worker *w, int dir)
{
    char text[1024], policy[64], *save = NULL, *words = read_file_at(dir, "stat", text, sizeof text) > 0 ? strrchr(text, ')') : NULL;
    const char *word, *rt = "0";
    for (int n = 3; words && (word = strtok_r(n == 3 ? words + 1 : NULL, " \n", &save)); n++) /* as proc(5) numbers them */
        if (n == 19)
            told(w, "nice", word);
        else if (n == 40)
            rt = word;
        else if (n == 41) {
            snprintf(policy, sizeof policy, "policy %s, priority %s", word, rt);
            told(w, "scheduling", policy);
        }
    long io = syscall(SYS_ioprio_get, 1 /* of a process */, w->k->init_pid);
    if (io >= 0) {
        snprintf(policy, sizeof policy, "class %ld, priority %ld", io >> 13, io & 0x1fff);
        told(w, "input and output", policy);
    }
    if (read_file_at(dir, "oom_score_adj", text, sizeof text) > 0) {
        text[strcspn(text, "\n")] = 0;
        told(w, "oom_score_adj", text);
    }
}

static void cgroups(struct worker *w, int dir)
{
    char text[8192], *save = NULL;
    if (read_file_at(dir, "cgroup", text, sizeof text) <= 0)
        return;
    for (char *line = strtok_r(text, "\n", &save); line; line = strtok_r(NULL, "\n", &save)) {
        char *a = strchr(line, ':'), *b = a ? strchr(a + 1, ':') : NULL;
        if (!b)
            continue;
        *b = 0;
        fact(w, "cgroup");
        field_s(w, b + 1);
        field_s(w, a + 1);
        fact_end(w);
    }
}

/* ---- mounts ---- */

static void mounts(struct worker *w, int dir)
{
    static char text[512 << 10];
    char *save = NULL, shm[32];
    path_join(shm, sizeof shm, "/%u/shm", w->k->generation);
    size_t shm_len = strlen(shm);
    if (read_file_at(dir, "mountinfo", text, sizeof text) <= 0)
        return;
    for (char *line = strtok_r(text, "\n", &save); line; line = strtok_r(NULL, "\n", &save)) {
        char *f[32], *s2 = NULL;
        size_t n = 0, dash = 0;
        for (char *t = strtok_r(line, " ", &s2); t && n < COUNT_OF(f); t = strtok_r(NULL, " ", &s2)) {
            if (!dash && n >= 6 && strcmp(t, "-") == 0)
                dash = n;
            f[n++] = t;
        }
        if (!dash || dash + 1 >= n)
            continue;
        fact(w, "mount");
        field_s(w, f[4]);
        field_s(w, f[dash + 1]);
        field_s(w, f[5]);
        /* of this episode's upper layer on a disk: told as of one on a tmpfs, without the number, which no other one has */
        size_t len = strlen(f[3]);
        bool own = w->k->set.disk && strcmp(f[4], "/dev/shm") == 0 && len > shm_len && strcmp(f[3] + len - shm_len, shm) == 0;
        field_s(w, own ? "/shm" : f[3]);
        field_s(w, dash > 6 ? f[6] : "-");
        fact_end(w);
    }
}

/* ---- files: the writable trees, and what lies below ---- */

static void xattr_names(struct worker *w, int fd)
{
    char names[4096];
    ssize_t n = flistxattr(fd, names, sizeof names);
    struct buf b = {0};
    for (ssize_t at = 0; at < n; at += (ssize_t)strlen(names + at) + 1)
        if (!is_overlays_own(names + at) && (buf_add(&b, names + at, strlen(names + at)) < 0 || buf_add(&b, " ", 1) < 0))
            break;
    if (b.len)
        field(w, b.p, b.len - 1);
    else
        field_s(w, "-");
    buf_free(&b);
}

static void tree(struct worker *w, const char *name, int fd)
{
    struct stat st;
    uint64_t n = 0;
    if (fd < 0 || fstat(fd, &st) < 0)
        return;
    int again = openat(fd, ".", O_RDONLY | O_DIRECTORY | O_CLOEXEC);
    DIR *d = again < 0 ? NULL : fdopendir(again);
    struct dirent *x;
    while (d && (x = readdir(d)))
        n += strcmp(x->d_name, ".") && strcmp(x->d_name, "..");
    if (d)
        closedir(d);
    fact(w, "upper");
    field_s(w, name);
    field_f(w, "%llu", (unsigned long long)n);
    field_f(w, "%04o", st.st_mode & 07777);
    field_f(w, "%u", st.st_uid);
    field_f(w, "%u", st.st_gid);
    xattr_names(w, fd);
    fact_end(w);
}

int mqueue_open(struct keeper *k)
{
    struct statfs fs;
    int fd = k_open_in(k->root_fd, "dev/mqueue", O_RDONLY | O_DIRECTORY, K_RESOLVE_IN_ROOT | K_RESOLVE_NO_SYMLINKS);
    if (fd >= 0 && (fstatfs(fd, &fs) < 0 || fs.f_type != K_MQUEUE_MAGIC))
        fd_close(&fd);
    return fd;
}

static void trees(struct worker *w)
{
    char path[64];
    int fd;
    for (unsigned i = 0; i < w->k->set.overlays; i++) {
        path_join(path, sizeof path, "/k/u/%u/u/%u", w->k->generation, i);
        fd = open(path, O_RDONLY | O_DIRECTORY | O_CLOEXEC);
        tree(w, w->k->set.overlay[i].target, fd);
        fd_close(&fd);
    }
    path_join(path, sizeof path, "/k/u/%u/shm", w->k->generation);
    fd = open(path, O_RDONLY | O_DIRECTORY | O_CLOEXEC);
    tree(w, "/dev/shm", fd);
    fd_close(&fd);
    fd = mqueue_open(w->k);
    tree(w, "/dev/mqueue", fd);
    fd_close(&fd);
    for (unsigned i = 0; w->k->nstack && i < w->k->set.overlays; i++) { /* of the layer; the base's are known */
        struct stat st;
        if (top_below(w->k, i, &st) < 0)
            continue;
        fact(w, "top");
        field_s(w, w->k->set.overlay[i].target);
        field_f(w, "%04o", st.st_mode & 07777);
        field_f(w, "%u", st.st_uid);
        field_f(w, "%u", st.st_gid);
        fact_end(w);
    }
}

static void lower(struct worker *w, const char *target, const char *name, const struct stat *st)
{
    char path[TARGET_MAX + 300];
    path_join(path, sizeof path, "%s%s%s", name && !strcmp(target, "/") ? "" : target, name ? "/" : "", name ? name : "");
    fact(w, "lower");
    field_s(w, path);
    field_f(w, "%llu", (unsigned long long)st->st_dev);
    field_f(w, "%llu", (unsigned long long)st->st_ino);
    field_f(w, "%o", st->st_mode);
    field_f(w, "%lld.%09ld", (long long)st->st_mtim.tv_sec, st->st_mtim.tv_nsec);
    field_f(w, "%lld.%09ld", (long long)st->st_ctim.tv_sec, st->st_ctim.tv_nsec);
    fact_end(w);
}

static void lower_dir(struct worker *w, const char *target, unsigned i)
{
    char path[64];
    struct stat st;
    path_join(path, sizeof path, "/k/l/%u", i);
    int fd = open(path, O_RDONLY | O_CLOEXEC | O_NONBLOCK);
    if (fd >= 0 && fstat(fd, &st) == 0) {
        lower(w, target, NULL, &st);
        DIR *d = S_ISDIR(st.st_mode) ? fdopendir(fd) : NULL;
        struct dirent *x;
        while (d && (x = readdir(d)))
            if (x->d_name[0] != '.' || (x->d_name[1] && strcmp(x->d_name, "..")))
                if (fstatat(dirfd(d), x->d_name, &st, AT_SYMLINK_NOFOLLOW) == 0)
                    lower(w, target, x->d_name, &st);
        if (d) {
            closedir(d);
            return;
        }
    }
    fd_close(&fd);
}

/* The base only: what is bound in besides is the user's own and may change at any time. */
static void lowers(struct worker *w)
{
    for (unsigned i = 0; i < w->k->set.overlays; i++)
        for (unsigned j = 0; j < w->k->set.overlay[i].n; j++)
            lower_dir(w, w->k->set.overlay[i].target, w->k->set.overlay[i].first + j);
}

/* ---- ipc, keys, names ---- */

static void sysv(struct worker *w, const char *kind, int size_at, int uid_at)
{
    static char text[256 << 10];
    char path[32], *save = NULL;
    path_join(path, sizeof path, "/proc/sysvipc/%s", kind);
    if (read_file_at(AT_FDCWD, path, text, sizeof text) <= 0)
        return;
    char *line = strtok_r(text, "\n", &save); /* the heading */
    while (line && (line = strtok_r(NULL, "\n", &save))) {
        char *f[20], *s2 = NULL;
        int n = 0;
        for (char *t = strtok_r(line, " ", &s2); t && n < 20; t = strtok_r(NULL, " ", &s2))
            f[n++] = t;
        if (n <= uid_at)
            continue;
        fact(w, "ipc");
        field_s(w, kind);
        field_s(w, f[0]);
        field_s(w, f[1]);
        field_s(w, f[uid_at]);
        field_s(w, f[2]);
        field_s(w, f[size_at]);
        fact_end(w);
    }
}

static void queues(struct worker *w)
{
    int fd = mqueue_open(w->k);
    DIR *d = fd < 0 ? NULL : fdopendir(fd);
    struct dirent *x;
    struct stat st;
    while (d && (x = readdir(d))) {
        if (x->d_name[0] == '.' || fstatat(dirfd(d), x->d_name, &st, AT_SYMLINK_NOFOLLOW) < 0)
            continue;
        fact(w, "ipc");
        field_s(w, "mqueue");
        field_s(w, "-");
        field_s(w, x->d_name);
        field_f(w, "%u", st.st_uid);
        field_f(w, "%o", st.st_mode & 07777);
        field_f(w, "%lld", (long long)st.st_size);
        fact_end(w);
    }
    if (d)
        closedir(d);
}

static void key(struct worker *w)
{
    struct keeper *k = w->k;
    if (!k->session_key)
        return;
    if (k->key_seen != k->session_key) {
        k->key_seen = k->session_key;
        k->key_first = k->episode;
    }
    fact(w, "key");
    field_s(w, "session");
    field_f(w, "%d", k->session_key);
    field_f(w, "%u", k->key_first);
    fact_end(w);
}

/* ---- what can only be looked at from within: in, look, back ---- */

static bool enter(int dir, const char *ns, int kind)
{
    char path[32];
    path_join(path, sizeof path, "ns/%s", ns);
    int fd = openat(dir, path, O_RDONLY | O_CLOEXEC);
    bool ok = fd >= 0 && setns(fd, kind) == 0;
    fd_close(&fd);
    return ok;
}

static int within(struct worker *w, int dir, struct err *e)
{
    struct keeper *k = w->k;
    struct utsname uts;
    if (k->set.shared) { /* no namespace can be entered; each episode has new ones */
        queues(w);
        return 0;
    }
    if (k->set.manifest || enter(dir, "ipc", CLONE_NEWIPC)) {
        sysv(w, "shm", 3, 7);
        sysv(w, "sem", 3, 4);
        sysv(w, "msg", 3, 7);
        queues(w);
    } else
        fail(e, errno, "look at the episode's IPC objects");
    if ((k->set.manifest || enter(dir, "uts", CLONE_NEWUTS)) && uname(&uts) == 0) {
        fact(w, "uts");
        field_s(w, uts.nodename);
        field_s(w, uts.domainname);
        fact_end(w);
    } else
        fail(e, errno, "look at the episode's host name");
    if (!w->here || k->set.manifest)
        return e->no ? -1 : 0; /* a helper ends in there */
    if (setns(k->own_ipc, CLONE_NEWIPC) < 0 || setns(k->own_uts, CLONE_NEWUTS) < 0) {
        k->loop.stop = true; /* never go on in an episode's namespace */
        return fail(e, errno, "come back from the episode's namespaces");
    }
    return e->no ? -1 : 0;
}

/* A new init says that it is ready before it has closed what it was made with: wait until it sleeps. */
static void settled(int dir)
{
    const struct timespec pause = {0, 50000};
    char text[1024], *s;
    for (int i = 0; i < 100; i++) {
        if (read_file_at(dir, "stat", text, sizeof text) <= 0 || !(s = strrchr(text, ')')) || s[1] != ' ' || s[2] == 'S')
            return;
        nanosleep(&pause, NULL);
    }
}

static int gather(struct worker *w, struct err *e)
{
    struct keeper *k = w->k;
    struct stat root;
    int dir = k->init_pid > 0 ? init_dir(k) : -1;
    if (dir < 0 || k->root_fd < 0 || fstat(k->root_fd, &root) < 0) {
        fd_close(&dir);
        return fail(e, ESRCH, "look at the episode: there is none");
    }
    settled(dir);
    fact(w, "episode");
    field_f(w, "%u", k->episode);
    fact_end(w);
    if (k->set.manifest)
        manifest_facts(w);
    else {
        layers_facts(w);
        lowers(w);
        trees(w);
    }
    mounts(w, dir);
    namespaces(w, dir);
    key(w);
    processes(w, e);
    environment(w, dir);
    directory(w, dir, "cwd", &root);
    directory(w, dir, "root", &root);
    descriptors(w, dir, &root);
    limits(w, dir);
    status(w, dir);
    scheduling(w, dir);
    cgroups(w, dir);
    if (!k->set.host_network || k->set.manifest) { /* else they are the machine's */
        int net = openat(dir, "net", O_RDONLY | O_DIRECTORY | O_CLOEXEC);
        if (net < 0)
            fail(e, errno, "look at the episode's network");
        else
            (k->set.manifest ? facts_sockets : facts_network)(w, net);
        fd_close(&net);
    }
    if (!e->no)
        within(w, dir, e);
    close(dir);
    fact(w, "time");
    field_f(w, "%lld", (long long)time(NULL));
    fact_end(w);
    limits_facts(w);
    return e->no ? -1 : 0;
}

int facts_begin(struct keeper *k, struct err *e)
{
    k->own_ipc = k->own_uts = -1;
    if (unshare(CLONE_NEWIPC | CLONE_NEWUTS) < 0)
        return fail(e, errno, "make the keeper's own ipc and uts namespaces");
    k->own_ipc = open("/proc/self/ns/ipc", O_RDONLY | O_CLOEXEC);
    k->own_uts = open("/proc/self/ns/uts", O_RDONLY | O_CLOEXEC);
    return k->own_ipc < 0 || k->own_uts < 0 ? fail(e, errno, "open the keeper's own namespaces") : 0;
}

/* A fork costs more than all of this; so only what does not fit, or failed, is left to a helper. */
bool facts_here(struct keeper *k, struct buf *text)
{
    struct err e = {0};
    struct worker w = {.k = k, .in = -1, .out = -1, .result = -1, .here = true};
    if (gather(&w, &e) < 0 || w.full) {
        buf_free(&w.text);
        return false;
    }
    *text = w.text;
    return true;
}

void work_inspect(struct worker *w)
{
    struct buf none = {0};
    struct err e = {0};
    if (gather(w, &e) < 0)
        worker_fail(w, &e);
    worker_done(w, &none);
}
