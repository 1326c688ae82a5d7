/* Entries of LIST, STAT and CHANGES, as docs/protocol.md has them. */
#ifndef RLS_ENTRY_H
#define RLS_ENTRY_H
#include <sys/stat.h>

#include "util.h"

enum { ENTRY_HEAD = 33 };
char entry_kind(mode_t mode);                                                              /* f d l o */
int entry_put(struct buf *b, char kind, const struct stat *st, const char *name, size_t n); /* -1 ENOMEM */

#endif
