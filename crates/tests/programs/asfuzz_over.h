// Two threads beside the workers of asfuzz. One touches shared memory that has just been mapped
// between anonymous mappings, so that the pager finds a mapping there that it cannot manage. At
// that moment the other moves managed memory over it.
#ifndef ASFUZZ_OVER_H
#define ASFUZZ_OVER_H

#include "asfuzz_side.h"

enum { OVER_BLOCKS = 128, OVER_PAGES = 8, OVER_BYTES = OVER_PAGES * PAGE };

static struct {
	u8 *blocks; // managed; never touched but here
	u8 *gap;    // nothing else is mapped in three times OVER_BYTES from here
	u64 turn, touched; // the last turn has no end: there is nothing to touch
} over = { .blocks = (u8 *)0x0e0000000000ull, .gap = (u8 *)0x0f0000000000ull }; // see main() on such addresses

static u64 over_word(u64 block, u64 word) { return mix64(block << 32 | word / 8) | 1; }

static void *over_map(u8 *at, size_t bytes, int flags)
{
	void *made = mmap(at, bytes, PROT_READ | PROT_WRITE, MAP_FIXED_NOREPLACE | MAP_ANONYMOUS | flags, -1, 0);
	if (made != at) {
		say("asfuzz: BROKEN mmap at %p: %s\n", (void *)at, strerror(errno));
		_exit(EXIT_BROKEN);
	}
	return made;
}

static void over_move(u8 *from, u8 *to)
{
	if (mremap(from, OVER_BYTES, OVER_BYTES, MREMAP_MAYMOVE | MREMAP_FIXED, to) != to) {
		say("asfuzz: BROKEN mremap over %p: %s\n", (void *)to, strerror(errno));
		_exit(EXIT_BROKEN);
	}
}

// Touches both as soon as they are there, whichever memory that is by now.
static void *over_touch(void *unused)
{
	for (u64 turn = 1, now; ; turn++) {
		while ((now = __atomic_load_n(&over.turn, __ATOMIC_ACQUIRE)) < turn)
			sched_yield();
		if (now == ~0ull)
			return unused;
		(void)*(volatile u8 *)over.gap;
		for (u32 page = 0; page < OVER_PAGES; page++)
			(void)*(volatile u8 *)(over.gap + OVER_BYTES + page * PAGE);
		__atomic_store_n(&over.touched, turn, __ATOMIC_RELEASE);
	}
	return unused;
}

static void *move_over(void *unused)
{
	u8 *middle = over.gap + OVER_BYTES;
	for (u64 turn = 1; !stopping(); turn++) {
		u64 block = turn % OVER_BLOCKS;
		u8 *home = over.blocks + block * OVER_BYTES;
		over_map(over.gap, OVER_BYTES, MAP_PRIVATE);
		over_map(middle + OVER_BYTES, OVER_BYTES, MAP_PRIVATE);
		// Last: the pager may register the other two, and all between them, a moment later.
		over_map(middle, OVER_BYTES, MAP_SHARED);
		__atomic_store_n(&over.turn, turn, __ATOMIC_RELEASE);
		for (volatile u64 wait = mix64(turn) % (turn & 1 ? 2000 : 40000); wait > 0; wait--)
			;
		over_move(home, middle);
		for (u64 i = 0; i < OVER_BYTES / 8; i += 1 + i % 13) {
			u64 found = ((volatile u64 *)middle)[i];
			if (found != over_word(block, i))
				side_mismatch("memory that was moved over a shared mapping", i / PAGE_WORDS, over_word(block, i), found);
		}
		while (__atomic_load_n(&over.touched, __ATOMIC_ACQUIRE) < turn)
			sched_yield();
		over_move(middle, home);
		munmap(over.gap, OVER_BYTES), munmap(middle + OVER_BYTES, OVER_BYTES);
		__atomic_add_fetch(&side->overs, 1, __ATOMIC_RELAXED);
		usleep(1000);
	}
	__atomic_store_n(&over.turn, ~0ull, __ATOMIC_RELEASE);
	return unused;
}

static void over_fill(void)
{
	over_map(over.blocks, OVER_BLOCKS * OVER_BYTES, MAP_PRIVATE);
	for (u64 i = 0; i < (u64)OVER_BLOCKS * OVER_BYTES / 8; i++)
		((u64 *)over.blocks)[i] = over_word(i / (OVER_BYTES / 8), i % (OVER_BYTES / 8));
}
#endif
