// Uses one part of its memory again and again, and then the next, some rounds. Checks all that it reads.
// Each 20 ms it prints seconds, the memory that it has, and how many pages it has looked at.
// Arguments: parts, MiB of a part, seconds of each, rounds.
#include <stddef.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <time.h>
#include <unistd.h>

enum { PAGE = 4096, WORDS = PAGE / sizeof(unsigned) };

// Pages neither compress nor look alike.
static unsigned word(size_t at) {
    unsigned x = (unsigned)at * 2654435761u;
    x ^= x >> 15;
    return x * 2246822519u;
}

static double now(void) {
    struct timespec time;
    clock_gettime(CLOCK_MONOTONIC, &time);
    return time.tv_sec + time.tv_nsec * 1e-9;
}

static double began, said;

static void say_memory(unsigned long looked) {
    unsigned long pages = 0;
    if (now() - said < 0.02) return;
    FILE *sizes = fopen("/proc/self/statm", "r");
    if (!sizes || fscanf(sizes, "%*u %lu", &pages) != 1) exit(4);
    fclose(sizes);
    printf("%.4f %lu %lu\n", (said = now()) - began, pages * sysconf(_SC_PAGESIZE), looked);
    fflush(stdout);
}

int main(int count, char **arguments) {
    if (count != 5) return 2;
    size_t parts = strtoul(arguments[1], 0, 10), words = (strtoul(arguments[2], 0, 10) << 20) / sizeof(unsigned);
    double seconds = strtod(arguments[3], 0);
    unsigned long rounds = strtoul(arguments[4], 0, 10), wrong = 0, looked = 0;
    volatile unsigned *all = mmap(NULL, parts * words * sizeof *all, PROT_READ | PROT_WRITE,
                                  MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (all == MAP_FAILED) return 3;
    began = now();
    for (unsigned long phase = 0; phase < rounds * parts; phase++) {
        size_t from = phase % parts * words;
        for (size_t at = from; phase < parts && at < from + words; at++) all[at] = word(at);
        double until = now() + seconds;
        for (size_t look = 0; now() < until; look++, say_memory(looked += words / WORDS))
            for (size_t at = from + look % WORDS; at < from + words; at += WORDS) wrong += all[at] != word(at);
    }
    for (size_t at = 0; at < parts * words; at++) wrong += all[at] != word(at);
    printf("%lu wrong\n", wrong);
    return wrong != 0;
}
