// A process that is stopped while its pages leave, by a child that needs pages before it lets it go
// on: for tests that kill the pager.
//
//   stopper MIB SECONDS
//
// Parent and child have MIB each, and verify and rewrite random pages of it. The child stops the
// parent, uses 64 of its own pages, lets the parent go on, and rests for a millisecond. A wrong page
// ends the program with status 86.
#define _GNU_SOURCE
#include <signal.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

enum { WORDS = 512, WRONG = 86 };
static uint64_t *memory, pages, seed;
static uint32_t *versions;

static uint64_t mix(uint64_t x)
{
	x = (x + 0x9e3779b97f4a7c15ull) * 0xbf58476d1ce4e5b9ull;
	x = (x ^ (x >> 27)) * 0x94d049bb133111ebull;
	return x ^ (x >> 31);
}

static uint64_t word(uint64_t page, uint64_t at)
{
	return mix(page << 32 ^ versions[page]) + at / 16;
}

static void fill(uint64_t page)
{
	versions[page]++;
	for (uint64_t at = 0; at < WORDS; at++)
		memory[page * WORDS + at] = word(page, at);
}

static void use(void)
{
	uint64_t page = mix(seed++) % pages;
	for (uint64_t at = 0; at < WORDS; at++)
		if (memory[page * WORDS + at] != word(page, at)) {
			fprintf(stderr, "page %lu word %lu is wrong\n", page, at);
			exit(WRONG);
		}
	fill(page);
}

static void own_memory(void)
{
	memory = mmap(NULL, pages * WORDS * 8, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
	versions = mmap(NULL, pages * 4, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
	for (uint64_t page = 0; page < pages; page++)
		fill(page);
}

int main(int count, char **words)
{
	pages = (uint64_t)atoi(words[1]) << 8;
	time_t end = time(NULL) + atoi(words[count - 1]);
	int *over = mmap(NULL, 4096, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
	pid_t parent = getpid(), child = fork();
	if (!child) {
		prctl(PR_SET_PDEATHSIG, SIGKILL);
		own_memory();
		while (!__atomic_load_n(over, __ATOMIC_ACQUIRE)) {
			kill(parent, SIGSTOP);
			for (int i = 0; i < 64; i++)
				use();
			kill(parent, SIGCONT);
			usleep(1000);
		}
		_exit(0);
	}
	own_memory();
	puts("ready");
	fflush(stdout);
	int status = 0;
	pid_t ended = 0;
	while (time(NULL) < end && !(ended = waitpid(child, &status, WNOHANG)))
		for (int i = 0; i < 64; i++)
			use();
	__atomic_store_n(over, 1, __ATOMIC_RELEASE);
	if (!ended)
		waitpid(child, &status, 0);
	return WIFEXITED(status) ? WEXITSTATUS(status) : WRONG;
}
