// Fixed (pinned) io_uring buffers on arena pages. The kernel writes these pages, and an evictor
// must not move them meanwhile.
#ifndef ASFUZZ_URING_H
#define ASFUZZ_URING_H

#include "asfuzz_layout.h"
#include <linux/io_uring.h>

struct uring {
	int fd; // -1: not available
	u32 *sq_tail, *sq_mask, *sq_array, *cq_head, *cq_tail, *cq_mask;
	struct io_uring_sqe *sqes;
	struct io_uring_cqe *cqes;
};

static void uring_open(struct world *w, struct uring *r)
{
	struct io_uring_params params = { 0 };
	r->fd = syscall(SYS_io_uring_setup, 4, &params);
	if (r->fd < 0)
		return;
	size_t sq = params.sq_off.array + params.sq_entries * 4, cq = params.cq_off.cqes + params.cq_entries * 16;
	u8 *s = mmap(NULL, sq, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_POPULATE, r->fd, IORING_OFF_SQ_RING);
	u8 *c = mmap(NULL, cq, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_POPULATE, r->fd, IORING_OFF_CQ_RING);
	r->sqes = mmap(NULL, params.sq_entries * sizeof(struct io_uring_sqe), PROT_READ | PROT_WRITE,
	               MAP_SHARED | MAP_POPULATE, r->fd, IORING_OFF_SQES);
	if (s == MAP_FAILED || c == MAP_FAILED || r->sqes == MAP_FAILED)
		broken(w, "mapping an io_uring");
	r->sq_tail = (u32 *)(s + params.sq_off.tail), r->sq_mask = (u32 *)(s + params.sq_off.ring_mask);
	r->sq_array = (u32 *)(s + params.sq_off.array);
	r->cq_head = (u32 *)(c + params.cq_off.head), r->cq_tail = (u32 *)(c + params.cq_off.tail);
	r->cq_mask = (u32 *)(c + params.cq_off.ring_mask), r->cqes = (struct io_uring_cqe *)(c + params.cq_off.cqes);
}

static int uring_do(struct world *w, struct uring *r, u8 opcode, int fd, u8 *at, u32 length)
{
	u32 tail = *r->sq_tail, slot = tail & *r->sq_mask;
	memset(&r->sqes[slot], 0, sizeof r->sqes[slot]);
	r->sqes[slot].opcode = opcode, r->sqes[slot].fd = fd, r->sqes[slot].addr = (u64)at, r->sqes[slot].len = length;
	r->sq_array[slot] = slot;
	__atomic_store_n(r->sq_tail, tail + 1, __ATOMIC_RELEASE);
	u32 submit = 1;
	while (__atomic_load_n(r->cq_tail, __ATOMIC_ACQUIRE) == *r->cq_head) {
		int n = syscall(SYS_io_uring_enter, r->fd, submit, 1, IORING_ENTER_GETEVENTS, NULL, 0);
		if (n < 0 && errno != EINTR)
			broken(w, "io_uring_enter");
		if (n > 0)
			submit = 0;
	}
	int result = r->cqes[*r->cq_head & *r->cq_mask].res;
	__atomic_store_n(r->cq_head, *r->cq_head + 1, __ATOMIC_RELEASE);
	return result;
}

// Pins a span and waits a little, so that an evictor may try it. Then reads a file into it and
// writes it out, all through the pin.
static void op_uring(struct world *w, struct gear *g, struct uring *r)
{
	if (r->fd < 0)
		return;
	struct span s = pick(w, 16, WANT_WRITE);
	if (!s.count)
		return;
	u32 length = s.count * PAGE;
	u8 *at = address_of(w, s.start);
	struct iovec buffer = { at, length };
	remember(w, "io_uring fixed buffer", s.start, s.count, 0);
	if (syscall(SYS_io_uring_register, r->fd, IORING_REGISTER_BUFFERS, &buffer, 1)) {
		if (errno != ENOMEM)
			broken(w, "IORING_REGISTER_BUFFERS of %u pages at %p", s.count, (void *)at);
		w->refused++;
		return;
	}
	for (u32 round = 0; round < 2; round++) {
		usleep(below(w, 3000));
		for (u32 i = 0; i < s.count; i++)
			w->page[s.start + i].flags &= ~F_FREED; // about to be overwritten whole
		compose(w, g, s);
		exactly(w, "pwrite", pwrite(g->memfd, g->bounce, length, 0), length);
		exactly(w, "READ_FIXED", uring_do(w, r, IORING_OP_READ_FIXED, g->memfd, at, length), length);
		usleep(below(w, 3000));
		if (below(w, 2))
			verify_span(w, "read through a pin", s);
		exactly(w, "WRITE_FIXED", uring_do(w, r, IORING_OP_WRITE_FIXED, g->memfd, at, length), length);
		exactly(w, "pread", pread(g->memfd, g->bounce, length, 0), length);
		check_bounce(w, g, "written through a pin", s);
	}
	if (syscall(SYS_io_uring_register, r->fd, IORING_UNREGISTER_BUFFERS, NULL, 0))
		broken(w, "IORING_UNREGISTER_BUFFERS");
	verify_span(w, "after a pin", s);
	__atomic_add_fetch(&side->pins, 1, __ATOMIC_RELAXED);
}
#endif
