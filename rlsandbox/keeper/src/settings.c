/* What CREATE asked for, as the hub hands it on. */
#include <string.h>

#include "sandbox.h"

static int target_copy(char *out, const uint8_t *p, size_t n, struct err *e)
{
    if (!n || n >= TARGET_MAX || p[0] != '/' || memchr(p, 0, n))
        return fail(e, EINVAL, "read a mount point: it must be an absolute path under %d bytes", TARGET_MAX);
    memcpy(out, p, n);
    out[n] = 0;
    return 0;
}

/* Every ROOT, every lower of an OVERLAY and every BIND has its descriptor, in the order of the fields. */
int configure(struct keeper *k, const uint8_t *p, size_t n, struct err *e)
{
    struct settings *s = &k->set;
    struct tlv_in it = {p, n};
    struct tlv t;
    char word[32];
    int r;
    s->shared = tlv_str(p, n, TAG_ISOLATION, word, sizeof word) > 0 && strcmp(word, "chroot") == 0;
    bool bare = s->shared || (tlv_str(p, n, TAG_ISOLATION, word, sizeof word) > 0 && strcmp(word, "none") == 0); /* no base then */
    s->overlays = 1;
    strcpy(s->overlay[0].target, "/");
    while ((r = tlv_next(&it, &t)) == 1)
        if (t.tag == TAG_ROOT && !bare) {
            s->overlay[0].n++;
            s->lowers++;
        }
    it = (struct tlv_in){p, n};
    while (r == 0 && tlv_next(&it, &t) == 1) {
        const uint8_t *eq = memchr(t.p, '=', t.len);
        if (bare && (t.tag == TAG_OVERLAY || t.tag == TAG_BIND))
            continue;
        if (t.tag == TAG_OVERLAY) {
            if (s->overlays == MAX_OVERLAYS || !eq)
                return fail(e, EINVAL, "read an overlay: over %d, or no `=`", MAX_OVERLAYS);
            struct overlay *o = &s->overlay[s->overlays++];
            if (target_copy(o->target, t.p, (size_t)(eq - t.p), e) < 0)
                return -1;
            o->first = s->lowers;
            o->n = 1;
            for (const uint8_t *c = eq + 1; c < t.p + t.len; c++)
                o->n += *c == ':';
            s->lowers += o->n;
        } else if (t.tag == TAG_BIND) {
            if (s->binds == MAX_BINDS || !eq)
                return fail(e, EINVAL, "read a bind: over %d, or no `=`", MAX_BINDS);
            struct bind *b = &s->bind[s->binds++];
            if (target_copy(b->target, t.p, (size_t)(eq - t.p), e) < 0)
                return -1;
            b->lower = s->lowers++;
        } else if (t.tag == TAG_FACT && put_bytes(&k->facts, TAG_FACT, t.p, t.len) < 0)
            return fail(e, ENOMEM, "keep facts");
    }
    if (r < 0 || s->lowers > MAX_LOWERS)
        return fail(e, EINVAL, "read the sandbox's settings: over %d base directories, or broken", MAX_LOWERS);
    tlv_str(p, n, TAG_MEMBER, s->member, sizeof s->member);
    tlv_str(p, n, TAG_HOSTNAME, s->hostname, sizeof s->hostname);
    tlv_str(p, n, TAG_TOKEN, s->token, sizeof s->token);
    tlv_str(p, n, TAG_MODE, s->mode, sizeof s->mode);
    if (s->shared) { /* the base is the container's root, which the keeper takes itself */
        if (tlv_str(p, n, TAG_PATH, s->place, sizeof s->place) <= 0 || s->place[0] != '/')
            return fail(e, EINVAL, "make a sandbox: where mounts are shared its keeper needs a place");
        if (strcmp(s->mode, "overlay"))
            return fail(e, EINVAL, "make a sandbox in mode %s: where mounts are shared there is overlay", s->mode);
        s->overlay[0].n = s->lowers = 1;
        bare = false;
    }
    s->manifest = bare && strcmp(s->mode, "manifest") == 0;
    tlv_str(p, n, TAG_USER, s->user, sizeof s->user);
    if (*s->mode && !s->manifest && strcmp(s->mode, "overlay") && strcmp(s->mode, "userns"))
        return fail(e, EINVAL, "make a sandbox in mode %s: there are overlay and userns", s->mode);
    s->host_network = tlv_str(p, n, TAG_NETWORK, word, sizeof word) > 0 && strcmp(word, "host") == 0;
    s->upper_bytes = tlv_get(p, n, TAG_UPPER_BYTES, 0);
    s->upper_inodes = tlv_get(p, n, TAG_UPPER_INODES, 0);
    s->memory_bytes = tlv_get(p, n, TAG_MEMORY_BYTES, 0);
    s->pids = (uint32_t)tlv_get(p, n, TAG_PIDS, 0);
    s->nofile = (uint32_t)tlv_get(p, n, TAG_NOFILE, 0);
    struct tlv upper;
    s->disk = tlv_find(p, n, TAG_UPPER, &upper) && upper.len > 5 && memcmp(upper.p, "disk:", 5) == 0 && !bare && !s->shared;
    s->bare = bare;
    if (bare) {
        strcpy(s->mode, s->manifest ? "manifest" : "replace");
        s->host_network = true;
    }
    s->one_id = tlv_str(p, n, TAG_KIND, word, sizeof word) > 0 && strcmp(word, "one") == 0;
    return 0;
}
