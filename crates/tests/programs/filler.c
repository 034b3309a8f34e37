// Fills argv[1] MiB and says "ready". At each SIGUSR1 it maps argv[2] MiB more, fills them at once,
// checks both, gives the new ones back and says "filled". Ends at SIGUSR2.
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/mman.h>

static unsigned *filled(size_t words, unsigned seed) {
    unsigned *data = mmap(NULL, words * 4, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (data == MAP_FAILED) exit(2);
    for (size_t i = 0; i < words; i++) data[i] = seed = seed * 1103515245 + 12345;
    return data;
}

static int wrong(const unsigned *data, size_t words, unsigned seed) {
    for (size_t i = 0; i < words; i++)
        if (data[i] != (seed = seed * 1103515245 + 12345)) return 1;
    return 0;
}

int main(int argc, char **argv) {
    if (argc < 3) return 2;
    size_t own = strtoul(argv[1], NULL, 10) << 18, more = strtoul(argv[2], NULL, 10) << 18;
    sigset_t wanted;
    sigemptyset(&wanted);
    sigaddset(&wanted, SIGUSR1);
    sigaddset(&wanted, SIGUSR2);
    sigprocmask(SIG_BLOCK, &wanted, NULL);
    unsigned *data = filled(own, 1);
    printf("ready\n");
    fflush(stdout);
    for (unsigned round = 2;; round++) {
        int got = 0;
        if (sigwait(&wanted, &got) || got == SIGUSR2) return got == SIGUSR2 ? 0 : 3;
        unsigned *fresh = filled(more, round);
        if (wrong(fresh, more, round) || wrong(data, own, 1)) return 1;
        munmap(fresh, more * 4);
        printf("filled\n");
        fflush(stdout);
    }
}
