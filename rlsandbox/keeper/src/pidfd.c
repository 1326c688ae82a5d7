/* A descriptor that stands for one process and never for another that got its number. Where the kernel has none (gVisor until
 * 2023), it is the process's directory in /proc. What is read there tells whether it still lives; between that look and the
 * signal it would have to die, be reaped and its number go round, so nothing more is wanted of it. */
#include "pidfd.h"

#include <poll.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <sys/stat.h>

#include "sys.h"

int pidfd_via = -1;

int pidfd_of(pid_t pid)
{
    char path[32];
    int fd = k_pidfd_open(pid);
    if (fd >= 0 || errno != ENOSYS)
        return fd;
    path_join(path, sizeof path, "/proc/%d", (int)pid);
    return open(path, O_RDONLY | O_DIRECTORY | O_CLOEXEC);
}

/* gVisor still reads of one that was reaped: number 0, state X */
static pid_t by_stat(int dir)
{
    char text[1024], state;
    int pid;
    char *s = read_file_at(dir, "stat", text, sizeof text) > 0 ? strrchr(text, ')') : NULL;
    if (!s || sscanf(s + 1, " %c", &state) != 1 || state == 'X' || sscanf(text, "%d ", &pid) != 1 || pid <= 0)
        return -1;
    return pid;
}

pid_t pidfd_number(int fd)
{
    char path[64], text[512];
    path_join(path, sizeof path, "/proc/self/fdinfo/%d", fd);
    char *s = read_file_at(AT_FDCWD, path, text, sizeof text) > 0 ? strstr(text, "\nPid:") : NULL;
    return s ? (pid_t)strtol(s + 5, NULL, 10) : by_stat(fd);
}

enum { ASK_MS = 5000 };
struct ask {
    int32_t pid, sig;
};

static int ask(pid_t pid, int sig)
{
    struct ask q = {pid, sig};
    struct pollfd p = {pidfd_via, POLLIN, 0};
    int32_t no = ESRCH;
    int r = -1;
    if (send(pidfd_via, &q, sizeof q, MSG_NOSIGNAL) == sizeof q)
        while ((r = poll(&p, 1, ASK_MS)) < 0 && errno == EINTR)
            ;
    if (r > 0 && recv(pidfd_via, &no, sizeof no, 0) != sizeof no)
        no = ESRCH;
    if (r == 0) { /* an answer that comes later would be taken for another one's */
        shutdown(pidfd_via, SHUT_RDWR); /* for its init that is the end */
        no = ETIMEDOUT;
    }
    errno = no;
    return no ? -1 : 0;
}

int pidfd_serve(int sock)
{
    struct ask q;
    if (recv(sock, &q, sizeof q, 0) != sizeof q || q.pid <= 1)
        return -1;
    int32_t no = kill(q.pid, q.sig) < 0 ? errno : 0;
    return send(sock, &no, sizeof no, MSG_NOSIGNAL) == sizeof no ? 0 : -1;
}

/* Whether it is of the /proc that is mounted here: each one that is mounted has a device number of its own. */
static bool ours(int dir)
{
    struct stat st, here;
    return fstat(dir, &st) == 0 && stat("/proc", &here) == 0 && st.st_dev == here.st_dev;
}

int pidfd_kill(int fd, int sig)
{
    int r = k_pidfd_signal(fd, sig);
    if (r == 0 || errno != ENOSYS)
        return r;
    pid_t pid = by_stat(fd);
    bool here = pid > 0 && ours(fd);
    if (pid < 0 || (!here && pidfd_via < 0)) { /* the number of another namespace is somebody else's here */
        errno = ESRCH;
        return -1;
    }
    return here ? kill(pid, sig) : ask(pid, sig);
}
