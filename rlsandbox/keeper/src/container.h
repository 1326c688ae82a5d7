/* The keeper as a container's first process, and the bridge to it. */
#ifndef RLS_CONTAINER_H
#define RLS_CONTAINER_H
#include "util.h"

#define CONTAINER_RUN "/.rlsandbox-run" /* a volume of its own: nothing of it is in any episode's view */
#define CONTAINER_DIR "s"
#define CONTAINER_SOCKET CONTAINER_DIR "/keeper"

enum { CONTAINER_GRACE_S = 60, BRIDGE_SILENT_S = 35 };

int init_main(int argc, char **argv);
int dial_main(int argc, char **argv);
int listen_main(int argc, char **argv);
int bridge_main(const char *run, unsigned silent_s);

#endif
