// Fills 80 MiB with words that do not compress, reads 200 MiB of fresh memory, and checks its words.
#include <stddef.h>
#include <stdio.h>
#include <sys/mman.h>

static const size_t WORDS = 80u << 18, FRESH = 200u << 20;

static void *fresh(size_t bytes) {
    return mmap(NULL, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
}

static unsigned next(unsigned word) { return word * 1103515245 + 12345; }

int main(void) {
    unsigned *data = fresh(WORDS * sizeof *data), word = 1;
    volatile char *zeros = fresh(FRESH);
    for (size_t i = 0; i < WORDS; i++) data[i] = word = next(word);
    unsigned long wrong = 0;
    for (size_t i = 0; i < FRESH; i += 4096) wrong += zeros[i] != 0;
    word = 1;
    for (size_t i = 0; i < WORDS; i++) wrong += data[i] != (word = next(word));
    printf("%lu wrong\n", wrong);
    return wrong != 0;
}
