/* Channels: one request each. Whatever a request needs done in the episode is a job of the episode's init with pipes;
 * this file moves bytes between the pipes and the connection, under the client's credit. */
#include "command.h"
#include "skip.h"

#include <signal.h>
#include <stdlib.h>
#include <string.h>
#include <sys/epoll.h>
#include <sys/ioctl.h>
#include <sys/mman.h>

#include "limits.h"
#include "manifest.h"
#include "pause.h"
#include "pidfd.h"
#include "procs.h"
#include "stack.h"
#include "standby.h"
#include "sys.h"
#include "tar.h"

/* ---- finding channels ---- */

struct chan *chan_find(struct keeper *k, uint32_t id)
{
    for (struct chan *c = k->chans[id % COUNT_OF(k->chans)]; c; c = c->next)
        if (c->id == id)
            return c;
    return NULL;
}

static struct chan *chan_new(struct keeper *k, uint32_t id)
{
    struct chan *c = calloc(1, sizeof *c);
    if (!c)
        return NULL;
    c->k = k;
    c->id = id;
    c->pidfd = c->standby = -1;
    c->result.fd = -1;
    for (size_t i = 0; i < COUNT_OF(c->in); i++)
        c->in[i].src.fd = -1;
    c->next = k->chans[id % COUNT_OF(k->chans)];
    k->chans[id % COUNT_OF(k->chans)] = c;
    k->nchans++;
    return c;
}

static void chan_free(struct chan *c)
{
    struct keeper *k = c->k;
    for (struct chan **p = &k->chans[c->id % COUNT_OF(k->chans)]; *p; p = &(*p)->next)
        if (*p == c) {
            *p = c->next;
            break;
        }
    k->nchans--;
    if (c->pid && c->job) { /* the time to have another one made */
        k->standby.soon = true;
        k->standby.off = false;
    }
    k->assembling -= c->msg.len;
    buf_free(&c->msg);
    buf_free(&c->result_data);
    loop_drop(&k->loop, &c->result);
    for (size_t i = 0; i < COUNT_OF(c->in); i++) {
        loop_drop(&k->loop, &c->in[i].src);
        buf_free(&c->in[i].b);
    }
    for (size_t i = 0; i < COUNT_OF(c->out); i++)
        if (c->out[i])
            sout_release(k, c->out[i]);
    fd_close(&c->pidfd);
    fd_close(&c->standby);
    if (c->place)
        import_drop(k, c->place, c->sealed);
    if (c->reads && --k->layers.at[c->reads - 1]->readers == 0)
        k->gc = true;
    free(c->dying);
    free(c->layer);
    free(c);
}

void chan_refuse(struct chan *c, int no, const char *what)
{
    conn_fail(&c->k->conn, c->id, no, what);
    chan_free(c);
}

/* ---- jobs ---- */

void ereq_drop(struct ereq *r)
{
    for (size_t i = 0; i < r->nfds; i++)
        fd_close(&r->fds[i]);
    free(r);
}

void ereq_flush(struct keeper *k)
{
    while (k->ereq_head) {
        struct ereq *r = k->ereq_head;
        if (msg_send(k->init.fd, r->data, r->len, r->fds, r->nfds) < 0) {
            if (errno == EAGAIN || errno == ENOBUFS || errno == ETOOMANYREFS) {
                loop_want(&k->loop, &k->init, EPOLLIN | EPOLLOUT);
                return;
            }
            /* its end of file is on the way and ends everything */
        }
        k->ereq_head = r->next;
        if (!k->ereq_head)
            k->ereq_tail = NULL;
        ereq_drop(r);
    }
    loop_want(&k->loop, &k->init, EPOLLIN);
}

void ereq_push(struct keeper *k, struct ereq *r)
{
    r->next = NULL;
    if (k->ereq_tail)
        k->ereq_tail->next = r;
    else
        k->ereq_head = r;
    k->ereq_tail = r;
    ereq_flush(k);
}

struct ereq *ereq_new(uint32_t kind, uint32_t job, uint32_t op, const uint8_t *body, size_t n)
{
    bool big = n > EMSG_INLINE;
    struct ereq *r = calloc(1, sizeof *r + EMSG_HEAD + (big ? 0 : n));
    if (!r)
        return NULL;
    struct emsg m = {.kind = kind, .job = job, .op = op, .body = big ? 0 : (uint32_t)n};
    memcpy(r->data, &m, EMSG_HEAD);
    if (!big && n)
        memcpy(r->data + EMSG_HEAD, body, n);
    r->len = EMSG_HEAD + (big ? 0 : n);
    return r;
}

void ereq_fd(struct ereq *r, uint32_t bit, int fd)
{
    uint32_t bits;
    memcpy(&bits, r->data + offsetof(struct emsg, fds), sizeof bits);
    bits |= bit;
    memcpy(r->data + offsetof(struct emsg, fds), &bits, sizeof bits);
    r->fds[r->nfds++] = fd;
}

/* A pipe of which the keeper keeps one end, non-blocking, and the job gets the other. */
static int job_pipe(struct ereq *r, uint32_t bit, bool keeper_reads)
{
    int p[2];
    if (pipe2(p, O_CLOEXEC) < 0)
        return -1;
    int mine = keeper_reads ? p[0] : p[1];
    ereq_fd(r, bit, keeper_reads ? p[1] : p[0]);
    set_nonblock(mine);
    return mine;
}

static int body_file(const uint8_t *p, size_t n)
{
    int fd = (int)syscall(SYS_memfd_create, "request", 1);
    if (fd >= 0 && (write_all(fd, p, n) < 0 || write_all(fd, "", 1) < 0))
        fd_close(&fd);
    return fd;
}

static void job_start(struct chan *c);

/* The process that waited for it was killed before it took it: nothing has happened, and nobody who waits for the command had
 * anything to do with that. */
static bool job_lost(struct chan *c)
{
    if (c->standby < 0)
        return false;
    bool lost = standby_lost(c->standby); /* tells it once */
    if (lost && !c->flags && !c->touched && !c->result_data.len)
        return true;
    fd_close(&c->standby);
    chan_message_done(c);
    for (size_t i = 0; i < COUNT_OF(c->in); i++)
        sin_go(c->k, c, &c->in[i]);
    return false;
}

static void job_again(struct chan *c)
{
    struct keeper *k = c->k;
    loop_drop(&k->loop, &c->result);
    for (size_t i = 0; i < COUNT_OF(c->in); i++)
        loop_drop(&k->loop, &c->in[i].src);
    for (size_t i = 0; i < COUNT_OF(c->out); i++)
        if (c->out[i]) {
            sout_free(k, c->out[i]);
            c->out[i] = NULL;
        }
    fd_close(&c->standby);
    fd_close(&c->pidfd);
    c->pid = 0;
    c->forked = false;
    job_start(c);
}

void chan_on_result(struct src *s, uint32_t events)
{
    struct chan *c = s->owner;
    uint8_t room[4096];
    (void)events;
    ssize_t r = read(s->fd, room, sizeof room);
    if (r < 0 && (errno == EAGAIN || errno == EINTR))
        return;
    if (r > 0 && c->result_data.len + (size_t)r <= RESULT_MAX && buf_add(&c->result_data, room, (size_t)r) == 0)
        return;
    if (job_lost(c)) {
        job_again(c);
        return;
    }
    c->result_done = true;
    loop_drop(&c->k->loop, s);
    chan_check(c);
}

/* the request's bytes are not needed any more */
void chan_message_done(struct chan *c)
{
    c->k->assembling -= c->msg.len;
    buf_free(&c->msg);
}

static void job_start(struct chan *c)
{
    struct keeper *k = c->k;
    const uint8_t *p = c->msg.p;
    size_t n = c->msg.len;
    bool spawn = c->op == OP_SPAWN, merge = tlv_get(p, n, TAG_MERGE, 0), control = spawn && tlv_get(p, n, TAG_CONTROL, 0);
    uint64_t limit = spawn ? tlv_get(p, n, TAG_OUTPUT_LIMIT, 0) : 0, timeout = tlv_get(p, n, TAG_TIMEOUT_MS, 0);
    if (k->init.fd < 0) {
        chan_refuse(c, ESRCH, "run in the episode: there is none (reset it first)");
        return;
    }
    k->used = true;
    c->job = ++k->next_job;
    struct ereq *r = ereq_new(E_SPAWN, c->job, c->op, p, n);
    if (!r) {
        chan_refuse(c, ENOMEM, "make a request for the episode's init");
        return;
    }
    /* in the order of the FD_ bits */
    int fd = job_pipe(r, FD_RESULT, true);
    bool ok = fd >= 0 && loop_add(&k->loop, &c->result, fd, EPOLLIN, chan_on_result, c) == 0;
    if (ok && (c->op == OP_WRITE || (spawn && tlv_get(p, n, TAG_STDIN, 0))))
        ok = (fd = job_pipe(r, FD_IN, false)) >= 0 && sin_open(k, c, 0, fd) == 0;
    if (ok && c->op != OP_WRITE)
        ok = (fd = job_pipe(r, FD_OUT, true)) >= 0 && sout_open(k, c, 0, S_STDOUT, fd, limit) == 0;
    if (ok && spawn && !merge)
        ok = (fd = job_pipe(r, FD_ERR, true)) >= 0 && sout_open(k, c, 1, S_STDERR, fd, limit) == 0;
    if (ok && control)
        ok = (fd = job_pipe(r, FD_CTL_IN, false)) >= 0 && sin_open(k, c, 1, fd) == 0;
    if (ok && control)
        ok = (fd = job_pipe(r, FD_CTL_OUT, true)) >= 0 && sout_open(k, c, 2, S_CONTROL_OUT, fd, 0) == 0;
    if (ok && n > EMSG_INLINE) {
        ok = (fd = body_file(p, n)) >= 0;
        if (ok)
            ereq_fd(r, FD_BODY, fd);
    }
    if (!ok) {
        int no = errno;
        ereq_drop(r);
        chan_refuse(c, no, "open pipes for a process");
        return;
    }
    if (timeout && !c->deadline_ns)
        c->deadline_ns = now_ns() + (timeout < 1000000000u ? timeout * 1000000u : UINT64_MAX / 4);
    if (spawn && standby_take(c, r))
        ereq_drop(r);
    else {
        chan_message_done(c);
        ereq_push(k, r);
        for (size_t i = 0; i < COUNT_OF(c->in); i++) /* begun again: what came meanwhile */
            if (c->in[i].b.len || c->in[i].eof)
                sin_go(k, c, &c->in[i]);
    }
}

/* A request is whole: look at it, start it. */
static bool request(struct chan *c)
{
    struct keeper *k = c->k;
    struct tlv_in it = {c->msg.p, c->msg.len};
    struct tlv t;
    int r;
    size_t args = 0;
    bool nul = false;
    while ((r = tlv_next(&it, &t)) == 1) {
        args += t.tag == TAG_ARG;
        switch (t.tag) {
        case TAG_ARG: case TAG_ENV: case TAG_CWD: case TAG_USER: case TAG_PATH: case TAG_RLIMIT: case TAG_LAYER:
            nul |= memchr(t.p, 0, t.len) != NULL;
        }
    }
    if (r < 0)
        return false;
    c->op = (uint32_t)tlv_get(c->msg.p, c->msg.len, TAG_OP, 0);
    if (c->op != OP_INSPECT)
        buf_free(&k->look);
    if (nul) {
        chan_refuse(c, EINVAL, "read a request: a string in it has a zero byte");
        return true;
    }
    static const uint32_t isolated_only[] = {OP_EXPORT, OP_IMPORT, OP_INSPECT, OP_CHANGES, OP_SEAL, OP_OUTSIDE_READ, OP_OUTSIDE_REMOVE};
    for (size_t i = 0; k->set.bare && i < (k->set.manifest ? 2 : COUNT_OF(isolated_only)); i++)
        if (c->op == isolated_only[i]) {
            chan_refuse(c, EOPNOTSUPP, "look at an episode from outside: without isolation there is no outside");
            return true;
        }
    switch (c->op) {
    case OP_SPAWN:
        if (!args)
            chan_refuse(c, EINVAL, "start a program: no arguments");
        else if (tlv_find(c->msg.p, c->msg.len, TAG_SCRIPT, &t) && tlv_get(c->msg.p, c->msg.len, TAG_CONTROL, 0))
            chan_refuse(c, EINVAL, "start a program: a script and control pipes both want descriptor 9");
        else if (k->pause.how)
            chan_refuse(c, EBUSY, "start a program: the sandbox is paused");
        else {
            skip_env(c->msg.p, c->msg.len);
            limits_begin(c);
            job_start(c);
        }
        return true;
    case OP_READ: case OP_WRITE: case OP_LIST: case OP_STAT: case OP_REMOVE:
        job_start(c);
        return true;
    case OP_INSPECT: {
        struct buf text = {0};
        uint32_t id = c->id;
        text = k->look; /* nothing can have changed since */
        k->look = (struct buf){0};
        if (!text.len) {
            standby_settle(k);
            if (!facts_here(k, &text)) {
                worker_start(c, false, work_inspect);
                return true;
            }
        }
        chan_free(c);
        for (size_t at = 0; at < text.len; at += RLS_MAX_PAYLOAD)
            conn_send(&k->conn, T_DATA, S_STDOUT, id, text.p + at, text.len - at < RLS_MAX_PAYLOAD ? text.len - at : RLS_MAX_PAYLOAD);
        conn_send(&k->conn, T_REPLY, 0, id, NULL, 0);
        buf_free(&text);
        return true;
    }
    case OP_CHANGES: worker_start(c, false, k->set.manifest ? manifest_changes : work_changes); return true;
    case OP_OUTSIDE_READ: worker_start(c, false, work_outside_read); return true;
    case OP_OUTSIDE_REMOVE:
        if (k->set.manifest) {
            struct err e = {0};
            uint32_t id = c->id;
            if (manifest_restore(c->msg.p, c->msg.len, &e) < 0)
                chan_refuse(c, e.no, e.what);
            else {
                chan_free(c);
                conn_send(&k->conn, T_REPLY, 0, id, NULL, 0);
            }
            return true;
        }
        worker_start(c, false, work_outside_remove);
        return true;
    case OP_EXPORT: {
        char layer[LAYER_NAME];
        int slot = tlv_str(c->msg.p, c->msg.len, TAG_LAYER, layer, sizeof layer) > 0 ? layers_find(&k->layers, layer) : -1;
        if (slot >= 0) {
            k->layers.at[slot]->readers++;
            c->reads = (unsigned)slot + 1;
        }
        worker_start(c, false, work_export);
        return true;
    }
    case OP_IMPORT: {
        struct err e = {0};
        if (import_begin(k, c, &e) < 0)
            chan_refuse(c, e.no, e.what);
        else
            worker_start(c, true, work_import);
        return true;
    }
    case OP_KILL_ALL: {
        struct ereq *r = k->init.fd < 0 ? NULL : ereq_new(E_KILL_ALL, c->job = ++k->next_job, 0, NULL, 0);
        for (size_t i = 0; r && i < COUNT_OF(k->chans); i++) /* what was asked for before ends by it, and is not begun again */
            for (struct chan *other = k->chans[i]; other; other = other->next)
                other->touched = true;
        if (r)
            ereq_push(k, r);
        else
            chan_refuse(c, k->init.fd < 0 ? ESRCH : ENOMEM, "end the episode's processes");
        return true;
    }
    case OP_RESET: case OP_SEAL: case OP_DROP_LAYER: case OP_PAUSE: case OP_RESUME: {
        static void (*const ops[])(struct keeper *, uint32_t, const uint8_t *, size_t) = {
            [OP_RESET] = op_reset, [OP_SEAL] = op_seal, [OP_DROP_LAYER] = op_drop_layer, [OP_PAUSE] = op_pause, [OP_RESUME] = op_resume,
        };
        struct buf m = c->msg;
        uint32_t id = c->id, op = c->op;
        c->msg = (struct buf){0};
        k->assembling -= m.len;
        chan_free(c);
        ops[op](k, id, m.p, m.len);
        buf_free(&m);
        return true;
    }
    }
    chan_refuse(c, ENOSYS, "carry out a request: this keeper does not know it");
    return true;
}

/* ---- the end of a channel ---- */

static void send_exit(struct chan *c)
{
    struct buf b = {0};
    bool ok = put_u32(&b, TAG_STATUS, (uint32_t)c->status) == 0 && put_u32(&b, TAG_FLAGS, c->flags) == 0 &&
              put_u64(&b, TAG_DURATION_NS, now_ns() - c->started_ns) == 0 &&
              put_u64(&b, TAG_STDOUT_SIZE, c->out[0] ? c->out[0]->total : 0) == 0 &&
              put_u64(&b, TAG_STDERR_SIZE, c->out[1] ? c->out[1]->total : 0) == 0;
    if (ok)
        conn_send(&c->k->conn, T_EXIT, 0, c->id, b.p, b.len);
    else
        c->k->conn.broken = true;
    buf_free(&b);
}

static bool is_file_op(uint32_t op)
{
    return op == OP_READ || op == OP_WRITE || op == OP_LIST || op == OP_STAT || op == OP_REMOVE;
}

static bool outs_finished(const struct chan *c)
{
    for (size_t i = 0; i < COUNT_OF(c->out); i++)
        if (c->out[i] && !c->out[i]->eof_sent)
            return false;
    return true;
}

static void outs_start(struct chan *c)
{
    for (size_t i = 0; i < COUNT_OF(c->out); i++)
        if (c->out[i])
            sout_watch(c->k, c->out[i]);
}

/* Looks at what has happened to the channel's job and says to the client what is due. May free the channel. */
void chan_check(struct chan *c)
{
    struct conn *n = &c->k->conn;
    if (!c->forked || !c->result_done)
        return;
    const struct buf *d = &c->result_data;
    bool inside = c->op == OP_SPAWN || is_file_op(c->op);
    if (inside && !c->ended && (c->op != OP_SPAWN || d->len))
        return; /* it is answered when it is no process any more: who looks next does not find it */
    if (d->len && d->p[0] == 'F') {
        conn_send(n, T_FAIL, 0, c->id, d->p + 1, d->len - 1);
        chan_free(c);
        return;
    }
    if (c->op != OP_SPAWN) {
        if (!d->len) {
            chan_refuse(c, c->flags & X_CANCELLED ? ECANCELED : EIO, c->flags & X_CANCELLED ? "finish the operation: it was cancelled" : "finish the operation: its process was killed");
        } else if (outs_finished(c)) {
            struct err e = {0};
            struct buf more = {0};
            if (buf_add(&more, d->p + 1, d->len - 1) < 0 || (c->op == OP_IMPORT && import_finish(c, &more, &e) < 0))
                conn_fail(n, c->id, e.no ? e.no : ENOMEM, e.no ? e.what : "answer a request");
            else
                conn_send(n, T_REPLY, 0, c->id, more.p, more.len);
            buf_free(&more);
            chan_free(c);
        }
        return;
    }
    if (!c->started) {
        struct buf b = {0};
        c->started = true;
        c->started_ns = now_ns();
        if (put_u32(&b, TAG_PID, (uint32_t)c->pid) == 0)
            conn_send(n, T_STARTED, 0, c->id, b.p, b.len);
        buf_free(&b);
        outs_start(c);
    }
    if (!c->ended || (c->ndying && !tree_gone(c)))
        return; /* chan_timers looks again */
    if (!c->finishing) {
        c->finishing = true;
        for (size_t i = 0; i < COUNT_OF(c->out); i++)
            if (c->out[i])
                sout_finish(c->k, c->out[i]);
    }
    if (outs_finished(c)) {
        send_exit(c);
        chan_free(c);
    }
}

void chan_from_init(struct keeper *k, const struct emsg *m, int pidfd)
{
    struct chan *c = NULL;
    if (m->job && m->job == k->standby.job) {
        standby_told(k, m, pidfd);
        return;
    }
    for (size_t i = 0; i < COUNT_OF(k->chans) && !c; i++)
        for (c = k->chans[i]; c && c->job != m->job; c = c->next)
            ;
    if (!c || !m->job) {
        fd_close(&pidfd);
        return;
    }
    switch (m->kind) {
    case E_FORKED:
        c->forked = true;
        c->pid = m->pid;
        c->pidfd = pidfd;
        pidfd = -1;
        if (c->kill_wanted)
            chan_kill(c);
        if (c->op != OP_SPAWN)
            outs_start(c);
        break;
    case E_NOT_FORKED:
        fd_close(&pidfd);
        chan_refuse(c, m->status, "fork in the sandbox (is its limit of processes reached?)");
        return;
    case E_KILLED:
        conn_send(&k->conn, T_REPLY, 0, c->id, NULL, 0);
        chan_free(c);
        return;
    case E_EXITED:
        if (!c->result_done && job_lost(c)) {
            fd_close(&pidfd);
            job_again(c);
            return;
        }
        c->ended = true;
        c->status = m->status;
        limits_ended(c);
        break;
    }
    fd_close(&pidfd);
    chan_check(c);
}

void chan_end_all(struct keeper *k, int no, const char *what)
{
    for (size_t i = 0; i < COUNT_OF(k->chans); i++)
        for (struct chan *c = k->chans[i], *next; c; c = next) {
            next = c->next;
            if (!c->job || c->reads)
                continue; /* still being received, or nothing of the episode */
            if (c->started && c->op == OP_SPAWN) {
                for (size_t j = 0; j < COUNT_OF(c->out); j++)
                    if (c->out[j] && !c->out[j]->eof_sent)
                        conn_send(&k->conn, T_EOF, c->out[j]->stream, c->id, NULL, 0);
                if (!c->ended)
                    c->status = SIGKILL;
                c->flags |= X_CANCELLED;
                send_exit(c);
                chan_free(c);
            } else
                chan_refuse(c, no, what);
        }
    while (k->draining) {
        struct sout *s = k->draining;
        k->draining = s->next_draining;
        sout_free(k, s);
    }
}

void chan_kill(struct chan *c)
{
    if (!c->forked) {
        c->kill_wanted = true;
        return;
    }
    if (c->pidfd < 0 || c->ended)
        return;
    if (c->op == OP_SPAWN)
        tree_kill(c);
    else
        pidfd_kill(c->pidfd, SIGKILL);
}

int chan_timers(struct keeper *k)
{
    uint64_t next = UINT64_MAX, now = 0;
    bool dying = false;
    for (size_t i = 0; i < COUNT_OF(k->chans); i++)
        for (struct chan *c = k->chans[i], *after; c; c = after) {
            after = c->next;
            if (!c->ended || !c->ndying || c->finishing)
                continue;
            dying = true;
            chan_check(c); /* may free it */
        }
    if (dying)
        return 1;
    if (k->pause.how)
        return -1; /* time stands still */
    for (size_t i = 0; i < COUNT_OF(k->chans); i++)
        for (struct chan *c = k->chans[i]; c; c = c->next) {
            if (!c->deadline_ns || c->ended)
                continue;
            if (!now)
                now = now_ns();
            if (c->deadline_ns <= now) {
                c->deadline_ns = 0;
                c->flags |= X_TIMED_OUT;
                chan_kill(c);
            } else if (c->deadline_ns < next)
                next = c->deadline_ns;
        }
    if (next == UINT64_MAX)
        return -1;
    uint64_t ms = (next - now) / 1000000u + 1;
    return ms > 60000 ? 60000 : (int)ms;
}

/* ---- frames ---- */

static bool message(struct keeper *k, const struct frame *f)
{
    struct chan *c = chan_find(k, f->channel);
    if (!f->channel || (c && (c->job || c->op)))
        return false;
    if (!c) {
        if (k->nchans >= MAX_CHANNELS) {
            if (f->flags & F_MORE)
                return false;
            conn_fail(&k->conn, f->channel, EAGAIN, "open a channel: too many are open");
            return true;
        }
        c = chan_new(k, f->channel);
        if (!c)
            return false;
    }
    if (k->assembling + f->len > ASSEMBLING_MAX || buf_add(&c->msg, f->p, f->len) < 0)
        return false;
    k->assembling += f->len;
    return f->flags & F_MORE ? true : request(c);
}

bool chan_frame(struct keeper *k, const struct frame *f)
{
    if (f->type == T_REQ)
        return message(k, f);
    struct chan *c = chan_find(k, f->channel);
    if (!f->channel)
        return false;
    switch (f->type) {
    case T_DATA:
    case T_EOF:
        if (f->stream != S_STDIN && f->stream != S_CONTROL_IN)
            return false;
        return !c || sin_frame(k, c, &c->in[f->stream == S_CONTROL_IN], f); /* an ended channel: on its way too late */
    case T_CREDIT:
        if (f->len != 4)
            return false;
        for (size_t i = 0; c && i < COUNT_OF(c->out); i++)
            if (c->out[i] && c->out[i]->stream == f->stream)
                return sout_credit(k, c->out[i], get_u32(f->p));
        return true;
    case T_SIGNAL:
        if (f->len < 1 || f->len > 2 || f->p[0] > 64)
            return false;
        if (!c || c->pidfd < 0 || c->ended)
            return true;
        c->touched = true;
        if (f->len == 2 && f->p[1] == 1 && f->p[0])
            tree_signal(c, f->p[0]);
        else
            pidfd_kill(c->pidfd, f->p[0]);
        return true;
    case T_CANCEL:
        if (c && c->job) {
            c->flags |= X_CANCELLED;
            chan_kill(c);
        }
        return true;
    }
    return false;
}
