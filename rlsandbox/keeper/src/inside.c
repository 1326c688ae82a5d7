/* What a child of the episode's init does: start a program, or one file operation. It runs in the episode, with the
 * episode's rights, on the episode's paths; whatever happens here happens to the episode. */
#include <fcntl.h>
#include <grp.h>
#include <limits.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/resource.h>
#include <sys/socket.h>
#include <sys/stat.h>

#include "inside.h"
#include "sys.h"

_Noreturn void give_up(struct inside *in, struct err *e)
{
    struct buf b = {0};
    char kind = 'F';
    buf_add(&b, &kind, 1);
    put_u32(&b, TAG_ERRNO, (uint32_t)e->no);
    put_str(&b, TAG_WHAT, e->what);
    put_str(&b, TAG_TEXT, strerror(e->no));
    if (in->result >= 0)
        (void)!write_all(in->result, b.p, b.len);
    _exit(127);
}

_Noreturn void done(struct inside *in, struct buf *reply)
{
    char kind = 'R';
    struct buf b = {0};
    if (buf_add(&b, &kind, 1) < 0 || buf_add(&b, reply->p, reply->len) < 0 || write_all(in->result, b.p, b.len) < 0)
        _exit(1);
    _exit(0);
}

/* ---- users ---- */

enum { TABLE_MAX = 16 << 20 };

/* The episode's own table: it may have put anything in its place, a pipe that nobody writes to as well. */
static FILE *table_open(const char *path)
{
    struct stat st;
    int fd = open(path, O_RDONLY | O_NONBLOCK | O_NOCTTY | O_CLOEXEC);
    if (fd >= 0 && (fstat(fd, &st) < 0 || !S_ISREG(st.st_mode) || st.st_size > TABLE_MAX))
        fd_close(&fd);
    FILE *f = fd < 0 ? NULL : fdopen(fd, "r");
    if (!f)
        fd_close(&fd);
    return f;
}

/* One line of /etc/passwd or /etc/group whose field `key` (0 name, 2 number) is `want`; fields are cut in place. */
static int table_find(const char *path, unsigned key, const char *want, char *line, size_t cap, char **field, unsigned nfield)
{
    FILE *f = table_open(path);
    if (!f)
        return -1;
    int found = 0;
    while (!found && fgets(line, (int)cap, f)) {
        size_t n = strlen(line);
        if (n && line[n - 1] == '\n')
            line[n - 1] = 0;
        unsigned k = 0;
        char *s = line;
        for (; k < nfield; k++) {
            field[k] = s;
            s = strchr(s, ':');
            if (!s) {
                k++;
                break;
            }
            *s++ = 0;
        }
        if (k > key && strcmp(field[key], want) == 0) {
            for (; k < nfield; k++)
                field[k] = line + strlen(line);
            found = 1;
        }
    }
    fclose(f);
    return found;
}

static int number(const char *s, unsigned long *out)
{
    char *end;
    if (*s < '0' || *s > '9')
        return -1;
    errno = 0;
    *out = strtoul(s, &end, 10);
    return errno || *end || *out > 65535 * 65536ul ? -1 : 0;
}

static int user_find(struct inside *in, const char *spec, struct err *e)
{
    static char line[4096];
    char name[128], *field[7], *group;
    unsigned long v;
    if (path_join(name, sizeof name, "%s", spec) < 0)
        return fail(e, EINVAL, "find user %.60s: the name is too long", spec);
    group = strchr(name, ':');
    if (group)
        *group++ = 0;
    bool numeric = number(name, &v) == 0;
    int found = table_find("/etc/passwd", numeric ? 2 : 0, name, line, sizeof line, field, 7);
    if (found == 1) {
        unsigned long g;
        if (number(field[2], &v) < 0 || number(field[3], &g) < 0)
            return fail(e, EINVAL, "find user %s: /etc/passwd has no number for it", name);
        in->gid = (gid_t)g;
        path_join(in->name, sizeof in->name, "%s", field[0]);
        path_join(in->home, sizeof in->home, "%s", field[5]);
        path_join(in->shell, sizeof in->shell, "%s", field[6]);
    } else if (!numeric && strcmp(name, "root") == 0) {
        v = 0;
    } else if (!numeric) {
        return fail(e, ENOENT, "find user %s in the sandbox's /etc/passwd", name);
    } else
        in->gid = (gid_t)v;
    in->uid = (uid_t)v;
    if (group) {
        if (number(group, &v) < 0) {
            if (table_find("/etc/group", 0, group, line, sizeof line, field, 3) != 1 || number(field[2], &v) < 0)
                return fail(e, ENOENT, "find group %s in the sandbox's /etc/group", group);
        }
        in->gid = (gid_t)v;
    }
    in->has_user = true;
    return 0;
}

/* Supplementary groups of a named user, as login has them. */
static int user_groups(struct inside *in, gid_t *g, size_t room)
{
    static char line[16384];
    size_t n = 0;
    g[n++] = in->gid;
    FILE *f = *in->name ? table_open("/etc/group") : NULL;
    if (!f)
        return (int)n;
    while (fgets(line, sizeof line, f)) {
        char *save = NULL, *field[4] = {0};
        size_t len = strlen(line);
        if (len && line[len - 1] == '\n')
            line[len - 1] = 0;
        char *s = line;
        unsigned k = 0;
        while (s && k < 4) {
            field[k++] = s;
            s = strchr(s, ':');
            if (s)
                *s++ = 0;
        }
        unsigned long v;
        if (k < 4 || number(field[2], &v) < 0)
            continue;
        for (char *m = strtok_r(field[3], ",", &save); m; m = strtok_r(NULL, ",", &save))
            if (strcmp(m, in->name) == 0 && v != in->gid && n < room) {
                g[n++] = (gid_t)v;
                break;
            }
    }
    fclose(f);
    return (int)n;
}

static int user_become(struct inside *in, struct err *e)
{
    gid_t groups[64];
    if (!in->has_user || (in->uid == geteuid() && in->gid == getegid()))
        return 0;
    int n = user_groups(in, groups, COUNT_OF(groups));
    for (int fd = 0; fd <= 9; fd++) { /* its own pipes: /dev/stdout can be opened again */
        struct stat st;
        if (fstat(fd, &st) == 0 && S_ISFIFO(st.st_mode) && st.st_uid == geteuid())
            (void)!fchown(fd, in->uid, in->gid);
    }
    if (syscall(SYS_setgroups, n, groups) < 0)
        return fail(e, errno, "set the groups of user %u", in->uid);
    if (syscall(SYS_setresgid, in->gid, in->gid, in->gid) < 0)
        return fail(e, errno, "become group %u", in->gid);
    if (syscall(SYS_setresuid, in->uid, in->uid, in->uid) < 0)
        return fail(e, errno, "become user %u", in->uid);
    return 0;
}

/* ---- programs ---- */

uint32_t inside_nofile, inside_nproc;
const char *inside_user;
pid_t inside_parent;

int inside_ids(const char *user, uid_t *uid, gid_t *gid, char name[64], struct err *e)
{
    struct inside in = {.result = -1};
    if (user_find(&in, user, e) < 0)
        return -1;
    *uid = in.uid;
    *gid = in.gid;
    memcpy(name, in.name, sizeof in.name);
    return 0;
}

/* Who a command is, where there is only one choice. */
static int user_only(struct inside *in, bool asked, struct err *e)
{
    struct inside one = {.result = -1};
    if (user_find(&one, inside_user, e) < 0)
        return -1;
    if (asked && in->uid != one.uid)
        return fail(e, EPERM, "run as user %u: in mode manifest all commands are user %u's", in->uid, one.uid);
    if (!asked)
        user_find(in, inside_user, e);
    return 0;
}

static int set_limits(struct inside *in, struct err *e)
{
    struct rlimit most;
    if (inside_nofile && setrlimit(RLIMIT_NOFILE, &(struct rlimit){inside_nofile, inside_nofile}) < 0)
        return fail(e, errno, "set the limit of open files");
    if (inside_nproc && getrlimit(RLIMIT_NPROC, &most) == 0) {
        rlim_t n = most.rlim_max < inside_nproc ? most.rlim_max : inside_nproc;
        if (setrlimit(RLIMIT_NPROC, &(struct rlimit){n, n}) < 0)
            return fail(e, errno, "set the limit of processes");
    }
    static const struct { const char *name; int what; } names[] = {
        {"nofile", RLIMIT_NOFILE}, {"nproc", RLIMIT_NPROC}, {"core", RLIMIT_CORE}, {"cpu", RLIMIT_CPU},
        {"fsize", RLIMIT_FSIZE}, {"stack", RLIMIT_STACK}, {"as", RLIMIT_AS}, {"memlock", RLIMIT_MEMLOCK},
    };
    struct tlv_in it = {in->p, in->n};
    struct tlv t;
    while (tlv_next(&it, &t) == 1) {
        char s[64], *eq;
        if (t.tag != TAG_RLIMIT)
            continue;
        if (t.len >= sizeof s)
            return fail(e, EINVAL, "read a resource limit: it is too long");
        memcpy(s, t.p, t.len);
        s[t.len] = 0;
        eq = strchr(s, '=');
        if (!eq)
            return fail(e, EINVAL, "read resource limit %s: it has no `=`", s);
        *eq++ = 0;
        size_t i = 0;
        while (i < COUNT_OF(names) && strcmp(names[i].name, s))
            i++;
        if (i == COUNT_OF(names))
            return fail(e, EINVAL, "set resource limit %s: unknown", s);
        rlim_t v = strcmp(eq, "unlimited") == 0 ? RLIM_INFINITY : strtoull(eq, NULL, 10);
        struct rlimit r = {v, v};
        if (setrlimit(names[i].what, &r) < 0)
            return fail(e, errno, "set resource limit %s to %s", s, eq);
    }
    return 0;
}

static const char *env_get(char **env, const char *name)
{
    size_t n = strlen(name);
    for (; *env; env++)
        if (strncmp(*env, name, n) == 0 && (*env)[n] == '=')
            return *env + n + 1;
    return NULL;
}

static void env_default(char **env, size_t *n, const char *name, const char *value)
{
    char *s;
    if (env_get(env, name) || !*value || asprintf(&s, "%s=%s", name, value) < 0)
        return;
    env[(*n)++] = s;
    env[*n] = NULL;
}

/* exec along PATH the way execvpe does, except that a file without `#!` is no shell script */
static void exec_path(char **argv, char **env)
{
    char path[PATH_MAX + NAME_MAX + 2];
    if (strchr(argv[0], '/')) {
        execve(argv[0], argv, env);
        return;
    }
    const char *s = env_get(env, "PATH");
    int no = ENOENT;
    if (!s)
        s = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin";
    if (!*argv[0]) {
        errno = ENOENT;
        return;
    }
    for (;;) {
        const char *end = strchrnul(s, ':');
        if (path_join(path, sizeof path, "%.*s%s%s", (int)(end - s), s, end > s ? "/" : "", argv[0]) == 0) {
            execve(path, argv, env);
            if (errno == EACCES)
                no = EACCES;
            else if (errno != ENOENT && errno != ENOTDIR)
                return;
        }
        if (!*end)
            break;
        s = end + 1;
    }
    errno = no;
}

static int script_place(const struct tlv *t, struct err *e)
{
    int fd = (int)syscall(SYS_memfd_create, "script", 3 /* CLOEXEC, ALLOW_SEALING */);
    if (fd < 0)
        return fail(e, errno, "make a memory file for the script");
    if (write_all(fd, t->p, t->len) < 0)
        return fail(e, errno, "write the script to its memory file");
    lseek(fd, 0, SEEK_SET);
    if (fcntl(fd, F_ADD_SEALS, F_SEAL_SEAL | F_SEAL_SHRINK | F_SEAL_GROW | F_SEAL_WRITE) < 0)
        return fail(e, errno, "seal the script");
    if (dup2(fd, 9) < 0)
        return fail(e, errno, "place the script");
    if (fd != 9)
        close(fd);
    return 0;
}

static _Noreturn void run_program(struct inside *in, uint8_t *body)
{
    struct err e = {0};
    struct tlv_in it = {in->p, in->n};
    struct tlv t, script = {0};
    size_t na = 0, ne = 0;
    char cwd[PATH_MAX];
    while (tlv_next(&it, &t) == 1) {
        na += t.tag == TAG_ARG;
        ne += t.tag == TAG_ENV;
        if (t.tag == TAG_SCRIPT)
            script = t;
    }
    char **argv = calloc(na + 1, sizeof *argv), **env = calloc(ne + 8, sizeof *env);
    if (!argv || !env) {
        fail(&e, ENOMEM, "make room for %zu arguments", na);
        give_up(in, &e);
    }
    if (set_limits(in, &e) < 0)
        give_up(in, &e);
    if (script.p && script_place(&script, &e) < 0)
        give_up(in, &e);
    int cwd_len = tlv_str(in->p, in->n, TAG_CWD, cwd, sizeof cwd);
    if (cwd_len == -2) {
        fail(&e, ENAMETOOLONG, "read the working directory");
        give_up(in, &e);
    }
    umask((mode_t)tlv_get(in->p, in->n, TAG_UMASK, 022) & 0777);
    if (user_become(in, &e) < 0)
        give_up(in, &e);
    if (cwd_len > 0 && chdir(cwd) < 0) {
        fail(&e, errno, "enter the working directory %.200s", cwd);
        give_up(in, &e);
    }
    /* strings end where the next field's number begins: read all of it first, then put the zeroes */
    it = (struct tlv_in){in->p, in->n};
    size_t a = 0, v = 0;
    while (tlv_next(&it, &t) == 1) {
        if (t.tag == TAG_ARG)
            argv[a++] = (char *)(body + (t.p - body));
        else if (t.tag == TAG_ENV)
            env[v++] = (char *)(body + (t.p - body));
    }
    it = (struct tlv_in){in->p, in->n};
    struct tlv before = {0};
    while (tlv_next(&it, &t) == 1) {
        if (before.tag == TAG_ARG || before.tag == TAG_ENV)
            body[before.p - body + before.len] = 0;
        before = t;
    }
    if (before.tag == TAG_ARG || before.tag == TAG_ENV)
        body[before.p - body + before.len] = 0;
    if (in->has_user) {
        env_default(env, &v, "HOME", *in->home ? in->home : in->uid ? "/" : "/root");
        env_default(env, &v, "USER", in->name);
        env_default(env, &v, "LOGNAME", in->name);
        env_default(env, &v, "SHELL", in->shell);
    } else if (geteuid() == 0) { /* root's usual ones, read from nowhere: most commands come this way */
        env_default(env, &v, "HOME", "/root");
        env_default(env, &v, "USER", "root");
        env_default(env, &v, "LOGNAME", "root");
        env_default(env, &v, "SHELL", "/bin/sh");
    } else { /* the keeper is somebody without rights, and so are commands */
        struct err none = {0};
        char id[16];
        path_join(id, sizeof id, "%u", (unsigned)geteuid());
        bool known = user_find(in, id, &none) == 0;
        env_default(env, &v, "HOME", known && *in->home ? in->home : "/");
        env_default(env, &v, "USER", known ? in->name : "");
        env_default(env, &v, "LOGNAME", known ? in->name : "");
        env_default(env, &v, "SHELL", known ? in->shell : "");
    }
    exec_path(argv, env);
    fail(&e, errno, "start %.200s", argv[0]);
    give_up(in, &e);
}

/* ---- the way in ---- */

enum { FIRST_OWN = 20 }; /* above the descriptors that a request brings */

/* Puts the descriptors that came (in emsg order) on their numbers; `result` ends on a close-on-exec one above. */
static int place_fds(struct inside *in, const struct emsg *m, const int *fds, int *body, struct err *e)
{
    static const struct { uint32_t bit; int to; } where[] = {
        {FD_IN, 0}, {FD_OUT, 1}, {FD_ERR, 2}, {FD_CTL_IN, 8}, {FD_CTL_OUT, 9},
    };
    int at[FD_KINDS], n = 0;
    for (int bit = 0; bit < FD_KINDS; bit++) {
        at[bit] = -1;
        if (m->fds & 1u << bit) { /* out of the way of 0..9 first */
            at[bit] = fcntl(fds[n++], F_DUPFD_CLOEXEC, 10);
            if (at[bit] < 0)
                return fail(e, errno, "place descriptors");
        }
    }
    in->result = at[0];
    *body = at[6];
    k_close_range(0, 9);
    for (size_t i = 0; i < COUNT_OF(where); i++)
        for (int bit = 0; bit < FD_KINDS; bit++)
            if (where[i].bit == 1u << bit && at[bit] >= 0 && dup2(at[bit], where[i].to) < 0)
                return fail(e, errno, "place descriptor %d", where[i].to);
    if (!(m->fds & FD_IN)) {
        int null = in->null >= 0 ? in->null : open("/dev/null", O_RDWR | O_CLOEXEC);
        if (null < 0)
            return fail(e, errno, "open /dev/null");
        if (null == 0 ? fcntl(0, F_SETFD, 0) < 0 : dup2(null, 0) < 0)
            return fail(e, errno, "place descriptor 0");
        if (null > 2)
            close(null);
    }
    if (!(m->fds & FD_OUT) && dup2(0, 1) < 0)
        return fail(e, errno, "place descriptor 1");
    if (!(m->fds & FD_ERR) && dup2(m->op == OP_SPAWN ? 1 : 0, 2) < 0)
        return fail(e, errno, "place descriptor 2");
    return 0;
}

/* What is the same for every request. */
static void begin(void)
{
    setsid();
    if (inside_user && /* until it is that user's: then it is found by that */
        (prctl(PR_SET_PDEATHSIG, SIGKILL) < 0 || getppid() != inside_parent)) /* it was gone before that was said */
        _exit(1);
    prctl(PR_SET_CHILD_SUBREAPER, 1);
    (void)!write_file("/proc/self/oom_score_adj", "1000"); /* before any keeper; fails in a foreign /proc, where it may */
}

static _Noreturn void go(struct inside *given, const struct emsg *m, uint8_t *body, size_t n, const int *fds)
{
    struct inside in = *given;
    struct err e = {0};
    int memory = -1;
    char user[128], path[PATH_MAX];
    if (place_fds(&in, m, fds, &memory, &e) < 0)
        give_up(&in, &e);
    if (memory >= 0) {
        struct stat st;
        if (fstat(memory, &st) < 0 || st.st_size <= 0) {
            fail(&e, EIO, "map the request");
            give_up(&in, &e);
        }
        /* its last byte is room for a zero */
        body = mmap(NULL, (size_t)st.st_size, PROT_READ | PROT_WRITE, MAP_PRIVATE, memory, 0);
        if (body == MAP_FAILED) {
            fail(&e, errno, "map the request");
            give_up(&in, &e);
        }
        n = (size_t)st.st_size - 1;
        close(memory);
    }
    in.p = body;
    in.n = n;
    int r = tlv_str(body, n, TAG_USER, user, sizeof user);
    if (r == -2) {
        fail(&e, EINVAL, "read the user's name");
        give_up(&in, &e);
    }
    if (r > 0 && user_find(&in, user, &e) < 0)
        give_up(&in, &e);
    if (inside_user && user_only(&in, r > 0, &e) < 0)
        give_up(&in, &e);
    if (m->op == OP_SPAWN)
        run_program(&in, body);
    in.above = (inside_user || geteuid() != 0) && r <= 0 && tlv_get(body, n, TAG_FLAGS, 0) & AS_KEEPER;
    if (!in.above && user_become(&in, &e) < 0)
        give_up(&in, &e);
    if (tlv_str(body, n, TAG_PATH, path, sizeof path) <= 0) {
        fail(&e, EINVAL, "read the path");
        give_up(&in, &e);
    }
    if (chdir("/") < 0)
        _exit(1);
    umask(022);
    file_op(&in, m->op, path, &e);
}

_Noreturn void inside_run(const struct emsg *m, uint8_t *body, size_t n, const int *fds)
{
    begin();
    go(&(struct inside){.result = -1, .null = -1}, m, body, n, fds);
}

_Noreturn void inside_wait(int sock)
{
    static union {
        struct emsg m;
        uint8_t room[EMSG_HEAD + EMSG_INLINE + 64];
    } u;
    struct inside in = {.result = -1};
    int fds[FD_KINDS + 1], own = fcntl(sock, F_DUPFD_CLOEXEC, FIRST_OWN);
    size_t nfds = COUNT_OF(fds);
    int null = open("/dev/null", O_RDWR | O_CLOEXEC);
    in.null = null < 0 ? -1 : fcntl(null, F_DUPFD_CLOEXEC, FIRST_OWN);
    k_close_range(0, FIRST_OWN - 1); /* the init's own, which its other children close as well */
    begin();
    prctl(PR_SET_NAME, "rls-standby");
    ssize_t n = own < 0 ? -1 : msg_recv(own, &u, sizeof u, fds, &nfds);
    if (n < (ssize_t)EMSG_HEAD || u.m.body > (size_t)n - EMSG_HEAD)
        _exit(0); /* the keeper has no use for it any more */
    /* who was killed meanwhile does not come here: the keeper gives the request to another one then */
    if (send(own, "t", 1, MSG_NOSIGNAL) != 1)
        _exit(0);
    close(own);
    go(&in, &u.m, u.room + EMSG_HEAD, u.m.body, fds);
}
