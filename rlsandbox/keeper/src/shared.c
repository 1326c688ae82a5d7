#include "shared.h"

#include <sched.h>
#include <signal.h>
#include <stdio.h>
#include <string.h>
#include <sys/mount.h>
#include <sys/prctl.h>
#include <sys/stat.h>
#include <sys/sysmacros.h>
#include <sys/wait.h>

#include "sys.h"
#include "trees.h"

#define PLACE "place" /* below the container's volume */
static const uint64_t END_NS = 10000000000;

bool shared_here(const char *run)
{
    char dir[100];
    struct stat before, after;
    int status = -1;
    if (path_join(dir, sizeof dir, "%s/try", run) < 0 || (mkdir(dir, 0700) < 0 && errno != EEXIST) || stat(dir, &before) < 0)
        return false;
    pid_t p = fork();
    if (p == 0) {
        prctl(PR_SET_PDEATHSIG, SIGKILL);
        if (unshare(CLONE_NEWNS) < 0 || (mount(NULL, "/", NULL, MS_REC | MS_PRIVATE, NULL) < 0 && errno != EINVAL) ||
            mount("rls", dir, "tmpfs", MS_NOSUID | MS_NODEV, "mode=0700") < 0)
            _exit(1);
        _exit(0);
    }
    while (p > 0 && waitpid(p, &status, 0) < 0 && errno == EINTR)
        ;
    bool seen = status == 0 && stat(dir, &after) == 0 && after.st_dev != before.st_dev;
    if (seen)
        umount2(dir, MNT_DETACH);
    rmdir(dir);
    return seen;
}

void shared_leave(const char *run)
{
    char dir[100];
    if (path_join(dir, sizeof dir, "%s/" PLACE, run) == 0)
        while (umount2(dir, MNT_DETACH) == 0)
            ;
}

/* ---- the place ---- */

static int make(const char *path, mode_t mode, struct err *e)
{
    return mkdir(path, mode) < 0 || chmod(path, mode) < 0 ? fail(e, errno, "make directory %s of the keeper's place", path) : 0;
}

static const struct { const char *name; unsigned minor, major; } nodes[] = {
    {"null", 3, 1}, {"zero", 5, 1}, {"full", 7, 1}, {"random", 8, 1}, {"urandom", 9, 1}, {"tty", 0, 5},
};

/* Mount points and links of /dev, which is shown read-only; nodes of one that is cannot be written to, so each episode has some. */
static int dev_frame(struct err *e)
{
    static const struct { const char *name, *to; } links[] = {
        {"fd", "/proc/self/fd"}, {"stdin", "/proc/self/fd/0"}, {"stdout", "/proc/self/fd/1"}, {"stderr", "/proc/self/fd/2"}, {"ptmx", "pts/ptmx"},
    };
    char path[64];
    if (make("k/dev/shm", 01777, e) < 0 || make("k/dev/pts", 0755, e) < 0 || make("k/dev/mqueue", 0755, e) < 0)
        return -1;
    for (size_t i = 0; i < COUNT_OF(nodes); i++) {
        path_join(path, sizeof path, "k/dev/%s", nodes[i].name);
        int fd = open(path, O_CREAT | O_EXCL | O_RDONLY | O_CLOEXEC, 0600);
        if (fd < 0)
            return fail(e, errno, "make mount point /dev/%s", nodes[i].name);
        close(fd);
    }
    for (size_t i = 0; i < COUNT_OF(links); i++) {
        path_join(path, sizeof path, "k/dev/%s", links[i].name);
        if (symlink(links[i].to, path) < 0)
            return fail(e, errno, "make link /dev/%s", links[i].name);
    }
    return 0;
}

/* `path` below the view's root in the top layer: each directory on the way as the image has it. Its last directory, open, and what
 * `name` is then; -1 with errno. */
static int in_skeleton(char *path, const char **name)
{
    int base = open_dir(AT_FDCWD, "k/l/0"), skel = open_dir(AT_FDCWD, "k/skel"), r = base < 0 || skel < 0 ? -1 : 0;
    char *s = path + 1, *slash;
    for (; r == 0 && (slash = strchr(s, '/')); s = slash + 1) {
        struct stat st;
        *slash = 0;
        int b = open_dir(base, s), no = 0;
        bool made = b >= 0 && mkdirat(skel, s, 0700) == 0;
        int k = b < 0 ? -1 : open_dir(skel, s);
        if (b < 0 || k < 0 || fstat(b, &st) < 0 || (made && copy_meta(b, k, &st) < 0))
            r = -1, no = errno;
        fd_close(&base);
        fd_close(&skel);
        base = b;
        skel = k;
        errno = no;
    }
    int no = errno;
    fd_close(&base);
    if (r < 0)
        fd_close(&skel);
    errno = no;
    *name = s;
    return skel;
}

/* A directory is empty in the view, a file is not there. `path` is written to. */
static int hide(char *path, struct err *e)
{
    const char *name;
    struct stat st;
    if (strchr(path, '\\')) /* a name written in numbers: none that a pod should have */
        return fail(e, EINVAL, "hide what is mounted on %.200s", path);
    if (lstat(path, &st) < 0) /* another one may lie on it */
        return errno == ENOENT ? 0 : fail(e, errno, "hide what is mounted on %.200s", path);
    bool folder = S_ISDIR(st.st_mode);
    int dir = in_skeleton(path, &name), own = -1;
    if (dir < 0) {
        if (errno == ENOENT) /* inside another one, and so hidden with it */
            return 0;
        return fail(e, errno, "hide what is mounted on %.200s", name);
    }
    int r = folder ? mkdirat(dir, name, 0700) : mknodat(dir, name, S_IFCHR, 0);
    if (folder && (r == 0 || errno == EEXIST)) { /* it may be on the way to another one that is hidden */
        own = open_dir(dir, name);
        r = own < 0 || fchown(own, st.st_uid, st.st_gid) < 0 || fchmod(own, st.st_mode & 07777) < 0 ? -1 : set_opaque(own);
    } else if (r < 0 && errno == EEXIST)
        r = 0;
    int no = errno;
    fd_close(&own);
    close(dir);
    return r < 0 ? fail(e, no, "hide what is mounted on %.200s", name) : 0;
}

/* What is mounted inside the container's root is no part of the base, but an old gVisor shows it there: the pod's volumes, with
 * the keeper's own, which is hidden whatever it is. */
static int mounts_hide(const char *run, struct err *e)
{
    static const char *const others[] = {"/", "/proc", "/sys", "/dev", "/etc/hosts", "/etc/hostname", "/etc/resolv.conf"};
    static char text[256 << 10];
    char path[4096], *save = NULL;
    size_t n = strlen(run);
    while (n > 1 && run[n - 1] == '/')
        n--;
    ssize_t got = read_file_at(AT_FDCWD, "/proc/self/mounts", text, sizeof text);
    if (got <= 0 || got == sizeof text - 1)
        return fail(e, got < 0 ? errno : E2BIG, "read which mounts there are");
    if (path_join(path, sizeof path, "%.*s", (int)n, run) < 0 || hide(path, e) < 0)
        return -1;
    for (char *line = strtok_r(text, "\n", &save); line; line = strtok_r(NULL, "\n", &save)) {
        bool skip = sscanf(line, "%*s %4095s", path) != 1 || strncmp(path, "/dev/", 5) == 0 || strncmp(path, "/proc/", 6) == 0 || strncmp(path, "/sys/", 5) == 0;
        for (size_t i = 0; i < COUNT_OF(others); i++)
            skip |= strcmp(path, others[i]) == 0;
        skip |= strncmp(path, run, n) == 0 && (!path[n] || path[n] == '/'); /* what was mounted here just now */
        if (!skip && hide(path, e) < 0)
            return -1;
    }
    return 0;
}

/* The top lower layer: what the kubelet mounts over files of /etc, as it is now, since what is mounted inside the container's
 * root is not part of the base; and mount points that the image has not. */
static int skeleton(const char *run, struct err *e)
{
    static const char *const wanted[] = {"proc", "sys", "dev", "tmp"}, *const files[] = {"hosts", "hostname", "resolv.conf"};
    char path[64];
    struct stat st;
    int r = dev_frame(e);
    for (size_t i = 0; r == 0 && i < COUNT_OF(wanted); i++) {
        path_join(path, sizeof path, "k/l/0/%s", wanted[i]);
        if (lstat(path, &st) < 0) {
            path_join(path, sizeof path, "k/skel/%s", wanted[i]);
            r = make(path, i == 3 ? 01777 : 0755, e);
        }
    }
    int from = open_dir(AT_FDCWD, "k/l/0/etc"), shown = open_dir(AT_FDCWD, "/etc"), etc = -1;
    if (r == 0 && from >= 0 && shown >= 0 && fstat(from, &st) == 0) { /* an image without one needs none of them */
        if ((r = make("k/skel/etc", 0755, e)) == 0 && (etc = open_dir(AT_FDCWD, "k/skel/etc")) < 0)
            r = fail(e, errno, "open the view's /etc");
        for (size_t i = 0; r == 0 && i < COUNT_OF(files); i++)
            if (copy_tree(shown, files[i], etc, files[i], 0) < 0 && errno != ENOENT)
                r = fail(e, errno, "copy /etc/%s", files[i]);
        if (r == 0 && copy_meta(from, etc, &st) < 0)
            r = fail(e, errno, "make the view's /etc like the image's");
    }
    fd_close(&from);
    fd_close(&shown);
    fd_close(&etc);
    return r < 0 ? r : mounts_hide(run, e);
}

/* The one thing of the container's that an episode can write to: terminals are made there. What they are like, as it was. */
static struct {
    const char *path;
    struct stat st; /* st_mode 0: not there */
} terminals[] = {{"/dev/pts", {0}}, {"/dev/pts/ptmx", {0}}};

static int terminals_restore(struct err *e)
{
    for (size_t i = 0; i < COUNT_OF(terminals); i++) {
        const struct stat *was = &terminals[i].st;
        struct stat st;
        if (!was->st_mode)
            continue;
        if (lstat(terminals[i].path, &st) < 0 ||
            ((st.st_uid != was->st_uid || st.st_gid != was->st_gid) && lchown(terminals[i].path, was->st_uid, was->st_gid) < 0) ||
            (st.st_mode != was->st_mode && chmod(terminals[i].path, was->st_mode & 07777) < 0))
            return fail(e, errno, "put %s back", terminals[i].path);
    }
    return 0;
}

int shared_enter(struct keeper *k, struct err *e)
{
    static const char *const dirs[] = {"proc", "dev", "dev/pts", "k", "k/l", "k/l/0", "k/u", "k/v", "k/b", "k/s", "k/m", "k/skel", "k/empty", "k/dev"};
    char place[100];
    struct stat st;
    shared_mounts = true;
    if (path_join(place, sizeof place, "%s/" PLACE, k->set.place) < 0 || (mkdir(place, 0700) < 0 && errno != EEXIST))
        return fail(e, errno, "make a directory for the keeper's place in %s", k->set.place);
    shared_leave(k->set.place); /* of a keeper that was killed */
    if (mount("rls", place, "tmpfs", MS_NOSUID | MS_NODEV, "mode=0755,size=8m") < 0)
        return fail(e, errno, "mount a tmpfs for the keeper's place");
    if (chdir(place) < 0)
        return fail(e, errno, "enter the keeper's place");
    for (size_t i = 0; i < COUNT_OF(dirs); i++)
        if (make(dirs[i], 0755, e) < 0)
            return -1;
    if (mount("rls", "proc", "proc", MS_NOSUID | MS_NODEV | MS_NOEXEC, NULL) < 0)
        return fail(e, errno, "mount /proc of the keeper's place");
    if (mount("/", "k/l/0", NULL, MS_BIND, NULL) < 0)
        return fail(e, errno, "bind the container's root");
    if (stat("/dev/pts", &st) == 0 && mount("/dev/pts", "dev/pts", NULL, MS_BIND, NULL) < 0)
        return fail(e, errno, "bind /dev/pts");
    if (skeleton(k->set.place, e) < 0)
        return -1;
    if (chroot(".") < 0 || chdir("/") < 0)
        return fail(e, errno, "chroot to the keeper's place");
    for (size_t i = 0; i < COUNT_OF(terminals); i++)
        if (lstat(terminals[i].path, &terminals[i].st) < 0)
            terminals[i].st.st_mode = 0;
    if (stat("/k/l/0", &st) < 0 || top_like("/k/skel", &st, e) < 0)
        return fail(e, errno, "look at the container's root");
    return 0;
}

/* ---- views ---- */

static int overlay(struct keeper *k, bool upper, const char *at, struct err *e)
{
    char opt[4000]; /* one page is taken */
    size_t n = 0;
    if (upper)
        n = (size_t)snprintf(opt, sizeof opt, "upperdir=/k/u/%u/u/0,workdir=/k/u/%u/w/0,", k->generation, k->generation);
    n += (size_t)snprintf(opt + n, sizeof opt - n, "lowerdir=");
    for (unsigned j = 0; j < k->nstack; j++)
        n += (size_t)snprintf(opt + n, sizeof opt - n, "/k/s/%u/u/0:", k->stack[j]); /* at most MAX_CHAIN */
    snprintf(opt + n, sizeof opt - n, "/k/skel:/k/l/0");
    return mount("rls", at, "overlay", upper ? 0 : MS_RDONLY, opt) < 0 ? fail(e, errno, "mount an overlay (%u layers)", k->nstack) : 0;
}

/* Mounted only as long as it takes to open it: the descriptor keeps it. */
int shared_below(struct keeper *k, struct err *e)
{
    char at[32];
    path_join(at, sizeof at, "/k/b/%d", (int)getpid());
    if (mkdir(at, 0700) < 0 && errno != EEXIST) /* of one with that number that was killed there */
        return fail(e, errno, "make directory %s", at);
    int fd = overlay(k, false, at, e) < 0 ? -1 : open(at, O_PATH | O_DIRECTORY | O_CLOEXEC);
    if (fd < 0)
        fail(e, errno, "open the view below");
    umount2(at, MNT_DETACH);
    rmdir(at);
    return fd;
}

int shared_scratch(struct err *e)
{
    char at[32];
    path_join(at, sizeof at, "/k/b/%d", (int)getpid());
    if ((mkdir(at, 0700) < 0 && errno != EEXIST) || mount("rls", at, "tmpfs", MS_NOSUID | MS_NODEV, "mode=0755") < 0)
        return fail(e, errno, "mount a tmpfs to put layers together");
    int r = chdir(at) < 0 ? fail(e, errno, "enter it") : 0;
    umount2(at, MNT_DETACH);
    rmdir(at);
    return r;
}

static int on(int root, const char *target, const char *from, const char *type, unsigned long flags, const char *opt, struct err *e)
{
    int to = k_open_in(root, target, O_PATH | O_DIRECTORY, K_RESOLVE_IN_ROOT);
    int r = to < 0 || fchdir(to) < 0 || mount(from, ".", type, flags, opt) < 0 ? fail(e, errno, "mount on %s", target) : 0;
    fd_close(&to);
    return r;
}

/* /dev, and in it the nodes, which go with the upper layer that they lie beside. */
static int nodes_place(struct keeper *k, int root, struct err *e)
{
    char path[64];
    if (on(root, "/dev", "rls", "overlay", MS_RDONLY | MS_NOEXEC, "lowerdir=/k/dev:/k/empty", e) < 0)
        return -1;
    int dev = k_open_in(root, "/dev", O_PATH | O_DIRECTORY, K_RESOLVE_IN_ROOT);
    int r = dev < 0 || fchdir(dev) < 0 ? fail(e, errno, "open the view's /dev") : 0;
    for (size_t i = 0; r == 0 && i < COUNT_OF(nodes); i++) {
        path_join(path, sizeof path, "/k/u/%u/dev.%s", k->generation, nodes[i].name);
        if (mknod(path, S_IFCHR | 0666, makedev(nodes[i].major, nodes[i].minor)) < 0 || chmod(path, 0666) < 0 || mount(path, nodes[i].name, NULL, MS_BIND, NULL) < 0)
            r = fail(e, errno, "make /dev/%s", nodes[i].name);
    }
    fd_close(&dev);
    path_join(path, sizeof path, "/k/u/%u/shm", k->generation);
    return r < 0 ? r : on(root, "/dev/shm", path, NULL, MS_BIND, NULL, e);
}

int shared_view(struct keeper *k, int *root_fd, int *proc_fd, struct err *e)
{
    char at[32];
    struct stat st;
    path_join(at, sizeof at, SHARED_VIEWS "%u", k->generation);
    if (mkdir(at, 0700) < 0 && errno != EEXIST)
        return fail(e, errno, "make directory %s", at);
    if (overlay(k, true, at, e) < 0)
        return -1;
    int root = open(at, O_PATH | O_DIRECTORY | O_CLOEXEC);
    if (root < 0)
        return fail(e, errno, "open the new root");
    if (nodes_place(k, root, e) < 0)
        return -1;
    /* nothing can be bound read-only here, so all of /proc is: in it are settings of the pod's network */
    if (on(root, "/proc", "rls", "proc", MS_NOSUID | MS_NODEV | MS_NOEXEC | MS_RDONLY, NULL, e) < 0 ||
        on(root, "/dev/mqueue", "rls", "mqueue", MS_NOSUID | MS_NODEV | MS_NOEXEC, NULL, e) < 0 ||
        (stat("/dev/pts/ptmx", &st) == 0 && on(root, "/dev/pts", "/dev/pts", NULL, MS_BIND, NULL, e) < 0))
        return -1;
    *proc_fd = k_open_in(root, "/proc", O_PATH | O_DIRECTORY, K_RESOLVE_IN_ROOT);
    if (*proc_fd < 0)
        return fail(e, errno, "open the new /proc");
    if (fchdir(root) < 0 || chroot(".") < 0 || chdir("/") < 0)
        return fail(e, errno, "chroot to the new root");
    *root_fd = root;
    return 0;
}

void shared_view_drop(unsigned generation)
{
    char at[32];
    path_join(at, sizeof at, SHARED_VIEWS "%u", generation);
    umount2(at, MNT_DETACH);
    rmdir(at);
}

/* ---- ends ---- */

ssize_t shared_leftovers(struct keeper *k, struct procs *ps)
{
    ssize_t n = 0;
    ps->n = 0;
    if (k->before < 0)
        return 0;
    if (procs_read(k->before, ps) < 0)
        return -1;
    for (size_t i = 0; i < ps->n; i++)
        n += ps->p[i].in = !strchr("ZX", ps->p[i].state);
    return n;
}

int shared_end(struct keeper *k, struct err *e)
{
    struct procs ps = {0};
    uint64_t until = now_ns() + END_NS;
    ssize_t n;
    while ((n = shared_leftovers(k, &ps)) > 0 && now_ns() < until)
        usleep(200);
    int no = n < 0 ? errno : EBUSY;
    procs_free(&ps);
    return n ? fail(e, no, "see the end of all that an episode ran (%zd processes)", n) : terminals_restore(e);
}
