// leaderless FILE SECONDS: the main thread ends at once. Another thread goes on, and appends to
// FILE ten times a second.
#include <fcntl.h>
#include <pthread.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

static char **arguments;

static void *work(void *nothing) {
    size_t bytes = 8 << 20;
    char *memory = malloc(bytes);
    memset(memory, 1, bytes);
    int file = open(arguments[1], O_WRONLY | O_CREAT | O_APPEND, 0644);
    for (long tenths = 10 * atol(arguments[2]); tenths > 0; tenths--) {
        if (write(file, ".", 1) != 1)
            _exit(3);
        usleep(100000);
    }
    if (write(file, "done", 4) != 4)
        _exit(3);
    _exit(0);
    return nothing;
}

int main(int argc, char **argv) {
    if (argc != 3)
        return 2;
    arguments = argv;
    pthread_t thread;
    pthread_create(&thread, NULL, work, NULL);
    pthread_exit(NULL);
}
