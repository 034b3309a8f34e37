// strays MIB SECONDS: a thread reads the areas through which pages leave, as a program that reads
// all memory would. Meanwhile every byte of the program's memory is verified. No page of it is
// zeros. Prints how often the thread read. Exit 3: other bytes came back. Exit 77: the areas were
// not found.
#define _GNU_SOURCE
#include <pthread.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/uio.h>
#include <time.h>
#include <unistd.h>

enum { PAGE = 4096, WORDS = PAGE / 8, STAGING = 64 * PAGE };

static volatile int stop;
static uint64_t pages, looks;
static volatile uint64_t *memory;

static uint64_t next(uint64_t *state)
{
	*state ^= *state << 13, *state ^= *state >> 7, *state ^= *state << 17;
	return *state;
}

// Words that a RAM tier cannot make smaller.
static uint64_t word(uint64_t page, uint64_t version, uint64_t at)
{
	uint64_t state = (page + 1) * 0x9e3779b97f4a7c15 ^ (version + 1) << 40 ^ (at + 1) * 0xd1342543de82ef95;
	next(&state);
	return next(&state);
}

static void fill(uint64_t page, uint64_t version)
{
	for (uint64_t at = 0; at < WORDS; at++)
		memory[page * WORDS + at] = word(page, version, at);
}

static void verify(uint64_t page, uint64_t version)
{
	for (uint64_t at = 0; at < WORDS; at++)
		if (memory[page * WORDS + at] != word(page, version, at)) {
			fprintf(stderr, "page %lu word %lu: %lx\n", page, at, memory[page * WORDS + at]);
			_exit(3);
		}
}

// The staging area. It is found as the shim's own two mappings: not inherited by children,
// registered, as long as the staging area, and one after the other.
static uint64_t staging(void)
{
	char line[512];
	uint64_t start, end, before = 0, found = 0, size = 0, area = 0;
	FILE *smaps = fopen("/proc/self/smaps", "r");
	while (smaps && fgets(line, sizeof line, smaps)) {
		if (sscanf(line, "%lx-%lx ", &start, &end) == 2 && strchr(line, '-') < line + 17)
			area = start, size = end - start;
		else if (!strncmp(line, "VmFlags:", 8) && size == STAGING && strstr(line, " dc") && strstr(line, " um")) {
			if (before && area == before + STAGING)
				found = before;
			before = area;
		}
	}
	if (smaps)
		fclose(smaps);
	return found;
}

static void *look(void *argument)
{
	uint64_t at = staging(), state = 362436069, room = 4096;
	// The bytes go into memory that is swapped. While that memory comes in, the page that is
	// read is in use.
	char *sink = malloc(room * PAGE);
	for (uint64_t byte = 0; sink && byte < room * PAGE; byte += 8)
		memcpy(sink + byte, &byte, 8);
	while (at && sink && !stop) {
		struct iovec here = {sink + next(&state) % room * PAGE, 8};
		struct iovec there = {(void *)(at + next(&state) % 64 * PAGE), 8};
		looks += process_vm_readv(getpid(), &here, 1, &there, 1, 0) == 8;
		usleep(50);
	}
	return argument;
}

int main(int count, char **arguments)
{
	if (count != 3)
		return 2;
	pages = strtoul(arguments[1], NULL, 0) << 8;
	memory = mmap(NULL, pages * PAGE, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
	uint32_t *version = calloc(pages, 4);
	if (memory == MAP_FAILED || !version)
		return 2;
	for (uint64_t page = 0; page < pages; page++)
		fill(page, 0);
	pthread_t beside;
	if (pthread_create(&beside, NULL, look, NULL))
		return 2;
	uint64_t state = 88172645463325252;
	for (time_t end = time(NULL) + atoi(arguments[2]); time(NULL) < end;) {
		uint64_t page = next(&state) % pages;
		verify(page, version[page]);
		if (next(&state) & 1)
			fill(page, ++version[page]);
	}
	stop = 1;
	pthread_join(beside, NULL);
	for (uint64_t page = 0; page < pages; page++)
		verify(page, version[page]);
	printf("%lu\n", looks);
	return looks ? 0 : 77;
}
