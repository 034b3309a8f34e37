// slots THREADS MIB ROUNDS: maps, fills, moves and unmaps slots at random beside MIB of memory in
// use. A slot that one mmap made must lie in one line of /proc/self/maps, and mremap must move it
// whole. Status 1 otherwise.
#define _GNU_SOURCE
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>

enum { PAGE = 4096, ARENA = 512, HIGH = 320, SLOT = 64 };
static long rounds, split, refused, wrong;

static int mappings_of(const char *from, const char *to)
{
	FILE *file = fopen("/proc/self/maps", "r");
	char line[512];
	unsigned long start, end;
	int count = 0;
	while (file && fgets(line, sizeof line, file))
		if (sscanf(line, "%lx-%lx", &start, &end) == 2)
			count += start < (unsigned long)to && end > (unsigned long)from;
	if (file)
		fclose(file);
	return count;
}

static void *work(void *arena)
{
	unsigned seed = (unsigned long)arena >> 32;
	for (long round = 0; round < rounds; round++) {
		long pages = 1 + rand_r(&seed) % SLOT;
		char *place = (char *)arena + PAGE * (rand_r(&seed) % 200L), *high = (char *)arena + PAGE * (long)HIGH;
		munmap((char *)arena + PAGE * (rand_r(&seed) % 200L), 40 * PAGE);
		char *slot = mmap(place, pages * PAGE, PROT_READ | PROT_WRITE,
		                  MAP_PRIVATE | MAP_ANONYMOUS | MAP_FIXED, -1, 0);
		slot[0] = 1, slot[pages * PAGE - 1] = 2;
		if (mappings_of(slot, slot + pages * PAGE) != 1)
			__atomic_add_fetch(&split, 1, __ATOMIC_RELAXED);
		if (round % 4)
			continue;
		long grown = pages + rand_r(&seed) % 32;
		slot = mremap(slot, pages * PAGE, grown * PAGE, MREMAP_MAYMOVE | MREMAP_FIXED, high);
		if (slot != high)
			__atomic_add_fetch(&refused, 1, __ATOMIC_RELAXED);
		else if (slot[0] != 1 || slot[pages * PAGE - 1] != 2 || (grown > pages && slot[grown * PAGE - 1]))
			__atomic_add_fetch(&wrong, 1, __ATOMIC_RELAXED);
	}
	return NULL;
}

int main(int count, char **arguments)
{
	long threads = count > 1 ? atol(arguments[1]) : 1, mib = count > 2 ? atol(arguments[2]) : 60;
	rounds = count > 3 ? atol(arguments[3]) : 2000;
	char *held = malloc(mib << 20);
	memset(held, 7, mib << 20);
	pthread_t thread[16];
	for (long at = 0; at < threads && at < 16; at++) {
		void *arena = mmap((void *)(0x200000000000 + (at << 32)), PAGE * (long)ARENA, PROT_READ | PROT_WRITE,
		                   MAP_PRIVATE | MAP_ANONYMOUS | MAP_FIXED_NOREPLACE, -1, 0);
		pthread_create(&thread[at], NULL, work, arena);
	}
	for (long at = 0; at < threads && at < 16; at++)
		pthread_join(thread[at], NULL);
	for (long at = 0; at < mib << 20; at += PAGE)
		wrong += held[at] != 7;
	printf("split %ld refused %ld wrong %ld of %ld\n", split, refused, wrong, threads * rounds);
	return split || refused || wrong;
}
