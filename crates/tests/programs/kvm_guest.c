// kvm_guest MODE MIB VCPUS SEED ...: a virtual machine of our own, under KVM.
// There is no firmware and no kernel: each virtual CPU starts at CPL 3 in long mode, and runs the
// functions of the section `guest`. They, their stacks, the page tables that they are mapped by and
// their data are all in the guest's memory. That is the descriptor of UNDERCROFT_MEMORY_FD, or else
// private memory. A guest has no exception handler: a bug in it shuts the virtual CPU down.
//   race MIB VCPUS SEED VISITS BURST balloon|none
//     fills three quarters of the memory, compares it in sequence, then VISITS times picks a page and
//     increments BURST of its words, at random. Each word belongs to one virtual CPU, or to all of
//     them, which lock the bus then. What each must be follows from the seeds. `balloon`: one more
//     virtual CPU uses the last quarter, gives pages back, and looks for zeros in them. A timer
//     interrupts whichever runs. Prints: increments, words that are wrong, increments that are missing
//     in them, pages given back, pages that were zeros after that, of them wrong, interrupts.
//   control MIB VCPUS SEED VISITS BURST protect|none [huge]
//     the same under a pager of its own: what is lost if pages leave that are not protected. `huge`:
//     the memory is of pages of 2 MiB.
//   faults MIB VCPUS SEED ROUNDS
//     reads one word of each page, in random order, ROUNDS times. The monitor has filled them, as
//     from a snapshot, and all compress well. Prints JSON.
//   work MIB VCPUS SEED VISITS BURST
//     `race` without its check. Prints JSON.
//   hot MIB VCPUS SEED HOT_MIB TIMES COLD REST_US
//     the first virtual CPU reads and increments the first word of each page of the first HOT_MIB, again
//     and again, and each time reads COLD pages of the rest, in turn. SIGTERM ends that. Then all words
//     are compared. Prints `filled` before, and then how often, and words that are wrong.
//   parts MIB VCPUS SEED VISITS BURST quarter|skewed|walk
//     fills all pages. Then the first virtual CPU makes VISITS visits, each of BURST words of a page: of a
//     random one of every fourth, of any with some far more often, or of one after the other. Prints JSON:
//     how long that took, and how much memory there was, in the mean and in the last quarter of the time.
//   serve MIB 1 SEED SET_MIB BURST
//     fills the first SET_MIB, prints `filled`, and visits random pages of these, each time BURST words. Each
//     20 ms it prints seconds, visits so far, and the memory. SIGTERM ends that. Then it prints the words that
//     are wrong.
//   phases MIB 1 SEED PARTS ROUNDS SECONDS
//     uses one part of the memory after the other, each for some SECONDS, as `serve` does, with bursts of 512
//     words. A part is filled when its first phase begins, and compared when one ends. Each 20 ms it prints seconds,
//     the memory and visits so far, and at the end the words that are wrong.
//   linear MIB 1 SEED SET_MIB ROUNDS REST_US
//     a set of pages at random places of the memory, which follow each other in the program's addresses, by
//     page tables that map nothing else of it. They are filled; then, after a SIGTERM, the virtual CPU writes to
//     each in order, ROUNDS times, and rests before each. Prints `filled` before, and then the seconds of these
//     rounds, and words that are wrong.
//   product MIB 1 SEED COLUMNS ROWS
//     multiplies a matrix of random numbers, of so many rows, by one of COLUMNS times COLUMNS numbers in memory, as
//     the textbook has it. Prints the seconds of that, and what is wrong of the result and of the second matrix.
//   fill MIB VCPUS SEED: all pages are written once, each with equal words of 32 bits. Then waits for
//     its input to end.
// Status 77: no KVM here. 86: a word was wrong.
#define _GNU_SOURCE
#include <errno.h>
#include <fcntl.h>
#include <linux/kvm.h>
#include <linux/userfaultfd.h>
#include <poll.h>
#include <pthread.h>
#include <signal.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/ioctl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/time.h>
#include <time.h>
#include <unistd.h>

typedef uint64_t u64;
typedef volatile u64 word;
enum { PAGE = 4096, WORDS = 512, CPUS = 8, SLOW_TICKS = 4000, NO_KVM = 77, WRONG = 86 };
enum { FILL = 1, SAME, COMPARE, INCREMENT, BALLOON, READ, SWEEP, VISIT, WALK, SERVE, PRODUCT }; // what a virtual CPU is asked
enum { DONE = 0x10, GIVE, REST };                              // ports that it writes to
// Where things are in the guest's memory. The page tables end below 16 MiB: it has 4 GiB at most.
enum { GDT = 0x500, BOXES = 0x10000, STACKS = 0x20000, CODE = 0x40000, STATES = 0x80000, TABLES = 0x200000 };

// What monitor and virtual CPU tell each other.
struct box {
    word what, id, cpus, seed, visits, burst; // the question
    word first, pages;                         // its pages: all numbers of pages are of the memory
    word stop;                                 // the balloon ends
    word wrong, given, empty, from, to;        // the answer; what is given back
    word slow, ticks, slow_ticks;              // reads that took long, and the time of all and of those
    word counts[WORDS - 20];                   // of reads by their time, see `bucket`
};
_Static_assert(sizeof(struct box) <= PAGE, "a box is a page");

// Code of the guest: nothing outside its section is called.
#define GUEST static __attribute__((section("guest"), used, noinline, noclone))
#define BOTH static inline __attribute__((always_inline))
extern const char __start_guest[], __stop_guest[];

BOTH u64 mix(u64 x) {
    x ^= x >> 31, x *= 0x7fb5d329728ea185u, x ^= x >> 27, x *= 0x81dadef4bc2dd44du;
    return x ^ x >> 33;
}

BOTH u64 next(u64 *random) { return mix(*random += 0x9e3779b97f4a7c15u); }

// A word in the beginning. Half of the pages compress badly.
BOTH u64 begin(u64 page, u64 at) { return page % 2 ? mix(page * WORDS + at) : page / 8 + at / 64; }

// A word of a page to be incremented: one of this virtual CPU's, or the last of a stride, everybody's.
BOTH u64 place(u64 random, u64 id, u64 cpus) {
    u64 group = random % (WORDS / (cpus + 1));
    return group * (cpus + 1) + (random >> 40 & 1 ? cpus : id);
}

// Eight buckets for each power of two.
BOTH u64 bucket(u64 ticks) {
    if (ticks < 8) return ticks;
    u64 power = 63 - __builtin_clzl(ticks);
    return (power - 2) * 8 + (ticks >> (power - 3) & 7);
}

BOTH u64 clock_ticks(void) {
    uint32_t low, high;
    __asm__ volatile("lfence; rdtsc" : "=a"(low), "=d"(high)::"memory");
    return low | (u64)high << 32;
}

BOTH void out(int port) { __asm__ volatile("outb %b0, %w1" ::"a"(1), "d"(port) : "memory"); }

GUEST u64 fill(u64 page, u64 from_seed, u64 seed) {
    for (u64 at = 0; at < WORDS; at++) ((word *)(page * PAGE))[at] = from_seed ? mix(seed + at) : begin(page, at);
    return 0;
}

GUEST u64 differ(u64 page, u64 from_seed, u64 seed) {
    u64 wrong = 0;
    for (u64 at = 0; at < WORDS; at++) {
        u64 must = from_seed ? (seed ? mix(seed + at) : 0) : begin(page, at);
        wrong += ((word *)(page * PAGE))[at] != must;
    }
    return wrong;
}

GUEST void increment(struct box *box) {
    u64 random = box->seed, id = box->id, cpus = box->cpus, first = box->first, pages = box->pages;
    for (u64 visit = box->visits; visit; visit--) {
        word *page = (word *)((first + next(&random) % pages) * PAGE);
        for (u64 times = box->burst; times; times--) {
            word *at = page + place(next(&random), id, cpus);
            if ((at - page) % (cpus + 1) == cpus) {
                __asm__ volatile("lock incq %0" : "+m"(*at));
            } else {
                u64 value = *at;
                *at = value + 1;
            }
        }
    }
}

// The state of a page: 0, it is zeros; else the seed of its words.
GUEST void balloon(struct box *box) {
    u64 random = box->seed, first = box->first;
    word *states = (word *)STATES;
    while (!box->stop) {
        u64 from = next(&random) % box->pages, what = next(&random), to = from + 1 + (what >> 8) % 64;
        if ((what >> 32) % 32 == 0) to = from + 1024;
        if (to > box->pages) to = box->pages;
        if (what % 4 == 0) {
            box->from = first + from, box->to = first + to;
            out(GIVE);
            for (u64 page = from; page < to; page++) states[page] = 0;
            box->given += to - from;
            if (what & 64) continue; // it is looked at later
        }
        for (u64 page = from; page < to; page++) {
            u64 wrong = differ(first + page, 1, states[page]);
            box->wrong += wrong, box->empty += !states[page];
            if (!wrong && what % 4 == 1) states[page] = random + page, fill(first + page, 1, random + page);
        }
    }
}

// Every page once, in an order that a step without a common divisor with their number makes.
GUEST void read_all(struct box *box) {
    u64 at = box->seed % box->pages, step = box->burst, sum = 0;
    for (u64 left = box->pages; left; left--) {
        u64 before = clock_ticks();
        sum += *(word *)((box->first + at) * PAGE + (at * 8) % PAGE);
        u64 ticks = clock_ticks() - before;
        box->ticks += ticks, box->counts[bucket(ticks)]++;
        if (ticks > SLOW_TICKS) box->slow++, box->slow_ticks += ticks;
        at = (at + step) % box->pages;
    }
    box->from = sum;
}

// The first words count the sweeps: `visits` of them so far.
GUEST void sweep(struct box *box) {
    for (u64 page = box->first; page < box->first + box->pages; page++) {
        word *at = (word *)(page * PAGE);
        u64 value = *at;
        box->wrong += value != begin(page, 0) + box->visits;
        *at = value + 1;
    }
    for (u64 page = box->from; page < box->to; page++)
        box->wrong += ((word *)(page * PAGE))[WORDS / 2] != begin(page, WORDS / 2);
}

// `to`: 1, a quarter of the pages; 2, the 1024th power of a number below one; 3, `from` counts on.
GUEST void visit(struct box *box) {
    u64 random = box->seed, pages = box->pages, at = box->from, bits = 20;
    for (u64 left = box->visits; left; left--) {
        u64 drawn = next(&random), page = at++ % pages;
        if (box->to == 1) page = drawn % (pages / 4) * 4;
        if (box->to == 2) {
            u64 power = drawn >> (64 - bits);
            for (int squares = 10; squares; squares--) power = power * power >> bits;
            page = (pages * power >> bits) * 7919 % pages;
        }
        word *words = (word *)((box->first + page) * PAGE);
        for (u64 times = 0; times < box->burst; times++) words[(drawn + times) % WORDS] += 1;
    }
    box->from = at, box->seed = random;
}

// As of `sweep`, slowly, and all words of a page are not compared.
GUEST void walk(struct box *box) {
    for (u64 page = box->first; page < box->first + box->pages; page++) {
        word *at = (word *)(page * PAGE);
        out(REST);
        u64 value = *at;
        box->wrong += value != begin(page, 0) + box->visits;
        box->wrong += at[WORDS / 2] != begin(page, WORDS / 2);
        *at = value + 1;
    }
}

// Words go up by one a visit, the first of them, which counts the visits of its page, too.
GUEST void serve_all(struct box *box) {
    u64 random = box->seed;
    for (; !box->stop; box->given++) {
        word *words = (word *)((box->first + next(&random) % box->pages) * PAGE);
        for (u64 times = 0; times < box->burst; times++) words[times % WORDS] += 1;
    }
    for (u64 page = box->first; page < box->first + box->pages; page++) {
        word *words = (word *)(page * PAGE);
        u64 visits = words[0] - begin(page, 0);
        for (u64 at = 0; at < WORDS; at++) box->wrong += words[at] != begin(page, at) + visits;
    }
}

// Rows of the first matrix are drawn, and those of the result are summed up. There is one of each in memory, the
// result's behind the second matrix.
GUEST void multiply(struct box *box) {
    u64 random = box->seed, columns = box->visits;
    uint32_t *matrix = (uint32_t *)(box->first * PAGE), *row = matrix + columns * columns;
    for (u64 left = box->burst; left; left--) {
        uint32_t sum = 0;
        for (u64 j = 0; j < columns; j++) row[j] = 0;
        for (u64 k = 0; k < columns; k++) {
            uint32_t times = (uint32_t)next(&random), *of = matrix + k * columns;
            for (u64 j = 0; j < columns; j++) row[j] += times * of[j];
        }
        for (u64 j = 0; j < columns; j++) sum += row[j];
        box->given = mix(box->given + sum);
    }
}

GUEST void run(struct box *box) {
    for (;;) {
        u64 end = box->first + box->pages, what = box->what;
        if (what == INCREMENT) increment(box);
        if (what == BALLOON) balloon(box);
        if (what == READ) read_all(box);
        if (what == SWEEP) sweep(box);
        if (what == VISIT) visit(box);
        if (what == WALK) walk(box);
        if (what == SERVE) serve_all(box);
        if (what == PRODUCT) multiply(box);
        for (u64 page = box->first; page < end && what <= COMPARE; page++) {
            if (what == FILL) fill(page, 0, 0);
            if (what == COMPARE) box->wrong += differ(page, 0, 0);
            if (what == SAME)
                for (u64 at = 0; at < WORDS; at++) ((word *)(page * PAGE))[at] = page << 32 | page;
        }
        out(DONE);
    }
}

static char *memory;
static u64 bytes, cpus, seed, first, pages; // the pages are those of the data
static u64 set, rest;                        // of `linear`: pages, and microseconds
static u64 unit = PAGE;                      // bytes that the pager of `control` moves
static int fd = -1, machine, virtual[CPUS];
static struct kvm_run *runs[CPUS];
static u64 interrupts;

static void fail(const char *what) {
    perror(what);
    exit(3);
}

static struct box *box_of(u64 id) { return (void *)(memory + BOXES + id * PAGE); }

static double now(void) {
    struct timespec time;
    clock_gettime(CLOCK_MONOTONIC, &time);
    return time.tv_sec + time.tv_nsec * 1e-9;
}

static void make_memory(int shared) {
    const char *number = getenv("UNDERCROFT_MEMORY_FD");
    struct stat size;
    if (number) {
        fd = atoi(number);
        if (fstat(fd, &size) || (u64)size.st_size != bytes) errno = EINVAL, fail("the size of the memory");
    } else if (shared) {
        fd = memfd_create("guest", unit > PAGE ? MFD_HUGETLB | 21u << 26 : 0);
        if (ftruncate(fd, bytes)) fail("a memory object");
    }
    int flags = fd < 0 ? MAP_PRIVATE | MAP_ANONYMOUS : MAP_SHARED | MAP_NORESERVE;
    memory = mmap(0, bytes, PROT_READ | PROT_WRITE, flags, fd, 0);
    if (memory == MAP_FAILED || madvise(memory, bytes, MADV_DONTFORK)) fail("map the memory");
}

// Maps each page of the guest to itself, by pages of 4 KiB.
static void make_tables(void) {
    u64 *top = (u64 *)(memory + TABLES), *next_level = top + WORDS, *levels = next_level + WORDS;
    u64 gigabytes = (bytes + (1u << 30) - 1) >> 30, low = TABLES + (2 + gigabytes) * PAGE;
    top[0] = (TABLES + PAGE) | 7;
    for (u64 at = 0; at < gigabytes; at++) next_level[at] = (TABLES + (2 + at) * PAGE) | 7;
    for (u64 at = 0; at < bytes >> 21; at++) levels[at] = (low + at * PAGE) | 7;
    for (u64 at = 0; at < bytes / PAGE; at++) ((u64 *)(memory + low))[at] = at * PAGE | 7;
    first = (low + (bytes >> 21) * PAGE) / PAGE, pages = bytes / PAGE - first;
}

static u64 *table(u64 number) { return (u64 *)(memory + TABLES + number * PAGE); }

static u64 to_table(u64 number) { return (TABLES + number * PAGE) | 7; }

// Maps the lowest 2 MiB to themselves, and the set at 1 TiB: its pages are anywhere above the tables.
static void make_scattered_tables(void) {
    u64 random = seed, end = bytes / PAGE, low = TABLES / PAGE + 6 + (set + WORDS - 1) / WORDS;
    char *taken = calloc(end, 1);
    table(0)[0] = to_table(1), table(1)[0] = to_table(2), table(2)[0] = to_table(3);
    table(0)[2] = to_table(4), table(4)[0] = to_table(5);
    for (u64 at = 0; at < WORDS; at++) table(3)[at] = at * PAGE | 7;
    for (u64 at = 0; at < set; at++) {
        u64 page;
        do page = low + next(&random) % (end - low);
        while (taken[page]);
        taken[page] = 1, table(6 + at / WORDS)[at % WORDS] = page * PAGE | 7;
        table(5)[at / WORDS] = to_table(6 + at / WORDS);
    }
    free(taken);
    first = 2ul << 27, pages = set;
}

static void make_code(void) {
    static const u64 segments[] = {0, 0xaffb000000ffff, 0xcff3000000ffff}; // code and data of CPL 3
    memcpy(memory + GDT, segments, sizeof segments);
    memcpy(memory + CODE, __start_guest, __stop_guest - __start_guest);
}

static void make_cpu(u64 id, int kvm) {
    static struct { struct kvm_cpuid2 head; struct kvm_cpuid_entry2 entries[256]; } features = {.head = {.nent = 256}};
    int cpu = virtual[id] = ioctl(machine, KVM_CREATE_VCPU, id);
    if (cpu < 0) fail("a virtual CPU");
    runs[id] = mmap(0, ioctl(kvm, KVM_GET_VCPU_MMAP_SIZE, 0), PROT_READ | PROT_WRITE, MAP_SHARED, cpu, 0);
    features.head.nent = 256;
    if (ioctl(kvm, KVM_GET_SUPPORTED_CPUID, &features) || ioctl(cpu, KVM_SET_CPUID2, &features)) fail("CPUID");
    struct kvm_sregs state;
    if (ioctl(cpu, KVM_GET_SREGS, &state)) fail("registers");
    struct kvm_segment code = {.limit = ~0u, .selector = 8 | 3, .type = 11, .present = 1, .dpl = 3};
    code.s = code.l = code.g = 1;
    struct kvm_segment data = code, task = code;
    data.selector = 16 | 3, data.type = 3, data.l = 0, data.db = 1;
    task.selector = 0x28, task.s = task.l = task.dpl = 0;
    state.cs = code, state.tr = task;
    state.ds = state.es = state.fs = state.gs = state.ss = data;
    state.gdt.base = GDT, state.gdt.limit = 23;
    state.cr3 = TABLES, state.cr4 = 0x620, state.cr0 = 0x80000033, state.efer = 0x500;
    struct kvm_regs start = {.rdi = BOXES + id * PAGE, .rsp = STACKS + (id + 1) * 2 * PAGE - 8, .rflags = 0x3002};
    start.rip = CODE + (u64)((const char *)run - __start_guest);
    if (ioctl(cpu, KVM_SET_SREGS, &state) || ioctl(cpu, KVM_SET_REGS, &start)) fail("set registers");
}

static void make_machine(int shared) {
    int kvm = open("/dev/kvm", O_RDWR | O_CLOEXEC);
    if (kvm < 0) exit(NO_KVM);
    make_memory(shared);
    if (set) make_scattered_tables();
    else make_tables();
    make_code();
    machine = ioctl(kvm, KVM_CREATE_VM, 0);
    struct kvm_userspace_memory_region all = {.memory_size = bytes, .userspace_addr = (u64)memory};
    if (machine < 0 || ioctl(machine, KVM_SET_TSS_ADDR, 0xfffbd000)) fail("a virtual machine");
    if (ioctl(machine, KVM_SET_USER_MEMORY_REGION, &all)) fail("memory of the virtual machine");
    for (u64 id = 0; id < cpus + 1; id++) make_cpu(id, kvm);
}

// The guest has said which pages it needs no more.
static void give_back(struct box *box, u64 times) {
    u64 from = box->from * PAGE, length = box->to * PAGE - from;
    int failed = times % 2 ? fallocate(fd, FALLOC_FL_PUNCH_HOLE | FALLOC_FL_KEEP_SIZE, from, length)
                           : madvise(memory + from, length, MADV_REMOVE);
    if (failed) fail("give pages back");
}

static void *cpu_runs(void *arg) {
    u64 id = (u64)arg, times = 0;
    sigset_t timer;
    sigemptyset(&timer), sigaddset(&timer, SIGALRM);
    pthread_sigmask(SIG_UNBLOCK, &timer, 0);
    for (;;) {
        if (ioctl(virtual[id], KVM_RUN, 0)) {
            if (errno != EINTR) fail("run a virtual CPU");
            __atomic_fetch_add(&interrupts, 1, __ATOMIC_RELAXED);
        } else if (runs[id]->exit_reason == KVM_EXIT_IO && runs[id]->io.port == GIVE) {
            give_back(box_of(id), times++);
        } else if (runs[id]->exit_reason == KVM_EXIT_IO && runs[id]->io.port == REST) {
            usleep(rest);
        } else if (runs[id]->exit_reason == KVM_EXIT_IO && runs[id]->io.port == DONE) {
            return 0;
        } else {
            struct kvm_regs at;
            ioctl(virtual[id], KVM_GET_REGS, &at);
            fprintf(stderr, "virtual CPU %lu stops: exit %u at %llx\n", id, runs[id]->exit_reason, at.rip);
            exit(4);
        }
    }
}

static pthread_t start(u64 id) {
    pthread_t thread;
    if (pthread_create(&thread, 0, cpu_runs, (void *)id)) fail("a thread");
    return thread;
}

static u64 seed_of(u64 id) { return mix(seed * CPUS + id); }

// All virtual CPUs do it, those of the first kinds with a share of the pages each.
static void all(u64 what, u64 visits, u64 burst) {
    pthread_t threads[CPUS];
    for (u64 id = 0; id < cpus; id++) {
        u64 from = what <= COMPARE ? pages * id / cpus : 0, to = what <= COMPARE ? pages * (id + 1) / cpus : pages;
        struct box asked = {what, id, cpus, seed_of(id), visits / cpus, burst, first + from, to - from, .wrong = 0};
        memcpy(box_of(id), &asked, sizeof asked);
        threads[id] = start(id);
    }
    for (u64 id = 0; id < cpus; id++) pthread_join(threads[id], 0);
}

static u64 sum_wrong(void) {
    u64 wrong = 0;
    for (u64 id = 0; id < cpus; id++) wrong += box_of(id)->wrong;
    return wrong;
}

// Compares every word with what its increments make of it.
static u64 check(u64 visits, u64 burst, u64 *missing) {
    u64 wrong = 0;
    uint16_t *counts = calloc(pages * WORDS, sizeof *counts);
    for (u64 id = 0; id < cpus; id++) {
        u64 random = seed_of(id);
        for (u64 visit = visits / cpus; visit; visit--) {
            u64 page = next(&random) % pages;
            for (u64 times = burst; times; times--)
                if (!++counts[page * WORDS + place(next(&random), id, cpus)]) errno = ERANGE, fail("count");
        }
    }
    for (u64 page = 0; page < pages; page++)
        for (u64 at = 0; at < WORDS; at++) {
            u64 must = begin(first + page, at) + counts[page * WORDS + at];
            u64 is = ((word *)(memory + (first + page) * PAGE))[at];
            if (is == must) continue;
            if (++wrong < 9) fprintf(stderr, "word %lu of page %lu is %lx, not %lx\n", at, first + page, is, must);
            *missing += must - is;
        }
    return wrong;
}

static void ignore(int number) { (void)number; }

static int race(u64 visits, u64 burst, const char *how) {
    struct sigaction action = {.sa_handler = ignore};
    struct itimerval often = {{0, 3000}, {0, 3000}}, never = {0};
    u64 missing = 0, wrong, increments = visits / cpus * cpus * burst;
    struct box *last = box_of(cpus);
    pthread_t thread = 0;
    sigaction(SIGALRM, &action, 0), setitimer(ITIMER_REAL, &often, 0);
    int has_balloon = !strcmp(how, "balloon");
    if (has_balloon) {
        u64 part = pages / 4;
        pages -= part;
        *last = (struct box){BALLOON, cpus, cpus, seed_of(cpus), 0, 0, first + pages, part, .stop = 0};
        thread = start(cpus);
    }
    all(FILL, 0, 0), all(COMPARE, 0, 0);
    wrong = sum_wrong();
    all(INCREMENT, visits, burst);
    last->stop = 1;
    if (has_balloon) pthread_join(thread, 0);
    setitimer(ITIMER_REAL, &never, 0);
    wrong += check(visits, burst, &missing);
    printf("%lu %lu %lu %lu %lu %lu %lu\n", increments, wrong, missing, last->given, last->empty, last->wrong,
           interrupts);
    return wrong || last->wrong ? WRONG : 0;
}

// A pager that does what the manager does, with one thread: faults and evictions are in turn.
static struct { int uffd, protects, stop; char *store, *is_away; u64 evicted, faults; } pager;

static void serve(void) {
    struct uffd_msg message;
    while (read(pager.uffd, &message, sizeof message) == sizeof message) {
        u64 flags = message.arg.pagefault.flags, at = message.arg.pagefault.address & ~(unit - 1);
        u64 page = (at - (u64)memory) / PAGE;
        struct uffdio_copy copy = {at, (u64)pager.store + page * PAGE, unit, 0, 0};
        struct uffdio_writeprotect free = {{at, unit}, 0};
        pager.faults++;
        if (flags & UFFD_PAGEFAULT_FLAG_WP) {
            if (ioctl(pager.uffd, UFFDIO_WRITEPROTECT, &free)) fail("end a protection");
        } else if (!ioctl(pager.uffd, UFFDIO_COPY, &copy)) {
            memset(pager.is_away + page, 0, unit / PAGE);
        } else if (errno != EEXIST || ioctl(pager.uffd, UFFDIO_WAKE, &free.range)) {
            fail("install a page");
        }
    }
}

static void *pages_leave(void *arg) {
    u64 random = seed, many = unit > PAGE ? unit / PAGE : 64;
    while (!__atomic_load_n(&pager.stop, __ATOMIC_RELAXED)) {
        struct pollfd some = {pager.uffd, POLLIN, 0};
        if (poll(&some, 1, 0) > 0) serve();
        u64 page = first + next(&random) % (pages / many) * many, at = page * PAGE, away = 0;
        struct uffdio_writeprotect protect = {{(u64)memory + at, many * PAGE}, UFFDIO_WRITEPROTECT_MODE_WP};
        for (u64 of = page; of < page + many; of++) away += pager.is_away[of];
        if (away) continue;
        if (pager.protects && ioctl(pager.uffd, UFFDIO_WRITEPROTECT, &protect)) fail("protect");
        if (pread(fd, pager.store + at, many * PAGE, at) != (ssize_t)(many * PAGE)) fail("read pages");
        memset(pager.is_away + page, 1, many);
        if (fallocate(fd, FALLOC_FL_PUNCH_HOLE | FALLOC_FL_KEEP_SIZE, at, many * PAGE)) fail("punch");
        ioctl(pager.uffd, UFFDIO_WAKE, &protect.range);
        pager.evicted += many;
    }
    return arg;
}

static int control(u64 visits, u64 burst, const char *how) {
    u64 many = unit / PAGE, end = (first + pages) / many * many;
    first = (first + many - 1) / many * many, pages = end - first;
    struct uffdio_api api = {.api = UFFD_API, .features = UFFD_FEATURE_WP_HUGETLBFS_SHMEM};
    pager.uffd = syscall(SYS_userfaultfd, O_CLOEXEC | O_NONBLOCK);
    struct uffdio_register data = {.range = {(u64)memory + first * PAGE, pages * PAGE}};
    data.mode = UFFDIO_REGISTER_MODE_MISSING | UFFDIO_REGISTER_MODE_WP;
    if (pager.uffd < 0 || ioctl(pager.uffd, UFFDIO_API, &api)) fail("a userfaultfd");
    pager.protects = !strcmp(how, "protect");
    pager.store = mmap(0, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    pager.is_away = calloc(bytes / PAGE, 1);
    all(FILL, 0, 0);
    if (ioctl(pager.uffd, UFFDIO_REGISTER, &data)) fail("register the memory");
    pthread_t thread;
    if (pthread_create(&thread, 0, pages_leave, 0)) fail("a thread");
    all(INCREMENT, visits, burst);
    __atomic_store_n(&pager.stop, 1, __ATOMIC_RELAXED);
    pthread_join(thread, 0);
    for (u64 page = first; page < first + pages; page += unit / PAGE)
        if (pager.is_away[page]) {
            struct uffdio_copy copy = {(u64)memory + page * PAGE, (u64)pager.store + page * PAGE, unit, 0, 0};
            if (ioctl(pager.uffd, UFFDIO_COPY, &copy)) fail("install at last");
        }
    u64 missing = 0, wrong = check(visits, burst, &missing);
    printf("%lu %lu %lu %lu %lu\n", visits / cpus * cpus * burst, wrong, missing, pager.evicted, pager.faults);
    return 0;
}

static double ticks_of_a_second(void) {
    double began = now();
    u64 ticks = clock_ticks();
    usleep(50000);
    return (clock_ticks() - ticks) / (now() - began);
}

// The time that a part of the reads that took long was below, in ticks.
static u64 quantile(const u64 *counts, double part) {
    u64 slow = 0, below = 0, from = bucket(SLOW_TICKS);
    for (u64 at = from; at < WORDS - 20; at++) slow += counts[at];
    for (u64 at = from; at < WORDS - 20; at++) {
        below += counts[at];
        if (below >= slow * part) return (8 + (at & 7)) << ((at >> 3) - 1);
    }
    return 0;
}

static int faults(u64 rounds) {
    double hertz = ticks_of_a_second();
    u64 slow = 0, slow_ticks = 0, counts[WORDS] = {0}, step = pages / 2 + 1;
    for (u64 one = 2; one <= step; one++)
        while (pages % one == 0 && step % one == 0) step++, one = 2;
    for (u64 page = first; page < first + pages; page++)
        for (u64 at = 0; at < WORDS; at++) ((word *)(memory + page * PAGE))[at] = begin(2 * page, at);
    double began = now();
    for (u64 round = 0; round < rounds; round++, seed++) {
        all(READ, 0, step);
        for (u64 id = 0; id < cpus; id++) {
            slow += box_of(id)->slow, slow_ticks += box_of(id)->slow_ticks;
            for (u64 at = 0; at < WORDS - 20; at++) counts[at] += box_of(id)->counts[at];
        }
    }
    double ns = 1e9 / hertz;
    printf("{\"reads\":%lu,\"seconds\":%.6f,\"slow\":%lu,\"mean_ns\":%.0f,", rounds * pages * cpus, now() - began, slow,
           slow ? slow_ticks * ns / slow : 0);
    printf("\"p50_ns\":%.0f,\"p90_ns\":%.0f,\"p99_ns\":%.0f}\n", quantile(counts, 0.5) * ns, quantile(counts, 0.9) * ns,
           quantile(counts, 0.99) * ns);
    return 0;
}

static int work(u64 visits, u64 burst) {
    all(FILL, 0, 0);
    double began = now();
    all(INCREMENT, visits, burst);
    double ended = now();
    all(COMPARE, 0, 0);
    printf("{\"increments_seconds\":%.6f,\"compare_seconds\":%.6f}\n", ended - began, now() - ended);
    return 0;
}

static volatile sig_atomic_t over;

static void end(int number) { over = number; }

static int hot(u64 hot_pages, u64 times, u64 cold, u64 rest) {
    u64 wrong = 0, next_cold = hot_pages, sweeps = 0;
    if (hot_pages + cold > pages) return 2;
    signal(SIGTERM, end);
    all(FILL, 0, 0);
    printf("filled\n"), fflush(stdout);
    for (; sweeps < times && !over; sweeps++, next_cold += cold) {
        if (next_cold + cold > pages) next_cold = hot_pages;
        struct box asked = {SWEEP, 0, cpus, seed, sweeps, 0, first, hot_pages, .from = first + next_cold};
        asked.to = asked.from + cold;
        memcpy(box_of(0), &asked, sizeof asked);
        pthread_join(start(0), 0);
        wrong += box_of(0)->wrong;
        usleep(rest);
    }
    for (u64 page = first; page < first + hot_pages; page++) *(word *)(memory + page * PAGE) -= sweeps;
    all(COMPARE, 0, 0);
    wrong += sum_wrong();
    printf("%lu %lu\n", sweeps, wrong);
    return wrong ? WRONG : 0;
}

// Memory that the guest has now.
static u64 resident(void) {
    struct stat now;
    return fd < 0 || fstat(fd, &now) ? bytes : (u64)now.st_blocks * 512;
}

static int parts(u64 visits, u64 burst, const char *how) {
    enum { PARTS = 200 };
    u64 kind = !strcmp(how, "quarter") ? 1 : !strcmp(how, "skewed") ? 2 : 3;
    struct box asked = {VISIT, 0, cpus, seed, visits / PARTS, burst, first, pages, .from = 0, .to = kind};
    double mean = 0, last = 0;
    all(FILL, 0, 0);
    double began = now();
    memcpy(box_of(0), &asked, sizeof asked);
    for (int part = 0; part < PARTS; part++) {
        pthread_join(start(0), 0);
        u64 memory_now = resident();
        mean += memory_now / (double)PARTS;
        if (part >= PARTS / 4 * 3) last += memory_now / (PARTS / 4.);
    }
    printf("{\"seconds\":%.6f,\"resident_bytes\":%.0f,\"resident_bytes_at_last\":%.0f}\n", now() - began, mean, last);
    return 0;
}

static int serve_requests(u64 served, u64 burst) {
    signal(SIGTERM, end);
    if (served > pages || burst % WORDS) return 2;
    pages = served;
    all(FILL, 0, 0);
    struct box asked = {SERVE, 0, cpus, seed, 0, burst, first, pages, .stop = 0};
    memcpy(box_of(0), &asked, sizeof asked);
    pthread_t thread = start(0);
    printf("filled\n");
    for (double began = now(); !over; usleep(20000)) {
        printf("%.4f %lu %lu\n", now() - began, box_of(0)->given, resident());
        fflush(stdout);
    }
    box_of(0)->stop = 1;
    pthread_join(thread, 0);
    printf("%lu wrong\n", box_of(0)->wrong);
    return box_of(0)->wrong ? WRONG : 0;
}

static int phases(u64 parts, u64 rounds, double seconds) {
    u64 wrong = 0, visits = 0, begin_at = first;
    pages /= parts;
    double began = now();
    for (u64 phase = 0; phase < rounds * parts; phase++) {
        first = begin_at + phase % parts * pages;
        double until = now() + seconds;
        if (phase < parts) all(FILL, 0, 0);
        struct box asked = {SERVE, 0, cpus, seed + phase, 0, WORDS, first, pages, .stop = 0};
        memcpy(box_of(0), &asked, sizeof asked);
        pthread_t thread = start(0);
        do {
            usleep(20000);
            printf("%.4f %lu %lu\n", now() - began, resident(), visits + box_of(0)->given);
            fflush(stdout);
        } while (now() < until);
        box_of(0)->stop = 1;
        pthread_join(thread, 0);
        wrong += box_of(0)->wrong, visits += box_of(0)->given;
    }
    printf("%lu wrong\n", wrong);
    return wrong ? WRONG : 0;
}

static int linear(u64 rounds) {
    u64 wrong = 0;
    signal(SIGTERM, end);
    all(FILL, 0, 0);
    printf("filled\n"), fflush(stdout);
    while (!over) usleep(1000);
    double began = now();
    for (u64 round = 0; round < rounds; round++) {
        struct box asked = {WALK, 0, cpus, seed, round, 0, first, pages, .wrong = 0};
        memcpy(box_of(0), &asked, sizeof asked);
        pthread_join(start(0), 0);
        wrong += box_of(0)->wrong;
    }
    printf("%.6f %lu\n", now() - began, wrong);
    return wrong ? WRONG : 0;
}

static int product(u64 columns, u64 rows) {
    u64 in_page = PAGE / 4, random = seed, must = 0;
    if (columns % in_page || columns * (columns + 1) / in_page > pages) return 2;
    pages = columns * columns / in_page;
    all(FILL, 0, 0);
    struct box asked = {PRODUCT, 0, cpus, seed, columns, rows, first, pages, .given = 0};
    memcpy(box_of(0), &asked, sizeof asked);
    double began = now();
    pthread_join(start(0), 0);
    double took = now() - began;
    uint32_t *sums = calloc(columns, sizeof *sums);
    for (u64 at = 0; at < columns * columns / 2; at++) {
        u64 both = begin(first + at / WORDS, at % WORDS);
        sums[2 * at / columns] += (uint32_t)both + (uint32_t)(both >> 32);
    }
    for (u64 left = rows; left; left--) {
        uint32_t sum = 0;
        for (u64 k = 0; k < columns; k++) sum += (uint32_t)next(&random) * sums[k];
        must = mix(must + sum);
    }
    u64 wrong = box_of(0)->given != must;
    all(COMPARE, 0, 0);
    wrong += sum_wrong();
    printf("%.6f %lu wrong\n", took, wrong);
    return wrong ? WRONG : 0;
}

int main(int argc, char **argv) {
    if (argc < 5) return 2;
    const char *mode = argv[1], *how = argc > 7 ? argv[7] : "";
    u64 visits = argc > 5 ? strtoul(argv[5], 0, 0) : 0, burst = argc > 6 ? strtoul(argv[6], 0, 0) : 1;
    bytes = strtoul(argv[2], 0, 0) << 20, cpus = strtoul(argv[3], 0, 0), seed = strtoul(argv[4], 0, 0);
    if (bytes < 32 << 20 || bytes > 1ul << 32 || !cpus || cpus >= CPUS) return 2;
    sigset_t timer;
    sigemptyset(&timer), sigaddset(&timer, SIGALRM);
    pthread_sigmask(SIG_BLOCK, &timer, 0);
    if (!strcmp(mode, "linear")) {
        if (argc < 8 || cpus != 1 || !visits || visits > 1024 || visits << 20 > bytes / 2) return 2;
        set = visits << 8, rest = strtoul(argv[7], 0, 0);
    }
    int is_control = !strcmp(mode, "control");
    if (argc > 8 && !strcmp(argv[8], "huge")) unit = 2 << 20;
    make_machine(is_control || !strcmp(how, "balloon"));
    if (is_control) return control(visits, burst, how);
    if (!strcmp(mode, "race")) return race(visits, burst, how);
    if (!strcmp(mode, "faults")) return faults(visits);
    if (!strcmp(mode, "work")) return work(visits, burst);
    if (!strcmp(mode, "product")) return cpus > 1 ? 2 : product(visits, burst);
    if (!strcmp(mode, "parts")) return parts(visits, burst, how);
    if (set) return linear(burst);
    if (!strcmp(mode, "phases")) return cpus > 1 || argc < 8 || !visits ? 2 : phases(visits, burst, strtod(how, 0));
    if (!strcmp(mode, "serve")) return cpus > 1 ? 2 : serve_requests(visits << 8, burst);
    if (!strcmp(mode, "hot")) return argc < 9 ? 2 : hot(visits << 8, burst, atoi(argv[7]), atoi(argv[8]));
    all(SAME, 0, 0);
    printf("filled\n"), fflush(stdout);
    return getchar() == EOF ? 0 : 2;
}
