// guest_init: the first process of a virtual machine. Fills most of the machine's memory, compares
// every word of it three times, changes a part each time, says what it found, and ends the machine.
#include <stdint.h>
#include <stdio.h>
#include <sys/mman.h>
#include <sys/reboot.h>
#include <sys/sysinfo.h>
#include <unistd.h>

enum { WORDS = 512, ROUNDS = 3 };

// Half of the pages compress badly.
static uint64_t word(uint64_t page, uint64_t at, uint64_t round) {
    uint64_t turn = page % 4 ? 0 : round, key = page + turn;
    return page % 2 ? (key << 9 | at) * 0x9e3779b97f4a7c15u : key + at / 64;
}

int main(void) {
    struct sysinfo machine;
    sysinfo(&machine);
    uint64_t pages = machine.totalram * (uint64_t)machine.mem_unit / 4096 * 3 / 4, wrong = 0;
    uint64_t *memory = mmap(0, pages * 4096, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    for (uint64_t round = 0; round <= ROUNDS; round++) {
        for (uint64_t page = 0; page < pages; page++) {
            uint64_t *at = memory + page * WORDS;
            for (uint64_t i = 0; i < WORDS && round; i++) wrong += at[i] != word(page, i, round - 1);
            for (uint64_t i = 0; i < WORDS && (!round || page % 4 == 0); i++) at[i] = word(page, i, round);
        }
        printf("guest: round %lu, %lu pages, %lu words wrong\n", round, pages, wrong);
        fflush(stdout);
    }
    reboot(RB_AUTOBOOT);
    return 1;
}
