/* FlexSwap's SYS-Agg (§6.7), for programs that work in phases, each of which uses other memory. Where
 * a phase begins, more pages come than before. Then all pages in memory are old, and those that
 * are used from then on are not. Scans each `interval_ms` show that, and after each, up to `most_mib`
 * of the old pages leave. When no page is old any more there are no scans either. A phase may begin
 * while pages of another are old: scans of a virtual machine may be seconds apart.
 *
 * Differs: it counts pages that come, and not faults, because a fault may bring many. They are more if
 * a tenth of a second has `uptick` of them, and four times the mean. After 30 scans no page is old, so
 * that one that may not leave does not keep the scans going. It knows 8 GiB of pages. */
#include "undercroft_policy.h"

#ifndef INTERVAL_MS
#define INTERVAL_MS 1000
#endif

enum {
    PAGES = 64,         /* of a group */
    GROUPS = 1 << 15,
    SPACES = 256,
    AHEAD = 1024,       /* pages that are named and have not left */
    TICKS = 10,         /* so long it is waited for one of them, and more that come are of one phase */
    LOOKS = 1024,       /* groups that one event looks at */
    PART = 256,         /* the mean is in parts */
    SCANS = 30,
};

struct group {
    int64_t first;      /* page; -1: there is no group here */
    int32_t space;
    uint64_t known, old;
};

static struct group groups[GROUPS];
/* Scans of each space since the phase began. The first has uses of the phase before. */
static uint8_t scans[SPACES];
static int32_t interval_ms, uptick, most_mib, phases, old_pages;
static int64_t came, mean, old, left_to_name, named, ticks;
/* Ticks since the phase began; the group at which the last event could name no more. */
static int32_t age, next = GROUPS;

static int32_t registered(const char *name, int64_t value) {
    int32_t bytes = 0;
    while (name[bytes]) bytes++;
    return register_parameter(name, bytes, value);
}

void init(void) {
    for (int i = 0; i < GROUPS; i++) groups[i].first = -1;
    interval_ms = registered("interval_ms", INTERVAL_MS);
    uptick = registered("uptick", 128);
    most_mib = registered("most_mib", 2048);
    phases = registered("phases", 0);
    old_pages = registered("old_pages", 0);
}

/* The group of a page; a new one takes the place of one of which nothing is known. 0: no room. */
static struct group *find(int32_t space, int64_t page) {
    int64_t first = page & ~(int64_t)(PAGES - 1);
    uint64_t hash = ((uint64_t)first + (uint64_t)(uint32_t)space * 0x9e3779b97f4a7c15u) * 0x9e3779b97f4a7c15u;
    struct group *empty = 0;
    for (int i = 0; i < 32; i++) {
        struct group *group = &groups[((hash >> 40) + (uint64_t)i) % GROUPS];
        if (group->first == first && group->space == space) return group;
        if (!group->known && !empty) empty = group;
    }
    if (empty) *empty = (struct group){first, space, 0, 0};
    return empty;
}

static void forget_old(struct group *group, uint64_t bit) {
    old -= (group->old & bit) != 0;
    group->old &= ~bit;
}

/* The page is in memory; one that is used or comes is not old. */
static void use(int32_t space, int64_t page) {
    struct group *group = find(space, page);
    if (!group) return;
    uint64_t bit = (uint64_t)1 << (page & (PAGES - 1));
    group->known |= bit;
    forget_old(group, bit);
}

static void leave(int32_t space, int64_t page) {
    struct group *group = find(space, page);
    uint64_t bit = (uint64_t)1 << (page & (PAGES - 1));
    if (group) group->known &= ~bit, forget_old(group, bit);
    named -= named > 0, ticks = 0;
}

static void begin_phase(void) {
    old = 0;
    for (int i = 0; i < GROUPS; i++) old += __builtin_popcountll(groups[i].old = groups[i].known);
    for (int i = 0; i < SPACES; i++) scans[i] = 0;
    age = 0, next = GROUPS;
    set_parameter(phases, get_parameter(phases) + 1);
    scan(get_parameter(interval_ms));
}

static void end_scans(void) {
    next = GROUPS;
    scan(0);
}

/* Names old pages of spaces that were scanned since the phase began, as far as they may leave now. */
static void name_old(void) {
    for (int looks = LOOKS; looks && next < GROUPS; looks--, next++) {
        struct group *group = &groups[next];
        while (group->old && scans[group->space & (SPACES - 1)] > 1) {
            int64_t page = group->first + __builtin_ctzll(group->old);
            if (left_to_name <= 0 || named >= AHEAD) return;
            uint64_t bit = group->old & -group->old;
            if (get_page_state(group->space, page) != UC_IN) group->known &= ~bit;
            else if (!reclaim_now(group->space, page)) return;
            else named++, left_to_name--;
            forget_old(group, bit);
        }
    }
    if (next >= GROUPS && !old) end_scans();
}

static void scanned(int32_t space) {
    uint8_t *of = &scans[space & (SPACES - 1)];
    *of += *of < SCANS;
    set_parameter(old_pages, old);
    left_to_name = get_parameter(most_mib) << 8;
    next = 0;
    if (!old || *of == SCANS) end_scans();
}

static void tick(void) {
    int32_t more = came >= get_parameter(uptick) && came * PART > 4 * mean;
    mean += (came * PART - mean) / 32;
    came = 0;
    age++;
    if (++ticks > TICKS) named = 0; /* what has not left by now may not */
    /* The start is one, too: a process is managed from its start only if its policy asks for scans. */
    if ((more && age > TICKS) || !get_parameter(phases)) begin_phase();
}

void on_event(int32_t kind, int32_t space, int64_t page, int64_t pages, int64_t detail) {
    switch (kind) {
    case UC_FAULT:
    case UC_CAME_ALONG: came++; /* fall through */
    case UC_STAYED:
    case UC_FOUND: use(space, page); break;
    case UC_LEFT: leave(space, page); break;
    case UC_ACCESSED:
        if (!scans[space & (SPACES - 1)]) break;
        for (uint64_t rest = (uint64_t)detail; rest; rest &= rest - 1) use(space, page + __builtin_ctzll(rest));
        break;
    case UC_SCANNED: scanned(space); break;
    case UC_TICK: tick(); break;
    }
    if (next < GROUPS) name_old();
}
