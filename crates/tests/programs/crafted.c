// crafted SPREAD: 4096 pages, each written twice. Both contents of a page have one XXH3 checksum, if the
// secret is XXH3's own and the seed the one guessed for the page: two words whose low halves are those of
// the secret add to no product, and their high halves have the same sum. Eviction and the stamp of a copy
// are guessed as the page's number over 16, give or take SPREAD. Prints how many of the second writes are
// lost; status 86 if any is.
#include "pages.h"
#include <string.h>

enum { COUNT = 4096 };

// The first two words of XXH3's default secret.
static const uint64_t EVEN = 0xbe4ba423396cfeb8, ODD = 0x1cad21f72c81017c;

static void put(uint64_t page, uint64_t stamp, uint64_t even, uint64_t odd)
{
	memory[page * WORDS] = even << 32 | (uint32_t)(EVEN + stamp);
	memory[page * WORDS + 8] = odd << 32 | (uint32_t)(ODD - stamp);
}

int main(int argc, char **argv)
{
	uint64_t spread = argc > 1 ? strtoull(argv[1], NULL, 10) : 1, lost = 0;
	if (!spread || !map_pages(COUNT / 256))
		return 2;
	random_data = 1;
	uint64_t stamp[COUNT];
	for (uint64_t page = 0; page < COUNT; page++) {
		stamp[page] = (page + mix64(page) % spread) / 16;
		fill(page, 0);
		put(page, stamp[page], 1000, 2000);
	}
	for (uint64_t page = 0; page < COUNT; page++)
		put(page, stamp[page], 1001, 1999);
	for (uint64_t page = 0; page < COUNT; page++)
		lost += memory[page * WORDS] >> 32 != 1001 || memory[page * WORDS + 8] >> 32 != 1999;
	printf("%lu\n", lost);
	return lost ? WRONG : 0;
}
