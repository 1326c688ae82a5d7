/* The layers an episode stands on, and what can be done with its upper layer. */
#ifndef RLS_STACK_H
#define RLS_STACK_H
#include "worker.h"

int layer_make(struct keeper *k, const char *top, const char *name, struct err *e); /* of the tmpfs at `top`, on the stack; its slot */
int stack_set(struct keeper *k, const char *layer, struct err *e); /* "": the bare base. Nothing is changed on failure */
void op_seal(struct keeper *k, uint32_t channel, const uint8_t *p, size_t n);
void op_drop_layer(struct keeper *k, uint32_t channel, const uint8_t *p, size_t n);
void layer_given(struct keeper *k, const uint8_t *p, size_t n, int *fds, size_t nfds); /* by the hub; answers it */
/* flatten.c: `to` becomes the union of what a chain has, overlay by overlay; `from` is topmost first */
int flatten(const struct keeper *k, const char *const *from, unsigned n, const char *to, struct err *e);

#endif
