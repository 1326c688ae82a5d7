/* `keeper dial` and `keeper listen`: whether one pod reaches another, asked from inside an image that may hold no program
 * for it. dial ends with 0 as soon as it is connected, with 1 when that was tried for so many seconds. */
#include <arpa/inet.h>
#include <netinet/in.h>
#include <poll.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <unistd.h>

#include "container.h"

enum { MOST_S = 600, TRY_MS = 1000, PAUSE_MS = 200 };

static bool number(const char *s, long least, long most, long *v)
{
    char *end;
    *v = strtol(s, &end, 10);
    return *s && !*end && *v >= least && *v <= most;
}

static socklen_t address(struct sockaddr_storage *a, const char *host, long port)
{
    struct sockaddr_in *v4 = (struct sockaddr_in *)a;
    struct sockaddr_in6 *v6 = (struct sockaddr_in6 *)a;
    memset(a, 0, sizeof *a);
    if (inet_pton(AF_INET, host, &v4->sin_addr) == 1) {
        v4->sin_family = AF_INET;
        v4->sin_port = htons((uint16_t)port);
        return sizeof *v4;
    }
    if (inet_pton(AF_INET6, host, &v6->sin6_addr) == 1) {
        v6->sin6_family = AF_INET6;
        v6->sin6_port = htons((uint16_t)port);
        return sizeof *v6;
    }
    return 0;
}

static bool reaches(const struct sockaddr_storage *a, socklen_t n)
{
    int s = socket(a->ss_family, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0), no = 0;
    socklen_t len = sizeof no;
    bool done = s >= 0 && connect(s, (const struct sockaddr *)a, n) == 0;
    if (s >= 0 && !done && errno == EINPROGRESS) {
        struct pollfd p = {s, POLLOUT, 0};
        done = poll(&p, 1, TRY_MS) == 1 && getsockopt(s, SOL_SOCKET, SO_ERROR, &no, &len) == 0 && no == 0;
    }
    if (s >= 0)
        close(s);
    return done;
}

int dial_main(int argc, char **argv)
{
    struct sockaddr_storage a;
    socklen_t n;
    long port, wait_s, for_s;
    if (argc != 6 || !number(argv[3], 1, 65535, &port) || !number(argv[4], 0, MOST_S, &wait_s) || !number(argv[5], 1, MOST_S, &for_s) || !(n = address(&a, argv[2], port)))
        return 2;
    sleep((unsigned)wait_s);
    uint64_t end = now_ns() + (uint64_t)for_s * 1000000000u;
    do {
        if (reaches(&a, n))
            return 0;
        poll(NULL, 0, PAUSE_MS);
    } while (now_ns() < end);
    return 1;
}

int listen_main(int argc, char **argv)
{
    struct sockaddr_in6 a = {.sin6_family = AF_INET6, .sin6_addr = IN6ADDR_ANY_INIT};
    struct sockaddr_in b = {.sin_family = AF_INET};
    long port, for_s;
    if (argc != 4 || !number(argv[2], 1, 65535, &port) || !number(argv[3], 1, MOST_S, &for_s))
        return 2;
    a.sin6_port = b.sin_port = htons((uint16_t)port);
    int s = socket(AF_INET6, SOCK_STREAM | SOCK_CLOEXEC, 0); /* takes both kinds */
    if (s < 0 || bind(s, (struct sockaddr *)&a, sizeof a) < 0) {
        s = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
        if (s < 0 || bind(s, (struct sockaddr *)&b, sizeof b) < 0)
            return 1;
    }
    if (listen(s, 16) < 0)
        return 1;
    uint64_t end = now_ns() + (uint64_t)for_s * 1000000000u;
    while (now_ns() < end) {
        struct pollfd p = {s, POLLIN, 0};
        int got = poll(&p, 1, TRY_MS) == 1 ? accept(s, NULL, NULL) : -1;
        if (got >= 0)
            close(got);
    }
    return 0;
}
