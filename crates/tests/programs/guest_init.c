// guest_init: the first process of a virtual machine. Fills most of the machine's memory, compares
// every word of it three times, changes a part each time, says what it found, and ends the machine.
// `give`: it compares once, gives the memory back for seven seconds, and does all of that again.
#include <fcntl.h>
#include <stdint.h>
#include <stdio.h>
#include <string.h>
#include <sys/mman.h>
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

// The drivers of a balloon, which reports free pages.
static void load(void) {
    const char *all[] = {"virtio_ring", "virtio", "virtio_pci_modern_dev", "virtio_pci_legacy_dev", "virtio_pci",
                         "virtio_balloon"};
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

int main(int argc, char **argv) {
    struct sysinfo machine;
    sysinfo(&machine);
    uint64_t pages = machine.totalram * (uint64_t)machine.mem_unit / 4096 * 3 / 4;
    int gives = argc > 1 && !strcmp(argv[1], "give");
    if (gives) load();
    use(pages, gives ? 1 : ROUNDS);
    if (gives) sleep(7), use(pages, 1);
    reboot(RB_AUTOBOOT);
    return 1;
}
