// Gives up rights in the middle of its work, in the ways programs do. Checks its memory before and
// after.
//
//   rights drop      root becomes user 65534: no thread of this process may have more rights
//   rights tsync     a filter on all threads that kills a thread that calls ioctl. It must be
//                    installed, and must kill no thread
//   rights filter    the same filter on this thread alone
//   rights none      gives up nothing
//
// Status 0: all is as on a plain system.
#define _GNU_SOURCE
#include <dirent.h>
#include <errno.h>
#include <linux/audit.h>
#include <linux/filter.h>
#include <linux/seccomp.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/syscall.h>
#include <unistd.h>

#define MIB (1ul << 20)
static uint64_t *memory;
static const size_t bytes = 96 * MIB;

static uint64_t mix(uint64_t x) {
    x += 0x9e3779b97f4a7c15u;
    x = (x ^ (x >> 30)) * 0xbf58476d1ce4e5b9u;
    return x ^ (x >> 27);
}

static void fill(uint64_t turn) {
    for (size_t at = 0; at < bytes / 8; at++)
        memory[at] = mix(at + turn);
}

static void verify(uint64_t turn) {
    for (size_t at = 0; at < bytes / 8; at++)
        if (memory[at] != mix(at + turn)) {
            fprintf(stderr, "word %zu is %lx\n", at, (unsigned long)memory[at]);
            exit(3);
        }
}

// Whether a thread or an agent has more than user 65534 has.
static int is_powerful(const char *status) {
    char text[4096];
    FILE *file = fopen(status, "r");
    size_t got = file ? fread(text, 1, sizeof text - 1, file) : 0;
    text[got] = 0;
    if (file)
        fclose(file);
    unsigned uid[4], gid[4], news = 0;
    unsigned long permitted = 1, effective = 1, ambient = 1;
    char *at;
    if ((at = strstr(text, "\nUid:")))
        sscanf(at, "\nUid: %u %u %u %u", uid, uid + 1, uid + 2, uid + 3);
    if ((at = strstr(text, "\nGid:")))
        sscanf(at, "\nGid: %u %u %u %u", gid, gid + 1, gid + 2, gid + 3);
    if ((at = strstr(text, "\nCapPrm:")))
        sscanf(at, "\nCapPrm: %lx", &permitted);
    if ((at = strstr(text, "\nCapEff:")))
        sscanf(at, "\nCapEff: %lx", &effective);
    if ((at = strstr(text, "\nCapAmb:")))
        sscanf(at, "\nCapAmb: %lx", &ambient);
    if ((at = strstr(text, "\nNoNewPrivs:")))
        sscanf(at, "\nNoNewPrivs: %u", &news);
    int own = uid[0] == 65534 && uid[1] == 65534 && uid[2] == 65534 && uid[3] == 65534;
    int nobodys = uid[0] >= 0xe0000000u && gid[0] == uid[0] && uid[0] == uid[1] &&
                  uid[1] == uid[2] && uid[2] == uid[3] && news == 1;
    int filtered = strstr(text, "\nSeccomp:\t2") != 0;
    if (permitted || effective || ambient || !(own || (nobodys && filtered))) {
        fprintf(stderr, "%s: it still has rights:\n%s\n", status, text);
        return 1;
    }
    return 0;
}

// Threads of this process, and agents of our parent's children, that have more.
static int powerful(void) {
    int found = 0, agents = 0;
    char path[300], line[64];
    DIR *threads = opendir("/proc/self/task");
    for (struct dirent *entry; threads && (entry = readdir(threads));) {
        snprintf(path, sizeof path, "/proc/self/task/%s/status", entry->d_name);
        found += entry->d_name[0] != '.' && is_powerful(path);
    }
    if (threads)
        closedir(threads);
    snprintf(path, sizeof path, "/proc/%d/task/%d/children", getppid(), getppid());
    FILE *children = fopen(path, "r");
    for (int pid; children && fscanf(children, "%d", &pid) == 1;) {
        snprintf(path, sizeof path, "/proc/%d/comm", pid);
        FILE *name = fopen(path, "r");
        int is = name && fgets(line, sizeof line, name) && !strcmp(line, "uc-agent\n");
        if (name)
            fclose(name);
        snprintf(path, sizeof path, "/proc/%d/status", pid);
        found += is && is_powerful(path);
        agents += is;
    }
    if (children)
        fclose(children);
    printf("agents %d\n", agents);
    return found;
}

static long no_ioctl(unsigned flags) {
    struct sock_filter code[] = {
        BPF_STMT(BPF_LD | BPF_W | BPF_ABS, offsetof(struct seccomp_data, nr)),
        BPF_JUMP(BPF_JMP | BPF_JEQ | BPF_K, SYS_ioctl, 0, 1),
        BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_KILL_PROCESS),
        BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_ALLOW),
    };
    struct sock_fprog program = {.len = 4, .filter = code};
    prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0);
    return syscall(SYS_seccomp, SECCOMP_SET_MODE_FILTER, flags, &program);
}

int main(int argc, char **argv) {
    const char *how = argc > 1 ? argv[1] : "";
    int turns = argc > 2 ? atoi(argv[2]) : 1;
    memory = mmap(0, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    fill(0);
    if (prctl(PR_GET_DUMPABLE) != 1) {
        fprintf(stderr, "the process has become undumpable\n");
        return 4;
    }
    if (!strcmp(how, "drop")) {
        if (setresgid(65534, 65534, 65534) || setresuid(65534, 65534, 65534))
            return 5;
        if (powerful())
            return 6;
    } else if (!strcmp(how, "tsync") || !strcmp(how, "filter")) {
        long result = no_ioctl(how[0] == 't' ? SECCOMP_FILTER_FLAG_TSYNC : 0);
        if (result) {
            fprintf(stderr, "the filter is refused: %ld, %s\n", result, strerror(errno));
            return 7;
        }
    } else if (strcmp(how, "none")) {
        return 2;
    }
    verify(0);
    for (int turn = 1; turn <= turns; turn++) {
        fill(turn);
        verify(turn);
    }
    return 0;
}
