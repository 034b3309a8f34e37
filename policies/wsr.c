/* FlexSwap's WSR (§6.8): when the limit is raised, the working set comes back before it is needed, and
 * not page by page as a program waits for it.
 *
 * All pages are in one list, in the order of their last use: a fault on them, or a use that a scan has
 * found. Those that left in the last `window_s` seconds are the working set. They come, what was used
 * last first, while there is room.
 *
 * Differs: pages that come are mapped, so a program's use of them is no fault at all. It knows 2 GiB of
 * pages: of more, some take the place of others. */
#include "undercroft_policy.h"

#ifndef INTERVAL_MS
#define INTERVAL_MS 60000
#endif

enum { PAGES = 1 << 19, PROBES = 16, LOOKS = 4096, TICKS = 10 };

struct page {
    int64_t number;         /* and 1; 0: there is no page here */
    int32_t space;
    uint32_t newer, older;  /* places of its neighbours in the list */
    uint32_t left : 31;     /* the tick at which it left memory last */
    uint32_t wished : 1;    /* and it has not come yet */
};

/* Place 0 is no page's: it is before the newest of the list, and after the oldest. */
static struct page pages[PAGES];
/* The next one that may come; 0: none has to. */
static uint32_t next;
/* Pages that were wished and have not come, and the last tick at which one came. */
static int64_t wished, came;
static int64_t limit, asked_ms, now = 1;
static int32_t interval_ms, window_s, ahead, restored;

static int32_t registered(const char *name, int64_t value) {
    int32_t bytes = 0;
    while (name[bytes]) bytes++;
    return register_parameter(name, bytes, value);
}

void init(void) {
    interval_ms = registered("interval_ms", INTERVAL_MS);
    window_s = registered("window_s", 600);
    ahead = registered("ahead", 512);
    restored = registered("restored", 0);
}

static void take_out(uint32_t at) {
    struct page *page = &pages[at];
    if (next == at) next = page->older;
    pages[page->newer].older = page->older;
    pages[page->older].newer = page->newer;
}

static void put_first(uint32_t at) {
    struct page *page = &pages[at];
    page->newer = 0, page->older = pages[0].older;
    pages[page->older].newer = at;
    pages[0].older = at;
}

/* The place of a page, which is made if there is none. It takes that of a page that is gone, or else of
 * any. 1: it was not known. */
static int find(int32_t space, int64_t number, uint32_t *found) {
    uint64_t hash = ((uint64_t)number + ((uint64_t)(uint32_t)space << 44)) * 0x9e3779b97f4a7c15u;
    uint32_t empty = 0;
    for (uint64_t i = 0; i < PROBES; i++) {
        uint32_t at = 1 + (uint32_t)(((hash >> 40) + i) % (PAGES - 1));
        struct page *page = &pages[at];
        *found = at;
        if (page->number == number + 1 && page->space == space) return 0;
        if (!page->number && !empty) empty = at;
    }
    for (uint64_t i = 0; i < PROBES && !empty; i++) {
        uint32_t at = 1 + (uint32_t)(((hash >> 40) + i) % (PAGES - 1));
        if (get_page_state(pages[at].space, pages[at].number - 1) == UC_UNKNOWN) empty = at;
    }
    if (empty) *found = empty;
    if (pages[*found].number) take_out(*found);
    pages[*found] = (struct page){number + 1, space, 0, 0, 0, 0};
    return 1;
}

/* The page is used; or it came along, and is used if it was not known. */
static void use(int32_t space, int64_t number, int along) {
    uint32_t at;
    int is_new = find(space, number, &at);
    if (pages[at].wished) pages[at].wished = 0, wished -= wished > 0, came = now;
    if (along && !is_new) return;
    if (!is_new) take_out(at);
    put_first(at);
}

static void leave(int32_t space, int64_t number) {
    uint32_t at;
    if (find(space, number, &at)) put_first(at);
    pages[at].left = (uint32_t)now;
}

static void restore(void) {
    int64_t most = get_parameter(ahead), window = get_parameter(window_s) * TICKS, count = 0;
    if (get_memory_usage() >= get_memory_limit() / 128 * 127) next = 0; /* there is no room for more */
    for (int looks = LOOKS; looks && next && wished < most; looks--) {
        struct page *page = &pages[next];
        if (page->left && now - page->left <= window && get_page_state(page->space, page->number - 1) == UC_OUT) {
            if (!prefetch(page->space, page->number - 1)) break;
            page->wished = 1, wished++, count++;
        }
        next = page->older;
    }
    if (count) set_parameter(restored, get_parameter(restored) + count);
}

static void limited(int64_t bytes) {
    if (bytes != limit) next = limit && bytes > limit ? pages[0].older : 0;
    limit = bytes;
}

void on_event(int32_t kind, int32_t space, int64_t page, int64_t all, int64_t detail) {
    switch (kind) {
    case UC_FAULT: use(space, page, 0); break;
    case UC_CAME_ALONG:
    case UC_FOUND: use(space, page, 1); break;
    case UC_LEFT: leave(space, page); break;
    case UC_ACCESSED:
        for (uint64_t rest = (uint64_t)detail; rest; rest &= rest - 1) use(space, page + __builtin_ctzll(rest), 0);
        break;
    case UC_LIMIT: limited(detail); break;
    case UC_TICK:
        now = detail * TICKS / 1000 + 1;
        if (now - came > TICKS) wished = 0, came = now; /* what has not come in a second does not */
        if (get_parameter(interval_ms) != asked_ms) asked_ms = get_parameter(interval_ms), scan(asked_ms);
        break;
    }
    if (next) restore();
}
