#ifndef RLS_PIDFD_H
#define RLS_PIDFD_H
#include <sys/types.h>

int pidfd_of(pid_t pid);           /* of a child that is not reaped, or of the caller's own pid namespace */
int pidfd_kill(int fd, int sig);   /* also takes a directory of /proc */
pid_t pidfd_number(int fd);        /* in the caller's /proc; -1 when it is gone */

#endif
