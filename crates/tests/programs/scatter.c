// Replaces its pages at random, and then drops most of them at random, for tests of the space that
// a file tier takes.
//
//   scatter MIB SECONDS FOLDER
//
// After SECONDS it makes the file "drops" in FOLDER, drops 15 of 16 pages, waits for a file "check"
// there, and compares every byte of all pages. Prints "right"; status 86: a byte is wrong.
#include <string.h>
#include <time.h>

#include "pages.h"

static int is_dropped(uint64_t page)
{
	return mix64(page) % 16 != 0;
}

int main(int argc, char **argv)
{
	if (argc < 4 || chdir(argv[3]))
		return 2;
	random_data = 1;
	time_t until = time(0) + atoi(argv[2]);
	uint32_t *version = filled_pages(strtoull(argv[1], NULL, 10));
	if (!version)
		return 2;
	for (uint64_t n = 0; n % 64 || time(0) < until; n++) {
		uint64_t page = mix64(n) % pages;
		check(page, version[page]);
		fill(page, ++version[page]);
	}
	fclose(fopen("drops", "w"));
	for (uint64_t page = 0; page < pages; page++)
		if (is_dropped(page) && madvise((void *)(memory + page * WORDS), PAGE, MADV_DONTNEED))
			return 2;
	while (access("check", F_OK))
		usleep(20000);
	for (uint64_t page = 0; page < pages; page++) {
		if (!is_dropped(page))
			check(page, version[page]);
		for (uint64_t i = 0; is_dropped(page) && i < WORDS; i++)
			if (memory[page * WORDS + i])
				return WRONG;
	}
	puts("right");
	return 0;
}
