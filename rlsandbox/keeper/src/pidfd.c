/* A descriptor that stands for one process and never for another that got its number. Where the kernel has none (gVisor until
 * 2023), it is the process's directory in /proc. What is read there tells whether it still lives; between that look and the
 * signal it would have to die, be reaped and its number go round, so nothing more is wanted of it. */
#include "pidfd.h"

#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "sys.h"

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

int pidfd_kill(int fd, int sig)
{
    int r = k_pidfd_signal(fd, sig);
    if (r == 0 || errno != ENOSYS)
        return r;
    pid_t pid = by_stat(fd);
    if (pid < 0) {
        errno = ESRCH;
        return -1;
    }
    return kill(pid, sig);
}
