// guest_init: the first process of a virtual machine. Fills most of the machine's memory, compares
// every word of it three times, changes a part each time, says what it found, and ends the machine.
// `give`: it compares once, gives the memory back for seven seconds, and does all of that again.
// `disk`: it writes all of it to a disk, past the page cache, reads it back in another order, and compares.
#define _GNU_SOURCE
#include <errno.h>
#include <fcntl.h>
#include <stdint.h>
#include <stdio.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/mount.h>
#include <sys/reboot.h>
#include <sys/syscall.h>
#include <sys/sysinfo.h>
#include <unistd.h>

enum { WORDS = 512, ROUNDS = 3 };

// Half of the pages compress badly.
static uint64_t word(uint64_t page, uint64_t at, uint64_t round) {
    uint64_t turn = page % 4 ? 0 : round, key = page + turn;
    return page % 2 ? (key << 9 | at) * 0x9e3779b97f4a7c15u : key + at / 64;
}

// A driver, and those that it needs.
static void load(const char *driver) {
    const char *all[] = {"virtio_ring", "virtio", "virtio_pci_modern_dev", "virtio_pci_legacy_dev", "virtio_pci", driver};
    for (int at = 0; at < 6; at++) {
        char path[64];
        snprintf(path, sizeof path, "/%s.ko", all[at]);
        int fd = open(path, O_RDONLY);
        if (fd < 0 || syscall(SYS_finit_module, fd, "", 0)) printf("guest: %s does not load\n", path);
    }
}

static void use(uint64_t pages, uint64_t rounds) {
    uint64_t *memory = mmap(0, pages * 4096, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0), wrong = 0;
    for (uint64_t round = 0; round <= rounds; round++) {
        for (uint64_t page = 0; page < pages; page++) {
            uint64_t *at = memory + page * WORDS;
            for (uint64_t i = 0; i < WORDS; i++) wrong += at[i] != (round ? word(page, i, round - 1) : 0);
            for (uint64_t i = 0; i < WORDS && (!round || page % 4 == 0); i++) at[i] = word(page, i, round);
        }
        printf("guest: round %lu, %lu pages, %lu words wrong\n", round, pages, wrong);
        fflush(stdout);
    }
    munmap(memory, pages * 4096);
}

static int open_disk(void) {
    load("virtio_blk");
    if (mount("devtmpfs", "/dev", "devtmpfs", 0, "") && errno != EBUSY) printf("guest: no devices\n");
    for (int tries = 0; tries < 100; tries++, usleep(100000)) {
        int fd = open("/dev/vda", O_RDWR | O_DIRECT);
        if (fd >= 0) return fd;
    }
    printf("guest: no disk\n");
    return -1;
}

// Each piece of the memory is written from where it is, and read back to where another was.
static void disk(uint64_t pages) {
    enum { PIECE = 16, STEP = 7919 };
    int fd = open_disk();
    uint64_t pieces = pages / PIECE, wrong = 0, failed = 0;
    uint64_t *memory = mmap(0, pages * 4096, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    for (uint64_t round = 0; round < 2; round++) {
        for (uint64_t page = 0; page < pieces * PIECE; page++)
            for (uint64_t i = 0; i < WORDS; i++) memory[page * WORDS + i] = word(page, i, round);
        for (uint64_t piece = 0; piece < pieces; piece++) {
            off_t at = piece * PIECE * 4096;
            failed += pwrite(fd, memory + piece * PIECE * WORDS, PIECE * 4096, at) != PIECE * 4096;
        }
        for (uint64_t piece = 0; piece < pieces; piece++) {
            off_t at = piece * STEP % pieces * PIECE * 4096;
            failed += pread(fd, memory + piece * PIECE * WORDS, PIECE * 4096, at) != PIECE * 4096;
        }
        for (uint64_t page = 0; page < pieces * PIECE; page++) {
            uint64_t of = page / PIECE * STEP % pieces * PIECE + page % PIECE;
            for (uint64_t i = 0; i < WORDS; i++) wrong += memory[page * WORDS + i] != word(of, i, round);
        }
        printf("guest: disk round %lu, %lu pages, %lu failed, %lu words wrong\n", round, pages, failed, wrong);
        fflush(stdout);
    }
}

int main(int argc, char **argv) {
    struct sysinfo machine;
    sysinfo(&machine);
    uint64_t pages = machine.totalram * (uint64_t)machine.mem_unit / 4096 * 3 / 4;
    int gives = argc > 1 && !strcmp(argv[1], "give");
    if (argc > 1 && !strcmp(argv[1], "disk")) {
        disk(pages * 2 / 3);
        reboot(RB_AUTOBOOT);
        return 1;
    }
    if (gives) load("virtio_balloon");
    use(pages, gives ? 1 : ROUNDS);
    if (gives) sleep(7), use(pages, 1);
    reboot(RB_AUTOBOOT);
    return 1;
}
