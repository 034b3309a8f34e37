// heirs MIB ROUNDS: fork children that go on with what their parent had. Fills MIB of memory and
// forks. The child reads all of it and writes every eighth page, ROUNDS times. Halfway it forks a
// child of its own, which does the same. Each process checks every word it reads, and outlives its
// parent's use of the memory. Status 86: a word was wrong.
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <sys/wait.h>
#include <unistd.h>

enum { WRONG = 86, PAGE_WORDS = 512 };

static uint64_t *memory, pages;

static uint64_t word(uint64_t page, uint64_t key) { return (page + 1) * 0x9e3779b97f4a7c15u + key; }

// What `page` holds after `turns` turns in its line of descent.
static uint64_t expected(uint64_t page, uint64_t turns) { return word(page, page % 8 ? 0 : turns); }

static int turn(uint64_t turns) {
    for (uint64_t page = 0; page < pages; page++) {
        uint64_t *at = memory + page * PAGE_WORDS;
        if (at[page % PAGE_WORDS] != expected(page, turns)) return 0;
        if (page % 8 == 0) at[page % PAGE_WORDS] = expected(page, turns + 1);
    }
    return 1;
}

// The rest of a process's work: `turns` were done before it.
static int run(int turns, int rounds) {
    for (int round = 0; round < rounds; round++, turns++) {
        if (!turn(turns)) return WRONG;
        if (round != rounds / 2) continue;
        pid_t pid = fork();
        if (pid < 0) return 4;
        if (pid == 0) _exit(run(turns + 1, rounds - 1 - round));
        munmap(memory, pages * 4096 / 2); // only the child has the rest from here on
        memory += pages / 2 * PAGE_WORDS;
        int status;
        if (wait(&status) < 0 || status != 0) return WRONG;
        return 0;
    }
    return 0;
}

int main(int count, char **values) {
    if (count != 3) return 2;
    pages = strtoull(values[1], 0, 10) << 8;
    memory = mmap(0, pages * 4096, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (memory == MAP_FAILED) return 3;
    for (uint64_t page = 0; page < pages; page++) memory[page * PAGE_WORDS + page % PAGE_WORDS] = expected(page, 0);
    int status = run(0, atoi(values[2]));
    if (status == 0) puts("right");
    return status;
}
