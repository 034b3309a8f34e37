// A second process that reads and writes the arenas of asfuzz from outside, and that stops and
// freezes it.
#ifndef ASFUZZ_PEER_H
#define ASFUZZ_PEER_H

#include "asfuzz_layout.h"
#include <pthread.h>
#include <sys/prctl.h>
#include <sys/ptrace.h>
#include <sys/wait.h>

enum peer_way { BY_WRITEV, BY_READV, BY_MEM_WRITE, BY_MEM_READ, BY_POKE, BY_PEEK, BY_STOP, BY_FREEZER, PEER_WAYS };
static const char *const peer_ways[] = { "process_vm_writev from outside", "process_vm_readv from outside",
	                                     "write to /proc/PID/mem", "read of /proc/PID/mem", "PTRACE_POKEDATA",
	                                     "PTRACE_PEEKDATA", "SIGSTOP and SIGCONT", "cgroup freezer" };
enum { PEER_PAGES = 16 };

struct request {
	u32 way, tid;
	u8 *at;
	size_t length;
	u32 microseconds;
};

// In shared memory: the message between the two, and how often each way was asked for and refused.
struct peer {
	u8 bytes[PEER_PAGES * PAGE];
	u64 asked[PEER_WAYS], refused[PEER_WAYS];
};

static struct peer *peer;
static int peer_link = -1, peer_freezer = -1; // -1: there is none
static pthread_mutex_t peer_turn = PTHREAD_MUTEX_INITIALIZER;

static void nap(u32 microseconds)
{
	struct timespec time = { microseconds / 1000000, microseconds % 1000000 * 1000 };
	while (nanosleep(&time, &time) && errno == EINTR)
		;
}

// One word of a thread that is stopped for it. Returns 8, or -1 if its page is out: the kernel
// cannot wait for the page there.
static ssize_t by_ptrace(const struct request *r)
{
	int status;
	if (ptrace(PTRACE_SEIZE, r->tid, 0, 0))
		return -1;
	ssize_t done = -1;
	if (!ptrace(PTRACE_INTERRUPT, r->tid, 0, 0) && waitpid((pid_t)r->tid, &status, __WALL) == (pid_t)r->tid) {
		u64 word;
		memcpy(&word, peer->bytes, 8);
		errno = 0;
		if (r->way == BY_POKE) {
			done = ptrace(PTRACE_POKEDATA, r->tid, r->at, (void *)word) ? -1 : 8;
		} else {
			word = (u64)ptrace(PTRACE_PEEKDATA, r->tid, r->at, 0);
			done = errno ? -1 : 8;
			memcpy(peer->bytes, &word, 8);
		}
	}
	int error = errno;
	ptrace(PTRACE_DETACH, r->tid, 0, 0);
	errno = error;
	return done;
}

static ssize_t carry_out(const struct request *r, pid_t pid, int mem)
{
	struct iovec mine = { peer->bytes, r->length }, theirs = { r->at, r->length };
	switch (r->way) {
	case BY_WRITEV: return process_vm_writev(pid, &mine, 1, &theirs, 1, 0);
	case BY_READV: return process_vm_readv(pid, &mine, 1, &theirs, 1, 0);
	case BY_MEM_WRITE: return pwrite(mem, peer->bytes, r->length, (off_t)(u64)r->at);
	case BY_MEM_READ: return pread(mem, peer->bytes, r->length, (off_t)(u64)r->at);
	case BY_STOP:
		kill(pid, SIGSTOP);
		nap(r->microseconds);
		return kill(pid, SIGCONT);
	case BY_FREEZER: {
		ssize_t frozen = pwrite(peer_freezer, "1", 1, 0);
		nap(r->microseconds);
		return pwrite(peer_freezer, "0", 1, 0) == 1 ? frozen : -1;
	}
	default: return by_ptrace(r);
	}
}

static void serve_requests(pid_t pid, int link)
{
	prctl(PR_SET_PDEATHSIG, SIGKILL);
	if (getppid() != pid)
		_exit(0);
	char name[64];
	snprintf(name, sizeof name, "/proc/%d/mem", pid);
	int mem = open(name, O_RDWR | O_CLOEXEC);
	struct request request;
	while (read(link, &request, sizeof request) == sizeof request) {
		ssize_t answer[2] = { carry_out(&request, pid, mem), errno };
		if (write(link, answer, sizeof answer) != sizeof answer)
			break;
	}
	_exit(0);
}

// Starts the peer; `freezer`: a cgroup (version 2) to freeze this process in, or NULL.
static void peer_start(const char *freezer)
{
	int link[2];
	peer = mmap(NULL, sizeof *peer, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
	if (peer == MAP_FAILED || socketpair(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0, link)) {
		say("asfuzz: BROKEN no peer: %s\n", strerror(errno));
		_exit(EXIT_BROKEN);
	}
	char name[512], number[32];
	if (freezer) {
		snprintf(name, sizeof name, "%s/cgroup.freeze", freezer);
		peer_freezer = open(name, O_WRONLY | O_CLOEXEC);
	}
	pid_t self = getpid();
	prctl(PR_SET_PTRACER, PR_SET_PTRACER_ANY, 0, 0, 0);
	pid_t pid = fork();
	if (pid == 0)
		serve_requests(self, link[1]);
	close(link[1]);
	peer_link = pid < 0 ? -1 : link[0];
	if (peer_freezer >= 0) { // after the fork, so that the peer itself is not frozen
		snprintf(name, sizeof name, "%s/cgroup.procs", freezer);
		int members = open(name, O_WRONLY | O_CLOEXEC);
		int length = snprintf(number, sizeof number, "%d", self);
		if (members < 0 || write(members, number, (size_t)length) != length) {
			say("asfuzz: BROKEN cannot enter %s: %s\n", freezer, strerror(errno));
			_exit(EXIT_BROKEN);
		}
		close(members);
	}
}

// The ways where the kernel cannot wait for a page: an access to a page that is out is refused. All
// other ways wait.
static int may_be_refused(u32 way) { return way >= BY_MEM_WRITE && way <= BY_PEEK; }

static ssize_t ask(struct world *w, struct request r)
{
	ssize_t answer[2];
	while (send(peer_link, &r, sizeof r, MSG_NOSIGNAL) != sizeof r)
		if (errno != EINTR)
			broken(w, "the peer is gone");
	for (ssize_t n; (n = recv(peer_link, answer, sizeof answer, 0)) != sizeof answer;)
		if (n >= 0 || errno != EINTR)
			broken(w, "the peer gave no answer to `%s`", peer_ways[r.way]);
	__atomic_add_fetch(&peer->asked[r.way], 1, __ATOMIC_RELAXED);
	if (answer[0] < (ssize_t)r.length) {
		int refused = answer[0] >= 0 || answer[1] == EIO || answer[1] == EFAULT;
		if (!may_be_refused(r.way) || !refused) {
			errno = (int)answer[1];
			broken(w, "%s of %zu bytes at %p gave %zd", peer_ways[r.way], r.length, (void *)r.at, answer[0]);
		}
		__atomic_add_fetch(&peer->refused[r.way], 1, __ATOMIC_RELAXED);
	}
	return answer[0] < 0 ? 0 : answer[0];
}

// The peer's turn on a span of this worker. What the peer wrote must be there; where it was
// refused, nothing may have changed.
static void op_peer(struct world *w)
{
	if (peer_link < 0)
		return;
	struct request r = { .way = below(w, 8) ? below(w, BY_STOP) : peer_freezer >= 0 && below(w, 2) ? BY_FREEZER : BY_STOP };
	r.tid = (u32)syscall(SYS_gettid);
	if (r.way >= BY_STOP) {
		r.microseconds = below(w, below(w, 4) ? 2000 : 30000);
		remember(w, peer_ways[r.way], 0, 0, r.microseconds);
		pthread_mutex_lock(&peer_turn);
		ask(w, r);
		pthread_mutex_unlock(&peer_turn);
		return;
	}
	int writes = r.way == BY_WRITEV || r.way == BY_MEM_WRITE || r.way == BY_POKE;
	int one = r.way == BY_POKE || r.way == BY_PEEK;
	struct span s = pick(w, one ? 1 : PEER_PAGES, writes ? WANT_WRITE : WANT_READ);
	if (!s.count)
		return;
	for (u32 i = 0; i < s.count; i++) // for such pages a refusal leaves other bytes: not tested here
		if (w->page[s.start + i].flags & (F_FREED | F_OPAQUE))
			return verify_span(w, peer_ways[r.way], s);
	remember(w, peer_ways[r.way], s.start, s.count, r.way);
	r.at = address_of(w, s.start), r.length = (size_t)s.count * PAGE;
	struct page *p = &w->page[s.start], before = *p;
	u16 word = one ? 8 * below(w, PAGE_WORDS) : 0;
	if (one) {
		if (writes)
			drop_patch(w, s.start), before = *p;
		r.at += word, r.length = 8;
	}
	u64 version = new_version(w), expected[PAGE_WORDS];
	int bring_in = may_be_refused(r.way) && below(w, 2); // most pages are out: nearly all would be refused
	pthread_mutex_lock(&peer_turn);
	for (u32 i = 0; i < s.count && bring_in; i++)
		(void)*(volatile u64 *)address_of(w, s.start + i);
	if (r.way == BY_POKE) {
		u64 value = patch_word(w, version);
		memcpy(peer->bytes, &value, 8);
	} else if (writes) {
		struct page fresh = { 0 };
		for (u32 b = 0; b < BLOCKS; b++)
			fresh.version[b] = version;
		for (u32 i = 0; i < s.count; i++)
			expect_page(w, &fresh, (u64 *)(peer->bytes + (u64)i * PAGE));
	}
	size_t done = (size_t)ask(w, r);
	if (r.way == BY_POKE) {
		*p = before;
		if (done)
			p->patch = version, p->patch_at = word;
	} else if (r.way == BY_PEEK && done) {
		expect_page(w, p, expected);
		if (memcmp(peer->bytes, (u8 *)expected + word, 8))
			mismatch(w, peer_ways[r.way], s.start, (const u64 *)peer->bytes, NULL);
	} else if (writes) {
		for (u32 i = 0; i < done / PAGE; i++) {
			set_zero(&w->page[s.start + i]);
			for (u32 b = 0; b < BLOCKS; b++)
				w->page[s.start + i].version[b] = version;
		}
	} else if (!one) {
		for (u32 i = 0; i < done / PAGE; i++)
			check_bytes(w, peer_ways[r.way], s.start + i, (const u64 *)(peer->bytes + (u64)i * PAGE));
	}
	pthread_mutex_unlock(&peer_turn);
	if (done % PAGE && !one)
		broken(w, "%s ended inside a page: %zu bytes", peer_ways[r.way], done);
	if (writes)
		verify_span(w, peer_ways[r.way], s);
}
#endif
