/* FlexSwap's LinearPF (§6.6): pages that follow a faulted one come before they are needed. With `gva`
 * (1) they follow it at the addresses of the program, also of one in a guest; with 0, in the host's
 * memory. In a process that is the same.
 *
 * Differs: some 2 * `ahead` pages come and not one, because a policy hears of a fault milliseconds
 * later, and a page that has come is mapped, so its use is no fault. Each `ahead`th page is left out:
 * its fault has the next ones come, while those in between are there already. A page comes only if
 * there is room, so what came first leaves until `room` pages are free. */
#include "undercroft_policy.h"

#ifndef GVA
#define GVA 1
#endif
#ifndef AHEAD
#define AHEAD 64
#endif

enum { ARRIVALS = 1 << 16 };

static struct { int64_t page; int32_t space; } arrivals[ARRIVALS];
static uint32_t newest, oldest;
/* The memory in use as it was told last, pages that came less those that left since, and pages that
 * were named and have not left. */
static int64_t told, since, named;
static int32_t gva, ahead, room, unknown;

static int32_t registered(const char *name, int64_t value) {
    int32_t bytes = 0;
    while (name[bytes]) bytes++;
    return register_parameter(name, bytes, value);
}

void init(void) {
    gva = registered("gva", GVA);
    ahead = registered("ahead", AHEAD);
    room = registered("room", 192);
    unknown = registered("unknown", 0);
}

static void arrive(int32_t space, int64_t page) {
    if (newest - oldest == ARRIVALS) oldest++;
    arrivals[newest % ARRIVALS].page = page;
    arrivals[newest++ % ARRIVALS].space = space;
}

static void make_room(void) {
    if (told != get_memory_usage()) told = get_memory_usage(), since = 0;
    int64_t lacking = (told - get_memory_limit()) / 4096 + since - named + get_parameter(room);
    for (; lacking > 0 && oldest != newest; oldest++) {
        int64_t page = arrivals[oldest % ARRIVALS].page;
        int32_t space = arrivals[oldest % ARRIVALS].space;
        if (get_page_state(space, page) != UC_IN) continue;
        if (!reclaim_now(space, page)) return;
        named++, lacking--;
    }
}

void on_event(int32_t kind, int32_t space, int64_t page, int64_t pages, int64_t detail) {
    if (kind == UC_LEFT) since--, named -= named > 0;
    if (kind == UC_TICK) named = 0; /* what did not leave by now may not */
    if (kind != UC_FAULT && kind != UC_CAME_ALONG) return;
    int64_t by_gva = get_parameter(gva), step = get_parameter(ahead), cr3 = get_fault_cr3();
    if (kind == UC_FAULT && step > 0) {
        int64_t at = by_gva ? hva_to_gva(space, cr3, page) : page;
        if (at < 0) set_parameter(unknown, get_parameter(unknown) + 1);
        for (int64_t i = 1; at >= 0 && i < 2 * step; i++) {
            if ((at + i) % step == 0) continue;
            int64_t next = by_gva ? gva_to_hva(space, cr3, at + i) : at + i;
            if (next >= 0 && get_page_state(space, next) == UC_OUT) prefetch(space, next);
        }
    }
    since++;
    arrive(space, page);
    make_room();
}
