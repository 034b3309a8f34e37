// The operations of asfuzz that change the layout of an arena: mmap, munmap, mremap, madvise,
// mprotect, mlock.
#ifndef ASFUZZ_LAYOUT_H
#define ASFUZZ_LAYOUT_H

#include "asfuzz_ops.h"
#include "asfuzz_side.h"

static const int prot_bits[] = { PROT_NONE, PROT_READ, PROT_READ | PROT_WRITE };

// Numbers the parts of `s` anew, by the mappings they belonged to, and also what follows `s`. An
// operation on a part of a mapping makes that part a mapping of its own, as far as a program may
// rely on it.
static void cut(struct world *w, struct span s)
{
	u32 end = s.start + s.count, last = w->page[end - 1].slot, inside = 0;
	if (end < w->pages && w->page[end].slot == last) {
		w->slots++;
		for (u32 i = end; i < w->pages && w->page[i].slot == last; i++)
			w->page[i].slot = w->slots;
	}
	for (u32 i = s.start; i < end; i++) {
		u32 old = w->page[i].slot;
		if (i == s.start || old != inside)
			w->slots++;
		inside = old, w->page[i].slot = w->slots;
	}
}

static void join(struct world *w, struct span s, u32 slot)
{
	for (u32 i = 0; i < s.count; i++)
		w->page[s.start + i].slot = slot;
}

static void set_mapped(struct world *w, struct span s, u8 prot, u8 flags)
{
	cut(w, s);
	w->slots++;
	for (u32 i = 0; i < s.count; i++) {
		struct page *p = &w->page[s.start + i];
		set_zero(p);
		w->live += !p->mapped;
		p->mapped = 1, p->prot = prot, p->flags = flags, p->slot = w->slots;
	}
}

static void set_unmapped(struct world *w, struct span s)
{
	if (s.count)
		cut(w, s);
	for (u32 i = 0; i < s.count; i++) {
		struct page *p = &w->page[s.start + i];
		set_zero(p);
		w->live -= !!p->mapped;
		p->mapped = 0, p->prot = PROT_0, p->flags = 0;
	}
}

// ---- faults that must stay faults ----

static __thread sigjmp_buf fault_jump;
static __thread volatile int fault_expected;
static volatile int outlives; // the process that moved this memory's pages has ended: some may be lost

static void on_fault(int number, siginfo_t *info, void *context)
{
	(void)context;
	if (fault_expected && (number == SIGSEGV || outlives))
		siglongjmp(fault_jump, 1);
	say("asfuzz: BROKEN pid %d unexpected signal %d code %d at %p\n", getpid(), number, info->si_code, info->si_addr);
	_exit(EXIT_BROKEN);
}

// True when the access raised SIGSEGV, or SIGBUS where pages may be lost.
static int faults(volatile u8 *at, int write)
{
	if (sigsetjmp(fault_jump, 1)) {
		fault_expected = 0;
		return 1;
	}
	fault_expected = 1;
	if (write)
		*at = 0x5a;
	else
		(void)*at;
	fault_expected = 0;
	return 0;
}

static void op_probe(struct world *w, struct gear *g)
{
	enum want want = below(w, 3) == 0 ? WANT_HOLE : below(w, 2) ? WANT_NONE : WANT_RONLY;
	struct span s = pick(w, 1, want);
	if (!s.count)
		return;
	volatile u8 *at = address_of(w, s.start) + below(w, PAGE);
	int write = want == WANT_RONLY || below(w, 2);
	remember(w, "probe", s.start, 1, want << 8 | write);
	if (!faults(at, write))
		broken(w, "%s of %p (page %u, %s) did not raise SIGSEGV", write ? "write" : "read", (void *)at, s.start,
		       want == WANT_HOLE ? "not mapped" : want == WANT_NONE ? "PROT_NONE" : "PROT_READ");
	w->segv_seen++;
	if (want == WANT_RONLY) {
		verify_page(w, "after a refused write", s.start);
	} else if (below(w, 2)) { // system calls must return EFAULT
		ssize_t n = pwrite(g->memfd, (void *)at, 1, 0);
		if (n != -1 || errno != EFAULT)
			broken(w, "pwrite from an inaccessible page gave %zd instead of EFAULT", n);
	}
}

// ---- mmap, munmap ----

static void op_mmap(struct world *w)
{
	struct span s = pick_hole(w, 1 + below(w, below(w, 4) ? 64 : 512));
	if (!s.count)
		return;
	u32 prot = below(w, 8) ? PROT_RW : below(w, 3);
	int flags = MAP_PRIVATE | MAP_ANONYMOUS | MAP_FIXED_NOREPLACE;
	flags |= below(w, 4) == 0 ? MAP_NORESERVE : 0;
	flags |= below(w, 8) == 0 ? MAP_POPULATE : 0;
	remember(w, "mmap", s.start, s.count, prot);
	void *at = mmap(address_of(w, s.start), (size_t)s.count * PAGE, prot_bits[prot], flags, -1, 0);
	if (at != address_of(w, s.start))
		broken(w, "mmap of %u pages in a hole at %p gave %p", s.count, (void *)address_of(w, s.start), at);
	set_mapped(w, s, prot, 0);
	if (prot == PROT_RW && below(w, 4)) {
		u64 version = new_version(w);
		for (u32 i = 0; i < s.count; i++)
			write_blocks(w, s.start + i, 0, BLOCKS, version);
	} else if (prot != PROT_0 && below(w, 4) == 0) {
		verify_span(w, "fresh mapping", s);
	}
}

static void op_munmap(struct world *w)
{
	struct span s = pick(w, below(w, 4) ? 32 : 512, WANT_MAPPED);
	if (!s.count)
		return;
	remember(w, "munmap", s.start, s.count, 0);
	if (munmap(address_of(w, s.start), (size_t)s.count * PAGE))
		broken(w, "munmap of %u pages at %p", s.count, (void *)address_of(w, s.start));
	set_unmapped(w, s);
}

// A new mapping over whatever is there: old bytes must not come back.
static void op_map_fixed(struct world *w)
{
	u32 count = 1 + below(w, below(w, 4) ? 32 : 256), start = below(w, w->pages - count);
	struct span s = { start, count };
	u32 prot = below(w, 8) ? PROT_RW : below(w, 3);
	remember(w, "mmap fixed over", s.start, s.count, prot);
	void *at = mmap(address_of(w, start), (size_t)count * PAGE, prot_bits[prot],
	                MAP_PRIVATE | MAP_ANONYMOUS | MAP_FIXED, -1, 0);
	if (at != address_of(w, start))
		broken(w, "mmap MAP_FIXED at %p gave %p", (void *)address_of(w, start), at);
	set_mapped(w, s, prot, 0);
	u32 way = below(w, 3);
	if (prot == PROT_RW && way == 0) {
		u64 version = new_version(w);
		for (u32 i = 0; i < s.count; i++)
			write_blocks(w, s.start + i, 0, BLOCKS, version);
	} else if (prot != PROT_0 && way == 1) {
		verify_span(w, "mapping over another", s);
	}
}

// ---- mremap ----

// Up to `most` pages of one mapping. Not locked: the kernel populates a locked mapping that moves,
// which is not tested here.
static struct span pick_one_mapping(struct world *w, u32 most)
{
	struct span s = pick(w, 1, WANT_UNLOCKED);
	u32 length = 1 + below(w, most);
	while (s.count && s.count < length && s.start + s.count < w->pages &&
	       w->page[s.start + s.count].slot == w->page[s.start].slot &&
	       suits(&w->page[s.start + s.count], WANT_ALIKE, &w->page[s.start]))
		s.count++;
	return s;
}

// The oracle's part of a move. The target becomes the source. The source becomes a hole, or fresh
// zeros.
static void move_pages(struct world *w, struct span from, u32 to, int keep_source)
{
	struct page moved[512];
	memcpy(moved, &w->page[from.start], from.count * sizeof *moved);
	u8 prot = moved[0].prot, flags = moved[0].flags & (F_DONTFORK | F_WIPE);
	if (keep_source)
		set_mapped(w, from, prot, flags);
	else
		set_unmapped(w, from);
	set_mapped(w, (struct span){ to, from.count }, prot, flags);
	u32 slot = w->page[to].slot;
	memcpy(&w->page[to], moved, from.count * sizeof *moved);
	join(w, (struct span){ to, from.count }, slot);
}

// Moves to a hole or over other pages, with or without growth, or leaves the source mapped
// (DONTUNMAP).
static void op_move(struct world *w)
{
	struct span s = pick_one_mapping(w, below(w, 4) ? 64 : 512);
	if (!s.count)
		return;
	int keep = below(w, 4) == 0;
	u32 grow = !keep && below(w, 3) == 0 ? below(w, 64) : 0, count = s.count + grow;
	u32 to;
	if (below(w, 3)) {
		struct span hole = pick_hole(w, count);
		if (!hole.count)
			return;
		to = hole.start;
	} else { // over other pages, not over itself
		to = below(w, w->pages - count);
		if (to < s.start + s.count && s.start < to + count)
			return;
	}
	int flags = MREMAP_MAYMOVE | MREMAP_FIXED | (keep ? MREMAP_DONTUNMAP : 0);
	u8 prot = w->page[s.start].prot, marks = w->page[s.start].flags & (F_DONTFORK | F_WIPE);
	const char *what = keep ? "mremap DONTUNMAP" : "mremap FIXED";
	remember(w, what, s.start, s.count, to);
	remember(w, "  target of mremap", to, count, s.start);
	void *at = mremap(address_of(w, s.start), (size_t)s.count * PAGE, (size_t)count * PAGE, flags, address_of(w, to));
	if (at != address_of(w, to))
		broken(w, "%s of %u to %u pages from %p to %p gave %p", what, s.count, count, (void *)address_of(w, s.start),
		       (void *)address_of(w, to), at);
	move_pages(w, s, to, keep);
	if (grow) {
		set_mapped(w, (struct span){ to + s.count, grow }, prot, marks);
		join(w, (struct span){ to, count }, w->slots);
	}
	u32 way = below(w, 3);
	if (way == 0)
		verify_span(w, "after mremap", (struct span){ to, count });
	if (keep && way == 1)
		verify_span(w, "source of DONTUNMAP", s);
}

// Shrinks or grows in place. Or lets the kernel choose a place, checks there, and moves back.
static void op_resize(struct world *w)
{
	struct span s = pick_one_mapping(w, 256);
	if (!s.count)
		return;
	u8 prot = w->page[s.start].prot, marks = w->page[s.start].flags & (F_DONTFORK | F_WIPE);
	u8 *at = address_of(w, s.start);
	u32 way = below(w, 3);
	if (way == 0) {
		u32 keep = 1 + below(w, s.count);
		remember(w, "mremap shrink", s.start, s.count, keep);
		if (mremap(at, (size_t)s.count * PAGE, (size_t)keep * PAGE, 0) != at)
			broken(w, "mremap from %u to %u pages at %p", s.count, keep, (void *)at);
		set_unmapped(w, (struct span){ s.start + keep, s.count - keep });
		return;
	}
	if (way == 1) {
		u32 grow = 1 + below(w, 64), end = s.start + s.count;
		for (u32 i = 0; i < grow; i++)
			if (end + i >= w->pages || w->page[end + i].mapped)
				grow = i;
		if (!grow)
			return;
		remember(w, "mremap grow", s.start, s.count + grow, s.count);
		if (mremap(at, (size_t)s.count * PAGE, (size_t)(s.count + grow) * PAGE, 0) != at)
			broken(w, "mremap in place from %u by %u pages at %p", s.count, grow, (void *)at);
		cut(w, s);
		set_mapped(w, (struct span){ end, grow }, prot, marks);
		join(w, (struct span){ s.start, s.count + grow }, w->slots);
		if (prot != PROT_0 && below(w, 2))
			verify_span(w, "grown part", (struct span){ end, grow });
		return;
	}
	// To a place of the kernel's choice: large growth cannot stay. The hole left behind is free
	// for the way back.
	u32 grow = w->pages, count = s.count + grow;
	remember(w, "mremap MAYMOVE away and back", s.start, s.count, 0);
	cut(w, s);
	u8 *away = mremap(at, (size_t)s.count * PAGE, (size_t)count * PAGE, MREMAP_MAYMOVE);
	if (away == at) { // there was room after the arena, so nothing moved: take the old length again
		if (mremap(at, (size_t)count * PAGE, (size_t)s.count * PAGE, 0) != at)
			broken(w, "mremap back to %u pages at %p", s.count, (void *)at);
		return;
	}
	if (away == MAP_FAILED)
		broken(w, "mremap MAYMOVE from %u to %u pages at %p gave %p", s.count, count, (void *)at, (void *)away);
	if (prot != PROT_0)
		for (u32 i = 0; i < s.count; i += 1 + i / 4) {
			u64 found[PAGE_WORDS];
			for (u32 k = 0; k < PAGE_WORDS; k++)
				found[k] = ((volatile u64 *)(away + (u64)i * PAGE))[k];
			check_bytes(w, "moved away", s.start + i, found);
		}
	if (prot != PROT_0 && away[(u64)count * PAGE - 1] != 0)
		broken(w, "the grown part at %p is not zero", (void *)away);
	if (prot == PROT_RW)
		away[(u64)count * PAGE - 1] = 1;
	if (mremap(away, (size_t)count * PAGE, (size_t)s.count * PAGE, MREMAP_MAYMOVE | MREMAP_FIXED, at) != at)
		broken(w, "mremap back to %p", (void *)at);
	if (below(w, 2))
		verify_span(w, "moved back", s);
}

// ---- madvise, mprotect, mlock ----

static int advise(struct world *w, struct span s, int advice)
{
	int result = madvise(address_of(w, s.start), (size_t)s.count * PAGE, advice);
	if (result)
		w->refused++;
	return result;
}

static void op_dontneed(struct world *w)
{
	struct span s = pick(w, below(w, 4) ? 32 : 256, WANT_UNLOCKED);
	remember(w, "MADV_DONTNEED", s.start, s.count, 0);
	if (!s.count)
		return;
	if (advise(w, s, MADV_DONTNEED))
		broken(w, "MADV_DONTNEED of %u pages at %p", s.count, (void *)address_of(w, s.start));
	for (u32 i = 0; i < s.count; i++)
		set_zero(&w->page[s.start + i]);
	if (below(w, 3) == 0)
		verify_span(w, "after MADV_DONTNEED", s);
}

static void op_free(struct world *w)
{
	struct span s = pick(w, 64, WANT_UNLOCKED);
	remember(w, "MADV_FREE", s.start, s.count, 0);
	if (!s.count)
		return;
	if (advise(w, s, MADV_FREE))
		broken(w, "MADV_FREE of %u pages at %p", s.count, (void *)address_of(w, s.start));
	for (u32 i = 0; i < s.count; i++)
		w->page[s.start + i].flags |= is_zero_page(&w->page[s.start + i]) ? 0 : F_FREED;
}

static void op_fork_advice(struct world *w)
{
	static const struct {
		int advice;
		u8 set, clear;
		const char *what;
	} ways[] = {
		{ MADV_WIPEONFORK, F_WIPE, 0, "MADV_WIPEONFORK" },
		{ MADV_KEEPONFORK, 0, F_WIPE, "MADV_KEEPONFORK" },
		{ MADV_DONTFORK, F_DONTFORK, 0, "MADV_DONTFORK" },
		{ MADV_DOFORK, 0, F_DONTFORK, "MADV_DOFORK" },
	};
	u32 way = below(w, 4);
	struct span s = pick(w, ways[way].set ? 64 : 256, WANT_MAPPED);
	if (!s.count)
		return;
	remember(w, ways[way].what, s.start, s.count, 0);
	if (advise(w, s, ways[way].advice))
		broken(w, "%s of %u pages at %p", ways[way].what, s.count, (void *)address_of(w, s.start));
	cut(w, s);
	for (u32 i = 0; i < s.count; i++) {
		u8 *flags = &w->page[s.start + i].flags;
		*flags = (*flags | ways[way].set) & ~ways[way].clear;
	}
}

static void op_protect(struct world *w)
{
	struct span s = pick(w, 64, WANT_MAPPED);
	u32 way = below(w, 10), prot = way < 5 ? PROT_RW : way < 8 ? PROT_R : PROT_0;
	if (!s.count)
		return;
	if (prot == PROT_RW && below(w, 2)) // undo an earlier restriction
		s = pick(w, 512, below(w, 2) ? WANT_NONE : WANT_RONLY);
	if (!s.count)
		return;
	remember(w, "mprotect", s.start, s.count, prot);
	if (mprotect(address_of(w, s.start), (size_t)s.count * PAGE, prot_bits[prot]))
		broken(w, "mprotect of %u pages at %p", s.count, (void *)address_of(w, s.start));
	cut(w, s);
	for (u32 i = 0; i < s.count; i++)
		w->page[s.start + i].prot = prot;
	if (prot != PROT_0 && below(w, 2))
		verify_span(w, "after mprotect", s);
}

static void op_populate(struct world *w)
{
	int write = below(w, 2);
	struct span s = pick(w, 64, write ? WANT_WRITE : WANT_READ);
	if (!s.count)
		return;
	remember(w, write ? "MADV_POPULATE_WRITE" : "MADV_POPULATE_READ", s.start, s.count, 0);
	if (advise(w, s, write ? MADV_POPULATE_WRITE : MADV_POPULATE_READ) && errno != EINVAL)
		broken(w, "MADV_POPULATE of %u pages at %p", s.count, (void *)address_of(w, s.start));
	verify_span(w, "populated", s);
}

// Hints that change no bytes, but split, merge or collapse pages.
static void op_hint(struct world *w)
{
	static const int hints[] = { MADV_HUGEPAGE, MADV_NOHUGEPAGE, MADV_RANDOM, MADV_SEQUENTIAL, MADV_NORMAL,
		                         MADV_WILLNEED, 20 /* COLD */, 21 /* PAGEOUT */, 25 /* COLLAPSE */ };
	u32 way = below(w, sizeof hints / sizeof *hints);
	struct span s = pick(w, 512, WANT_UNLOCKED);
	if (!s.count)
		return;
	remember(w, "hint", s.start, s.count, hints[way]);
	cut(w, s);
	advise(w, s, hints[way]); // refusals are legal
	verify_span(w, "hinted", (struct span){ s.start, s.count < 8 ? s.count : 8 });
}

// Guard markers (Linux 6.13) discard the pages without a userfaultfd event. Old bytes must not come
// back after them.
static void op_guard(struct world *w)
{
	struct span s = pick(w, 32, WANT_UNLOCKED);
	if (!s.count)
		return;
	remember(w, "MADV_GUARD_INSTALL and REMOVE", s.start, s.count, 0);
	if (advise(w, s, 102))
		return; // an older kernel
	for (u32 i = 0; i < s.count; i++)
		set_zero(&w->page[s.start + i]);
	usleep(below(w, 2000));
	if (!faults(address_of(w, s.start + below(w, s.count)), 0))
		broken(w, "read of a guard page near %p did not raise SIGSEGV", (void *)address_of(w, s.start));
	if (advise(w, s, 103))
		broken(w, "MADV_GUARD_REMOVE of %u pages at %p", s.count, (void *)address_of(w, s.start));
	verify_span(w, "after guards", s);
	__atomic_add_fetch(&side->guards, 1, __ATOMIC_RELAXED);
}

static void op_lock(struct world *w)
{
	struct span s = pick(w, 16, WANT_READ);
	if (!s.count)
		return;
	if (below(w, 2)) { // unlock what is locked, if any is found near
		for (u32 i = 0; i < w->pages; i++)
			if (w->page[i].flags & F_LOCKED) {
				remember(w, "munlock", i, 1, 0);
				if (munlock(address_of(w, i), PAGE))
					broken(w, "munlock at %p", (void *)address_of(w, i));
				cut(w, (struct span){ i, 1 });
				w->page[i].flags &= ~F_LOCKED;
			}
		return;
	}
	remember(w, "mlock", s.start, s.count, 0);
	cut(w, s);
	if (mlock(address_of(w, s.start), (size_t)s.count * PAGE)) {
		if (errno != ENOMEM && errno != EPERM && errno != EAGAIN)
			broken(w, "mlock of %u pages at %p", s.count, (void *)address_of(w, s.start));
		munlock(address_of(w, s.start), (size_t)s.count * PAGE);
		w->refused++;
		return;
	}
	for (u32 i = 0; i < s.count; i++)
		w->page[s.start + i].flags |= F_LOCKED;
	verify_span(w, "locked", s);
}
#endif
