/* One file operation, in the episode and with the episode's rights. */
#include <dirent.h>
#include <fcntl.h>
#include <limits.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>

#include "entry.h"
#include "inside.h"
#include "sys.h"
#include "trees.h"

enum { ROOM = 64 << 10 };

static _Noreturn void failed(struct inside *in, struct err *e, const char *what, const char *path)
{
    fail(e, errno, "%s %.200s", what, path);
    give_up(in, e);
}

static _Noreturn void refused(struct inside *in, struct err *e, int no, const char *what, const char *path)
{
    errno = no;
    failed(in, e, what, path);
}

static void out(const void *p, size_t n)
{
    if (write_all(1, p, n) < 0)
        _exit(1); /* nobody wants it any more */
}

static _Noreturn void list_dir(struct inside *in, const char *path, struct err *e)
{
    struct buf b = {0}, reply = {0};
    uint64_t count = 0;
    DIR *d = opendir(path);
    struct dirent *x;
    if (!d)
        failed(in, e, "open directory", path);
    while (errno = 0, (x = readdir(d))) {
        struct stat st;
        if (!strcmp(x->d_name, ".") || !strcmp(x->d_name, ".."))
            continue;
        if (fstatat(dirfd(d), x->d_name, &st, AT_SYMLINK_NOFOLLOW) < 0)
            continue; /* gone meanwhile */
        if (entry_put(&b, entry_kind(st.st_mode), &st, x->d_name, strlen(x->d_name)) < 0)
            failed(in, e, "list directory", path);
        count++;
        if (b.len > 16384) {
            out(b.p, b.len);
            b.len = 0;
        }
    }
    if (errno)
        failed(in, e, "read directory", path);
    out(b.p, b.len);
    put_u64(&reply, TAG_COUNT, count);
    done(in, &reply);
}

static _Noreturn void stat_path(struct inside *in, const char *path, struct err *e)
{
    struct buf b = {0}, reply = {0};
    struct stat st;
    if (lstat(path, &st) < 0)
        failed(in, e, "look at", path);
    const char *name = strrchr(path, '/');
    name = name ? name + 1 : path;
    if (entry_put(&b, entry_kind(st.st_mode), &st, name, strlen(name)) < 0)
        failed(in, e, "look at", path);
    out(b.p, b.len);
    done(in, &reply);
}

static _Noreturn void read_link(struct inside *in, const char *path, struct err *e)
{
    char target[PATH_MAX];
    struct buf reply = {0};
    ssize_t n = readlink(path, target, sizeof target);
    if (n < 0)
        failed(in, e, "read link", path);
    out(target, (size_t)n);
    put_u64(&reply, TAG_SIZE, (uint64_t)n);
    done(in, &reply);
}

static _Noreturn void read_path(struct inside *in, const char *path, struct err *e)
{
    static uint8_t room[ROOM];
    struct stat st;
    struct buf reply = {0};
    uint64_t at = tlv_get(in->p, in->n, TAG_OFFSET, 0), left = tlv_get(in->p, in->n, TAG_LENGTH, UINT64_MAX);
    uint32_t flags = (uint32_t)tlv_get(in->p, in->n, TAG_FLAGS, 0);
    if (flags & R_LINK)
        read_link(in, path, e);
    int fd = open(path, O_RDONLY | O_NONBLOCK | O_NOCTTY | O_CLOEXEC | (in->above ? O_NOFOLLOW : 0));
    if (fd < 0 || fstat(fd, &st) < 0)
        failed(in, e, "open", path);
    if (!S_ISREG(st.st_mode))
        refused(in, e, S_ISDIR(st.st_mode) ? EISDIR : EINVAL, "read, for it is no regular file,", path);
    if (at > INT64_MAX)
        refused(in, e, EINVAL, "seek in", path);
    if (flags & R_SPARSE && st.st_size) { /* 0 in /proc, whatever is in there */
        off_t hole, data = next_data(fd, (off_t)at, &hole);
        if (data < 0 && errno != ENXIO)
            failed(in, e, "look for data in", path);
        if (data < 0) { /* a hole to the end */
            at = (uint64_t)st.st_size;
            left = 0;
        } else {
            at = (uint64_t)data;
            if (hole > data && (uint64_t)(hole - data) < left)
                left = (uint64_t)(hole - data);
        }
    }
    if (lseek(fd, (off_t)at, SEEK_SET) < 0)
        failed(in, e, "seek in", path);
    while (left) {
        ssize_t r = read(fd, room, left < sizeof room ? (size_t)left : sizeof room);
        if (r < 0 && errno == EINTR)
            continue;
        if (r < 0)
            failed(in, e, "read", path);
        if (!r)
            break;
        out(room, (size_t)r);
        left -= (uint64_t)r;
    }
    put_u64(&reply, TAG_SIZE, (uint64_t)st.st_size);
    put_u32(&reply, TAG_FILE_MODE, st.st_mode & 07777);
    put_u64(&reply, TAG_OFFSET, at);
    done(in, &reply);
}

/* The errno of the first that could not be made, or 0; it tells why its end is not there (a full disk, say). */
static int make_parents(char *path)
{
    int no = 0;
    for (char *s = path + 1; *s; s++)
        if (*s == '/') {
            *s = 0;
            if (mkdir(path, 0777) < 0 && errno != EEXIST && !no)
                no = errno;
            *s = '/';
        }
    return no;
}

static _Noreturn void make_dir(struct inside *in, const char *path, bool has_mode, mode_t mode, uint32_t flags, int no, struct err *e)
{
    struct buf reply = {0};
    struct stat st;
    if (mkdir(path, 0777) < 0 && (errno != EEXIST || flags & W_EXCLUSIVE || stat(path, &st) < 0 || !S_ISDIR(st.st_mode)))
        refused(in, e, errno == ENOENT && no ? no : errno ? errno : ENOTDIR, "make directory", path);
    if (has_mode && chmod(path, mode) < 0)
        failed(in, e, "set the mode of", path);
    done(in, &reply);
}

static _Noreturn void make_link(struct inside *in, const char *path, uint32_t flags, struct err *e)
{
    char target[PATH_MAX];
    struct buf reply = {0};
    ssize_t n = read_all(0, target, sizeof target);
    if (n < 0 || n == sizeof target || memchr(target, 0, (size_t)n))
        refused(in, e, n < 0 ? errno : ENAMETOOLONG, "read what shall be linked to by", path);
    target[n] = 0;
    if (symlink(target, path) < 0) {
        if (errno != EEXIST || flags & W_EXCLUSIVE || unlink(path) < 0 || symlink(target, path) < 0)
            failed(in, e, "make link", path);
    }
    put_u64(&reply, TAG_SIZE, (uint64_t)n);
    done(in, &reply);
}

static _Noreturn void write_path(struct inside *in, char *path, struct err *e)
{
    static uint8_t room[ROOM];
    struct buf reply = {0};
    struct tlv t;
    struct stat st;
    uint64_t size = 0, at = 0, final = 0;
    uint32_t flags = (uint32_t)tlv_get(in->p, in->n, TAG_FLAGS, 0);
    bool has_mode = tlv_find(in->p, in->n, TAG_FILE_MODE, &t);
    mode_t mode = has_mode ? (mode_t)tlv_uint(&t, 0644) & 07777 : 0;
    bool has_at = tlv_find(in->p, in->n, TAG_OFFSET, &t);
    at = has_at ? tlv_uint(&t, 0) : 0;
    bool has_final = tlv_find(in->p, in->n, TAG_SIZE, &t);
    final = has_final ? tlv_uint(&t, 0) : 0;
    if (at > INT64_MAX || final > INT64_MAX)
        refused(in, e, EINVAL, "seek in", path);
    int no = flags & W_PARENTS ? make_parents(path) : 0;
    if (no == ENOSPC || no == EDQUOT)
        refused(in, e, no, "make the directories of", path);
    if (flags & W_DIRECTORY)
        make_dir(in, path, has_mode, mode, flags, no, e);
    if (flags & W_LINK)
        make_link(in, path, flags, e);
    int fd = open(path, O_WRONLY | O_CREAT | O_NONBLOCK | O_NOCTTY | O_CLOEXEC | (in->above ? O_NOFOLLOW : 0) | (flags & W_APPEND ? O_APPEND : 0) | (flags & W_EXCLUSIVE ? O_EXCL : 0), 0666);
    if (fd < 0 || fstat(fd, &st) < 0) /* ENOENT is what came of it that a directory was refused */
        refused(in, e, fd < 0 && errno == ENOENT && no ? no : errno, "open for writing", path);
    if (!S_ISREG(st.st_mode))
        refused(in, e, EINVAL, "write, for it is no regular file,", path);
    if (!(flags & W_APPEND) && !has_at && st.st_size && ftruncate(fd, 0) < 0)
        failed(in, e, "empty", path);
    if (at && lseek(fd, (off_t)at, SEEK_SET) < 0)
        failed(in, e, "seek in", path);
    for (;;) {
        ssize_t r = read(0, room, sizeof room);
        if (r < 0 && errno == EINTR)
            continue;
        if (r < 0)
            _exit(1);
        if (!r)
            break;
        if (write_all(fd, room, (size_t)r) < 0)
            failed(in, e, "write", path);
        size += (uint64_t)r;
    }
    if (has_final && ftruncate(fd, (off_t)final) < 0)
        failed(in, e, "set the size of", path);
    if (has_mode && fchmod(fd, mode) < 0)
        failed(in, e, "set the mode of", path);
    if (close(fd) < 0)
        failed(in, e, "write", path);
    put_u64(&reply, TAG_SIZE, size);
    done(in, &reply);
}

/* Who has no more rights than what it removes cannot look into every directory; out of the way they can be put. */
static bool aside(struct inside *in, const char *name)
{
    char to[64];
    uint64_t any = 0;
    int no = errno;
    bool moved = in->above && geteuid() != 0 && (no == EACCES || no == EPERM) && syscall(SYS_getrandom, &any, sizeof any, 0) == sizeof any &&
                 path_join(to, sizeof to, ".rls-removed-%016llx", (unsigned long long)any) == 0 && renameat(AT_FDCWD, name, AT_FDCWD, to) == 0;
    errno = no;
    return moved;
}

static _Noreturn void remove_path(struct inside *in, const char *path, struct err *e)
{
    struct buf reply = {0};
    struct stat st;
    uint32_t flags = (uint32_t)tlv_get(in->p, in->n, TAG_FLAGS, 0);
    if (lstat(path, &st) < 0)
        failed(in, e, "remove", path);
    if ((flags & D_TREE ? remove_tree(AT_FDCWD, path) : S_ISDIR(st.st_mode) ? rmdir(path) : unlink(path)) < 0 && !aside(in, path))
        failed(in, e, "remove", path);
    done(in, &reply);
}

/* What the keeper does itself may hit what no command may change, and no reset puts that back: no link is followed, and its own
 * places are closed. The working directory becomes the one of `path`; given is the last name. */
static char *walk(char *path, bool parents, struct err *e)
{
    char *save = NULL, *s = *path == '/' ? strtok_r(path, "/", &save) : NULL, *next;
    bool ours = s && strncmp(s, ".rlsandbox", 10) == 0;
    for (; s && !ours && strcmp(s, ".") && strcmp(s, ".."); s = next) {
        if (!(next = strtok_r(NULL, "/", &save)))
            return s;
        if (parents && mkdir(s, 0777) < 0 && errno != EEXIST) {
            fail(e, errno, "make directory %.200s", s);
            return NULL;
        }
        struct stat st;
        if (lstat(s, &st) == 0 && S_ISDIR(st.st_mode) && st.st_uid == geteuid() && (st.st_mode & 0700) != 0700)
            (void)chmod(s, (st.st_mode & 07777) | 0700); /* its owner closed it, and its owner opens it */
        int fd = open(s, O_PATH | O_DIRECTORY | O_NOFOLLOW | O_CLOEXEC);
        if (fd < 0 || fchdir(fd) < 0) {
            fail(e, errno, "enter directory %.200s", s);
            return NULL;
        }
        close(fd);
    }
    fail(e, ours ? EPERM : EINVAL, "work as the keeper on a path %s", ours ? "of its own" : "with dots, or none");
    return NULL;
}

_Noreturn void file_op(struct inside *in, uint32_t op, char *path, struct err *e)
{
    uint32_t flags = (uint32_t)tlv_get(in->p, in->n, TAG_FLAGS, 0);
    char room[PATH_MAX + 4];
    if (in->above && op == OP_WRITE && flags & W_DIRECTORY)
        refused(in, e, EOPNOTSUPP, "work as the keeper on", path);
    if (in->above && op == OP_LIST) {
        path_join(room, sizeof room, "%s/-", path); /* so that it is entered */
        if (!walk(room, false, e))
            give_up(in, e);
        list_dir(in, ".", e);
    }
    if (in->above && !(path = walk(path, op == OP_WRITE && flags & W_PARENTS, e)))
        give_up(in, e);
    switch (op) {
    case OP_READ: read_path(in, path, e);
    case OP_WRITE: write_path(in, path, e);
    case OP_LIST: list_dir(in, path, e);
    case OP_STAT: stat_path(in, path, e);
    case OP_REMOVE: remove_path(in, path, e);
    }
    refused(in, e, ENOSYS, "work on", path);
}
