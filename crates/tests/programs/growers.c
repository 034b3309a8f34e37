// Grows as fast as it can in several threads, then reads all of it: growers MODE THREADS MIB [ROUNDS [LOCKED]].
// MODE: memset (one large block each), large (blocks of 1 MiB), small (objects of 200 bytes), maps (mmap, fill, munmap or keep),
// remap (one mapping each, grown by mremap), brk (by one thread, from the program break). LOCKED: MiB that are locked first.
#define _GNU_SOURCE
#include <pthread.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

static const char *mode;
static long bytes_each;
static int rounds;
static pthread_barrier_t start;

static void fail(const char *what) {
    fprintf(stderr, "growers: %s\n", what);
    _exit(1);
}

static void fill(unsigned char *at, long bytes, uint64_t seed) {
    memset(at, (int)(seed * 37 % 251) + 1, (size_t)bytes);
    for (long page = 0; page + 8 <= bytes; page += 4096) {
        uint64_t word = seed * 0x9e3779b97f4a7c15u + (uint64_t)page;
        memcpy(at + page, &word, 8);
    }
}

static void check(const unsigned char *at, long bytes, uint64_t seed) {
    for (long page = 0; page + 8 <= bytes; page += 4096) {
        uint64_t word;
        memcpy(&word, at + page, 8);
        if (word != seed * 0x9e3779b97f4a7c15u + (uint64_t)page) {
            fail("a page has other bytes");
        }
        if (bytes - page > 9 && at[page + 9] != (unsigned char)(seed * 37 % 251 + 1)) {
            fail("a page has another filling");
        }
    }
}

static unsigned char *map(long bytes) {
    void *at = mmap(NULL, (size_t)bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (at == MAP_FAILED) {
        fail("mmap");
    }
    return at;
}

static void pieces(uint64_t seed, long piece, int by_map) {
    long count = bytes_each / piece;
    unsigned char **all = malloc((size_t)count * sizeof *all);
    for (long i = 0; i < count; i++) {
        if (by_map) {
            unsigned char *brief = map(piece);
            fill(brief, piece, seed);
            if (munmap(brief, (size_t)piece) != 0) {
                fail("munmap");
            }
        }
        all[i] = by_map ? map(piece) : malloc((size_t)piece);
        if (all[i] == NULL) {
            fail("malloc");
        }
        fill(all[i], piece, seed + (uint64_t)i);
    }
    for (int round = 0; round < rounds; round++) {
        for (long i = 0; i < count; i++) {
            check(all[i], piece, seed + (uint64_t)i);
        }
    }
    for (long i = 0; i < count; i++) {
        by_map ? (void)munmap(all[i], (size_t)piece) : free(all[i]);
    }
    free(all);
}

static void remapped(uint64_t seed) {
    long bytes = 1 << 20;
    unsigned char *at = map(bytes);
    fill(at, bytes, seed);
    for (uint64_t step = 1; bytes < bytes_each; step++) {
        at = mremap(at, (size_t)bytes, (size_t)bytes + (1 << 20), MREMAP_MAYMOVE);
        if (at == MAP_FAILED) {
            fail("mremap");
        }
        fill(at + bytes, 1 << 20, seed + step);
        bytes += 1 << 20;
    }
    for (long step = 0; step < bytes >> 20; step++) {
        check(at + (step << 20), 1 << 20, seed + (uint64_t)step);
    }
    munmap(at, (size_t)bytes);
}

static void *grow(void *number) {
    uint64_t seed = 1 + 1000000 * (uint64_t)(uintptr_t)number;
    pthread_barrier_wait(&start);
    if (strcmp(mode, "memset") == 0) {
        pieces(seed, bytes_each, 0);
    } else if (strcmp(mode, "large") == 0) {
        pieces(seed, 1 << 20, 0);
    } else if (strcmp(mode, "small") == 0) {
        pieces(seed, 200, 0);
    } else if (strcmp(mode, "maps") == 0) {
        pieces(seed, 256 << 10, 1);
    } else if (strcmp(mode, "remap") == 0) {
        remapped(seed);
    } else if (strcmp(mode, "brk") == 0) {
        for (long done = 0; done < bytes_each; done += 128 << 10) {
            unsigned char *at = sbrk(128 << 10);
            if (at == (void *)-1) {
                fail("sbrk");
            }
            fill(at, 128 << 10, seed);
            check(at, 128 << 10, seed);
        }
    } else {
        fail("no such mode");
    }
    return NULL;
}

int main(int argc, char **argv) {
    if (argc < 4) {
        fail("growers MODE THREADS MIB [ROUNDS]");
    }
    mode = argv[1];
    int count = atoi(argv[2]);
    bytes_each = (atol(argv[3]) << 20) / count;
    rounds = argc > 4 ? atoi(argv[4]) : 1;
    if (argc > 5) {
        long locked = atol(argv[5]) << 20;
        unsigned char *at = map(locked);
        if (mlock(at, (size_t)locked) != 0) {
            fail("mlock");
        }
        fill(at, locked, 7);
    }
    pthread_t threads[64];
    pthread_barrier_init(&start, NULL, (unsigned)count);
    for (long i = 0; i < count; i++) {
        if (pthread_create(&threads[i], NULL, grow, (void *)i) != 0) {
            fail("pthread_create");
        }
    }
    for (int i = 0; i < count; i++) {
        pthread_join(threads[i], NULL);
    }
    puts("ok");
    return 0;
}
