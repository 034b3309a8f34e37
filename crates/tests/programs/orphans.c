// Verifies memory without end, in itself and in children of one kind, for tests that kill the
// keeper or the manager.
//
//   orphans KIND MIB EVIDENCE [SECONDS]
//
// KIND: alone (threads only), fork, _Fork, clone (raw, as fork), sysfork, vm (clone with the memory
// shared), vfork (a child borrows the memory, verifies, then executes this program anew).
//
// A wrong word is written to the file EVIDENCE, which every process has open from the start.
// EVIDENCE.count is a shared mapping: words verified by parents, by children, and children made.
// Pages are rewritten with what they hold. After SECONDS (default 60) SIGALRM ends each process, if
// it still can.
#define _GNU_SOURCE
#include <fcntl.h>
#include <pthread.h>
#include <sched.h>
#include <signal.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <unistd.h>

enum { PAGE = 4096, WORDS = PAGE / 8, CHILDREN = 3, STACK = 256 * 1024 };
static volatile uint64_t *memory;
static uint64_t pages;
static unsigned seconds = 60;
static int evidence;
static struct counts {
	uint64_t parents, children, made;
} *counts;

static uint64_t mix64(uint64_t x)
{
	x += 0x9e3779b97f4a7c15ull;
	x = (x ^ (x >> 30)) * 0xbf58476d1ce4e5b9ull;
	x = (x ^ (x >> 27)) * 0x94d049bb133111ebull;
	return x ^ (x >> 31);
}

// Even pages compress badly, odd ones well; no word is zero.
static uint64_t word_of(uint64_t page, uint64_t word)
{
	uint64_t base = mix64(page + 1);
	return (page % 2 ? base + word / 16 : mix64(base + word)) | 1;
}

static void check(uint64_t page, const char *who)
{
	for (uint64_t i = 0; i < WORDS; i++) {
		uint64_t found = memory[page * WORDS + i];
		if (found != word_of(page, i)) {
			char text[160];
			int n = snprintf(text, sizeof text, "%s %d: page %lu word %lu is %016lx, %s\n", who, getpid(),
			                 (unsigned long)page, (unsigned long)i, (unsigned long)found, found ? "WRONG" : "ZERO");
			if (write(evidence, text, n) != n)
				abort();
			_exit(86);
		}
	}
}

// Verifies `many` pages at random (0: for ever), writing some.
static void verify(uint64_t seed, uint64_t many, const char *who, uint64_t *count)
{
	for (uint64_t turn = 1; !many || turn <= many; turn++) {
		uint64_t page = mix64(seed + turn) % pages;
		check(page, who);
		if (turn % 4 == 0)
			memory[page * WORDS + turn % WORDS] = word_of(page, turn % WORDS);
		__atomic_fetch_add(count, WORDS, __ATOMIC_RELAXED);
	}
}

static void *for_ever(void *argument)
{
	verify((uint64_t)argument, 0, "thread", &counts->parents);
	return NULL;
}

// A child. Some end soon, so that the parent makes new ones all the time; some never end.
static int child(void *argument)
{
	uint64_t seed = (uint64_t)argument;
	alarm(seconds);
	verify(seed << 20, seed % CHILDREN ? 100 + seed % 7 * 100 : 0, "child", &counts->children);
	_exit(0);
}

static pid_t make(const char *kind, uint64_t seed, char *const argv[], char *stack)
{
	pid_t pid;
	if (!strcmp(kind, "fork"))
		pid = fork();
	else if (!strcmp(kind, "_Fork"))
		pid = _Fork();
	else if (!strcmp(kind, "clone"))
		pid = syscall(SYS_clone, SIGCHLD, 0, 0, 0, 0);
	else if (!strcmp(kind, "sysfork"))
		pid = syscall(SYS_fork);
	else if (!strcmp(kind, "vm"))
		return clone(child, stack + STACK, CLONE_VM | SIGCHLD, (void *)seed);
	else {
		pid = vfork();
		if (pid == 0) {
			verify(seed << 20, 100, "vfork child", &counts->children);
			// The executed program is managed anew.
			char *again[] = {argv[0], "alone", argv[2], argv[3], argv[4], NULL};
			execv("/proc/self/exe", again);
			_exit(1);
		}
		return pid;
	}
	if (pid == 0)
		child((void *)seed);
	return pid;
}

int main(int argc, char **argv)
{
	if (argc < 4)
		return 2;
	const char *kind = argv[1];
	pages = strtoull(argv[2], NULL, 10) * 256;
	if (argc > 4)
		seconds = strtoul(argv[4], NULL, 10);
	alarm(seconds);
	char name[4096];
	snprintf(name, sizeof name, "%s.count", argv[3]);
	evidence = open(argv[3], O_WRONLY | O_CREAT | O_APPEND, 0644);
	int file = open(name, O_RDWR | O_CREAT, 0644);
	if (evidence < 0 || file < 0 || ftruncate(file, PAGE))
		return 2;
	counts = mmap(NULL, PAGE, PROT_READ | PROT_WRITE, MAP_SHARED, file, 0);
	memory = mmap(NULL, pages * PAGE, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
	// Stacks of children that share the memory. They are shared, so not managed.
	char *stacks = mmap(NULL, CHILDREN * STACK, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
	if (!pages || counts == MAP_FAILED || memory == MAP_FAILED || stacks == MAP_FAILED)
		return 2;
	for (uint64_t page = 0; page < pages; page++)
		for (uint64_t i = 0; i < WORDS; i++)
			memory[page * WORDS + i] = word_of(page, i);
	pthread_t other;
	if (!strcmp(kind, "alone")) {
		if (pthread_create(&other, NULL, for_ever, (void *)7))
			return 2;
		for_ever((void *)(uint64_t)getpid());
	}
	pid_t running[CHILDREN] = {0};
	for (uint64_t seed = 1;; seed++) {
		for (int at = 0; at < CHILDREN; at++) {
			if (running[at] > 0 && waitpid(running[at], NULL, WNOHANG) == 0)
				continue;
			running[at] = make(kind, seed * CHILDREN + at, argv, stacks + at * STACK);
			if (running[at] < 0)
				return 2;
			__atomic_fetch_add(&counts->made, 1, __ATOMIC_RELAXED);
		}
		verify(seed << 40, 50, "parent", &counts->parents);
	}
}
