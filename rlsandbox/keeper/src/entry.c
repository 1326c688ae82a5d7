#include "entry.h"

char entry_kind(mode_t mode)
{
    return S_ISREG(mode) ? 'f' : S_ISDIR(mode) ? 'd' : S_ISLNK(mode) ? 'l' : 'o';
}

int entry_put(struct buf *b, char kind, const struct stat *st, const char *name, size_t n)
{
    uint8_t h[ENTRY_HEAD] = {(uint8_t)kind};
    if (st) {
        uint64_t mtime = time_ns(st->st_mtim), size = (uint64_t)st->st_size;
        set_u32(h + 1, st->st_mode & 07777);
        set_u32(h + 5, st->st_uid);
        set_u32(h + 9, st->st_gid);
        set_u32(h + 13, (uint32_t)size);
        set_u32(h + 17, (uint32_t)(size >> 32));
        set_u32(h + 21, (uint32_t)mtime);
        set_u32(h + 25, (uint32_t)(mtime >> 32));
    }
    set_u32(h + 29, (uint32_t)n);
    if (buf_add(b, h, sizeof h) < 0)
        return -1;
    if (buf_add(b, name, n) < 0) {
        b->len -= sizeof h;
        return -1;
    }
    return 0;
}
