/* Limits by cgroups, the hub's half (cgroups.c); the keeper's half is limits.c. */
#ifndef RLS_CGROUPS_H
#define RLS_CGROUPS_H
#include "hub.h"

/* in a container: its limits are the pod's, and names made of our pids would be those of other containers' hubs too */
extern bool cgroups_off;

void cgroups_setup(struct hub *h);
bool cgroups_any(const struct hub *h);
/* Groups of that name wherever limits can be set, without any yet: descriptors to join them by (room for CG_KINDS), and the kinds that
 * each of them is for, as bits. */
int cgroups_open(struct hub *h, const char *group, int *fds, unsigned *kinds, unsigned *n);
/* Makes the groups that the settings ask for and puts `pid` in, but for the kinds (bits) that it is in already. Adds facts and TAG_CG_FILE roles to `facts`, in the order of
 * the files in `fds` (room for CG_FILES). The caller closes them, after an error as well. */
int cgroups_create(struct hub *h, const char *group, pid_t pid, unsigned in, const uint8_t *p, size_t n, int *fds, size_t *nfds, struct buf *facts, struct err *e);
/* A group of version 2 for freezing what is in `group`: descriptors of its cgroup.procs and cgroup.freeze; false: there is none */
bool cgroups_ice(struct hub *h, const char *group, int fds[2]);
bool cgroups_remove(struct hub *h, const char *group); /* false: in use, try again */
void cgroups_end(struct hub *h);

#endif
