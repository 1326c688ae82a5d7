/* Sockets and interfaces of the episode's network namespace, for INSPECT. */
#include <arpa/inet.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>

#include "sys.h"
#include "worker.h"

/* A line at a time, since a table may be longer than any buffer. */
static void lines(int dir, const char *name, void (*fn)(struct worker *, const char *, char *), struct worker *w, const char *proto)
{
    char line[1024];
    int fd = openat(dir, name, O_RDONLY | O_CLOEXEC);
    FILE *f = fd < 0 ? NULL : fdopen(fd, "r");
    bool head = strcmp(name, "if_inet6") != 0; /* the others begin with a heading */
    while (f && fgets(line, sizeof line, f)) {
        line[strcspn(line, "\n")] = 0;
        if (!head)
            fn(w, proto, line);
        head = false;
    }
    if (f)
        fclose(f);
}

static void address(char *out, size_t cap, const char *hex)
{
    char ip[INET6_ADDRSTRLEN] = "?";
    uint32_t a[4] = {0};
    size_t n = strspn(hex, "0123456789ABCDEFabcdef");
    unsigned long port = hex[n] == ':' ? strtoul(hex + n + 1, NULL, 16) : 0;
    if (n == 8 || n == 32)
        for (size_t i = 0; i < n / 8; i++) {
            char word[9];
            memcpy(word, hex + 8 * i, 8);
            word[8] = 0;
            a[i] = (uint32_t)strtoul(word, NULL, 16);
        }
    inet_ntop(n == 32 ? AF_INET6 : AF_INET, a, ip, sizeof ip);
    path_join(out, cap, n == 32 ? "[%s]:%lu" : "%s:%lu", ip, port);
}

static const char *const tables[] = {"tcp", "tcp6", "udp", "udp6", "udplite", "udplite6", "raw", "raw6", "icmp", "icmp6"};

static void inet(struct worker *w, const char *proto, char *line)
{
    static const char *const states[] = {"", "established", "syn_sent", "syn_recv", "fin_wait1", "fin_wait2", "time_wait", "close", "close_wait", "last_ack", "listen", "closing", "new_syn_recv"};
    char local[64], remote[64], l[48], r[48];
    unsigned state;
    unsigned long uid = 0;
    if (sscanf(line, " %*s %47s %47s %x %*s %*s %*s %lu", l, r, &state, &uid) < 3)
        return;
    if (w->k->set.manifest && uid != w->k->set.uid) /* the pod's network is not only the episode's */
        return;
    address(local, sizeof local, l);
    address(remote, sizeof remote, r);
    fact(w, "socket");
    field_s(w, proto);
    field_s(w, local);
    field_s(w, remote);
    field_s(w, strncmp(proto, "tcp", 3) ? state == 1 ? "connected" : "bound" : state < COUNT_OF(states) ? states[state] : "?");
    fact_end(w);
}

static void unix_socket(struct worker *w, const char *proto, char *line)
{
    unsigned flags, type, state;
    int at = 0;
    if (sscanf(line, "%*s %*s %*s %x %x %x %*s%n", &flags, &type, &state, &at) != 3)
        return;
    const char *path = line + at;
    while (*path == ' ')
        path++;
    (void)proto;
    if (w->k->set.manifest && *path != '@') /* the keeper's own; those with a path are found as files */
        return;
    fact(w, "socket");
    field_s(w, type == 1 ? "unix" : type == 2 ? "unix-dgram" : "unix-seqpacket");
    field_s(w, path);
    field_s(w, "");
    field_s(w, flags & 0x10000 ? "listen" : state == 3 ? "connected" : "open");
    fact_end(w);
}

static void netlink(struct worker *w, const char *proto, char *line)
{
    unsigned family, pid;
    if (sscanf(line, "%*s %u %u", &family, &pid) != 2 || !pid) /* 0: the kernel's own */
        return;
    fact(w, "socket");
    field_s(w, proto);
    field_f(w, "%u:%u", family, pid);
    field_s(w, "");
    field_s(w, "open");
    fact_end(w);
}

static void packet(struct worker *w, const char *proto, char *line)
{
    (void)line;
    fact(w, "socket");
    field_s(w, proto);
    field_s(w, "");
    field_s(w, "");
    field_s(w, "open");
    fact_end(w);
}

static void interface(struct worker *w, const char *proto, char *line)
{
    char *colon = strchr(line, ':');
    (void)proto;
    if (!colon) /* the second heading */
        return;
    *colon = 0;
    while (*line == ' ')
        line++;
    fact(w, "net");
    field_s(w, "if");
    field_s(w, line);
    fact_end(w);
}

static void route(struct worker *w, const char *proto, char *line)
{
    char name[32], to[16], gate[16];
    if (sscanf(line, "%31s %15s %15s", name, to, gate) != 3)
        return;
    fact(w, "net");
    field_s(w, proto);
    field_s(w, name);
    field_s(w, to);
    field_s(w, gate);
    fact_end(w);
}

static void inet6_address(struct worker *w, const char *proto, char *line)
{
    char addr[40], dev[32];
    unsigned prefix;
    if (sscanf(line, "%39s %*x %x %*x %*x %31s", addr, &prefix, dev) != 3)
        return;
    fact(w, "net");
    field_s(w, proto);
    field_s(w, dev);
    field_f(w, "%s/%u", addr, prefix);
    fact_end(w);
}

/* In mode manifest: what can be told to be of the commands' user, in the network that it shares. */
void facts_sockets(struct worker *w, int net)
{
    for (size_t i = 0; i < COUNT_OF(tables); i++)
        lines(net, tables[i], inet, w, tables[i]);
    lines(net, "unix", unix_socket, w, "unix");
}

/* The namespace is looked at through /proc/<pid>/net, never entered: a keeper might not come back. */
void facts_network(struct worker *w, int net)
{
    char text[1024];
    int used = -1;
    lines(net, "dev", interface, w, "if");
    lines(net, "route", route, w, "route");
    lines(net, "if_inet6", inet6_address, w, "addr");
    /* How many sockets of any kind the namespace has. None is the usual answer, and the tables are dear. */
    if (read_file_at(net, "sockstat", text, sizeof text) > 0 && sscanf(text, "sockets: used %d", &used) == 1 && used == 0)
        return;
    size_t before = w->count;
    for (size_t i = 0; i < COUNT_OF(tables); i++)
        lines(net, tables[i], inet, w, tables[i]);
    lines(net, "unix", unix_socket, w, "unix");
    lines(net, "netlink", netlink, w, "netlink");
    lines(net, "packet", packet, w, "packet");
    if (used > 0 && w->count == before) {
        fact(w, "socket");
        field_s(w, "other");
        field_f(w, "%d sockets that no table lists", used);
        field_s(w, "");
        field_s(w, "open");
        fact_end(w);
    }
}
