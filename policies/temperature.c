/* RapidSwap's temperatures (§3.2). A slab is 256 consecutive pages, 1 MiB. It is hot when a page of
 * it is written to a tier, or a thread waits for one. After `step_ms` (5,000) without that it is
 * warm, after two steps it is cold. It then moves one tier down a step, until it is in the last tier
 * or used. A fault lifts its slab to the fastest tier below DRAM.
 *
 * Differs: a move takes those pages of the slab that are in one tier. Compressed memory is above the
 * fastest tier below DRAM; it, and what is full, follow --placement. */
#include "undercroft_policy.h"

enum { SLABS = 1 << 16, PROBES = 16, SLAB_PAGES = 256 };

struct slab {
    int64_t number;     /* and 1; 0: there is no slab here */
    int32_t space;
    uint32_t used;      /* when, in milliseconds, or as if; 0: it is as low as can be */
    uint32_t lifted;    /* when a lift of it was wished last */
    uint8_t level;      /* the tier where its pages belong, or one that has none of them */
};

static struct slab slabs[SLABS];
static uint32_t now = 1, cursor, places[SLABS], count;
static int32_t step_ms, hot, warm, cold, left_out;

static int32_t registered(const char *name, int64_t value) {
    int32_t bytes = 0;
    while (name[bytes]) bytes++;
    return register_parameter(name, bytes, value);
}

void init(void) {
    step_ms = registered("step_ms", 5000);
    hot = registered("hot", 0);
    warm = registered("warm", 0);
    cold = registered("cold", 0);
    left_out = registered("slabs_left_out", 0);
}

static struct slab *find(int32_t space, int64_t number) {
    uint64_t hash = ((uint64_t)number + ((uint64_t)(uint32_t)space << 44)) * 0x9e3779b97f4a7c15u;
    for (uint64_t i = 0; i < PROBES; i++) {
        uint32_t at = (uint32_t)(((hash >> 40) + i) % SLABS);
        struct slab *slab = &slabs[at];
        if (slab->number == number + 1 && slab->space == space) return slab;
        if (slab->number) continue;
        slab->number = number + 1, slab->space = space;
        places[count++] = at;
        return slab;
    }
    set_parameter(left_out, get_parameter(left_out) + 1);
    return 0;
}

/* The fastest tier below DRAM; the number of tiers if there is none. */
static int32_t top(void) {
    int32_t tier = 0, tiers = get_tier_count();
    while (tier < tiers && get_tier(tier, UC_TIER_KIND) == 0) tier++;
    return tier;
}

static int32_t takes(int32_t tier) {
    return get_tier(tier, UC_TIER_FREE) >= SLAB_PAGES * 4096;
}

static int32_t move_slab(const struct slab *slab, int32_t from, int32_t to) {
    return move_pages(slab->space, (slab->number - 1) * SLAB_PAGES, SLAB_PAGES, from, to);
}

static struct slab *use(int32_t space, int64_t page) {
    struct slab *slab = find(space, page / SLAB_PAGES);
    if (slab) slab->used = now, slab->level = 0;
    return slab;
}

/* A thread waited for a page of it. It is lifted at most once a tick. */
static void came_back(struct slab *slab, int32_t from) {
    int32_t to = top();
    if (from <= to || from >= get_tier_count() || slab->lifted == now || !takes(to)) return;
    if (move_slab(slab, from, to)) slab->lifted = now;
}

/* Moves what is cold one tier down, as far as moves find room to wait. */
static void cool(uint32_t step) {
    int32_t first = top(), tiers = get_tier_count();
    for (uint32_t i = 0; i < count; i++) {
        cursor = (cursor + 1) % count;
        struct slab *slab = &slabs[places[cursor]];
        if (!slab->used || now - slab->used < 2 * step) continue;
        int32_t from = slab->level > first ? slab->level : first;
        if (from + 1 >= tiers) {
            slab->used = 0;
            continue;
        }
        if (!takes(from + 1)) continue;
        if (!move_slab(slab, from, from + 1)) return;
        slab->level = (uint8_t)(from + 1);
        slab->used = now - step; /* warm, for one more step */
    }
}

static void show(uint32_t step) {
    int64_t of[3] = {0};
    for (uint32_t i = 0; i < count; i++) {
        const struct slab *slab = &slabs[places[i]];
        uint32_t steps = slab->used ? (now - slab->used) / step : 2;
        of[steps < 2 ? steps : 2]++;
    }
    set_parameter(hot, of[0]), set_parameter(warm, of[1]), set_parameter(cold, of[2]);
}

void on_event(int32_t kind, int32_t space, int64_t page, int64_t pages, int64_t detail) {
    if (kind == UC_STORED && !(detail & 1)) use(space, page);
    if (kind == UC_LOADED) {
        struct slab *slab = use(space, page);
        if (slab) came_back(slab, (int32_t)detail);
    }
    if (kind != UC_TICK) return;
    int64_t step = get_parameter(step_ms);
    now = detail > 0 ? (uint32_t)detail : 1;
    cool(step > 0 ? (uint32_t)step : 1);
    show(step > 0 ? (uint32_t)step : 1);
}
