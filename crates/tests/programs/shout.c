// shout MIB ROUNDS: one thread keeps rewriting MIB of memory that does not compress. Another thread
// writes evicted parts of it to standard error. A closed standard error is no failure of this
// program.
#include <pthread.h>
#include <signal.h>
#include <stdint.h>
#include <stdlib.h>
#include <unistd.h>

static uint64_t *memory;
static size_t words;
static volatile int ended;

static void *shout(void *nothing) {
    for (size_t at = 0; !ended; at = (at + 65536) % (words - 32768))
        if (write(2, memory + at, 262144) < 0)
            usleep(1000);
    return nothing;
}

int main(int argc, char **argv) {
    if (argc != 3)
        return 2;
    signal(SIGPIPE, SIG_IGN);
    words = (size_t)atol(argv[1]) << 17;
    memory = malloc(words * 8);
    pthread_t thread;
    uint64_t state = 88172645463325252u;
    for (long round = 0; round < atol(argv[2]); round++) {
        for (size_t at = 0; at < words; at++) {
            state ^= state << 13;
            state ^= state >> 7;
            state ^= state << 17;
            memory[at] = state;
        }
        if (round == 0)
            pthread_create(&thread, NULL, shout, NULL);
    }
    ended = 1;
    _exit(6);
}
