// A small client for tests of limits and refusals: fills memory, may go round it again, and ends as
// the options say.
//
//   touch MIB [--rounds N] [--pace US] [--random-data] [--exit N] [--signal N] [--hold SECONDS]
//         [--fork N] [--read-only MIB] [--back MIB] [--shuffle]
//
// Every page has known bytes, checked in each round (status 86 if wrong), with a pause before each
// page. Prints "ready" after the first fill. The first MIB of --read-only are only read after it. Each
// page of a round is followed by the one --back before it, which left not long ago. With --shuffle a
// round goes through the pages in a random order, which is the same in all rounds.
#define _GNU_SOURCE
#include "pages.h"
#include <signal.h>
#include <stdlib.h>
#include <string.h>
#include <sys/wait.h>

// The pages in a random order. NULL: there is no room.
static uint32_t *shuffled_pages(void)
{
	uint32_t *order = calloc(pages, 4);
	for (uint64_t at = 0; order && at < pages; at++) {
		uint64_t other = mix64(at) % (at + 1);
		order[at] = order[other];
		order[other] = at;
	}
	return order;
}

int main(int argc, char **argv)
{
	int shuffle = 0;
	uint64_t rounds = 0, pace = 0, status = 0, number = 0, hold = 0, forks = 0, fixed = 0, back = 0;
	if (argc < 2)
		return 2;
	for (int i = 2; i < argc; i++) {
		uint64_t value = i + 1 < argc ? strtoull(argv[i + 1], NULL, 10) : 0;
		if (!strcmp(argv[i], "--random-data")) {
			random_data = 1;
			continue;
		} else if (!strcmp(argv[i], "--shuffle")) {
			shuffle = 1;
			continue;
		} else if (!strcmp(argv[i], "--rounds"))
			rounds = value;
		else if (!strcmp(argv[i], "--pace"))
			pace = value;
		else if (!strcmp(argv[i], "--exit"))
			status = value;
		else if (!strcmp(argv[i], "--signal"))
			number = value;
		else if (!strcmp(argv[i], "--hold"))
			hold = value;
		else if (!strcmp(argv[i], "--fork"))
			forks = value;
		else if (!strcmp(argv[i], "--read-only"))
			fixed = (value << 20) / PAGE;
		else if (!strcmp(argv[i], "--back"))
			back = (value << 20) / PAGE;
		else
			return 2;
		i++;
	}
	if (!map_pages(strtoull(argv[1], NULL, 10)))
		return 2;
	uint32_t *order = shuffle ? shuffled_pages() : NULL;
	if (shuffle && !order)
		return 2;
	for (uint64_t page = 0; page < pages; page++)
		fill(page, 0);
	if (fixed && mprotect((void *)memory, fixed * PAGE, PROT_READ))
		return 2;
	puts("ready");
	fflush(stdout);
	for (uint64_t round = 0; round < rounds; round++)
		for (uint64_t at = 0; at < pages; at++) {
			uint64_t page = order ? order[at] : at;
			if (pace)
				usleep(pace);
			check(page, page < fixed ? 0 : round);
			if (page >= fixed)
				fill(page, round + 1);
			if (back && page >= back)
				check(page - back, page - back < fixed ? 0 : round + 1);
		}
	for (uint64_t n = 0; n < forks; n++) // all at once, each checks everything and changes a part
		if (fork() == 0) {
			for (uint64_t page = 0; page < pages; page++) {
				check(page, rounds);
				if (page % 4 == n % 4)
					fill(page, rounds + 1 + n);
			}
			for (uint64_t page = 0; page < pages; page++)
				check(page, page % 4 == n % 4 ? rounds + 1 + n : rounds);
			_exit(0);
		}
	for (uint64_t n = 0; n < forks; n++) {
		int result;
		if (wait(&result) < 0 || result)
			return WRONG;
	}
	for (uint64_t page = 0; page < pages; page++)
		check(page, page < fixed ? 0 : rounds);
	sleep(hold);
	if (number) {
		signal(number, SIG_DFL);
		kill(getpid(), number);
	}
	return status;
}
