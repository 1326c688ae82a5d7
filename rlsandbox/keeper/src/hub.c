/* The hub's requests and the lives of its sandboxes. */
#include "hub.h"

#include <poll.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/epoll.h>
#include <sys/prctl.h>
#include <sys/resource.h>
#include <sys/signalfd.h>
#include <sys/socket.h>
#include <sys/wait.h>

#include "cgroups.h"
#include "disk.h"
#include "sandbox.h"
#include "sys.h"

#ifndef RLS_HASH
#define RLS_HASH "unknown"
#endif

enum { GONE_MS = 10 };

static struct member *member_find(struct hub *h, const char *name)
{
    for (struct member *m = h->members; m; m = m->next)
        if (strcmp(m->name, name) == 0)
            return m;
    return NULL;
}

void groups_free(struct hub *h, const char *name)
{
    if (cgroups_remove(h, name))
        return;
    struct gone *g = calloc(1, sizeof *g);
    if (!g)
        return; /* without a note the hub's end removes it */
    path_join(g->name, sizeof g->name, "%s", name);
    g->next = h->gone;
    h->gone = g;
}

static void member_free(struct hub *h, struct member *m)
{
    for (struct member **p = &h->members; *p; p = &(*p)->next)
        if (*p == m) {
            *p = m->next;
            break;
        }
    loop_drop(&h->loop, &m->src);
    fd_close(&m->stream);
    groups_free(h, m->group);
    disk_end(h, m);
    free(m);
}

static void gone_retry(struct hub *h)
{
    for (struct gone **p = &h->gone; *p;) {
        struct gone *g = *p;
        if (cgroups_remove(h, g->name)) {
            *p = g->next;
            free(g);
        } else
            p = &g->next;
    }
}

static void create_failed(struct member *m, int no, const char *what)
{
    if (m->create_channel)
        conn_fail(&m->hub->conn, m->create_channel, no, what);
    m->create_channel = 0;
}

static void created(struct member *m, const uint8_t *room, size_t n);

/* where it may freeze its episode's processes */
static void ice(struct member *m)
{
    int fds[2] = {-1, -1};
    struct buf b = {0};
    bool ok = cgroups_ice(m->hub, m->group, fds);
    if (put_str(&b, TAG_KIND, "ice") < 0 || msg_send(m->src.fd, b.p, b.len, fds, ok ? 2 : 0) < 0)
        kill(m->pid, SIGKILL); /* it would wait for ever */
    buf_free(&b);
    fd_close(&fds[0]);
    fd_close(&fds[1]);
}

static void given(struct hub *h, const uint8_t *p, size_t n)
{
    char what[300] = "give a layer";
    uint32_t channel = (uint32_t)tlv_get(p, n, TAG_COUNT, 0), no = (uint32_t)tlv_get(p, n, TAG_ERRNO, 0);
    tlv_str(p, n, TAG_WHAT, what, sizeof what);
    if (no)
        conn_fail(&h->conn, channel, (int)no, what);
    else
        conn_send(&h->conn, T_REPLY, 0, channel, NULL, 0);
}

/* What a keeper says: that it is ready or why not; that it sealed a layer; that it took one. */
static void from_keeper(struct src *s, uint32_t events)
{
    struct member *m = s->owner;
    struct hub *h = m->hub;
    static uint8_t room[64 << 10];
    int fds[MAX_CHAIN];
    size_t nfds = COUNT_OF(fds);
    char kind[16] = "";
    (void)events;
    ssize_t n = msg_recv(s->fd, room, sizeof room, fds, &nfds);
    if (n <= 0) {
        loop_drop(&h->loop, s); /* its death is reported by the kernel */
        return;
    }
    tlv_str(room, (size_t)n, TAG_KIND, kind, sizeof kind);
    if (strcmp(kind, "sealed") == 0) {
        struct err e = {0};
        char name[32] = "";
        int slot = layers_take(&h->layers, room, (size_t)n, fds, nfds, &e);
        if (slot >= 0 && tlv_str(room, (size_t)n, TAG_PATH, name, sizeof name) > 0)
            disk_sealed(h, m, slot, name);
        if (slot < 0)
            fprintf(stderr, "keeper hub: cannot %s: %s\n", e.what, strerror(e.no)); /* giving it will say it again */
        layers_gc(&h->layers, NULL, 0);
    } else if (strcmp(kind, "ice") == 0)
        ice(m);
    else if (strcmp(kind, "given") == 0)
        given(h, room, (size_t)n);
    else if (m->create_channel)
        created(m, room, (size_t)n);
    for (size_t i = 0; i < nfds; i++)
        close(fds[i]);
}

/* That it is ready, or why not. */
static void created(struct member *m, const uint8_t *room, size_t n)
{
    struct hub *h = m->hub;
    char what[300];
    uint32_t no = (uint32_t)tlv_get(room, (size_t)n, TAG_ERRNO, 0);
    if (no) {
        if (tlv_str(room, (size_t)n, TAG_WHAT, what, sizeof what) < 0)
            strcpy(what, "make a sandbox");
        create_failed(m, (int)no, what);
        return;
    }
    m->ready = true;
    conn_send_fd(&h->conn, T_REPLY, m->create_channel, room, (size_t)n, m->stream);
    m->stream = -1;
    m->create_channel = 0;
}

static void on_child(struct src *s, uint32_t events)
{
    struct hub *h = s->owner;
    struct signalfd_siginfo si;
    int status;
    pid_t p;
    (void)events;
    while (read(s->fd, &si, sizeof si) > 0)
        ;
    while ((p = waitpid(-1, &status, WNOHANG)) > 0) {
        spare_died(h, p);
        if (p == h->zygote_pid || p == h->bare_pid)
            h->loop.stop = true;
        for (struct member *m = h->members; m; m = m->next)
            if (m->pid == p) {
                /* it may have said why: of its end and of its words either may be heard first */
                for (struct pollfd q = {m->src.fd, POLLIN, 0}; m->create_channel && q.fd >= 0 && poll(&q, 1, 0) > 0; q.fd = m->src.fd)
                    from_keeper(&m->src, EPOLLIN);
                create_failed(m, ECHILD, "make a sandbox: its keeper died");
                if (m->dispose_channel)
                    conn_send(&h->conn, T_REPLY, 0, m->dispose_channel, NULL, 0);
                member_free(h, m);
                break;
            }
    }
}

/* ---- CREATE ---- */

struct base {
    int fds[MAX_LOWERS + 2 + CG_FILES];
    size_t n;
    bool bound[MAX_LOWERS]; /* shown as it is: what changes in it is seen anyway */
};

static int base_add(struct hub *h, struct base *b, const uint8_t *p, size_t n, bool shown, struct err *e)
{
    char path[4096];
    if (!n || n >= sizeof path || memchr(p, 0, n) || p[0] != '/')
        return fail(e, EINVAL, "read a base directory: an absolute path is wanted");
    memcpy(path, p, n);
    path[n] = 0;
    if (b->n == MAX_LOWERS)
        return fail(e, E2BIG, "open the base: over %d directories", MAX_LOWERS);
    int fd = place_open(h, path, shown, e);
    if (fd < 0)
        return -1;
    b->bound[b->n] = shown;
    b->fds[b->n++] = fd;
    return 0;
}

static int base_open(struct hub *h, struct base *b, const uint8_t *p, size_t n, struct err *e)
{
    struct tlv_in it = {p, n};
    struct tlv t;
    while (tlv_next(&it, &t) == 1)
        if (t.tag == TAG_ROOT && base_add(h, b, t.p, t.len, false, e) < 0)
            return -1;
    it = (struct tlv_in){p, n};
    while (tlv_next(&it, &t) == 1) {
        if (t.tag != TAG_OVERLAY && t.tag != TAG_BIND)
            continue;
        const uint8_t *end = t.p + t.len, *s = memchr(t.p, '=', t.len);
        if (!s)
            return fail(e, EINVAL, "read an overlay or bind: no `=` in it");
        for (s++;; s++) {
            const uint8_t *colon = t.tag == TAG_OVERLAY ? memchr(s, ':', (size_t)(end - s)) : NULL;
            if (base_add(h, b, s, (size_t)((colon ? colon : end) - s), t.tag == TAG_BIND, e) < 0)
                return -1;
            if (!colon)
                break;
            s = colon;
        }
    }
    int dev = place_dev(h, e);
    if (dev < 0)
        return -1;
    b->fds[b->n++] = dev;
    return 0;
}

/* an upper layer on a disk comes after /dev */
static int upper_open(struct hub *h, struct member *m, struct base *b, const uint8_t *p, size_t n, struct err *e)
{
    char upper[4096];
    int r = tlv_str(p, n, TAG_UPPER, upper, sizeof upper);
    if (r == -1 || (r >= 0 && (!*upper || strcmp(upper, "tmpfs") == 0)))
        return 0;
    if (r < 0 || strncmp(upper, "disk:/", 6))
        return fail(e, EINVAL, "read where upper layers go: tmpfs or disk:/directory is wanted");
    int fd = disk_open(h, upper + 5, m->name, &m->disk, e);
    if (fd < 0)
        return -1;
    b->fds[b->n++] = fd;
    return 0;
}

static int facts_add(struct hub *h, const struct member *m, struct buf *b)
{
    if (m->shared)
        return put_str(b, TAG_FACT, "ids=host") < 0 || put_str(b, TAG_FACT, "isolation=chroot") < 0 ? -1 : 0;
    if (m->bare)
        return put_str(b, TAG_FACT, "ids=host") < 0 || put_str(b, TAG_FACT, "isolation=none") < 0 ? -1 : 0;
    return put_fmt(b, TAG_FACT, "ids=%s", h->ids) < 0 || (strcmp(h->ids, "one") == 0 && put_str(b, TAG_KIND, "one") < 0) ? -1 : 0;
}

/* Limits, then its settings and all that they name, to the keeper at m->src. */
static int equip(struct member *m, struct base *base, unsigned in, const uint8_t *p, size_t n, struct err *e)
{
    struct hub *h = m->hub;
    struct buf settings = {0};
    size_t files = 0;
    int r = buf_add(&settings, p, n) < 0 || facts_add(h, m, &settings) < 0 ? fail(e, errno, "prepare a sandbox's settings") : 0;
    if (r == 0) {
        r = cgroups_create(h, m->group, m->pid, in, p, n, base->fds + base->n, &files, &settings, e);
        base->n += files;
    }
    if (r == 0 && msg_send(m->src.fd, settings.p, settings.len, base->fds, base->n) < 0)
        r = fail(e, errno, "send a sandbox its settings (%zu bytes)", settings.len);
    buf_free(&settings);
    return r;
}

static void base_close(struct base *b)
{
    for (size_t i = 0; i < b->n; i++)
        close(b->fds[i]);
}

/* Which directories these are, and what of them goes into a view: all but /dev, which is the hub's own. */
static int base_seen(const struct base *b, struct buf *seen, struct err *e)
{
    for (size_t i = 0; i + 1 < b->n; i++) {
        struct stat st;
        if (fstat(b->fds[i], &st) < 0)
            return fail(e, errno, "look at base directory %zu", i);
        uint64_t row[] = {st.st_dev, st.st_ino, 0, 0, 0, 0, 0};
        if (!b->bound[i]) {
            row[2] = st.st_mode;
            row[3] = st.st_uid;
            row[4] = st.st_gid;
            row[5] = (uint64_t)st.st_mtim.tv_sec;
            row[6] = (uint64_t)st.st_mtim.tv_nsec;
        }
        if (buf_add(seen, row, sizeof row) < 0)
            return fail(e, errno, "remember the base");
    }
    return 0;
}

int member_equip(struct member *m, unsigned in, const uint8_t *p, size_t n, struct buf *seen, struct err *e)
{
    struct base base = {.n = 0};
    int r = base_open(m->hub, &base, p, n, e) < 0 || base_seen(&base, seen, e) < 0 ? -1 : equip(m, &base, in, p, n, e);
    base_close(&base);
    return r;
}

bool base_is(struct hub *h, const uint8_t *p, size_t n, const struct buf *seen)
{
    struct err ignored = {0};
    struct base base = {.n = 0};
    struct buf now = {0};
    bool same = base_open(h, &base, p, n, &ignored) == 0 && base_seen(&base, &now, &ignored) == 0 && now.len == seen->len &&
                (!now.len || memcmp(now.p, seen->p, now.len) == 0);
    base_close(&base);
    buf_free(&now);
    return same;
}

bool create_limited(const uint8_t *p, size_t n)
{
    return tlv_get(p, n, TAG_MEMORY_BYTES, 0) || tlv_get(p, n, TAG_PIDS, 0) || tlv_get(p, n, TAG_CPU_MILLI, 0);
}

static void create(struct hub *h, uint32_t channel, const uint8_t *p, size_t n)
{
    struct err e = {0};
    struct base base = {.n = 0};
    int stream[2] = {-1, -1}, sock[2] = {-1, -1};
    char word[16];
    bool whole = false;
    struct tlv own;
    struct member *m = calloc(1, sizeof *m);
    if (m) {
        m->hub = h;
        m->src.fd = -1;
        bool told = tlv_str(p, n, TAG_ISOLATION, word, sizeof word) > 0;
        m->shared = told && strcmp(word, "chroot") == 0;
        m->bare = m->shared || (told && strcmp(word, "none") == 0);
    }
    if (!m)
        fail(&e, ENOMEM, "make room for a sandbox");
    else if (tlv_str(p, n, TAG_MEMBER, m->name, sizeof m->name) <= 0)
        fail(&e, EINVAL, "make a sandbox: it needs a name under %zu bytes", sizeof m->name);
    else if (strchr(m->name, '/') || m->name[0] == '.')
        fail(&e, EINVAL, "make a sandbox: its name begins with a dot or has a slash in it");
    else if (strncmp(m->name, SPARE_NAME, strlen(SPARE_NAME)) == 0)
        fail(&e, EINVAL, "make a sandbox: names that begin with %s are the hub's", SPARE_NAME);
    else if (tlv_find(p, n, TAG_KIND, &own) || tlv_find(p, n, TAG_CG_FILE, &own))
        fail(&e, EINVAL, "make a sandbox: what a keeper is told by its hub came from a client");
    else if (member_find(h, m->name))
        fail(&e, EEXIST, "make sandbox %s", m->name);
    else if (m->shared && !h->bare_only) /* its keeper would mount where others see it */
        fail(&e, EOPNOTSUPP, "make a sandbox of isolation chroot: this hub was not started for isolation none");
    else if (!m->bare && h->bare_only)
        fail(&e, EOPNOTSUPP, "make an isolated sandbox: this hub was started for isolation none");
    else if ((whole = spare_hand_over(h, m, p, n, &sock[0], &stream[0])) || m->bare ||
             (base_open(h, &base, p, n, &e) == 0 && upper_open(h, m, &base, p, n, &e) == 0)) {
        unsigned in = 0;
        bool spare = !whole && create_limited(p, n) && !m->bare && spare_take(h, m, &in, &sock[0], &stream[0]);
        if (!whole && !spare && (socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0, stream) < 0 || socketpair(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0, sock) < 0))
            fail(&e, errno, "make socket pairs for a sandbox");
        else if (whole || spare || (m->pid = zygote_fork(m->bare ? h->bare : h->zygote, sock[1], stream[1], &e)) > 0) {
            if (!whole && !spare)
                memcpy(m->group, m->name, sizeof m->group);
            m->src.fd = sock[0];
            if (!whole)
                equip(m, &base, in, p, n, &e);
        }
    }
    base_close(&base);
    fd_close(&sock[1]);
    fd_close(&stream[1]);
    if (!e.no) {
        m->create_channel = channel;
        m->stream = stream[0];
        m->next = h->members;
        h->members = m;
        if (loop_add(&h->loop, &m->src, sock[0], EPOLLIN, from_keeper, m) < 0) {
            create_failed(m, errno, "watch a sandbox's keeper");
            kill(m->pid, SIGKILL);
        }
        return;
    }
    conn_fail(&h->conn, channel, e.no, e.what);
    if (m && m->pid > 0) { /* reaped as nobody's child */
        kill(m->pid, SIGKILL);
        groups_free(h, m->group);
    }
    if (m)
        disk_end(h, m);
    fd_close(&sock[0]);
    fd_close(&stream[0]);
    free(m);
}

/* ---- the other requests ---- */

/* Without isolation a killed keeper would leave what it started: it ends by itself when it is alone. */
static void member_end(struct member *m)
{
    if (m->bare)
        loop_drop(&m->hub->loop, &m->src);
    else
        kill(m->pid, SIGKILL);
}

static void dispose(struct hub *h, uint32_t channel, const uint8_t *p, size_t n)
{
    char name[128];
    struct member *m;
    if (tlv_str(p, n, TAG_MEMBER, name, sizeof name) <= 0 || !(m = member_find(h, name))) {
        conn_send(&h->conn, T_REPLY, 0, channel, NULL, 0); /* gone is what was wanted */
        return;
    }
    if (m->dispose_channel) {
        conn_fail(&h->conn, channel, EALREADY, "dispose of a sandbox: it is being done");
        return;
    }
    m->dispose_channel = channel;
    create_failed(m, ECANCELED, "make a sandbox: it was disposed of");
    member_end(m);
}

static void list(struct hub *h, uint32_t channel)
{
    struct buf b = {0};
    int r = 0;
    for (struct member *m = h->members; m && r == 0; m = m->next)
        r = put_str(&b, TAG_MEMBER, m->name);
    if (r < 0)
        conn_fail(&h->conn, channel, errno, "list sandboxes");
    else
        conn_send_fd(&h->conn, T_REPLY, channel, b.p, b.len, -1);
    buf_free(&b);
}

/* A keeper says to its client that a layer is sealed when it has told us. Which of the two we hear first, that or what
 * the client asks of us then, nobody knows: what is on the way is heard before we say that there is none. */
static int find_layer(struct hub *h, const char *layer)
{
    int slot = layers_find(&h->layers, layer);
    for (struct member *m = h->members; m && slot < 0; m = m->next)
        for (struct pollfd p = {m->src.fd, POLLIN, 0}; p.fd >= 0 && poll(&p, 1, 0) > 0; p.fd = m->src.fd) {
            h->loop.stale = true; /* what this turn of the loop was told of it is no longer so */
            from_keeper(&m->src, EPOLLIN);
            slot = layers_find(&h->layers, layer);
        }
    return slot;
}

static void give_layer(struct hub *h, uint32_t channel, const uint8_t *p, size_t n)
{
    char layer[LAYER_NAME] = "", name[128] = "";
    struct err e = {0};
    struct buf b = {0};
    int fds[MAX_CHAIN], slot;
    unsigned nfds = 0;
    struct member *m;
    tlv_str(p, n, TAG_LAYER, layer, sizeof layer);
    tlv_str(p, n, TAG_MEMBER, name, sizeof name);
    if ((slot = find_layer(h, layer)) < 0)
        fail(&e, ENOENT, "give layer %s: there is none of that name", layer);
    else if (!(m = member_find(h, name)) || !m->ready || m->src.fd < 0)
        fail(&e, ESRCH, "give a layer to sandbox %s: there is none of that name", name);
    else if (put_str(&b, TAG_KIND, "give") < 0 || put_u64(&b, TAG_COUNT, channel) < 0)
        fail(&e, errno, "describe a layer");
    else if (layers_put(&h->layers, (unsigned)slot, &b, fds, &nfds, &e) == 0 && msg_send(m->src.fd, b.p, b.len, fds, nfds) < 0)
        fail(&e, errno, "give layer %s to sandbox %s", layer, name);
    for (unsigned i = 0; i < nfds; i++)
        close(fds[i]);
    buf_free(&b);
    if (e.no)
        conn_fail(&h->conn, channel, e.no, e.what);
}

static void drop_layer(struct hub *h, uint32_t channel, const uint8_t *p, size_t n)
{
    char layer[LAYER_NAME] = "";
    int slot = tlv_str(p, n, TAG_LAYER, layer, sizeof layer) > 0 ? find_layer(h, layer) : -1;
    if (slot >= 0) {
        h->layers.at[slot]->named = false;
        layers_gc(&h->layers, NULL, 0);
    }
    conn_send(&h->conn, T_REPLY, 0, channel, NULL, 0);
}

static void list_layers(struct hub *h, uint32_t channel)
{
    struct buf b = {0};
    int r = 0;
    find_layer(h, ""); /* there is none, so everything is heard */
    for (unsigned i = 0; i < MAX_LAYERS && r == 0; i++)
        if (h->layers.at[i] && h->layers.at[i]->named)
            r = put_fmt(&b, TAG_LAYER, "%s\t%llu\t%u", h->layers.at[i]->name, (unsigned long long)h->layers.at[i]->bytes, h->layers.at[i]->n);
    if (r < 0)
        conn_fail(&h->conn, channel, errno, "list layers");
    else
        conn_send_fd(&h->conn, T_REPLY, channel, b.p, b.len, -1);
    buf_free(&b);
}

static void sweep(struct hub *h, uint32_t channel)
{
    struct buf b = {0};
    uint64_t n = 0;
    for (struct member *m = h->members; m; m = m->next)
        n += m->dispose_channel != 0;
    if (put_u64(&b, TAG_COUNT, n) == 0)
        conn_send(&h->conn, T_REPLY, 0, channel, b.p, b.len);
    buf_free(&b);
}

static void do_probe(struct hub *h, uint32_t channel)
{
    struct buf b = {0};
    probe(h, &b);
    conn_send_fd(&h->conn, T_REPLY, channel, b.p, b.len, -1);
    buf_free(&b);
}

static bool request(struct hub *h, uint32_t channel, const uint8_t *p, size_t n)
{
    struct tlv_in it = {p, n};
    struct tlv t;
    int r;
    while ((r = tlv_next(&it, &t)) == 1)
        ;
    if (r < 0)
        return false;
    switch (tlv_get(p, n, TAG_OP, 0)) {
    case OP_HUB_CREATE: create(h, channel, p, n); return true;
    case OP_HUB_DISPOSE: dispose(h, channel, p, n); return true;
    case OP_HUB_LIST: list(h, channel); return true;
    case OP_HUB_PROBE: do_probe(h, channel); return true;
    case OP_HUB_GIVE_LAYER: give_layer(h, channel, p, n); return true;
    case OP_HUB_DROP_LAYER: drop_layer(h, channel, p, n); return true;
    case OP_HUB_LAYERS: list_layers(h, channel); return true;
    case OP_HUB_SWEEP: sweep(h, channel); return true;
    }
    conn_fail(&h->conn, channel, ENOSYS, "carry out a request: this hub does not know it");
    return true;
}

static bool on_frame(struct conn *c, const struct frame *f)
{
    struct hub *h = c->owner;
    if (f->type == T_PING || f->type == T_PONG) {
        if (f->channel || f->len > 64)
            return false;
        if (f->type == T_PING)
            conn_send(c, T_PONG, 0, 0, f->p, f->len);
        return true;
    }
    if (f->type == T_HELLO) {
        struct buf b = {0};
        bool ok = put_u32(&b, TAG_VERSION, RLS_VERSION) == 0 && put_str(&b, TAG_HASH, RLS_HASH) == 0 && put_str(&b, TAG_MODE, "hub") == 0 && put_fmt(&b, TAG_FACT, "ids=%s", h->ids) == 0;
        if (ok && tlv_get(f->p, f->len, TAG_VERSION, 0) == RLS_VERSION)
            conn_send(c, T_WELCOME, 0, 0, b.p, b.len);
        else
            ok = false;
        buf_free(&b);
        return ok;
    }
    if (f->type != T_REQ || !f->channel || (h->request.len && f->channel != h->request_channel))
        return false; /* one request at a time may be under way */
    if (!(f->flags & F_MORE) && !h->request.len)
        return request(h, f->channel, f->p, f->len);
    h->request_channel = f->channel;
    if (buf_add(&h->request, f->p, f->len) < 0)
        return false;
    if (f->flags & F_MORE)
        return true;
    bool ok = request(h, f->channel, h->request.p, h->request.len);
    buf_free(&h->request);
    return ok;
}

static void on_client(struct src *s, uint32_t events)
{
    struct hub *h = s->owner;
    if ((events & ~(uint32_t)EPOLLOUT) && conn_read(&h->conn) < 0)
        h->loop.stop = true;
}

static void on_client_death(struct src *s, uint32_t events)
{
    struct hub *h = s->owner;
    (void)events;
    h->loop.stop = true;
}

/* What the client was started with is its own matter: as far as we may, its limits are lifted for sandboxes. */
static void limits_lift(void)
{
    static const int whats[] = {RLIMIT_NOFILE, RLIMIT_CPU, RLIMIT_FSIZE, RLIMIT_DATA, RLIMIT_AS, RLIMIT_STACK};
    for (size_t i = 0; i < COUNT_OF(whats); i++) {
        const int what = whats[i];
        const rlim_t usual = what == RLIMIT_STACK ? 8 << 20 : RLIM_INFINITY; /* more would move a program's maps */
        struct rlimit rl;
        if (getrlimit(what, &rl) < 0)
            continue;
        if (what != RLIMIT_NOFILE && rl.rlim_max < usual
            && setrlimit(what, &(struct rlimit){rl.rlim_cur, RLIM_INFINITY}) == 0)
            rl.rlim_max = RLIM_INFINITY;
        if (rl.rlim_cur < usual)
            rl.rlim_cur = rl.rlim_max < usual ? rl.rlim_max : usual;
        setrlimit(what, &rl);
    }
}

static int start(struct hub *h, int fd, pid_t client, struct err *e)
{
    sigset_t set;
    int pidfd = k_pidfd_open(client), sig;
    if (pidfd < 0 && errno == ENOSYS && client != 1) /* the end of a container's first process ends all of it anyway */
        return fail(e, errno, "watch processes: this kernel has no pidfd_open (Linux 5.3, or a newer gVisor, is needed)");
    if (pidfd < 0 && client != 1)
        return fail(e, errno, "watch the client, process %d", (int)client);
    limits_lift();
    h->self = open("/proc/self/exe", O_RDONLY | O_CLOEXEC);
    if (h->self < 0)
        return fail(e, errno, "open the own program");
    if (bare_start(h, e) < 0)
        return -1;
    if (h->bare_only) {
        strcpy(h->ids, "host");
        h->host = open("/", O_PATH | O_DIRECTORY | O_CLOEXEC);
        if (h->host < 0)
            return fail(e, errno, "open the machine's root");
    } else if (ids_setup(h, e) < 0 || place_setup(h, e) < 0)
        return -1;
    cgroups_setup(h);
    prctl(PR_SET_DUMPABLE, 0);
    if (!h->bare_only && zygote_start(h, e) < 0)
        return -1;
    sigemptyset(&set);
    sigaddset(&set, SIGCHLD);
    sigprocmask(SIG_BLOCK, &set, NULL);
    sig = signalfd(-1, &set, SFD_CLOEXEC | SFD_NONBLOCK);
    if (sig < 0 || loop_init(&h->loop) < 0 || conn_init(&h->conn, fd, on_frame, h) < 0 ||
        loop_add(&h->loop, &h->client, fd, EPOLLIN, on_client, h) < 0 ||
        (pidfd >= 0 && loop_add(&h->loop, &h->client_pid, pidfd, EPOLLIN, on_client_death, h) < 0) ||
        loop_add(&h->loop, &h->child, sig, EPOLLIN, on_child, h) < 0)
        return fail(e, errno, "prepare the hub's loop");
    spare_begin(h);
    return 0;
}

int hub_main(int fd, pid_t client, bool bare)
{
    static struct hub h = {.zygote = -1, .host = -1, .self = -1, .userns = -1, .layers.dir = "/y", .layers.gone = disk_layer_gone};
    struct err e = {0};
    h.bare_only = bare;
    prctl(PR_SET_NAME, "rls-hub");
    /* an episode's init that outlives its keeper is reaped here: pid 1 may be a trainer, which never does */
    prctl(PR_SET_CHILD_SUBREAPER, 1);
    signal(SIGPIPE, SIG_IGN);
    fcntl(fd, F_SETFD, FD_CLOEXEC);
    if (start(&h, fd, client, &e) < 0) {
        struct conn c;
        fprintf(stderr, "keeper hub: cannot %s: %s\n", e.what, strerror(e.no)); /* first: the client may kill a hub that fails */
        if (conn_init(&c, fd, on_frame, NULL) == 0) { /* channel 0: the hub as a whole cannot */
            conn_fail(&c, 0, e.no, e.what);
            conn_flush(&c);
        }
        return 1;
    }
    while (!h.loop.stop) {
        bool short_of_one = spare_missing(&h);
        int turn = loop_turn(&h.loop, h.gone || short_of_one ? GONE_MS : -1);
        if (turn < 0)
            break;
        if (turn == 0 && short_of_one)
            spare_make(&h); /* nobody waits for anything else */
        gone_retry(&h);
        int r = conn_flush(&h.conn);
        if (r < 0)
            break;
        loop_want(&h.loop, &h.client, (conn_stalled(&h.conn) ? 0 : EPOLLIN) | (r ? EPOLLOUT : 0));
    }
    spare_end(&h);
    for (struct member *m = h.members; m; m = m->next)
        member_end(m);
    if (h.zygote_pid > 0)
        kill(h.zygote_pid, SIGKILL);
    if (h.bare_pid > 0)
        kill(h.bare_pid, SIGKILL);
    while (wait(NULL) > 0 || errno == EINTR)
        ;
    cgroups_end(&h);
    return 0;
}
