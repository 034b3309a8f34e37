// forkmove MIB SECONDS [raw]: threads move blocks to and fro between two places, another forks. Each child
// verifies the block at the place where it has it, beside MIB of memory in use. The block is out of
// memory most of the time. raw: the children are made by a raw system call, and announce nothing.
// Prints the forks, and those whose child had the block at the other place than the parent had before.
// Exit 86: other bytes came back. SIGALRM: nothing went on.
#define _GNU_SOURCE
#include "pages.h"
#include <pthread.h>
#include <sched.h>
#include <signal.h>
#include <string.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <time.h>

enum { BLOCKS = 8, BLOCK = 32, MOVERS = 4 };

static char *place[BLOCKS][2];
static volatile int at[BLOCKS], stop, go, moves, ids[MOVERS];

static uint64_t word(uint64_t block, uint64_t page, uint64_t i) { return word_of(1000000 + block * BLOCK + page, 0, i); }

static void *move(void *argument)
{
	long own = (long)argument;
	ids[own] = syscall(SYS_gettid);
	for (uint64_t turn = own; !stop; turn += MOVERS) {
		while (!go && !stop)
			usleep(20);
		int block = turn % BLOCKS, here = at[block];
		void *to = place[block][!here];
		if (mremap(place[block][here], BLOCK * PAGE, BLOCK * PAGE, MREMAP_MAYMOVE | MREMAP_FIXED, to) != to)
			_exit(3);
		at[block] = !here;
		__atomic_add_fetch(&moves, 1, __ATOMIC_RELAXED);
		usleep(10); // it may be urgent
	}
	return argument;
}

static void be_urgent(int thread) { sched_setscheduler(thread, SCHED_FIFO, &(struct sched_param){1}); }

static void be_normal(int thread) { sched_setscheduler(thread, SCHED_OTHER, &(struct sched_param){0}); }

// msync says whether something is mapped.
static int is_mapped(char *at) { return !msync(at, PAGE, MS_ASYNC); }

static int verify(int block)
{
	int here = is_mapped(place[block][0]) ? 0 : 1;
	if (!is_mapped(place[block][here]))
		_exit(4);
	volatile uint64_t *words = (volatile uint64_t *)place[block][here];
	for (uint64_t page = 0; page < BLOCK; page++)
		for (uint64_t i = 0; i < WORDS; i += 64)
			if (words[page * WORDS + i] != word(block, page, i)) {
				fprintf(stderr, "block %d page %lu word %lu is wrong: %016lx\n", block, page, i, words[page * WORDS + i]);
				_exit(WRONG);
			}
	return here;
}

int main(int count, char **arguments)
{
	int raw = count == 4, forks = 0, elsewhere = 0;
	if (count < 3 || !filled_pages(strtoul(arguments[1], NULL, 0)))
		return 2;
	for (int block = 0; block < BLOCKS; block++) {
		for (int side = 0; side < 2; side++) {
			// Nothing beside it, so it never merges with another.
			place[block][side] = mmap(NULL, (BLOCK + 2) * PAGE, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0) + PAGE;
			munmap(place[block][side], BLOCK * PAGE);
		}
		uint64_t *words = mmap(place[block][0], BLOCK * PAGE, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_FIXED, -1, 0);
		if (words == MAP_FAILED)
			return 2;
		for (uint64_t i = 0; i < BLOCK * WORDS; i++)
			words[i] = word(block, i / WORDS, i % WORDS);
	}
	// The blocks leave, and the parent does not use them again.
	for (uint64_t turn = 0; turn < 3 * pages; turn++)
		check(turn % pages, 0);
	// Whoever unlocks the address space wakes the other, who is the more urgent one and runs at once:
	// its change is reported first.
	cpu_set_t one;
	CPU_ZERO(&one);
	CPU_SET(sched_getcpu(), &one);
	sched_setaffinity(0, sizeof one, &one);
	pthread_t movers[MOVERS];
	for (long own = 0; own < MOVERS; own++)
		if (pthread_create(&movers[own], NULL, move, (void *)own))
			return 2;
	uint64_t next = 0;
	for (time_t end = time(NULL) + atoi(arguments[2]); time(NULL) < end; forks++) {
		alarm(30);
		check(next++ % pages, 0);
		int was = at[0], status;
		for (int own = 0; own < MOVERS; own++)
			(forks & 1 ? be_urgent : be_normal)(ids[own]);
		(forks & 1 ? be_normal : be_urgent)(0);
		go = 1;
		usleep(mix64(forks) % 200);
		int child = raw ? (int)syscall(SYS_clone, SIGCHLD, 0, 0, 0, 0) : fork();
		if (child < 0)
			return 5;
		go = 0;
		be_normal(0);
		if (!child) {
			alarm(30);
			int moved = verify(0) != was;
			for (int block = 1; block < BLOCKS; block++)
				verify(block);
			_exit(moved);
		}
		if (waitpid(child, &status, 0) != child || !WIFEXITED(status) || WEXITSTATUS(status) > 1) {
			fprintf(stderr, "child %d ended with %#x\n", forks, status);
			return WIFEXITED(status) ? WEXITSTATUS(status) : 6;
		}
		elsewhere += WEXITSTATUS(status);
	}
	stop = 1;
	for (int own = 0; own < MOVERS; own++)
		pthread_join(movers[own], NULL);
	for (int block = 0; block < BLOCKS; block++)
		verify(block);
	printf("%d %d %d\n", forks, elsewhere, moves);
	return 0;
}
