// Page locks of guest memory under `undercroft vm`. One file of the program defines
// UC_PAGE_LOCK_IMPLEMENTATION before it includes this.
//
// A page of the guest may leave memory at any time, and the kernel tells undercroft of each use by a
// page table, so such uses need nothing. A device that writes to or reads from a page past page
// tables (registered buffers of io_uring, O_DIRECT, pread and pwrite on the memory's descriptor)
// has to keep it in memory meanwhile:
//
//     if (uc_page_locks_open(memory)) ...    once: where the program has mapped the memory
//     if (!uc_page_lock(first, count)) {     the pages are there now, and stay
//         ... register the buffers, do I/O, unregister them ...
//         uc_page_unlock(first, count);
//     }
//
// Locks count: a page stays until it was unlocked as often as it was locked. Threads may lock the
// same pages. They end with the process, and with those that it forked and that did not exec. They
// also end if the process closes all descriptors (close_range): call uc_page_locks_open after that.
// Not under `undercroft vm`, all of this succeeds and does nothing. x86-64, Linux, C.
#ifndef UC_PAGE_LOCK_H
#define UC_PAGE_LOCK_H
#include <stdint.h>

// * memory: where all of the guest's memory is mapped, readable and writable.
// 0, or -1 with errno: EINVAL, the locks are of another version; EBUSY, all four places
// are taken; or as open() and mmap() fail.
int uc_page_locks_open(void *memory);

// Locks pages, in numbers of the memory's pages, and waits until they are in memory. 0, or -1 and
// nothing is locked, with errno: EBADF, there was no
// uc_page_locks_open(), or it failed; EAGAIN, this process has locked as many pages as it may, see
// uc_page_locks_max(); EINVAL, there are no such pages; EOVERFLOW, one is locked 255 times.
int uc_page_lock(uint64_t first, uint64_t count);

// Unlocks pages that were locked.
void uc_page_unlock(uint64_t first, uint64_t count);

// Different pages that this process may have locked at the same time.
uint64_t uc_page_locks_max(void);

#ifdef UC_PAGE_LOCK_IMPLEMENTATION
#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#ifndef F_OFD_SETLK
#define F_OFD_SETLK 37
#endif

// The first words of the memory of the locks; see crates/sys/src/page_locks.rs.
struct uc_page_locks_header {
    uint64_t magic, pages, page_bytes, each_max, clients, stride, unused[2], marks[];
};

static struct {
    uint8_t *counts, *memory; // of this process's place
    uint64_t pages, page_bytes, each_max, held;
} uc_page_locks = { .each_max = UINT64_MAX };

int uc_page_locks_open(void *memory) {
    const char *number = getenv("UNDERCROFT_LOCKS_FD");
    if (!number || uc_page_locks.counts) return 0;
    char path[48];
    snprintf(path, sizeof path, "/proc/self/fd/%d", atoi(number));
    // Opened anew: the kernel's lock is of this open file, and the inherited one is everybody's.
    int place = open(path, O_RDWR | O_CLOEXEC);
    struct stat size;
    if (place < 0 || fstat(place, &size)) return -1;
    struct uc_page_locks_header *all =
        mmap(0, size.st_size, PROT_READ | PROT_WRITE, MAP_SHARED, atoi(number), 0);
    if (all == MAP_FAILED) return close(place), -1;
    uint64_t client = 0;
    if (memcmp(&all->magic, "UCLOCKS1", 8)) {
        errno = EINVAL;
    } else {
        for (errno = EBUSY; client < all->clients; client++) {
            struct flock one = { .l_type = F_WRLCK, .l_whence = SEEK_SET, .l_start = client, .l_len = 1 };
            if (!fcntl(place, F_OFD_SETLK, &one)) break;
            errno = EBUSY;
        }
    }
    if (errno == EINVAL || client == all->clients) {
        int why = errno;
        munmap(all, size.st_size), close(place);
        errno = why;
        return -1;
    }
    uint8_t *counts = (uint8_t *)all + 4096 + client * all->stride;
    memset(counts, 0, all->pages); // whoever had the place before has ended
    uc_page_locks.memory = memory;
    uc_page_locks.pages = all->pages, uc_page_locks.page_bytes = all->page_bytes;
    uc_page_locks.each_max = all->each_max;
    __atomic_store_n(&all->marks[client], 1, __ATOMIC_SEQ_CST);
    uc_page_locks.counts = counts;
    return 0; // `place` stays open
}

uint64_t uc_page_locks_max(void) { return uc_page_locks.each_max; }

void uc_page_unlock(uint64_t first, uint64_t count) {
    if (!uc_page_locks.counts) return;
    for (uint64_t page = first; page < first + count && page < uc_page_locks.pages; page++) {
        uint8_t *count = uc_page_locks.counts + page, before = __atomic_load_n(count, __ATOMIC_SEQ_CST);
        while (before && !__atomic_compare_exchange_n(count, &before, before - 1, 0, __ATOMIC_SEQ_CST, __ATOMIC_SEQ_CST)) {}
        if (before == 1) __atomic_sub_fetch(&uc_page_locks.held, 1, __ATOMIC_SEQ_CST);
    }
}

// 0, or why not.
static int uc_page_count_up(uint8_t *count) {
    uint8_t before = __atomic_load_n(count, __ATOMIC_SEQ_CST);
    for (;;) {
        if (before == UINT8_MAX) return EOVERFLOW;
        if (before == 0 && __atomic_fetch_add(&uc_page_locks.held, 1, __ATOMIC_SEQ_CST) >= uc_page_locks.each_max) {
            __atomic_sub_fetch(&uc_page_locks.held, 1, __ATOMIC_SEQ_CST);
            return EAGAIN;
        }
        int first = before == 0;
        if (__atomic_compare_exchange_n(count, &before, before + 1, 0, __ATOMIC_SEQ_CST, __ATOMIC_SEQ_CST)) return 0;
        if (first) __atomic_sub_fetch(&uc_page_locks.held, 1, __ATOMIC_SEQ_CST);
    }
}

int uc_page_lock(uint64_t first, uint64_t count) {
    if (!uc_page_locks.counts) return getenv("UNDERCROFT_LOCKS_FD") ? errno = EBADF, -1 : 0;
    if (first > uc_page_locks.pages || count > uc_page_locks.pages - first) return errno = EINVAL, -1;
    for (uint64_t page = first; page < first + count; page++) {
        int why = uc_page_count_up(uc_page_locks.counts + page);
        if (why) {
            uc_page_unlock(first, page - first);
            return errno = why, -1;
        }
        // A write, and not a read: a page that is just leaving can be read, and does leave. In
        // assembly: compilers make a read of an atomic `or` of nothing.
        uint8_t *at = uc_page_locks.memory + page * uc_page_locks.page_bytes;
        __asm__ volatile("lock orb $0, %0" : "+m"(*at)::"memory", "cc");
    }
    return 0;
}
#endif
#endif
