// A small client for tests of limits and refusals: fills memory, may go round it again, and ends as
// the options say.
//
//   touch MIB [--rounds N] [--random-data] [--exit N] [--signal N] [--hold SECONDS] [--fork N]
//
// Every page has known bytes, checked in each round (status 86 if wrong). Prints "ready" after the
// first fill.
#define _GNU_SOURCE
#include <signal.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/wait.h>
#include <unistd.h>

enum { PAGE = 4096, WORDS = PAGE / 8, WRONG = 86 };
static uint64_t *memory, pages;
static int random_data;

static uint64_t mix64(uint64_t x)
{
	x += 0x9e3779b97f4a7c15ull;
	x = (x ^ (x >> 30)) * 0xbf58476d1ce4e5b9ull;
	x = (x ^ (x >> 27)) * 0x94d049bb133111ebull;
	return x ^ (x >> 31);
}

static uint64_t word_of(uint64_t page, uint64_t round, uint64_t word)
{
	uint64_t base = mix64(page << 20 ^ round);
	return random_data ? mix64(base + word) : base + word / 16;
}

static void fill(uint64_t page, uint64_t round)
{
	for (uint64_t i = 0; i < WORDS; i++)
		memory[page * WORDS + i] = word_of(page, round, i);
}

static void check(uint64_t page, uint64_t round)
{
	for (uint64_t i = 0; i < WORDS; i++)
		if (memory[page * WORDS + i] != word_of(page, round, i)) {
			fprintf(stderr, "touch: page %lu round %lu word %lu is wrong: %016lx\n", page, round, i,
			        memory[page * WORDS + i]);
			_exit(WRONG);
		}
}

int main(int argc, char **argv)
{
	uint64_t rounds = 0, status = 0, number = 0, hold = 0, forks = 0;
	if (argc < 2)
		return 2;
	for (int i = 2; i < argc; i++) {
		uint64_t value = i + 1 < argc ? strtoull(argv[i + 1], NULL, 10) : 0;
		if (!strcmp(argv[i], "--random-data")) {
			random_data = 1;
			continue;
		} else if (!strcmp(argv[i], "--rounds"))
			rounds = value;
		else if (!strcmp(argv[i], "--exit"))
			status = value;
		else if (!strcmp(argv[i], "--signal"))
			number = value;
		else if (!strcmp(argv[i], "--hold"))
			hold = value;
		else if (!strcmp(argv[i], "--fork"))
			forks = value;
		else
			return 2;
		i++;
	}
	pages = strtoull(argv[1], NULL, 10) * 256;
	memory = mmap(NULL, pages * PAGE + PAGE, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
	if (memory == MAP_FAILED)
		return 2;
	for (uint64_t page = 0; page < pages; page++)
		fill(page, 0);
	puts("ready");
	fflush(stdout);
	for (uint64_t round = 0; round < rounds; round++)
		for (uint64_t page = 0; page < pages; page++) {
			check(page, round);
			fill(page, round + 1);
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
		check(page, rounds);
	sleep(hold);
	if (number) {
		signal(number, SIG_DFL);
		kill(getpid(), number);
	}
	return status;
}
