/* A sandbox where all processes of the container share their mounts (gVisor until 2023, which ignores mount namespaces; tried by
 * doing it). The keeper lives in a chroot of its own, a tmpfs with the layout that mounts.c describes; an episode in another
 * one, /k/v/<generation>, which its keeper unmounts. What it may not do is left to capabilities, seccomp and the pid namespace. */
#ifndef RLS_SHARED_H
#define RLS_SHARED_H
#include "procs.h"
#include "sandbox.h"

#define SHARED_VIEWS "/k/v/"

/* Whether a mount that a child makes in its own mount namespace is seen here. `run`: a directory of a volume of ours. */
bool shared_here(const char *run);
void shared_leave(const char *run); /* unmounts all that a keeper left there */

/* In the keeper, before anything of the sandbox: its place, the container's root as the base, and the chroot. */
int shared_enter(struct keeper *k, struct err *e);
/* As view_below and view_build do. */
int shared_below(struct keeper *k, struct err *e);
int shared_view(struct keeper *k, int *root_fd, int *proc_fd, struct err *e);
void shared_view_drop(unsigned generation);
/* A tmpfs for a helper alone, which goes with it; its working directory afterwards. */
int shared_scratch(struct err *e);

/* The init of a pid namespace ends here before its processes have, which it kills: those of the episode that is over, as its own
 * /proc lists them, which the keeper holds on to. How many, marked in `ps`; -1 with errno. */
ssize_t shared_leftovers(struct keeper *k, struct procs *ps);
int shared_end(struct keeper *k, struct err *e); /* until there are none; what is the container's is as it was then */
#endif
