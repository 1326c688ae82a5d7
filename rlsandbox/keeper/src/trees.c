#include "trees.h"

#include <dirent.h>
#include <fcntl.h>
#include <limits.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/sysmacros.h>
#include <sys/xattr.h>
#include <unistd.h>

#include "sys.h"

enum { ROOM = 64 << 10, XATTR_ROOM = 64 << 10 };

bool is_whiteout(const struct stat *st)
{
    return S_ISCHR(st->st_mode) && st->st_rdev == 0;
}

/* an old gVisor knows no overlays with attributes of users, and needs none: its sentry is the user */
static const char *opaque_name(void)
{
    return shared_mounts ? "trusted.overlay.opaque" : "user.overlay.opaque";
}

bool is_opaque(int dir_fd)
{
    char v[4];
    return fgetxattr(dir_fd, opaque_name(), v, sizeof v) == 1 && v[0] == 'y';
}

int set_opaque(int dir_fd)
{
    return fsetxattr(dir_fd, opaque_name(), "y", 1, 0);
}

bool is_overlays_own(const char *xattr)
{
    return strncmp(xattr, "user.overlay.", 13) == 0 || strncmp(xattr, "trusted.overlay.", 16) == 0;
}

int open_dir(int dir, const char *name)
{
    return openat(dir, name, O_RDONLY | O_DIRECTORY | O_NOFOLLOW | O_CLOEXEC);
}

bool same_meta(const struct stat *a, const struct stat *b)
{
    return a->st_mode == b->st_mode && a->st_uid == b->st_uid && a->st_gid == b->st_gid;
}

static bool same_time(const struct stat *a, const struct stat *b)
{
    return a->st_mtim.tv_sec == b->st_mtim.tv_sec && a->st_mtim.tv_nsec == b->st_mtim.tv_nsec;
}

/* Every attribute of `a` that is not the overlay's own has the same value in `b`; the number of them, -1 when not. */
static int xattrs_within(int a, int b)
{
    static char names[XATTR_ROOM], va[XATTR_ROOM], vb[XATTR_ROOM];
    ssize_t n = flistxattr(a, names, sizeof names);
    int count = 0;
    if (n < 0)
        return errno == ENOTSUP || errno == EPERM ? 0 : -1;
    for (ssize_t at = 0; at < n; at += (ssize_t)strlen(names + at) + 1) {
        const char *name = names + at;
        if (is_overlays_own(name))
            continue;
        ssize_t la = fgetxattr(a, name, va, sizeof va), lb = fgetxattr(b, name, vb, sizeof vb);
        if (la < 0 || la != lb || memcmp(va, vb, (size_t)la))
            return -1;
        count++;
    }
    return count;
}

bool same_xattrs(int a, int b)
{
    int x = xattrs_within(a, b);
    return x >= 0 && x == xattrs_within(b, a);
}

static bool same_bytes(int a, int b)
{
    static uint8_t ra[ROOM], rb[ROOM];
    for (;;) {
        ssize_t na = read_all(a, ra, sizeof ra), nb = read_all(b, rb, sizeof rb);
        if (na < 0 || na != nb || memcmp(ra, rb, (size_t)na))
            return false;
        if (na < (ssize_t)sizeof ra)
            return true;
    }
}

bool same_node(int a, const char *name_a, const struct stat *sa, int b, const char *name_b, const struct stat *sb)
{
    if (!same_meta(sa, sb))
        return false;
    if (S_ISLNK(sa->st_mode)) {
        char la[PATH_MAX], lb[PATH_MAX];
        ssize_t na = readlinkat(a, name_a, la, sizeof la), nb = readlinkat(b, name_b, lb, sizeof lb);
        return na >= 0 && na == nb && memcmp(la, lb, (size_t)na) == 0;
    }
    if (!same_time(sa, sb))
        return false;
    if (!S_ISREG(sa->st_mode))
        return sa->st_rdev == sb->st_rdev;
    if (sa->st_size != sb->st_size)
        return false;
    int fa = openat(a, name_a, O_RDONLY | O_NOFOLLOW | O_NONBLOCK | O_CLOEXEC), fb = openat(b, name_b, O_RDONLY | O_NOFOLLOW | O_NONBLOCK | O_CLOEXEC);
    bool same = fa >= 0 && fb >= 0 && same_xattrs(fa, fb) && same_bytes(fa, fb);
    fd_close(&fa);
    fd_close(&fb);
    return same;
}

uint64_t tree_bytes(int dir, int depth)
{
    uint64_t sum = 0;
    struct dirent *x;
    struct stat st;
    int again = openat(dir, ".", O_RDONLY | O_DIRECTORY | O_CLOEXEC);
    DIR *d = again < 0 ? NULL : fdopendir(again);
    while (d && (x = readdir(d))) {
        if (!strcmp(x->d_name, ".") || !strcmp(x->d_name, "..") || fstatat(dirfd(d), x->d_name, &st, AT_SYMLINK_NOFOLLOW) < 0)
            continue;
        sum += (uint64_t)st.st_blocks * 512;
        if (S_ISDIR(st.st_mode) && depth < TREE_DEPTH_MAX) {
            int sub = open_dir(dirfd(d), x->d_name);
            sum += sub >= 0 ? tree_bytes(sub, depth + 1) : 0;
            fd_close(&sub);
        }
    }
    if (d)
        closedir(d);
    return sum;
}

/* ---- removing ---- */

enum { HELD = 100 }; /* levels whose directories are held open at once */

struct removal {
    int top; /* the directory that is removed */
    unsigned long tried, moved;
};

/* What lies too deep is moved to the top of the tree, where another pass finds it: so neither descriptors nor the stack
 * limit how deep a tree may be, and no `..` is ever followed. */
static bool move_up(struct removal *m, int dir, const char *name)
{
    char to[32];
    for (;;) {
        path_join(to, sizeof to, "rls-deep.%lu", ++m->tried);
        if (renameat(dir, name, m->top, to) == 0) {
            m->moved++;
            return true;
        }
        if (errno != EEXIST && errno != ENOTEMPTY && errno != ENOTDIR) /* the name is taken, by what is removed as well */
            return false;
    }
}

static int remove_at(struct removal *m, int dir, const char *name, int depth);

/* All that is in it, as far as that goes; the first thing that did not. */
static int remove_inside(struct removal *m, DIR *d, int depth)
{
    struct dirent *x;
    unsigned long before;
    int no;
    do {
        before = m->moved;
        no = 0;
        rewinddir(d);
        while ((errno = 0, x = readdir(d)))
            if (strcmp(x->d_name, ".") && strcmp(x->d_name, "..") && remove_at(m, dirfd(d), x->d_name, depth + 1) < 0 && errno != ENOENT && !no)
                no = errno;
        no = no ? no : errno;
    } while (depth == 0 && m->moved != before);
    errno = no;
    return no ? -1 : 0;
}

static int remove_at(struct removal *m, int dir, const char *name, int depth)
{
    if (unlinkat(dir, name, 0) == 0)
        return 0;
    if (errno != EISDIR && errno != EPERM)
        return -1;
    if (unlinkat(dir, name, AT_REMOVEDIR) == 0)
        return 0;
    if (errno != ENOTEMPTY && errno != EEXIST)
        return -1;
    if (depth >= HELD && move_up(m, dir, name))
        return 0;
    if (depth >= TREE_DEPTH_MAX) { /* directories of a lower layer cannot be moved */
        errno = ELOOP;
        return -1;
    }
    int fd = open_dir(dir, name);
    if (fd < 0 && (errno == EMFILE || errno == ENFILE) && depth && move_up(m, dir, name))
        return 0;
    DIR *d = fd < 0 ? NULL : fdopendir(fd);
    if (!d) {
        int no = errno;
        fd_close(&fd);
        errno = no;
        return -1;
    }
    if (depth == 0)
        m->top = fd;
    int r = remove_inside(m, d, depth), no = errno;
    closedir(d);
    if (unlinkat(dir, name, AT_REMOVEDIR) == 0)
        return 0;
    errno = r < 0 ? no : errno;
    return -1;
}

int remove_tree(int dir, const char *name)
{
    struct removal m = {.top = -1};
    return remove_at(&m, dir, name, 0);
}

int copy_meta(int from_fd, int to_fd, const struct stat *st)
{
    static char names[XATTR_ROOM], value[XATTR_ROOM];
    struct timespec t[2] = {st->st_atim, st->st_mtim};
    /* EINVAL: with one id only, what is another's cannot be */
    if ((fchown(to_fd, st->st_uid, st->st_gid) < 0 && errno != EINVAL) || fchmod(to_fd, st->st_mode & 07777) < 0)
        return -1;
    ssize_t n = flistxattr(from_fd, names, sizeof names);
    for (ssize_t at = 0; at < n; at += (ssize_t)strlen(names + at) + 1) {
        ssize_t v = fgetxattr(from_fd, names + at, value, sizeof value);
        if (v < 0 || is_overlays_own(names + at))
            continue;
        if (fsetxattr(to_fd, names + at, value, (size_t)v, 0) < 0 && errno != ENOTSUP && errno != EPERM)
            return -1;
    }
    return futimens(to_fd, t);
}

/* Holes stay holes. */
off_t next_data(int fd, off_t at, off_t *end)
{
    struct stat st;
    off_t data = lseek(fd, at, SEEK_DATA);
    if (data >= 0) {
        *end = lseek(fd, data, SEEK_HOLE);
        return *end < 0 ? -1 : data;
    }
    if (errno != EINVAL || fstat(fd, &st) < 0) /* where holes are not told (gVisor) all is data */
        return -1;
    *end = st.st_size;
    errno = ENXIO;
    return at < st.st_size ? at : -1;
}

int copy_bytes(int from, int to, off_t size)
{
    static uint8_t room[ROOM];
    off_t at = 0;
    if (ftruncate(to, size) < 0)
        return -1;
    while (at < size) {
        off_t hole, data = next_data(from, at, &hole);
        if (data < 0)
            return errno == ENXIO ? 0 : -1;
        if (lseek(from, data, SEEK_SET) < 0 || lseek(to, data, SEEK_SET) < 0)
            return -1;
        for (at = data; at < hole;) {
            ssize_t r = read(from, room, hole - at < ROOM ? (size_t)(hole - at) : ROOM);
            if (r < 0 && errno == EINTR)
                continue;
            if (r < 0 || (r > 0 && write_all(to, room, (size_t)r) < 0))
                return -1;
            if (!r)
                return 0;
            at += r;
        }
    }
    return 0;
}

static int copy_file(int from, const char *name, int to, const char *to_name, const struct stat *st)
{
    int a = openat(from, name, O_RDONLY | O_NOFOLLOW | O_NONBLOCK | O_CLOEXEC), b = -1, r = -1;
    if (a >= 0)
        b = openat(to, to_name, O_WRONLY | O_CREAT | O_EXCL | O_NOFOLLOW | O_CLOEXEC, 0600);
    if (b >= 0 && copy_bytes(a, b, st->st_size) == 0 && copy_meta(a, b, st) == 0)
        r = 0;
    int no = errno;
    fd_close(&a);
    fd_close(&b);
    errno = no;
    return r;
}

static int copy_dir(int from, const char *name, int to, const char *to_name, const struct stat *st, int depth)
{
    int a = open_dir(from, name), b = -1, r = 0;
    struct dirent *x;
    if (a < 0)
        return -1;
    if (mkdirat(to, to_name, 0700) < 0 || (b = open_dir(to, to_name)) < 0) {
        close(a);
        return -1;
    }
    DIR *d = fdopendir(a);
    if (!d)
        r = -1;
    while (r == 0 && (errno = 0, x = readdir(d)))
        if (strcmp(x->d_name, ".") && strcmp(x->d_name, ".."))
            r = copy_tree(a, x->d_name, b, x->d_name, depth + 1);
    if (r == 0)
        r = copy_meta(a, b, st);
    int no = errno;
    if (d)
        closedir(d);
    else
        close(a);
    close(b);
    errno = no;
    return r;
}

int copy_tree(int from, const char *name, int to, const char *to_name, int depth)
{
    struct stat st;
    char target[PATH_MAX];
    if (fstatat(from, name, &st, AT_SYMLINK_NOFOLLOW) < 0)
        return -1;
    if (depth >= TREE_DEPTH_MAX) {
        errno = ELOOP;
        return -1;
    }
    if (S_ISREG(st.st_mode))
        return copy_file(from, name, to, to_name, &st);
    if (S_ISDIR(st.st_mode))
        return copy_dir(from, name, to, to_name, &st, depth);
    if (S_ISLNK(st.st_mode)) {
        ssize_t n = readlinkat(from, name, target, sizeof target - 1);
        if (n < 0)
            return -1;
        target[n] = 0;
        if (symlinkat(target, to, to_name) < 0)
            return -1;
    } else if (mknodat(to, to_name, st.st_mode, st.st_rdev) < 0)
        return -1;
    struct timespec t[2] = {st.st_atim, st.st_mtim};
    if (fchownat(to, to_name, st.st_uid, st.st_gid, AT_SYMLINK_NOFOLLOW) < 0 && errno != EINVAL)
        return -1;
    return utimensat(to, to_name, t, AT_SYMLINK_NOFOLLOW);
}
