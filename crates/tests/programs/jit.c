// Memory that is writable and executable, as some compilers of running programs have it, between
// memory that is only writable.
//
//   jit MIB ROUNDS
//
// Each page of executable memory has a function that returns the number of the page; the rest of
// the page, and every other page, has words that follow from it. Each round calls every function and
// verifies every word, in another order. Status 86: a wrong word. Prints the pages verified.
#define _GNU_SOURCE
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>

enum { PAGE = 4096, WORDS = PAGE / 4, LONGEST = 40 };

static uint32_t mix(uint32_t x)
{
	x ^= x >> 16;
	x *= 0x7feb352du;
	x ^= x >> 15;
	x *= 0x846ca68bu;
	return x ^ (x >> 16);
}

static int is_code(uint32_t page, const uint8_t *kinds)
{
	return kinds[page];
}

static void fill(uint32_t *words, uint32_t page, int code)
{
	for (int at = 0; at < WORDS; at++)
		words[at] = mix(page * WORDS + at);
	if (code) {
		// mov eax, page; ret
		uint8_t *bytes = (uint8_t *)words;
		bytes[0] = 0xb8;
		memcpy(bytes + 1, &page, 4);
		bytes[5] = 0xc3;
	}
}

int main(int argc, char **argv)
{
	if (argc != 3)
		return 2;
	uint32_t pages = strtoul(argv[1], NULL, 10) << 8;
	int rounds = atoi(argv[2]);
	uint8_t *memory = mmap(NULL, (size_t)pages * PAGE, PROT_READ | PROT_WRITE,
			       MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
	uint8_t *kinds = calloc(pages, 1);
	if (memory == MAP_FAILED || !kinds)
		return 2;
	// Stretches of both kinds, of a page up to LONGEST pages; the last half is code alone.
	uint32_t at = 0, turn = 0;
	while (at < pages / 2) {
		uint32_t count = 1 + mix(++turn) % LONGEST;
		memset(kinds + at, turn & 1, count);
		if (turn & 1 && mprotect(memory + (size_t)at * PAGE, (size_t)count * PAGE,
					 PROT_READ | PROT_WRITE | PROT_EXEC))
			return 3;
		at += count;
	}
	memset(kinds + at, 1, pages - at);
	if (mprotect(memory + (size_t)at * PAGE, (size_t)(pages - at) * PAGE,
		     PROT_READ | PROT_WRITE | PROT_EXEC))
		return 3;
	for (uint32_t page = 0; page < pages; page++)
		fill((uint32_t *)(memory + (size_t)page * PAGE), page, is_code(page, kinds));
	uint32_t expected[WORDS];
	uint64_t verified = 0;
	for (int round = 0; round < rounds; round++) {
		for (uint32_t next = 0; next < pages; next++) {
			// Each page once: a step that shares no factor with a power of two.
			uint32_t step = round & 1 ? 1 : 7919;
			uint32_t page = (next * step + mix(round)) % pages;
			uint8_t *there = memory + (size_t)page * PAGE;
			fill(expected, page, is_code(page, kinds));
			int wrong = memcmp(there, expected, PAGE) != 0;
			if (is_code(page, kinds))
				wrong |= ((uint32_t (*)(void))there)() != page;
			if (wrong) {
				printf("page %u is wrong in round %d\n", page, round);
				return 86;
			}
			verified++;
		}
	}
	printf("%llu\n", (unsigned long long)verified);
	return 0;
}
