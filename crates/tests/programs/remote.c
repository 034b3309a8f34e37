// remote MIB MS [SIGN]: fills memory, writes "filled" to standard error, and reads and writes random
// pages for that time. Each word of each page is checked. Prints the count and the longest touch of a
// page, and how late a thread was woken at most that only sleeps: so long the machine itself stood still.
// Then, with SIGN: waits until that file exists, and touches all pages once; those that are SIGBUS are
// counted. Every second page compresses. Exit 86: other bytes came back.
#define _GNU_SOURCE
#include "pages.h"
#include <pthread.h>
#include <setjmp.h>
#include <signal.h>
#include <string.h>
#include <time.h>

static sigjmp_buf back;

static void poisoned(int number)
{
	siglongjmp(back, number);
}

static uint64_t now_us(void)
{
	struct timespec at;
	clock_gettime(CLOCK_MONOTONIC, &at);
	return at.tv_sec * 1000000ull + at.tv_nsec / 1000;
}

static volatile uint64_t machine;

static void *sleeper(void *unused)
{
	for (uint64_t before = now_us();; before = now_us()) {
		usleep(1000);
		uint64_t late = now_us() - before - 1000;
		machine = late > machine && late < 1u << 30 ? late : machine;
	}
	return unused;
}

static void check_one(uint64_t page, uint64_t version)
{
	random_data = page & 1;
	check(page, version);
}

int main(int count, char **words)
{
	uint32_t *version = count > 2 && map_pages(strtoull(words[1], NULL, 10)) ? calloc(pages, 4) : NULL;
	pthread_t thread;
	if (!version || pthread_create(&thread, NULL, sleeper, NULL))
		return 2;
	for (uint64_t page = 0; page < pages; page++) {
		random_data = page & 1;
		fill(page, 0);
	}
	fprintf(stderr, "filled\n");
	uint64_t seed = 1, touches = 0, longest = 0, long_ones = 0, end = now_us() + 1000 * strtoull(words[2], NULL, 10);
	for (uint64_t now = now_us(); now < end; touches++) {
		uint64_t page = mix64(seed++) % pages;
		// The first touch only: what follows is not a fault.
		(void)memory[page * WORDS];
		uint64_t then = now_us(), took = then - now;
		longest = took > longest ? took : longest;
		long_ones += took > 20000;
		check_one(page, version[page]);
		if (mix64(seed) % 4 == 0)
			fill(page, ++version[page]);
		now = now_us();
	}
	printf("touches %lu\nlongest_us %lu\nover_20_ms %lu\nmachine_us %lu\n", touches, longest, long_ones, machine);
	volatile uint64_t lost = 0;
	if (count > 3) {
		fprintf(stderr, "waits\n");
		while (access(words[3], F_OK))
			usleep(10000);
		struct sigaction action = {.sa_handler = poisoned};
		sigaction(SIGBUS, &action, NULL);
		for (volatile uint64_t page = 0; page < pages; page++) {
			if (sigsetjmp(back, 1)) {
				lost++;
				continue;
			}
			(void)memory[page * WORDS];
			check_one(page, version[page]);
		}
	} else {
		for (uint64_t page = 0; page < pages; page++)
			check_one(page, version[page]);
	}
	printf("lost %lu\n", lost);
	return 0;
}
