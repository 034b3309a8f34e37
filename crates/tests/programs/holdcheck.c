// Holds memory whose every page has a known content and checks it without pause, for tests that
// kill the pager.
//
//   holdcheck MIB EVIDENCE [SECONDS]
//
// Two threads verify and rewrite random pages, each in its own half. The version of each page is
// kept in MAP_SHARED memory, which is not managed. If a page is ever zero, stale or otherwise
// wrong, the program writes that to the file EVIDENCE and ends with status 86. Prints "ready" when
// all pages are written. SIGBUS (a page declared lost) gives status 87: an error that the program
// can see, not a wrong byte. SECONDS after that (default 60), or at SIGUSR1, the program ends with 0.
// The lowest pages are checked, too (low.h).
#define _GNU_SOURCE
#include "low.h"
#include <fcntl.h>
#include <pthread.h>
#include <signal.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <time.h>
#include <unistd.h>

enum { PAGE = 4096, WORDS = PAGE / 8, WRONG = 86, LOST = 87 };
static uint64_t *memory, *versions, pages;
static volatile uint64_t end_at;
static const char *evidence;

static uint64_t mix64(uint64_t x)
{
	x += 0x9e3779b97f4a7c15ull;
	x = (x ^ (x >> 30)) * 0xbf58476d1ce4e5b9ull;
	x = (x ^ (x >> 27)) * 0x94d049bb133111ebull;
	return x ^ (x >> 31);
}

// Even pages compress badly, odd ones well.
static uint64_t word_of(uint64_t page, uint64_t version, uint64_t word)
{
	uint64_t base = mix64(page << 24 ^ version);
	return page % 2 ? base + word / 16 : mix64(base + word);
}

static uint64_t now(void)
{
	struct timespec t;
	clock_gettime(CLOCK_MONOTONIC, &t);
	return t.tv_sec * 1000 + t.tv_nsec / 1000000;
}

static void tell_and_end(const char *text, int n)
{
	int fd = open(evidence, O_WRONLY | O_CREAT | O_APPEND, 0644);
	if (write(fd, text, n) != n || write(2, text, n) != n)
		_exit(WRONG);
	_exit(WRONG);
}

static void wrong(uint64_t page, uint64_t word, uint64_t expected, uint64_t found)
{
	char text[256];
	const char *kind = found == 0 ? "ZERO" : "WRONG";
	for (uint64_t old = versions[page]; found && old-- > 1;)
		if (word_of(page, old, word) == found)
			kind = "STALE";
	int n = snprintf(text, sizeof text, "%s page %lu word %lu version %lu expected %016lx found %016lx\n", kind, page, word,
	                 versions[page], expected, found);
	tell_and_end(text, n);
}

// They stay out most of the time: one look in 16,384 turns.
static void check_low(uint64_t turn)
{
	uintptr_t page = turn % 16384 ? 0 : low_wrong_page();
	char text[80];
	if (page)
		tell_and_end(text, snprintf(text, sizeof text, "WRONG or ZERO at address %p\n", (void *)page));
}

static void on_bus(int number)
{
	(void)number;
	_exit(LOST);
}

static void on_end(int number)
{
	(void)number;
	end_at = 0;
}

static void fill(uint64_t page)
{
	uint64_t version = versions[page] + 1;
	for (uint64_t i = 0; i < WORDS; i++)
		memory[page * WORDS + i] = word_of(page, version, i);
	versions[page] = version;
}

static void *check(void *argument)
{
	uint64_t half = (uint64_t)argument, rng = half + 1, first = half * (pages / 2);
	while (now() < end_at)
		for (uint32_t turn = 0; turn < 64; turn++) {
			check_low(rng);
			uint64_t page = first + mix64(rng++) % (pages / 2);
			for (uint64_t i = 0; i < WORDS; i++) {
				uint64_t found = ((volatile uint64_t *)memory)[page * WORDS + i], expected = word_of(page, versions[page], i);
				if (found != expected)
					wrong(page, i, expected, found);
			}
			if (turn % 3 == 0)
				fill(page);
		}
	return NULL;
}

int main(int argc, char **argv)
{
	if (argc < 3)
		return 2;
	pages = strtoull(argv[1], NULL, 10) * 256;
	evidence = argv[2];
	end_at = UINT64_MAX;
	signal(SIGBUS, on_bus);
	signal(SIGUSR1, on_end);
	memory = mmap(NULL, pages * PAGE, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
	versions = mmap(NULL, pages * 8, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS | MAP_POPULATE, -1, 0);
	if (pages < 2 || memory == MAP_FAILED || versions == MAP_FAILED)
		return 2;
	low_map();
	for (uint64_t page = 0; page < pages; page++)
		fill(page);
	uint64_t lasts = 1000 * (argc > 3 ? strtoull(argv[3], NULL, 10) : 60);
	if (end_at) // it was not told to end
		end_at = now() + lasts;
	puts("ready");
	fflush(stdout);
	pthread_t other;
	if (pthread_create(&other, NULL, check, (void *)1))
		return 2;
	check(NULL);
	pthread_join(other, NULL);
	check_low(0);
	return 0;
}
