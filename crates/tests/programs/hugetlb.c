// hugetlb MIB ROUNDS: beside MIB of memory in use, mappings that cannot be managed (huge pages, shared
// memory, a file) appear between small anonymous ones, and all are touched at once, now and then first by
// a child that a raw system call made. Everything is verified.
// Prints the rounds that had a huge page. Exit 77: the kernel gives no huge page. Exit 86: other bytes
// came back. SIGALRM: a touch never ended.
#define _GNU_SOURCE
#include "pages.h"
#include <fcntl.h>
#include <signal.h>
#include <string.h>
#include <sys/syscall.h>
#include <sys/wait.h>

enum { HUGE = 2 << 20, SMALL = 16 * PAGE, AREA = 16 << 20 };

static char *put(char *at, size_t length, int flags, int file)
{
	char *made = mmap(at, length, PROT_READ | PROT_WRITE, MAP_FIXED | flags, file, 0);
	return made == MAP_FAILED ? NULL : made;
}

// Reads zeros or `old`, writes `now`, and reads it back.
static void use(volatile char *at, size_t length, char now)
{
	for (size_t byte = 0; byte < length; byte += PAGE) {
		if (at[byte]) {
			fprintf(stderr, "%p is %d, not zero\n", at + byte, at[byte]);
			_exit(WRONG);
		}
		at[byte] = now;
	}
	for (size_t byte = 0; byte < length; byte += PAGE)
		if (at[byte] != now)
			_exit(WRONG);
}

static void child_uses(char *page, char *shared)
{
	int status, pid = syscall(SYS_clone, SIGCHLD, 0, 0, 0, 0);
	if (!pid) {
		alarm(20);
		if (*(volatile char *)shared)
			_exit(WRONG);
		use(page, HUGE, 8);
		_exit(0);
	}
	if (waitpid(pid, &status, 0) != pid || status) {
		fprintf(stderr, "a child ended with %#x\n", status);
		_exit(WIFEXITED(status) ? WEXITSTATUS(status) : 4);
	}
}

int main(int count, char **arguments)
{
	if (count != 3 || !filled_pages(strtoul(arguments[1], NULL, 0)))
		return 2;
	char *area = mmap(NULL, AREA, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
	char *huge = (char *)(((uintptr_t)area + 2 * HUGE) & -(uintptr_t)HUGE);
	int file = memfd_create("file", 0), had = 0;
	if (area == MAP_FAILED || file < 0)
		return 2;
	for (int round = 0; round < atoi(arguments[2]); round++) {
		alarm(20);
		// All of it is free, so what is mapped now lies in one gap between two mappings.
		munmap(area, AREA);
		int private = MAP_PRIVATE | MAP_ANONYMOUS;
		char *page = put(huge, HUGE, private | MAP_HUGETLB, -1);
		char *below = put(huge - SMALL, SMALL, private, -1), *above = put(huge + HUGE, SMALL, private, -1);
		char *shared = put(above + SMALL, SMALL, MAP_SHARED | MAP_ANONYMOUS, -1);
		char *next = put(above + 2 * SMALL, SMALL, private, -1);
		if (ftruncate(file, 0) || ftruncate(file, SMALL))
			return 2;
		char *mapped = put(above + 3 * SMALL, SMALL, round & 1 ? MAP_SHARED : MAP_PRIVATE, file);
		char *last = put(above + 4 * SMALL, SMALL, private, -1);
		if (!page && !round)
			return 77;
		if (!below || !above || !shared || !next || !mapped || !last)
			return 2;
		had += page != NULL;
		if (page && round % 16 == 0)
			child_uses(page, shared);
		use(below, SMALL, 1);
		if (page)
			use(page, HUGE, 2);
		use(above, SMALL, 3), use(shared, SMALL, 4), use(next, SMALL, 5), use(mapped, SMALL, 6), use(last, SMALL, 7);
		for (int at = 0; at < 64; at++)
			check(mix64(round * 64 + at) % pages, 0);
		if (put(area, AREA, private | MAP_NORESERVE, -1) != area)
			return 2;
	}
	alarm(60);
	for (uint64_t page = 0; page < pages; page++)
		check(page, 0);
	printf("%d\n", had);
	return 0;
}
