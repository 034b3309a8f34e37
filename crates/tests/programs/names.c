// names MIB: a program whose own name and whose files have names that are not UTF-8. Maps such a
// file, fills MIB of memory and forks. Parent and child check the memory and write it anew, the
// child while the file is mapped there, too. Status 86: a word was wrong.
#include <fcntl.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/wait.h>
#include <unistd.h>

enum { WRONG = 86 };

static uint64_t *memory, words;

static int was_and_is(uint64_t before, uint64_t now) {
    for (uint64_t i = 0; i < words; i++) {
        if (before && memory[i] != before + i / 16) return 0;
        memory[i] = now + i / 16;
    }
    return 1;
}

int main(int count, char **values) {
    if (count != 2) return 2;
    words = strtoull(values[1], 0, 10) << 17;
    if (prctl(PR_SET_NAME, "caf\xe9 \xff\n)")) return 3;
    const char *name = "caf\xe9.\xff";
    int file = open(name, O_RDWR | O_CREAT | O_TRUNC, 0600);
    if (file < 0 || ftruncate(file, 4096)) return 4;
    char *mapped = mmap(0, 4096, PROT_READ | PROT_WRITE, MAP_PRIVATE, file, 0);
    memory = mmap(0, words * 8, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (mapped == MAP_FAILED || memory == MAP_FAILED) return 5;
    mapped[0] = 7;
    uint64_t first = 1ul << 32, second = 2ul << 32, third = 3ul << 32;
    was_and_is(0, first);
    int right = was_and_is(first, second);
    pid_t pid = fork();
    if (pid == 0) _exit(was_and_is(second, third) && was_and_is(third, first) && mapped[0] == 7 ? 0 : WRONG);
    right = was_and_is(second, third) && right;
    int status;
    if (pid < 0 || waitpid(pid, &status, 0) < 0 || status != 0) return WRONG;
    unlink(name);
    puts("right");
    return right && was_and_is(third, first) ? 0 : WRONG;
}
