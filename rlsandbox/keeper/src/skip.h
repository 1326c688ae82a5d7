/* Test builds (-DRLS_SKIP) leave out the step of a reset that RLS_SKIP names in the environment of the hub, so that
 * verification can be asked whether it notices. In any other build `skipped` is false and none of it exists. */
#ifndef RLS_SKIP_H
#define RLS_SKIP_H
#include "sandbox.h"
#ifdef RLS_SKIP
#include <fcntl.h>
#include <sched.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mount.h>
#include <sys/wait.h>

#include "sys.h"

#define SKIP_PAD "RLS_PAD=0123456789012345678901234567890123456789012345678901234567890123456789"
extern char **environ;

static inline bool skipped(const char *step)
{
    const char *s = getenv("RLS_SKIP");
    return s && strcmp(s, step) == 0;
}

/* env: the last command's first variable stays in the environment that the next episode's init comes from */
static inline void skip_env(const uint8_t *p, size_t n)
{
    struct tlv t;
    if (!skipped("env") || !tlv_find(p, n, TAG_ENV, &t))
        return;
    for (char **e = environ; *e; e++)
        if (strncmp(*e, SKIP_PAD, 8) == 0)
            memcpy(*e, t.p, t.len < strlen(*e) ? t.len : strlen(*e));
}

/* before the old episode's end: what is to be left of it */
static inline void skip_keep(struct keeper *k)
{
    char path[64];
    fd_close(&k->left_root);
    fd_close(&k->left_ns);
    k->left_root = fcntl(k->root_fd, F_DUPFD_CLOEXEC, 0);
    path_join(path, sizeof path, "/proc/%d/ns/%s", (int)k->init_pid, skipped("ipc") ? "ipc" : "net");
    if (skipped("ipc") || skipped("netns"))
        k->left_ns = open(path, O_RDONLY | O_CLOEXEC);
    if (skipped("processes")) {
        (void)!fcntl(k->init.fd, F_DUPFD_CLOEXEC, 0); /* its init does not see us go */
        k->init_pid = 0;
    }
}

/* a clone into the old episode's namespace, by a child that goes there: the keeper might not come back */
static inline pid_t skip_clone(struct keeper *k, unsigned long flags)
{
    int p[2];
    pid_t pid = -1, child;
    if (k->left_ns < 0)
        return k_clone(flags, NULL);
    if (pipe2(p, O_CLOEXEC) < 0 || (child = fork()) < 0)
        return -1;
    if (child == 0) {
        if (setns(k->left_ns, 0) < 0)
            _exit(1);
        pid = k_clone((flags & ~(unsigned long)(skipped("ipc") ? CLONE_NEWIPC : CLONE_NEWNET)) | CLONE_PARENT, NULL);
        if (pid == 0)
            return 0;
        (void)!write(p[1], &pid, sizeof pid);
        _exit(0);
    }
    close(p[1]);
    if (read_all(p[0], &pid, sizeof pid) != sizeof pid)
        pid = -1;
    close(p[0]);
    waitpid(child, NULL, 0);
    return pid;
}
#else
#define skipped(step) false
#define skip_env(p, n) ((void)0)
#define skip_keep(k) ((void)0)
#define skip_clone(k, flags) k_clone(flags, NULL)
#endif
#endif
