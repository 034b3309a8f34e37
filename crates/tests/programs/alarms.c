// alarms SECONDS: one thread writes fresh memory upwards, under pressure. A signal handler puts
// guard pages (MADV_GUARD_INSTALL) ahead of it, also while the thread waits for a fault. Status 1: a
// guard was lost. Status 77: the kernel has no guard pages.
#define _GNU_SOURCE
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/time.h>
#include <time.h>
#include <unistd.h>

#include "guards.h"

enum { PAGE = 4096, PAGES = 512, AHEAD = 40 };
static char *area;
static volatile sig_atomic_t open_for_guards, at;
static volatile unsigned char guarded[PAGES];
static unsigned seed = 1;

static void on_alarm(int number)
{
	(void)number;
	int page = at + 1 + rand_r(&seed) % AHEAD;
	if (open_for_guards && page < PAGES && madvise(area + page * PAGE, PAGE, GUARD_INSTALL) == 0)
		guarded[page] = 1;
}

int main(int count, char **arguments)
{
	watch_guards();
	sigaction(SIGALRM, &(struct sigaction){ .sa_handler = on_alarm }, NULL);
	area = mmap(NULL, PAGES * PAGE, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
	if (madvise(area, PAGE, GUARD_INSTALL) != 0)
		return 77;
	long bytes = 60 << 20, kept = 0, lost = 0;
	char *held = malloc(bytes);
	time_t end = time(NULL) + (count > 1 ? atol(arguments[1]) : 3);
	struct itimerval often = { { 0, 57 }, { 0, 57 } }, never = { { 0, 0 }, { 0, 0 } };
	while (time(NULL) < end) {
		for (long byte = 0; byte < bytes; byte += PAGE)
			held[byte]++;
		setitimer(ITIMER_REAL, &often, NULL);
		for (int round = 0; round < 40; round++) {
			madvise(area, PAGES * PAGE, GUARD_REMOVE);
			madvise(area, PAGES * PAGE, MADV_DONTNEED);
			memset((void *)guarded, 0, PAGES);
			at = 0;
			open_for_guards = 1;
			for (int page = 0; page < PAGES; page++) {
				at = page;
				if (!guarded[page])
					is_guarded(area + page * PAGE);
			}
			open_for_guards = 0;
			for (int page = 0; page < PAGES; page++)
				if (guarded[page])
					*(is_guarded(area + page * PAGE) ? &kept : &lost) += 1;
		}
		setitimer(ITIMER_REAL, &never, NULL);
	}
	printf("%ld kept, %ld lost\n", kept, lost);
	return lost != 0;
}
