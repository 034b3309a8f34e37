// monitor snapshot FILE MIB: writes the memory of a snapshot, whose words follow from their page.
// monitor run SOCKET MIB THREADS SECONDS SEED [pieces|late]: restores it as Firecracker does, and
//   checks every byte that it reads. Two regions of private memory are handed over with their
//   userfaultfd; `pieces`: byte by byte; `late`: the descriptor comes after the message. Each thread
//   has a part of the pages: it compares them, increments words of them and drops some, which are
//   zeros then. The last eighth is everybody's: one thread drops pages there while the others read.
//   Prints increments, pages compared, pages dropped, how many of them were seen as zeros, wrong.
// monitor restore SOCKET|FILE MIB PERCENT WRITES SEED: uses PERCENT of the pages, in runs of 1 to 16,
//   and writes to WRITES percent of those. A FILE is mapped instead of a socket called. Prints
//   microseconds, pages of which each counts once, and the longest time of one page.
// monitor hostile SOCKET MIB HOW: says something that cannot be served, and waits until the other
//   side ends the connection. `forks`: it is served, and forks.
// Status 86: a byte was wrong. 3: no userfaultfd.
#define _GNU_SOURCE
#include <errno.h>
#include <fcntl.h>
#include <linux/userfaultfd.h>
#include <pthread.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/ioctl.h>
#include <sys/mman.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/un.h>
#include <time.h>
#include <unistd.h>

#include "machine.h"

enum { PAGE = 4096, WORDS = 512, WRONG = 86, THREADS_MAX = 16, NO_UFFD = 3 };

static uint64_t pages, threads, seconds, seed;
static uint64_t *region[2];          // the first has the second half of the file
static uint32_t *counts;             // increments of a page
static char *zeroed;                 // it was dropped
static uint64_t increments, checks, dropped, zeros, wrong;
static int common_from;

static void die(const char *what) {
    perror(what);
    exit(1);
}

// A word of the snapshot; none is zero.
static uint64_t word_of(uint64_t page, uint64_t word) { return mix(page * WORDS + word + 1) | 1; }

// Where the monitor has a page of the file.
static uint64_t *at(uint64_t page) {
    uint64_t half = pages / 2;
    return page < half ? region[1] + page * WORDS : region[0] + (page - half) * WORDS;
}

static int snapshot(const char *path) {
    FILE *file = fopen(path, "w");
    if (!file) die(path);
    for (uint64_t page = 0; page < pages; page++) {
        uint64_t words[WORDS];
        for (int word = 0; word < WORDS; word++) words[word] = word_of(page, word);
        if (fwrite(words, PAGE, 1, file) != 1) die(path);
    }
    return fclose(file) ? 1 : 0;
}

static int call(const char *path) {
    struct sockaddr_un address = { .sun_family = AF_UNIX };
    strncpy(address.sun_path, path, sizeof address.sun_path - 1);
    int fd = socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0);
    if (connect(fd, (struct sockaddr *)&address, sizeof address)) die(path);
    return fd;
}

// Sends bytes, and some descriptors with them.
static void say(int to, const void *bytes, size_t length, const int *fds, int count) {
    union { char room[CMSG_SPACE(4 * sizeof(int))]; struct cmsghdr align; } control = { { 0 } };
    struct iovec part = { (void *)bytes, length };
    struct msghdr message = { .msg_iov = &part, .msg_iovlen = 1 };
    if (count) {
        message.msg_control = control.room, message.msg_controllen = CMSG_SPACE(count * sizeof(int));
        struct cmsghdr *head = CMSG_FIRSTHDR(&message);
        head->cmsg_level = SOL_SOCKET, head->cmsg_type = SCM_RIGHTS;
        head->cmsg_len = CMSG_LEN(count * sizeof(int));
        memcpy(CMSG_DATA(head), fds, count * sizeof(int));
    }
    ssize_t sent = sendmsg(to, &message, MSG_NOSIGNAL);
    while (sent >= 0 && (size_t)sent < length) {
        ssize_t more = send(to, (const char *)bytes + sent, length - sent, MSG_NOSIGNAL);
        if (more < 0) break;
        sent += more;
    }
    if (sent < 0 && errno != EPIPE && errno != ECONNRESET) die("sendmsg");
}

// As the create_guest_memory of Firecracker: MISSING alone, and no event but REMOVE.
static int make_memory(uint64_t more) {
    int fd = syscall(SYS_userfaultfd, O_CLOEXEC | O_NONBLOCK);
    if (fd < 0) {
        int device = open("/dev/userfaultfd", O_RDWR | O_CLOEXEC);
        fd = device < 0 ? -1 : ioctl(device, USERFAULTFD_IOC_NEW, O_CLOEXEC | O_NONBLOCK);
    }
    struct uffdio_api api = { .api = UFFD_API, .features = UFFD_FEATURE_EVENT_REMOVE | more };
    if (fd < 0 || ioctl(fd, UFFDIO_API, &api)) {
        perror("userfaultfd");
        exit(NO_UFFD);
    }
    for (int of = 0; of < 2; of++) {
        size_t size = of ? pages / 2 * PAGE : (pages - pages / 2) * PAGE;
        region[of] = mmap(NULL, size, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
        if (region[of] == MAP_FAILED) die("mmap");
        madvise(region[of], size, MADV_NOHUGEPAGE);
        struct uffdio_register ranges = { { (uintptr_t)region[of], size }, UFFDIO_REGISTER_MODE_MISSING, 0 };
        if (ioctl(fd, UFFDIO_REGISTER, &ranges)) die("UFFDIO_REGISTER");
    }
    return fd;
}

// The message of Firecracker. `first` is the first region's part of it.
static int message(char *text, size_t room, const char *first) {
    uint64_t half = pages / 2;
    const char *form = "{\"base_host_virt_addr\":%lu,\"size\":%lu,\"offset\":%lu,\"page_size\":4096,\"page_size_kib\":4096}";
    char own[2][200];
    snprintf(own[0], 200, form, (uintptr_t)region[0], (pages - half) * PAGE, half * PAGE);
    snprintf(own[1], 200, form, (uintptr_t)region[1], half * PAGE, 0ul);
    return snprintf(text, room, "[%s,%s]", first ? first : own[0], own[1]);
}

static int place(uint64_t page, uint64_t count) { return mix(page << 32 ^ count) % WORDS; }

static int is_right(uint64_t page) {
    uint64_t all[WORDS];
    for (int word = 0; word < WORDS; word++) all[word] = zeroed[page] ? 0 : word_of(page, word);
    for (uint32_t count = 0; count < counts[page]; count++) all[place(page, count)]++;
    return !memcmp(all, at(page), sizeof all);
}

static void check(uint64_t page) {
    add(&checks, 1);
    if (zeroed[page]) add(&zeros, 1);
    if (!is_right(page)) {
        fprintf(stderr, "page %lu is wrong after %u increments%s\n", page, counts[page], zeroed[page] ? ", dropped" : "");
        add(&wrong, 1);
    }
}

// A page that one thread drops while others read it: before, it is whole or zeros, and after, zeros.
static void look(uint64_t page) {
    int was_dropped = __atomic_load_n(&zeroed[page], __ATOMIC_ACQUIRE), word = mix(page ^ now()) % WORDS;
    uint64_t found = __atomic_load_n(at(page) + word, __ATOMIC_RELAXED);
    if (found != 0 && (was_dropped || found != word_of(page, word))) {
        fprintf(stderr, "common page %lu has %lx%s\n", page, found, was_dropped ? " after it was dropped" : "");
        add(&wrong, 1);
    }
    add(&checks, 1);
}

static void *work(void *argument) {
    uint64_t own = (uintptr_t)argument, random = mix(seed * 1000 + own), until = now() + seconds * 1000000000u;
    uint64_t share = common_from / threads, from = own * share, walk = from;
    while (now() < until) {
        random = mix(random + 0x9e3779b97f4a7c15u);
        uint64_t page = from + random / 64 % share, common = common_from + random / 4096 % (pages - common_from);
        switch (random % 16) {
        case 0: case 1: case 2: case 3:
            at(page)[place(page, counts[page])]++, counts[page]++, add(&increments, 1);
            break;
        case 4: // a run, as a balloon gives it back
            if (random % 256 < 128) break;
            for (uint64_t run = 1 + random / 1024 % 32, end = page + run; page < end && page < from + share; page++) {
                if (page == pages / 2) break; // there the other region begins
                madvise(at(page), PAGE, MADV_DONTNEED);
                counts[page] = 0, zeroed[page] = 1, add(&dropped, 1);
            }
            break;
        case 5: case 6: // a walk, as a guest that reads a file
            for (int step = 0; step < 64; step++, walk++) {
                if (walk >= from + share) walk = from;
                check(walk);
            }
            break;
        case 7:
            if (own) look(common);
            else if (random % 64 < 16 && !zeroed[common]) {
                madvise(at(common), PAGE, MADV_DONTNEED);
                __atomic_store_n(&zeroed[common], 1, __ATOMIC_RELEASE);
                add(&dropped, 1);
            }
            break;
        case 8: case 9:
            look(common);
            break;
        default:
            check(page);
        }
    }
    return NULL;
}

static int run(const char *path, const char *how) {
    int uffd = make_memory(0), to = call(path);
    char text[1024];
    int length = message(text, sizeof text, NULL);
    if (how && !strcmp(how, "pieces"))
        for (int sent = 0; sent < length; sent++) {
            usleep(200);
            say(to, text + sent, 1, &uffd, sent == length - 1);
        }
    else if (how && !strcmp(how, "late")) {
        say(to, text, length, NULL, 0);
        usleep(100000);
        say(to, "\n", 1, &uffd, 1);
    } else
        say(to, text, length, &uffd, 1);
    // The socket is not used again, and the descriptor stays open.
    counts = calloc(pages, sizeof *counts), zeroed = calloc(pages, 1), common_from = pages - pages / 8;
    pthread_t of[THREADS_MAX];
    for (uintptr_t own = 0; own < threads; own++) pthread_create(&of[own], NULL, work, (void *)own);
    for (uint64_t own = 0; own < threads; own++) pthread_join(of[own], NULL);
    for (uint64_t page = 0; page < (uint64_t)common_from; page++) check(page);
    for (uint64_t page = common_from; page < pages; page++) look(page);
    printf("%lu %lu %lu %lu %lu\n", increments, checks, dropped, zeros, wrong);
    return wrong ? WRONG : 0;
}

static int restore(const char *path, int percent, int writes) {
    struct stat is;
    if (stat(path, &is)) die(path);
    if (S_ISSOCK(is.st_mode)) {
        char text[1024];
        int uffd = make_memory(0);
        int length = message(text, sizeof text, NULL);
        say(call(path), text, length, &uffd, 1);
    } else {
        uint64_t half = pages / 2;
        int fd = open(path, O_RDONLY);
        region[1] = mmap(NULL, half * PAGE, PROT_READ | PROT_WRITE, MAP_PRIVATE, fd, 0);
        region[0] = mmap(NULL, (pages - half) * PAGE, PROT_READ | PROT_WRITE, MAP_PRIVATE, fd, half * PAGE);
    }
    char *seen = calloc(pages, 1);
    uint64_t begun = now(), distinct = 0, used = 0, longest = 0, bad = 0, random = mix(seed), want = pages * percent / 100;
    while (used < want) {
        random = mix(random + 0x9e3779b97f4a7c15u);
        uint64_t page = random % pages, run = 1 + random / pages % 16;
        for (; run && page < pages && used < want; run--, page++, used++) {
            distinct += !seen[page], seen[page] = 1;
            uint64_t since = now(), word = (random >> 40) % WORDS;
            uint64_t found = at(page)[word], right = word_of(page, word);
            if (found != right && found != right + 2) bad++;
            if (random / 7 % 100 < (uint64_t)writes) at(page)[word] = right + 2;
            since = now() - since;
            longest = since > longest ? since : longest;
        }
    }
    printf("%lu %lu %lu\n", (now() - begun) / 1000, distinct, longest / 1000);
    return bad ? WRONG : 0;
}

// Reads a page that was not used yet, and tells by a file beside the socket that it was there.
static int reads(const char *path) {
    char name[200];
    snprintf(name, 200, "%s.read", path);
    if (!region[1][(pages / 2 - 1) * WORDS]) creat(name, 0600);
    return 0;
}

static int hostile(const char *path, const char *how) {
    int forks = !strcmp(how, "forks"), uffd = make_memory(forks ? UFFD_FEATURE_EVENT_FORK : 0), null = open("/dev/null", O_RDONLY), to = call(path), both[2] = { uffd, null };
    char *text = malloc(2 << 20);
    int length = message(text, 1024, NULL);
    char first[200];
    const char *form = "{\"base_host_virt_addr\":%lu,\"size\":%lu,\"offset\":%lu,\"page_size\":4096}";
#define FIRST(address, size, offset) \
    (snprintf(first, 200, form, (uint64_t)(address), (uint64_t)(size), (uint64_t)(offset)), length = message(text, 1024, first))
    uint64_t half = pages / 2 * PAGE;
    if (!strcmp(how, "no-descriptor")) say(to, text, length, NULL, 0);
    else if (!strcmp(how, "wrong-descriptor")) say(to, text, length, &null, 1);
    else if (!strcmp(how, "two-descriptors")) say(to, text, length, both, 2);
    else if (!strcmp(how, "overlap")) FIRST((uintptr_t)region[1] + PAGE, PAGE, half), say(to, text, length, &uffd, 1);
    else if (!strcmp(how, "beyond")) FIRST(region[0], half, half + PAGE), say(to, text, length, &uffd, 1);
    else if (!strcmp(how, "unmapped")) FIRST(PAGE * 16, PAGE, half), say(to, text, length, &uffd, 1);
    else if (!strcmp(how, "garbage")) say(to, "GET / HTTP/1.1\r\n\r\n", 18, &uffd, 1);
    else if (!strcmp(how, "proposal")) {
        const char *said = "{\"type\":\"handoff\",\"version\":1,\"vmm_pid\":1,\"regions\":[{\"guest_phys_addr\":0}]}";
        say(to, said, strlen(said), &uffd, 1);
    } else if (!strcmp(how, "binary")) say(to, "\1\0\0\0\0\0\0\0\0\0\0\0\0\0\0", 16, &uffd, 1);
    else if (!strcmp(how, "half")) say(to, text, length / 2, &uffd, 1), shutdown(to, SHUT_WR);
    else if (!strcmp(how, "silent")) ;
    else if (forks) {
        say(to, text, length, &uffd, 1);
        char byte;
        while (read(to, &byte, 1) > 0) continue; // it is served now
        // The parent is ended, and the child when it reads.
        if (!fork()) _exit(reads(path));
        sleep(20);
        return 1;
    } else if (!strcmp(how, "reads")) {
        // It keeps no copy of its userfaultfd.
        say(to, "no list", 7, &uffd, 1), close(uffd);
        char byte;
        while (read(to, &byte, 1) > 0) continue; // it is refused now
        return reads(path);
    }
    else if (!strcmp(how, "megabyte")) {
        memset(text, ' ', 2 << 20), text[0] = '[';
        say(to, text, 1 << 20, &uffd, 1);
    } else if (!strcmp(how, "no-api")) {
        int bare = syscall(SYS_userfaultfd, O_CLOEXEC);
        say(to, text, length, &bare, 1);
    } else if (!strcmp(how, "twice")) {
        say(to, text, length, &uffd, 1);
        char byte;
        while (read(to, &byte, 1) > 0) continue; // it is served now
        to = call(path);
        say(to, text, length, &uffd, 1);
    } else
        return 2;
    char byte;
    while (read(to, &byte, 1) > 0) continue;
    // What was served before stays so.
    if (!strcmp(how, "twice")) for (uint64_t page = 0; page < pages; page++) wrong += at(page)[7] != word_of(page, 7);
    return wrong ? WRONG : 0;
}

int main(int count, char **given) {
    if (count < 4) return 2;
    const char *what = given[1], *path = given[2];
    pages = atol(given[3]) * 256;
    if (!strcmp(what, "snapshot")) return snapshot(path);
    if (!strcmp(what, "hostile")) return hostile(path, given[4]);
    if (!strcmp(what, "restore")) {
        seed = atol(given[6]);
        return restore(path, atoi(given[4]), atoi(given[5]));
    }
    threads = atol(given[4]), seconds = atol(given[5]), seed = atol(given[6]);
    return run(path, count > 7 ? given[7] : NULL);
}
