/* Upper layers on a disk instead of a tmpfs: the hub's half. <place>/<member>/<number> each; sealed ones live as long as any
 * keeper holds a lock on their directory. */
#ifndef RLS_DISK_H
#define RLS_DISK_H
#include "hub.h"

/* The directory of a new member below `place`, as a mount for its keeper; h's copy of it in *dir. */
int disk_open(struct hub *h, const char *place, const char *member, int *dir, struct err *e);
void disk_end(struct hub *h, struct member *m);                      /* the member is gone: all but sealed layers goes */
void disk_sealed(struct hub *h, struct member *m, int slot, const char *name); /* <name> of that member became a layer */
void disk_layer_gone(struct layers *l, struct layer *y);             /* removed when no keeper holds it any more */

#endif
