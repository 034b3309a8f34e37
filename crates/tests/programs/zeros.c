// Fills 80 MiB with words that do not compress, reads 200 MiB of fresh memory, and checks its
// words. Between the two it waits until its memory is managed: on a busy machine the manager may be
// late, and would find both done. Status 87: its memory is not managed within 20 s.
#include <stddef.h>
#include <stdio.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

static const size_t WORDS = 80u << 18, FRESH = 200u << 20;

static void *fresh(size_t bytes) {
    return mmap(NULL, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
}

static unsigned next(unsigned word) { return word * 1103515245 + 12345; }

// Whether page faults of the mapping at `address` go to user space: its flags have `um`.
static int managed(const volatile char *address) {
    char line[512];
    size_t start, end;
    int found = 0, here = 0;
    FILE *maps = fopen("/proc/self/smaps", "r");
    if (!maps) return 0;
    while (!found && fgets(line, sizeof line, maps)) {
        if (sscanf(line, "%zx-%zx ", &start, &end) == 2) here = start <= (size_t)address && (size_t)address < end;
        found = here && !strncmp(line, "VmFlags:", 8) && strstr(line, " um ");
    }
    fclose(maps);
    return found;
}

int main(void) {
    unsigned *data = fresh(WORDS * sizeof *data), word = 1;
    volatile char *zeros = fresh(FRESH);
    for (size_t i = 0; i < WORDS; i++) data[i] = word = next(word);
    for (int waited = 0; !managed(zeros); waited++) {
        if (waited == 2000) return 87;
        usleep(10000);
    }
    unsigned long wrong = 0;
    for (size_t i = 0; i < FRESH; i += 4096) wrong += zeros[i] != 0;
    word = 1;
    for (size_t i = 0; i < WORDS; i++) wrong += data[i] != (word = next(word));
    printf("%lu wrong\n", wrong);
    return wrong != 0;
}
