// Threads that run beside the workers of asfuzz: counters, futexes, thread storms, spawned
// programs, the timer signal.
#ifndef ASFUZZ_SIDE_H
#define ASFUZZ_SIDE_H

#include "asfuzz_oracle.h"
#include <linux/futex.h>
#include <pthread.h>
#include <sched.h>
#include <signal.h>
#include <spawn.h>
#include <sys/syscall.h>
#include <sys/time.h>
#include <sys/wait.h>

enum { COUNTER_PAGES = 512, COUNTER_THREADS = 3, FUTEX_PAGES = 64, ALARM_PAGES = 128, STORM = 8, STORM_STACK = 256 << 10 };

// In MAP_SHARED memory, which is not managed: what the side threads know.
struct side {
	int stop, realtime;
	u64 realtime_threads;
	u64 children[8]; // fork children by what they became
	u64 turns; // forks by workers, which make one child of each kind first
	u64 processes, child_ops, forks, quiet_forks, direct_skipped;
	u64 vforks, clones, guards, pins, breaks, outlived, overs; // operations that were carried out, not only chosen
	u64 sharers_done, sharers_lost; // sharers that outlived a process, and pages that were lost with it
	u64 mine[COUNTER_THREADS][COUNTER_PAGES]; // increments by this thread of its own word
	u64 seen[COUNTER_THREADS][COUNTER_PAGES]; // last value of the common word
	u64 increments, futex_rounds, storm_threads, spawned, alarms;
	u64 alarm_value[ALARM_PAGES];
};

static struct side *side;
static u64 (*counters)[PAGE_WORDS]; // managed: word 0 is common, word 8 * (1 + t) belongs to thread t
static u32 *futexes;                // managed
static u64 (*alarm_pages)[PAGE_WORDS];

static int stopping(void) { return __atomic_load_n(&side->stop, __ATOMIC_RELAXED); }

static void side_mismatch(const char *what, u64 page, u64 expected, u64 found)
{
	say("asfuzz: MISMATCH in %s: page %lu expected %lu found %lu%s\n", what, page, expected, found,
	    found == 0 ? " (ZERO)" : found < expected ? " (STALE: an increment was lost)" : "");
	printf("mismatches 1\n");
	fflush(stdout);
	_exit(EXIT_MISMATCH);
}

// The lowest pages never change.
static void low_is_wrong(const char *where, uintptr_t page)
{
	u64 word = low_wrong_word(page) % LOW_WORDS;
	side_mismatch(where, page / LOW_PAGE, low_word(page, word), ((volatile u64 *)page)[word]);
}

static void check_low(const char *where)
{
	uintptr_t page = low_wrong_page();
	if (page)
		low_is_wrong(where, page);
}

// Atomic increments on pages that all threads share. Each thread's own count is exact; the common
// count only rises.
static void *count_up(void *argument)
{
	u64 me = (u64)argument, rng = me;
	struct sched_param priority = { .sched_priority = 1 };
	// With --realtime two of them are real-time threads, one of each kind.
	if (me < 2 && side->realtime) {
		if (sched_setscheduler(0, me ? SCHED_RR : SCHED_FIFO, &priority)) {
			say("asfuzz: BROKEN real-time priority: %s\n", strerror(errno));
			_exit(EXIT_BROKEN);
		}
		__atomic_add_fetch(&side->realtime_threads, 1, __ATOMIC_RELAXED);
	}
	while (!stopping()) {
		u64 page = mix64(++rng) % COUNTER_PAGES;
		u64 own = __atomic_add_fetch(&counters[page][8 * (1 + me)], 1, __ATOMIC_SEQ_CST);
		if (own != ++side->mine[me][page])
			side_mismatch("a thread's own counter", page, side->mine[me][page], own);
		u64 common = __atomic_add_fetch(&counters[page][0], 1, __ATOMIC_SEQ_CST);
		if (common <= side->seen[me][page])
			side_mismatch("a common counter", page, side->seen[me][page] + 1, common);
		side->seen[me][page] = common;
		__atomic_add_fetch(&side->increments, 1, __ATOMIC_RELAXED);
		if (rng % 256 == 0)
			usleep(1000); // leave the pages alone for a while
	}
	return NULL;
}

static void check_counters(void)
{
	for (u64 page = 0; page < COUNTER_PAGES; page++) {
		u64 sum = 0;
		for (u32 t = 0; t < COUNTER_THREADS; t++)
			sum += side->mine[t][page];
		if (counters[page][0] != sum)
			side_mismatch("the sum of counters", page, sum, counters[page][0]);
	}
}

// Two threads hand a token to and fro through futexes on pages that may be evicted while one sleeps
// on them.
static void *ping_pong(void *argument)
{
	u32 me = (u64)argument;
	for (u32 round = 0; !stopping(); round++) {
		u32 *word = futexes + round % FUTEX_PAGES * (PAGE / 4), turn = round / FUTEX_PAGES * 2 + me;
		struct timespec tenth = { 0, 100 * 1000 * 1000 };
		for (u32 value; (value = __atomic_load_n(word, __ATOMIC_ACQUIRE)) != turn;) {
			if ((int)(turn - value) < 0)
				side_mismatch("a futex word", round % FUTEX_PAGES, turn, value);
			if (stopping())
				return NULL;
			syscall(SYS_futex, word, FUTEX_WAIT_PRIVATE, value, &tenth, NULL, 0);
		}
		__atomic_store_n(word, turn + 1, __ATOMIC_RELEASE);
		syscall(SYS_futex, word, FUTEX_WAKE_PRIVATE, 1, NULL, NULL, 0);
		if (me == 0)
			__atomic_add_fetch(&side->futex_rounds, 1, __ATOMIC_RELAXED);
		if (round % 16 == 0)
			usleep(500);
	}
	return NULL;
}

// Fills much of its stack, rests, and checks it.
static void *deep(void *argument)
{
	volatile u64 words[8192];
	u64 key = (u64)argument;
	for (u32 i = 0; i < 8192; i++)
		words[i] = mix64(key + i);
	usleep(key % 3000);
	for (u32 i = 0; i < 8192; i++)
		if (words[i] != mix64(key + i))
			side_mismatch("a thread's stack", i, mix64(key + i), words[i]);
	return (void *)mix64(key);
}

// Makes and joins threads all the time, every fourth on a stack that the program mapped itself.
static void *storm(void *argument)
{
	u64 key = (u64)argument;
	while (!stopping()) {
		pthread_t threads[STORM];
		void *stacks[STORM] = { 0 };
		u64 first = key;
		for (u32 i = 0; i < STORM; i++, key++) {
			pthread_attr_t attr;
			pthread_attr_init(&attr);
			pthread_attr_setstacksize(&attr, STORM_STACK);
			if (i % 4 == 0) {
				stacks[i] = mmap(NULL, STORM_STACK, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
				pthread_attr_setstack(&attr, stacks[i], STORM_STACK);
			}
			if (pthread_create(&threads[i], &attr, deep, (void *)key)) {
				say("asfuzz: BROKEN pthread_create: %s\n", strerror(errno));
				_exit(EXIT_BROKEN);
			}
			pthread_attr_destroy(&attr);
		}
		for (u32 i = 0; i < STORM; i++) {
			void *result;
			pthread_join(threads[i], &result);
			if ((u64)result != mix64(first + i))
				side_mismatch("a thread's result", i, mix64(first + i), (u64)result);
			if (stacks[i])
				munmap(stacks[i], STORM_STACK);
		}
		__atomic_add_fetch(&side->storm_threads, STORM, __ATOMIC_RELAXED);
		usleep(20000);
	}
	return NULL;
}

extern char **environ;

// vfork and exec of a small program: its exit status must be right, and our memory unharmed.
static void *spawner(void *argument)
{
	(void)argument;
	while (!stopping()) {
		char *ok[] = { "true", NULL }, *bad[] = { "false", NULL };
		int want = side->spawned % 2, status;
		pid_t pid;
		int error = posix_spawnp(&pid, want ? "false" : "true", NULL, NULL, want ? bad : ok, environ);
		if (error || waitpid(pid, &status, 0) != pid || !WIFEXITED(status) || WEXITSTATUS(status) != want) {
			say("asfuzz: BROKEN posix_spawn: error %d status %x\n", error, status);
			_exit(EXIT_BROKEN);
		}
		side->spawned++;
		usleep(50000);
	}
	return NULL;
}

// The timer's handler reads and writes pages of its own, on whatever thread and stack it lands.
static void on_alarm(int number)
{
	static int busy;
	int saved = errno;
	(void)number;
	if (!__atomic_exchange_n(&busy, 1, __ATOMIC_ACQUIRE)) {
		for (u32 i = 0; i < 2; i++) {
			u64 turn = ++side->alarms, page = mix64(turn) % ALARM_PAGES, at = mix64(turn / 2) % PAGE_WORDS;
			u64 held = side->alarm_value[page];
			for (u32 k = 0; k < PAGE_WORDS; k += 51)
				if (alarm_pages[page][k] != held)
					side_mismatch("a signal handler's page", page, held, alarm_pages[page][k]);
			if (alarm_pages[page][at] != held)
				side_mismatch("a signal handler's page", page, held, alarm_pages[page][at]);
			side->alarm_value[page] = turn;
			for (u32 k = 0; k < PAGE_WORDS; k++)
				alarm_pages[page][k] = turn;
		}
		__atomic_store_n(&busy, 0, __ATOMIC_RELEASE);
	}
	errno = saved;
}

static void *private_pages(u64 pages)
{
	void *at = mmap(NULL, pages * PAGE, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
	if (at == MAP_FAILED) {
		say("asfuzz: BROKEN mmap of %lu pages\n", pages);
		_exit(EXIT_BROKEN);
	}
	return at;
}

// Sets up a thread's signals: the timer allowed and, if asked, an alternate stack in ordinary
// private memory.
static void ready_for_signals(int own_stack)
{
	sigset_t set;
	if (own_stack) {
		stack_t stack = { .ss_sp = private_pages(32), .ss_size = 32 * PAGE };
		sigaltstack(&stack, NULL);
	}
	sigemptyset(&set);
	sigaddset(&set, SIGALRM);
	pthread_sigmask(SIG_UNBLOCK, &set, NULL);
}
#endif
