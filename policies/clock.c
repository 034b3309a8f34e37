/* CLOCK: a hand goes round the pages in memory, in the order in which they came. A page that was
 * used since the hand last passed gets another lap; the next other one leaves. Each page that comes
 * needs room, so one is named for it. The access that faulted is a use.
 *
 * Differs: uses are those of a scan each `interval_ms`, and the page for the next fault is named
 * when the last one has been served. A named page goes behind the others until it leaves. Pages that
 * moved are listed again from their next use on. It knows 4 GiB of pages.
 *
 * clock_w.c has the same hand go by writes. */
#include "undercroft_policy.h"

#ifndef BY_WRITES
#define BY_WRITES 0
#endif

enum { CHUNKS = 1 << 11, CHUNK = 512, PAGES = CHUNKS * CHUNK, HAND = PAGES, PROBES = 32 };
enum { NONE = -1, STEPS = 1 << 12 /* that the hand takes at one event */ };
/* Of a page: the hand has to pass it; its last copy is no longer right as far as is known; a copy of
 * it was written at some time; it is in the list. */
enum { USED = 1, WRITER = 2, COPIED = 4, LISTED = 8 };

/* A circle. The hand is before the page that it meets next, and behind the last. */
static struct { int32_t next, before; } pages[PAGES + 1];
static uint8_t marks[PAGES];
static int64_t chunk_number[CHUNKS];    /* and 1; 0: there is no chunk here */
static int32_t chunk_space[CHUNKS], chunk_listed[CHUNKS];
static int32_t interval_ms, left_out;
static int64_t asked_ms;

static int32_t registered(const char *name, int64_t value) {
    int32_t bytes = 0;
    while (name[bytes]) bytes++;
    return register_parameter(name, bytes, value);
}

void init(void) {
    pages[HAND].next = pages[HAND].before = HAND;
    interval_ms = registered("interval_ms", 100);
    left_out = registered("pages_left_out", 0);
}

/* The place of a page in `pages`; NONE: there is no room for it. */
static int32_t find(int32_t space, int64_t page) {
    int64_t number = page / CHUNK;
    uint64_t hash = ((uint64_t)number + ((uint64_t)(uint32_t)space << 44)) * 0x9e3779b97f4a7c15u;
    int32_t free = NONE;
    for (uint64_t i = 0; i < PROBES; i++) {
        int32_t at = (int32_t)(((hash >> 40) + i) % CHUNKS);
        if (chunk_number[at] == number + 1 && chunk_space[at] == space) return at * CHUNK + (int32_t)(page % CHUNK);
        if (!chunk_number[at]) {
            free = at;
            break;
        }
        if (free == NONE && !chunk_listed[at]) free = at;
    }
    if (free == NONE) {
        set_parameter(left_out, get_parameter(left_out) + 1);
        return NONE;
    }
    chunk_number[free] = number + 1, chunk_space[free] = space;
    for (int32_t i = 0; i < CHUNK; i++) marks[free * CHUNK + i] = 0;
    return free * CHUNK + (int32_t)(page % CHUNK);
}

static void unlist(int32_t at) {
    if (!(marks[at] & LISTED)) return;
    pages[pages[at].before].next = pages[at].next;
    pages[pages[at].next].before = pages[at].before;
    marks[at] &= ~LISTED;
    chunk_listed[at / CHUNK]--;
}

/* The page is the last that the hand meets. */
static void list(int32_t at) {
    unlist(at);
    int32_t last = pages[HAND].before;
    pages[at].next = HAND, pages[at].before = last;
    pages[last].next = pages[HAND].before = at;
    marks[at] |= LISTED;
    chunk_listed[at / CHUNK]++;
}

/* Turns the hand to the next page that may leave. */
static void name_one(void) {
    for (int steps = 0, at; steps < STEPS && (at = pages[HAND].next) != HAND; steps++) {
        int32_t space = chunk_space[at / CHUNK];
        int64_t page = (chunk_number[at / CHUNK] - 1) * CHUNK + at % CHUNK;
        list(at);
        if (marks[at] & USED) {
            marks[at] &= ~USED;
        } else if (get_page_state(space, page) != UC_IN) {
            unlist(at); /* the program has dropped or moved it */
        } else {
            reclaim(space, page);
            return;
        }
    }
}

static void came(int32_t at, int is_fault, int write) {
    list(at);
    if (write) marks[at] |= WRITER;
    if (is_fault && (write || !BY_WRITES)) marks[at] |= USED;
    /* Before that there is room for it, and nothing has to leave. */
    int64_t limit = get_memory_limit();
    if (limit > 0 && limit - get_memory_usage() <= limit / 128 + 64 * 4096) name_one();
}

static void used(int32_t space, int64_t page) {
    int32_t at = find(space, page);
    if (at == NONE) return;
    if (!(marks[at] & LISTED) && get_page_state(space, page) == UC_IN) list(at);
    if (!BY_WRITES || marks[at] & WRITER) marks[at] |= USED;
}

void on_event(int32_t kind, int32_t space, int64_t page, int64_t all, int64_t detail) {
    int32_t at;
    switch (kind) {
    case UC_FAULT:
    case UC_CAME_ALONG:
    case UC_FOUND:
        if ((at = find(space, page)) != NONE) came(at, kind == UC_FAULT, kind == UC_FAULT && detail & 1);
        break;
    case UC_STAYED:
        if ((at = find(space, page)) != NONE) list(at);
        break;
    case UC_LEFT:
        if ((at = find(space, page)) != NONE) unlist(at), marks[at] &= ~(USED | WRITER);
        break;
    case UC_STORED:
        /* The first copy of a page tells nothing: it had none. */
        if (detail & 1 || (at = find(space, page)) == NONE) break;
        if (marks[at] & COPIED) marks[at] |= WRITER;
        marks[at] |= COPIED;
        break;
    case UC_USED: used(space, page); break;
    case UC_ACCESSED:
        for (uint64_t rest = (uint64_t)detail; rest; rest &= rest - 1) used(space, page + __builtin_ctzll(rest));
        break;
    case UC_TICK:
#if BY_WRITES
        get_tier_count(); /* a file that calls this hears UC_STORED */
#endif
        if (get_parameter(interval_ms) != asked_ms) {
            asked_ms = get_parameter(interval_ms);
            scan(asked_ms);
        }
        break;
    }
}
