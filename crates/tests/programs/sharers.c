// The memory of a process that goes away lives on in a child that shares it (CLONE_VM). The child
// verifies every page afterwards.
//
//   sharers exec|die|exit MIB ROUNDS
//
// exec: the process executes this program anew. die: it is killed, in the middle of its own
// accesses. exit: it ends in order, a tenth of a second later. All happen after a random time,
// while pages leave. SIGBUS is allowed: the page was lost with the process. Status 86: a page read
// as zeros, or as another page. Prints the pages that were verified after the end of the process,
// and those of them that raised SIGBUS. The lowest pages are verified besides, and not counted.
#define _GNU_SOURCE
#include "low.h"
#include <sched.h>
#include <setjmp.h>
#include <signal.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

enum { PAGE = 4096, WORDS = PAGE / 8, STACK = 256 << 10, NOTES = 100 };

// In shared memory, which is not managed, and whose descriptor outlives an exec.
struct notes {
	int ready, gone;
	uint64_t verified, errors;
	char stack[STACK] __attribute__((aligned(16)));
};

static volatile uint64_t *memory;
static uint64_t pages;
static struct notes *notes;
static sigjmp_buf place;
static int64_t later;

static uint64_t mix64(uint64_t x)
{
	x += 0x9e3779b97f4a7c15ull;
	x = (x ^ (x >> 30)) * 0xbf58476d1ce4e5b9ull;
	x = (x ^ (x >> 27)) * 0x94d049bb133111ebull;
	return x ^ (x >> 31);
}

// No word is zero. Half of the pages compress badly.
static uint64_t word_of(uint64_t page, uint64_t word)
{
	uint64_t base = mix64(page + 1);
	return (page % 2 ? base + word / 16 : mix64(base + word)) | 1;
}

static void on_bus_error(int signal)
{
	(void)signal;
	siglongjmp(place, 1);
}

// Checks a page, and writes what it holds.
static void check(uint64_t page)
{
	for (uint64_t i = 0; i < WORDS; i++) {
		uint64_t found = memory[page * WORDS + i];
		if (found != word_of(page, i)) {
			char text[120];
			int n = snprintf(text, sizeof text, "page %lu word %lu is %016lx, %s\n", page, i, found,
			                 found ? "WRONG" : "ZERO");
			(void)!write(2, text, (size_t)n);
			_exit(86);
		}
	}
	memory[page * WORDS + page % WORDS] = word_of(page, page % WORDS);
}

static int get(int *flag) { return __atomic_load_n(flag, __ATOMIC_ACQUIRE); }
static void set(int *flag) { __atomic_store_n(flag, 1, __ATOMIC_RELEASE); }

// The child: it verifies at random until the other is gone, and then every page twice.
static int share(void *argument)
{
	volatile uint64_t turn = (uint64_t)argument << 32, page;
	alarm(60);
	while (!get(&notes->gone)) {
		page = mix64(turn++) % pages;
		if (!sigsetjmp(place, 1))
			check(page);
		set(&notes->ready);
	}
	for (page = 0; page < 2 * pages; page++) {
		if (sigsetjmp(place, 1))
			notes->errors++;
		else
			check(page % pages);
		notes->verified++;
	}
	if (later && (uint64_t)argument == 1)
		sleep(2); // the last one stays, so that its agent is seen
	for (volatile uintptr_t low = low_start; low < LOW_END; low += LOW_PAGE)
		if (low_is_mapped(low) && !sigsetjmp(place, 1) && low_wrong_word(low) < LOW_WORDS)
			_exit(86);
	_exit(0);
}

static void open_notes(int fresh)
{
	if (fresh) {
		int file = memfd_create("notes", 0);
		if (file < 0 || ftruncate(file, sizeof *notes) || dup2(file, NOTES) < 0)
			exit(2);
		close(file);
	}
	notes = mmap(NULL, sizeof *notes, PROT_READ | PROT_WRITE, MAP_SHARED, NOTES, 0);
	if (notes == MAP_FAILED)
		exit(2);
}

// Fills memory, starts the child, and verifies beside it for a random time.
static pid_t run_beside_a_sharer(uint64_t seed, int flags)
{
	memory = mmap(NULL, pages * PAGE, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
	if (memory == MAP_FAILED)
		exit(2);
	low_map();
	for (uint64_t page = 0; page < pages; page++)
		for (uint64_t i = 0; i < WORDS; i++)
			memory[page * WORDS + i] = word_of(page, i);
	signal(SIGBUS, on_bus_error);
	pid_t pid = clone(share, notes->stack + STACK, CLONE_VM | SIGCHLD | flags, (void *)seed);
	if (pid < 0)
		exit(2);
	struct timespec begin, now;
	clock_gettime(CLOCK_MONOTONIC, &begin);
	int64_t most = (int64_t)(mix64(seed) % 60000000) + later;
	for (uint64_t turn = 1;; turn++) {
		check(mix64(seed + turn) % pages);
		clock_gettime(CLOCK_MONOTONIC, &now);
		if ((now.tv_sec - begin.tv_sec) * 1000000000 + now.tv_nsec - begin.tv_nsec > most && get(&notes->ready))
			return pid;
	}
}

static int ended_well(pid_t pid)
{
	int status;
	if (waitpid(pid, &status, 0) != pid || status) {
		fprintf(stderr, "the child that shares the memory: status %x\n", status);
		return WIFEXITED(status) && WEXITSTATUS(status) == 86 ? 86 : 1;
	}
	notes->ready = notes->gone = 0;
	return 0;
}

// The process that goes away, killed by itself. The sharer is its brother.
static void die(uint64_t seed, int answer)
{
	pid_t sharer = run_beside_a_sharer(seed, CLONE_PARENT);
	if (write(answer, &sharer, sizeof sharer) == sizeof sharer) {
		if (later)
			exit(0);
		kill(getpid(), SIGKILL);
	}
	_exit(2);
}

int main(int count, char **words)
{
	if (count < 4)
		return 2;
	// After an exec: `sharers exec MIB ROUNDS CHILD`.
	int again = count > 4, answer[2], failed, status;
	long rounds = atol(words[3]);
	pages = strtoull(words[2], NULL, 10) * 256;
	open_notes(!again);
	if (again) {
		set(&notes->gone);
		if ((failed = ended_well(atoi(words[4]))))
			return failed;
	}
	if (!strcmp(words[1], "exec") && rounds > 0) {
		char left[24], child[24];
		snprintf(left, sizeof left, "%ld", rounds - 1);
		snprintf(child, sizeof child, "%d", run_beside_a_sharer((uint64_t)rounds, 0));
		char *next[] = {words[0], words[1], words[2], left, child, NULL};
		execv("/proc/self/exe", next);
		return 2;
	}
	later = strcmp(words[1], "exit") ? 0 : 100000000;
	for (; strcmp(words[1], "exec") && rounds > 0; rounds--) {
		pid_t sharer;
		if (pipe(answer))
			return 2;
		pid_t pid = fork();
		if (pid == 0)
			die((uint64_t)rounds, answer[1]);
		close(answer[1]);
		if (read(answer[0], &sharer, sizeof sharer) != sizeof sharer)
			return 2;
		close(answer[0]);
		if (waitpid(pid, &status, 0) != pid || !WIFSIGNALED(status) == !later)
			return 2;
		set(&notes->gone);
		if ((failed = ended_well(sharer)))
			return failed;
	}
	printf("%lu %lu\n", notes->verified, notes->errors);
	return 0;
}
