// guards raw|library ROUNDS: guard pages (MADV_GUARD_INSTALL) beside ascending and descending
// writes, under pressure. raw: by system call, without the C library. Status 1: a guard was lost.
// Status 77: the kernel has no guard pages.
#define _GNU_SOURCE
#include <pthread.h>
#include <setjmp.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <unistd.h>

enum { PAGE = 4096, PAGES = 128, FIRST = 62, GUARDS = 4, GUARD_INSTALL = 102, STACK = 1 << 20 };
static __thread sigjmp_buf jump;
static int raw, kept, lost;

static void on_fault(int number)
{
	(void)number;
	siglongjmp(jump, 1);
}

static int guard(char *at, long bytes)
{
	return raw ? (int)syscall(SYS_madvise, at, bytes, GUARD_INSTALL) : madvise(at, bytes, GUARD_INSTALL);
}

static void expect_fault(volatile char *at)
{
	if (sigsetjmp(jump, 1)) {
		kept++;
		return;
	}
	*at = 1;
	lost++;
}

// Writes a stack downwards, page after page, towards the guards at its lower end.
static void *deep(void *stack)
{
	char here[8 * PAGE], *end = (char *)stack + 24 * PAGE;
	for (volatile char *at = here; (char *)at > end; at -= PAGE)
		*at = 3;
	return NULL;
}

int main(int count, char **arguments)
{
	if (count != 3)
		return 2;
	raw = !strcmp(arguments[1], "raw");
	int rounds = atoi(arguments[2]);
	char *own = malloc(64 << 10);
	sigaltstack(&(stack_t){ .ss_sp = own, .ss_size = 64 << 10 }, NULL);
	struct sigaction action = { .sa_handler = on_fault, .sa_flags = SA_NODEFER | SA_ONSTACK };
	sigaction(SIGSEGV, &action, NULL);
	long bytes = 60 << 20;
	char *held = malloc(bytes);
	for (int round = 0; round < rounds; round++) {
		memset(held, round, bytes);
		char *area = mmap(NULL, PAGES * PAGE, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
		if (guard(area + FIRST * PAGE, GUARDS * PAGE))
			return 77;
		if (round % 2)
			for (int at = PAGES - 1; at >= FIRST + GUARDS; at--)
				area[at * PAGE] = 1;
		else
			for (int at = 0; at < FIRST; at++)
				area[at * PAGE] = 1;
		for (int at = FIRST; at < FIRST + GUARDS; at++)
			expect_fault(area + at * PAGE + 5);
		munmap(area, PAGES * PAGE);

		char *stack = mmap(NULL, STACK, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_STACK, -1, 0);
		guard(stack, 16 * PAGE);
		pthread_attr_t attributes;
		pthread_attr_init(&attributes);
		pthread_attr_setstack(&attributes, stack, STACK);
		pthread_t thread;
		if (pthread_create(&thread, &attributes, deep, stack) == 0)
			pthread_join(thread, NULL);
		expect_fault(stack + 15 * PAGE);
		munmap(stack, STACK);
	}
	for (long at = 0; at < bytes; at += PAGE)
		if (held[at] != rounds - 1)
			return 3;
	printf("kept %d lost %d\n", kept, lost);
	return lost != 0;
}
