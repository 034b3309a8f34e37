// guest THREADS SECONDS SEED [fork|twice|later|beyond]: uses the memory of a virtual machine without a machine.
// Each thread has the pages whose number leaves its own when divided, and knows of each only how
// often it was incremented, and whether it began as zeros. It increments a word that follows from
// page and count, some by a system call, compares whole pages with what must be there, and gives
// pages back as a balloon does, one or many at once. The first word of every sixteenth page is
// incremented by all threads: the sum must be right. `fork`: children may inherit the memory.
// `twice`: it is mapped a second time; `later`: after four seconds; `beyond`: past its end. Status
// 86: a byte was wrong. 6: its size can be changed.
// Huge pages have several threads each, whose holes are parts of them; and the last of the memory are
// each of one thread, which gives all of its page back and uses it again. `clean`: they are only read
// once they are filled.
#define _GNU_SOURCE
#include <errno.h>
#include <fcntl.h>
#include <pthread.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

#include "machine.h"

enum { WRONG = 86, WORDS = 512, COMMON = 16, MANY = 256, THREADS_MAX = 16, TOLD = 1, RAW = 2 };

static struct { uint32_t count; char zeros, given; } *known;
static uint64_t *memory, pages, threads, seed, lasts, sums[THREADS_MAX];
static uint64_t increments, checks, given, empty, wrong;
static int fd, clean;
static uint64_t huge; // bytes of one, or 0

// Half of the pages compress badly. The first word is left out: it may be everybody's.
static uint64_t begin(uint64_t page, int word) {
    if (known[page].zeros || word == 0) return 0;
    return page % 2 ? mix(page * WORDS + word) : page / 8 + word / 64;
}

static int place(uint64_t page, uint64_t count) { return 1 + mix(page << 32 ^ count) % (WORDS - 1); }

static int is_right(uint64_t page) {
    uint64_t all[WORDS];
    for (int word = 0; word < WORDS; word++) all[word] = begin(page, word);
    for (uint32_t count = 0; count < known[page].count; count++) all[place(page, count)]++;
    int from = page % COMMON == 0; // that word changes meanwhile
    return !memcmp(all + from, memory + page * WORDS + from, sizeof all - 8 * from);
}

static void check(uint64_t page) {
    add(&checks, 1);
    if (is_right(page)) return;
    add(&wrong, 1);
    fprintf(stderr, "page %lu is wrong after %u increments\n", page, known[page].count);
}

// A page that was given back reads as zeros. If that was by a raw system call, and it was away, it
// reads as before.
static void look(uint64_t page) {
    if (!known[page].given) return;
    static const char zeros[4096];
    int is_empty = known[page].given != RAW || !memcmp(memory + page * WORDS, zeros, 4096);
    if (is_empty) known[page].zeros = 1, known[page].count = 0;
    known[page].given = 0;
    add(&empty, is_empty);
    check(page);
}

static void give_back(uint64_t page, uint64_t how) {
    if (page % COMMON == 0) return;
    char *at = (char *)(memory + page * WORDS);
    int flags = FALLOC_FL_PUNCH_HOLE | FALLOC_FL_KEEP_SIZE, failed;
    if (huge && how % 3 == 2) how++; // a raw call may make zeros of a part that come back as before
    if (how % 3 == 0) failed = fallocate(fd, flags, page * 4096, 4096);
    else if (how % 3 == 1) failed = madvise(at, 4096, MADV_REMOVE);
    else failed = syscall(SYS_fallocate, fd, flags, page * 4096, 4096);
    if (failed) abort();
    known[page].given = how % 3 == 2 ? RAW : TOLD;
    add(&given, 1);
}

static void increment(uint64_t page, int by_call, int pipe[2]) {
    uint64_t *at = memory + page * WORDS + place(page, known[page].count);
    if (by_call) { // the kernel writes
        uint64_t next = *at + 1;
        if (write(pipe[1], &next, 8) != 8 || read(pipe[0], at, 8) != 8) abort();
    } else {
        ++*(volatile uint64_t *)at;
    }
    known[page].count++;
    add(&increments, 1);
}

// All words of a huge page are `times` and their place, or zeros if it was given back.
static void use_whole(uint64_t own, uint64_t *times) {
    uint64_t *at = memory + (pages * 4096 + own * huge) / 8, words = huge / 8;
    for (uint64_t word = 0; word < words; word++)
        if (at[word] != (*times ? *times * words + word : 0)) {
            add(&wrong, 1);
            fprintf(stderr, "word %lu of huge page %lu is wrong in round %lu\n", word, own, *times);
            break;
        }
    add(&checks, 1);
    if (*times && *times % 3 == 0) {
        if (fallocate(fd, FALLOC_FL_PUNCH_HOLE | FALLOC_FL_KEEP_SIZE, pages * 4096 + own * huge, huge)) abort();
        for (uint64_t word = 0; word < words; word += 512)
            if (at[word]) add(&wrong, 1), fprintf(stderr, "huge page %lu was given back\n", own);
    }
    ++*times;
    for (uint64_t word = 0; word < words; word++) at[word] = *times * words + word;
}

static void *work(void *arg) {
    uint64_t whole = 0;
    uint64_t own = (uint64_t)arg, random = mix(seed * 100 + own), mine = pages / threads;
    int ends[2];
    if (pipe(ends)) abort();
    for (uint64_t page = own; page < mine * threads; page += threads)
        for (int word = 1; word < WORDS; word++) memory[page * WORDS + word] = begin(page, word);
    uint64_t end = now() + lasts;
    while (now() < end) {
        random = mix(random + 1);
        // Four of five are in a quarter of the pages.
        uint64_t among = random % 5 ? mine / 4 : mine, which = (random >> 32) % among;
        uint64_t page = which * threads + own, what = random >> 16 & 255;
        if (clean) what = 150 + what % 80;
        if (huge && !clean && !(random >> 48 & 1023)) use_whole(own, &whole);
        if (what < 234) look(page);
        if (what < 150) increment(page, what < 8, ends);
        else if (what < 230) check(page);
        else if (what < 234) give_back(page, which + what), look(page);
        else if (what == 234 && !(random >> 24 & 31))
            for (uint64_t at = which; at < mine && at < which + MANY; at++) give_back(at * threads + own, at);
        else add(memory + (random >> 40) % (pages / COMMON) * COMMON * WORDS, 1), sums[own]++;
    }
    for (uint64_t page = own; page < mine * threads; page += threads) look(page), check(page);
    return 0;
}

int main(int argc, char **argv) {
    const char *number = getenv("UNDERCROFT_MEMORY_FD"), *how = argc > 4 ? argv[4] : "";
    fd = number ? atoi(number) : memfd_create("guest", 0);
    if (!number && ftruncate(fd, 64 << 20)) return 3;
    struct stat size;
    if (argc < 4 || fstat(fd, &size)) return 2;
    pages = size.st_size / 4096, threads = atoi(argv[1]), seed = atoi(argv[3]);
    clean = !strcmp(how, "clean"), huge = size.st_blksize > 4096 ? size.st_blksize : 0;
    known = calloc(pages, sizeof *known);
    if (number)
        for (uint64_t size = 0; size <= 2 * pages; size += 2 * pages)
            if (!ftruncate(fd, size * 4096) || errno != EPERM) return 6;
    for (int times = 0; times < 1 + !strcmp(how, "twice"); times++) {
        int flags = MAP_SHARED | MAP_NORESERVE;
        memory = mmap(0, (pages + 16 * !strcmp(how, "beyond")) * 4096, PROT_READ | PROT_WRITE, flags, fd, 0);
        if (memory == MAP_FAILED) return 4;
        if (strcmp(how, "fork") && madvise(memory, pages * 4096, MADV_DONTFORK)) return 5;
    }
    lasts = atoi(argv[2]) * 1000000000ull;
    pages -= threads * huge / 4096;
    pthread_t all[THREADS_MAX];
    for (uint64_t at = 0; at < threads; at++) pthread_create(all + at, 0, work, (void *)at);
    if (!strcmp(how, "later")) {
        sleep(4);
        if (mmap(0, pages * 4096, PROT_READ, MAP_SHARED, fd, 0) == MAP_FAILED) return 4;
    }
    uint64_t sum = 0, found = 0;
    for (uint64_t at = 0; at < threads; at++) pthread_join(all[at], 0), sum += sums[at];
    for (uint64_t page = 0; page < pages / COMMON * COMMON; page += COMMON) found += memory[page * WORDS];
    if (found != sum) wrong++, fprintf(stderr, "the sum is %lu, not %lu\n", found, sum);
    printf("%lu %lu %lu %lu %lu\n", increments + sum, checks, given, empty, wrong);
    return wrong ? WRONG : 0;
}
