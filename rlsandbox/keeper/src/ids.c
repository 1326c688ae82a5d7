/* User ids of sandboxes. As root: a user namespace whose 0..65535 are a range of the machine that nobody uses. As an
 * ordinary user: the hub enters a user namespace itself, with a range by newuidmap where that is, else with one id. */
#include <sched.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/prctl.h>
#include <sys/wait.h>

#include "hub.h"
#include "sys.h"

enum { RANGE = 65536 };
static const unsigned long DEFAULT_BASE = 1879048192; /* 0x70000000: above what distributions hand out */

/* The first line of /etc/subuid or subgid for `name` or `id` with enough ids; 0: none. */
static unsigned long sub_range(const char *path, const char *name, unsigned long id, unsigned long *count)
{
    char line[512];
    FILE *f = fopen(path, "re");
    unsigned long start = 0;
    if (!f)
        return 0;
    while (!start && fgets(line, sizeof line, f)) {
        char *a = strchr(line, ':'), *end;
        if (!a)
            continue;
        *a++ = 0;
        bool mine = (name && strcmp(line, name) == 0) || (strtoul(line, &end, 10) == id && *line && !*end);
        unsigned long s = strtoul(a, &end, 10);
        if (!mine || *end != ':')
            continue;
        unsigned long n = strtoul(end + 1, NULL, 10);
        if (n >= *count) {
            start = s;
            *count = n;
        }
    }
    fclose(f);
    return start;
}

static const char *user_name(char *out, size_t cap, uid_t uid)
{
    char line[1024];
    FILE *f = fopen("/etc/passwd", "re");
    const char *found = NULL;
    while (f && !found && fgets(line, sizeof line, f)) {
        char *a = strchr(line, ':'), *b = a ? strchr(a + 1, ':') : NULL, *end;
        if (!b || strtoul(b + 1, &end, 10) != uid || *end != ':')
            continue;
        *a = 0;
        if (path_join(out, cap, "%s", line) == 0)
            found = out;
    }
    if (f)
        fclose(f);
    return found;
}

/* A process in a new user namespace that waits, so that others can map and open it. */
static pid_t holder(int *go, struct err *e)
{
    int p[2], q[2];
    char c;
    if (pipe2(p, O_CLOEXEC) < 0)
        return fail(e, errno, "make a pipe");
    if (pipe2(q, O_CLOEXEC) < 0) {
        close(p[0]);
        close(p[1]);
        return fail(e, errno, "make a pipe");
    }
    pid_t pid = fork();
    if (pid == 0) {
        prctl(PR_SET_PDEATHSIG, SIGKILL);
        close(p[1]);
        int no = unshare(CLONE_NEWUSER) < 0 ? errno : 0;
        (void)!write(q[1], &no, sizeof no);
        (void)!read(p[0], &c, 1);
        _exit(0);
    }
    close(p[0]);
    close(q[1]);
    int no = errno;
    if (pid > 0 && read_all(q[0], &no, sizeof no) != sizeof no)
        no = ECHILD;
    close(q[0]);
    *go = p[1];
    if (pid < 0 || no) {
        close(p[1]);
        if (pid > 0)
            waitpid(pid, NULL, 0);
        return fail(e, no, "make a user namespace");
    }
    return pid;
}

/* How many ids from 0 on this process has itself: all on a bare machine, fewer in a container of an ordinary user.
 * `map` becomes one that gives the first RANGE of them to a namespace below; no extent of it may span two of ours. */
static unsigned long own_ids(const char *file, char *map, size_t cap)
{
    char path[64];
    unsigned long first, outside, n, have = 0;
    size_t at = 0;
    path_join(path, sizeof path, "/proc/self/%s", file);
    FILE *f = fopen(path, "re");
    *map = 0;
    while (f && fscanf(f, "%lu %lu %lu", &first, &outside, &n) == 3 && first == have) {
        unsigned long part = first >= RANGE ? 0 : n < RANGE - first ? n : RANGE - first;
        if (part && at < cap)
            at += (size_t)snprintf(map + at, cap - at, "%lu %lu %lu\n", first, first, part);
        have += n;
    }
    if (f)
        fclose(f);
    return have;
}

static int map_ids(pid_t pid, const char *file, const char *map, struct err *e)
{
    char path[64];
    path_join(path, sizeof path, "/proc/%d/%s", (int)pid, file);
    return write_file(path, map) < 0 ? fail(e, errno, "write %s of the sandboxes' user namespace", file) : 0;
}

/* a user namespace with both maps, as a descriptor */
static int userns_make(const char *umap, const char *gmap, struct err *e)
{
    char path[64];
    int go = -1, fd = -1;
    pid_t pid = holder(&go, e);
    if (pid < 0)
        return -1;
    path_join(path, sizeof path, "/proc/%d/ns/user", (int)pid);
    if (map_ids(pid, "uid_map", umap, e) == 0 && map_ids(pid, "gid_map", gmap, e) == 0 &&
        (fd = open(path, O_RDONLY | O_CLOEXEC)) < 0)
        fail(e, errno, "open the user namespace");
    close(go);
    waitpid(pid, NULL, 0);
    return fd;
}

static bool idmap_works(int userns)
{
    int fd = k_open_tree(AT_FDCWD, "/", K_OPEN_TREE_CLONE);
    struct k_mount_attr a = {.attr_set = K_ATTR_IDMAP, .userns_fd = (uint64_t)userns};
    bool ok = fd >= 0 && k_mount_setattr(fd, "", AT_EMPTY_PATH, &a) == 0;
    fd_close(&fd);
    return ok;
}

/* 1: this root has too few ids for that, as in a user namespace of one */
static int as_root(struct hub *h, struct err *e)
{
    char own_umap[512], own_gmap[512];
    unsigned long have_u = own_ids("uid_map", own_umap, sizeof own_umap), have_g = own_ids("gid_map", own_gmap, sizeof own_gmap);
    if (have_u < RANGE || have_g < RANGE)
        return 1;
    unsigned long nu = RANGE, ng = RANGE, ubase = sub_range("/etc/subuid", "root", 0, &nu), gbase = sub_range("/etc/subgid", "root", 0, &ng);
    ubase = ubase ? ubase : DEFAULT_BASE;
    gbase = gbase ? gbase : DEFAULT_BASE;
    char umap[64], gmap[64];
    if (have_u >= ubase + RANGE && have_g >= gbase + RANGE) {
        path_join(umap, sizeof umap, "0 %lu %d", ubase, RANGE);
        path_join(gmap, sizeof gmap, "0 %lu %d", gbase, RANGE);
        h->userns = userns_make(umap, gmap, e);
        if (h->userns < 0)
            return -1;
        strcpy(h->ids, "idmapped");
        if (idmap_works(h->userns)) {
            h->root_uid = (uid_t)ubase;
            h->root_gid = (gid_t)gbase;
            return 0;
        }
        fd_close(&h->userns);
    }
    /* an overlay root for one cannot be mapped, a container has no other range: then ids are its own, rights are not */
    h->userns = userns_make(own_umap, own_gmap, e);
    strcpy(h->ids, "range");
    return h->userns < 0 ? -1 : 0;
}

/* Where a program of that name is; the same directories as in backends/local/ids.py. */
static bool tool(const char *program, char *path, size_t cap)
{
    static const char *const dirs[] = {"/usr/bin", "/bin", "/usr/sbin", "/sbin", "/usr/local/bin"};
    for (size_t i = 0; i < COUNT_OF(dirs); i++)
        if (path_join(path, cap, "%s/%s", dirs[i], program) == 0 && access(path, X_OK) == 0)
            return true;
    return false;
}

static bool mapper(char *path, pid_t pid, unsigned long self, unsigned long start)
{
    char p[16], s[24], b[24];
    path_join(p, sizeof p, "%d", (int)pid);
    path_join(s, sizeof s, "%lu", self);
    path_join(b, sizeof b, "%lu", start);
    pid_t c = fork();
    if (c == 0) {
        char *argv[] = {path, p, "0", s, "1", "1", b, "65535", NULL};
        char *env[] = {"PATH=/usr/bin:/bin:/usr/sbin:/sbin:/usr/local/bin", NULL};
        int null = open("/dev/null", O_RDWR);
        dup2(null, 1);
        dup2(null, 2);
        execve(path, argv, env);
        _exit(127);
    }
    int status = -1;
    if (c > 0)
        while (waitpid(c, &status, 0) < 0 && errno == EINTR)
            ;
    return c > 0 && status == 0;
}

enum { HALF = 2 }; /* ids of users are mapped, those of groups could not be */

static int as_user(struct hub *h, struct err *e)
{
    uid_t uid = geteuid();
    gid_t gid = getegid();
    char name[128], map[64], umap[512], gmap[512], newuidmap[64], newgidmap[64];
    bool root = uid == 0 && own_ids("uid_map", umap, sizeof umap) >= RANGE && own_ids("gid_map", gmap, sizeof gmap) >= RANGE;
    unsigned long nu = RANGE - 1, ng = RANGE - 1;
    const char *who = user_name(name, sizeof name, uid);
    unsigned long us = sub_range("/etc/subuid", who, uid, &nu), gs = sub_range("/etc/subgid", who, uid, &ng);
    pid_t self = getpid(), helper;
    int ask[2], answer[2];
    char c = 0;
    /* the mapping programs must run outside the namespace that they map: a helper stays there */
    if (pipe2(ask, O_CLOEXEC) < 0 || pipe2(answer, O_CLOEXEC) < 0)
        return fail(e, errno, "make a pipe");
    helper = fork();
    if (helper == 0) {
        prctl(PR_SET_PDEATHSIG, SIGKILL);
        close(ask[1]);
        if (read(ask[0], &c, 1) == 1) {
            struct err none = {0};
            if (root) /* of a container: all ids are its own already */
                c = map_ids(self, "uid_map", umap, &none) == 0 && map_ids(self, "gid_map", gmap, &none) == 0;
            else if (us && gs && tool("newuidmap", newuidmap, sizeof newuidmap) && tool("newgidmap", newgidmap, sizeof newgidmap) && mapper(newuidmap, self, uid, us))
                c = mapper(newgidmap, self, gid, gs) ? 1 : HALF;
            else
                c = 0;
            (void)!write(answer[1], &c, 1);
        }
        _exit(0);
    }
    close(ask[0]);
    close(answer[1]);
    if (helper < 0)
        return fail(e, errno, "fork");
    int r = unshare(CLONE_NEWUSER);
    if (r < 0)
        fail(e, errno, "make a user namespace (unprivileged user namespaces may be switched off here)");
    else if (write(ask[1], "g", 1) != 1 || read(answer[0], &c, 1) != 1)
        c = 0;
    close(ask[1]);
    close(answer[0]);
    waitpid(helper, NULL, 0);
    if (r < 0)
        return -1;
    strcpy(h->ids, "range");
    if (c == HALF)
        return fail(e, EPERM, "map group ids by newgidmap, as newuidmap did with user ids (both must be setuid root)");
    if (!c) {
        strcpy(h->ids, "one");
        (void)!write_file("/proc/self/setgroups", "deny");
        path_join(map, sizeof map, "0 %u 1", uid);
        if (write_file("/proc/self/uid_map", map) < 0)
            return fail(e, errno, "map the own user id");
        path_join(map, sizeof map, "0 %u 1", gid);
        if (write_file("/proc/self/gid_map", map) < 0)
            return fail(e, errno, "map the own group id");
    }
    if (syscall(SYS_setresgid, 0, 0, 0) < 0 || syscall(SYS_setresuid, 0, 0, 0) < 0)
        return fail(e, errno, "become user 0 of the own user namespace");
    return 0;
}

int ids_setup(struct hub *h, struct err *e)
{
    h->userns = -1;
    if (geteuid() == 0) {
        int r = unshare(CLONE_NEWNS);
        if (r < 0 && errno != EPERM)
            return fail(e, errno, "make a mount namespace");
        if (r == 0 && (r = as_root(h, e)) <= 0)
            return r;
    }
    if (as_user(h, e) < 0)
        return -1;
    return unshare(CLONE_NEWNS) < 0 ? fail(e, errno, "make a mount namespace") : 0;
}
