// Registers memory with a userfaultfd of its own after pages of it have left, for tests.
//
//   own_uffd MIB PRESSURE_MIB
//
// Of MIB, the first half is filled and the second is never touched. A thread of the program writes
// to the filled pages all the time, also while the memory is registered. The program serves the
// others by its userfaultfd, but for a few in the middle, which may be there already. Prints
// "right"; status 86: a byte is wrong; 77: there is no userfaultfd; 3: it was refused.
#define _GNU_SOURCE
#include <fcntl.h>
#include <linux/userfaultfd.h>
#include <pthread.h>
#include <string.h>
#include <sys/ioctl.h>
#include <sys/syscall.h>

#include "pages.h"

enum { AHEAD = 128 };

static int own;
static uint64_t *mine, mine_pages, half, served;
static volatile int ends;

static uint64_t word(uint64_t page, uint64_t at)
{
	return mix64(page << 20 ^ at << 48 ^ 77);
}

static void *serve(void *unused)
{
	static uint64_t page[WORDS] __attribute__((aligned(4096)));
	struct uffd_msg message;
	while (read(own, &message, sizeof message) == sizeof message) {
		uint64_t at = message.arg.pagefault.address & ~4095ul, no = (at - (uint64_t)mine) / PAGE;
		for (uint64_t i = 0; i < WORDS; i++)
			page[i] = word(no, i);
		struct uffdio_copy copy = {at, (uint64_t)page, PAGE, 0, 0};
		if (no < half || ioctl(own, UFFDIO_COPY, &copy))
			_exit(WRONG); // a page that was filled is missing
		served += no >= half + AHEAD;
	}
	return unused;
}

// Counts in the last word of the filled pages, one after the other.
static void *writer(void *unused)
{
	for (uint64_t round = 1; !ends; round++)
		for (uint64_t p = 0; p < half; p++) {
			volatile uint64_t *last = &mine[p * WORDS + WORDS - 1];
			if (*last != round - 1) {
				fprintf(stderr, "page %lu: %lu writes, not %lu\n", p, *last, round - 1);
				_exit(WRONG);
			}
			*last = round;
		}
	return unused;
}

static void compare(void)
{
	for (uint64_t p = 0; p < mine_pages; p = p + 1 == half ? half + AHEAD : p + 1)
		for (uint64_t i = 0; i < WORDS - 1; i++)
			if (mine[p * WORDS + i] != word(p, i)) {
				fprintf(stderr, "page %lu word %lu is wrong\n", p, i);
				_exit(WRONG);
			}
}

int main(int argc, char **argv)
{
	if (argc < 3)
		return 2;
	mine_pages = strtoull(argv[1], NULL, 10) * 256;
	mine = mmap(NULL, mine_pages * PAGE, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
	half = mine_pages / 2;
	for (uint64_t p = 0; p < half; p++)
		for (uint64_t i = 0; i < WORDS - 1; i++)
			mine[p * WORDS + i] = word(p, i);
	uint32_t *version = filled_pages(strtoull(argv[2], NULL, 10));
	own = syscall(SYS_userfaultfd, O_CLOEXEC);
	struct uffdio_api api = {UFFD_API, 0, 0};
	if (own < 0 || ioctl(own, UFFDIO_API, &api))
		return 77;
	pthread_t threads[2];
	pthread_create(&threads[0], NULL, writer, NULL);
	usleep(20000);
	struct uffdio_register range = {{(uint64_t)mine, mine_pages * PAGE}, UFFDIO_REGISTER_MODE_MISSING, 0};
	if (ioctl(own, UFFDIO_REGISTER, &range)) {
		perror("register");
		return 3;
	}
	pthread_create(&threads[1], NULL, serve, NULL);
	for (int round = 0; round < 2; round++) {
		compare();
		for (uint64_t p = 0; p < pages; p++) {
			check(p, version[p]);
			fill(p, ++version[p]);
		}
	}
	ends = 1;
	pthread_join(threads[0], NULL);
	// The same place for other memory, which may be managed or not.
	munmap(mine, mine_pages * PAGE);
	if (mmap(mine, mine_pages * PAGE, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_FIXED, -1, 0) != mine)
		return 2;
	for (uint64_t p = 0; p < mine_pages; p++)
		for (uint64_t i = 0; i < WORDS - 1; i++)
			mine[p * WORDS + i] = word(p, i);
	for (uint64_t p = 0; p < pages; p++)
		check(p, version[p]);
	compare();
	puts("right");
	return served == mine_pages - half - AHEAD ? 0 : WRONG;
}
