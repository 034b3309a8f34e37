// receiver run SOCKET SNAPSHOT MIB THREADS SECONDS SEED [paused]: listens as Cloud Hypervisor does
//   (`receive-migration`, `memory_mode=postcopy`), and checks every byte of the machine that is
//   restored. It maps the memory that comes, registers it with a userfaultfd of its own (MISSING and
//   MINOR), and asks for what is touched and meanwhile for all other pages, each once, for about
//   SECONDS. Threads compare pages of theirs, increment words of them, and give some back as a
//   balloon does, which are zeros then. SNAPSHOT is the folder with the other files; MIB the memory,
//   in two slots: the second begins in the middle of its memfd.
//   Prints increments, pages compared, pages given back, pages asked for, wrong.
// receiver hostile SOCKET SNAPSHOT MIB HOW: says or does something that cannot be served, and waits
//   until the other side ends both connections.
// Status 86: a byte was wrong. 3: no userfaultfd. 4: a word of the protocol was wrong.
#define _GNU_SOURCE
#include <errno.h>
#include <fcntl.h>
#include <linux/userfaultfd.h>
#include <poll.h>
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
#include <unistd.h>

#include "machine.h"

enum { PAGE = 4096, WORDS = 512, WRONG = 86, THREADS_MAX = 16, NO_UFFD = 3, UNSAID = 4 };
enum { START = 1, CONFIG = 2, STATE = 3, COMPLETE = 5, MEMORY_FD = 7, PAUSED = 8, FAULT = 9 };
enum { OK = 1, ERROR = 2 };

static uint64_t pages, threads, seconds, seed;
static uint64_t *memory[2];          // the slots
static int memfd[2], uffd;
static const uint64_t guest[2] = { 0, 4ull << 30 };
static uint32_t *counts;             // increments of a page
static char *zeroed;                 // it was given back
static char *blind;                  // so was this, before it was asked for: it may still have its bytes
static int listener, first, second;  // the calls
static uint64_t increments, checks, given_back, asked, wrong;

static void die(const char *what) {
    perror(what);
    exit(1);
}

static void unsaid(const char *what) {
    fprintf(stderr, "the other side did not say %s\n", what);
    exit(UNSAID);
}

// A word of the snapshot; none is zero. As monitor.c has it.
static uint64_t word_of(uint64_t page, uint64_t word) { return mix(page * WORDS + word + 1) | 1; }

static uint64_t pages_of(int slot) { return slot ? pages - pages / 2 : pages / 2; }
static uint64_t *at(uint64_t page) {
    uint64_t half = pages / 2;
    return page < half ? memory[0] + page * WORDS : memory[1] + (page - half) * WORDS;
}

static void hear(int from, void *bytes, size_t length) {
    if (recv(from, bytes, length, MSG_WAITALL) != (ssize_t)length) unsaid("all of it");
}

struct head { uint16_t word; char none[6]; uint64_t length; };

static void say(int to, uint16_t word, uint64_t length) {
    struct head head = { word, { 0 }, length };
    send(to, &head, sizeof head, MSG_NOSIGNAL);
}

static uint64_t command(uint16_t want) {
    struct head head;
    hear(first, &head, sizeof head);
    static const char none[6];
    if (head.word != want || memcmp(head.none, none, 6)) unsaid("the command");
    return head.length;
}

// A payload is that file of the snapshot.
static void payload(uint16_t want, const char *folder, const char *name) {
    char path[500];
    snprintf(path, sizeof path, "%s/%s", folder, name);
    int file = open(path, O_RDONLY);
    size_t length = lseek(file, 0, SEEK_END);
    char *right = malloc(length), *heard = malloc(length);
    if (pread(file, right, length, 0) != (ssize_t)length) die(path);
    if (command(want) != length) unsaid("the length");
    hear(first, heard, length);
    if (memcmp(right, heard, length)) unsaid(name);
    close(file);
}

static void take_memory(int slot) {
    if (command(MEMORY_FD) != 4) unsaid("a slot");
    union { char room[CMSG_SPACE(sizeof(int))]; struct cmsghdr align; } control;
    uint32_t number;
    struct iovec part = { &number, 4 };
    struct msghdr message = { .msg_iov = &part, .msg_iovlen = 1, .msg_control = control.room, .msg_controllen = sizeof control.room };
    if (recvmsg(first, &message, 0) != 4 || number != (uint32_t)(3 * slot)) unsaid("the slot's number");
    struct cmsghdr *head = CMSG_FIRSTHDR(&message);
    if (!head || head->cmsg_type != SCM_RIGHTS || head->cmsg_len != CMSG_LEN(sizeof(int))) unsaid("a descriptor");
    memcpy(&memfd[slot], CMSG_DATA(head), sizeof(int));
    size_t before = slot ? pages / 2 * PAGE : 0, size = pages_of(slot) * PAGE;
    struct stat is;
    fstat(memfd[slot], &is);
    if ((size_t)is.st_size != before + size || is.st_blocks) unsaid("an empty memfd");
    if (!ftruncate(memfd[slot], 0)) unsaid("a memfd that stays");
    memory[slot] = mmap(NULL, size, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_NORESERVE, memfd[slot], before);
    if (memory[slot] == MAP_FAILED) die("mmap");
    say(first, OK, 0);
}

static void listen_at(const char *path) {
    struct sockaddr_un address = { .sun_family = AF_UNIX };
    snprintf(address.sun_path, sizeof address.sun_path, "%s.soon", path);
    listener = socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0);
    unlink(address.sun_path);
    if (bind(listener, (struct sockaddr *)&address, sizeof address) || listen(listener, 4)) die(path);
    if (rename(address.sun_path, path)) die(path);
    first = accept(listener, NULL, NULL);
}

static void take_second(void) {
    second = accept(listener, NULL, NULL);
    uint16_t role;
    hear(second, &role, 2);
    if (role != 2) unsaid("its role");
}

static void take_config(const char *folder) {
    if (command(START)) unsaid("nothing");
    say(first, OK, 0);
    for (int slot = 0; slot < 2; slot++) take_memory(slot);
    payload(CONFIG, folder, "migration_config.json");
    say(first, OK, 0);
    take_second();
}

static void register_all(void) {
    uffd = syscall(SYS_userfaultfd, O_CLOEXEC | O_NONBLOCK);
    if (uffd < 0) {
        int device = open("/dev/userfaultfd", O_RDWR | O_CLOEXEC);
        uffd = device < 0 ? -1 : ioctl(device, USERFAULTFD_IOC_NEW, O_CLOEXEC | O_NONBLOCK);
    }
    struct uffdio_api api = { .api = UFFD_API, .features = UFFD_FEATURE_MISSING_SHMEM | UFFD_FEATURE_MINOR_SHMEM };
    if (uffd < 0 || ioctl(uffd, UFFDIO_API, &api)) {
        perror("userfaultfd");
        exit(NO_UFFD);
    }
    for (int slot = 0; slot < 2; slot++) {
        struct uffdio_register all = { { (uintptr_t)memory[slot], pages_of(slot) * PAGE }, UFFDIO_REGISTER_MODE_MISSING | UFFDIO_REGISTER_MODE_MINOR, 0 };
        if (ioctl(uffd, UFFDIO_REGISTER, &all)) die("UFFDIO_REGISTER");
    }
}

static void ask(uint64_t gpa, uint64_t length) {
    struct { struct head head; uint64_t gpa, length; } request = { { FAULT, { 0 }, 16 }, gpa, length };
    send(second, &request, sizeof request, MSG_NOSIGNAL);
}

// A page by its number of all: asks for it, and maps what is there then.
static void resolve(uint64_t page) {
    int slot = page >= pages / 2;
    uint64_t of_slot = page - (slot ? pages / 2 : 0);
    for (;;) {
        ask(guest[slot] + of_slot * PAGE, PAGE), asked++;
        struct head head;
        if (recv(second, &head, sizeof head, MSG_WAITALL) != sizeof head || head.word != OK || head.length) {
            fprintf(stderr, "page %lu is refused\n", page);
            exit(UNSAID);
        }
        struct uffdio_continue map = { { (uintptr_t)at(page), PAGE }, 0, 0 };
        if (!ioctl(uffd, UFFDIO_CONTINUE, &map)) return;
        if (errno == EEXIST) {
            struct uffdio_range there = map.range;
            ioctl(uffd, UFFDIO_WAKE, &there);
            return;
        }
        if (errno != EAGAIN && errno != EFAULT) die("UFFDIO_CONTINUE");
        // EFAULT: it was given back just now.
    }
}

// As the handler of Cloud Hypervisor: ends when it has asked for every page.
static void *handle(void *none) {
    char *served = calloc(pages, 1);
    unsigned pause = seconds * 1000000 / pages;
    for (uint64_t next = 0;;) {
        struct pollfd ready = { uffd, POLLIN, 0 };
        poll(&ready, 1, 0);
        struct uffd_msg message;
        if (ready.revents & POLLIN && read(uffd, &message, sizeof message) == sizeof message) {
            if (message.event != UFFD_EVENT_PAGEFAULT) continue;
            uint64_t address = message.arg.pagefault.address & -PAGE, page = pages;
            for (int slot = 0; slot < 2; slot++)
                if (address - (uintptr_t)memory[slot] < pages_of(slot) * PAGE) page = (slot ? pages / 2 : 0) + (address - (uintptr_t)memory[slot]) / PAGE;
            if (page == pages) unsaid("where a fault is");
            resolve(page), served[page] = 1;
            continue;
        }
        while (next < pages && served[next]) next++;
        if (next == pages) break;
        resolve(next), served[next] = 1;
        if (pause) usleep(pause);
    }
    close(uffd), close(second);
    return none;
}

static int place(uint64_t page, uint64_t count) { return mix(page << 32 ^ count) % WORDS; }

static void settle(uint64_t page) {
    if (blind[page]) blind[page] = 0, zeroed[page] = !at(page)[0];
}

static void check(uint64_t page) {
    uint64_t all[WORDS];
    settle(page);
    for (int word = 0; word < WORDS; word++) all[word] = zeroed[page] ? 0 : word_of(page, word);
    for (uint32_t count = 0; count < counts[page]; count++) all[place(page, count)]++;
    add(&checks, 1);
    if (!memcmp(all, at(page), sizeof all)) return;
    fprintf(stderr, "page %lu is wrong after %u increments%s\n", page, counts[page], zeroed[page] ? ", given back" : "");
    add(&wrong, 1);
}

static void give_back(uint64_t page) {
    int slot = page >= pages / 2;
    uint64_t before = page * PAGE; // the second slot begins in its memfd where it does in the machine
    check(page);
    if (fallocate(memfd[slot], FALLOC_FL_PUNCH_HOLE | FALLOC_FL_KEEP_SIZE, before, PAGE)) die("fallocate");
    counts[page] = 0, zeroed[page] = 1, add(&given_back, 1);
}

static void *work(void *argument) {
    uint64_t own = (uintptr_t)argument, random = mix(seed * 1000 + own), until = now() + seconds * 1000000000u;
    uint64_t share = pages / threads, from = own * share, walk = from;
    while (now() < until) {
        random = mix(random + 0x9e3779b97f4a7c15u);
        uint64_t page = from + random / 64 % share;
        switch (random % 8) {
        case 0: case 1: case 2:
            settle(page), at(page)[place(page, counts[page])]++, counts[page]++, add(&increments, 1);
            break;
        case 3:
            for (int step = 0; step < 16; step++, walk++) {
                if (walk >= from + share) walk = from;
                check(walk);
            }
            break;
        case 4:
            if (random % 256 < 32) give_back(page);
            break;
        case 5: { // of another thread
            uint64_t found = at(random / 4096 % pages)[WORDS / 2];
            __asm__ volatile("" :: "r"(found));
            break;
        }
        default:
            check(page);
        }
    }
    return NULL;
}

static int run(const char *path, const char *folder, int paused) {
    listen_at(path);
    take_config(folder);
    register_all();
    // Pages that were not asked for, and may have come with others.
    for (uint64_t page = 0; page < 32; page++) resolve(page);
    for (uint64_t page = 32; page < 160; page++) blind[page] = 1;
    if (fallocate(memfd[0], FALLOC_FL_PUNCH_HOLE | FALLOC_FL_KEEP_SIZE, 32 * PAGE, 128 * PAGE)) die("fallocate");
    pthread_t handler, of[THREADS_MAX];
    pthread_create(&handler, NULL, handle, NULL);
    check(0), check(pages - 1); // what a device reads when its state comes
    payload(STATE, folder, "state.json");
    say(first, OK, 0);
    if (command(paused ? PAUSED : COMPLETE)) unsaid("nothing");
    say(first, OK, 0);
    for (uintptr_t own = 0; own < threads; own++) pthread_create(&of[own], NULL, work, (void *)own);
    for (uint64_t own = 0; own < threads; own++) pthread_join(of[own], NULL);
    pthread_join(handler, NULL);
    for (uint64_t page = 0; page < pages; page++) check(page);
    printf("%lu %lu %lu %lu %lu\n", increments, checks, given_back, asked, wrong);
    return wrong ? WRONG : 0;
}

static int hostile(const char *path, const char *folder, const char *how) {
    listen_at(path);
    struct { struct head head; char bytes[3]; } half = { { FAULT, { 0 }, 16 }, { 0 } };
    uint64_t half_gpa = pages / 2 * PAGE;
    if (!strcmp(how, "rejects")) command(START), say(first, ERROR, 0);
    else if (!strcmp(how, "unknown")) command(START), say(first, 77, 0);
    else if (!strcmp(how, "payload")) command(START), say(first, OK, 1ull << 60);
    else if (!strcmp(how, "hangs-up")) {
        command(START), say(first, OK, 0), take_memory(0);
        close(first);
        return 0;
    } else {
        take_config(folder);
        if (!strcmp(how, "state")) payload(STATE, folder, "state.json"), say(first, ERROR, 0);
        else if (!strcmp(how, "command")) say(second, 4, 16);
        else if (!strcmp(how, "length")) say(second, FAULT, 17);
        else if (!strcmp(how, "outside")) ask(half_gpa + PAGE, PAGE);
        else if (!strcmp(how, "crossing")) ask(half_gpa - PAGE, 2 * PAGE);
        else if (!strcmp(how, "unaligned")) ask(12, PAGE);
        else if (!strcmp(how, "nothing")) ask(0, 0);
        else if (!strcmp(how, "huge")) ask(0, -(uint64_t)PAGE);
        else if (!strcmp(how, "half")) send(second, &half, sizeof half.head + 3, MSG_NOSIGNAL), shutdown(second, SHUT_WR);
        else if (!strcmp(how, "early") || !strcmp(how, "abandons")) {
            ask(0, 16 * PAGE);
            struct head head;
            hear(second, &head, sizeof head);
            for (uint64_t page = 0; page < 16; page++) wrong += *(memory[0] + page * WORDS + 9) != word_of(page, 9);
            if (head.word != OK || wrong) return WRONG;
            if (*how == 'a') say(second, 6, 0);
            else close(second), second = -1;
        } else return 2;
    }
    char bytes[4096];
    while (read(first, bytes, sizeof bytes) > 0) continue;
    while (second > 0 && read(second, bytes, sizeof bytes) > 0) continue;
    return 0;
}

int main(int count, char **given) {
    if (count < 6) return 2;
    pages = atol(given[4]) * 256;
    if (!strcmp(given[1], "hostile")) return hostile(given[2], given[3], given[5]);
    if (count < 8) return 2;
    threads = atol(given[5]), seconds = atol(given[6]), seed = atol(given[7]);
    counts = calloc(pages, sizeof *counts), zeroed = calloc(pages, 1), blind = calloc(pages, 1);
    return run(given[2], given[3], count > 8);
}
