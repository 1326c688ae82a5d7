/* Reading and restoring single paths from outside the episode. */
#include <dirent.h>
#include <stdlib.h>
#include <string.h>
#include <sys/vfs.h>

#include "manifest.h"
#include "sys.h"
#include "trees.h"
#include "worker.h"

enum { PROC_MAGIC = 0x9fa0, ROOM = 64 << 10 };

static _Noreturn void refuse(struct worker *w, int no, const char *what, const char *path)
{
    struct err e = {0};
    fail(&e, no, "%s %.200s", what, path);
    worker_fail(w, &e);
}

void work_outside_read(struct worker *w)
{
    static uint8_t room[ROOM];
    char path[4096], asked[4096];
    struct err e = {0};
    struct buf reply = {0};
    struct stat st;
    struct statfs fs;
    uint64_t left = tlv_get(w->p, w->n, TAG_LENGTH, UINT64_MAX);
    int root = w->k->root_fd;
    uint16_t above[MAX_CHAIN];
    if (tlv_str(w->p, w->n, TAG_PATH, path, sizeof path) <= 0)
        refuse(w, EINVAL, "read a path", "from outside");
    bool baseline = tlv_get(w->p, w->n, TAG_FLAGS, 0) & O_BASELINE;
    if (w->k->set.manifest && manifest_source(strcpy(asked, path), baseline, path, sizeof path) < 0)
        refuse(w, errno, "find in the baseline", asked);
    if (!w->k->set.manifest && baseline) {
        stand_since(w, above);
        if ((root = view_below(w->k, &e)) < 0)
            worker_fail(w, &e);
    }
    if (root < 0)
        refuse(w, ESRCH, "look at the episode, for there is none:", path);
    /* first a look, so that no pipe is opened and no device; what it turns into meanwhile is looked at again */
    const uint64_t how = K_RESOLVE_IN_ROOT | K_RESOLVE_NO_MAGICLINKS;
    int fd = k_open_in(root, path, O_PATH, how);
    if (fd < 0 || fstat(fd, &st) < 0)
        refuse(w, errno, "open from outside", path);
    if (S_ISREG(st.st_mode)) {
        close(fd);
        fd = k_open_in(root, path, O_RDONLY | O_NONBLOCK | O_NOCTTY, how);
        if (fd < 0 || fstat(fd, &st) < 0 || fstatfs(fd, &fs) < 0)
            refuse(w, errno, "open from outside", path);
        if (fs.f_type == PROC_MAGIC)
            refuse(w, EACCES, "read, for it lies in /proc,", path);
    }
    if (!S_ISREG(st.st_mode))
        refuse(w, S_ISDIR(st.st_mode) ? EISDIR : EINVAL, "read, for it is no regular file,", path);
    while (left) {
        ssize_t r = read(fd, room, left < sizeof room ? (size_t)left : sizeof room);
        if (r < 0 && errno == EINTR)
            continue;
        if (r < 0)
            refuse(w, errno, "read from outside", path);
        if (!r)
            break;
        worker_write(w, room, (size_t)r);
        left -= (uint64_t)r;
    }
    put_u64(&reply, TAG_SIZE, (uint64_t)st.st_size);
    put_u32(&reply, TAG_FILE_MODE, st.st_mode & 07777);
    worker_done(w, &reply);
}

/* ---- putting back ---- */

/* The upper layer may not be changed under a mounted overlay, so what lies below is written again through the view. The
 * upper layer only says where to look: what it does not have was not changed. All four are looked up without links. */
static int restore(int view, int up, int below, const char *name, int depth);

static int restore_inside(int view, int up, int below, const char *name, const struct stat *sb, int depth)
{
    int v = open_dir(view, name), u = open_dir(up, name), b = open_dir(below, name), r = -1;
    DIR *d = NULL;
    struct dirent *x;
    struct stat st;
    if (depth >= TREE_DEPTH_MAX)
        errno = ELOOP;
    if (v < 0 || u < 0 || b < 0 || depth >= TREE_DEPTH_MAX)
        goto end;
    int again = openat(u, ".", O_RDONLY | O_DIRECTORY | O_CLOEXEC);
    if (again < 0 || !(d = fdopendir(again)))
        goto end;
    r = 0;
    while (r == 0 && (errno = 0, x = readdir(d)))
        if (strcmp(x->d_name, ".") && strcmp(x->d_name, ".."))
            r = restore(v, u, b, x->d_name, depth + 1);
    if (r == 0 && is_opaque(u)) { /* what it hides is in no entry */
        closedir(d);
        again = openat(b, ".", O_RDONLY | O_DIRECTORY | O_CLOEXEC);
        if (again < 0 || !(d = fdopendir(again))) {
            d = NULL;
            r = -1;
            goto end;
        }
        while (r == 0 && (x = readdir(d)))
            if (strcmp(x->d_name, ".") && strcmp(x->d_name, "..") && fstatat(v, x->d_name, &st, AT_SYMLINK_NOFOLLOW) < 0)
                r = copy_tree(b, x->d_name, v, x->d_name, depth + 1);
    }
    if (r == 0)
        r = copy_meta(b, v, sb);
end:;
    int no = errno;
    if (d)
        closedir(d);
    fd_close(&v);
    fd_close(&u);
    fd_close(&b);
    errno = no;
    return r;
}

static int restore(int view, int up, int below, const char *name, int depth)
{
    struct stat sv, sb, su;
    bool has_v = fstatat(view, name, &sv, AT_SYMLINK_NOFOLLOW) == 0;
    bool has_b = below >= 0 && fstatat(below, name, &sb, AT_SYMLINK_NOFOLLOW) == 0;
    if (fstatat(up, name, &su, AT_SYMLINK_NOFOLLOW) < 0)
        return has_b && has_v ? 0 : -1; /* as it was; ENOENT */
    if (has_b && has_v && S_ISDIR(sb.st_mode) && S_ISDIR(sv.st_mode))
        return restore_inside(view, up, below, name, &sb, depth);
    if (has_b && has_v && !S_ISDIR(sv.st_mode) && same_node(view, name, &sv, below, name, &sb))
        return 0;
    if (has_v && remove_tree(view, name) < 0)
        return -1;
    return has_b ? copy_tree(below, name, view, name, depth) : 0;
}

/* `path` without links or dots, as the list of changes tells it; cut into directory and name. */
static const char *last_name(char *path)
{
    if (path[0] != '/' || !path[1])
        return NULL;
    for (char *s = path; *s; s++) {
        size_t n = strcspn(s + 1, "/");
        if (*s == '/' && (n == 0 || (n == 1 && s[1] == '.') || (n == 2 && s[1] == '.' && s[2] == '.')))
            return NULL;
    }
    char *slash = strrchr(path, '/');
    *slash = 0;
    return slash + 1;
}

static const char *within(const char *path, const char *target)
{
    size_t n = strcmp(target, "/") ? strlen(target) : 0;
    return strncmp(path, target, n) == 0 && (path[n] == '/' || !path[n]) ? path + n : NULL;
}

void work_outside_remove(struct worker *w)
{
    char path[4096], full[4096], top[64];
    struct keeper *k = w->k;
    struct err e = {0};
    struct buf reply = {0};
    const uint64_t how = K_RESOLVE_IN_ROOT | K_RESOLVE_NO_SYMLINKS;
    if (tlv_str(w->p, w->n, TAG_PATH, path, sizeof path) <= 0)
        refuse(w, EINVAL, "read a path", "to restore");
    strcpy(full, path);
    const char *name = last_name(path), *rest = NULL;
    if (!name)
        refuse(w, EINVAL, "restore (an absolute path without `.`, `..` and a slash at its end is wanted)", full);
    if (k->root_fd < 0)
        refuse(w, ESRCH, "look at the episode, for there is none:", full);
    int view = k_open_in(k->root_fd, *path ? path : "/", O_RDONLY | O_DIRECTORY, how);
    if (view < 0)
        refuse(w, errno, "open the directory of", full);
    if (strcmp(path, "/dev/mqueue") == 0) {
        if (unlinkat(view, name, 0) < 0)
            refuse(w, errno, "remove", full);
        worker_done(w, &reply);
    }
    if ((rest = within(path, "/dev/shm"))) {
        if (remove_tree(view, name) < 0)
            refuse(w, errno, "remove", full);
        worker_done(w, &reply);
    }
    unsigned best = 0;
    rest = path;
    for (unsigned i = 1; i < k->set.overlays; i++) {
        const char *r = within(path, k->set.overlay[i].target);
        if (r && strlen(k->set.overlay[i].target) > strlen(k->set.overlay[best].target)) {
            best = i;
            rest = r;
        }
    }
    uint16_t above[MAX_CHAIN];
    unsigned more = stand_since(w, above);
    int root = view_below(k, &e);
    if (root < 0)
        worker_fail(w, &e);
    int below = k_open_in(root, *path ? path : "/", O_RDONLY | O_DIRECTORY, how);
    struct stat st, parent;
    bool looked = false, found = false;
    for (unsigned j = 0; j <= more; j++) { /* the upper layer, then those that it covers */
        if (j)
            path_join(top, sizeof top, "/k/s/%u/u/%u", above[j - 1], best);
        else
            path_join(top, sizeof top, "/k/u/%u/u/%u", k->generation, best);
        int top_fd = open(top, O_PATH | O_DIRECTORY | O_CLOEXEC);
        int up = k_open_in(top_fd, *rest ? rest : "/", O_RDONLY | O_DIRECTORY, how);
        fd_close(&top_fd);
        if (up < 0)
            continue; /* nothing was changed here */
        looked = true;
        if (restore(view, up, below, name, 0) == 0)
            found = true;
        else if (errno != ENOENT)
            refuse(w, errno, "restore", full);
        close(up);
    }
    if (!found && (looked || below < 0 || fstatat(below, name, &st, AT_SYMLINK_NOFOLLOW) < 0))
        refuse(w, ENOENT, "restore", full);
    if (!looked)
        worker_done(w, &reply);
    if (below >= 0 && fstat(below, &parent) == 0) { /* its directory's time: what is left in it tells itself */
        struct timespec t[2] = {parent.st_atim, parent.st_mtim};
        if (futimens(view, t) < 0)
            refuse(w, errno, "set the time of the directory of", full);
    }
    worker_done(w, &reply);
}
