#include "worker.h"

#include <signal.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/epoll.h>
#include <sys/prctl.h>
#include <sys/wait.h>

#include "pidfd.h"
#include "sys.h"

void helpers_reap(struct keeper *k)
{
    for (size_t i = 0; i < COUNT_OF(k->helpers); i++)
        if (k->helpers[i] > 0 && waitpid(k->helpers[i], NULL, WNOHANG) != 0)
            k->helpers[i] = 0;
}

pid_t helper_fork(struct keeper *k)
{
    size_t i = 0;
    helpers_reap(k);
    while (i < COUNT_OF(k->helpers) && k->helpers[i])
        i++;
    if (i == COUNT_OF(k->helpers)) {
        errno = EAGAIN;
        return -1;
    }
    pid_t p = fork();
    if (p > 0)
        k->helpers[i] = p;
    if (p == 0) {
        prctl(PR_SET_PDEATHSIG, SIGKILL);
        signal(SIGPIPE, SIG_DFL);
        prctl(PR_SET_NAME, "rls-helper");
    }
    return p;
}

/* Other channels' pipes must not be held open by a helper: their readers wait for the end. */
void helper_keep(const int *fds, size_t n)
{
    unsigned from = 3;
    for (;;) {
        unsigned next = ~0u;
        for (size_t i = 0; i < n; i++)
            if (fds[i] > 2 && (unsigned)fds[i] >= from && (unsigned)fds[i] < next)
                next = (unsigned)fds[i];
        if (next == ~0u) {
            k_close_range(from, ~0u);
            return;
        }
        if (next > from)
            k_close_range(from, next - 1);
        from = next + 1;
    }
}

void worker_start(struct chan *c, bool wants_in, void (*fn)(struct worker *))
{
    struct keeper *k = c->k;
    struct worker w = {.k = k, .in = -1, .out = -1, .result = -1, .p = c->msg.p, .n = c->msg.len, .place = c->place};
    int in[2] = {-1, -1}, out[2] = {-1, -1}, result[2] = {-1, -1};
    if (pipe2(out, O_CLOEXEC) < 0 || pipe2(result, O_CLOEXEC) < 0 || (wants_in && pipe2(in, O_CLOEXEC) < 0))
        goto failed;
    c->job = ++k->next_job;
    pid_t pid = helper_fork(k);
    if (pid == 0) {
        int keep[] = {in[0], out[1], result[1], k->root_fd, k->proc_fd, k->before};
        w.in = in[0];
        w.out = out[1];
        w.result = result[1];
        helper_keep(keep, COUNT_OF(keep));
        fn(&w);
        _exit(1);
    }
    if (pid < 0)
        goto failed;
    fd_close(&in[0]);
    fd_close(&out[1]);
    fd_close(&result[1]);
    c->forked = true;
    c->pid = pid;
    c->pidfd = pidfd_of(pid);
    set_nonblock(out[0]);
    set_nonblock(result[0]);
    if (wants_in)
        set_nonblock(in[1]);
    int fd_out = out[0], fd_result = result[0], fd_in = in[1];
    if (sout_open(k, c, 0, S_STDOUT, fd_out, 0) < 0 || loop_add(&k->loop, &c->result, fd_result, EPOLLIN, chan_on_result, c) < 0 ||
        (wants_in && sin_open(k, c, 0, fd_in) < 0)) {
        chan_refuse(c, errno, "watch a helper");
        return;
    }
    sout_watch(k, c->out[0]);
    chan_message_done(c);
    return;
failed:;
    int no = errno;
    for (int i = 0; i < 2; i++) {
        fd_close(&in[i]);
        fd_close(&out[i]);
        fd_close(&result[i]);
    }
    chan_refuse(c, no, "start a helper");
}

/* ---- in the helper ---- */

void worker_flush(struct worker *w)
{
    if (w->here)
        return;
    if (w->text.len && write_all(w->out, w->text.p, w->text.len) < 0)
        _exit(1);
    w->text.len = 0;
}

void worker_write(struct worker *w, const void *p, size_t n)
{
    if (w->here) {
        w->full |= w->full || w->text.len + n > WORKER_HERE_MAX || buf_add(&w->text, p, n) < 0;
        return;
    }
    if (n >= 32768) {
        worker_flush(w);
        if (write_all(w->out, p, n) < 0)
            _exit(1);
        return;
    }
    if (buf_add(&w->text, p, n) < 0)
        _exit(1);
    if (w->text.len > 32768)
        worker_flush(w);
}

_Noreturn void worker_fail(struct worker *w, const struct err *e)
{
    struct buf b = {0};
    worker_flush(w);
    if (buf_add(&b, "F", 1) < 0 || put_u32(&b, TAG_ERRNO, (uint32_t)e->no) < 0 || put_str(&b, TAG_WHAT, e->what) < 0 ||
        put_str(&b, TAG_TEXT, strerror(e->no)) < 0 || write_all(w->result, b.p, b.len) < 0)
        _exit(1);
    _exit(0);
}

_Noreturn void worker_done(struct worker *w, const struct buf *fields)
{
    struct buf b = {0};
    worker_flush(w);
    if (buf_add(&b, "R", 1) < 0 || buf_add(&b, fields->p, fields->len) < 0 || write_all(w->result, b.p, b.len) < 0)
        _exit(1);
    _exit(0);
}

void fact(struct worker *w, const char *kind)
{
    w->count++;
    worker_write(w, kind, strlen(kind));
}

void field(struct worker *w, const void *p, size_t n)
{
    static const char hex[] = "0123456789abcdef";
    const uint8_t *s = p;
    char room[256];
    size_t at = 0;
    room[at++] = '\t';
    for (size_t i = 0; i < n; i++) {
        if (at > sizeof room - 4) {
            worker_write(w, room, at);
            at = 0;
        }
        if (s[i] < 0x20 || s[i] > 0x7e || s[i] == '\\') {
            room[at++] = '\\';
            room[at++] = 'x';
            room[at++] = hex[s[i] >> 4];
            room[at++] = hex[s[i] & 15];
        } else
            room[at++] = (char)s[i];
    }
    worker_write(w, room, at);
}

void field_s(struct worker *w, const char *s)
{
    field(w, s, strlen(s));
}

void field_f(struct worker *w, const char *fmt, ...)
{
    char s[512];
    va_list ap;
    va_start(ap, fmt);
    int n = vsnprintf(s, sizeof s, fmt, ap);
    va_end(ap);
    field(w, s, n < 0 ? 0 : (size_t)n < sizeof s ? (size_t)n : sizeof s - 1);
}

void fact_end(struct worker *w)
{
    worker_write(w, "\n", 1);
}
