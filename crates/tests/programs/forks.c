// forks MIB ROUNDS CHILDREN: a storm of forks. Fills MIB of memory. Each round starts CHILDREN at
// once; each child rewrites all of the memory, checks what it wrote and ends. After each round the
// parent checks its own words. All check the lowest pages, too. Status 86: a word was wrong.
#include "low.h"
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <sys/wait.h>
#include <unistd.h>

enum { WRONG = 86 };

static uint64_t *memory, words;

static void write_all(uint64_t key) {
    for (uint64_t i = 0; i < words; i++) memory[i] = key + i / 16;
}

static int is_all(uint64_t key) {
    for (uint64_t i = 0; i < words; i++)
        if (memory[i] != key + i / 16) return 0;
    return 1;
}

int main(int count, char **values) {
    if (count != 4) return 2;
    words = strtoull(values[1], 0, 10) << 17;
    memory = mmap(0, words * 8, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (memory == MAP_FAILED) return 3;
    int rounds = atoi(values[2]), children = atoi(values[3]);
    low_map();
    write_all(1);
    for (int round = 0; round < rounds; round++) {
        for (int child = 0; child < children; child++) {
            pid_t pid = fork();
            if (pid < 0) return 4;
            if (pid == 0) {
                uint64_t key = (uint64_t)(round * children + child + 2) << 32;
                int right = !low_wrong_page() && is_all(1);
                write_all(key);
                _exit(right && is_all(key) ? 0 : WRONG);
            }
        }
        for (int child = 0; child < children; child++) {
            int status;
            if (wait(&status) < 0 || status != 0) return WRONG;
        }
        if (!is_all(1) || low_wrong_page()) return WRONG;
    }
    puts("right");
    return 0;
}
