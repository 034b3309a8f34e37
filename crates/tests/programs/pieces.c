// pieces MIB TRIES: a mapping grows at its end while it is managed, so that a plain kernel has one
// mapping and the manager's has two. Then mremap moves across both.
//
// Beside MIB of memory in use, each try maps two ranges side by side and fills the second before
// anything else can run: real-time threads have all processors. The second range is registered
// later, and has pages of its own then, so the two never merge. Where a split was made, it is moved
// by mremap: grown anywhere, grown to a fixed place, shrunk, and moved in vain, because the process
// may have no more memory. Every byte must be right, wherever it is.
//
// Prints the tries, the splits, and the moves. Status 1: wrong bytes, or another answer than a plain
// kernel's. Status 77: no real-time priority.
#define _GNU_SOURCE
#include <errno.h>
#include <pthread.h>
#include <sched.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/resource.h>
#include <unistd.h>

enum { PAGE = 4096, FIRST = 40, SECOND = 24, BOTH = FIRST + SECOND, MORE = 16, CPUS = 64 };
static volatile int busy, release;

static uint64_t word_of(uint64_t try, uint64_t page) { return (try * BOTH + page) * 0x9e3779b97f4a7c15ull | 1; }

static void fill(char *at, uint64_t try, uint64_t from, uint64_t to)
{
	for (uint64_t page = from; page < to; page++)
		for (uint64_t i = 0; i < PAGE / 8; i++)
			((volatile uint64_t *)(at + page * PAGE))[i] = word_of(try, page) + i / 16;
}

static void expect(const char *what, char *at, uint64_t try, uint64_t pages, uint64_t all)
{
	for (uint64_t page = 0; page < all; page++)
		for (uint64_t i = 0; i < PAGE / 8; i++) {
			uint64_t found = ((volatile uint64_t *)(at + page * PAGE))[i];
			if (found != (page < pages ? word_of(try, page) + i / 16 : 0)) {
				fprintf(stderr, "%s: page %lu word %lu is %lx\n", what, page, i, found);
				exit(1);
			}
		}
}

static int be_urgent(int policy, int priority)
{
	struct sched_param param = { .sched_priority = priority };
	return sched_setscheduler(0, policy, &param);
}

// Has a processor, and nothing else runs there.
static void *occupy(void *cpu)
{
	cpu_set_t set;
	CPU_ZERO(&set);
	CPU_SET((long)cpu, &set);
	if (sched_setaffinity(0, sizeof set, &set) || be_urgent(SCHED_FIFO, 50))
		exit(77);
	__atomic_add_fetch(&busy, 1, __ATOMIC_SEQ_CST);
	while (!release)
		;
	return NULL;
}

// Maps and fills the second range, with a processor for the caller and one for each other thread.
static void grow(char *at, uint64_t try, const long *cpus, long count)
{
	pthread_t threads[CPUS];
	cpu_set_t set, before;
	sched_getaffinity(0, sizeof before, &before);
	CPU_ZERO(&set);
	CPU_SET(cpus[0], &set);
	busy = release = 0;
	for (long i = 1; i < count; i++) // before this thread is real-time: they would inherit that
		if (pthread_create(&threads[i], NULL, occupy, (void *)cpus[i]))
			exit(2);
	while (busy < count - 1)
		usleep(100);
	if (sched_setaffinity(0, sizeof set, &set) || be_urgent(SCHED_FIFO, 50))
		exit(77);
	char *second = mmap(at + FIRST * PAGE, SECOND * PAGE, PROT_READ | PROT_WRITE,
	                    MAP_PRIVATE | MAP_ANONYMOUS | MAP_FIXED_NOREPLACE, -1, 0);
	fill(at, try, FIRST, BOTH);
	release = 1;
	if (second != at + FIRST * PAGE || be_urgent(SCHED_OTHER, 0))
		exit(2);
	for (long i = 1; i < count; i++)
		pthread_join(threads[i], NULL);
	sched_setaffinity(0, sizeof before, &before);
}

static int mappings_of(const char *from, uint64_t pages)
{
	FILE *file = fopen("/proc/self/maps", "r");
	char line[512];
	unsigned long start, end;
	int count = 0;
	while (file && fgets(line, sizeof line, file))
		if (sscanf(line, "%lx-%lx", &start, &end) == 2)
			count += start < (unsigned long)from + pages * PAGE && end > (unsigned long)from;
	if (file)
		fclose(file);
	return count;
}

static unsigned long size_in_pages(void)
{
	FILE *file = fopen("/proc/self/statm", "r");
	unsigned long size = 0;
	if (!file || fscanf(file, "%lu", &size) != 1)
		exit(2);
	fclose(file);
	return size;
}

static void refuse(const char *what)
{
	perror(what);
	exit(1);
}

// The process may not grow: the first piece moves, the last one is refused, and the first goes back.
static void move_in_vain(char *at, char *to, uint64_t try)
{
	struct rlimit before, tight;
	getrlimit(RLIMIT_AS, &before);
	tight = before;
	tight.rlim_cur = (size_in_pages() + 256) * PAGE;
	setrlimit(RLIMIT_AS, &tight);
	void *moved = mremap(at, BOTH * PAGE, 64ul << 20, MREMAP_MAYMOVE | MREMAP_FIXED, to);
	int error = errno;
	setrlimit(RLIMIT_AS, &before);
	if (moved != MAP_FAILED || error != ENOMEM) {
		fprintf(stderr, "a move beyond the limit gave %p, %s\n", moved, strerror(error));
		exit(1);
	}
	expect("after a move in vain", at, try, BOTH, BOTH);
}

int main(int count, char **words)
{
	if (count < 3)
		return 2;
	uint64_t mib = strtoul(words[1], NULL, 0), tries = strtoul(words[2], NULL, 0), split = 0, moves = 0;
	cpu_set_t allowed;
	long cpus[CPUS], known = 0;
	sched_getaffinity(0, sizeof allowed, &allowed);
	for (long cpu = 0; cpu < CPU_SETSIZE && known < CPUS; cpu++)
		if (CPU_ISSET(cpu, &allowed))
			cpus[known++] = cpu;
	char *held = malloc(mib << 20);
	memset(held, 7, mib << 20);
	for (uint64_t try = 1; try <= tries; try++) {
		char *at = (char *)0x200000000000 + (try << 32), *to = at + (1ul << 31);
		if (mmap(at, FIRST * PAGE, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_FIXED_NOREPLACE, -1, 0) != at)
			return 2;
		fill(at, try, 0, FIRST);
		usleep(150000); // it is registered now
		grow(at, try, cpus, known);
		usleep(150000);
		for (uint64_t page = 0; page < mib << 8; page += 3) // have pages leave
			held[page * PAGE]++, held[page * PAGE]--;
		uint64_t pages = BOTH, grown = BOTH + MORE;
		if (mappings_of(at, BOTH) > 1) {
			split++;
			move_in_vain(at, to, try);
		}
		char *moved;
		switch (try % 3) {
		case 0: // anywhere
			moved = mremap(at, BOTH * PAGE, (1ul << 31) + BOTH * PAGE, MREMAP_MAYMOVE);
			break;
		case 1: // to a fixed place
			moved = mremap(at, BOTH * PAGE, grown * PAGE, MREMAP_MAYMOVE | MREMAP_FIXED, to);
			break;
		default: // a part of the second piece is cut off
			pages = grown = FIRST + SECOND / 2;
			moved = mremap(at, BOTH * PAGE, grown * PAGE, MREMAP_MAYMOVE | MREMAP_FIXED, to);
		}
		if (moved == MAP_FAILED)
			refuse("mremap across two pieces");
		moves++;
		expect("after a move", moved, try, pages, grown);
		if (moved != at && mappings_of(at, BOTH)) {
			fprintf(stderr, "something is left at the old place\n");
			return 1;
		}
	}
	for (uint64_t at = 0; at < mib << 20; at += PAGE)
		if (held[at] != 7)
			return 1;
	printf("%lu %lu %lu\n", tries, split, moves);
	return 0;
}
