// Memory whose bytes are known: each word follows from its page, its version and its place.
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <unistd.h>

enum { PAGE = 4096, WORDS = PAGE / 8, WRONG = 86 };

static volatile uint64_t *memory;
static uint64_t pages;
static int random_data; // words that no RAM tier can make smaller

static uint64_t mix64(uint64_t x)
{
	x += 0x9e3779b97f4a7c15ull;
	x = (x ^ (x >> 30)) * 0xbf58476d1ce4e5b9ull;
	x = (x ^ (x >> 27)) * 0x94d049bb133111ebull;
	return x ^ (x >> 31);
}

// Maps `mib` MiB, and a page more, so that the end is no other mapping's. False: there is no room.
static int map_pages(uint64_t mib)
{
	pages = mib * 256;
	memory = mmap(NULL, pages * PAGE + PAGE, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
	return memory != MAP_FAILED;
}

static uint64_t word_of(uint64_t page, uint64_t version, uint64_t word)
{
	uint64_t base = mix64(page << 20 ^ version);
	return random_data ? mix64(base + word) : base + word / 16;
}

static void fill(uint64_t page, uint64_t version)
{
	for (uint64_t i = 0; i < WORDS; i++)
		memory[page * WORDS + i] = word_of(page, version, i);
}

// Maps `mib` MiB and fills them with version 0. The versions of the pages; NULL: there is no room.
static inline uint32_t *filled_pages(uint64_t mib)
{
	uint32_t *version = map_pages(mib) ? calloc(pages, 4) : NULL;
	for (uint64_t page = 0; version && page < pages; page++)
		fill(page, 0);
	return version;
}

// Ends the program with WRONG if a word is another.
static inline void check(uint64_t page, uint64_t version)
{
	for (uint64_t i = 0; i < WORDS; i++) {
		uint64_t word = memory[page * WORDS + i];
		if (word != word_of(page, version, i)) {
			fprintf(stderr, "page %lu version %lu word %lu is wrong: %016lx\n", page, version, i, word);
			_exit(WRONG);
		}
	}
}
