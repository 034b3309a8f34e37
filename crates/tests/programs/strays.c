// strays MIB SECONDS: a thread reads the areas through which pages leave, as a program that reads
// all memory would. Meanwhile every byte of the program's memory is verified. No page of it is
// zeros. Prints how often the thread read. Exit 86: other bytes came back. Exit 77: the areas were
// not found.
#define _GNU_SOURCE
#include "pages.h"
#include <pthread.h>
#include <stdlib.h>
#include <string.h>
#include <sys/uio.h>
#include <time.h>

enum { STAGING = 64 * PAGE };

static volatile int stop;
static uint64_t looks;

static uint64_t next(uint64_t *state)
{
	*state ^= *state << 13, *state ^= *state >> 7, *state ^= *state << 17;
	return *state;
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
	random_data = 1;
	uint32_t *version = filled_pages(strtoul(arguments[1], NULL, 0));
	pthread_t beside;
	if (!version || pthread_create(&beside, NULL, look, NULL))
		return 2;
	uint64_t state = 88172645463325252;
	for (time_t end = time(NULL) + atoi(arguments[2]); time(NULL) < end;) {
		uint64_t page = next(&state) % pages;
		check(page, version[page]);
		if (next(&state) & 1)
			fill(page, ++version[page]);
	}
	stop = 1;
	pthread_join(beside, NULL);
	for (uint64_t page = 0; page < pages; page++)
		check(page, version[page]);
	printf("%lu\n", looks);
	return looks ? 0 : 77;
}
