// The lowest pages that the kernel lets this process map, with known words. Programs do map them:
// emulators, and whoever asks for fixed addresses.
#ifndef LOW_H
#define LOW_H

#include <stdint.h>
#include <stdio.h>
#include <sys/mman.h>

// The hole splits them: some kernels cannot register what is below 64 KiB.
enum { LOW_PAGE = 4096, LOW_WORDS = LOW_PAGE / 8, LOW_HOLE = 0xf000, LOW_END = 0x20000 };
static uintptr_t low_start = LOW_END;

static int low_is_mapped(uintptr_t page) { return page >= low_start && page != LOW_HOLE; }

static uint64_t low_word(uintptr_t page, uint64_t word)
{
	return ((page + LOW_PAGE) * 0x9e3779b97f4a7c15ull + word / 16) | 1;
}

// Maps and fills them. The number of pages: 0 if `vm.mmap_min_addr` leaves none.
static int low_map(void)
{
	unsigned long least = 65536;
	FILE *file = fopen("/proc/sys/vm/mmap_min_addr", "r");
	if (file) {
		if (fscanf(file, "%lu", &least) != 1)
			least = 65536;
		fclose(file);
	}
	int count = 0;
	for (uintptr_t page = LOW_END - LOW_PAGE; page >= LOW_PAGE && page >= least; page -= LOW_PAGE) {
		int flags = MAP_PRIVATE | MAP_ANONYMOUS | MAP_FIXED_NOREPLACE;
		if (page == LOW_HOLE)
			continue;
		if (mmap((void *)page, LOW_PAGE, PROT_READ | PROT_WRITE, flags, -1, 0) != (void *)page)
			break;
		low_start = page;
		for (uint64_t i = 0; i < LOW_WORDS; i++)
			((volatile uint64_t *)page)[i] = low_word(page, i);
		count++;
	}
	return count;
}

// The first wrong word of a page, or `LOW_WORDS`.
static uint64_t low_wrong_word(uintptr_t page)
{
	uint64_t i = 0;
	while (i < LOW_WORDS && ((volatile uint64_t *)page)[i] == low_word(page, i))
		i++;
	return i;
}

// The first page with a wrong word, or 0.
static inline uintptr_t low_wrong_page(void)
{
	for (uintptr_t page = low_start; page < LOW_END; page += LOW_PAGE)
		if (low_is_mapped(page) && low_wrong_word(page) < LOW_WORDS)
			return page;
	return 0;
}
#endif
