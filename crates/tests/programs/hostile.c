// A client that does not keep to the protocol. It has no shim: start it with LD_PRELOAD unset and
// UNDERCROFT_SOCKET kept.
//   hostile forge COUNT SEED PEERS  COUNT handshakes of random bytes, descriptors and order, some
//                               of them cut off, by PEERS processes at once: a peer mostly waits
//                               for an answer that does not come
//   hostile silent COUNT        connects COUNT times, says nothing, and waits a second
//   hostile flood MS            connects as fast as it can, for MS milliseconds
//   hostile shrink              tries to change the size of the command page it was given
//   hostile secret BYTE         a victim: keeps a secret at a known address, prints its pid, and
//                               waits for the end of its input
//   hostile peek PID BYTE HOW   wants the secret: takes part in the protocol and names the victim
//                               as its agent. HOW: first (at once), later (after the first command)
//   hostile outlive ROUNDS      wants bytes of other processes, or zeros, where nobody asked for
//                               them: holds a command, is killed, and looks at pages that were
//                               never touched from a process that shares its memory
//
// Status 0: the attack got nothing. Status 9: the attack got something.
#define _GNU_SOURCE
#include <errno.h>
#include <fcntl.h>
#include <sched.h>
#include <signal.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/ioctl.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/socket.h>
#include <sys/syscall.h>
#include <sys/un.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>
#include "low.h"

#define PAGE 4096ul
#define PLACES 64ul
#define AREA (PLACES * PAGE)
#define MAGIC 0x55430004u
// The address of the victim's secret, and of the hostile client's holding area.
#define KNOWN 0x600000000000ul

struct page { // the command page
    volatile uint32_t seq, done, agent, busy, reader_wants, cancelled, op, count;
    volatile uint64_t moved, refused, pages[PLACES], stranded;
    volatile uint32_t forking, in_hand, ready;
};

static uint64_t state;
static uint64_t dice(void) {
    state += 0x9e3779b97f4a7c15u;
    uint64_t x = (state ^ (state >> 30)) * 0xbf58476d1ce4e5b9u;
    return x ^ (x >> 27);
}

static double now(void) {
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return t.tv_sec + t.tv_nsec / 1e9;
}

static int connected(int kind) {
    const char *path = getenv("UNDERCROFT_SOCKET");
    struct sockaddr_un to = {.sun_family = AF_UNIX};
    if (!path)
        exit(2);
    strncpy(to.sun_path, path, sizeof to.sun_path - 1);
    int s = socket(AF_UNIX, kind | SOCK_CLOEXEC, 0);
    if (s < 0 || connect(s, (void *)&to, sizeof to) != 0) {
        if (s >= 0)
            close(s);
        return -1;
    }
    struct timeval limit = {.tv_sec = 5};
    setsockopt(s, SOL_SOCKET, SO_RCVTIMEO, &limit, sizeof limit);
    return s;
}

static ssize_t say(int s, const void *bytes, size_t length, const int *fds, int count) {
    char control[CMSG_SPACE(8 * sizeof(int))] = {0};
    struct iovec iov = {(void *)bytes, length};
    struct msghdr m = {.msg_iov = &iov, .msg_iovlen = 1};
    if (count) {
        m.msg_control = control;
        m.msg_controllen = CMSG_SPACE(count * sizeof(int));
        struct cmsghdr *c = CMSG_FIRSTHDR(&m);
        c->cmsg_level = SOL_SOCKET;
        c->cmsg_type = SCM_RIGHTS;
        c->cmsg_len = CMSG_LEN(count * sizeof(int));
        memcpy(CMSG_DATA(c), fds, count * sizeof(int));
    }
    return sendmsg(s, &m, MSG_NOSIGNAL);
}

// The two words of an answer; up to two descriptors.
static int hear(int s, uint32_t answer[2], int fds[2]) {
    char control[CMSG_SPACE(2 * sizeof(int))] = {0};
    struct iovec iov = {answer, 8};
    struct msghdr m = {.msg_iov = &iov, .msg_iovlen = 1, .msg_control = control,
                       .msg_controllen = sizeof control};
    fds[0] = fds[1] = -1;
    if (recvmsg(s, &m, MSG_CMSG_CLOEXEC) != 8)
        return -1;
    for (struct cmsghdr *c = CMSG_FIRSTHDR(&m); c; c = CMSG_NXTHDR(&m, c))
        if (c->cmsg_type == SCM_RIGHTS)
            memcpy(fds, CMSG_DATA(c), c->cmsg_len - CMSG_LEN(0));
    return answer[0] == MAGIC && answer[1] == 0 ? 0 : -1;
}

static int greet(int s, uint32_t kind, uint64_t nonce, int fds[2]) {
    struct { uint32_t magic, kind; uint64_t nonce; } hello = {MAGIC, kind, nonce};
    uint32_t answer[2];
    if (say(s, &hello, sizeof hello, 0, 0) != sizeof hello)
        return -1;
    return hear(s, answer, fds);
}

// A descriptor of some kind: right, wrong, or right in the wrong state.
static int some_descriptor(int device) {
    int pair[2];
    switch (dice() % 9) {
    case 0: return device >= 0 ? ioctl(device, 0xAA00, O_CLOEXEC | O_NONBLOCK) : -1;
    case 1: return device >= 0 ? ioctl(device, 0xAA00, O_CLOEXEC) : -1; // blocking
    case 2: {                                                           // its API is already enabled
        int fd = device >= 0 ? ioctl(device, 0xAA00, O_CLOEXEC | O_NONBLOCK) : -1;
        uint64_t api[3] = {0xAA, 0, 0};
        if (fd >= 0)
            ioctl(fd, 0xC018AA3F, api);
        return fd;
    }
    case 3: return memfd_create("hostile", MFD_CLOEXEC);
    case 4: return open("/dev/zero", O_RDWR | O_CLOEXEC);
    case 5: return dup(device >= 0 ? device : 0);
    case 6: return socket(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0);
    case 7: return open("/proc/self/maps", O_RDONLY | O_CLOEXEC);
    default:
        if (pipe2(pair, O_CLOEXEC))
            return -1;
        close(pair[1]);
        return pair[0];
    }
}

static void forge(void) {
    int s = connected(dice() % 16 ? SOCK_SEQPACKET : SOCK_STREAM), device = -1;
    if (s < 0)
        return;
    uint64_t words[16];
    int given[2] = {-1, -1};
    uint32_t answer[2];
    char *area = mmap(0, 3 * AREA, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    for (int step = dice() % 5; step >= 0; step--) {
        int fds[8], count = 0;
        size_t length;
        for (int at = 0; at < 16; at++)
            words[at] = dice() % 3 ? dice() : dice() % 4;
        switch (dice() % 4) {
        case 0: // well formed: a start, or a fork child with a guess
            words[0] = MAGIC | dice() % 2 << 32;
            words[1] = dice() % 2 ? 0 : dice() % 8;
            length = 16;
            break;
        case 1: case 2: // well formed in part
            words[0] = MAGIC;
            words[1] = dice() % 4 ? (uint64_t)area : dice() & ~4095ul;
            words[2] = dice() % 4 ? words[1] + 2 * AREA + 4 * PAGE : dice() & ~4095ul;
            words[3] = dice() % 4 ? (uint64_t)area + 2 * AREA : dice() & ~4095ul;
            length = 32;
            break;
        default: length = dice() % sizeof words;
        }
        if (dice() % 8 == 0)
            length = dice() % sizeof words;
        for (int wanted = dice() % 9 ? dice() % 3 : 8; count < wanted; count++)
            if ((fds[count] = some_descriptor(device)) < 0)
                break;
        say(s, words, length, fds, count);
        for (int at = 0; at < count; at++)
            close(fds[at]);
        if (dice() % 8) {
            struct timeval limit = {.tv_usec = 20000};
            setsockopt(s, SOL_SOCKET, SO_RCVTIMEO, &limit, sizeof limit);
            hear(s, answer, given);
            if (given[0] >= 0 && given[1] >= 0) {
                if (device >= 0)
                    close(device);
                device = given[0];
                struct page *page = mmap(0, PAGE, PROT_READ | PROT_WRITE, MAP_SHARED, given[1], 0);
                for (int at = 0; page != MAP_FAILED && at < 128; at++)
                    ((volatile uint32_t *)page)[dice() % 1024] = dice() % 2 ? dice() : dice() % 4;
                if (page != MAP_FAILED)
                    munmap(page, PAGE);
                close(given[1]);
            } else if (given[0] >= 0) {
                close(given[0]);
            }
        }
    }
    if (device >= 0)
        close(device);
    munmap(area, 3 * AREA);
    close(s);
}

// Each peer has its part of the handshakes, and random numbers of its own.
static int forge_all(long count, uint64_t seed, long peers) {
    int failed = 0, status;
    for (long peer = 0; peer < peers; peer++) {
        pid_t pid = fork();
        if (pid < 0)
            return 5;
        if (pid == 0) {
            state = seed + ((uint64_t)peer << 32);
            for (long done = peer; done < count; done += peers)
                forge();
            _exit(0);
        }
    }
    while (wait(&status) > 0)
        failed |= status != 0;
    return failed ? 5 : 0;
}

static int shrink(void) {
    int fds[2], s = connected(SOCK_SEQPACKET);
    if (s < 0 || greet(s, 0, 0, fds) != 0 || fds[1] < 0)
        return 3;
    int changed = ftruncate(fds[1], 0) == 0 || ftruncate(fds[1], 8192) == 0 ||
                  fcntl(fds[1], F_ADD_SEALS, F_SEAL_WRITE) == 0 ||
                  fallocate(fds[1], 0, 8192, 4096) == 0;
    return changed ? 9 : 0;
}

static struct page *volatile page;
static volatile int own_tid, stop;
static int victim, guess, own_uffd, hold_uffd;
static const char *how;

// Answers each command as if it had been carried out. The manager then reads at KNOWN, in the
// process that it takes for the client.
static int agent(void *unused) {
    (void)unused;
    prctl(PR_SET_PDEATHSIG, SIGKILL); // it is a process, and shall not outlive the test
    own_tid = syscall(SYS_gettid);
    uint32_t seq = 0;
    page->agent = strcmp(how, "first") ? own_tid : victim;
    while (!stop) {
        if (page->seq == seq) {
            usleep(200);
            continue;
        }
        seq = page->seq;
        uint64_t moved = 0;
        madvise((void *)KNOWN, AREA, MADV_DONTNEED);
        for (uint32_t at = 0; at < page->count && at < PLACES; at++) {
            if (!page->pages[at])
                continue;
            uint64_t staged = KNOWN - AREA + at * PAGE, held = KNOWN + at * PAGE;
            uint64_t out[5] = {staged, page->pages[at], PAGE, 0, 0};
            uint64_t on[5] = {held, staged, PAGE, 0, 0};
            if (ioctl(own_uffd, 0xC028AA05, out) == 0 && ioctl(hold_uffd, 0xC028AA05, on) == 0)
                moved |= 1ul << at;
        }
        page->agent = victim;
        // Also claims places that the command does not have.
        page->moved = page->count < PLACES ? moved | ~0ul << page->count : moved;
        page->refused = page->stranded = 0;
        page->done = seq;
        syscall(SYS_futex, &page->done, 1, 1, 0, 0, 0);
    }
    return 0;
}

// Takes part in the protocol, with an agent of its own. 0, or a status.
static int join(int (*agent)(void *)) {
    int fds[2], s = connected(SOCK_SEQPACKET);
    if (s < 0 || greet(s, 0, 0, fds) != 0)
        return 3;
    page = mmap(0, PAGE, PROT_READ | PROT_WRITE, MAP_SHARED, fds[1], 0);
    char *area = mmap((void *)(KNOWN - AREA), 2 * AREA + 4 * PAGE, PROT_READ | PROT_WRITE,
                      MAP_PRIVATE | MAP_ANONYMOUS | MAP_FIXED, -1, 0);
    madvise(area, 2 * AREA, MADV_NOHUGEPAGE);
    memset(area + 2 * AREA, 0, 4 * PAGE);
    int given[2] = {ioctl(fds[0], 0xAA00, O_CLOEXEC | O_NONBLOCK),
                    ioctl(fds[0], 0xAA00, O_CLOEXEC | O_NONBLOCK)};
    if (getenv("HOSTILE_OLD")) { // older managers left this to the client
        uint64_t api[3] = {0xAA, 1 << 16, 0}, range[4] = {KNOWN, AREA, 1, 0};
        ioctl(given[1], 0xC018AA3F, api);
        ioctl(given[1], 0xC020AA00, range);
    }
    char *beacon = mmap(0, PAGE, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    struct { uint32_t magic, zero; uint64_t staging, end, beacon; } ready = {
        MAGIC, 0, KNOWN - AREA, KNOWN + AREA + 4 * PAGE, (uint64_t)beacon};
    uint32_t answer[2];
    int back[2];
    if (say(s, &ready, sizeof ready, given, 2) != sizeof ready || hear(s, answer, back) != 0)
        return 4;
    own_uffd = back[0], hold_uffd = given[1];
    // The agent's stack must not be managed, like the shim's. So it lies behind the holding area.
    clone(agent, (char *)KNOWN + AREA + 4 * PAGE,
          CLONE_VM | CLONE_FS | CLONE_FILES | CLONE_SIGHAND, 0);
    return 0;
}

static int peek(void) {
    int failed = join(agent);
    if (failed)
        return failed;
    // Far more than the limit, each page known.
    size_t pages = 16384;
    char *hog = mmap(0, pages * PAGE, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    madvise(hog, pages * PAGE, MADV_NOHUGEPAGE);
    double until = now() + 6;
    for (int turn = 0; now() < until; turn++)
        for (size_t at = 0; at < pages && now() < until; at++) {
            char *word = hog + at * PAGE;
            for (int of = 0; turn && of < 64; of++)
                if (word[of] == (char)guess && word[of + 1] == (char)guess) {
                    printf("page %zu has the secret\n", at);
                    return 9;
                }
            memset(word, (turn + 1) % 64 + 1, 128); // never the secret, which is above
        }
    return 0;
}

static struct shared { // not managed
    volatile int held, over, got, leader;
    volatile unsigned char bytes[16];
    char stack[1 << 16];
} *shared;

// Takes a command, and never answers it.
static int holder(void *unused) {
    (void)unused;
    own_tid = syscall(SYS_gettid);
    page->agent = own_tid;
    while (page->seq == page->done)
        usleep(200);
    usleep(60000); // by then it is given up, and its pages are set aside
    shared->held = 1;
    while (!shared->over) // it is a process, and shall not outlive the test
        usleep(1000);
    _exit(0);
}

// Shares the memory of the process, and ends it. Nobody touches the lowest pages from then on.
static int outlive(void *pagemap) {
    kill(shared->leader, SIGKILL);
    double until = now() + 0.5;
    while (now() < until && !shared->got)
        for (uintptr_t at = low_start; at < LOW_END; at += PAGE) {
            uint64_t word = 0;
            if (!low_is_mapped(at) || pread((int)(intptr_t)pagemap, &word, 8, at / PAGE * 8) != 8 || !(word >> 63))
                continue;
            memcpy((void *)shared->bytes, (void *)at, 16);
            shared->got = 1;
        }
    shared->over = 1;
    _exit(0);
}

static int hold_and_die(void) {
    int failed = join(holder), pagemap = open("/proc/self/pagemap", O_RDONLY);
    if (failed || pagemap < 0 || !low_map())
        return failed ? failed : 5;
    char *hog = mmap(0, 16384 * PAGE, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    double until = now() + 20;
    for (size_t at = 0; !shared->held && now() < until; at++)
        memset(hog + at % 16384 * PAGE, (int)at % 64 + 1, 128);
    if (!shared->held)
        return 6;
    for (uintptr_t at = low_start; at < LOW_END; at += PAGE)
        if (low_is_mapped(at))
            madvise((void *)at, PAGE, MADV_DONTNEED);
    shared->leader = getpid();
    clone(outlive, shared->stack + sizeof shared->stack, CLONE_VM | SIGCHLD, (void *)(intptr_t)pagemap);
    pause();
    return 8;
}

static int outlive_all(long rounds) {
    shared = mmap(0, sizeof *shared, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
    if (shared == MAP_FAILED)
        return 2;
    while (rounds-- > 0) {
        int status;
        shared->held = shared->over = 0;
        pid_t pid = fork();
        if (pid == 0)
            _exit(hold_and_die());
        if (waitpid(pid, &status, 0) != pid || !WIFSIGNALED(status))
            return WIFEXITED(status) ? WEXITSTATUS(status) : 2;
        for (double until = now() + 5; !shared->over && now() < until;)
            usleep(1000);
        if (!shared->over || shared->got) {
            printf("over %d, got %d:", shared->over, shared->got);
            for (int at = 0; at < 16; at++)
                printf(" %02x", shared->bytes[at]);
            puts("");
            return shared->got ? 9 : 7;
        }
    }
    return 0;
}

int main(int argc, char **argv) {
    const char *what = argc > 1 ? argv[1] : "";
    long number = argc > 2 ? strtol(argv[2], 0, 0) : 0;
    signal(SIGPIPE, SIG_IGN);
    if (!strcmp(what, "forge"))
        return forge_all(number, argc > 3 ? strtoul(argv[3], 0, 0) : 1,
                         argc > 4 ? strtol(argv[4], 0, 0) : 1);
    if (!strcmp(what, "silent")) {
        while (number-- > 0 && connected(SOCK_SEQPACKET) >= 0)
            ;
        sleep(1);
        return 0;
    }
    if (!strcmp(what, "flood")) {
        double until = now() + number / 1e3;
        long count = 0;
        for (int s; now() < until; count++)
            if ((s = connected(SOCK_SEQPACKET)) >= 0)
                close(s);
        printf("%ld\n", count);
        return 0;
    }
    if (!strcmp(what, "shrink"))
        return shrink();
    if (!strcmp(what, "outlive"))
        return outlive_all(number);
    if (!strcmp(what, "secret")) {
        char *secret = mmap((void *)KNOWN, AREA, PROT_READ | PROT_WRITE,
                            MAP_PRIVATE | MAP_ANONYMOUS | MAP_FIXED, -1, 0);
        memset(secret, (int)number, AREA);
        printf("%d\n", getpid());
        fflush(stdout);
        char byte;
        while (read(0, &byte, 1) > 0)
            ;
        return 0;
    }
    if (!strcmp(what, "peek") && argc > 4) {
        victim = number, guess = strtol(argv[3], 0, 0), how = argv[4];
        return peek();
    }
    return 2;
}
