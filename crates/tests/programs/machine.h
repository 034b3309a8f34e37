// Programs that stand for a virtual machine: numbers that follow from others, time, and counts of
// several threads.
#include <stdint.h>
#include <time.h>

static uint64_t mix(uint64_t x) {
    x ^= x >> 31, x *= 0x7fb5d329728ea185u, x ^= x >> 27, x *= 0x81dadef4bc2dd44du;
    return x ^ x >> 33;
}

static uint64_t now(void) {
    struct timespec time;
    clock_gettime(CLOCK_MONOTONIC, &time);
    return time.tv_sec * 1000000000u + time.tv_nsec;
}

static void add(uint64_t *to, uint64_t count) { __atomic_fetch_add(to, count, __ATOMIC_RELAXED); }
