// guest_redis MIB OPS: the first process of a virtual machine whose file system has /redis-server.
// Fills redis and memory of its own with as many MiB each. Then, three times: a child changes and
// reads random values while this process compares every word of its own memory and changes a part;
// then every value is compared. Says what it found, and ends the machine.
#include <fcntl.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/mount.h>
#include <sys/reboot.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/un.h>
#include <sys/wait.h>
#include <unistd.h>

enum { WORDS = 512, ROUNDS = 3, BYTES = 4000, AT_ONCE = 16 };

static uint64_t keys, random_state = 1;
static uint32_t *version; // of each value; shared with the child
static uint64_t *wrong;
static FILE *to, *from; // redis

static void fail(const char *what) {
    printf("guest: %s failed\n", what), fflush(stdout), reboot(RB_AUTOBOOT);
    exit(1);
}

// Half of the pages compress badly.
static uint64_t word(uint64_t key, uint64_t at) {
    return key % 2 ? (key << 9 | at) * 0x9e3779b97f4a7c15u : key + at / 64;
}

static void value(uint64_t key, uint64_t *bytes) {
    for (uint64_t at = 0; at < BYTES / 8; at++) bytes[at] = word(key * 7919 + version[key] * 2, at);
}

static uint64_t next_random(void) {
    random_state ^= random_state << 13, random_state ^= random_state >> 7, random_state ^= random_state << 17;
    return random_state;
}

static void join(void) {
    struct sockaddr_un at = {AF_UNIX, "/redis"};
    int fd = socket(AF_UNIX, SOCK_STREAM, 0);
    for (int tries = 0; connect(fd, (struct sockaddr *)&at, sizeof at); tries++)
        if (tries == 600) fail("connecting to redis");
        else usleep(100000);
    to = fdopen(fd, "w"), from = fdopen(dup(fd), "r");
    if (!to || !from) fail("a stream");
}

static void expect(const char *answer) {
    char line[64];
    if (!fgets(line, sizeof line, from) || strcmp(line, answer)) fail(answer);
}

static void set(uint64_t key) {
    uint64_t bytes[BYTES / 8];
    value(key, bytes);
    fprintf(to, "*3\r\n$3\r\nSET\r\n$8\r\n%08lu\r\n$%d\r\n", key, BYTES);
    fwrite(bytes, BYTES, 1, to), fputs("\r\n", to);
}

static void get(uint64_t key) { fprintf(to, "*2\r\n$3\r\nGET\r\n$8\r\n%08lu\r\n", key); }

static void check(uint64_t key) {
    uint64_t bytes[BYTES / 8], right[BYTES / 8];
    value(key, right);
    expect("$4000\r\n");
    if (fread(bytes, BYTES, 1, from) != 1) fail("reading a value");
    *wrong += !!memcmp(bytes, right, BYTES);
    expect("\r\n");
}

// Reads or changes values of `all`, or as many random ones.
static void use(uint64_t count, int all, int changes) {
    for (uint64_t done = 0; done < count; done += AT_ONCE) {
        uint64_t key[AT_ONCE], set_it[AT_ONCE], some = count - done < AT_ONCE ? count - done : AT_ONCE;
        for (uint64_t at = 0; at < some; at++) {
            key[at] = all ? done + at : next_random() % keys;
            set_it[at] = changes && (all || next_random() % 2);
            for (uint64_t other = 0; other < at; other++) // a batch sees each value once
                if (key[other] == key[at]) set_it[at] = set_it[other];
            if (set_it[at]) version[key[at]] += 1;
        }
        for (uint64_t at = 0; at < some; at++) set_it[at] ? set(key[at]) : get(key[at]);
        fflush(to);
        for (uint64_t at = 0; at < some; at++) set_it[at] ? expect("+OK\r\n") : check(key[at]);
    }
}

int main(int argc, char **argv) {
    if (argc < 3) fail("counting the arguments");
    uint64_t pages = atol(argv[1]) * 256, ops = atol(argv[2]), bad = 0;
    keys = pages;
    mount("none", "/dev", "devtmpfs", 0, 0), mount("none", "/proc", "proc", 0, 0);
    int shared = MAP_SHARED | MAP_ANONYMOUS, both = PROT_READ | PROT_WRITE;
    version = mmap(0, keys * 4, both, shared, -1, 0), wrong = mmap(0, 4096, both, shared, -1, 0);
    uint64_t *memory = mmap(0, pages * 4096, both, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (!fork()) {
        int null = open("/dev/null", O_RDWR);
        dup2(null, 0), dup2(null, 1);
        execl("/redis-server", "redis-server", "--port", "0", "--unixsocket", "/redis", "--save", "", "--dir", "/", NULL);
        fail("starting redis");
    }
    join();
    for (uint64_t at = 0; at < pages * WORDS; at++) memory[at] = word(at / WORDS, at % WORDS);
    use(keys, 1, 1);
    for (uint64_t round = 1; round <= ROUNDS; round++) {
        pid_t child = fork();
        if (!child) join(), random_state = round, use(ops, 0, 1), _exit(0);
        for (uint64_t page = 0; page < pages; page++) {
            uint64_t *at = memory + page * WORDS, key = page + (page % 4 ? 0 : round);
            for (uint64_t i = 0; i < WORDS; i++) {
                bad += at[i] != word(page + (page % 4 ? 0 : round - 1), i);
                if (page % 4 == 0) at[i] = word(key, i);
            }
        }
        int status;
        if (waitpid(child, &status, 0) != child || status) fail("the load");
        use(keys, 1, 0);
        printf("guest: round %lu, %lu pages, %lu words wrong, %lu values, %lu values wrong\n", round, pages, bad, keys,
               *wrong);
        fflush(stdout);
    }
    reboot(RB_AUTOBOOT);
    return 1;
}
