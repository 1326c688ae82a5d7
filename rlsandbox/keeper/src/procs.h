/* The episode's processes, read from its own /proc by the keeper, outside. */
#ifndef RLS_PROCS_H
#define RLS_PROCS_H
#include "command.h"

struct proc {
    pid_t pid, ppid;
    pid_t session;
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
/* Whether orphans come back to their command. Under an old gVisor all go to the container's first process: a command's tree then
 * takes in those of its own session, and what left that is found by procs_mark_container only. */
bool procs_subreaper(void);
/* In a container without subreapers: all but the keeper's own, of which `self` is the innermost. Its first process is ours, so
 * nobody can be elsewhere. -1: this is no such container. */
ssize_t procs_mark_container(struct procs *ps, pid_t self);
/* the number under which procs_dir lists what the descriptor stands for; -1 when it is gone */
pid_t procs_number(struct keeper *k, int pidfd, pid_t inside);
/* Whether it is dead, or on its way there: killed, and not through with it yet. */
bool procs_dying(int dir, pid_t pid);
int procs_signal(int dir, pid_t pid, int sig); /* never hits a process that took the number over meanwhile */

void tree_kill(struct chan *c);
bool tree_gone(struct chan *c); /* whether all of a killed tree has died, or there was time enough */
void tree_signal(struct chan *c, int sig);

#endif
