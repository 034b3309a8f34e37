// beside SECONDS [brother]: one thread writes fresh memory upwards, above the limit. A process that
// shares the memory (CLONE_VM) puts guard pages (MADV_GUARD_INSTALL) ahead of it, never at the page
// that is being written. brother: it is no child, so the writer's children do not show it. Status 1: a guard was lost. Status 77: the kernel
// has no guard pages.
#define _GNU_SOURCE
#include <sched.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

#include "guards.h"

enum { PAGE = 4096, PAGES = 512, AHEAD = 40, STACK = 256 << 10 };
static char *area;
static int round_now, done, at, aim;
static volatile unsigned char guarded[PAGES];
static char *held;
static const long bytes = 60 << 20;

static int get(int *word) { return __atomic_load_n(word, __ATOMIC_ACQUIRE); }
static void set(int *word, int value) { __atomic_store_n(word, value, __ATOMIC_RELEASE); }

// The partner: a few guards a round, a little ahead of the writer.
static int put_guards(void *argument)
{
	(void)argument;
	unsigned seed = 7;
	for (int last = 0;;) {
		int now = get(&round_now);
		if (now < 0)
			_exit(0);
		if (now == last)
			continue;
		last = now;
		while (get(&round_now) == now && get(&at) < PAGES) {
			int page = get(&at) + 1 + rand_r(&seed) % AHEAD;
			__atomic_store_n(&aim, page, __ATOMIC_SEQ_CST);
			if (page < PAGES && __atomic_load_n(&at, __ATOMIC_SEQ_CST) < page && !guarded[page]
			    && syscall(SYS_madvise, area + page * PAGE, PAGE, GUARD_INSTALL) == 0)
				guarded[page] = 1;
			set(&aim, 0);
			for (volatile int spin = rand_r(&seed) % 20000; spin > 0; spin--)
				;
		}
		set(&done, now);
	}
}

// The process that writes, and may be seen to have no child.
static int writes(int seconds, int flags)
{
	area = mmap(NULL, PAGES * PAGE, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
	if (area == MAP_FAILED || madvise(area, PAGE, GUARD_INSTALL) != 0)
		return 77;
	munmap(area, PAGES * PAGE);
	char *stack = mmap(NULL, STACK, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
	held = malloc(bytes);
	memset(held, 1, bytes);
	pid_t pid = clone(put_guards, stack + STACK, CLONE_VM | SIGCHLD | flags, NULL);
	if (pid < 0)
		return 2;
	time_t end = time(NULL) + seconds;
	long kept = 0, lost = 0;
	for (int round = 1; time(NULL) < end; round++) {
		area = mmap(NULL, PAGES * PAGE, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
		set(&at, 0);
		set(&round_now, round);
		for (int page = 0; page < PAGES; page++) {
			__atomic_store_n(&at, page, __ATOMIC_SEQ_CST);
			while (__atomic_load_n(&aim, __ATOMIC_SEQ_CST) == page)
				;
			(void)is_guarded(area + page * PAGE);
		}
		set(&at, PAGES);
		while (get(&done) != round)
			;
		for (int page = 0; page < PAGES; page++)
			if (guarded[page]) {
				if (is_guarded(area + page * PAGE))
					kept++;
				else
					lost++;
				guarded[page] = 0;
			}
		munmap(area, PAGES * PAGE);
	}
	set(&round_now, -1);
	printf("%ld %ld\n", kept, lost);
	return lost != 0;
}

int main(int count, char **arguments)
{
	watch_guards();
	int seconds = count > 1 ? atoi(arguments[1]) : 3, status;
	if (count < 3) {
		int code = writes(seconds, 0);
		wait(NULL);
		return code;
	}
	pid_t pid = fork();
	if (pid == 0) {
		int code = writes(seconds, CLONE_PARENT);
		fflush(stdout);
		_exit(code);
	}
	waitpid(pid, &status, 0);
	wait(NULL);
	return WIFEXITED(status) ? WEXITSTATUS(status) : 3;
}
