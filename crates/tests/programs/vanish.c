// vanish moved|guarded|asleep MIB PAGES: pages vanish without an event: they are moved away by a
// userfaultfd of the program's own, or guarded and unguarded by raw system calls. Each page is then
// read by two threads at once, dropped, and used again. asleep: pages that were not used for long
// are guarded and unguarded.
//
// First PAGES pages that have left memory and come back, then PAGES fresh ones. Prints for both how
// many were taken away, and how these were read: by SIGBUS, as zeros, with their old bytes. Exit 86:
// other bytes came. Exit 77: the kernel cannot do it.
#define _GNU_SOURCE
#include <fcntl.h>
#include <linux/userfaultfd.h>
#include <pthread.h>
#include <setjmp.h>
#include <signal.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/ioctl.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <unistd.h>

enum { PAGE = 4096, GUARD_INSTALL = 102, GUARD_REMOVE = 103 };
struct move { uint64_t dst, src, len, mode; int64_t moved; };
#define MOVE _IOWR(UFFDIO, 5, struct move)

enum outcome { BUS, ZEROS, OLD, OUTCOMES };
static __thread sigjmp_buf jump;
static int own, asleep;
static char *away;

static void on_bus(int number)
{
	(void)number;
	siglongjmp(jump, 1);
}

// An area of the program's own userfaultfd: pages can be moved there.
static void prepare(uint64_t pages)
{
	own = syscall(SYS_userfaultfd, O_CLOEXEC | UFFD_USER_MODE_ONLY);
	struct uffdio_api api = { .api = UFFD_API };
	away = mmap(NULL, pages * PAGE, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
	struct uffdio_register all = { .range = { (uint64_t)away, pages * PAGE }, .mode = UFFDIO_REGISTER_MODE_MISSING };
	if (own < 0 || ioctl(own, UFFDIO_API, &api) || ioctl(own, UFFDIO_REGISTER, &all))
		exit(77);
}

// False if the page is not in memory.
static int take_away(char *page, int move)
{
	if (move) {
		struct move how = { .dst = (uint64_t)away, .src = (uint64_t)page, .len = PAGE };
		int taken = ioctl(own, MOVE, &how) == 0;
		away += taken ? PAGE : 0;
		return taken;
	}
	if (syscall(SYS_madvise, page, PAGE, GUARD_INSTALL))
		exit(77);
	return syscall(SYS_madvise, page, PAGE, GUARD_REMOVE) == 0;
}

static void *look(void *page)
{
	volatile uint64_t *at = page;
	if (sigsetjmp(jump, 1))
		return (void *)BUS;
	uint64_t first = *at;
	for (uint64_t i = 1; i < PAGE / 8; i++)
		if (at[i] != (first ? first + i : 0))
			exit(86);
	if (first && first != (uint64_t)at)
		exit(86);
	return (void *)(long)(first ? OLD : ZEROS);
}

static void fill(volatile uint64_t *at)
{
	for (uint64_t i = 0; i < PAGE / 8; i++)
		at[i] = (uint64_t)at + i;
}

// Takes `count` pages away, one of every `step`, and uses them again. Prints what was read.
static void vanish(char *area, uint64_t count, uint64_t step, int move)
{
	uint64_t taken = 0, read[OUTCOMES] = { 0 };
	for (uint64_t i = 0; i < count; i++) {
		char *page = area + i * step * PAGE;
		if (!asleep && look(page) != (void *)OLD)
			exit(86);
		if (!take_away(page, move))
			continue;
		taken++;
		pthread_t other;
		void *here, *there;
		pthread_create(&other, NULL, look, page);
		here = look(page);
		pthread_join(other, &there);
		if (here != there)
			exit(86);
		read[(long)here]++;
		madvise(page, PAGE, MADV_DONTNEED);
		if (look(page) != (void *)ZEROS)
			exit(86);
		fill((uint64_t *)page);
	}
	printf("%lu %lu %lu %lu\n", taken, read[BUS], read[ZEROS], read[OLD]);
}

int main(int count, char **arguments)
{
	if (count < 4)
		return 2;
	int move = !strcmp(arguments[1], "moved");
	asleep = !strcmp(arguments[1], "asleep");
	uint64_t pages = strtoull(arguments[2], NULL, 0) * 256, some = strtoull(arguments[3], NULL, 0);
	prepare(2 * some);
	sigaction(SIGBUS, &(struct sigaction){ .sa_handler = on_bus, .sa_flags = SA_NODEFER }, NULL);
	char *area = mmap(NULL, pages * PAGE, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
	for (uint64_t i = 0; i < pages; i++)
		fill((uint64_t *)(area + i * PAGE));
	for (uint64_t i = 0; i < 2 * pages; i++)
		if (look(area + i % pages * PAGE) != (void *)OLD)
			return 86;
	vanish(area, some, pages / some, move);
	char *fresh = mmap(NULL, some * PAGE, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
	for (uint64_t i = 0; i < some; i++)
		fill((uint64_t *)(fresh + i * PAGE));
	vanish(fresh, some, 1, move);
	for (uint64_t i = 0; i < pages; i++)
		if (look(area + i * PAGE) != (void *)OLD)
			return 86;
	return 0;
}
