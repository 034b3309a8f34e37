// Many threads sort and sum up a memory of their own and a common one; prints one checksum.
//
//   threads COUNT MIB_EACH
#include <pthread.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>

static uint64_t count, words, *common;
static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static uint64_t total;

static uint64_t mix64(uint64_t x)
{
	x += 0x9e3779b97f4a7c15ull;
	x = (x ^ (x >> 30)) * 0xbf58476d1ce4e5b9ull;
	x = (x ^ (x >> 27)) * 0x94d049bb133111ebull;
	return x ^ (x >> 31);
}

static int compare(const void *a, const void *b)
{
	uint64_t x = *(const uint64_t *)a, y = *(const uint64_t *)b;
	return x < y ? -1 : x > y;
}

static void *work(void *argument)
{
	uint64_t me = (uint64_t)argument, sum = 0;
	uint64_t *mine = malloc(words * 8);
	if (!mine)
		exit(2);
	for (uint64_t i = 0; i < words; i++)
		mine[i] = mix64(me << 32 | i) >> (me % 3 * 20);
	for (uint64_t i = me; i < words; i += count)
		__atomic_fetch_add(&common[mix64(i) % words], mine[i], __ATOMIC_RELAXED);
	qsort(mine, words, 8, compare);
	for (uint64_t i = 0; i < words; i++)
		sum = sum * 31 + mine[i];
	free(mine);
	pthread_mutex_lock(&lock);
	total ^= mix64(sum + me);
	pthread_mutex_unlock(&lock);
	return NULL;
}

int main(int argc, char **argv)
{
	if (argc != 3)
		return 2;
	count = strtoull(argv[1], NULL, 10);
	words = strtoull(argv[2], NULL, 10) << 17;
	common = calloc(words, 8);
	pthread_t *threads = malloc(count * sizeof *threads);
	if (!common || !threads)
		return 2;
	for (uint64_t i = 0; i < count; i++)
		if (pthread_create(&threads[i], NULL, work, (void *)i))
			return 2;
	for (uint64_t i = 0; i < count; i++)
		pthread_join(threads[i], NULL);
	for (uint64_t i = 0; i < words; i++)
		total = total * 31 + common[i];
	printf("%016lx\n", total);
	return 0;
}
