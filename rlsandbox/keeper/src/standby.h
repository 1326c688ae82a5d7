/* The process that waits for the episode's next command. */
#ifndef RLS_STANDBY_H
#define RLS_STANDBY_H
#include "command.h"

bool standby_wanted(const struct keeper *k);
void standby_ask(struct keeper *k);  /* has the init fork one, when there is none */
void standby_drop(struct keeper *k); /* the episode is over, or it has died */
void standby_told(struct keeper *k, const struct emsg *m, int pidfd); /* by the init, of the standby's job */
bool standby_take(struct chan *c, const struct ereq *r); /* gives it the request; false: there is none */
bool standby_lost(int sock); /* it ended without having said that it took what was sent to it */
void standby_settle(struct keeper *k); /* waits until one that was asked for is there; channels with jobs may end by it */
pid_t standby_pid(struct keeper *k);   /* as the episode's /proc numbers it; 0: none. It is no process of the episode's own */

#endif
