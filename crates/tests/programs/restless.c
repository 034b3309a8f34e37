// restless MIB ROUNDS: verifies and rewrites memory. Between any two of its pages a few other pages
// are used and cooled again. If a table entry changes under the kernel's MOVE, the kernel looks at
// it again, and Linux 6.18 then does not report what it has moved. Exit 3: other bytes came back.
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/mman.h>

enum { PAGE = 4096, WORDS = PAGE / 8, HOT = 64, TURNS = 4 };

static uint64_t word(uint64_t page, uint64_t round) { return (page + 1) * 0x9e3779b97f4a7c15 + round; }

static void check(volatile uint64_t *page, uint64_t want, const char *which, uint64_t number, uint64_t round)
{
	if (page[0] == want && page[WORDS - 1] == want)
		return;
	fprintf(stderr, "%s page %lu, round %lu: %lx %lx, not %lx\n", which, number, round, page[0], page[WORDS - 1], want);
	exit(3);
}

static volatile uint64_t *map(uint64_t pages)
{
	void *at = mmap(NULL, pages * PAGE, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
	if (at == MAP_FAILED)
		exit(2);
	return at;
}

int main(int count, char **arguments)
{
	if (count != 3)
		return 2;
	uint64_t pages = strtoul(arguments[1], NULL, 0) << 20 >> 12, rounds = strtoul(arguments[2], NULL, 0);
	volatile uint64_t *cold = map(pages), *hot = map(HOT);
	for (uint64_t round = 0; round < rounds; round++) {
		for (uint64_t page = 0; page < HOT; page++)
			hot[page * WORDS] = hot[page * WORDS + WORDS - 1] = word(page, round);
		for (uint64_t page = 0; page < pages; page++) {
			volatile uint64_t *at = cold + page * WORDS;
			check(at, round ? word(page, round - 1) : 0, "cold", page, round);
			at[0] = at[WORDS - 1] = word(page, round);
			for (int turn = 0; turn < TURNS; turn++) {
				for (uint64_t page = 0; page < HOT; page++)
					check(hot + page * WORDS, word(page, round), "hot", page, round);
				madvise((void *)hot, HOT * PAGE, MADV_COLD);
			}
		}
	}
	printf("%lu rounds\n", rounds);
}
