// drops SECONDS: a thread drops the upper half of an area, by MADV_DONTNEED, while another touches
// the lower half for the first time, upwards. Then the upper half is used. A pager that maps ahead
// may map a page that is dropped after that. Under pressure. Prints the rounds, of which there are
// enough however busy the machine is. Exit 86: a byte is wrong.
#include <pthread.h>
#include <sched.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <time.h>

enum { PAGE = 4096, HALF = 64, HELD = 60 << 20, ROUNDS_MIN = 150 };
static char *volatile area;
static volatile unsigned long asked, done;
static volatile int stop;

static void *drop(void *unused)
{
	while (!stop) {
		unsigned long now = asked;
		if (now != done)
			madvise(area + HALF * PAGE, HALF * PAGE, MADV_DONTNEED), done = now;
		else
			sched_yield();
	}
	return unused;
}

int main(int count, char **arguments)
{
	char *held = malloc(HELD);
	memset(held, 1, HELD);
	pthread_t dropper;
	pthread_create(&dropper, NULL, drop, NULL);
	unsigned long rounds = 0;
	time_t end = time(NULL) + (count > 1 ? atoi(arguments[1]) : 2);
	for (; time(NULL) < end || rounds < ROUNDS_MIN; rounds++) {
		area = mmap(NULL, 2 * HALF * PAGE, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
		volatile char *at = area;
		at[HALF * PAGE] = 0;
		for (int page = 0; page < HALF / 2; page++)
			at[page * PAGE] = 1;
		asked++;
		for (int page = HALF / 2; page < HALF; page++)
			at[page * PAGE] = 1;
		while (done != asked)
			sched_yield();
		for (int round = 0; round < 2; round++)
			for (int page = HALF; page < 2 * HALF; page++) {
				if (at[page * PAGE] != round)
					return 86;
				at[page * PAGE] = 1;
			}
		munmap(area, 2 * HALF * PAGE);
	}
	stop = 1;
	pthread_join(dropper, NULL);
	printf("%lu\n", rounds);
	return 0;
}
