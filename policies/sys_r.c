/* FlexSwap's SYS-R (§6.5): the page that is needed last leaves first, as far as the instructions
 * tell. Between two faults on a page lies a distance, counted in faults. Each instruction has the
 * mean of the distances that followed its faults. A page that comes is expected back after that of
 * the instruction which brought it: its estimated reuse time, which counts down as faults pass, and
 * on below zero. The page with the largest absolute one leaves.
 *
 * Differs: of `sample` pages in memory the best is named, for each page that comes; the paper looks
 * at all of them when a page must leave. What came with the last `recent` faults may not leave. */
#include "undercroft_policy.h"

enum { PAGES = 1 << 18, INSTRUCTIONS = 1 << 10, PROBES = 16 };

struct page {
    int64_t number;         /* and 1; 0: there is no page here */
    int32_t space;
    uint32_t faulted;       /* the fault that brought it last; 0: it came along */
    uint32_t back;          /* the fault that is expected to bring it back */
    uint16_t instruction;
};

static struct page pages[PAGES];
static uint32_t distance[INSTRUCTIONS];
static int64_t address[INSTRUCTIONS];
static uint32_t now = 1, dice = 2463534242u;
/* Places in `pages` that are in use. */
static uint32_t places[PAGES], count;
static int32_t sample, recent, known;

static int32_t registered(const char *name, int64_t value) {
    int32_t bytes = 0;
    while (name[bytes]) bytes++;
    return register_parameter(name, bytes, value);
}

void init(void) {
    sample = registered("sample", 24);
    recent = registered("recent", 96);
    known = registered("instructions", 0);
}

static struct page *find(int32_t space, int64_t number) {
    uint64_t hash = ((uint64_t)number + ((uint64_t)(uint32_t)space << 44)) * 0x9e3779b97f4a7c15u;
    for (uint64_t i = 0; i < PROBES; i++) {
        uint32_t at = (uint32_t)(((hash >> 40) + i) % PAGES);
        struct page *page = &pages[at];
        if (page->number == number + 1 && page->space == space) return page;
        if (page->number) continue;
        page->number = number + 1, page->space = space;
        places[count++] = at;
        return page;
    }
    return 0;
}

/* The number of an instruction. Two of one number are one. */
static uint16_t number_of(int64_t ip) {
    uint16_t number = (uint16_t)(((uint64_t)ip * 0x9e3779b97f4a7c15u) >> 54);
    if (!address[number]) {
        address[number] = ip;
        set_parameter(known, get_parameter(known) + 1);
    }
    return number;
}

static void faulted(struct page *page, int64_t ip) {
    uint16_t number = number_of(ip);
    now++;
    if (page->faulted) {
        uint32_t *mean = &distance[page->instruction], passed = now - page->faulted;
        *mean = *mean ? (3 * *mean + passed) / 4 : passed;
    }
    page->faulted = now;
    page->instruction = number;
    page->back = now + distance[number];
}

static uint32_t absolute(uint32_t back) {
    return back > now ? back - now : now - back;
}

static uint32_t any(void) {
    dice ^= dice << 13, dice ^= dice >> 17, dice ^= dice << 5;
    return places[dice % count];
}

static void name_one(void) {
    struct page *best = 0;
    for (int64_t i = get_parameter(sample); i > 0; i--) {
        struct page *page = &pages[any()];
        if (now - page->faulted < (uint32_t)get_parameter(recent)) continue;
        if (best && absolute(page->back) <= absolute(best->back)) continue;
        if (get_page_state(page->space, page->number - 1) == UC_IN) best = page;
    }
    if (best) reclaim(best->space, best->number - 1);
}

void on_event(int32_t kind, int32_t space, int64_t number, int64_t all, int64_t detail) {
    if (kind != UC_FAULT && kind != UC_CAME_ALONG && kind != UC_FOUND) return;
    struct page *page = find(space, number);
    if (!page) return;
    if (kind == UC_FAULT) faulted(page, get_fault_ip());
    else page->faulted = 0, page->back = now;
    if (get_memory_usage() > get_memory_limit() / 2) name_one();
}
