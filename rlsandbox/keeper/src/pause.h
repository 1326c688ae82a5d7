/* PAUSE and RESUME. */
#ifndef RLS_PAUSE_H
#define RLS_PAUSE_H
#include "command.h"

void op_pause(struct keeper *k, uint32_t channel, const uint8_t *p, size_t n);
void op_resume(struct keeper *k, uint32_t channel, const uint8_t *p, size_t n);
void pause_ice(struct keeper *k, int *fds, size_t nfds); /* the hub's answer: cgroup.procs and cgroup.freeze, or nothing */
void pause_forget(struct keeper *k);                     /* the episode has ended */

#endif
