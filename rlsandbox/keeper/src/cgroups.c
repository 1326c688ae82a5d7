/* The hub's cgroups: one directory a sandbox in each hierarchy where limits can be set. The keeper itself is put in (its
 * episodes inherit it), because moving a process costs half a millisecond and a reset should not pay that. */
#include "cgroups.h"

#include <dirent.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>

#include "sys.h"

enum { OWN = 3 /* the keeper, the episode's init, a helper */, PERIOD_US = 20000, MIN_QUOTA_US = 1000 };

static const char *const controllers[CG_KINDS] = {"memory", "pids", "cpu"};

/* Where this process is in the hierarchy of `controller` ("" is version 2's). */
static int own_path(const char *controller, char *out, size_t cap)
{
    char line[4096];
    FILE *f = fopen("/proc/self/cgroup", "re");
    int r = -1;
    while (f && r < 0 && fgets(line, sizeof line, f)) {
        char *names = strchr(line, ':'), *path = names ? strchr(names + 1, ':') : NULL;
        if (!path)
            continue;
        names++;
        *path++ = 0;
        path[strcspn(path, "\n")] = 0;
        if (!*controller)
            r = *names ? -1 : path_join(out, cap, "%s", path);
        else
            for (char *save = NULL, *w = strtok_r(names, ",", &save); w && r < 0; w = strtok_r(NULL, ",", &save))
                if (strcmp(w, controller) == 0)
                    r = path_join(out, cap, "%s", path);
    }
    if (f)
        fclose(f);
    return r;
}

static unsigned long long start_time(pid_t pid)
{
    char path[64], text[1024];
    path_join(path, sizeof path, "/proc/%d/stat", (int)pid);
    if (read_file_at(AT_FDCWD, path, text, sizeof text) <= 0)
        return 0;
    char *s = strrchr(text, ')');
    unsigned long long t = 0;
    if (!s || sscanf(s + 1, " %*c %*d %*d %*d %*d %*d %*u %*u %*u %*u %*u %*u %*u %*d %*d %*d %*d %*d %*d %llu", &t) != 1)
        return 0;
    return t;
}

static bool may_write(int dir, const char *file)
{
    int fd = openat(dir, file, O_WRONLY | O_CLOEXEC);
    if (fd < 0)
        return false;
    close(fd);
    return true;
}

/* The groups of a hub's sandboxes, those for freezing in them first. Files refuse; so does a group that is in use. */
static void members_remove(int dir)
{
    char ice[300];
    int fd = openat(dir, ".", O_RDONLY | O_DIRECTORY | O_CLOEXEC);
    DIR *d = fd < 0 ? NULL : fdopendir(fd);
    struct dirent *x;
    while (d && (x = readdir(d)))
        if (x->d_name[0] != '.') {
            if (path_join(ice, sizeof ice, "%s/ice", x->d_name) == 0)
                unlinkat(dir, ice, AT_REMOVEDIR);
            unlinkat(dir, x->d_name, AT_REMOVEDIR);
        }
    if (d)
        closedir(d);
}

/* The number of our pid namespace; 0 where /proc does not tell. */
static unsigned long long pid_namespace(void)
{
    struct stat st;
    return stat("/proc/self/ns/pid", &st) < 0 ? 0 : (unsigned long long)st.st_ino;
}

/* What a hub that was killed left: directories whose hub is no more. A hub of another pid namespace (a container
 * that shares the groups with us) has a process id that means nothing here: its directories are left alone. */
static void sweep(int dir)
{
    int fd = openat(dir, ".", O_RDONLY | O_DIRECTORY | O_CLOEXEC);
    DIR *d = fd < 0 ? NULL : fdopendir(fd);
    struct dirent *x;
    int pid;
    unsigned long long born, space, ours = pid_namespace();
    while (d && (x = readdir(d))) {
        if (sscanf(x->d_name, "rlsandbox.%d.%llu.%llu", &pid, &born, &space) != 3)
            continue;
        if (space != ours || start_time(pid) == born)
            continue;
        int sub = openat(dir, x->d_name, O_RDONLY | O_DIRECTORY | O_CLOEXEC);
        if (sub >= 0)
            members_remove(sub);
        fd_close(&sub);
        unlinkat(dir, x->d_name, AT_REMOVEDIR);
    }
    if (d)
        closedir(d);
    else
        fd_close(&fd);
}

static int run_dir(struct hub *h, int base)
{
    sweep(base);
    if (mkdirat(base, h->cg.name, 0755) < 0 && errno != EEXIST)
        return -1;
    int fd = openat(base, h->cg.name, O_RDONLY | O_DIRECTORY | O_CLOEXEC);
    if (fd < 0)
        unlinkat(base, h->cg.name, AT_REMOVEDIR);
    return fd;
}

static bool usable(int dir, enum cg_kind kind, bool v2)
{
    static const char *const files[2][CG_KINDS] = {{"memory.limit_in_bytes", "pids.max", "cpu.cfs_quota_us"}, {"memory.max", "pids.max", "cpu.max"}};
    bool ok = mkdirat(dir, "probe", 0755) == 0;
    if (!ok)
        return false;
    int fd = openat(dir, "probe", O_RDONLY | O_DIRECTORY | O_CLOEXEC);
    ok = fd >= 0 && may_write(fd, files[v2][kind]) && may_write(fd, "cgroup.procs");
    fd_close(&fd);
    unlinkat(dir, "probe", AT_REMOVEDIR);
    return ok;
}

static int open_below(struct hub *h, const char *mount, const char *path)
{
    char full[4400];
    if (path_join(full, sizeof full, "sys/fs/cgroup/%s/%s", mount, path) < 0)
        return -1;
    return k_open_in(h->host, full, O_RDONLY | O_DIRECTORY, K_RESOLVE_IN_ROOT);
}

static void setup_v1(struct hub *h)
{
    char path[4096];
    for (int kind = 0; kind < CG_KINDS; kind++) {
        if (own_path(controllers[kind], path, sizeof path) < 0)
            continue;
        int base = open_below(h, controllers[kind], path);
        if (base < 0) /* in a container the mount shows its own part only */
            base = open_below(h, controllers[kind], "");
        int dir = base < 0 ? -1 : run_dir(h, base);
        if (dir >= 0 && usable(dir, (enum cg_kind)kind, false)) {
            h->cg.dir[kind] = dir;
            h->cg.base[kind] = base;
            continue;
        }
        if (dir >= 0) {
            close(dir);
            unlinkat(base, h->cg.name, AT_REMOVEDIR);
        }
        fd_close(&base);
    }
}

/* A group with processes cannot hand controllers down, so a place is looked for upwards, as far as we may write. */
static void setup_v2(struct hub *h)
{
    char path[4096];
    if (own_path("", path, sizeof path) < 0)
        return;
    for (;;) {
        int base = open_below(h, "", path), dir = -1;
        if (base >= 0) {
            struct stat st;
            bool v2 = fstatat(base, "cgroup.controllers", &st, 0) == 0;
            (void)!write_file_at(base, "cgroup.subtree_control", "+memory +pids +cpu");
            dir = v2 ? run_dir(h, base) : -1;
            for (int kind = 0; dir >= 0 && kind < CG_KINDS; kind++) {
                char word[16];
                path_join(word, sizeof word, "+%s", controllers[kind]);
                if (write_file_at(dir, "cgroup.subtree_control", word) == 0 && usable(dir, (enum cg_kind)kind, true)) {
                    h->cg.dir[kind] = fcntl(dir, F_DUPFD_CLOEXEC, 0);
                    h->cg.base[kind] = fcntl(base, F_DUPFD_CLOEXEC, 0);
                    h->cg.v2 = true;
                }
            }
            if (dir >= 0 && !h->cg.v2)
                unlinkat(base, h->cg.name, AT_REMOVEDIR);
            fd_close(&dir);
            fd_close(&base);
        }
        char *slash = strrchr(path, '/');
        if (h->cg.v2 || !slash)
            return;
        *slash = 0;
    }
}

/* Freezing needs no controller, so beside version 1 an empty version 2 hierarchy does as well. */
static void setup_ice(struct hub *h)
{
    static const char *const mounts[] = {"", "unified"};
    char path[4096];
    struct stat st;
    h->cg.ice = h->cg.ice_base = -1;
    for (int kind = 0; h->cg.v2 && kind < CG_KINDS; kind++)
        if (h->cg.dir[kind] >= 0) { /* below the sandbox's own group, whose limits go on */
            h->cg.ice = fcntl(h->cg.dir[kind], F_DUPFD_CLOEXEC, 0);
            return;
        }
    for (size_t i = 0; h->cg.ice < 0 && i < COUNT_OF(mounts) && own_path("", path, sizeof path) == 0; i++) {
        int base = open_below(h, mounts[i], path);
        if (base >= 0 && fstatat(base, "cgroup.controllers", &st, 0) == 0 && (h->cg.ice = run_dir(h, base)) >= 0)
            h->cg.ice_base = base;
        else
            fd_close(&base);
    }
}

bool cgroups_ice(struct hub *h, const char *member, int fds[2])
{
    char path[160];
    if (h->cg.ice < 0)
        return false;
    mkdirat(h->cg.ice, member, 0755);
    path_join(path, sizeof path, "%s/ice", member);
    mkdirat(h->cg.ice, path, 0755);
    path_join(path, sizeof path, "%s/ice/cgroup.procs", member);
    fds[0] = openat(h->cg.ice, path, O_WRONLY | O_CLOEXEC);
    path_join(path, sizeof path, "%s/ice/cgroup.freeze", member);
    fds[1] = openat(h->cg.ice, path, O_WRONLY | O_CLOEXEC);
    if (fds[0] >= 0 && fds[1] >= 0)
        return true;
    fd_close(&fds[0]);
    fd_close(&fds[1]);
    return false;
}

bool cgroups_off;

void cgroups_setup(struct hub *h)
{
    for (int kind = 0; kind < CG_KINDS; kind++)
        h->cg.dir[kind] = h->cg.base[kind] = -1;
    h->cg.ice = h->cg.ice_base = -1;
    if (cgroups_off)
        return;
    if (path_join(h->cg.name, sizeof h->cg.name, "rlsandbox.%d.%llu.%llu", (int)getpid(), start_time(getpid()),
                  pid_namespace()) < 0)
        return;
    setup_v1(h);
    if (h->cg.dir[CG_MEMORY] < 0 && h->cg.dir[CG_PIDS] < 0)
        setup_v2(h);
    setup_ice(h);
}

static int put(int dir, const char *file, struct err *e, const char *fmt, unsigned long long a, unsigned long long b)
{
    char text[64];
    if (strstr(fmt, "%llu %llu"))
        snprintf(text, sizeof text, "%llu %llu", a, b);
    else
        snprintf(text, sizeof text, "%llu", a);
    if (write_file_at(dir, file, text) < 0)
        return fail(e, errno, "write %s to the sandbox's %s", text, file);
    return 0;
}

static int limit(bool v2, int dir, enum cg_kind kind, uint64_t n, struct err *e)
{
    uint64_t quota;
    switch (kind) {
    case CG_MEMORY:
        if (put(dir, v2 ? "memory.max" : "memory.limit_in_bytes", e, "%llu", n, 0) < 0)
            return -1;
        /* memory in swap would not count; a machine without swap has no such file */
        (void)!write_file_at(dir, "memory.swap.max", "0");
        if (!v2) {
            struct err ignored = {0};
            put(dir, "memory.memsw.limit_in_bytes", &ignored, "%llu", n, 0);
        }
        return 0;
    case CG_PIDS:
        return put(dir, "pids.max", e, "%llu", n + OWN + PIDS_SPARE, 0);
    default:
        quota = n * PERIOD_US / 1000;
        if (quota < MIN_QUOTA_US)
            quota = MIN_QUOTA_US;
        if (v2)
            return put(dir, "cpu.max", e, "%llu %llu", quota, PERIOD_US);
        return put(dir, "cpu.cfs_period_us", e, "%llu", PERIOD_US, 0) < 0 ? -1 : put(dir, "cpu.cfs_quota_us", e, "%llu", quota, 0);
    }
}

static int keep(int dir, const char *file, const char *role, int *fds, size_t *nfds, struct buf *facts)
{
    int fd = openat(dir, file, O_RDONLY | O_CLOEXEC);
    if (fd < 0)
        return 0; /* an older kernel: the keeper does without */
    if (put_str(facts, TAG_CG_FILE, role) < 0) {
        close(fd);
        return -1;
    }
    fds[(*nfds)++] = fd;
    return 0;
}

/* In a container: where the kernel counts what it has killed there for memory, if a limit of its own holds it. */
static int keep_own(struct hub *h, int *fds, size_t *nfds, struct buf *facts)
{
    static const char *const at[][3] = {{"sys/fs/cgroup/memory", "memory.limit_in_bytes", "memory.oom_control"},
                                        {"sys/fs/cgroup", "memory.max", "memory.events"}};
    for (size_t i = 0; i < COUNT_OF(at); i++) {
        char text[32];
        int dir = openat(h->host, at[i][0], O_RDONLY | O_DIRECTORY | O_CLOEXEC), r = 0;
        ssize_t n = dir < 0 ? -1 : read_file_at(dir, at[i][1], text, sizeof text);
        bool limited = n > 0 && n < 17 && text[0] >= '0' && text[0] <= '9'; /* none is "max", or near 2^63 */
        if (limited)
            r = keep(dir, at[i][2], "oom", fds, nfds, facts);
        fd_close(&dir);
        if (limited)
            return r;
    }
    return 0;
}

bool cgroups_any(const struct hub *h)
{
    for (int kind = 0; kind < CG_KINDS; kind++)
        if (h->cg.dir[kind] >= 0)
            return true;
    return false;
}

int cgroups_open(struct hub *h, const char *group, int *fds, unsigned *kinds, unsigned *n)
{
    char path[160];
    for (int kind = 0; kind < CG_KINDS; kind++) {
        if (h->cg.dir[kind] < 0 || (h->cg.v2 && *n)) /* version 2 has one for all */
            continue;
        if ((mkdirat(h->cg.dir[kind], group, 0755) < 0 && errno != EEXIST) || path_join(path, sizeof path, "%s/cgroup.procs", group) < 0)
            return -1;
        int fd = openat(h->cg.dir[kind], path, O_WRONLY | O_CLOEXEC);
        if (fd < 0)
            return -1;
        kinds[*n] = h->cg.v2 ? (1u << CG_KINDS) - 1 : 1u << kind;
        fds[(*n)++] = fd;
    }
    return 0;
}

int cgroups_create(struct hub *h, const char *member, pid_t pid, unsigned in, const uint8_t *p, size_t n, int *fds, size_t *nfds, struct buf *facts, struct err *e)
{
    static const uint16_t tags[CG_KINDS] = {TAG_MEMORY_BYTES, TAG_PIDS, TAG_CPU_MILLI};
    char text[16];
    *nfds = 0;
    if (cgroups_off && keep_own(h, fds, nfds, facts) < 0)
        return fail(e, ENOMEM, "keep facts");
    path_join(text, sizeof text, "%d", (int)pid);
    for (int kind = 0; kind < CG_KINDS; kind++) {
        uint64_t want = tlv_get(p, n, tags[kind], 0);
        int base = h->cg.dir[kind];
        if (!want)
            continue;
        if (base < 0) {
            if (kind == CG_CPU && put_str(facts, TAG_FACT, "limit.cpu=none") < 0)
                return fail(e, ENOMEM, "keep facts");
            continue;
        }
        if (mkdirat(base, member, 0755) < 0 && errno != EEXIST)
            return fail(e, errno, "make a %s group for sandbox %s", controllers[kind], member);
        int dir = openat(base, member, O_RDONLY | O_DIRECTORY | O_CLOEXEC);
        if (dir < 0)
            return fail(e, errno, "open the %s group of sandbox %s", controllers[kind], member);
        bool ok = limit(h->cg.v2, dir, (enum cg_kind)kind, want, e) == 0;
        if (ok && !(in & 1u << kind) && write_file_at(dir, "cgroup.procs", text) < 0)
            ok = fail(e, errno, "put a keeper into its %s group", controllers[kind]) == 0;
        if (ok && put_fmt(facts, TAG_FACT, "limit.%s=cgroup", controllers[kind]) < 0)
            ok = fail(e, ENOMEM, "keep facts") == 0;
        if (ok && kind == CG_MEMORY)
            ok = keep(dir, h->cg.v2 ? "memory.events" : "memory.oom_control", "oom", fds, nfds, facts) == 0 &&
                 keep(dir, h->cg.v2 ? "memory.current" : "memory.usage_in_bytes", "memory", fds, nfds, facts) == 0;
        if (ok && kind == CG_PIDS)
            ok = keep(dir, "pids.current", "pids", fds, nfds, facts) == 0;
        close(dir);
        if (!ok)
            return fail(e, ENOMEM, "open a sandbox's cgroup files");
    }
    return 0;
}

bool cgroups_remove(struct hub *h, const char *member)
{
    bool gone = true;
    char ice[160];
    if (h->cg.ice >= 0 && path_join(ice, sizeof ice, "%s/ice", member) == 0) {
        if (unlinkat(h->cg.ice, ice, AT_REMOVEDIR) < 0 && errno == EBUSY)
            return false;
        if (unlinkat(h->cg.ice, member, AT_REMOVEDIR) < 0 && errno == EBUSY)
            gone = false;
    }
    for (int kind = 0; kind < CG_KINDS; kind++)
        if (h->cg.dir[kind] >= 0 && unlinkat(h->cg.dir[kind], member, AT_REMOVEDIR) < 0 && errno == EBUSY)
            gone = false;
    return gone;
}

static void end(int base, int dir, const char *name)
{
    if (dir < 0 || base < 0)
        return;
    /* the last processes are dying: their groups are free in a moment */
    for (int i = 0; i < 200 && unlinkat(base, name, AT_REMOVEDIR) < 0 && errno == EBUSY; i++) {
        members_remove(dir);
        if (i)
            usleep(5000);
    }
}

void cgroups_end(struct hub *h)
{
    for (int kind = 0; kind < CG_KINDS; kind++)
        end(h->cg.base[kind], h->cg.dir[kind], h->cg.name);
    end(h->cg.ice_base, h->cg.ice, h->cg.name);
}
