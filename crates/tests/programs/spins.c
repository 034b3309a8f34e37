// spins WAY MIB SECONDS: a thread keeps a processor to itself, and another thread needs memory that
// is not there. Prints the longest access in milliseconds, the accesses, those that took longer than
// a millisecond, and the part of the time that went into accesses of more than 400 ms. Exit 3: other bytes came back. Exit 77: no such priority, or too few
// processors.
//
// WAY is one of:
// - fifo, rr: a real-time thread spins on the processor of the thread that needs memory, which has
//   a higher priority;
// - nice: the same, with the best niceness for both;
// - aside: a real-time thread spins on another processor, where reclaim is at work;
// - follow: a real-time thread spins for 0.9 s of each second, on the processor where the other
//   thread is when that begins. That one is an ordinary thread;
// - kernel: the thread that needs memory is real-time, and needs it in system calls, while signals
//   for it are pending;
// - both: real-time threads spin on two processors.
#define _GNU_SOURCE
#include <pthread.h>
#include <sched.h>
#include <signal.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/resource.h>
#include <time.h>
#include <unistd.h>

enum { PAGE = 4096, WORDS = PAGE / 8 };

static volatile int stop, where = -1;
static const char *way;
static int cpus[2];

static int is(const char *name)
{
	return !strcmp(way, name);
}

static uint64_t now(void)
{
	struct timespec time;
	clock_gettime(CLOCK_MONOTONIC, &time);
	return time.tv_sec * 1000000000ull + time.tv_nsec;
}

static void bind(int cpu)
{
	cpu_set_t set;
	CPU_ZERO(&set);
	CPU_SET(cpu, &set);
	if (sched_setaffinity(0, sizeof set, &set))
		exit(77);
}

static void be_urgent(int priority)
{
	struct sched_param param = {.sched_priority = priority};
	if (is("nice") ? setpriority(PRIO_PROCESS, gettid(), -20)
	               : sched_setscheduler(0, is("rr") ? SCHED_RR : SCHED_FIFO, &param))
		exit(77);
}

static void *spin(void *cpu)
{
	bind(*(int *)cpu);
	be_urgent(50);
	while (!stop)
		;
	return NULL;
}

static void *follow(void *none)
{
	be_urgent(50);
	while (!stop) {
		usleep(100000);
		bind(where);
		for (uint64_t began = now(); !stop && now() < began + 900000000;)
			;
	}
	return none;
}

static void hear(int signal)
{
	(void)signal;
}

// A signal for this thread every 100 us.
static void be_disturbed(void)
{
	struct sigevent event = {.sigev_notify = SIGEV_THREAD_ID, .sigev_signo = SIGUSR1};
	event._sigev_un._tid = gettid();
	struct itimerspec often = {{0, 100000}, {0, 100000}};
	timer_t timer;
	signal(SIGUSR1, hear);
	if (timer_create(CLOCK_MONOTONIC, &event, &timer) || timer_settime(timer, 0, &often, NULL))
		exit(2);
}

static void start(pthread_t *thread, void *(*body)(void *), void *argument)
{
	if (pthread_create(thread, NULL, body, argument))
		exit(2);
}

static uint64_t word(uint64_t page, uint64_t at)
{
	return page * 0x9e3779b97f4a7c15 ^ at / 16; // a RAM tier makes it smaller
}

int main(int count, char **arguments)
{
	cpu_set_t allowed;
	if (count != 4 || sched_getaffinity(0, sizeof allowed, &allowed))
		return 2;
	way = arguments[1];
	int found = 0;
	for (int cpu = 0; cpu < CPU_SETSIZE && found < 2; cpu++)
		if (CPU_ISSET(cpu, &allowed))
			cpus[found++] = cpu;
	if (found < 2)
		return 77;
	uint64_t pages = strtoul(arguments[2], NULL, 0) << 8, state = 88172645463325252, most = 0, accesses = 0, late = 0, stalled = 0;
	volatile uint64_t *memory = mmap(NULL, pages * PAGE, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
	if (memory == MAP_FAILED)
		return 2;
	for (uint64_t page = 0; page < pages; page++)
		for (uint64_t at = 0; at < WORDS; at++)
			memory[page * WORDS + at] = word(page, at);
	int file = memfd_create("copies", 0), threads = 0;
	pthread_t thread[2];
	if (is("follow"))
		start(&thread[threads++], follow, NULL);
	else if (!is("kernel") && !is("aside"))
		start(&thread[threads++], spin, &cpus[0]);
	if (is("both") || is("aside"))
		start(&thread[threads++], spin, &cpus[1]);
	if (!is("follow"))
		bind(cpus[0]);
	if (!is("follow") && !is("aside"))
		be_urgent(51);
	if (is("kernel"))
		be_disturbed();
	usleep(10000);
	uint64_t start_at = now(), at = start_at;
	while (at < start_at + strtoul(arguments[3], NULL, 0) * 1000000000) {
		state ^= state << 13, state ^= state >> 7, state ^= state << 17;
		uint64_t page = state % pages, began = now();
		where = sched_getcpu();
		if (is("kernel") && pwrite(file, (void *)(memory + page * WORDS), PAGE, 0) != PAGE)
			return 2;
		uint64_t first = memory[page * WORDS];
		at = now();
		if (first != word(page, 0))
			return 3;
		for (uint64_t of = 1; of < WORDS; of++)
			if (memory[page * WORDS + of] != word(page, of))
				return 3;
		most = at - began > most ? at - began : most;
		late += at - began > 1000000;
		stalled += at - began > 400000000 ? at - began : 0;
		// Others may have the processor at times, as with a program of this kind.
		if (++accesses % 64 == 0)
			usleep(1000);
	}
	stop = 1;
	while (threads)
		pthread_join(thread[--threads], NULL);
	printf("%.3f %lu %lu %.3f\n", most / 1e6, accesses, late, stalled / (double)(at - start_at));
}
