// told DECISECONDS [LAST]: prints which signals it is sent, and which it finds ignored. Ends when
// the time is up or when signal LAST has come.
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

static void say(const char *word, int number) {
    char text[40];
    int length = snprintf(text, sizeof text, "%s %d\n", word, number);
    if (write(1, text, (size_t)length) < 0)
        _exit(3);
}

static volatile sig_atomic_t latest;

static void got(int number) {
    say("got", number);
    latest = number;
}

int main(int argc, char **argv) {
    const int numbers[] = {SIGHUP, SIGINT, SIGQUIT, SIGTERM, SIGUSR1, SIGUSR2, SIGWINCH, SIGCONT, SIGALRM, SIGRTMIN + 3};
    for (unsigned at = 0; at < sizeof numbers / sizeof *numbers; at++) {
        struct sigaction action;
        sigaction(numbers[at], NULL, &action);
        if (action.sa_handler == SIG_IGN) {
            say("ignored", numbers[at]);
            continue;
        }
        memset(&action, 0, sizeof action);
        action.sa_handler = got;
        sigaction(numbers[at], &action, NULL);
    }
    struct timespec now, end;
    clock_gettime(CLOCK_MONOTONIC, &end);
    long tenths = argc > 1 ? atol(argv[1]) : 10;
    end.tv_sec += tenths / 10;
    end.tv_nsec += tenths % 10 * 100000000;
    int last = argc > 2 ? atoi(argv[2]) : -1;
    say("ready", 0);
    do {
        if (latest == last)
            break;
        struct timespec nap = {0, 10000000};
        nanosleep(&nap, NULL);
        clock_gettime(CLOCK_MONOTONIC, &now);
    } while (now.tv_sec < end.tv_sec || (now.tv_sec == end.tv_sec && now.tv_nsec < end.tv_nsec));
    return 7;
}
