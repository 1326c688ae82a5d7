/* The episode's processes, read from its own /proc by the keeper, outside. */
#ifndef RLS_PROCS_H
#define RLS_PROCS_H
#include "command.h"

struct proc {
    pid_t pid, ppid;
    char state;
    bool in; /* scratch: belongs to what is looked for */
};
struct procs {
    struct proc *p;
    size_t n, cap;
};

/* A directory whose numbers are those of `procs`: the episode's /proc, or the keeper's own where that one is foreign.
 * The caller closes it. */
int procs_dir(struct keeper *k);
int procs_read(int dir, struct procs *ps);
void procs_free(struct procs *ps);
/* marks `root` and everything below it; the number of marked ones */
size_t procs_mark_tree(struct procs *ps, pid_t root);
/* the number under which procs_dir lists what the descriptor stands for; -1 when it is gone */
pid_t procs_number(struct keeper *k, int pidfd, pid_t inside);
int procs_signal(int dir, pid_t pid, int sig); /* never hits a process that took the number over meanwhile */

void tree_kill(struct chan *c);
bool tree_gone(struct chan *c); /* whether all of a killed tree has died, or there was time enough */
void tree_signal(struct chan *c, int sig);

#endif
