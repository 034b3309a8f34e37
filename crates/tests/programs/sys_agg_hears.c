// Tells SYS-Agg of phases whose scans come late, as those of a virtual machine do: a second phase begins
// before a scan of the first one was heard. Prints how many phases it saw, how many pages of the past ones
// and of the present one it named, and the scans that it asks for in the end.
#pragma GCC diagnostic ignored "-Wattributes"
#pragma GCC diagnostic ignored "-Wunused-parameter"
#include <stdio.h>

#include "../../../policies/sys_agg.c"

enum { SPACE = 7, SET = 1000, SETS = 3 };

static int64_t values[8], asked_ms;
static int32_t registered_so_far;
static int has_left[SETS * SET], waits[SETS * SET];

int32_t register_parameter(const char *name, int32_t bytes, int64_t value) {
    (void)name, (void)bytes;
    values[registered_so_far] = value;
    return registered_so_far++;
}

int64_t get_parameter(int32_t parameter) { return values[parameter]; }

int32_t set_parameter(int32_t parameter, int64_t value) { return values[parameter] = value, 1; }

int32_t scan(int64_t milliseconds) { return asked_ms = milliseconds, 1; }

int32_t get_page_state(int32_t space, int64_t page) { return space == SPACE && !has_left[page] ? UC_IN : UC_OUT; }

int32_t reclaim_now(int32_t space, int64_t page) { return waits[page] = space == SPACE; }

static void ticks_pass(int many) {
    for (; many; many--) on_event(UC_TICK, 0, 0, 0, 0);
}

static void set_comes(int64_t set) {
    for (int64_t page = set * SET; page < (set + 1) * SET; page++) on_event(UC_FAULT, SPACE, page, 1, 0);
}

// Only the last set is used.
static void scan_comes(void) {
    for (int64_t page = (SETS - 1) * SET / PAGES * PAGES; page < SETS * SET; page += PAGES) {
        uint64_t used = page < (SETS - 1) * SET ? ~(uint64_t)0 << ((SETS - 1) * SET - page) : ~(uint64_t)0;
        on_event(UC_ACCESSED, SPACE, page, PAGES, (int64_t)used);
    }
    on_event(UC_SCANNED, SPACE, 0, SET, 0);
}

// What was named leaves. Returns how many pages.
static int pages_leave(void) {
    int left = 0;
    for (int64_t page = 0; page < SETS * SET; page++)
        if (waits[page]) waits[page] = 0, has_left[page] = 1, left++, on_event(UC_LEFT, SPACE, page, 1, 0);
    return left;
}

int main(void) {
    init();
    ticks_pass(1);
    set_comes(0);
    ticks_pass(50);
    on_event(UC_SCANNED, SPACE, 0, 0, 0); // the start is over
    for (int64_t set = 1; set < SETS; set++) set_comes(set), ticks_pass(30);
    scan_comes(), ticks_pass(40);
    int early = pages_leave(), past = 0, present = 0;
    scan_comes();
    for (int turn = 0; turn < 40; turn++) ticks_pass(1), pages_leave();
    for (int64_t page = 0; page < SETS * SET; page++)
        *(page < (SETS - 1) * SET ? &past : &present) += has_left[page];
    printf("%ld phases, %d early, %d past, %d present, scans each %ld ms\n", (long)get_parameter(phases), early, past,
           present, (long)asked_ms);
    return 0;
}
