/* What works here, found out by doing it in a forked child. */
#include <sched.h>
#include <stdio.h>
#include <string.h>
#include <sys/mount.h>
#include <sys/prctl.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <signal.h>

#include <sys/xattr.h>

#include "hub.h"
#include "sandbox.h"
#include "sys.h"

static int p_user_namespace(void) { return unshare(CLONE_NEWUSER); }
static int p_mount_namespace(void) { return unshare(CLONE_NEWNS); }
static int p_pid_namespace(void) { return unshare(CLONE_NEWPID); }
static int p_net_namespace(void) { return unshare(CLONE_NEWNET); }
static int p_ipc_namespace(void) { return unshare(CLONE_NEWIPC); }

static int overlay(void)
{
    static const char *const dirs[] = {"/k/l", "/k/l/d", "/k/u", "/k/w", "/k/m"};
    if (unshare(CLONE_NEWNS) < 0 || mount("rls", "/k", "tmpfs", 0, "size=1m") < 0)
        return -1;
    for (size_t i = 0; i < COUNT_OF(dirs); i++)
        if (mkdir(dirs[i], 0755) < 0)
            return -1;
    return mount("rls", "/k/m", "overlay", 0, "lowerdir=/k/l,upperdir=/k/u,workdir=/k/w,userxattr");
}
static int p_overlay(void) { return overlay(); }
static int p_overlay_whiteout(void) { return overlay() < 0 || rmdir("/k/m/d") < 0 ? -1 : 0; }
static int p_overlay_whiteout_mkdir(void) { return p_overlay_whiteout() < 0 || mkdir("/k/m/d", 0700) < 0 ? -1 : 0; }
static int p_overlay_unmount(void) { return overlay() < 0 || umount2("/k/m", MNT_DETACH) < 0 ? -1 : 0; }

static int p_fresh_proc(void)
{
    if (unshare(CLONE_NEWNS | CLONE_NEWPID) < 0)
        return -1;
    pid_t p = fork();
    if (p == 0)
        _exit(mount("rls", "/k", "proc", 0, NULL) < 0 ? errno : 0);
    int status;
    if (p < 0 || waitpid(p, &status, 0) < 0)
        return -1;
    errno = WIFEXITED(status) ? WEXITSTATUS(status) : ECHILD;
    return errno ? -1 : 0;
}

static int p_seccomp(void)
{
    struct err e = {0};
    return seccomp_install(&e);
}

static int p_overlay_layers(void) /* what a chain of snapshots needs: attributes on the upper's filesystem */
{
    char v[4];
    return p_overlay_whiteout_mkdir() < 0 || getxattr("/k/u/d", "user.overlay.opaque", v, sizeof v) != 1 ? -1 : 0;
}

/* what the modes stand on */
static int p_mode(void) { return p_overlay_layers() < 0 ? -1 : umount2("/k/m", MNT_DETACH); }

static const struct { const char *name; int (*fn)(void); } probes[] = {
    {"seccomp", p_seccomp}, {"overlay_layers", p_overlay_layers}, {"mode.overlay", p_mode}, {"mode.userns", p_mode},
    {"user_namespace", p_user_namespace}, {"mount_namespace", p_mount_namespace}, {"pid_namespace", p_pid_namespace},
    {"net_namespace", p_net_namespace}, {"ipc_namespace", p_ipc_namespace}, {"overlay", p_overlay},
    {"overlay_whiteout", p_overlay_whiteout}, {"overlay_whiteout_mkdir", p_overlay_whiteout_mkdir},
    {"overlay_unmount", p_overlay_unmount}, {"fresh_proc", p_fresh_proc},
};

void probe(struct hub *h, struct buf *b)
{
    for (size_t i = 0; i < COUNT_OF(probes); i++) {
        int status, no;
        pid_t p = fork();
        if (p == 0) {
            prctl(PR_SET_PDEATHSIG, SIGKILL);
            errno = 0;
            /* as the sandboxes' keepers are */
            if (h->userns >= 0 && (setns(h->userns, CLONE_NEWUSER) < 0 || syscall(SYS_setresgid, 0, 0, 0) < 0 || syscall(SYS_setresuid, 0, 0, 0) < 0))
                _exit(errno);
            _exit(probes[i].fn() < 0 ? errno ? errno : EIO : 0);
        }
        if (p < 0 || waitpid(p, &status, 0) < 0)
            no = errno;
        else
            no = WIFEXITED(status) ? WEXITSTATUS(status) : ECHILD;
        put_fmt(b, TAG_FACT, "%s\t%s", probes[i].name, no ? strerror(no) : "ok");
    }
    static const char *const controllers[CG_KINDS] = {"memory", "pids", "cpu"};
    for (int i = 0; i < CG_KINDS; i++)
        put_fmt(b, TAG_FACT, "cgroup.%s\t%s", controllers[i], h->cg.dir[i] < 0 ? "none" : h->cg.v2 ? "version 2" : "version 1");
    put_fmt(b, TAG_FACT, "freezer\t%s", h->cg.ice < 0 ? "none" : "version 2");
    put_fmt(b, TAG_FACT, "ids\t%s", h->ids);
}
