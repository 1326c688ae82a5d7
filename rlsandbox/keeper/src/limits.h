/* Limits, the keeper's half: who holds them, what happens over memory, and a watchdog where no cgroup counts. */
#ifndef RLS_LIMITS_H
#define RLS_LIMITS_H
#include "command.h"
#include "hub.h"

int limits_setup(struct keeper *k, const uint8_t *p, size_t n, const int *fds, size_t nfds, struct err *e);
int limits_inside(struct keeper *k, struct err *e); /* in the episode's init, before it gives up its rights */
int limits_timer(struct keeper *k);                 /* does what is due; ms until the next, -1 none */
void limits_begin(struct chan *c);                  /* a command begins: where none runs, what was killed before is not its doing */
void limits_ended(struct chan *c);                  /* a command's main process has ended: was it memory? */
bool limits_near(const struct keeper *k);           /* so near to its limit of memory that nothing may be made ahead */

#endif
