// refused MIB CHILDREN: forks with a page table that is too small for all children. Fills MIB of memory,
// which is more than the limit. Then CHILDREN exist at once, and each reads every page: it is as the
// parent wrote it, or refused (SIGBUS). A child that is refused what it needs to live ends. Then the parent moves a half of its memory and reads all of it.
// When the children are gone, another child finds all pages of the other half.
// Prints the children that ended, and the pages that were read and refused: by the children, after the
// move, by the last child.
// Status 86: a word was wrong, or a page of the parent's other half was refused.
#define _GNU_SOURCE
#include "pages.h"
#include <setjmp.h>
#include <signal.h>
#include <string.h>
#include <sys/wait.h>

enum { ELSEWHERE = 9 };

static sigjmp_buf back;
static volatile sig_atomic_t looks;

static void refused_page(int signal)
{
	(void)signal;
	if (!looks)
		_exit(ELSEWHERE);
	siglongjmp(back, 1);
}

struct counts {
	uint64_t read, refused, done;
};

static void look(struct counts *counts, uint64_t from, uint64_t to)
{
	for (volatile uint64_t page = from; page < to; page++) {
		if (sigsetjmp(back, 1)) {
			looks = 0;
			counts->refused++;
			continue;
		}
		looks = 1;
		check(page, 0);
		looks = 0;
		counts->read++;
	}
}

static int exited(pid_t pid)
{
	int status;
	return waitpid(pid, &status, 0) == pid && status == 0;
}

// Waits until a child has read all pages, or has ended because it was refused others. 1: it has ended.
static int ended(pid_t pid, volatile struct counts *of)
{
	int status;
	while (!of->done) {
		if (waitpid(pid, &status, WNOHANG) == pid) {
			int refused = WIFSIGNALED(status) ? WTERMSIG(status) == SIGBUS : WEXITSTATUS(status) == ELSEWHERE;
			if (!refused)
				_exit(WRONG);
			return 1;
		}
		usleep(5000);
	}
	return 0;
}

int main(int argc, char **argv)
{
	if (argc != 3 || !map_pages(strtoull(argv[1], NULL, 10)))
		return 2;
	int children = atoi(argv[2]), go[2], gone[64], dead = 0;
	pid_t child[64];
	struct counts *of = mmap(NULL, PAGE, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
	if (of == MAP_FAILED || children < 1 || children > 64 || pipe(go))
		return 2;
	struct sigaction action = {.sa_handler = refused_page};
	sigaction(SIGBUS, &action, NULL);
	for (uint64_t page = 0; page < pages; page++)
		fill(page, 0);
	for (int at = 0; at < children; at++) {
		if ((child[at] = fork()) < 0)
			return 3;
		if (child[at] == 0) {
			char byte;
			close(go[1]);
			look(&of[at], 0, pages);
			of[at].done = 1;
			_exit(read(go[0], &byte, 1) ? 4 : 0);
		}
	}
	for (int at = 0; at < children; at++)
		dead += gone[at] = ended(child[at], &of[at]);
	struct counts all = {0}, moved = {0}, other = {0}, last = {0};
	uint64_t half = pages / 2;
	char *free = mmap(NULL, half * PAGE + (2 << 20), PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
	// A page off the old place, so that each part of the mapping needs a part of the table that is new.
	char *to = (char *)(((uintptr_t)free | ((2 << 20) - 1)) + 1 + PAGE + ((uintptr_t)memory & ((2 << 20) - 1)) % PAGE);
	void *from = (void *)memory;
	if (free == MAP_FAILED || mremap(from, half * PAGE, half * PAGE, MREMAP_MAYMOVE | MREMAP_FIXED, to) != to)
		return 6;
	volatile uint64_t *rest = memory;
	memory = (volatile uint64_t *)to;
	look(&moved, 0, half);
	memory = rest;
	look(&other, half, pages);
	close(go[1]);
	for (int at = 0; at < children; at++) {
		if (!gone[at] && !exited(child[at]))
			return 7;
		all.read += of[at].read;
		all.refused += of[at].refused;
	}
	// Their room comes back a moment after their end, when the manager has seen it: within 5 s.
	for (int attempt = 0; attempt < 100 && last.read != half; attempt++) {
		memset(of, 0, sizeof *of);
		if ((child[0] = fork()) == 0) {
			look(of, half, pages);
			_exit(0);
		}
		if (waitpid(child[0], &gone[0], 0) != child[0])
			return 8;
		last = *of;
		usleep(50000);
	}
	printf("%d %lu %lu %lu %lu %lu %lu\n", dead, all.read, all.refused, moved.read, moved.refused, last.read, last.refused);
	return other.refused ? WRONG : 0;
}
