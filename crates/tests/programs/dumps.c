// dumps MIB [child]: fills memory with marks and aborts; child: in a forked child. Page i begins
// with a mark and its number. The first pages are the program's own data.
#define _GNU_SOURCE
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/wait.h>
#include <unistd.h>

enum { WORDS = 512, OWN = 128 };
static volatile uint64_t own[OWN * WORDS] __attribute__((aligned(4096)));

static void fill(volatile uint64_t *page, uint64_t number)
{
	uint64_t word = number * 0x9e3779b97f4a7c15ull + 1;
	page[0] = 0xC0DEC0DE00000000ull + number;
	for (int i = 1; i < WORDS; i++) {
		word ^= word << 13, word ^= word >> 7, word ^= word << 17;
		page[i] = number % 2 ? word : number + 1;
	}
}

int main(int count, char **arguments)
{
	long pages = atol(arguments[1]) * 256;
	for (long page = 0; page < OWN; page++)
		fill(own + page * WORDS, page);
	uint64_t *memory = mmap(NULL, pages * 4096, PROT_READ | PROT_WRITE,
	                        MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
	if (memory == MAP_FAILED)
		return 2;
	for (long page = OWN; page < pages; page++)
		fill(memory + page * WORDS, page);
	if (count > 2) {
		pid_t pid = fork();
		if (pid == 0)
			abort();
		waitpid(pid, NULL, 0);
		return 0;
	}
	abort();
}
