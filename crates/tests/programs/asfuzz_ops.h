// The operations of asfuzz on one worker's arena: each changes or checks memory and keeps the
// oracle exact.
#ifndef ASFUZZ_OPS_H
#define ASFUZZ_OPS_H

#include "asfuzz_oracle.h"
#include <fcntl.h>
#include <setjmp.h>
#include <signal.h>
#include <sys/ioctl.h>
#include <sys/random.h>
#include <sys/socket.h>
#include <sys/syscall.h>
#include <sys/uio.h>

#ifndef MREMAP_DONTUNMAP
#define MREMAP_DONTUNMAP 4
#endif
#ifndef MADV_POPULATE_READ
#define MADV_POPULATE_READ 22
#define MADV_POPULATE_WRITE 23
#endif

// Files and pipes of one worker. A fork child makes its own: it must not share offsets or pipes
// with its parent.
struct gear {
	int pipe[2], pair[2], memfd, direct; // direct: O_DIRECT file, -1 when the file system has none
	u8 *bounce;                          // MAP_SHARED, 256 KiB, page-aligned: bytes that the pager does not manage
};
enum { BOUNCE_PAGES = 64 };

static const char *direct_folder = "/tmp";
static u64 *direct_skipped; // in shared memory

static void gear_up(struct world *w, struct gear *g)
{
	if (pipe2(g->pipe, O_CLOEXEC) || socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0, g->pair))
		broken(w, "pipe or socketpair");
	g->memfd = memfd_create("asfuzz", MFD_CLOEXEC);
	g->bounce = mmap(NULL, BOUNCE_PAGES * PAGE, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
	if (g->memfd < 0 || g->bounce == MAP_FAILED || ftruncate(g->memfd, BOUNCE_PAGES * PAGE))
		broken(w, "memfd or bounce buffer");
	char name[512];
	snprintf(name, sizeof name, "%s/asfuzz.%d.%lu", direct_folder, getpid(), w->thread);
	g->direct = open(name, O_RDWR | O_CREAT | O_TRUNC | O_DIRECT | O_CLOEXEC, 0600);
	unlink(name);
	if (g->direct >= 0 && ftruncate(g->direct, BOUNCE_PAGES * PAGE))
		broken(w, "ftruncate");
}

static void gear_down(struct gear *g)
{
	close(g->pipe[0]), close(g->pipe[1]), close(g->pair[0]), close(g->pair[1]), close(g->memfd);
	if (g->direct >= 0)
		close(g->direct);
	munmap(g->bounce, BOUNCE_PAGES * PAGE);
}

// ---- choosing pages ----

struct span {
	u32 start, count; // count 0: nothing suitable
};

enum want { WANT_MAPPED, WANT_READ, WANT_WRITE, WANT_HOLE, WANT_NONE, WANT_RONLY, WANT_ALIKE, WANT_UNLOCKED };

static int suits(const struct page *p, enum want want, const struct page *first)
{
	switch (want) {
	case WANT_MAPPED: return p->mapped;
	case WANT_READ: return p->mapped && p->prot != PROT_0;
	case WANT_WRITE: return p->mapped && p->prot == PROT_RW;
	case WANT_HOLE: return !p->mapped;
	case WANT_NONE: return p->mapped && p->prot == PROT_0;
	case WANT_RONLY: return p->mapped && p->prot == PROT_R;
	case WANT_UNLOCKED: return p->mapped && !(p->flags & F_LOCKED);
	case WANT_ALIKE: // one mapping, as far as the oracle knows
		return p->mapped && !(p->flags & F_LOCKED) && p->prot == first->prot &&
		       ((p->flags ^ first->flags) & (F_DONTFORK | F_WIPE)) == 0;
	}
	return 0;
}

// Up to `most` contiguous pages that suit: at random, or (3 in 10) after the last place, as a scan
// would.
static struct span pick(struct world *w, u32 most, enum want want)
{
	u32 at = below(w, 10) < 3 ? w->cursor % w->pages : below(w, w->pages);
	u32 length = 1 + below(w, most);
	for (u32 tries = 0; tries < w->pages; tries++, at = (at + 1) % w->pages) {
		if (!suits(&w->page[at], want, &w->page[at]))
			continue;
		u32 n = 1;
		while (n < length && at + n < w->pages && suits(&w->page[at + n], want, &w->page[at]))
			n++;
		w->cursor = at + n;
		return (struct span){ at, n };
	}
	return (struct span){ 0, 0 };
}

// A hole of exactly `count` pages, first fit from a random place. Count 0 if there is none.
static struct span pick_hole(struct world *w, u32 count)
{
	u32 from = below(w, w->pages), run = 0;
	for (u32 i = 0; i < 2 * w->pages; i++) {
		u32 at = (from + i) % w->pages;
		run = at == 0 ? 0 : run;
		run = w->page[at].mapped ? 0 : run + 1;
		if (run == count)
			return (struct span){ at + 1 - count, count };
	}
	return (struct span){ 0, 0 };
}

// ---- reading ----

static void read_page(const struct world *w, u32 index, u64 *out)
{
	const volatile u64 *from = (const volatile u64 *)address_of(w, index);
	for (u32 i = 0; i < PAGE_WORDS; i++) // ascending, one load a word: see check_bytes on MADV_FREE
		out[i] = from[i];
}

static void verify_page(struct world *w, const char *where, u32 index)
{
	u64 found[PAGE_WORDS];
	if (!w->page[index].mapped || w->page[index].prot == PROT_0)
		return;
	read_page(w, index, found);
	check_bytes(w, where, index, found);
}

static void verify_span(struct world *w, const char *where, struct span s)
{
	for (u32 i = 0; i < s.count; i++)
		verify_page(w, where, s.start + i);
}

static void op_verify(struct world *w)
{
	struct span s = pick(w, below(w, 8) ? 32 : 512, WANT_READ);
	remember(w, "verify", s.start, s.count, 0);
	if (below(w, 4) == 0) // descending
		for (u32 i = s.count; i-- > 0;)
			verify_page(w, "descending verify", s.start + i);
	else
		verify_span(w, "verify", s);
}

// One word of each of many scattered pages.
static void op_peek(struct world *w)
{
	for (u32 n = 0; n < 16; n++) {
		struct span s = pick(w, 1, WANT_READ);
		if (!s.count)
			return;
		struct page *p = &w->page[s.start];
		if (p->flags & (F_FREED | F_OPAQUE)) {
			verify_page(w, "peek", s.start);
			continue;
		}
		u64 expected[PAGE_WORDS], found[PAGE_WORDS];
		u32 at = below(w, PAGE_WORDS);
		u64 value = ((const volatile u64 *)address_of(w, s.start))[at];
		expect_page(w, p, expected);
		w->checked_pages++;
		if (value != expected[at]) {
			read_page(w, s.start, found);
			found[at] = value;
			mismatch(w, "peek", s.start, found, expected);
		}
	}
}

// ---- writing ----

static void put_block(struct world *w, u32 index, u32 block, u64 version)
{
	u64 words[BLOCK_WORDS];
	u8 *to = address_of(w, index) + block * BLOCK;
	for (u32 i = 0; i < BLOCK_WORDS; i++)
		words[i] = word_of(w, version, block, i);
	switch (version >> 2 & 3) {
	case 0:
		for (u32 i = BLOCK_WORDS; i-- > 0;)
			((volatile u64 *)to)[i] = words[i];
		break;
	case 1: // odd lengths
		for (u32 at = 0, n; at < BLOCK; at += n) {
			n = 37 < BLOCK - at ? 37 : BLOCK - at;
			memcpy(to + at, (u8 *)words + at, n);
		}
		break;
	default:
		memcpy(to, words, BLOCK);
	}
	w->page[index].version[block] = version;
}

// Makes the bytes under the patch those of the block version, so that only block versions describe
// the page.
static void drop_patch(struct world *w, u32 index)
{
	struct page *p = &w->page[index];
	if (!p->patch)
		return;
	u64 expected[PAGE_WORDS];
	p->patch = 0;
	expect_page(w, p, expected);
	memcpy(address_of(w, index) + p->patch_at, (u8 *)expected + p->patch_at, 8);
}

// Writes blocks [from, to) of a page with one new version.
static void write_blocks(struct world *w, u32 index, u32 from, u32 to, u64 version)
{
	struct page *p = &w->page[index];
	if (p->patch || (p->flags & F_OPAQUE)) {
		if (p->flags & (F_FREED | F_OPAQUE)) {
			from = 0, to = BLOCKS; // the rest is unknown: write all of it
			p->patch = 0;
		} else {
			drop_patch(w, index);
		}
	}
	if (!(p->flags & F_FREED) || (from == 0 && to == BLOCKS)) {
		p->flags &= ~(F_FREED | F_OPAQUE);
		for (u32 b = from; b < to; b++)
			put_block(w, index, b, version);
		return;
	}
	// After MADV_FREE the other blocks are all old or all zero, and this write decides which.
	struct page old = *p;
	u64 found[PAGE_WORDS], expected[PAGE_WORDS];
	for (u32 b = from; b < to; b++)
		put_block(w, index, b, version);
	p->flags &= ~F_FREED;
	read_page(w, index, found);
	expect_page(w, p, expected);
	w->checked_pages++;
	if (memcmp(found, expected, PAGE) == 0) {
		w->freed_old++;
		return;
	}
	struct page as_zero = old;
	set_zero(&as_zero);
	for (u32 b = from; b < to; b++)
		as_zero.version[b] = version;
	expect_page(w, &as_zero, expected);
	if (memcmp(found, expected, PAGE) != 0)
		mismatch(w, "write after MADV_FREE", index, found, expected);
	*p = as_zero;
	w->freed_zero++;
}

static void op_write(struct world *w)
{
	struct span s = pick(w, below(w, 8) ? 16 : 256, WANT_WRITE);
	u64 version = new_version(w);
	remember(w, "write", s.start, s.count, version >> 2 & 0xffffffff);
	for (u32 i = 0; i < s.count; i++)
		write_blocks(w, s.start + i, 0, BLOCKS, version);
}

static void op_write_part(struct world *w)
{
	for (u32 n = 0; n < 8; n++) {
		struct span s = pick(w, 1, WANT_WRITE);
		if (!s.count)
			return;
		u32 from = below(w, BLOCKS), to = from + 1 + below(w, BLOCKS - from);
		remember(w, "write part", s.start, 1, from << 8 | to);
		write_blocks(w, s.start, from, to, new_version(w));
	}
}

// One unaligned 8-byte store.
static void op_patch(struct world *w)
{
	for (u32 n = 0; n < 8; n++) {
		struct span s = pick(w, 1, WANT_WRITE);
		if (!s.count)
			return;
		struct page *p = &w->page[s.start];
		if (p->flags & (F_FREED | F_OPAQUE)) {
			write_blocks(w, s.start, 0, BLOCKS, new_version(w));
			continue;
		}
		drop_patch(w, s.start);
		u64 version = new_version(w), value = patch_word(w, version);
		u16 at = below(w, PAGE - 8 + 1);
		remember(w, "patch", s.start, 1, at);
		memcpy(address_of(w, s.start) + at, &value, 8);
		p->patch = version, p->patch_at = at;
	}
}

// ---- system calls on pages that may be evicted ----

// Puts the bytes of new versions for a whole span into the bounce buffer, and tells the oracle.
static void compose(struct world *w, struct gear *g, struct span s)
{
	u64 version = new_version(w);
	for (u32 i = 0; i < s.count; i++) {
		struct page *p = &w->page[s.start + i];
		p->patch = 0;
		p->flags &= ~(F_FREED | F_OPAQUE);
		for (u32 b = 0; b < BLOCKS; b++)
			p->version[b] = version;
		expect_page(w, p, (u64 *)(g->bounce + (u64)i * PAGE));
	}
}

static void check_bounce(struct world *w, struct gear *g, const char *where, struct span s)
{
	for (u32 i = 0; i < s.count; i++)
		check_bytes(w, where, s.start + i, (const u64 *)(g->bounce + (u64)i * PAGE));
}

// Moves all of `length` bytes through a pipe or socket, in steps that both ends can take without
// blocking.
static void through(struct world *w, int in, int out, const u8 *from, u8 *to, size_t length)
{
	for (size_t done = 0; done < length;) {
		size_t step = length - done < 16384 ? length - done : 16384;
		ssize_t n = write(in, from + done, step);
		if (n < 0 && errno == EINTR)
			continue;
		if (n <= 0)
			broken(w, "write of %zu bytes at %p gave %zd", step, from + done, n);
		for (ssize_t got = 0; got < n;) {
			ssize_t r = read(out, to + done + got, n - got);
			if (r < 0 && errno == EINTR)
				continue;
			if (r <= 0)
				broken(w, "read of %zd bytes to %p gave %zd", n - got, to + done + got, r);
			got += r;
		}
		done += n;
	}
}

// Scatters a span over up to 8 iovecs with odd boundaries.
static int scatter(struct world *w, u8 *at, size_t length, struct iovec *iov)
{
	int n = 0;
	while (length && n < 7) {
		size_t step = 1 + below(w, length);
		iov[n++] = (struct iovec){ at, step };
		at += step, length -= step;
	}
	if (length)
		iov[n++] = (struct iovec){ at, length };
	return n;
}

static void exactly(struct world *w, const char *what, ssize_t got, size_t length)
{
	if (got != (ssize_t)length)
		broken(w, "%s of %zu bytes gave %zd", what, length, got);
}

// The kernel reads the pages: write, writev, pwrite, send, process_vm_readv, O_DIRECT write.
static void op_syscall_out(struct world *w, struct gear *g)
{
	u32 way = below(w, 6);
	struct span s = pick(w, 24, WANT_READ);
	if (!s.count)
		return;
	static const char *const names[] = { "write to pipe", "pwrite to memfd", "writev to memfd", "send on socket",
		                                 "process_vm_readv", "O_DIRECT write" };
	size_t length = (size_t)s.count * PAGE;
	u8 *at = address_of(w, s.start);
	struct iovec iov[8], local = { g->bounce, length };
	remember(w, names[way], s.start, s.count, way);
	for (u32 i = 0; i < s.count; i++) // two reads of a freed page may differ, so freed pages are only read in order
		if (w->page[s.start + i].flags & F_FREED)
			return verify_span(w, names[way], s);
	if (way == 5 && g->direct < 0) {
		++*direct_skipped;
		way = 1;
	}
	switch (way) {
	case 0: through(w, g->pipe[1], g->pipe[0], at, g->bounce, length); break;
	case 1:
		exactly(w, "pwrite", pwrite(g->memfd, at, length, 0), length);
		exactly(w, "pread", pread(g->memfd, g->bounce, length, 0), length);
		break;
	case 2:
		exactly(w, "pwritev", pwritev(g->memfd, iov, scatter(w, at, length, iov), 0), length);
		exactly(w, "pread", pread(g->memfd, g->bounce, length, 0), length);
		break;
	case 3: through(w, g->pair[0], g->pair[1], at, g->bounce, length); break;
	case 4: {
		int n = scatter(w, at, length, iov);
		exactly(w, "process_vm_readv", process_vm_readv(getpid(), &local, 1, iov, n, 0), length);
		break;
	}
	default:
		exactly(w, "O_DIRECT pwrite", pwrite(g->direct, at, length, 0), length);
		exactly(w, "O_DIRECT pread", pread(g->direct, g->bounce, length, 0), length);
	}
	check_bounce(w, g, names[way], s);
}

// The kernel writes the pages: read, readv, recv, process_vm_writev, getrandom, /dev/zero, O_DIRECT
// read.
static void op_syscall_in(struct world *w, struct gear *g)
{
	u32 way = below(w, 8);
	struct span s = pick(w, 24, WANT_WRITE);
	if (!s.count)
		return;
	static const char *const names[] = { "read from pipe", "pread from memfd", "readv from memfd", "recv on socket",
		                                 "process_vm_writev", "O_DIRECT read", "getrandom", "read of zeros" };
	size_t length = (size_t)s.count * PAGE;
	u8 *at = address_of(w, s.start);
	struct iovec iov[8], local = { g->bounce, length };
	remember(w, names[way], s.start, s.count, way);
	if (way < 6)
		compose(w, g, s);
	if (way == 5 && g->direct < 0) {
		++*direct_skipped;
		way = 1;
	}
	switch (way) {
	case 0: through(w, g->pipe[1], g->pipe[0], g->bounce, at, length); break;
	case 1:
		exactly(w, "pwrite", pwrite(g->memfd, g->bounce, length, 0), length);
		exactly(w, "pread", pread(g->memfd, at, length, 0), length);
		break;
	case 2:
		exactly(w, "pwrite", pwrite(g->memfd, g->bounce, length, 0), length);
		exactly(w, "preadv", preadv(g->memfd, iov, scatter(w, at, length, iov), 0), length);
		break;
	case 3: through(w, g->pair[0], g->pair[1], g->bounce, at, length); break;
	case 4: {
		int n = scatter(w, at, length, iov);
		exactly(w, "process_vm_writev", process_vm_writev(getpid(), &local, 1, iov, n, 0), length);
		break;
	}
	case 5:
		exactly(w, "O_DIRECT pwrite", pwrite(g->direct, g->bounce, length, 0), length);
		exactly(w, "O_DIRECT pread", pread(g->direct, at, length, 0), length);
		break;
	case 6:
		for (size_t done = 0; done < length;) {
			ssize_t n = getrandom(at + done, length - done, 0);
			if (n < 0 && errno != EINTR)
				broken(w, "getrandom into %p", at + done);
			done += n > 0 ? n : 0;
		}
		for (u32 i = 0; i < s.count; i++) {
			struct page *p = &w->page[s.start + i];
			u64 found[PAGE_WORDS];
			set_zero(p);
			p->flags |= F_OPAQUE;
			read_page(w, s.start + i, found);
			p->sum = hash_page(found);
		}
		return;
	default: {
		int zero = open("/dev/zero", O_RDONLY | O_CLOEXEC);
		for (size_t done = 0; done < length;) {
			ssize_t n = read(zero, at + done, length - done);
			if (n < 0 && errno != EINTR)
				broken(w, "read of /dev/zero to %p", at + done);
			done += n > 0 ? n : 0;
		}
		close(zero);
		for (u32 i = 0; i < s.count; i++)
			set_zero(&w->page[s.start + i]);
	}
	}
	if (below(w, 4) == 0)
		verify_span(w, names[way], s);
}
#endif
