// lingers end|kill|x: starts fork children, each of which ends, is killed or calls exec as soon as it
// runs. Status 86: 0.1 s after the last one has ended, agents of several are still there.
#include "pages.h"
#include <dirent.h>
#include <signal.h>
#include <string.h>
#include <sys/wait.h>

enum { MIB = 32, CHILDREN = 40, LOOKS = 10, PAUSE_US = 10000, OWN = 1, ENDING = 1 };

static int agents(void) {
    DIR *all = opendir("/proc");
    int found = 0;
    for (struct dirent *one; all && (one = readdir(all));) {
        char path[300], text[256] = "";
        snprintf(path, sizeof path, "/proc/%s/stat", one->d_name);
        FILE *file = fopen(path, "r");
        if (!file) continue;
        size_t bytes = fread(text, 1, sizeof text - 1, file);
        fclose(file);
        char *name = bytes ? strstr(text, "(uc-agent) ") : NULL;
        if (!name || name[11] == 'Z') continue;
        snprintf(path, sizeof path, "/proc/%s/cmdline", one->d_name);
        if (!(file = fopen(path, "r"))) continue;
        bytes = fread(text, 1, sizeof text - 1, file);
        fclose(file);
        text[bytes] = 0;
        found += strstr(text, "lingers") != NULL;
    }
    if (all) closedir(all);
    return found;
}

int main(int count, char **values) {
    if (count != 2 || !filled_pages(MIB)) return 2;
    char way = values[1][0];
    for (int child = 0; child < CHILDREN; child++) {
        int ready[2];
        if (pipe(ready)) return 3;
        pid_t pid = fork();
        if (pid < 0) return 4;
        if (pid == 0) {
            close(ready[0]);
            if (way == 'x') execl("/bin/true", "true", NULL);
            if (way == 'e') _exit(0);
            if (write(ready[1], "", 1) == 1) pause();
            _exit(5);
        }
        close(ready[1]);
        char byte;
        if (way == 'k' && (read(ready[0], &byte, 1) != 1 || kill(pid, SIGKILL))) return 6;
        close(ready[0]);
        int status;
        if (waitpid(pid, &status, 0) != pid || status != (way == 'k' ? SIGKILL : 0)) return 7;
    }
    int left = agents();
    for (int look = 0; look < LOOKS && left > OWN + ENDING; look++) {
        usleep(PAUSE_US);
        left = agents();
    }
    printf("agents %d\n", left);
    for (uint64_t page = 0; page < pages; page++) check(page, 0);
    return left > OWN + ENDING ? WRONG : 0;
}
