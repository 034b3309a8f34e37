/* NVSwap's groups (§III). The buffer is the fastest tier below DRAM, the zone a tier below it. Pages
 * that left one after the other are a group of 64. When less than an eighth of the buffer is free,
 * the group that waits longest goes to the zone. When a thread waits for a page of the zone, the
 * rest of its group moves to the buffer, while a sixteenth of it is free.
 *
 * Run it with --placement waterfall: that fills the buffer first, and moves its oldest pages on if
 * the groups do not make room in time. */
#include "undercroft_policy.h"

enum { CHUNKS = 1 << 11, CHUNK = 512, GROUPS = 1 << 15, WAITING = 1 << 16, GROUP = 64, PROBES = 32 };
enum { NONE = -1, ENDED = 64 };

/* A page joins one group, and knows the page that left next. */
struct page { int32_t group, next; };
struct group { int32_t first, last, pages; uint32_t turn, lifted; };

static struct page pages[CHUNKS * CHUNK];
static int64_t chunk_number[CHUNKS];    /* and 1; 0: there is no chunk here, NONE: there was one */
static int32_t chunk_space[CHUNKS];
static struct group groups[GROUPS];
static int32_t unused[GROUPS], unused_count, made, open = NONE;
/* Groups that go down, the next one first, with their turns. Old turns are passed over. */
static struct { int32_t group; uint32_t turn; } waiting[WAITING];
static uint32_t oldest, newest, turn, now = 1;
static int64_t going;                   /* pages on their way down, half of them forgotten each tick */
static int32_t ended[ENDED], ended_count;
static int32_t shown_groups, left_out;

static int32_t registered(const char *name, int64_t value) {
    int32_t bytes = 0;
    while (name[bytes]) bytes++;
    return register_parameter(name, bytes, value);
}

void init(void) {
    shown_groups = registered("groups", 0);
    left_out = registered("pages_left_out", 0);
}

/* The place of a page in `pages`; NONE: there is no room for it. */
static int32_t find(int32_t space, int64_t page) {
    int64_t number = page / CHUNK;
    uint64_t hash = ((uint64_t)number + ((uint64_t)(uint32_t)space << 44)) * 0x9e3779b97f4a7c15u;
    int32_t free = NONE;
    for (uint64_t i = 0; i < PROBES; i++) {
        int32_t at = (int32_t)(((hash >> 40) + i) % CHUNKS);
        int64_t of = chunk_number[at];
        if (of == number + 1 && chunk_space[at] == space) return at * CHUNK + (int32_t)(page % CHUNK);
        if (free == NONE && of <= 0) free = at;
        if (!of) break;
    }
    if (free == NONE) {
        set_parameter(left_out, get_parameter(left_out) + 1);
        return NONE;
    }
    chunk_number[free] = number + 1, chunk_space[free] = space;
    for (int32_t i = 0; i < CHUNK; i++) pages[free * CHUNK + i].group = NONE;
    return free * CHUNK + (int32_t)(page % CHUNK);
}

/* A group without pages that waits for nothing is used for others. */
static void release(int32_t of) {
    struct group *group = &groups[of];
    if (group->pages || group->turn || of == open) return;
    unused[unused_count++] = of;
    set_parameter(shown_groups, made - unused_count);
}

static void part(int32_t at) {
    int32_t of = pages[at].group, next = pages[at].next;
    if (of == NONE) return;
    struct group *group = &groups[of];
    pages[at].group = NONE;
    group->pages--;
    if (group->first == at) {
        group->first = next;
    } else {
        int32_t before = group->first;
        while (pages[before].next != at) before = pages[before].next;
        pages[before].next = next;
        if (group->last == at) group->last = before;
    }
    release(of);
}

/* The group is the last to go down. */
static void wait(int32_t of) {
    if (newest - oldest == WAITING) { /* old turns make room */
        uint32_t kept = oldest;
        for (uint32_t i = oldest; i != newest; i++)
            if (groups[waiting[i % WAITING].group].turn == waiting[i % WAITING].turn)
                waiting[kept++ % WAITING] = waiting[i % WAITING];
        newest = kept;
        if (newest - oldest == WAITING) return;
    }
    if (!++turn) turn = 1;
    groups[of].turn = turn;
    waiting[newest % WAITING].group = of;
    waiting[newest++ % WAITING].turn = turn;
}

static void join(int32_t at) {
    part(at);
    if (open == NONE) {
        if (unused_count) open = unused[--unused_count];
        else if (made < GROUPS) open = made++;
        else return;
        groups[open] = (struct group){NONE, NONE, 0, 0, 0};
        set_parameter(shown_groups, made - unused_count);
    }
    struct group *group = &groups[open];
    pages[at] = (struct page){open, NONE};
    if (group->pages++) pages[group->last].next = at;
    else group->first = at;
    group->last = at;
    if (group->pages == GROUP) {
        int32_t full = open;
        open = NONE;
        wait(full);
    }
}

/* Has the pages of a group move, those that follow each other together. Returns how many. */
static int32_t move_group(int32_t of, int32_t from, int32_t to) {
    int32_t at = groups[of].first, moved = 0;
    for (int32_t left = groups[of].pages; left > 0;) {
        int32_t first = at, count = 1;
        for (at = pages[at].next; --left && at == first + count && at % CHUNK; at = pages[at].next) count++;
        int64_t page = (chunk_number[first / CHUNK] - 1) * CHUNK + first % CHUNK;
        if (!move_pages(chunk_space[first / CHUNK], page, count, from, to)) break;
        moved += count;
    }
    return moved;
}

/* The fastest tier below DRAM with one below it; NONE: there is none. */
static int32_t buffer(void) {
    int32_t tier = 0, tiers = get_tier_count();
    while (tier < tiers && get_tier(tier, UC_TIER_KIND) == 0) tier++;
    return tier + 1 < tiers ? tier : NONE;
}

/* Has groups go down until enough of the buffer is free. */
static void make_room(int32_t from) {
    int32_t to = from + 1, tiers = get_tier_count();
    int64_t bytes = get_tier(from, UC_TIER_BYTES);
    int64_t wanted = bytes / 4 < (1 << 19) ? bytes / 4 : 1 << 19;
    if (wanted < bytes / 8) wanted = bytes / 8;
    int64_t free = get_tier(from, UC_TIER_FREE) + going * 4096;
    while (to < tiers && get_tier(to, UC_TIER_FREE) < GROUP * 4096) to++;
    while (to < tiers && free < wanted && oldest != newest) {
        int32_t of = waiting[oldest % WAITING].group;
        if (groups[of].turn == waiting[oldest % WAITING].turn) {
            int32_t moved = move_group(of, from, to);
            if (!moved && groups[of].pages) return; /* moves wait already */
            going += moved, free += (int64_t)moved * 4096;
            groups[of].turn = 0;
            release(of);
        }
        oldest++;
    }
}

static void came_back(int32_t at, int32_t from, int32_t to) {
    int32_t of = pages[at].group;
    int64_t free = get_tier(to, UC_TIER_FREE), most = get_tier(to, UC_TIER_BYTES);
    if (from <= to || of == NONE || of == open || groups[of].lifted == now) return;
    if (free < most / 16 || free < GROUP * 4096) return;
    if (!move_group(of, from, to)) return;
    groups[of].lifted = now;
    wait(of);
}

/* Forgets the pages of spaces that have ended. */
static void sweep(void) {
    for (int32_t at = 0; ended_count && at < CHUNKS; at++)
        for (int32_t i = 0; i < ended_count; i++) {
            if (chunk_number[at] <= 0 || chunk_space[at] != ended[i]) continue;
            for (int32_t page = 0; page < CHUNK; page++) part(at * CHUNK + page);
            chunk_number[at] = NONE;
        }
    ended_count = 0;
}

void on_event(int32_t kind, int32_t space, int64_t page, int64_t all, int64_t detail) {
    int32_t top = buffer(), tier = (int32_t)(detail >> 1), at;
    if (kind == UC_ENDED && ended_count < ENDED) ended[ended_count++] = space;
    if (kind == UC_TICK) now = detail > 0 ? (uint32_t)detail : 1, going = 0, sweep();
    if (top == NONE) return;
    if (kind == UC_STORED && !(detail & 1) && (at = find(space, page)) != NONE) join(at);
    if (kind == UC_STORED && (detail & 1) && tier > top && going > 0) going--;
    if (kind == UC_LOADED && (at = find(space, page)) != NONE) came_back(at, (int32_t)detail, top);
    if (kind == UC_TICK || kind == UC_STORED) make_room(top);
}
