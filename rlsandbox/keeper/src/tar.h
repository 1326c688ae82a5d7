/* Layers as tar streams: POSIX with extended headers, deletions as OCI image layers have them (.wh.NAME, .wh..wh..opq). */
#ifndef RLS_TAR_H
#define RLS_TAR_H
#include "worker.h"

/* A file whose own name begins with .wh. is no deletion: this extended header says so. */
#define TAR_LITERAL "RLSANDBOX.literal"
#define TAR_XATTR "SCHILY.xattr."
#define TAR_WHITEOUT ".wh."
#define TAR_OPAQUE ".wh..wh..opq"
enum { TAR_BLOCK = 512, TAR_PATH_MAX = 64 << 10, TAR_HEADERS_MAX = 1 << 20 };

void work_export(struct worker *w); /* export.c */
void work_import(struct worker *w); /* import.c */
/* import.c, in the keeper: where the helper puts the layer; then the layer is made of it, or it is thrown away */
int import_begin(struct keeper *k, struct chan *c, struct err *e);
int import_finish(struct chan *c, struct buf *reply, struct err *e);
void import_drop(struct keeper *k, unsigned place, bool sealed);

#endif
