// Uses a hot set again and again while it walks through cold memory. Checks every word it reads.
// Arguments: hot MiB, cold MiB, steps, cold pages a step, microseconds of rest a step. SIGTERM ends the steps.
#include <signal.h>
#include <stddef.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <unistd.h>

enum { PAGE = 4096, WORDS = PAGE / sizeof(unsigned) };

static unsigned long wrong;
static volatile sig_atomic_t over;

static void end(int number) { over = number; }

// The word `i` of page `page` of the memory `which`. Pages neither compress nor look alike.
static unsigned word(unsigned which, size_t page, size_t i) {
    unsigned x = (unsigned)(page * WORDS + i) * 2654435761u + which * 40503u;
    x ^= x >> 15;
    return x * 2246822519u;
}

static unsigned *filled(unsigned which, size_t pages) {
    unsigned *at = mmap(NULL, pages * PAGE, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (at == MAP_FAILED) exit(3);
    for (size_t page = 0; page < pages; page++)
        for (size_t i = 0; i < WORDS; i++) at[page * WORDS + i] = word(which, page, i);
    return at;
}

// Uses one word of a page, another one each step. The first word of a hot page counts the steps.
static void look(const unsigned *memory, unsigned which, size_t page, size_t step) {
    size_t i = 1 + step % (WORDS - 1);
    wrong += ((volatile const unsigned *)memory)[page * WORDS + i] != word(which, page, i);
}

int main(int count, char **arguments) {
    if (count != 6) return 2;
    size_t hot_pages = strtoul(arguments[1], 0, 10) << 8, cold_pages = strtoul(arguments[2], 0, 10) << 8;
    size_t steps = strtoul(arguments[3], 0, 10), each = strtoul(arguments[4], 0, 10);
    useconds_t rest = strtoul(arguments[5], 0, 10);
    unsigned *hot = filled(1, hot_pages), *cold = filled(2, cold_pages);
    for (size_t page = 0; page < hot_pages; page++) hot[page * WORDS] = 0;
    size_t next = 0;
    signal(SIGTERM, end);
    for (size_t step = 0; step < steps && !over; step++) {
        for (size_t page = 0; page < hot_pages; page++) {
            look(hot, 1, page, step);
            wrong += hot[page * WORDS] != step;
            hot[page * WORDS] = step + 1;
        }
        for (size_t i = 0; i < each; i++, next = (next + 1) % cold_pages) look(cold, 2, next, step);
        if (rest) usleep(rest);
    }
    for (size_t page = 0; page < hot_pages; page++)
        for (size_t i = 1; i < WORDS; i++) wrong += hot[page * WORDS + i] != word(1, page, i);
    for (size_t page = 0; page < cold_pages; page++)
        for (size_t i = 0; i < WORDS; i++) wrong += cold[page * WORDS + i] != word(2, page, i);
    printf("%lu wrong\n", wrong);
    return wrong != 0;
}
