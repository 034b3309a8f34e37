// views monitor FILE SECONDS SEED VIEWS: stands for a machine's monitor, whose memory others map, too.
// views view FILE SEED HOW: is one of those (`undercroft view`). All add 1 to random words of the
// memory, and compare pages: each has some words to be added to, and others that follow from the page.
// FILE is for counts: they are no memory of the machine, and stay if a process is killed. The monitor
// waits until VIEWS have begun and ended. Prints additions of the monitor, additions of the views,
// additions that are missing, those too many (a view was killed between two), pages compared, pages
// that were wrong.
// HOW: `work`: as above, until the monitor has worked for its time. `read`: compares every page twice
// and ends. `parts`: as `work`, with its memory mapped in two parts, one of which it unmaps and maps
// again and again. `lock`: as `work`, and locks pages of its own and writes to them by the descriptor.
// `hostile`: tries what must be refused, then works. `past`: maps it by the system call.
// Status 86: a byte was wrong; 3: a thing that must be refused was not.
#define _GNU_SOURCE
#include <errno.h>
#include <fcntl.h>
#include <poll.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/wait.h>

#define UC_PAGE_LOCK_IMPLEMENTATION
#include "../../../include/uc_page_lock.h"
#include "machine.h"

enum { PAGE = 4096, WORDS = 512, ADDED = 8, OWN = 4, SLOTS = 16, HELD = 32, WRONG = 86, NOT_REFUSED = 3 };

// One of each process; the monitor's is the first.
struct count { uint64_t pid, begun, added, compared, wrong, ended; };
static struct { uint64_t filled, over, places; struct count of[SLOTS]; } *all;
static struct count *own;
static uint64_t *memory, pages, seed, bytes, end = UINT64_MAX; // the monitor has an end
static int fd;

static void die(const char *what) {
    perror(what);
    exit(1);
}

// Pages that only the view with page locks writes to.
static int is_apart(uint64_t page) { return page % 16 == 15; }
static uint64_t fixed(uint64_t page, uint64_t word) { return mix(page * WORDS + word + 1) | 1; }

static void compare(uint64_t page) {
    add(&own->compared, 1);
    for (int word = ADDED + OWN; word < WORDS; word++) {
        if (memory[page * WORDS + word] == fixed(page, word)) continue;
        add(&own->wrong, 1);
        return;
    }
}

static void *work(void *number) {
    uint64_t random = mix(seed * 64 + (uint64_t)number);
    while (!__atomic_load_n(&all->over, __ATOMIC_RELAXED)) {
        if (now() >= end) __atomic_store_n(&all->over, 1, __ATOMIC_RELAXED);
        random = mix(random + 1);
        uint64_t page = (random >> 20) % pages;
        if (is_apart(page)) page--;
        // Counted after it is made: whoever is killed in between has made one more.
        __atomic_fetch_add(&memory[page * WORDS + random % ADDED], 1, __ATOMIC_SEQ_CST);
        add(&own->added, 1);
        if (random >> 60 == 0) compare(page);
    }
    return 0;
}

static void by_two(void *(*what)(void *)) {
    pthread_t threads[2];
    for (uint64_t at = 0; at < 2; at++)
        if (pthread_create(threads + at, 0, what, (void *)at)) die("a thread");
    for (int at = 0; at < 2; at++) pthread_join(threads[at], 0);
}

static void read_all(void) {
    for (int round = 0; round < 2; round++)
        for (uint64_t page = 0; page < pages; page++) compare(page);
}

static void *use_and_let_go(void *none) {
    uint64_t half = bytes / 2;
    for (uint64_t round = 0; !__atomic_load_n(&all->over, __ATOMIC_RELAXED); round++) {
        char *part = mmap(0, half, PROT_READ | PROT_WRITE, MAP_SHARED, fd, round % 2 * half);
        if (part == MAP_FAILED) die("a part of the memory");
        uint64_t first = round % 2 * pages / 2;
        for (uint64_t page = 0; page < pages / 2; page += 7)
            for (int word = ADDED + OWN; word < WORDS; word += 97)
                if (((uint64_t *)part)[page * WORDS + word] != fixed(first + page, word)) add(&own->wrong, 1);
        // The second half goes first, so that the rest is a part of a view.
        if (munmap(part + half / 2, half / 2) || munmap(part, half / 2)) die("munmap");
    }
    return none;
}

// Words that only this process writes, by the descriptor, while their pages are locked.
static void *write_past(void *none) {
    uint64_t *counts = calloc(pages, sizeof *counts), random = mix(seed + 99);
    if (uc_page_locks_open(memory)) die("page locks");
    while (!__atomic_load_n(&all->over, __ATOMIC_RELAXED)) {
        random = mix(random + 1);
        uint64_t first = random % (pages / 16 - HELD);
        for (uint64_t at = 0; at < HELD; at++)
            if (uc_page_lock((first + at) * 16 + 15, 1)) die("a lock");
        usleep(200000);
        for (uint64_t at = 0; at < HELD; at++) {
            uint64_t page = (first + at) * 16 + 15, word;
            if (memory[page * WORDS + ADDED] != counts[page]) add(&own->wrong, 1);
            word = ++counts[page];
            if (pwrite(fd, &word, 8, page * PAGE + ADDED * 8) != 8) die("pwrite");
            add(&own->compared, 1);
            uc_page_unlock(page, 1);
        }
    }
    for (uint64_t page = 15; page < pages; page += 16)
        if (memory[page * WORDS + ADDED] != counts[page]) add(&own->wrong, 1);
    return none;
}

static void must_fail(const char *what, int failed) {
    if (failed) return;
    fprintf(stderr, "not refused: %s\n", what);
    exit(NOT_REFUSED);
}

static void hostile(void) {
    must_fail("a move", mremap(memory, bytes, bytes, MREMAP_MAYMOVE | MREMAP_FIXED, (char *)memory + 2 * bytes) == MAP_FAILED);
    must_fail("a second mapping by a move", mremap(memory, 0, bytes, MREMAP_MAYMOVE) == MAP_FAILED);
    must_fail("a private mapping", mmap(0, bytes, PROT_READ, MAP_PRIVATE, fd, 0) == MAP_FAILED);
    must_fail("memory past the end", mmap(0, bytes * 2, PROT_READ, MAP_SHARED, fd, 0) == MAP_FAILED);
    int child = fork();
    if (!child) {
        char byte; // the child has no such memory, or it would read zeros where pages are away
        int sees = open("/proc/self/mem", O_RDONLY | O_CLOEXEC);
        _exit(pread(sees, &byte, 1, (off_t)memory) == 1);
    }
    int status;
    if (waitpid(child, &status, 0) != child) die("a child");
    must_fail("a child's use of the memory", status == 0);
}

static int view(const char *how) {
    while (!__atomic_load_n(&all->filled, __ATOMIC_ACQUIRE)) usleep(10000);
    if (!strcmp(how, "past")) {
        memory = (void *)syscall(SYS_mmap, 0, bytes, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
        return sleep(20), 0;
    }
    memory = mmap(0, bytes, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
    if (memory == MAP_FAILED) return perror("the machine's memory"), 2;
    __atomic_store_n(&own->begun, 1, __ATOMIC_RELEASE);
    pthread_t beside = 0;
    if (!strcmp(how, "hostile")) hostile();
    if (!strcmp(how, "parts")) pthread_create(&beside, 0, use_and_let_go, 0);
    if (!strcmp(how, "lock")) pthread_create(&beside, 0, write_past, 0);
    if (!strcmp(how, "read")) read_all();
    else by_two(work);
    if (beside) pthread_join(beside, 0);
    __atomic_store_n(&own->ended, 1, __ATOMIC_RELEASE);
    return own->wrong ? WRONG : 0;
}

// Waits until a view has ended, however. Its parent may not have waited for it.
static void await_end(struct count *view) {
    int process = syscall(SYS_pidfd_open, view->pid, 0);
    if (process < 0) return;
    struct pollfd ended = { process, POLLIN, 0 };
    while (!__atomic_load_n(&view->ended, __ATOMIC_ACQUIRE) && poll(&ended, 1, 10) == 0) {}
    close(process);
}

static int monitor(uint64_t seconds, uint64_t views) {
    memory = mmap(0, bytes, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
    if (memory == MAP_FAILED || madvise(memory, bytes, MADV_DONTFORK)) die("the machine's memory");
    for (uint64_t page = 0; page < pages; page++)
        for (int word = ADDED + OWN; word < WORDS; word++) memory[page * WORDS + word] = fixed(page, word);
    __atomic_store_n(&all->filled, 1, __ATOMIC_RELEASE);
    for (uint64_t at = 1; at <= views; at++)
        while (!__atomic_load_n(&all->of[at].begun, __ATOMIC_ACQUIRE)) usleep(1000);
    end = now() + seconds * 1000000000;
    by_two(work);
    for (uint64_t at = 1; at <= views; at++) await_end(all->of + at);
    uint64_t made = 0, found = 0, compared = 0, wrong = 0;
    read_all();
    for (uint64_t page = 0; page < pages; page++)
        for (int word = 0; word < ADDED; word++) found += memory[page * WORDS + word];
    for (uint64_t at = 0; at <= views; at++)
        made += all->of[at].added, compared += all->of[at].compared, wrong += all->of[at].wrong;
    uint64_t missing = made > found ? made - found : 0, too_many = found > made ? found - made : 0;
    printf("%lu %lu %lu %lu %lu %lu\n", own->added, made - own->added, missing, too_many, compared, wrong);
    return wrong ? WRONG : 0;
}

int main(int argc, char **argv) {
    const char *number = getenv("UNDERCROFT_MEMORY_FD");
    struct stat size;
    if (argc < 5 || !number || fstat(fd = atoi(number), &size)) return 2;
    bytes = size.st_size, pages = bytes / PAGE, seed = atoi(argv[argc == 6 ? 4 : 3]);
    int counts = open(argv[2], O_RDWR | O_CREAT | O_CLOEXEC, 0600);
    if (counts < 0 || ftruncate(counts, sizeof *all)) die(argv[2]);
    all = mmap(0, sizeof *all, PROT_READ | PROT_WRITE, MAP_SHARED, counts, 0);
    if (all == MAP_FAILED) die("the counts");
    if (!strcmp(argv[1], "monitor")) return own = all->of, monitor(atoi(argv[3]), atoi(argv[5]));
    own = all->of + 1 + __atomic_fetch_add(&all->places, 1, __ATOMIC_SEQ_CST);
    own->pid = getpid();
    return view(argv[4]);
}
