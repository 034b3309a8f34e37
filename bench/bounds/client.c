// Uses memory at random: client MIB SECONDS WRITES PAUSE_US. Each page begins with its number and a
// version, which are checked at each use; WRITES of 100 change it. Between two uses it sleeps.
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <time.h>
#include <unistd.h>

enum { PAGE = 4096, WORDS = PAGE / 8, WRONG = 86 };

static uint64_t state = 88172645463325252;

static uint64_t chance(void)
{
	state ^= state << 13, state ^= state >> 7, state ^= state << 17;
	return state;
}

int main(int argc, char **argv)
{
	if (argc != 5)
		return 2;
	uint64_t pages = strtoull(argv[1], NULL, 10) * 256, writes = strtoull(argv[3], NULL, 10);
	time_t end = time(NULL) + atoi(argv[2]);
	volatile uint64_t *memory = mmap(NULL, pages * PAGE, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
	uint32_t *versions = calloc(pages, 4);
	if (memory == MAP_FAILED || !versions)
		return 2;
	for (uint64_t page = 0; page < pages; page++)
		for (uint64_t word = 0; word < WORDS; word++)
			memory[page * WORDS + word] = word == 0 ? page : word == 1 ? 0 : chance();
	while (time(NULL) < end) {
		uint64_t page = chance() % pages;
		volatile uint64_t *at = memory + page * WORDS;
		if (at[0] != page || at[1] != versions[page]) {
			fprintf(stderr, "page %lu is wrong: %lx %lx\n", page, at[0], at[1]);
			return WRONG;
		}
		if (chance() % 100 < writes)
			at[1] = ++versions[page];
		usleep(atoi(argv[4]));
	}
	return 0;
}
