#ifndef RLS_PIDFD_H
#define RLS_PIDFD_H
#include <sys/types.h>

int pidfd_of(pid_t pid);           /* of a child that is not reaped, or of the caller's own pid namespace */
int pidfd_kill(int fd, int sig);   /* also takes a directory of /proc */
pid_t pidfd_number(int fd);        /* in the caller's /proc; -1 when it is gone */

/* Such a directory of another pid namespace's /proc tells a number of that one, so the signal has to be sent from in there: while
 * pidfd_via is a socket, by an episode's init, which serves it with pidfd_serve; -1: by nobody. */
extern int pidfd_via;
int pidfd_serve(int sock); /* one request; -1: nobody asks any more */

#endif
