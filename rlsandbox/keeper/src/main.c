/* keeper: starts episodes, runs commands, resets, reports residue. docs/protocol.md says how it is spoken to. */
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/syscall.h>
#include <unistd.h>

#include "cgroups.h"
#include "container.h"
#include "hub.h"
#include "protocol.h"

#ifndef RLS_HASH
#define RLS_HASH "unknown"
#endif

#if defined(__SANITIZE_ADDRESS__)
const char *__asan_default_options(void); /* no leak check: a tracer is what a sandbox forbids */
const char *__asan_default_options(void)
{
    return "detect_leaks=0:abort_on_error=1";
}
#endif

static int usage(void)
{
    fputs("usage: keeper hub --fd N [--client PID] [--isolation none] [--cgroups none]   (started by rlsandbox)\n"
          "       keeper init [--option VALUE]..   (a container's first process)\n"
          "       keeper connect [RUN]             (what an exec stream of that container runs)\n"
          "       keeper dial ADDRESS PORT WAIT FOR, keeper listen PORT FOR   (whether pods reach each other; seconds)\n"
          "       keeper version\n", stderr);
    return 2;
}

/* What the one that started us ignores or blocks is no business of ours: with SIGCHLD ignored (daemons, `trap '' CHLD`)
 * children vanish unseen, and no wait for one ever succeeds. */
static void own_signals(void)
{
    sigset_t none;
    const unsigned long dfl[4] = {0}; /* as the kernel has them: a libc keeps some for itself */
    sigemptyset(&none);
    sigprocmask(SIG_SETMASK, &none, NULL);
    for (int s = 1; s < 65; s++) {
        unsigned long had[4] = {0};
        if (syscall(SYS_rt_sigaction, s, NULL, had, sizeof had[0]) == 0 && had[0] == (unsigned long)SIG_IGN)
            syscall(SYS_rt_sigaction, s, dfl, NULL, sizeof dfl[0]);
    }
}

int main(int argc, char **argv)
{
    own_signals();
    if (argc == 2 && strcmp(argv[1], "version") == 0) {
        printf("keeper protocol=%d hash=%s\n", RLS_VERSION, RLS_HASH);
        return 0;
    }
    if (argc == 2 && strcmp(argv[1], "zygote") == 0)
        return zygote_main(3);
    if (argc >= 2 && strcmp(argv[1], "init") == 0)
        return init_main(argc, argv);
    if (argc >= 2 && strcmp(argv[1], "dial") == 0)
        return dial_main(argc, argv);
    if (argc >= 2 && strcmp(argv[1], "listen") == 0)
        return listen_main(argc, argv);
    if ((argc == 2 || argc == 3) && strcmp(argv[1], "connect") == 0)
        return bridge_main(argc == 3 ? argv[2] : CONTAINER_RUN, BRIDGE_SILENT_S);
    if (argc >= 4 && strcmp(argv[1], "hub") == 0) {
        int fd = -1;
        pid_t client = getppid();
        bool bare = false;
        for (int i = 2; i + 1 < argc; i += 2) {
            char *end;
            if (strcmp(argv[i], "--isolation") == 0) {
                if (strcmp(argv[i + 1], "none"))
                    return usage();
                bare = true;
                continue;
            }
            if (strcmp(argv[i], "--cgroups") == 0) {
                if (strcmp(argv[i + 1], "none"))
                    return usage();
                cgroups_off = true;
                continue;
            }
            long v = strtol(argv[i + 1], &end, 10);
            if (*end || v < 0 || v > 0x7fffffff)
                return usage();
            if (strcmp(argv[i], "--fd") == 0)
                fd = (int)v;
            else if (strcmp(argv[i], "--client") == 0)
                client = (pid_t)v;
            else
                return usage();
        }
        return fd < 0 ? usage() : hub_main(fd, client, bare);
    }
    return usage();
}
