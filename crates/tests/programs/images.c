// Starts program images in every way that the C library knows, and says what came of it. The output
// is the same in a plain run and under undercroft, whatever the loader of the new image can load.
//
//   images show ARG...        says what it was started with, and ends with 7
//   images maps               says whether the shim is mapped
//   images then PROGRAM ARG...    becomes PROGRAM
//   images table FOLDER       searches and failures, each in a child; FOLDER is empty
//   images ways PROGRAM       every function, with PROGRAM as the new image
//   images chroot ROOT PROGRAM    the same with another root
//   images large JOB ARG...   the job with an environment of 1.7 MiB
//   images descriptors        with all descriptors in use, with one free, with one that closes
#define _GNU_SOURCE
#include <errno.h>
#include <fcntl.h>
#include <spawn.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

#define UNUSED unused __attribute__((unused))

extern char **environ;
static char *self = "/proc/self/exe", *target;

// Differs from one run to the next.
static int is_of_the_run(const char *variable) {
    return !strncmp(variable, "UNDERCROFT_", 11) || !strncmp(variable, "XDG_STATE_HOME=", 15) ||
           !strncmp(variable, "_=", 2);
}

// The variable LD_PRELOAD without our entry, which comes last.
static const char *user_preload(const char *variable) {
    static char text[1 << 16];
    snprintf(text, sizeof text, "%s", variable);
    for (char *at = text + 11; *at;) {
        size_t length = strcspn(at, ": ");
        char *end = at + length + (at[length] != 0), kept = at[length];
        at[length] = 0;
        int is_ours = strstr(at, "libundercroft_shim") != NULL;
        at[length] = kept;
        if (is_ours) memmove(at, end, strlen(end) + 1);
        else at = end;
    }
    size_t length = strlen(text);
    if (length > 11 && (text[length - 1] == ':')) text[length - 1] = 0;
    return text;
}

static int show(int argc, char **argv) {
    unsigned long hash = 14695981039346656037ul;
    int count = 0;
    const char *preload = "";
    for (char **at = environ; *at; at++) {
        const char *variable = *at;
        if (is_of_the_run(variable)) continue;
        if (strncmp(variable, "LD_PRELOAD=", 11) == 0) {
            variable = user_preload(variable);
            if (!variable[11]) continue;
            preload = variable;
        }
        count++;
        for (; *variable; variable++) hash = (hash ^ (unsigned char)*variable) * 1099511628211ul;
        hash *= 1099511628211ul;
    }
    printf("%zu bits, %d variables %lx, preload '%s':", 8 * sizeof(void *), count, hash, preload);
    for (int at = 1; at < argc; at++) printf(" %s", argv[at]);
    printf("\n");
    return 7;
}

static int maps(void) {
    static char text[1 << 20];
    FILE *file = fopen("/proc/self/maps", "r");
    size_t got = file ? fread(text, 1, sizeof text - 1, file) : 0;
    text[got] = 0;
    printf("%s\n", strstr(text, "libundercroft_shim") ? "mapped" : "not mapped");
    return 0;
}

// A child whose output and errors go to a pipe; the parent says what came and how it ended.
static void in_child(const char *what, void (*body)(void *), void *argument) {
    int ends[2];
    char text[4096];
    if (pipe(ends)) exit(2);
    fflush(stdout);
    pid_t child = fork();
    if (child == 0) {
        dup2(ends[1], 1);
        dup2(ends[1], 2);
        close(ends[0]);
        close(ends[1]);
        body(argument);
        dprintf(1, "not started: %s\n", strerror(errno));
        _exit(1);
    }
    close(ends[1]);
    ssize_t all = 0, got;
    while ((got = read(ends[0], text + all, sizeof text - 1 - all)) > 0) all += got;
    close(ends[0]);
    text[all] = 0;
    int status;
    waitpid(child, &status, 0);
    printf("%s: status %x: %s", what, status, all ? text : "-\n");
}

static char *words[] = {"images", "show", "a", "b", "c", "d", "e", "f", NULL};

static void await(int error, pid_t child) {
    int status;
    if (error) {
        errno = error;
        return;
    }
    waitpid(child, &status, 0);
    _exit(WEXITSTATUS(status));
}

static void by_execl(void *UNUSED) { execl(target, "images", "show", "a", "b", "c", "d", "e", "f", NULL); }
static void by_execl_short(void *UNUSED) { execl(target, "images", "show", NULL); }
static void by_execlp(void *UNUSED) { execlp(target, "images", "show", "a", "b", "c", "d", "e", NULL); }
static void by_execle(void *UNUSED) {
    execle(target, "images", "show", "a", "b", "c", "d", "e", NULL, environ);
}
static void by_execv(void *UNUSED) { execv(target, words); }
static void by_execve(void *UNUSED) { execve(target, words, environ); }
static void by_execvp(void *UNUSED) { execvp(target, words); }
static void by_execvpe(void *UNUSED) { execvpe(target, words, environ); }
static void by_fexecve(void *UNUSED) { fexecve(open(target, O_RDONLY | O_CLOEXEC), words, environ); }
static void by_o_path(void *UNUSED) { fexecve(open(target, O_PATH | O_CLOEXEC), words, environ); }
static void by_execveat(void *UNUSED) { execveat(AT_FDCWD, target, words, environ, 0); }
static void by_vfork(void *UNUSED) {
    pid_t child = vfork();
    if (child == 0) {
        execve(target, words, environ);
        _exit(9);
    }
    await(0, child);
}
static void by_spawn(void *UNUSED) {
    pid_t child;
    posix_spawn_file_actions_t actions;
    posix_spawn_file_actions_init(&actions);
    posix_spawn_file_actions_addclose(&actions, 0);
    posix_spawn_file_actions_addopen(&actions, 5, "/", O_RDONLY, 0);
    posix_spawn_file_actions_adddup2(&actions, 1, 6);
    int error = posix_spawn(&child, target, &actions, NULL, words, environ);
    await(error, child);
}
static void by_spawnp(void *UNUSED) {
    pid_t child;
    int error = posix_spawnp(&child, target, NULL, NULL, words, environ);
    await(error, child);
}
static char *command(void) {
    static char text[4200];
    snprintf(text, sizeof text, "%s show x; exit 5", target);
    return text;
}
static void by_system(void *UNUSED) { _exit(WEXITSTATUS(system(command()))); }
static void by_popen(void *UNUSED) {
    char text[4096];
    FILE *pipe = popen(command(), "r");
    size_t got = pipe ? fread(text, 1, sizeof text, pipe) : 0;
    fflush(stdout);
    if (write(1, text, got) < 0) exit(2);
    _exit(WEXITSTATUS(pclose(pipe)));
}
static void by_no_environment(void *UNUSED) { execve(target, words, NULL); }

static const struct {
    const char *name;
    void (*body)(void *);
} ways[] = {{"execl", by_execl},       {"execl, short", by_execl_short},
            {"execlp", by_execlp},     {"execle", by_execle},
            {"execv", by_execv},       {"execve", by_execve},
            {"execvp", by_execvp},     {"execvpe", by_execvpe},
            {"fexecve", by_fexecve},   {"fexecve, O_PATH", by_o_path},
            {"execveat", by_execveat}, {"vfork", by_vfork},
            {"posix_spawn", by_spawn}, {"posix_spawnp", by_spawnp},
            {"system", by_system},     {"popen", by_popen},
            {"null environment", by_no_environment}};

static void all_ways(void) {
    for (size_t at = 0; at < sizeof ways / sizeof *ways; at++)
        in_child(ways[at].name, ways[at].body, NULL);
}

static void put(const char *path, const char *text, int mode) {
    int file = open(path, O_WRONLY | O_CREAT | O_TRUNC, 0600);
    if (file < 0 || write(file, text, strlen(text)) < 0) exit(2);
    fchmod(file, mode);
    close(file);
}

// A search: the value of PATH, and the name.
static const struct {
    const char *path, *name;
} searches[] = {
    {"a:b", "plain"},        // not executable in a, executable in b
    {"a:none", "plain"},     // EACCES is remembered
    {"none:a", "absent"},    // ENOENT
    {"a:b", "text"},         // no #!: /bin/sh runs it
    {"b", "folder"},         // a folder of that name
    {"a/file:b", "text"},    // a file in place of a folder
    {"", "local"},           // the empty path: this folder
    {"a::b", "local"},       // an empty part
    {":a", "local"},         // an empty part at the start
    {"a:", "local"},         // and at the end
    {"b", "./local"},        // with a slash: no search
    {"b", "b/broken"},       // its interpreter is missing
    {"b", "broken"},         //
    {"b:c", "broken"},       // and the search goes on
    {"b", "loop"},           // an interpreter that is itself a script
    {"b", "cut"},            // #! and nothing
    {"b", "elf"},            // a cut ELF file
    {"b", "empty"},          // an empty file: /bin/sh runs it
    {"b", ""},               // no name
    {"secret:b", "plain"},   // a folder that may not be searched
    {NULL, "sh"},            // no PATH at all
    {"b", "foreign"},        // a program of another machine
};

static void search(void *which) {
    size_t at = (size_t)which / 3;
    if (searches[at].path) setenv("PATH", searches[at].path, 1);
    else unsetenv("PATH");
    char *arguments[] = {"name", "-c", "echo ran $0", NULL};
    char *name = (char *)searches[at].name;
    pid_t child;
    switch ((size_t)which % 3) {
    case 0: execvp(name, arguments); break;
    case 1: execlp(name, "name", "-c", "echo ran $0", NULL); break;
    case 2:
        errno = posix_spawnp(&child, name, NULL, NULL, arguments, environ);
        await(errno, child);
    }
}

static void table(const char *folder) {
    static char foreign[64] = "\177ELF\2\1\1\0\0\0\0\0\0\0\0\0\2\0\267\0";
    if (chdir(folder)) exit(2);
    mkdir("a", 0755), mkdir("b", 0755), mkdir("c", 0755), mkdir("b/folder", 0755), mkdir("secret", 0);
    put("a/file", "x", 0644);
    put("a/plain", "#!/bin/sh\necho a\n", 0644);
    put("b/plain", "#!/bin/sh\necho b plain $0\n", 0755);
    put("b/text", "echo text $0 $1\n", 0755);
    put("local", "#!/bin/sh\necho local $0\n", 0755);
    put("b/broken", "#!/none/such -x\n", 0755);
    put("c/broken", "#! \t /bin/sh -e\necho c broken $0\n", 0755);
    put("b/loop", "#!b/plain second\n", 0755);
    put("b/cut", "#!", 0755);
    put("b/elf", "\177ELF", 0755);
    put("b/empty", "", 0755);
    int file = open("b/foreign", O_WRONLY | O_CREAT, 0755);
    if (write(file, foreign, sizeof foreign) < 0) exit(2);
    close(file);
    // Root may search everything.
    if (geteuid() == 0 && (setgid(65534) || setuid(65534))) exit(2);
    for (size_t which = 0; which < 3 * sizeof searches / sizeof *searches; which++) {
        char name[64];
        snprintf(name, sizeof name, "%zu.%zu %s", which / 3, which % 3, searches[which / 3].name);
        in_child(name, search, (void *)which);
    }
}

// Fills the table of descriptors; `spare` stay free, and the last one closes at exec if `closes`.
static void filled(int spare, int closes) {
    struct rlimit limit = {16, 16};
    if (setrlimit(RLIMIT_NOFILE, &limit)) exit(2);
    int last = 2;
    for (int file; (file = dup(1)) >= 0; last = file) {}
    for (int at = 0; at < spare; at++) close(last - at);
    if (closes) fcntl(last, F_SETFD, FD_CLOEXEC);
    execl(self, "images", "show", NULL);
}
static void none_free(void *UNUSED) { filled(0, 0); }
static void one_closes(void *UNUSED) { filled(0, 1); }
static void one_free(void *UNUSED) { filled(1, 0); }

// As much as the kernel takes with a stack of 8 MiB.
static void enlarge(void) {
    enum { COUNT = 16000, LENGTH = 100 };
    size_t old = 0;
    while (environ[old]) old++;
    char **all = malloc((old + COUNT + 1) * sizeof *all), *text = malloc(COUNT * LENGTH);
    if (!all || !text) exit(2);
    memset(text, 'x', COUNT * LENGTH);
    for (size_t at = 0; at < COUNT; at++) {
        char *variable = all[at] = text + at * LENGTH;
        variable[snprintf(variable, LENGTH, "WORD_%zu=", at)] = 'x';
        variable[LENGTH - 1] = 0;
    }
    memcpy(all + COUNT, environ, (old + 1) * sizeof *all);
    environ = all;
}

int main(int argc, char **argv) {
    if (argc > 1 && !strcmp(argv[1], "large")) enlarge(), argc--, argv++;
    const char *job = argc > 1 ? argv[1] : "";
    static char own[4096];
    if (readlink("/proc/self/exe", own, sizeof own - 1) > 0) self = own;
    if (!strcmp(job, "show")) return show(argc, argv);
    if (!strcmp(job, "maps")) return maps();
    if (!strcmp(job, "then") && argc > 2) {
        execv(argv[2], argv + 2);
        return 1;
    }
    if (!strcmp(job, "table") && argc > 2) return table(argv[2]), 0;
    if (!strcmp(job, "ways") && argc > 2) return target = argv[2], all_ways(), 0;
    if (!strcmp(job, "chroot") && argc > 3) {
        if (chroot(argv[2]) || chdir("/")) return 2;
        return target = argv[3], all_ways(), 0;
    }
    if (!strcmp(job, "descriptors")) {
        in_child("none free", none_free, NULL);
        in_child("one that closes", one_closes, NULL);
        in_child("one free", one_free, NULL);
        return 0;
    }
    return 64;
}
