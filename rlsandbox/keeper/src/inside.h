/* A child of the episode's init. */
#ifndef RLS_INSIDE_H
#define RLS_INSIDE_H
#include "sandbox.h"

struct inside {
    int result;
    int null; /* /dev/null, opened before; -1: not yet */
    const uint8_t *p; /* the request's fields */
    size_t n;
    uid_t uid;
    gid_t gid;
    char home[256], shell[256], name[64];
    bool has_user;
    bool above; /* a file operation of the keeper itself, where commands are another user's, or where it is one of no rights */
};

_Noreturn void give_up(struct inside *in, struct err *e);
_Noreturn void done(struct inside *in, struct buf *reply);
/* inside_files.c: content comes on descriptor 0 and goes to 1 */
_Noreturn void file_op(struct inside *in, uint32_t op, char *path, struct err *e);

#endif
