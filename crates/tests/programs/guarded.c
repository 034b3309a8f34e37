// guarded [FILE]: fills memory, puts a guard page (MADV_GUARD_INSTALL, by system call) in the place of
// every third of the first pages, which have left memory by then, and reads the others in order. With a
// FILE it first says `ready`, and waits until the file is there. Prints guards that are there, guards
// that are lost, and pages that are wrong. Status 1: any is lost or wrong. Status 77: the kernel has no
// guard pages.
#define _GNU_SOURCE
#include <stdio.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <unistd.h>

#include "guards.h"

enum { PAGE = 4096, PAGES = 16384, SOME = 4096 };

int main(int count, char **arguments)
{
	watch_guards();
	char *area = mmap(NULL, (long)PAGES * PAGE, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
	for (long page = 0; page < PAGES; page++)
		for (long byte = 0; byte < PAGE; byte++)
			area[page * PAGE + byte] = page % 251 + byte % 7;
	for (long page = 0; page < SOME; page += 3)
		if (syscall(SYS_madvise, area + page * PAGE, PAGE, GUARD_INSTALL))
			return 77;
	if (count > 1) {
		puts("ready");
		fflush(stdout);
		while (access(arguments[1], F_OK))
			usleep(1000);
	}
	long kept = 0, lost = 0, wrong = 0;
	for (long page = 0; page < SOME; page++)
		for (long byte = 0; page % 3 && byte < PAGE; byte += 512)
			wrong += area[page * PAGE + byte] != (char)(page % 251 + byte % 7);
	for (long page = 0; page < SOME; page += 3)
		if (is_guarded(area + page * PAGE))
			kept++;
		else
			lost++;
	printf("%ld %ld %ld\n", kept, lost, wrong);
	return lost || wrong;
}
