// A program that times its own waits: waits MIB REST SECONDS
//
// Goes round MIB MiB for SECONDS, and rests REST milliseconds before each MiB. So it needs many pages
// at a time. It begins each block of 64 pages somewhere in it. Each page is checked and rewritten; in
// one more round it is only checked. What that takes is a wait, apart from the time in which the thread
// was on a processor, or could run and had none.
// Prints the seconds that it waited and that passed. Status 86: a wrong word.
#define _GNU_SOURCE
#include "pages.h"
#include <fcntl.h>
#include <time.h>

enum { BLOCK = 64, PAGES_OF_MIB = 256 };

static double now(void)
{
	struct timespec time;
	clock_gettime(CLOCK_MONOTONIC, &time);
	return time.tv_sec + time.tv_nsec / 1e9;
}

// Seconds in which this thread was on a processor, or could run and had none; the kernel counts them.
static double runnable(int schedstat)
{
	char text[96] = "";
	if (pread(schedstat, text, sizeof text - 1, 0) <= 0)
		exit(2);
	char *end;
	uint64_t ran = strtoull(text, &end, 10);
	return (ran + strtoull(end, NULL, 10)) / 1e9;
}

int main(int argc, char **argv)
{
	if (argc != 4 || !map_pages(strtoull(argv[1], NULL, 10)))
		return 2;
	uint64_t rest = strtoull(argv[2], NULL, 10);
	double most = strtod(argv[3], NULL), waited = 0, passed = 0, began = now();
	int schedstat = open("/proc/thread-self/schedstat", O_RDONLY), ends = 0;
	if (schedstat < 0)
		return 2;
	random_data = 1;
	for (uint64_t round = 0; !ends; round++) {
		ends = passed >= most;
		for (uint64_t at = 0; at < pages; at++) {
			uint64_t first = mix64((round * pages + at) / BLOCK);
			uint64_t page = at / BLOCK * BLOCK + (at + first) % BLOCK;
			if (at % PAGES_OF_MIB == 0)
				usleep(rest * 1000);
			double ran = runnable(schedstat), from = now();
			if (round > 0)
				check(page, round - 1);
			if (!ends)
				fill(page, round);
			double to = now();
			waited += to - from - (runnable(schedstat) - ran);
			passed = to - began;
		}
	}
	printf("%.6f %.6f\n", waited, passed);
	return 0;
}
