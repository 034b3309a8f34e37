// wipes SECRET: overwrites its arguments, as programs do that take a password in one, and says so.
// Ends on SIGTERM, or after 20 s.
#include <stdio.h>
#include <string.h>
#include <unistd.h>

int main(int argc, char **argv) {
    for (int at = 1; at < argc; at++)
        memset(argv[at], 'x', strlen(argv[at]));
    puts("ready");
    fflush(stdout);
    sleep(20);
    return 3;
}
