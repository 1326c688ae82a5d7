/* Feeds mutated frames, cut into pieces at random and cut off at random, to the keeper's connection, channels and streams, and
 * to the hub's and keepers' readers of settings and layers. The episode's init and all that touches the machine are stand-ins
 * here. usage: fuzz SEED FRAMES. Built with sanitizers (make fuzz); ends with a line of counts, or by a signal. */
#include "command.c"

#include <dirent.h>
#include <fcntl.h>
#include <stdio.h>
#include <sys/socket.h>

/* ---- stand-ins ---- */

void worker_start(struct chan *c, bool wants_in, void (*fn)(struct worker *))
{
    (void)wants_in;
    (void)fn;
    chan_refuse(c, ENOSYS, "not here");
}
static void refuse(struct keeper *k, uint32_t channel, const uint8_t *p, size_t n)
{
    char name[LAYER_NAME];
    tlv_str(p, n, TAG_LAYER, name, sizeof name);
    conn_fail(&k->conn, channel, ENOSYS, "not here");
}
void op_reset(struct keeper *k, uint32_t channel, const uint8_t *p, size_t n) { refuse(k, channel, p, n); }
void op_seal(struct keeper *k, uint32_t channel, const uint8_t *p, size_t n) { refuse(k, channel, p, n); }
void op_drop_layer(struct keeper *k, uint32_t channel, const uint8_t *p, size_t n) { refuse(k, channel, p, n); }
void op_pause(struct keeper *k, uint32_t channel, const uint8_t *p, size_t n) { refuse(k, channel, p, n); }
void op_resume(struct keeper *k, uint32_t channel, const uint8_t *p, size_t n) { refuse(k, channel, p, n); }
int import_begin(struct keeper *k, struct chan *c, struct err *e) { (void)k; (void)c; return fail(e, ENOSYS, "not here"); }
int import_finish(struct chan *c, struct buf *reply, struct err *e) { (void)c; (void)reply; return fail(e, ENOSYS, "not here"); }
void import_drop(struct keeper *k, unsigned place, bool sealed) { (void)k; (void)place; (void)sealed; }
void work_export(struct worker *w) { (void)w; }
void work_import(struct worker *w) { (void)w; }
void limits_begin(struct chan *c) { (void)c; }
void limits_ended(struct chan *c) { (void)c; }
bool facts_here(struct keeper *k, struct buf *text)
{
    (void)k;
    return buf_add(text, "fact\n", 5) == 0;
}
void standby_settle(struct keeper *k) { (void)k; }
bool standby_lost(int sock) { (void)sock; return false; }
bool standby_take(struct chan *c, const struct ereq *r) { (void)c; (void)r; return false; }
int manifest_restore(const uint8_t *p, size_t n, struct err *e) { (void)p; (void)n; return fail(e, ENOENT, "restore"); }
void manifest_changes(struct worker *w) { (void)w; _exit(1); }
void standby_told(struct keeper *k, const struct emsg *m, int pidfd) { (void)k; (void)m; fd_close(&pidfd); }
bool tree_gone(struct chan *c) { (void)c; return true; }
void tree_kill(struct chan *c) { (void)c; }
void tree_signal(struct chan *c, int sig) { (void)c; (void)sig; }

/* ---- randomness ---- */

static uint64_t state;
static uint32_t rnd(uint32_t below)
{
    state ^= state << 13;
    state ^= state >> 7;
    state ^= state << 17;
    return (uint32_t)((state >> 16) % (below ? below : 1));
}

/* ---- frames that are nearly right ---- */

static struct buf stream_bytes;
static uint32_t last_channel;

static void frame(uint8_t type, uint8_t flags, uint16_t stream, uint32_t channel, const void *p, size_t n)
{
    uint8_t h[RLS_HEADER] = {0};
    set_u32(h, (uint32_t)n + RLS_HEADER - 4);
    h[4] = type;
    h[5] = flags;
    h[6] = (uint8_t)stream;
    set_u32(h + 8, channel);
    buf_add(&stream_bytes, h, sizeof h);
    buf_add(&stream_bytes, p, n);
}

static void request_frame(uint32_t channel)
{
    static const uint32_t ops[] = {OP_SPAWN, OP_SPAWN, OP_SPAWN, OP_READ, OP_WRITE, OP_LIST, OP_STAT, OP_REMOVE, OP_RESET, OP_INSPECT, OP_CHANGES, OP_SEAL, OP_PAUSE, OP_KILL_ALL, OP_IMPORT, 99};
    static const uint16_t tags[] = {TAG_ARG, TAG_ARG, TAG_ENV, TAG_CWD, TAG_USER, TAG_SCRIPT, TAG_STDIN, TAG_CONTROL, TAG_OUTPUT_LIMIT, TAG_TIMEOUT_MS, TAG_MERGE, TAG_RLIMIT, TAG_PATH, TAG_OFFSET, TAG_LAYER, 77};
    static uint8_t text[40000];
    struct buf b = {0};
    put_u32(&b, TAG_OP, ops[rnd(COUNT_OF(ops))]);
    for (uint32_t i = rnd(8); i; i--) {
        uint16_t tag = tags[rnd(COUNT_OF(tags))];
        size_t n = rnd(20) ? rnd(60) : rnd(sizeof text);
        memset(text, 'a' + (int)rnd(26), n);
        if (tag == TAG_STDIN || tag == TAG_CONTROL || tag == TAG_MERGE)
            put_u32(&b, tag, rnd(2));
        else if (tag == TAG_OUTPUT_LIMIT || tag == TAG_TIMEOUT_MS || tag == TAG_OFFSET)
            put_u64(&b, tag, rnd(5) ? rnd(100000) : UINT64_MAX - rnd(3));
        else
            put_bytes(&b, tag, text, n);
    }
    size_t at = 0;
    while (b.len - at > RLS_MAX_PAYLOAD || (b.len - at > 1 && !rnd(4))) {
        size_t n = rnd((uint32_t)(b.len - at < RLS_MAX_PAYLOAD ? b.len - at : RLS_MAX_PAYLOAD)) + 1;
        frame(T_REQ, F_MORE, 0, channel, b.p + at, n);
        at += n;
    }
    frame(T_REQ, 0, 0, channel, b.p + at, b.len - at);
    buf_free(&b);
}

static void some_frame(void)
{
    static const uint8_t zeros[RLS_MAX_PAYLOAD];
    uint8_t d[8] = {9, 1};
    uint32_t channel = last_channel - rnd(last_channel < 6 ? last_channel : 6);
    switch (rnd(10)) {
    case 0: case 1: case 2: request_frame(rnd(60) ? ++last_channel : channel); return;
    case 3: case 4: frame(T_DATA, 0, rnd(2) ? 0 : 3, channel, zeros, rnd(4) ? rnd(500) : rnd(sizeof zeros)); return;
    case 5: frame(T_EOF, 0, rnd(2) ? 0 : 3, channel, NULL, 0); return;
    case 6: set_u32(d, rnd(60) ? rnd(70000) : UINT32_MAX - rnd(4)); frame(T_CREDIT, 0, (uint16_t)rnd(5), channel, d, 4); return;
    case 7: frame(T_SIGNAL, 0, 0, channel, d, 1 + rnd(2)); return;
    case 8: frame(T_CANCEL, 0, 0, channel, NULL, 0); return;
    default: frame(rnd(2) ? T_PING : T_PONG, 0, 0, 0, d, rnd(8)); return;
    }
}

static void mutate(void)
{
    for (uint32_t i = rnd(3); i && stream_bytes.len; i--) {
        uint32_t at = rnd((uint32_t)stream_bytes.len);
        switch (rnd(4)) {
        case 0: stream_bytes.p[at] ^= (uint8_t)(1u << rnd(8)); break;
        case 1: stream_bytes.p[at] = (uint8_t)rnd(256); break;
        case 2: stream_bytes.len = at; break; /* cut off */
        default: memmove(stream_bytes.p + at, stream_bytes.p + at + 1, stream_bytes.len - at - 1); stream_bytes.len--; break;
        }
    }
}

/* ---- one connection ---- */

static bool on_frame(struct conn *c, const struct frame *f)
{
    if (f->type == T_PING || f->type == T_PONG)
        return !f->channel && f->len <= 64;
    return chan_frame(c->owner, f);
}

void keeper_flush(struct keeper *k)
{
    for (int i = 0; i < 64; i++)
        if (conn_flush(&k->conn) != 0 || !chan_pump(k))
            return;
}

static struct { int fds[FD_KINDS]; size_t n; uint32_t job; bool said; } jobs[64];
static size_t njobs;

/* The init's side: takes requests, reads and writes their pipes, ends them. */
static void pretend(struct keeper *k, int sock)
{
    static uint8_t room[EMSG_HEAD + EMSG_INLINE + 4096];
    for (;;) {
        struct emsg m;
        int fds[FD_KINDS];
        size_t n = COUNT_OF(fds);
        ssize_t r = msg_recv(sock, room, sizeof room, fds, &n);
        if (r < 0)
            break;
        memcpy(&m, room, EMSG_HEAD);
        if (njobs == COUNT_OF(jobs)) {
            for (size_t i = 0; i < n; i++)
                close(fds[i]);
            continue;
        }
        memcpy(jobs[njobs].fds, fds, sizeof fds);
        jobs[njobs].n = n;
        jobs[njobs].said = false;
        jobs[njobs++].job = m.job;
    }
    for (size_t i = 0; i < njobs; i++) {
        static uint8_t bytes[20000];
        struct emsg m = {.kind = E_FORKED, .job = jobs[i].job, .pid = 7};
        if (!jobs[i].said)
            chan_from_init(k, &m, -1);
        jobs[i].said = true;
        for (size_t j = 0; j < jobs[i].n; j++) {
            if (jobs[i].fds[j] < 0)
                continue;
            if (rnd(2)) {
                set_nonblock(jobs[i].fds[j]);
                memset(bytes, rnd(3) ? 'R' : 'F', sizeof bytes);
                if (j && rnd(2))
                    (void)!write(jobs[i].fds[j], bytes, rnd(sizeof bytes));
                else if (rnd(8) == 0)
                    (void)!write(jobs[i].fds[j], bytes, rnd(100));
                else
                    (void)!read(jobs[i].fds[j], bytes, sizeof bytes);
            }
            if (!rnd(4))
                fd_close(&jobs[i].fds[j]);
        }
        if (!rnd(4)) {
            m.kind = E_EXITED;
            m.status = (int)rnd(256);
            for (size_t j = 0; j < jobs[i].n; j++)
                fd_close(&jobs[i].fds[j]);
            chan_from_init(k, &m, -1);
            jobs[i--] = jobs[--njobs];
        }
    }
}

static void drain(int fd)
{
    static uint8_t room[1 << 16];
    while (recv(fd, room, sizeof room, MSG_DONTWAIT) > 0)
        ;
}

static unsigned one_stream(unsigned frames)
{
    static struct keeper k;
    int sv[2], init[2];
    memset(&k, 0, sizeof k);
    k.root_fd = k.proc_fd = -1;
    k.client.fd = k.hub.fd = -1;
    stream_bytes.len = 0;
    last_channel = 1;
    for (unsigned i = 0; i < frames; i++)
        some_frame();
    if (rnd(2))
        mutate();
    if (socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0, sv) < 0 || socketpair(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0, init) < 0 || loop_init(&k.loop) < 0 || conn_init(&k.conn, sv[0], on_frame, &k) < 0)
        abort();
    set_nonblock(init[1]);
    set_nonblock(init[0]);
    set_nonblock(sv[1]);
    k.init.fd = init[0];
    k.init.events = 1;
    size_t at = 0;
    while (at < stream_bytes.len && !k.conn.broken) {
        size_t n = rnd(3) ? rnd(200) + 1 : rnd(60000) + 1;
        if (n > stream_bytes.len - at)
            n = stream_bytes.len - at;
        ssize_t r = write(sv[1], stream_bytes.p + at, n);
        at += r > 0 ? (size_t)r : 0;
        conn_read(&k.conn);
        pretend(&k, init[1]);
        loop_turn(&k.loop, 0);
        chan_timers(&k);
        keeper_flush(&k);
        if (rnd(4))
            drain(sv[1]);
    }
    for (int i = 0; i < 5; i++) {
        pretend(&k, init[1]);
        loop_turn(&k.loop, 0);
        keeper_flush(&k);
        drain(sv[1]);
    }
    chan_end_all(&k, ECANCELED, "over");
    for (size_t i = 0; i < COUNT_OF(k.chans); i++)
        while (k.chans[i])
            chan_free(k.chans[i]);
    if (k.nchans || k.assembling)
        abort(); /* counts went wrong */
    chan_end_all(&k, ECANCELED, "over"); /* what was being drained */
    while (k.ereq_head) {
        struct ereq *r = k.ereq_head;
        k.ereq_head = r->next;
        ereq_drop(r);
    }
    bool broken = k.conn.broken;
    conn_free(&k.conn);
    close(sv[1]);
    close(init[0]);
    close(init[1]);
    close(k.loop.ep);
    while (njobs) {
        njobs--;
        for (size_t j = 0; j < jobs[njobs].n; j++)
            fd_close(&jobs[njobs].fds[j]);
    }
    return broken;
}

/* random and half-right TLV lists for those who read settings and layers */
static void some_fields(void)
{
    static struct keeper k;
    static struct layers layers = {.dir = "/nonexistent"};
    struct buf b = {0};
    struct err e = {0};
    static const uint16_t tags[] = {TAG_ROOT, TAG_OVERLAY, TAG_BIND, TAG_MEMBER, TAG_HOSTNAME, TAG_TOKEN, TAG_MODE, TAG_NETWORK, TAG_UPPER, TAG_UPPER_BYTES, TAG_KIND, TAG_LAYER, TAG_BYTES, TAG_FLAGS};
    for (uint32_t i = rnd(300); i; i--) {
        char s[700];
        size_t n = rnd(30) ? rnd(40) : rnd(sizeof s);
        memset(s, "/=:a\0"[rnd(5)], sizeof s);
        if (n)
            s[0] = '/';
        put_bytes(&b, tags[rnd(COUNT_OF(tags))], s, n);
    }
    for (uint32_t i = rnd(4); i && b.len; i--)
        b.p[rnd((uint32_t)b.len)] = (uint8_t)rnd(256);
    memset(&k.set, 0, sizeof k.set);
    buf_free(&k.facts);
    configure(&k, b.p, b.len, &e);
    buf_free(&k.facts);
    int none = -1;
    layers_take(&layers, b.p, b.len, &none, rnd(2), &e);
    buf_free(&b);
}

static int open_fds(void)
{
    int n = 0;
    DIR *d = opendir("/proc/self/fd");
    while (d && readdir(d))
        n++;
    if (d)
        closedir(d);
    return n;
}

int main(int argc, char **argv)
{
    if (argc != 3)
        return 2;
    unsigned long frames = strtoul(argv[2], NULL, 10), done = 0, streams = 0, broken = 0;
    signal(SIGPIPE, SIG_IGN);
    state = strtoull(argv[1], NULL, 10) * 0x9e3779b97f4a7c15u + 1;
    int before = open_fds();
    while (done < frames) {
        unsigned n = rnd(40) + 1;
        alarm(20); /* a hang ends it */
        broken += one_stream(n);
        some_fields();
        done += n;
        streams++;
        if (open_fds() != before) {
            fprintf(stderr, "stream %lu left descriptors open: %d, were %d\n", streams, open_fds(), before);
            return 1;
        }
    }
    printf("%lu frames in %lu streams, %lu of them refused as broken\n", done, streams, broken);
    return 0;
}
