// arenas THREADS COUNT: each thread allocates COUNT blocks of 1,000 bytes, fills and checks them.
// Then the program prints how many mappings the process has.
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

static long blocks;

static void *work(void *ignored)
{
	(void)ignored;
	char **block = malloc(blocks * sizeof *block);
	for (long at = 0; at < blocks; at++)
		memset(block[at] = malloc(1000), (int)at, 1000);
	for (long at = 0; at < blocks; at++)
		if (block[at][0] != (char)at || block[at][999] != (char)at)
			abort();
	return block;
}

int main(int count, char **arguments)
{
	int threads = count > 1 ? atoi(arguments[1]) : 4, mappings = 0, c;
	blocks = count > 2 ? atol(arguments[2]) : 200000;
	pthread_t thread[64];
	for (int at = 0; at < threads && at < 64; at++)
		pthread_create(&thread[at], NULL, work, NULL);
	for (int at = 0; at < threads && at < 64; at++)
		pthread_join(thread[at], NULL);
	FILE *file = fopen("/proc/self/maps", "r");
	while (file && (c = getc(file)) != EOF)
		mappings += c == '\n';
	printf("mappings %d\n", mappings);
	return 0;
}
