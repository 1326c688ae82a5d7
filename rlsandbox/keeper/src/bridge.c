/* `keeper connect`: what an exec stream of a container runs. It carries bytes between its stdin and stdout and the keeper's
 * socket, knows nothing of them, and ends with either: a process that was executed in a container outlives its client
 * when nobody tells it. */
#include <poll.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/prctl.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <unistd.h>

#include "container.h"

enum { ROOM = 64 << 10 };

struct pipe_half {
    int from, to;
    uint8_t *room;
    size_t at, len;
};

/* false: one of the two is over */
static bool carry(struct pipe_half *h, short from, short to)
{
    if (h->at == h->len && from) {
        ssize_t r = read(h->from, h->room, ROOM);
        if (r < 0 && (errno == EAGAIN || errno == EINTR))
            return true;
        if (r <= 0)
            return false;
        h->at = 0;
        h->len = (size_t)r;
        to = POLLOUT; /* most likely */
    }
    while (h->at < h->len && to) {
        ssize_t r = write(h->to, h->room + h->at, h->len - h->at);
        if (r < 0 && errno == EINTR)
            continue;
        if (r < 0)
            return errno == EAGAIN;
        h->at += (size_t)r;
    }
    return true;
}

int bridge_main(const char *run, unsigned silent_s)
{
    static uint8_t rooms[2][ROOM];
    struct sockaddr_un a = {.sun_family = AF_UNIX};
    prctl(PR_SET_DUMPABLE, 0);
    prctl(PR_SET_NAME, "rls-connect");
    signal(SIGPIPE, SIG_IGN);
    if (path_join(a.sun_path, sizeof a.sun_path, "%s/" CONTAINER_SOCKET, run) < 0) {
        fprintf(stderr, "keeper connect: %s is too long for a socket\n", run);
        return 2;
    }
    int s = socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0);
    if (s < 0 || connect(s, (struct sockaddr *)&a, sizeof a) < 0) {
        fprintf(stderr, "keeper connect: no keeper at %s: %s\n", a.sun_path, strerror(errno));
        return 3;
    }
    if (set_nonblock(s) < 0 || set_nonblock(1) < 0)
        return 5;
    struct pipe_half in = {0, s, rooms[0], 0, 0}, out = {s, 1, rooms[1], 0, 0};
    uint64_t heard = now_ns();
    for (;;) {
        bool in_full = in.at < in.len, out_full = out.at < out.len;
        struct pollfd p[3] = {{in_full ? -1 : 0, POLLIN, 0}, {s, (short)((out_full ? 0 : POLLIN) | (in_full ? POLLOUT : 0)), 0}, {out_full ? 1 : -1, POLLOUT, 0}};
        uint64_t silent = (now_ns() - heard) / 1000000u, most = (uint64_t)silent_s * 1000;
        if (silent >= most)
            return 4; /* the client pings: it is gone, or its stream is */
        if (poll(p, 3, (int)(most - silent) + 1) < 0 && errno != EINTR)
            return 5;
        if (p[0].revents)
            heard = now_ns();
        if (!carry(&in, p[0].revents, p[1].revents & (POLLOUT | POLLERR)) || !carry(&out, p[1].revents & (POLLIN | POLLHUP | POLLERR), p[2].revents))
            return 0;
    }
}
