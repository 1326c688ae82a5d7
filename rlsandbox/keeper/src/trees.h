/* Comparing and copying directory trees without ever following a link, for what looks from outside. */
#ifndef RLS_TREES_H
#define RLS_TREES_H
#include <sys/stat.h>

#include "util.h"

enum { TREE_DEPTH_MAX = 1000 };

bool is_whiteout(const struct stat *st);
bool is_opaque(int dir_fd);
int set_opaque(int dir_fd);
bool is_overlays_own(const char *xattr); /* nobody else's, on whatever kernel it was written */
/* Same content, mode, owner, time, attributes? Names are looked up in the open directories, links not followed. */
bool same_node(int a, const char *name_a, const struct stat *sa, int b, const char *name_b, const struct stat *sb);
bool same_meta(const struct stat *a, const struct stat *b); /* mode and owner */
bool same_xattrs(int a, int b);
int remove_tree(int dir, const char *name); /* whatever `name` is; -1 with errno */
/* Makes `name` in `to` a copy of `from`'s, with all below it. */
int copy_tree(int from, const char *name, int to, const char *to_name, int depth);
int copy_bytes(int from, int to, off_t size); /* into an empty file; holes stay holes */
/* The first data at or after `at`, and where it ends; -1 with ENXIO: there is none. */
off_t next_data(int fd, off_t at, off_t *end);
int copy_meta(int from_fd, int to_fd, const struct stat *st); /* owner, mode, xattrs, times */
uint64_t tree_bytes(int dir, int depth); /* what it takes on its disk, all below it */
int open_dir(int dir, const char *name);

#endif
