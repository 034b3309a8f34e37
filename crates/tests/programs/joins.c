// Threads that end in every way while memory is short. Each must be joined with its result. When a
// thread ends, the kernel clears a word of the thread's control block without userfaultfd. If the
// block were evicted, pthread_join would hang.
//
//   joins COUNT MIB_THRASHED
#include <pthread.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <threads.h>
#include <unistd.h>

enum { AT_ONCE = 16 };

static volatile int stop;
static uint64_t words, cleanups;

static void *thrash(void *argument)
{
	volatile uint64_t *memory = malloc(words * 8);
	for (uint64_t round = 1; !stop; round++)
		for (uint64_t i = 0; i < words; i += 512) {
			if (round > 1 && memory[i] != (i ^ (round - 1)))
				exit(3);
			memory[i] = i ^ round;
		}
	return argument;
}

// A thread of the C11 kind: the shim does not stand in for thrd_create.
static int plain_one(void *argument)
{
	usleep((uint64_t)argument % 7 * 1500);
	return (uint64_t)argument % 1000;
}

static void count_up(void *argument) { __atomic_fetch_add((uint64_t *)argument, 1, __ATOMIC_RELAXED); }

static void *one(void *argument)
{
	uint64_t me = (uint64_t)argument;
	usleep(me % 7 * 1500); // long enough for its stack to leave
	if (me % 4 == 0)
		return (void *)(me * 3);
	pthread_cleanup_push(count_up, &cleanups);
	if (me % 4 == 1)
		pthread_exit((void *)(me * 3));
	if (me % 4 == 2)
		for (;;)
			pause(); // cancelled
	pthread_cleanup_pop(1);
	return (void *)(me * 3);
}

// KiB of locked memory; 0 when unknown.
static unsigned long locked(void)
{
	char line[256];
	unsigned long kib = 0;
	FILE *status = fopen("/proc/self/status", "r");
	while (status && fgets(line, sizeof line, status))
		if (sscanf(line, "VmLck: %lu", &kib) == 1)
			break;
	if (status)
		fclose(status);
	return kib;
}

int main(int argc, char **argv)
{
	if (argc != 3)
		return 2;
	uint64_t count = strtoull(argv[1], NULL, 0);
	words = strtoull(argv[2], NULL, 0) << 17;
	pthread_t beside, threads[AT_ONCE];
	if (pthread_create(&beside, NULL, thrash, NULL))
		return 4;
	for (uint64_t first = 0; first < count; first += AT_ONCE) {
		for (uint64_t i = 0; i < AT_ONCE; i++)
			if (pthread_create(&threads[i], NULL, one, (void *)(first + i)))
				return 4;
		thrd_t plain;
		int given;
		if (thrd_create(&plain, plain_one, (void *)first) != thrd_success)
			return 4;
		if (first > 0 && getenv("UNDERCROFT_SOCKET") && locked() == 0)
			return 6; // the C library keeps stacks, with control blocks, for the next threads
		for (uint64_t i = 0; i < AT_ONCE; i++)
			if ((first + i) % 4 == 2)
				pthread_cancel(threads[i]);
		for (uint64_t i = 0; i < AT_ONCE; i++) {
			uint64_t me = first + i;
			void *result, *expected = me % 4 == 2 ? PTHREAD_CANCELED : (void *)(me * 3);
			if (pthread_join(threads[i], &result) || result != expected)
				return 5;
		}
		if (thrd_join(plain, &given) != thrd_success || given != (int)(first % 1000))
			return 5;
	}
	stop = 1;
	pthread_join(beside, NULL);
	printf("%lu threads joined, %d cleanups at least\n", count, cleanups >= count / 2);
	return 0;
}
