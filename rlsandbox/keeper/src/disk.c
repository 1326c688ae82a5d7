#include "disk.h"

#include <dirent.h>
#include <signal.h>
#include <stdlib.h>
#include <string.h>
#include <sys/file.h>
#include <sys/prctl.h>
#include <sys/stat.h>

#include "sys.h"
#include "trees.h"

int disk_open(struct hub *h, const char *place, const char *member, int *dir, struct err *e)
{
    int at = k_open_in(h->host, place, O_RDONLY | O_DIRECTORY, K_RESOLVE_IN_ROOT | K_RESOLVE_NO_MAGICLINKS), fd = -1;
    if (at < 0)
        return fail(e, errno, "open %.200s for upper layers", place);
    if (mkdirat(at, member, 0700) < 0 && errno != EEXIST)
        fail(e, errno, "make a directory for upper layers in %.200s", place);
    else if ((*dir = open_dir(at, member)) < 0 || fchown(*dir, h->root_uid, h->root_gid) < 0)
        fail(e, errno, "hand over the directory for upper layers in %.200s", place);
    else {
        struct k_mount_attr a = {.attr_set = K_ATTR_NOSUID | K_ATTR_NODEV};
        fd = k_open_tree(*dir, "", K_OPEN_TREE_CLONE | AT_EMPTY_PATH);
        if (fd < 0 || k_mount_setattr(fd, "", AT_EMPTY_PATH, &a) < 0) {
            fail(e, errno, "clone the mount of %.200s", place);
            fd_close(&fd);
        }
    }
    close(at);
    return fd;
}

/* a process of its own: it may take long */
static pid_t aside(void)
{
    pid_t p = fork();
    if (p == 0) {
        sigset_t none;
        sigemptyset(&none);
        sigprocmask(SIG_SETMASK, &none, NULL);
        prctl(PR_SET_PDEATHSIG, SIGKILL);
        prctl(PR_SET_NAME, "rls-remover");
    }
    return p;
}

static bool is_layer(const struct hub *h, int dir, const char *name)
{
    struct stat a, b;
    if (fstatat(dir, name, &a, AT_SYMLINK_NOFOLLOW) < 0)
        return false;
    for (int i = 0; i < MAX_LAYERS; i++)
        if (h->layers.at[i] && h->layers.at[i]->disk > 0 && fstat(h->layers.at[i]->disk, &b) == 0 && a.st_dev == b.st_dev && a.st_ino == b.st_ino)
            return true;
    return false;
}

void disk_end(struct hub *h, struct member *m)
{
    char path[160];
    if (m->disk <= 0)
        return;
    if (aside() == 0) {
        int again = openat(m->disk, ".", O_RDONLY | O_DIRECTORY | O_CLOEXEC);
        DIR *d = again < 0 ? NULL : fdopendir(again);
        struct dirent *x;
        while (d && (x = readdir(d)))
            if (strcmp(x->d_name, ".") && strcmp(x->d_name, "..") && !is_layer(h, m->disk, x->d_name))
                remove_tree(m->disk, x->d_name);
        if (path_join(path, sizeof path, "../%s", m->name) == 0)
            unlinkat(m->disk, path, AT_REMOVEDIR); /* unless a layer lies in it */
        _exit(0);
    }
    fd_close(&m->disk);
}

void disk_sealed(struct hub *h, struct member *m, int slot, const char *name)
{
    if (m->disk > 0 && h->layers.at[slot]->disk <= 0 && !strchr(name, '/'))
        h->layers.at[slot]->disk = open_dir(m->disk, name);
}

void disk_layer_gone(struct layers *l, struct layer *y)
{
    (void)l;
    if (y->disk <= 0)
        return;
    if (aside() == 0) {
        struct stat st, in;
        flock(y->disk, LOCK_EX); /* keepers that stand on it share the lock */
        int up = openat(y->disk, "..", O_RDONLY | O_DIRECTORY | O_CLOEXEC);
        DIR *d = up < 0 || fstat(y->disk, &st) < 0 ? NULL : fdopendir(up);
        struct dirent *x;
        while (d && (x = readdir(d)))
            if (fstatat(dirfd(d), x->d_name, &in, AT_SYMLINK_NOFOLLOW) == 0 && in.st_ino == st.st_ino && in.st_dev == st.st_dev)
                remove_tree(dirfd(d), x->d_name);
        _exit(0); /* an emptied directory of an ended member goes with the place */
    }
    fd_close(&y->disk);
}
