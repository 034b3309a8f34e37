// tty STEP... -- COMMAND...: runs a command on a terminal of its own. Steps, in order: `wait TEXT`
// waits until the output since the last step has TEXT; `send TEXT` types it (^C, ^Z, ^\ and ^M for
// keys); `hangup` takes the terminal away. Then the program prints all output and how the command
// ended.
#define _GNU_SOURCE
#include <errno.h>
#include <poll.h>
#include <pty.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/wait.h>
#include <termios.h>
#include <time.h>
#include <unistd.h>

static char seen[1 << 20];
static size_t length, since;

// Takes what the terminal shows, for at most `milliseconds`. Returns 0 at its end.
static int look(int terminal, int milliseconds) {
    struct pollfd fd = {terminal, POLLIN, 0};
    if (poll(&fd, 1, milliseconds) <= 0)
        return 1;
    ssize_t got = read(terminal, seen + length, sizeof seen - length - 1);
    if (got <= 0)
        return 0;
    length += (size_t)got;
    return 1;
}

static void await(int terminal, const char *text) {
    time_t began = time(NULL);
    char *found;
    while ((found = memmem(seen + since, length - since, text, strlen(text))) == NULL) {
        if (time(NULL) - began > 20 || !look(terminal, 100)) {
            fprintf(stderr, "tty: no `%s` in: %s\n", text, seen + since);
            exit(99);
        }
    }
    since = (size_t)(found - seen) + strlen(text);
}

static void type(int terminal, const char *text) {
    for (; *text; text++) {
        char key = *text;
        if (key == '^' && text[1])
            key = (char)(*++text & 0x1f);
        if (write(terminal, &key, 1) != 1)
            exit(98);
    }
}

int main(int argc, char **argv) {
    int at = 1, terminal;
    while (at < argc && strcmp(argv[at], "--") != 0)
        at++;
    pid_t child = forkpty(&terminal, NULL, NULL, NULL);
    if (child == 0) {
        // A key that is a signal does not discard what the program prints because of it, and is not
        // shown before or after that.
        struct termios mode;
        tcgetattr(0, &mode);
        mode.c_lflag = (mode.c_lflag | NOFLSH) & ~ECHO;
        tcsetattr(0, TCSANOW, &mode);
        // As in a fresh session. A shell that runs the tests as a background job ignores these
        // signals.
        signal(SIGINT, SIG_DFL);
        signal(SIGQUIT, SIG_DFL);
        signal(SIGHUP, SIG_DFL);
        execvp(argv[at + 1], argv + at + 1);
        _exit(97);
    }
    for (int step = 1; step < at;) {
        if (strcmp(argv[step], "hangup") == 0) {
            close(terminal);
            terminal = -1;
            step++;
        } else if (strcmp(argv[step], "wait") == 0) {
            await(terminal, argv[step + 1]);
            step += 2;
        } else {
            type(terminal, argv[step + 1]);
            step += 2;
        }
    }
    while (terminal >= 0 && look(terminal, 20000))
        ;
    int status;
    waitpid(child, &status, 0);
    fwrite(seen, 1, length, stdout);
    if (WIFSIGNALED(status))
        printf("\n[signal %d]\n", WTERMSIG(status));
    else
        printf("\n[exit %d]\n", WEXITSTATUS(status));
    return 0;
}
