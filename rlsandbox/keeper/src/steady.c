/* What an episode is in mode `manifest`: processes of one uid, and what they did to the container's files. */
#include <dirent.h>
#include <sched.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/ipc.h>
#include <sys/msg.h>
#include <sys/prctl.h>
#include <sys/sem.h>
#include <sys/shm.h>
#include <sys/vfs.h>
#include <sys/wait.h>

#include "entry.h"
#include "manifest.h"
#include "procs.h"
#include "sandbox.h"
#include "sys.h"
#include "trees.h"
#include "worker.h"

enum { MAX_MANIFESTS = 256, KILL_MS = 10000 };

static struct {
    struct manifest *at[MAX_MANIFESTS]; /* 0: the image */
    unsigned n, next, now;
} lists;

/* ---- processes ---- */

/* SysV objects belong to a user, and so does the right to remove them. */
static void ipc_remove(const char *kind, int (*remove)(int))
{
    static char text[256 << 10];
    char path[32], *save = NULL;
    int id;
    path_join(path, sizeof path, "/proc/sysvipc/%s", kind);
    if (read_file_at(AT_FDCWD, path, text, sizeof text) <= 0)
        return;
    for (char *line = strtok_r(text, "\n", &save); line; line = strtok_r(NULL, "\n", &save))
        if (sscanf(line, "%*d %d", &id) == 1)
            remove(id);
}

static int shm_remove(int id) { return shmctl(id, IPC_RMID, NULL); }
static int sem_remove(int id) { return semctl(id, 0, IPC_RMID); }
static int msg_remove(int id) { return msgctl(id, IPC_RMID, NULL); }

/* In a child: as that user, tell everybody whom it may to die; the kernel leaves out who asks. */
static _Noreturn void sweep(const struct keeper *k)
{
    if (syscall(SYS_setgroups, 0, NULL) < 0 || syscall(SYS_setresgid, k->set.gid, k->set.gid, k->set.gid) < 0 || syscall(SYS_setresuid, k->set.uid, k->set.uid, k->set.uid) < 0)
        _exit(1);
    kill(-1, SIGKILL);
    ipc_remove("shm", shm_remove);
    ipc_remove("sem", sem_remove);
    ipc_remove("msg", msg_remove);
    _exit(0);
}

static bool of_user(int proc, const struct proc *p, uid_t uid)
{
    char path[32], text[4096], *s;
    unsigned long real, effective;
    path_join(path, sizeof path, "%d/status", (int)p->pid);
    if (strchr("ZX", p->state) || read_file_at(proc, path, text, sizeof text) <= 0 || !(s = strstr(text, "\nUid:")) || sscanf(s + 5, "%lu %lu", &real, &effective) != 2)
        return false;
    return real == uid || effective == uid;
}

void manifest_end_all(struct keeper *k)
{
    struct procs ps = {0};
    size_t alive = 1;
    uint64_t end = now_ns() + (uint64_t)KILL_MS * 1000000u;
    int proc = open("/proc", O_RDONLY | O_DIRECTORY | O_CLOEXEC);
    while (alive && now_ns() < end) { /* who is left is found by verification */
        pid_t p = fork();
        if (p == 0)
            sweep(k);
        while (p > 0 && waitpid(p, NULL, 0) < 0 && errno == EINTR)
            ;
        alive = proc < 0 || procs_read(proc, &ps) < 0 ? 1 : 0;
        for (size_t i = 0; i < ps.n; i++)
            alive += of_user(proc, &ps.p[i], k->set.uid);
        if (alive)
            usleep(1000); /* a killed one needs a processor to die on */
    }
    procs_free(&ps);
    fd_close(&proc);
}

/* Anybody of that uid who is not below the episode's init. */
static void strangers(struct worker *w)
{
    struct procs ps = {0};
    int proc = open("/proc", O_RDONLY | O_DIRECTORY | O_CLOEXEC);
    if (proc >= 0 && procs_read(proc, &ps) == 0)
        procs_mark_tree(&ps, w->k->init_pid);
    for (size_t i = 0; i < ps.n; i++) {
        if (ps.p[i].in || !of_user(proc, &ps.p[i], w->k->set.uid))
            continue;
        fact(w, "process");
        field_f(w, "%d", (int)ps.p[i].pid);
        field_f(w, "%d", (int)ps.p[i].ppid);
        field_f(w, "%u", (unsigned)w->k->set.uid);
        field(w, &ps.p[i].state, 1);
        field_s(w, "old");
        field_s(w, "of an earlier episode");
        fact_end(w);
    }
    procs_free(&ps);
    fd_close(&proc);
}

/* Message queues are in no list: nobody has any at the start. */
static int queues(int (*fn)(void *arg, char kind, const char *path, const struct stat *st, size_t i), void *arg)
{
    char path[300];
    struct dirent *x;
    struct stat st;
    struct statfs fs;
    int r = 0;
    DIR *d = opendir("/dev/mqueue");
    while (d && r == 0 && fstatfs(dirfd(d), &fs) == 0 && fs.f_type == K_MQUEUE_MAGIC && (x = readdir(d)))
        if (x->d_name[0] != '.' && fstatat(dirfd(d), x->d_name, &st, AT_SYMLINK_NOFOLLOW) == 0 && path_join(path, sizeof path, "/dev/mqueue/%s", x->d_name) == 0)
            r = fn(arg, '+', path, &st, 0);
    if (d)
        closedir(d);
    return r;
}

static int queue_remove(void *arg, char kind, const char *path, const struct stat *st, size_t i)
{
    (void)arg, (void)kind, (void)st, (void)i;
    (void)unlink(path); /* else verification finds it */
    return 0;
}

/* ---- lists ---- */

static struct manifest *now(void)
{
    return lists.at[lists.now];
}

static int find(const char *name)
{
    for (unsigned i = 0; i < lists.n; i++)
        if (strcmp(lists.at[i]->name, name) == 0)
            return (int)i;
    return -1;
}

static int list_add(struct keeper *k, const char *name, struct err *e)
{
    struct manifest *m = lists.n < MAX_MANIFESTS ? calloc(1, sizeof *m) : NULL;
    if (!m)
        return fail(e, lists.n < MAX_MANIFESTS ? ENOMEM : E2BIG, "keep another state of the container's files");
    path_join(m->name, sizeof m->name, "%s", name);
    m->number = ++lists.next;
    usleep(MANIFEST_TICK_US); /* whatever is changed from here on has another time */
    if (manifest_make(m, k->set.uid, e) < 0) {
        manifest_free(m);
        free(m);
        return -1;
    }
    lists.at[lists.n++] = m;
    lists.now = lists.n - 1;
    return 0;
}

int manifest_begin(struct keeper *k, struct err *e)
{
    char name[64] = "";
    if (*k->set.user && inside_ids(k->set.user, &k->set.uid, &k->set.gid, name, e) < 0)
        return -1;
    if (geteuid() != 0 || k->set.uid == 0)
        return fail(e, EPERM, "run commands under another user than the keeper: it must be root, and --user somebody else");
    struct stat st;
    if (lstat("/.rlsandbox", &st) < 0 || !S_ISDIR(st.st_mode)) /* all that is not in the list will be removed: nobody's machine */
        return fail(e, EPERM, "list all files of what is not a pod of ours (it has no /.rlsandbox)");
    if ((remove_tree(AT_FDCWD, MANIFEST_STORE) < 0 && errno != ENOENT) || mkdir(MANIFEST_STORE, 0700) < 0)
        return fail(e, errno, "make %s for copies of what commands may change", MANIFEST_STORE);
    if (chown(MANIFEST_STORE, 0, 0) < 0 || chmod(MANIFEST_STORE, 0700) < 0)
        return fail(e, errno, "close %s to commands", MANIFEST_STORE);
    if (put_fmt(&k->facts, TAG_FACT, "only_user=%u%s%s", (unsigned)k->set.uid, *name ? "," : "", name) < 0)
        return fail(e, ENOMEM, "tell whose commands are");
    manifest_end_all(k);
    return list_add(k, "", e);
}

void manifest_drop(const char *name)
{
    int i = *name ? find(name) : -1;
    if (i <= 0)
        return;
    if ((unsigned)i == lists.now) { /* in use: only its name goes */
        lists.at[i]->name[0] = '\n';
        return;
    }
    manifest_free(lists.at[i]);
    free(lists.at[i]);
    lists.at[i] = lists.at[--lists.n];
    if (lists.now == lists.n)
        lists.now = (unsigned)i;
}

/* What the list and its copies take. */
static uint64_t list_bytes(const struct manifest *m)
{
    char path[64];
    path_join(path, sizeof path, MANIFEST_STORE "/%u", m->number);
    int fd = open(path, O_RDONLY | O_DIRECTORY | O_CLOEXEC);
    uint64_t n = m->cap * sizeof *m->at + m->room + (fd >= 0 ? tree_bytes(fd, 0) : 0);
    fd_close(&fd);
    return n;
}

/* ---- reset, seal ---- */

static void end_episode(struct keeper *k, const char *why)
{
    episode_kill(k); /* first who starts processes; a child that is root yet dies with it */
    manifest_end_all(k);
    queues(queue_remove, NULL);
    chan_end_all(k, ECANCELED, why);
}

void manifest_reset(struct keeper *k, uint32_t channel, const uint8_t *p, size_t n)
{
    struct err e = {0};
    struct buf b = {0};
    char layer[LAYER_NAME] = "";
    uint64_t t0 = now_ns(), t1;
    if (tlv_str(p, n, TAG_LAYER, layer, sizeof layer) == -2)
        fail(&e, EINVAL, "read a layer's name: it is too long");
    int to = e.no ? -1 : find(layer);
    if (to < 0 && !e.no)
        fail(&e, ENOENT, "stand on layer %.100s: it is not here", layer);
    if (to >= 0) {
        end_episode(k, "run in the episode: it was reset");
        t1 = now_ns();
        struct manifest *left = now();
        lists.now = (unsigned)to;
        if (left != now() && left->name[0] == '\n') {
            left->name[1] = 0;
            manifest_drop(left->name);
        }
        /* another list's inodes are not these: what it has copies of is put back whatever it is now */
        if (pristine_restore(now(), NULL, &e) == 0 && episode_start(k, &e) == 0 &&
            put_fmt(&b, TAG_FACT, "ns_end=%llu", (unsigned long long)(t1 - t0)) == 0 &&
            put_fmt(&b, TAG_FACT, "ns_start=%llu", (unsigned long long)(now_ns() - t1)) == 0)
            conn_send(&k->conn, T_REPLY, 0, channel, b.p, b.len);
        else if (!e.no)
            k->conn.broken = true; /* an answer may not be lost */
    }
    if (e.no)
        conn_fail(&k->conn, channel, e.no, e.what);
    buf_free(&b);
    keeper_flush(k);
}

void manifest_seal(struct keeper *k, uint32_t channel, const uint8_t *p, size_t n)
{
    char name[LAYER_NAME];
    struct err e = {0}, start = {0};
    struct buf b = {0};
    if (tlv_str(p, n, TAG_LAYER, name, sizeof name) <= 0)
        fail(&e, EINVAL, "seal a layer: it needs a name under 128 bytes");
    else if (find(name) >= 0)
        fail(&e, EEXIST, "seal a layer: there is one of that name");
    else if (k->init.fd < 0)
        fail(&e, ESRCH, "seal a layer: there is no episode");
    else if (!(tlv_get(p, n, TAG_FLAGS, 0) & SEAL_KILL) && episode_living(k))
        fail(&e, EBUSY, "seal a layer: processes of the episode are running");
    else {
        end_episode(k, "run in the episode: its files were sealed");
        list_add(k, name, &e);
        if (episode_start(k, &start) < 0 && !e.no)
            e = start;
    }
    if (e.no)
        conn_fail(&k->conn, channel, e.no, e.what);
    else if (put_u64(&b, TAG_BYTES, list_bytes(now())) == 0)
        conn_send(&k->conn, T_REPLY, 0, channel, b.p, b.len);
    else
        k->conn.broken = true;
    buf_free(&b);
    keeper_flush(k);
}

/* ---- looking ---- */

struct change {
    char kind;
    char *path;
    struct stat st;
    bool told;
};

struct changes {
    struct worker *w;
    struct change *at;
    size_t n, cap;
};

static int change_add(void *arg, char kind, const char *path, const struct stat *st, size_t i)
{
    struct changes *c = arg;
    (void)i;
    if (c->n == c->cap) {
        size_t cap = c->cap ? c->cap * 2 : 64;
        struct change *q = realloc(c->at, cap * sizeof *q);
        if (!q)
            return -1;
        c->at = q;
        c->cap = cap;
    }
    struct change *x = &c->at[c->n];
    *x = (struct change){.kind = kind, .path = strdup(path), .told = true};
    if (st)
        x->st = *st;
    /* a directory in which something came or went is different only for that, as far as times go */
    if (kind == '~' && S_ISDIR(st->st_mode)) {
        const struct mark *k = &now()->at[i];
        x->told = k->ino != (uint64_t)st->st_ino || k->mode != st->st_mode || k->uid != st->st_uid || k->gid != st->st_gid;
        x->kind = x->told ? '~' : 't';
    }
    c->n++;
    return x->path ? 0 : -1;
}

static int changes_find(struct changes *c, struct err *e)
{
    struct differ d = {.m = now(), .fn = change_add, .arg = c};
    if (manifest_diff(&d, e) < 0)
        return -1;
    if (queues(change_add, c) < 0)
        return fail(e, ENOMEM, "list message queues");
    for (size_t i = 0; i < c->n; i++) {
        size_t n = strcmp(c->at[i].path, "/") ? strlen(c->at[i].path) : 0;
        bool explained = false;
        for (size_t j = i + 1; c->at[i].kind == 't' && !explained && j < c->n && strncmp(c->at[j].path, c->at[i].path, n) == 0 && c->at[j].path[n] == '/'; j++)
            explained = c->at[j].kind != 't';
        c->at[i].told |= c->at[i].kind == 't' && !explained;
    }
    return 0;
}

void manifest_facts(struct worker *w)
{
    struct changes c = {.w = w};
    struct err e = {0};
    struct stat st = {0};
    size_t n = 0;
    if (*now()->name) {
        fact(w, "layer");
        field_s(w, now()->name);
        fact_end(w);
    }
    if (changes_find(&c, &e) < 0) {
        if (w->here)
            w->full = true;
        else
            worker_fail(w, &e);
    }
    for (size_t i = 0; i < c.n; i++) {
        n += c.at[i].told;
        free(c.at[i].path);
    }
    free(c.at);
    (void)!stat("/", &st);
    fact(w, "upper");
    field_s(w, "/");
    field_f(w, "%zu", n);
    field_f(w, "%o", st.st_mode & 07777);
    field_f(w, "%u", st.st_uid);
    field_f(w, "%u", st.st_gid);
    field_s(w, "");
    fact_end(w);
    strangers(w);
}

void manifest_changes(struct worker *w)
{
    struct changes c = {.w = w};
    struct err e = {0};
    struct buf reply = {0};
    char only[4096] = "";
    uint64_t limit = tlv_get(w->p, w->n, TAG_LIMIT, UINT64_MAX), count = 0, bytes = 0;
    size_t n = changes_below(w, only, sizeof only);
    if (changes_find(&c, &e) < 0)
        worker_fail(w, &e);
    for (size_t i = 0; i < c.n; i++) {
        struct change *x = &c.at[i];
        struct buf entry = {0};
        if (!x->told || (n > 0 && (strncmp(x->path, only, n) || (x->path[n] && x->path[n] != '/'))))
            continue;
        if (x->kind != '-' && S_ISREG(x->st.st_mode))
            bytes += (uint64_t)x->st.st_blocks * 512;
        if (count++ >= limit)
            continue;
        if (entry_put(&entry, x->kind == '-' ? 'x' : entry_kind(x->st.st_mode), x->kind == '-' ? NULL : &x->st, x->path, strlen(x->path)) < 0)
            _exit(1);
        worker_write(w, entry.p, entry.len);
        buf_free(&entry);
    }
    put_u64(&reply, TAG_COUNT, count);
    put_u64(&reply, TAG_BYTES, bytes);
    put_u32(&reply, TAG_FLAGS, 0);
    worker_done(w, &reply);
}

int manifest_restore(const uint8_t *p, size_t n, struct err *e)
{
    char path[4096];
    struct stat st;
    int len = tlv_str(p, n, TAG_PATH, path, sizeof path);
    if (len < 2 || path[0] != '/' || path[len - 1] == '/')
        return fail(e, EINVAL, "restore: an absolute path without a slash at its end is wanted");
    for (char *s = path; *s; s++)
        if (*s == '/' && (s[1] == '/' || (s[1] == '.' && (s[2] == '/' || !s[2] || (s[2] == '.' && (s[3] == '/' || !s[3]))))))
            return fail(e, EINVAL, "restore %.200s: no dots and no double slashes are wanted", path);
    char from[4096];
    if (manifest_source(path, true, from, sizeof from) < 0 && lstat(path, &st) < 0)
        return fail(e, ENOENT, "restore %.200s", path);
    return strncmp(path, "/dev/mqueue/", 12) == 0 ? queue_remove(NULL, 0, path, &st, 0) : pristine_restore(now(), path, e);
}

int manifest_source(const char *path, bool baseline, char *out, size_t cap)
{
    const struct manifest *m = now();
    if (!baseline)
        return path_join(out, cap, "%s", path);
    for (size_t i = 0; i < m->n; i++)
        if (strcmp(mark_path(m, i), path) == 0)
            return m->at[i].kept ? pristine_path(m, path, out, cap) : path_join(out, cap, "%s", path);
    errno = ENOENT;
    return -1;
}
