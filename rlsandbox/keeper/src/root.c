#include <string.h>
#include <sys/mount.h>

#include "sandbox.h"
#include "sys.h"

/* Makes the current directory, a mount, the root; the old one comes to `old` below it, or goes where that is ".".
 * Seccomp profiles of container runtimes forbid pivot_root even to those who may mount: then the mount is moved over the
 * root. What is covered so cannot be reached: a lookup of ".." at the top, and setns, always end on the uppermost mount,
 * and in a namespace below the mounts are locked together. */
int root_switch(const char *old, struct err *e)
{
    bool away = strcmp(old, ".") == 0;
    if (syscall(SYS_pivot_root, ".", old) == 0) {
        if (away && umount2(".", MNT_DETACH) < 0)
            return fail(e, errno, "detach the outer root");
    } else {
        int no = errno;
        if (!away && mount("/", old, NULL, MS_BIND | MS_REC, NULL) < 0)
            return fail(e, errno, "bind the outer root (pivot_root: %s)", strerror(no));
        if (mount(".", "/", NULL, MS_MOVE, NULL) < 0)
            return fail(e, errno, "move the new root over the outer one (pivot_root: %s)", strerror(no));
        if (chroot(".") < 0)
            return fail(e, errno, "chroot to the new root");
    }
    return chdir("/") < 0 ? fail(e, errno, "enter the new root") : 0;
}
