// touch PAGE THREADS: uses the memory of a virtual machine as its input says, a page of PAGE bytes at
// a time. `w`: writes all words of each page, as random as a disk sees them. `r`: reads a word of each.
// Prints the seconds and the microseconds of a page: mean, p50 and p99 of those that took more than 2.
// touch PAGE THREADS FILE: the same for reads of a file, past the cache.
#define _GNU_SOURCE
#include <fcntl.h>
#include <pthread.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <time.h>
#include <unistd.h>

static uint64_t page, threads, bytes;
static char *memory;
static int fd, is_file, what;
static double *took;

static double now(void) {
    struct timespec time;
    clock_gettime(CLOCK_MONOTONIC, &time);
    return time.tv_sec + time.tv_nsec * 1e-9;
}

static void *work(void *arg) {
    uint64_t pages = bytes / page, each = pages / threads, from = (uint64_t)arg * each, random = from + 1;
    char *buffer = mmap(0, page, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_POPULATE, -1, 0);
    for (uint64_t at = from; at < from + each; at++) {
        double began = now();
        if (is_file) {
            if (pread(fd, buffer, page, at * page) != (ssize_t)page) abort();
        } else if (what == 'r') {
            *(volatile uint64_t *)(memory + at * page);
        } else {
            for (uint64_t word = 0; word < page / 8; word++) {
                random = random * 0x5851f42d4c957f2d + 1;
                ((uint64_t *)(memory + at * page))[word] = random;
            }
        }
        took[at] = now() - began;
    }
    return 0;
}

static int order(const void *one, const void *other) {
    double first = *(double *)one, second = *(double *)other;
    return first < second ? -1 : first > second;
}

static void turn(void) {
    pthread_t all[16];
    double began = now(), sum = 0;
    for (uint64_t at = 0; at < threads; at++) pthread_create(all + at, 0, work, (void *)at);
    for (uint64_t at = 0; at < threads; at++) pthread_join(all[at], 0);
    double seconds = now() - began;
    uint64_t slow = 0, pages = bytes / page / threads * threads;
    for (uint64_t at = 0; at < pages; at++)
        if (took[at] > 2e-6) sum += took[at], took[slow++] = took[at];
    qsort(took, slow, sizeof *took, order);
    printf("%.6f %lu %.1f %.1f %.1f\n", seconds, slow, slow ? sum / slow * 1e6 : 0, slow ? took[slow / 2] * 1e6 : 0,
           slow ? took[slow * 99 / 100] * 1e6 : 0);
    fflush(stdout);
}

int main(int argc, char **argv) {
    struct stat size;
    const char *number = getenv("UNDERCROFT_MEMORY_FD");
    if (argc < 3) return 2;
    page = strtoul(argv[1], 0, 0), threads = strtoul(argv[2], 0, 0), is_file = argc > 3;
    fd = is_file ? open(argv[3], O_RDONLY | O_DIRECT) : number ? atoi(number) : -1;
    if (fd < 0 || fstat(fd, &size)) return 3;
    bytes = size.st_size, took = calloc(bytes / page, sizeof *took);
    if (is_file) return turn(), 0;
    memory = mmap(0, bytes, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_NORESERVE, fd, 0);
    if (memory == MAP_FAILED || madvise(memory, bytes, MADV_DONTFORK)) return 4;
    while ((what = getchar()) != EOF)
        if (what != '\n') turn();
    return 0;
}
