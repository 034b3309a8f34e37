/* FlexSwap's dt-reclaimer (§5.4, after Lagar-Cavilla et al., 2019): pages that were not used for
 * some scans are cold, and leave although there is room. How many scans is learnt: so many that of
 * the pages in use at most `target_permille` would have been out when they were used again.
 *
 * Each page has an age: scans since its last use, in memory or out. A use adds one to the histogram
 * of the ages at which pages are used. The threshold is the least age at and above which few enough
 * uses were, smoothed over the scans.
 *
 * Differs: pages that moved are known again from their next use on, and so may be some that came to
 * where much was dropped. It knows 8 GiB of pages: what an event may take goes no further. */
#include "undercroft_policy.h"

#ifndef INTERVAL_MS
#define INTERVAL_MS 60000
#endif
#ifndef TARGET_PERMILLE
#define TARGET_PERMILLE 20
#endif

enum {
    PAGES = 64,             /* of a group */
    GROUPS = 1 << 15,
    GROUPS_AT_ONCE = 1024,  /* that one event may forget */
    DROPS = 16,             /* larger ranges that wait for a tick */
    AGES = 255,
    THRESHOLD_FIRST = 8,    /* no page is cold before its uses have been seen for a while */
    THRESHOLD_LEAST = 2,    /* a page that has just come looks unused at the next scan */
    PART = 256,             /* thresholds are smoothed in parts */
};

struct group {
    int64_t first;          /* page; -1: there is no group here */
    int32_t space;
    uint64_t known;
    uint8_t age[PAGES];
};

struct drop {
    int64_t first, pages;
    int32_t space;
};

static struct group groups[GROUPS];
static struct drop drops[DROPS];
static int32_t dropped;
static int32_t interval_ms, target_permille, threshold, cold_pages, used_pages, too_many;
static int64_t asked_ms;
/* Ages at uses since the last scan, and the smoothed threshold in parts. */
static int64_t uses[AGES + 1], smoothed = THRESHOLD_FIRST * PART;
/* The group at which the last event could name no more; GROUPS: all were named. */
static int32_t next = GROUPS;

static int32_t registered(const char *name, int64_t value) {
    int32_t bytes = 0;
    while (name[bytes]) bytes++;
    return register_parameter(name, bytes, value);
}

void init(void) {
    for (int i = 0; i < GROUPS; i++) groups[i].first = -1;
    interval_ms = registered("interval_ms", INTERVAL_MS);
    target_permille = registered("target_permille", TARGET_PERMILLE);
    threshold = registered("threshold", THRESHOLD_FIRST);
    cold_pages = registered("cold_pages", 0);
    used_pages = registered("used_pages", 0);
    too_many = registered("groups_left_out", 0);
}

/* The group of a page, a new one if there is none; 0: there is no room for it. */
static struct group *find(int32_t space, int64_t page, int make) {
    int64_t first = page & ~(int64_t)(PAGES - 1);
    uint64_t hash = ((uint64_t)first + (uint64_t)(uint32_t)space * 0x9e3779b97f4a7c15u) * 0x9e3779b97f4a7c15u;
    for (int i = 0; i < 32; i++) {
        struct group *group = &groups[((hash >> 40) + (uint64_t)i) % GROUPS];
        if (group->first == first && group->space == space) return group;
        /* A group of which nothing is known any more is free, but others may be behind it. */
        if (group->first == -1 || (make && !group->known)) {
            if (!make) return 0;
            group->first = first, group->space = space, group->known = 0;
            return group;
        }
    }
    if (make) set_parameter(too_many, get_parameter(too_many) + 1);
    return 0;
}

/* The page is used now, or has come. */
static void use(int32_t space, int64_t page) {
    struct group *group = find(space, page, 1);
    if (!group) return;
    int at = (int)(page & (PAGES - 1));
    if (group->known >> at & 1 && group->age[at]) uses[group->age[at]]++;
    group->known |= (uint64_t)1 << at;
    group->age[at] = 0;
}

static int holds(const struct group *group, int32_t space, int64_t page, int64_t pages) {
    return group->space == space && (uint64_t)group->first - (uint64_t)page < (uint64_t)pages;
}

/* Forgets the groups that begin in a range, a large one at the next tick. A page of which too much is
 * known does no harm: what is not in memory is not named. */
static void forget(int32_t space, int64_t page, int64_t pages) {
    if ((uint64_t)pages > GROUPS_AT_ONCE * PAGES) {
        if (dropped < DROPS) drops[dropped++] = (struct drop){page, pages, space};
        return;
    }
    for (int64_t at = page; at < page + pages; at = (at | (PAGES - 1)) + 1) {
        struct group *group = find(space, at, 0);
        if (!group) continue;
        uint64_t from = (uint64_t)-1 << (at & (PAGES - 1));
        int64_t rest = page + pages - group->first;
        group->known &= ~(rest < PAGES ? from & ~((uint64_t)-1 << rest) : from);
    }
}

static void forget_large(void) {
    for (int i = 0; dropped && i < GROUPS; i++)
        for (int at = 0; groups[i].known && at < dropped; at++)
            if (holds(&groups[i], drops[at].space, drops[at].first, drops[at].pages)) groups[i].known = 0;
    dropped = 0;
}

/* The least age at and above which few enough of the uses were. */
static int64_t proposed(int64_t used) {
    int64_t may = used * get_parameter(target_permille) / 1000, later = 0;
    int64_t age = AGES;
    while (age > THRESHOLD_LEAST && later + uses[age] <= may) later += uses[age--];
    return later + uses[age] <= may ? age : age + 1;
}

/* Pages of this age are cold. */
static int64_t cold_from(void) {
    int64_t age = (smoothed + PART - 1) / PART;
    return age > AGES ? AGES : age;
}

/* Names cold pages until the event may name no more. */
static void name_cold(void) {
    for (; next < GROUPS; next++) {
        struct group *group = &groups[next];
        if (group->first == -1) continue;
        for (uint64_t rest = group->known; rest; rest &= rest - 1) {
            int at = __builtin_ctzll(rest);
            if (group->age[at] < cold_from()) continue;
            if (get_page_state(group->space, group->first + at) != UC_IN) continue;
            if (!reclaim_now(group->space, group->first + at)) return;
        }
    }
}

static void scanned(int32_t space, int64_t used) {
    int64_t cold = 0;
    smoothed += (proposed(used) * PART - smoothed) / 2;
    for (int i = 0; i < GROUPS; i++) {
        struct group *group = &groups[i];
        if (group->first == -1 || group->space != space) continue;
        for (uint64_t rest = group->known; rest; rest &= rest - 1) {
            int at = __builtin_ctzll(rest);
            if (group->age[at] < AGES) group->age[at]++;
            cold += group->age[at] >= cold_from();
        }
    }
    for (int i = 0; i <= AGES; i++) uses[i] = 0;
    set_parameter(threshold, cold_from());
    set_parameter(cold_pages, cold);
    set_parameter(used_pages, used);
    next = 0; /* they are named at the ticks */
}

void on_event(int32_t kind, int32_t space, int64_t page, int64_t pages, int64_t detail) {
    switch (kind) {
    case UC_FAULT:
    case UC_CAME_ALONG:
    case UC_FOUND: use(space, page); break;
    case UC_ACCESSED:
        for (uint64_t rest = (uint64_t)detail; rest; rest &= rest - 1) use(space, page + __builtin_ctzll(rest));
        break;
    case UC_SCANNED: scanned(space, pages); break;
    case UC_DROPPED:
    case UC_MOVED: forget(space, page, pages); break;
    case UC_ENDED: forget(space, 0, INT64_MAX); break;
    case UC_TICK:
        forget_large();
        if (get_parameter(interval_ms) != asked_ms) {
            asked_ms = get_parameter(interval_ms);
            scan(asked_ms);
        }
        name_cold();
        break;
    }
}
