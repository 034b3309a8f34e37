// Programs that are large: many threads, many processes, a wide and sparse mapping.
//
//   scale threads COUNT SECONDS     threads that each have 64 pages of their own; each writes one page after the
//                                   other, 50 a second, and checks what it wrote there before
//   scale execs COUNT               fork and exec of /bin/true, one after the other
//   scale loops COUNT EACH          COUNT processes at once, each with EACH forks and execs of /bin/true; prints
//                                   processes a second, and milliseconds of CPU time a process
//   scale wide MIB USED_MIB         a mapping of MIB, USED_MIB of it written, spread; a fork of it;
//                                   both check every page; then a part and all are unmapped
//
// Status 86: a wrong byte. Prints what the slowest step took, in seconds.
#define _GNU_SOURCE
#include <pthread.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/resource.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

enum { PAGE = 4096, WRONG = 86, OWN = 64 };
static volatile int stop;
static uint64_t rounds;

static double now(void)
{
	struct timespec t;
	clock_gettime(CLOCK_MONOTONIC, &t);
	return t.tv_sec + t.tv_nsec / 1e9;
}

static double seconds(struct timeval time)
{
	return time.tv_sec + time.tv_usec / 1e6;
}

static void *thread(void *number)
{
	uint64_t *pages = malloc(OWN * PAGE), key = (uint64_t)number * 1000003;
	for (uint64_t round = 0; !stop; round++) {
		uint64_t *page = pages + round % OWN * (PAGE / 8);
		for (int i = 0; i < PAGE / 8 && round >= OWN; i++)
			if (page[i] != key + (round - OWN) * 512 + i)
				_exit(WRONG);
		for (int i = 0; i < PAGE / 8; i++)
			page[i] = key + round * 512 + i;
		__atomic_add_fetch(&rounds, 1, __ATOMIC_RELAXED);
		usleep(20000);
	}
	free(pages);
	return NULL;
}

static int threads(long count, long seconds)
{
	pthread_t *all = calloc(count, sizeof *all);
	pthread_attr_t attributes;
	pthread_attr_init(&attributes);
	pthread_attr_setstacksize(&attributes, 64 << 10);
	double begin = now();
	for (long i = 0; i < count; i++)
		if (pthread_create(&all[i], &attributes, thread, (void *)i))
			return 1;
	double started = now() - begin;
	sleep(seconds);
	stop = 1;
	for (long i = 0; i < count; i++)
		pthread_join(all[i], NULL);
	printf("started in %.3f s, %.0f pages a second\n", started, rounds / (now() - begin));
	return 0;
}

static int execs(long count)
{
	for (long i = 0; i < count; i++) {
		char *arguments[] = { "true", NULL };
		int status;
		pid_t child = fork();
		if (child == 0) {
			execv("/bin/true", arguments);
			_exit(127);
		}
		if (child < 0 || waitpid(child, &status, 0) < 0 || status)
			return 1;
	}
	return 0;
}

static int loops(long count, long each)
{
	double begin = now();
	for (long i = 0; i < count; i++) {
		pid_t child = fork();
		if (child < 0)
			return 1;
		if (child == 0)
			_exit(execs(each));
	}
	int status, failed = 0;
	for (long i = 0; i < count; i++)
		failed |= wait(&status) < 0 || status;
	struct rusage own, children;
	getrusage(RUSAGE_SELF, &own);
	getrusage(RUSAGE_CHILDREN, &children);
	long processes = count * (each + 1);
	double cpu = seconds(own.ru_utime) + seconds(own.ru_stime) + seconds(children.ru_utime) + seconds(children.ru_stime);
	printf("%.1f %.4f\n", processes / (now() - begin), cpu * 1000 / processes);
	return failed;
}

static double check(uint64_t *memory, uint64_t pages, uint64_t step)
{
	double slowest = 0;
	for (uint64_t page = 0; page < pages; page += step) {
		double begin = now();
		for (int i = 0; i < PAGE / 8; i++)
			if (memory[page * (PAGE / 8) + i] != page + i)
				_exit(WRONG);
		double took = now() - begin;
		slowest = took > slowest ? took : slowest;
	}
	return slowest;
}

static int wide(uint64_t mib, uint64_t used)
{
	uint64_t pages = mib * 256, step = mib / used;
	int flags = MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE;
	uint64_t *memory = mmap(NULL, pages * PAGE, PROT_READ | PROT_WRITE, flags, -1, 0);
	if (memory == MAP_FAILED)
		return 1;
	for (uint64_t page = 0; page < pages; page += step)
		for (int i = 0; i < PAGE / 8; i++)
			memory[page * (PAGE / 8) + i] = page + i;
	double begin = now();
	pid_t child = fork();
	double forked = now() - begin;
	if (child < 0)
		return 1;
	double slowest = check(memory, pages, step);
	if (child == 0) {
		printf("child: slowest page %.3f s\n", slowest);
		fflush(stdout);
		_exit(0);
	}
	int status;
	if (waitpid(child, &status, 0) < 0 || status)
		return WEXITSTATUS(status) ? WEXITSTATUS(status) : 1;
	begin = now();
	munmap(memory, pages / 2 * PAGE);
	double half = now() - begin;
	begin = now();
	munmap(memory + pages / 2 * (PAGE / 8), pages / 2 * PAGE);
	printf("fork %.3f s, slowest page %.3f s, unmap %.3f and %.3f s\n", forked, slowest,
	       half, now() - begin);
	return 0;
}

int main(int count, char **words)
{
	long first = count > 2 ? atol(words[2]) : 0, second = count > 3 ? atol(words[3]) : 0;
	if (first > 0 && !strcmp(words[1], "execs"))
		return execs(first);
	if (second > 0 && !strcmp(words[1], "threads"))
		return threads(first, second);
	if (second > 0 && !strcmp(words[1], "loops"))
		return loops(first, second);
	if (second > 0 && !strcmp(words[1], "wide"))
		return wide(first, second);
	return 2;
}
