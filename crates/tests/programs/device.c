// device SECONDS SEED uring|peer lock|none|all: a virtual machine's device that does zero-copy I/O.
// Threads use three of four pages of the guest's memory, and compare them. The rest is the device's:
// it has a number of pages at a time, for most of a second, and then writes words to each of them past
// page tables. `uring`: into registered buffers, from a file. `peer`: another process writes to the
// memory's descriptor, and has mapped nothing. Each word follows from page and count, so a write that
// is lost is seen. `lock`: the pages are locked meanwhile. `none`: they are not. `all`: as `lock`, and
// from then on every page of the memory has a lock, more than the program may have.
// Prints: writes of the device, pages compared, pages of the device that were wrong, others that
// were. Status 77: no io_uring here.
#define _GNU_SOURCE
#include <linux/io_uring.h>
#include <pthread.h>
#include <sys/syscall.h>
#include <sys/uio.h>
#include <sys/wait.h>

#define UC_PAGE_LOCK_IMPLEMENTATION
#include "../../../include/uc_page_lock.h"
#include "machine.h"

enum { WORDS = 512, HELD = 64, EACH = 8, STAY_US = 700000, NO_RING = 77 };

static uint64_t *memory, pages, seed, *counts;
static volatile uint64_t end = UINT64_MAX;
static uint64_t writes, checks, wrong, others;
static int fd, locks;

// The device's pages are the last of each four. A word is of the last count that wrote to it.
static uint64_t page_of(uint64_t own) { return own * 4 + 3; }
static uint64_t value(uint64_t page, uint64_t count) { return mix(page << 32 ^ count); }

static uint64_t word_of(uint64_t page, uint64_t count, uint64_t at) {
    if (count < at + 1) return 0;
    return value(page, at + 1 + (count - at - 1) / WORDS * WORDS);
}

static void check(uint64_t page, uint64_t *which) {
    uint64_t all[WORDS];
    for (int at = 0; at < WORDS; at++) all[at] = word_of(page, counts[page], at);
    add(&checks, 1);
    if (!memcmp(all, memory + page * WORDS, sizeof all)) return;
    add(which, 1);
    memcpy(memory + page * WORDS, all, sizeof all); // each loss counts once
}

static void *use(void *arg) {
    uint64_t own = (uint64_t)arg, random = mix(seed * 10 + own);
    while (now() < end) {
        random = mix(random + 1);
        uint64_t page = (random >> 20) % (pages / 4) * 4 + (own ? 1 : random & 2);
        check(page, &others);
        counts[page]++;
        memory[page * WORDS + (counts[page] - 1) % WORDS] = value(page, counts[page]);
    }
    return 0;
}

static struct { int fd; uint32_t *tail, *mask, *array, *head, *done, *done_mask; struct io_uring_sqe *asks; struct io_uring_cqe *answers; } ring;

static void ring_open(void) {
    struct io_uring_params of = { 0 };
    ring.fd = syscall(SYS_io_uring_setup, 4, &of);
    if (ring.fd < 0) exit(NO_RING);
    int both = PROT_READ | PROT_WRITE, flags = MAP_SHARED | MAP_POPULATE;
    char *asks = mmap(0, of.sq_off.array + of.sq_entries * 4, both, flags, ring.fd, IORING_OFF_SQ_RING);
    char *answers = mmap(0, of.cq_off.cqes + of.cq_entries * 16, both, flags, ring.fd, IORING_OFF_CQ_RING);
    ring.asks = mmap(0, of.sq_entries * sizeof *ring.asks, both, flags, ring.fd, IORING_OFF_SQES);
    if (asks == MAP_FAILED || answers == MAP_FAILED || (void *)ring.asks == MAP_FAILED) abort();
    ring.tail = (void *)(asks + of.sq_off.tail), ring.mask = (void *)(asks + of.sq_off.ring_mask);
    ring.array = (void *)(asks + of.sq_off.array), ring.head = (void *)(answers + of.cq_off.head);
    ring.done = (void *)(answers + of.cq_off.tail), ring.done_mask = (void *)(answers + of.cq_off.ring_mask);
    ring.answers = (void *)(answers + of.cq_off.cqes);
}

// Reads 8 bytes of a file into a registered buffer.
static void ring_read(int from, unsigned buffer, void *to) {
    uint32_t tail = *ring.tail, slot = tail & *ring.mask;
    ring.asks[slot] = (struct io_uring_sqe){
        .opcode = IORING_OP_READ_FIXED, .fd = from, .addr = (uint64_t)to, .len = 8, .buf_index = buffer };
    ring.array[slot] = slot;
    __atomic_store_n(ring.tail, tail + 1, __ATOMIC_RELEASE);
    if (syscall(SYS_io_uring_enter, ring.fd, 1, 1, IORING_ENTER_GETEVENTS, 0, 0) != 1) abort();
    if (__atomic_load_n(ring.done, __ATOMIC_ACQUIRE) == *ring.head) abort();
    if (ring.answers[*ring.head & *ring.done_mask].res != 8) abort();
    __atomic_store_n(ring.head, *ring.head + 1, __ATOMIC_RELEASE);
}

struct ask { uint64_t at, value; };

// The other process: writes where it is asked to.
static void peer(int asks, int answers) {
    struct ask ask;
    while (read(asks, &ask, sizeof ask) == sizeof ask)
        if (pwrite(fd, &ask.value, 8, ask.at) != 8 || write(answers, "", 1) != 1) abort();
    _exit(0);
}

int main(int argc, char **argv) {
    const char *number = getenv("UNDERCROFT_MEMORY_FD");
    struct stat size;
    if (argc < 5 || !number || fstat(fd = atoi(number), &size)) return 2;
    int by_ring = !strcmp(argv[3], "uring"), asks[2], answers[2], file = memfd_create("file", MFD_CLOEXEC);
    locks = strcmp(argv[4], "none");
    pages = size.st_size / 4096, seed = atoi(argv[2]);
    counts = calloc(pages, sizeof *counts);
    memory = mmap(0, size.st_size, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
    if (memory == MAP_FAILED || madvise(memory, size.st_size, MADV_DONTFORK)) return 3;
    if (pipe(asks) || pipe(answers) || file < 0) return 4;
    if (by_ring) ring_open();
    int child = by_ring ? 0 : fork();
    if (!by_ring && !child) close(asks[1]), peer(asks[0], answers[1]);
    if (locks && uc_page_locks_open(memory)) return perror("page locks"), 5;
    pthread_t threads[2];
    for (uint64_t at = 0; at < 2; at++) pthread_create(threads + at, 0, use, (void *)at);
    for (uint64_t page = 3; page < pages; page += 4) // what is not written shall be missed, too
        for (counts[page] = 0; counts[page] < WORDS; counts[page]++)
            memory[page * WORDS + counts[page]] = value(page, counts[page] + 1);
    end = now() + atoi(argv[1]) * 1000000000ull;
    if (!strcmp(argv[4], "all")) memset(uc_page_locks.counts, 1, pages);
    for (uint64_t random = mix(seed + 77), round = 0; now() < end; round++) {
        random = mix(random + 1);
        uint64_t first = random % (pages / 4 - HELD);
        struct iovec buffers[HELD];
        for (uint64_t own = 0; own < HELD; own++) {
            uint64_t page = page_of(first + own);
            buffers[own] = (struct iovec){ memory + page * WORDS, 4096 };
            if (locks && uc_page_lock(page, 1)) return perror("a lock"), 6;
            check(page, &wrong); // it is in memory, locked or not
        }
        if (by_ring && syscall(SYS_io_uring_register, ring.fd, IORING_REGISTER_BUFFERS, buffers, HELD)) abort();
        usleep(STAY_US);
        for (uint64_t at = 0; at < HELD * EACH; at++) {
            uint64_t page = page_of(first + at % HELD), word = counts[page]++ % WORDS;
            struct ask ask = { page * 4096 + word * 8, value(page, counts[page]) };
            char byte;
            if (by_ring) {
                if (pwrite(file, &ask.value, 8, 0) != 8) abort();
                ring_read(file, at % HELD, memory + page * WORDS + word);
            } else if (write(asks[1], &ask, sizeof ask) != sizeof ask || read(answers[0], &byte, 1) != 1) abort();
            writes++;
        }
        if (by_ring && syscall(SYS_io_uring_register, ring.fd, IORING_UNREGISTER_BUFFERS, 0, 0)) abort();
        for (uint64_t own = 0; own < HELD && locks; own++) uc_page_unlock(page_of(first + own), 1);
        for (uint64_t own = 0; own < HELD; own++) check(page_of(first + own), &wrong);
    }
    for (int at = 0; at < 2; at++) pthread_join(threads[at], 0);
    for (uint64_t page = 0; page < pages; page++) check(page, page % 4 == 3 ? &wrong : &others);
    close(asks[1]);
    if (child) waitpid(child, 0, 0);
    printf("%lu %lu %lu %lu\n", writes, checks, wrong, others);
    return 0;
}
