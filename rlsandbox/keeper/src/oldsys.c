/* What sys.h's newer calls do where the kernel has none of them (an old gVisor): looking a path up inside a root, step by
 * step; and, where all processes share their mounts, binding what a descriptor stands for. */
#include <string.h>
#include <sys/mount.h>
#include <sys/stat.h>

#include "sys.h"

enum { LINKS_MAX = 40, LEFT_MAX = 8192, PATH_LONGEST = 4096 };

bool shared_mounts;

/* A directory below `root` by a path that has no links in it; what has become one meanwhile is refused. */
static int descend(int root, const char *path)
{
    char name[256];
    int at = openat(root, ".", O_PATH | O_DIRECTORY | O_CLOEXEC);
    while (at >= 0 && *path) {
        size_t n = strcspn(path, "/");
        memcpy(name, path, n); /* it was a name: shorter than the kernel's longest */
        name[n] = 0;
        int next = openat(at, name, O_PATH | O_DIRECTORY | O_NOFOLLOW | O_CLOEXEC), no = errno;
        close(at);
        errno = no;
        at = next;
        path += n + (path[n] == '/');
    }
    return at;
}

static int refuse(int fd, int no)
{
    if (fd >= 0)
        close(fd);
    errno = no;
    return -1;
}

/* As openat2 with RESOLVE_IN_ROOT: `..` and absolute links stay inside. A magic link is taken for the text it shows. */
int old_open_in(int root, const char *path, uint64_t flags, uint64_t resolve)
{
    char left[LEFT_MAX], done[PATH_LONGEST] = "", to[PATH_LONGEST], name[256];
    int links = 0, at = openat(root, ".", O_PATH | O_DIRECTORY | O_CLOEXEC);
    if (strlen(path) >= PATH_LONGEST)
        return refuse(at, ENAMETOOLONG);
    strcpy(left, path);
    for (char *s = left; at >= 0;) {
        struct stat st;
        s += strspn(s, "/");
        size_t n = strcspn(s, "/");
        bool slash = s[n] == '/', last = !s[n + strspn(s + n, "/")];
        if (!n) { /* ends in a directory */
            int fd = flags & O_PATH ? at : openat(at, ".", (int)flags | O_CLOEXEC);
            return fd == at ? fd : fd >= 0 ? (close(at), fd) : refuse(at, errno);
        }
        if (n >= sizeof name)
            return refuse(at, ENAMETOOLONG);
        memcpy(name, s, n);
        name[n] = 0;
        s += n;
        if (strcmp(name, ".") == 0)
            continue;
        if (strcmp(name, "..") == 0) {
            char *cut = strrchr(done, '/');
            *(cut ? cut : done) = 0;
            close(at);
            at = descend(root, done);
            continue;
        }
        int fd = openat(at, name, O_PATH | O_NOFOLLOW | O_CLOEXEC);
        if (fd < 0 || fstat(fd, &st) < 0) {
            int no = errno;
            fd_close(&fd);
            return refuse(at, no);
        }
        if (S_ISLNK(st.st_mode) && !(last && !slash && flags & O_NOFOLLOW && flags & O_PATH)) {
            ssize_t got = readlinkat(fd, "", to, sizeof to - 1);
            int no = got < 0 ? errno : resolve & K_RESOLVE_NO_SYMLINKS || (last && !slash && flags & O_NOFOLLOW) || ++links > LINKS_MAX ? ELOOP : 0;
            close(fd);
            if (!no && (size_t)got + strlen(s) + 1 > sizeof left)
                no = ENAMETOOLONG;
            if (no)
                return refuse(at, no);
            memmove(left + got, s, strlen(s) + 1); /* the rest begins with a slash, or is empty */
            memcpy(left, to, (size_t)got);
            s = left;
            if (to[0] == '/') {
                *done = 0;
                close(at);
                at = descend(root, done);
            }
            continue;
        }
        if (last) {
            if ((slash || flags & O_DIRECTORY) && !S_ISDIR(st.st_mode)) {
                close(fd);
                return refuse(at, ENOTDIR);
            }
            if (!(flags & O_PATH)) {
                close(fd);
                fd = openat(at, name, (int)flags | O_NOFOLLOW | O_CLOEXEC);
            }
            int no = errno;
            close(at);
            errno = no;
            return fd;
        }
        size_t have = strlen(done);
        close(at);
        if (!S_ISDIR(st.st_mode) || have + n + 2 > sizeof done)
            return refuse(fd, S_ISDIR(st.st_mode) ? ENAMETOOLONG : ENOTDIR);
        if (have)
            done[have++] = '/';
        memcpy(done + have, name, n + 1);
        at = fd;
    }
    return -1;
}

/* `from` bound to a path; the caller's directory is / afterwards, where a keeper is anyway. */
int old_bind(int from, const char *to)
{
    if (fchdir(from) < 0)
        return -1;
    int r = mount(".", to, NULL, MS_BIND, NULL), no = errno;
    if (chdir("/") < 0)
        return -1;
    errno = no;
    return r;
}

/* Its first line. Others may stand in a Linux kernel's log: what processes and mount options are called is told there. */
bool gvisor_log(const char *log)
{
    static const char begin[] = "<6>[", first[] = "0.000000] Starting gVisor...\n";
    if (strncmp(log, begin, sizeof begin - 1))
        return false;
    log += sizeof begin - 1;
    return strncmp(log + strspn(log, " "), first, sizeof first - 1) == 0;
}
