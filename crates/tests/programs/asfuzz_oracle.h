// The shadow oracle of asfuzz: what every byte of every arena page must be, recomputed from a few
// words a page.
//
// A page is 8 blocks of 512 bytes. The oracle keeps one version number a block (0 = zeros). The
// bytes of a block are a pure function of content seed, version, block and word. Besides, one
// 8-byte "patch" may lie anywhere in the page. A page may also be "opaque" (bytes from getrandom):
// only its hash is kept. Versions are never used twice, not even by forked relatives. So a stale
// page, another page's bytes and lost zeros all differ from the right bytes.
//
//   version:  59       48 47    42 41                2 1    0
//            +-----------+--------+-------------------+------+
//            | process 12| thread | counter 40        | kind |     word 0 of a block = version | block << 60
//            +-----------+--------+-------------------+------+
//
// The oracle lives in MAP_SHARED memory, which is not managed. So the code under test cannot spoil
// the oracle as well.
#ifndef ASFUZZ_ORACLE_H
#define ASFUZZ_ORACLE_H

#ifndef _GNU_SOURCE
#define _GNU_SOURCE
#endif
#include "low.h"
#include <errno.h>
#include <stdarg.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

typedef uint8_t u8;
typedef uint16_t u16;
typedef uint32_t u32;
typedef uint64_t u64;

enum { PAGE = 4096, BLOCKS = 8, BLOCK = PAGE / BLOCKS, BLOCK_WORDS = BLOCK / 8, PAGE_WORDS = PAGE / 8 };
enum { KIND_RANDOM = 0, KIND_COMPRESSIBLE = 1, KIND_FILL = 2, KIND_SPARSE = 3 };
enum { PROT_0 = 0, PROT_R = 1, PROT_RW = 2 };
enum { F_DONTFORK = 1, F_WIPE = 2, F_FREED = 4, F_OPAQUE = 8, F_LOCKED = 16 };
enum { RING = 4096 };
enum { EXIT_MISMATCH = 3, EXIT_BROKEN = 4 };

// What one arena page must hold.
struct page {
	u64 version[BLOCKS];
	u64 patch;    // version of the patch, 0 = none
	u64 sum;      // opaque pages: hash of the bytes
	u16 patch_at; // byte offset of the patch, 0..4088
	u8 mapped, prot, flags, spare;
	u32 slot; // pages with the same slot lie in one mapping: one mmap made them, and nothing cut it
};

// One operation, for the history printed with a mismatch.
struct step {
	u64 number;
	const char *what;
	u32 start, count, arg;
};

// Everything one worker knows; copied whole for a fork child.
struct world {
	u64 seed, content_seed, rng;
	u64 process, thread, counter; // of the next version
	u64 steps, ops_left, turn;
	u8 *base; // arena address
	int leader; // a process that its sharer outlives
	u32 pages, depth, cursor, live, slots;
	u32 history_at;
	u64 done[64]; // operations by kind
	u64 checked_pages, refused, segv_seen, freed_zero, freed_old;
	struct step history[RING];
	struct page page[];
};

static inline u64 mix64(u64 x)
{
	x += 0x9e3779b97f4a7c15ull;
	x = (x ^ (x >> 30)) * 0xbf58476d1ce4e5b9ull;
	x = (x ^ (x >> 27)) * 0x94d049bb133111ebull;
	return x ^ (x >> 31);
}

static inline u64 rnd(struct world *w)
{
	w->rng += 0x9e3779b97f4a7c15ull;
	return mix64(w->rng);
}

// Uniform in [0, n); n > 0.
static inline u32 below(struct world *w, u32 n) { return (u32)(((rnd(w) >> 32) * n) >> 32); }

static inline u64 new_version(struct world *w)
{
	u64 kind = below(w, 8);
	kind = kind < 1 ? KIND_RANDOM : kind < 6 ? KIND_COMPRESSIBLE : kind == 6 ? KIND_FILL : KIND_SPARSE;
	return w->process << 48 | w->thread << 42 | (++w->counter & ((1ull << 40) - 1)) << 2 | kind;
}

static inline u64 word_of(const struct world *w, u64 version, u32 block, u32 word)
{
	if (version == 0)
		return 0;
	if ((version & 3) == KIND_FILL) {
		u64 half = (u32)mix64(version ^ w->content_seed) | 1;
		return half << 32 | half;
	}
	if (word == 0)
		return version | (u64)block << 60;
	switch (version & 3) {
	case KIND_RANDOM:
		return mix64((version ^ w->content_seed) + (u64)block * 1000003 + word);
	case KIND_COMPRESSIBLE:
		return (version ^ w->content_seed) + block + word / 4;
	default:
		return 0;
	}
}

static inline u64 patch_word(const struct world *w, u64 version) { return mix64(version ^ w->content_seed ^ 0xabcdef); }

// The bytes that `p` must hold, into `out` (one page). Not for opaque pages.
static inline void expect_page(const struct world *w, const struct page *p, u64 *out)
{
	for (u32 b = 0; b < BLOCKS; b++) {
		if (p->version[b] == 0)
			memset(out + b * BLOCK_WORDS, 0, BLOCK);
		else
			for (u32 i = 0; i < BLOCK_WORDS; i++)
				out[b * BLOCK_WORDS + i] = word_of(w, p->version[b], b, i);
	}
	if (p->patch) {
		u64 value = patch_word(w, p->patch);
		memcpy((u8 *)out + p->patch_at, &value, 8);
	}
}

static inline u64 hash_page(const u64 *words)
{
	u64 sum = 0x1234567;
	for (u32 i = 0; i < PAGE_WORDS; i++)
		sum = mix64(sum ^ words[i]);
	return sum;
}

static inline int is_zero_page(const struct page *p)
{
	u64 any = p->patch;
	for (u32 b = 0; b < BLOCKS; b++)
		any |= p->version[b];
	return any == 0 && !(p->flags & F_OPAQUE);
}

static inline void set_zero(struct page *p)
{
	memset(p->version, 0, sizeof p->version);
	p->patch = 0;
	p->flags &= ~(F_FREED | F_OPAQUE);
}

static inline u8 *address_of(const struct world *w, u32 index) { return w->base + (u64)index * PAGE; }

static inline void remember(struct world *w, const char *what, u32 start, u32 count, u32 arg)
{
	struct step *s = &w->history[w->history_at++ % RING];
	*s = (struct step){ w->steps, what, start, count, arg };
}

// Writes to standard error in one system call, so that lines of several processes do not mix.
__attribute__((format(printf, 1, 2))) static inline void say(const char *format, ...)
{
	char line[2048];
	va_list args;
	va_start(args, format);
	int n = vsnprintf(line, sizeof line, format, args);
	va_end(args);
	if (n > (int)sizeof line - 1)
		n = sizeof line - 1;
	if (write(2, line, n) < 0)
		_exit(EXIT_BROKEN);
}

// Another thing than memory contents is wrong (a system call failed that must not): says what, and
// ends.
#define broken(w, ...)                                                                                                 \
	do {                                                                                                               \
		say("asfuzz: BROKEN pid %d thread %lu step %lu: ", getpid(), (w)->thread, (w)->steps);                         \
		say(__VA_ARGS__);                                                                                              \
		say(" (errno %d %s)\n", errno, strerror(errno));                                                               \
		_exit(EXIT_BROKEN);                                                                                            \
	} while (0)

static inline void print_history(const struct world *w, u32 index)
{
	u32 shown = 0, from = w->history_at > RING ? w->history_at - RING : 0;
	for (u32 at = from; at < w->history_at; at++) {
		const struct step *s = &w->history[at % RING];
		if (index < s->start || index >= s->start + s->count)
			continue;
		say("    step %lu %s pages %u..%u arg %u\n", s->number, s->what, s->start, s->start + s->count, s->arg);
		shown++;
	}
	say("    (%u of the last %u steps touched this page; now at step %lu)\n", shown, w->history_at - from, w->steps);
}

// Names what a wrong page holds: zeros, an older version (stale), or another page's bytes
// (foreign).
static inline void name_found(const struct world *w, u32 index, const u64 *found)
{
	u64 any = 0;
	for (u32 i = 0; i < PAGE_WORDS; i++)
		any |= found[i];
	if (!any) {
		say("    found: ZERO page\n");
		return;
	}
	for (u32 b = 0; b < BLOCKS; b++) {
		u64 tag = found[b * BLOCK_WORDS], version = tag & ~(15ull << 60), expected = w->page[index].version[b];
		u64 process = version >> 48, thread = version >> 42 & 63;
		int tagged = tag >> 60 == b && process && version >> 2;
		const char *whose = "unknown bytes";
		u32 owner = ~0u;
		for (u32 i = 0; tagged && i < w->pages && owner == ~0u; i++)
			for (u32 c = 0; c < BLOCKS; c++)
				if (w->page[i].version[c] == version && i != index)
					owner = i;
		if (tag == 0)
			whose = "ZERO";
		else if (tag == expected)
			whose = "as expected";
		else if (owner != ~0u)
			whose = "FOREIGN: the current bytes of another page";
		else if (tagged && thread == w->thread)
			whose = process == w->process ? "STALE: an older version" : "STALE, or a forked relative's bytes";
		else if (tagged)
			whose = "FOREIGN: another thread's bytes";
		say("    block %u: word %016lx is %s (owner page %d); expected version %lx\n", b, tag, whose, (int)owner, expected);
	}
}

static inline void mismatch(struct world *w, const char *where, u32 index, const u64 *found, const u64 *expected)
{
	u32 at = 0;
	const struct page *p = &w->page[index];
	while (expected && at < PAGE_WORDS && found[at] == expected[at])
		at++;
	say("asfuzz: MISMATCH seed %lu pid %d thread %lu depth %u process %lu step %lu in %s\n"
	    "    page %u address %p prot %u flags %x: first wrong word %u expected %016lx found %016lx\n",
	    w->seed, getpid(), w->thread, w->depth, w->process, w->steps, where, index, (void *)address_of(w, index), p->prot,
	    p->flags, at, expected && at < PAGE_WORDS ? expected[at] : 0, found[at % PAGE_WORDS]);
	name_found(w, index, found);
	// A second look tells a lasting loss from a passing one (a torn or racing install).
	if (p->prot != PROT_0) {
		const volatile u64 *again = (const volatile u64 *)address_of(w, index);
		say("    the same word read again: %016lx\n", again[at % PAGE_WORDS]);
	}
	print_history(w, index);
	printf("mismatches 1\n");
	fflush(stdout);
	_exit(EXIT_MISMATCH);
}

// Checks one page's bytes, already copied to `found` in ascending order, against the oracle.
static inline void check_bytes(struct world *w, const char *where, u32 index, const u64 *found)
{
	struct page *p = &w->page[index];
	u64 expected[PAGE_WORDS];
	w->checked_pages++;
	if (p->flags & F_OPAQUE) {
		if (hash_page(found) == p->sum) {
			w->freed_old += !!(p->flags & F_FREED);
			return;
		}
		if (p->flags & F_FREED) {
			u32 zeros = PAGE_WORDS; // an ordered read may see old bytes first and zeros after some place
			while (zeros > 0 && found[zeros - 1] == 0)
				zeros--;
			if (zeros < PAGE_WORDS) {
				set_zero(p);
				w->freed_zero++;
				return;
			}
		}
		mismatch(w, where, index, found, NULL);
	}
	expect_page(w, p, expected);
	if (memcmp(found, expected, PAGE) == 0) {
		w->freed_old += !!(p->flags & F_FREED);
		return;
	}
	if (!(p->flags & F_FREED))
		mismatch(w, where, index, found, expected);
	// MADV_FREE: until the page is written, the kernel may replace it by zeros at any one
	// moment. `found` was read in ascending order. So old bytes followed by zeros are legal;
	// zeros followed by old bytes are not.
	u32 at = 0;
	while (at < PAGE_WORDS && found[at] == expected[at])
		at++;
	for (u32 i = at; i < PAGE_WORDS; i++)
		if (found[i] != 0)
			mismatch(w, where, index, found, expected);
	w->freed_zero++;
	set_zero(p); // once seen as zeros it must stay zeros
}
#endif
