/* Many layers in one: what an overlay of them shows, written down, with its deletions. */
#include <dirent.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/xattr.h>

#include "stack.h"
#include "sys.h"
#include "trees.h"

/* files with several names keep them: where the first of each was put */
struct links {
    struct link {
        dev_t dev;
        ino_t ino;
        char *path; /* below `root` */
    } *p;
    size_t n, cap;
    int root;
};

static const char *link_find(const struct links *l, const struct stat *st)
{
    for (size_t i = 0; i < l->n; i++)
        if (l->p[i].dev == st->st_dev && l->p[i].ino == st->st_ino)
            return l->p[i].path;
    return NULL;
}

static void link_add(struct links *l, const struct stat *st, const char *path)
{
    if (l->n == l->cap) {
        size_t cap = l->cap ? l->cap * 2 : 64;
        struct link *q = realloc(l->p, cap * sizeof *q);
        if (!q)
            return; /* a copy instead of a link */
        l->p = q;
        l->cap = cap;
    }
    l->p[l->n] = (struct link){st->st_dev, st->st_ino, strdup(path)};
    l->n += l->p[l->n].path != NULL;
}

static int merge(int from, int to, int depth, struct links *l, const char *path);

static int merge_dir(int from, int to, const char *name, const struct stat *st, bool there, bool hides, int depth, struct links *l, const char *path)
{
    if (!there && mkdirat(to, name, 0700) < 0)
        return -1;
    int a = open_dir(from, name), b = open_dir(to, name), r = -1;
    if (a >= 0 && b >= 0 && (!hides || set_opaque(b) == 0) && merge(a, b, depth + 1, l, path) == 0 && copy_meta(a, b, st) == 0)
        r = 0;
    int no = errno;
    fd_close(&a);
    fd_close(&b);
    errno = no;
    return r;
}

static int merge_one(int from, int to, const char *name, int depth, struct links *l, const char *path)
{
    struct stat st, old;
    if (fstatat(from, name, &st, AT_SYMLINK_NOFOLLOW) < 0)
        return -1;
    bool there = fstatat(to, name, &old, AT_SYMLINK_NOFOLLOW) == 0;
    bool hides = there && is_whiteout(&old); /* what lies below all layers stays hidden */
    if (S_ISDIR(st.st_mode)) {
        int sub = open_dir(from, name);
        bool opaque = sub >= 0 && is_opaque(sub);
        fd_close(&sub);
        if (there && (opaque || !S_ISDIR(old.st_mode))) {
            hides |= !S_ISDIR(old.st_mode) || opaque;
            if (remove_tree(to, name) < 0)
                return -1;
            there = false;
        }
        return merge_dir(from, to, name, &st, there, hides || opaque, depth, l, path);
    }
    if (there && remove_tree(to, name) < 0)
        return -1;
    if (is_whiteout(&st))
        return mknodat(to, name, S_IFCHR, 0);
    const char *first = st.st_nlink > 1 && S_ISREG(st.st_mode) ? link_find(l, &st) : NULL;
    if (first && linkat(l->root, first, to, name, 0) == 0)
        return 0;
    if (copy_tree(from, name, to, name, depth) < 0)
        return -1;
    if (st.st_nlink > 1 && S_ISREG(st.st_mode))
        link_add(l, &st, path);
    return 0;
}

static int merge(int from, int to, int depth, struct links *l, const char *path)
{
    int again = openat(from, ".", O_RDONLY | O_DIRECTORY | O_CLOEXEC), r = 0;
    DIR *d = again < 0 ? NULL : fdopendir(again);
    struct dirent *x;
    if (!d || depth >= TREE_DEPTH_MAX)
        r = -1;
    if (d && r < 0)
        errno = ELOOP;
    while (r == 0 && (errno = 0, x = readdir(d))) {
        char *sub;
        if (!strcmp(x->d_name, ".") || !strcmp(x->d_name, ".."))
            continue;
        if (asprintf(&sub, "%s%s%s", path, *path ? "/" : "", x->d_name) < 0) {
            r = -1;
            break;
        }
        r = merge_one(from, to, x->d_name, depth, l, sub);
        free(sub);
    }
    int no = errno;
    if (d)
        closedir(d);
    errno = no;
    return r;
}

int flatten(const struct keeper *k, const char *const *from, unsigned n, const char *to, struct err *e)
{
    char path[128];
    path_join(path, sizeof path, "%s/u", to);
    if (mkdir(path, 0755) < 0)
        return fail(e, errno, "make a directory to flatten layers");
    for (unsigned o = 0; o < k->set.overlays; o++) {
        path_join(path, sizeof path, "%s/u/%u", to, o);
        int b = mkdir(path, 0755) < 0 ? -1 : open(path, O_RDONLY | O_DIRECTORY | O_CLOEXEC), r = b < 0 ? -1 : 0;
        for (unsigned i = n; r == 0 && i-- > 0;) {
            struct links l = {.root = b};
            struct stat st;
            path_join(path, sizeof path, "%s/u/%u", from[i], o);
            int a = open(path, O_RDONLY | O_DIRECTORY | O_CLOEXEC);
            r = a < 0 || fstat(a, &st) < 0 || merge(a, b, 0, &l, "") < 0 || copy_meta(a, b, &st) < 0 ? -1 : 0;
            for (size_t j = 0; j < l.n; j++)
                free(l.p[j].path);
            free(l.p);
            fd_close(&a);
        }
        if (r < 0)
            fail(e, errno, "flatten the layers of %s", k->set.overlay[o].target);
        fd_close(&b);
        if (r < 0)
            return -1;
    }
    return 0;
}
