/* HybridSwap §4: pages that were used together twice, in one order, are a sequence. The first of its
 * pages go to the SSD, as many as hide the latency of the disk; the others go to the disk. When one
 * of them is needed, all of them come. The SSD is the fastest tier below DRAM, the disk the slowest.
 *
 * Time is counted in pages that come: when a thread has waited for one, or when one that came along
 * is used for the first time. Each page has its last two times.
 *
 * The program waits for pages for `stall_max_percent` of its time at most (§4.4), 0: for any. In a
 * second in which it waits too long, SSD segments grow by as much; after three in which it clearly
 * waits less, they shrink.
 *
 * Differs: of 64 pages that come one after the other it is decided when they are there whether they
 * are a sequence, and not of those that leave together: a file hears of a batch too late. It knows
 * 4 GiB of pages. Run it with --placement waterfall. */
#include "undercroft_policy.h"

#ifndef STALL_MAX
#define STALL_MAX 0
#endif
enum { CHUNKS = 1 << 11, CHUNK = 512, PROBES = 32, RUN = 64, SEQUENCE_MIN = 16, NONE = -1 };
enum { SHIFT_MAX = 64 /* nothing goes to the disk */, WINDOW_MS = 1000, PATIENCE = 3 };
/* It came along, and was not used; it is linked with others. */
enum { ALONG = 1, LINKED = 2 };

static struct { uint32_t last, before; } times[CHUNKS * CHUNK];
static uint8_t marks[CHUNKS * CHUNK];
static int64_t chunk_number[CHUNKS];    /* and 1; 0: there is no chunk here */
static int32_t chunk_space[CHUNKS];
/* Those that came last, in order. */
static int32_t run[RUN], count;
static uint32_t now;
/* Means: pages that come while one stays, and nanoseconds between two that come. */
static double lifetime, compute;
static int64_t told_ms;
static uint32_t told_now;
/* The bound in force, when it began and how long the program had waited then; the same of its window. */
static int64_t bound, since[2], window[2];
static double shift = 1;
static int32_t below;
static int32_t stall_max_percent, shift_percent, sequences, on_disk, left_out;

static int32_t registered(const char *name, int64_t value) {
    int32_t bytes = 0;
    while (name[bytes]) bytes++;
    return register_parameter(name, bytes, value);
}

void init(void) {
    stall_max_percent = registered("stall_max_percent", STALL_MAX);
    shift_percent = registered("shift_percent", 100);
    sequences = registered("sequences", 0);
    on_disk = registered("pages_for_the_disk", 0);
    left_out = registered("pages_left_out", 0);
}

static void add(int32_t parameter, int64_t more) {
    set_parameter(parameter, get_parameter(parameter) + more);
}

static void mean(double *of, double value) {
    *of = *of ? *of / 3 + value * 2 / 3 : value;
}

/* The place of a page; NONE: there is no room for it. */
static int32_t find(int32_t space, int64_t page) {
    int64_t number = page / CHUNK;
    uint64_t hash = ((uint64_t)number + ((uint64_t)(uint32_t)space << 44)) * 0x9e3779b97f4a7c15u;
    for (uint64_t i = 0; i < PROBES; i++) {
        int32_t at = (int32_t)(((hash >> 40) + i) % CHUNKS);
        if (!chunk_number[at]) chunk_number[at] = number + 1, chunk_space[at] = space;
        if (chunk_number[at] == number + 1 && chunk_space[at] == space) return at * CHUNK + (int32_t)(page % CHUNK);
    }
    add(left_out, 1);
    return NONE;
}

static int32_t space_of(int32_t at) { return chunk_space[at / CHUNK]; }
static int64_t page_of(int32_t at) { return (chunk_number[at / CHUNK] - 1) * CHUNK + at % CHUNK; }

/* Pages that hide the disk. */
static double hides(void) {
    int64_t latency = get_tier(get_tier_count() - 1, UC_TIER_LOAD_NS);
    return (double)(latency > 0 ? latency : 12000000) / compute;
}

static double least(double one, double other) { return one < other ? one : other; }
static double most(double one, double other) { return one > other ? one : other; }

/* Makes a sequence of the run, if it is one. */
static void decide(void) {
    int32_t known[RUN], n = 0, same = 0, tiers = get_tier_count(), ssd = 0;
    uint32_t first = (uint32_t)-1, last = 0;
    for (int i = 0; i < count; i++) {
        uint32_t before = times[run[i]].before;
        if (!before || space_of(run[i]) != space_of(run[0])) continue;
        if (n && before > times[known[n - 1]].before) same++;
        if (before < first) first = before;
        if (before > last) last = before;
        known[n++] = run[i];
    }
    count = 0;
    while (ssd < tiers && get_tier(ssd, UC_TIER_KIND) == 0) ssd++;
    if (n < SEQUENCE_MIN || ssd + 1 >= tiers || !compute || last - first > lifetime) return;
    double head = hides() * shift;
    if (same * 4 < (n - 1) * 3 || shift >= SHIFT_MAX || head > n - 1) return;
    int32_t ahead = (int32_t)head + (head > (int32_t)head);
    for (int i = 0; i < n; i++) {
        link_page(space_of(known[i]), page_of(known[i]), page_of(known[(i + 1) % n]));
        if (i >= ahead) place(space_of(known[i]), page_of(known[i]), tiers - 1);
        marks[known[i]] |= LINKED;
    }
    add(sequences, 1), add(on_disk, n - ahead);
}

/* The page comes now. */
static void comes(int32_t at) {
    if (!++now) now = 1;
    int again = times[at].last && now - times[at].last <= (uint32_t)count;
    times[at].before = times[at].last, times[at].last = now;
    if (again) count = 0; /* it is in the run already */
    run[count++] = at;
    if (count == RUN) decide();
}

static void parts(int32_t at) {
    if (marks[at] & LINKED) link_page(space_of(at), page_of(at), page_of(at));
    marks[at] &= ~(LINKED | ALONG);
}

static void leaves(int32_t at) {
    if (marks[at] & ALONG) times[at].last = times[at].before = 0;
    else if (times[at].last) mean(&lifetime, now - times[at].last);
    marks[at] &= ~ALONG;
}

static void used(int32_t at) {
    if (!(marks[at] & ALONG)) return;
    marks[at] &= ~ALONG;
    comes(at);
}

/* Ends a window of the bound, if it is time. */
static void control(int64_t ms) {
    int64_t waited = get_waited_ms();
    if (get_parameter(stall_max_percent) != bound) {
        bound = get_parameter(stall_max_percent);
        shift = bound > 0 ? SHIFT_MAX : 1, below = 0;
        since[0] = window[0] = ms, since[1] = window[1] = waited;
    }
    if (bound <= 0 || ms < window[0] + WINDOW_MS) return;
    double part = (double)bound / 100, ratio = (double)(waited - since[1]) / (ms - since[0]);
    double lately = (double)(waited - window[1]) / (ms - window[0]);
    double allowed = least(most(part + 4 * (part - ratio), part / 2), 1), relation = lately / allowed;
    double all = compute ? least(most(RUN / hides(), 1), SHIFT_MAX) : SHIFT_MAX;
    window[0] = ms, window[1] = waited;
    if (relation > 1) {
        below = 0, shift = shift * relation < all ? shift * relation : SHIFT_MAX;
    } else if (relation >= 0.95) {
        below = 0;
    } else if (++below >= PATIENCE) {
        below = 0, shift = most(least(shift, all) * most(relation, 0.5), 1);
    }
    set_parameter(shift_percent, (int64_t)(shift * 100));
}

void on_event(int32_t kind, int32_t space, int64_t page, int64_t pages, int64_t detail) {
    int32_t at = NONE;
    if (kind == UC_LOADED || kind == UC_CAME_ALONG || kind == UC_LEFT || kind == UC_USED)
        if ((at = find(space, page)) == NONE) return;
    switch (kind) {
    case UC_LOADED: parts(at), comes(at); break;
    case UC_CAME_ALONG: parts(at), marks[at] |= ALONG; break;
    case UC_USED: used(at); break;
    case UC_LEFT: leaves(at); break;
    case UC_TICK:
        control(detail);
        if (now == told_now || detail <= told_ms) break;
        mean(&compute, (double)(detail - told_ms) * 1e6 / (now - told_now));
        told_ms = detail, told_now = now;
        break;
    }
}
