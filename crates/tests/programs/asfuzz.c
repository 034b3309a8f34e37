// A random address-space program with a shadow oracle: every byte must be what a plain kernel would
// give.
//
//   asfuzz [--seed N] [--ops N] [--threads N] [--footprint-mib N] [--dir PATH] [--no-fork]
//          [--no-side] [--no-uring] [--no-hints] [--no-lock] [--no-signals] [--no-peer] [--guards]
//          [--realtime] [--freezer CGROUP] [--verbose] [--skip OPERATION]...
//          [--sabotage zero|stale|foreign]
//
// Each of --threads workers owns an arena of --footprint-mib MiB at a fixed address and does --ops
// / --threads operations on it. The operations of a worker depend on the seed and the worker only.
// Exit status:
//
//   0  all bytes are right
//   2  usage
//   3  a byte was wrong: standard error has the page, what was found, and the page's history
//   4  another thing that must not happen: a system call failed, an unexpected signal
//
// --sabotage spoils one page half way, without telling the oracle. The run must then end with 3.
//
// Parts: asfuzz_oracle.h (what must be there), asfuzz_ops.h (reads, writes, system calls),
// asfuzz_layout.h (mmap and the like), asfuzz_uring.h (pinned pages), asfuzz_side.h (threads beside
// the workers), asfuzz_over.h (two of them that move memory over shared memory), asfuzz_peer.h (a
// process that reads and writes from outside), asfuzz_child.h (what fork children become), this
// file (forks, brk, the loop).
#include "asfuzz_child.h"
#include "asfuzz_layout.h"
#include "asfuzz_ops.h"
#include "asfuzz_oracle.h"
#include "asfuzz_over.h"
#include "asfuzz_peer.h"
#include "asfuzz_side.h"
#include "asfuzz_uring.h"

#include <sys/prctl.h>
#include <time.h>

enum { THREADS_MAX = 16, CHILDREN_MAX = 3, DEPTH_MAX = 3, BRK_PAGES = 256 };

static struct {
	u64 seed, ops, threads, mib;
	int no_fork, no_side, no_uring, no_hints, no_lock, no_signals, no_peer, guards, realtime, verbose;
	u8 skip[64];
	const char *sabotage, *freezer;
} options = { .seed = 1, .ops = 100000, .threads = 2, .mib = 64 };

static struct world *worlds[THREADS_MAX];
static pthread_rwlock_t quiet; // held for writing: no worker is inside an operation

static struct brk_area {
	u8 *base;
	u32 pages;
	u64 version[BRK_PAGES];
} *brk_area; // shared memory

static size_t world_bytes(u32 pages) { return sizeof(struct world) + (size_t)pages * sizeof(struct page); }

static void *shared_bytes(size_t bytes)
{
	void *at = mmap(NULL, bytes, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
	if (at == MAP_FAILED) {
		say("asfuzz: BROKEN shared mmap of %zu bytes\n", bytes);
		_exit(EXIT_BROKEN);
	}
	return at;
}

static struct world *copy_world(const struct world *w)
{
	struct world *copy = shared_bytes(world_bytes(w->pages));
	memcpy(copy, w, world_bytes(w->pages));
	return copy;
}

// ---- fork ----

static const struct side *inherited; // in a fork child: a lower bound of each counter

struct children {
	pid_t pid[CHILDREN_MAX];
	u32 count;
};

static void run(struct world *w);

// What fork does to an arena: DONTFORK pages vanish, WIPEONFORK pages are zeros, locks are not
// inherited.
static void as_child(struct world *w)
{
	for (u32 i = 0; i < w->pages; i++) {
		struct page *p = &w->page[i];
		if (!p->mapped)
			continue;
		if (p->flags & F_DONTFORK)
			set_unmapped(w, (struct span){ i, 1 });
		else if (p->flags & F_WIPE)
			set_zero(p);
		p->flags &= ~F_LOCKED;
	}
}

static void verify_share(struct world *w, const char *where, u32 parts)
{
	u32 count = w->pages / parts, start = below(w, w->pages - count + 1);
	verify_span(w, where, (struct span){ start, count });
}

// In the child. `mine` and `others` are copies of the oracles as they were at the fork.
static void child(struct world *mine, struct world **others, u32 other_count, const struct side *before)
{
	prctl(PR_SET_PDEATHSIG, SIGKILL);
	inherited = before;
	mine->depth++;
	mine->process = __atomic_add_fetch(&side->processes, 1, __ATOMIC_RELAXED) & 4095;
	mine->rng = mix64(mine->rng ^ 0xf0f0);
	// The first forks of all workers make one child of each kind, so that few forks have all kinds.
	enum child_kind kind = below(mine, 2) ? PLAIN : below(mine, CHILD_KINDS);
	if (mine->turn < CHILD_KINDS)
		kind = (enum child_kind)mine->turn;
	__atomic_add_fetch(&side->children[kind], 1, __ATOMIC_RELAXED);
	become(mine, kind);
	as_child(mine);
	check_low("the lowest pages of a fork child");
	verify_share(mine, "fork child", below(mine, 3) ? 4 : 1);
	for (u32 i = 0; i < other_count; i++) {
		others[i]->depth++;
		as_child(others[i]);
		verify_share(others[i], "fork child, another thread's arena", 2);
	}
	for (u32 page = 0; page < COUNTER_PAGES && !options.no_side; page += 7)
		for (u32 t = 0; t < COUNTER_THREADS; t++) {
			u64 found = counters[page][8 * (1 + t)];
			if (found < before->mine[t][page] || found > side->mine[t][page] + 1)
				side_mismatch("a counter in a fork child", page, before->mine[t][page], found);
		}
	mine->ops_left = 16 + below(mine, 64);
	u64 ops = mine->ops_left;
	run(mine);
	verify_share(mine, "fork child at its end", 4);
	__atomic_add_fetch(&side->child_ops, ops, __ATOMIC_RELAXED);
	if (kind == EXEC_BY_THREAD)
		end_by_exec_of_a_thread(mine);
	if (kind == OUTLIVED)
		end_before_a_sharer(mine);
	_exit(0);
}

static void reap(struct world *w, struct children *c, u32 keep)
{
	while (c->count > keep) {
		int status;
		pid_t pid = waitpid(c->pid[0], &status, 0);
		if (pid < 0 && errno == EINTR)
			continue;
		if (pid < 0)
			broken(w, "waitpid");
		if (WIFEXITED(status) && WEXITSTATUS(status) == EXIT_MISMATCH)
			_exit(EXIT_MISMATCH); // the check has printed why
		if (!WIFEXITED(status) || WEXITSTATUS(status) != 0)
			broken(w, "fork child %d ended with status %x", pid, status);
		memmove(c->pid, c->pid + 1, --c->count * sizeof *c->pid);
	}
}

// Called without the lock. One fork in four is quiet: no worker is inside an operation. Its child
// then checks every worker's arena.
static void op_fork(struct world *w, struct children *c)
{
	int all = w->depth == 0 && below(w, 4) == 0;
	struct world *copies[THREADS_MAX];
	u32 others = 0;
	reap(w, c, CHILDREN_MAX - 1);
	if (w->depth == 0 && (all ? pthread_rwlock_wrlock(&quiet) : pthread_rwlock_rdlock(&quiet)))
		broken(w, "rwlock");
	remember(w, all ? "quiet fork" : "fork", 0, w->pages, w->depth);
	struct world *mine = copy_world(w);
	struct side *before = shared_bytes(sizeof *before); // a counter is raised before it is noted: a lower bound
	memcpy(before->mine, w->depth ? inherited->mine : side->mine, sizeof before->mine);
	for (u32 i = 0; all && i < options.threads; i++)
		if (worlds[i] != w)
			copies[others++] = copy_world(worlds[i]);
	mine->turn = w->depth ? CHILD_KINDS : __atomic_fetch_add(&side->turns, 1, __ATOMIC_RELAXED);
	pid_t pid = fork();
	if (pid == 0)
		child(mine, copies, others, before);
	int error = errno;
	if (w->depth == 0)
		pthread_rwlock_unlock(&quiet);
	munmap(mine, world_bytes(mine->pages));
	munmap(before, sizeof *before);
	for (u32 i = 0; i < others; i++)
		munmap(copies[i], world_bytes(copies[i]->pages));
	errno = error;
	if (pid < 0)
		broken(w, "fork");
	c->pid[c->count++] = pid;
	__atomic_add_fetch(&side->forks, 1, __ATOMIC_RELAXED);
	if (all)
		__atomic_add_fetch(&side->quiet_forks, 1, __ATOMIC_RELAXED);
}

// ---- brk ----

// Called with the lock held for writing, so that no worker allocates meanwhile.
static void op_brk(struct world *w)
{
	side->breaks++;
	struct brk_area *a = brk_area;
	u8 *top = sbrk(0);
	if (!a->pages || top != a->base + (u64)a->pages * PAGE) { // first time, or malloc moved the break: start again
		u64 pad = -(u64)top % PAGE;
		if (sbrk(pad) != top)
			return;
		a->base = top + pad, a->pages = 0;
	}
	for (u32 i = 0; i < a->pages; i++)
		for (u32 k = 0; k < PAGE_WORDS; k += 1 + k % 61) {
			u64 found = *(volatile u64 *)(a->base + (u64)i * PAGE + k * 8);
			u64 expected = word_of(w, a->version[i], k / BLOCK_WORDS, k % BLOCK_WORDS);
			if (found != expected)
				side_mismatch("the heap (brk)", i, expected, found);
		}
	u32 n = 1 + below(w, 48);
	if (a->pages && (a->pages + n > BRK_PAGES || below(w, 2))) {
		n = n < a->pages ? n : a->pages;
		if (sbrk(-(long)n * PAGE) == (void *)-1)
			broken(w, "sbrk");
		a->pages -= n;
		return;
	}
	if (a->pages + n > BRK_PAGES || sbrk(n * PAGE) == (void *)-1)
		return;
	for (u32 i = a->pages; i < a->pages + n; i++) {
		u64 *at = (u64 *)(a->base + (u64)i * PAGE);
		for (u32 k = 0; k < PAGE_WORDS; k++)
			if (((volatile u64 *)at)[k] != 0)
				side_mismatch("fresh heap (brk)", i, 0, at[k]);
		a->version[i] = new_version(w);
		for (u32 k = 0; k < PAGE_WORDS; k++)
			at[k] = word_of(w, a->version[i], k / BLOCK_WORDS, k % BLOCK_WORDS);
	}
	a->pages += n;
}

// ---- sabotage: proof that the oracle notices ----

static void spoil(struct world *w)
{
	for (u32 tries = 0; tries < 100000; tries++) {
		struct span s = pick(w, 1, WANT_WRITE), other = pick(w, 1, WANT_READ);
		if (!s.count || !other.count || s.start == other.start)
			continue;
		struct page *p = &w->page[s.start], *q = &w->page[other.start];
		if (is_zero_page(p) || is_zero_page(q) || (p->flags | q->flags) & (F_FREED | F_OPAQUE) || p->patch || q->patch)
			continue;
		u64 bytes[PAGE_WORDS];
		if (!memcmp(p->version, q->version, sizeof p->version))
			continue;
		if (!strcmp(options.sabotage, "zero")) {
			memset(bytes, 0, sizeof bytes);
		} else if (!strcmp(options.sabotage, "foreign")) {
			expect_page(w, q, bytes);
		} else { // stale: what was there before this write
			expect_page(w, p, bytes);
			write_blocks(w, s.start, 0, BLOCKS, new_version(w));
		}
		say("asfuzz: sabotage (%s) of page %u at step %lu\n", options.sabotage, s.start, w->steps);
		memcpy(address_of(w, s.start), bytes, PAGE);
		verify_page(w, "sabotaged page", s.start);
		return;
	}
	broken(w, "found no page to spoil");
}

// ---- the loop ----

enum op {
	OP_WRITE, OP_WRITE_PART, OP_PATCH, OP_VERIFY, OP_PEEK, OP_OUT, OP_IN, OP_MMAP, OP_MUNMAP, OP_MAP_FIXED, OP_MOVE,
	OP_RESIZE, OP_DONTNEED, OP_FREE, OP_FORK_ADVICE, OP_PROTECT, OP_PROBE, OP_POPULATE, OP_HINT, OP_LOCK, OP_URING,
	OP_FORK, OP_BRK, OP_REST, OP_GUARD, OP_PEER, OP_VFORK, OP_COUNT
};

static struct {
	const char *name;
	u32 weight; // of about 1000
} table[OP_COUNT] = {
	[OP_WRITE] = { "write", 140 },         [OP_WRITE_PART] = { "write_part", 70 }, [OP_PATCH] = { "patch", 60 },
	[OP_VERIFY] = { "verify", 130 },       [OP_PEEK] = { "peek", 80 },             [OP_OUT] = { "syscall_out", 80 },
	[OP_IN] = { "syscall_in", 80 },        [OP_MMAP] = { "mmap", 70 },             [OP_MUNMAP] = { "munmap", 35 },
	[OP_MAP_FIXED] = { "map_fixed", 25 },  [OP_MOVE] = { "mremap_move", 35 },      [OP_RESIZE] = { "mremap_resize", 25 },
	[OP_DONTNEED] = { "dontneed", 25 },    [OP_FREE] = { "free", 20 },             [OP_FORK_ADVICE] = { "fork_advice", 20 },
	[OP_PROTECT] = { "mprotect", 35 },     [OP_PROBE] = { "segv_probe", 25 },      [OP_POPULATE] = { "populate", 10 },
	[OP_HINT] = { "hint", 10 },            [OP_LOCK] = { "mlock", 6 },             [OP_URING] = { "uring_fixed", 4 },
	[OP_FORK] = { "fork", 5 },             [OP_BRK] = { "brk", 5 },                [OP_REST] = { "rest", 5 },
	[OP_GUARD] = { "guard", 0 },           [OP_PEER] = { "peer", 40 },            [OP_VFORK] = { "vfork", 6 },
};

static enum op choose(struct world *w)
{
	u32 total = 0;
	for (u32 i = 0; i < OP_COUNT; i++)
		total += table[i].weight;
	u32 at = below(w, total);
	enum op op = 0;
	while (at >= table[op].weight)
		at -= table[op++].weight;
	u32 share = w->live * 100 / w->pages; // keep the footprint between 60 and 90 %
	if (op == OP_MUNMAP && share < 60)
		return OP_MMAP;
	if (op == OP_MMAP && share > 90)
		return OP_MUNMAP;
	return op;
}

static void run(struct world *w)
{
	struct gear gear;
	struct uring ring = { .fd = -1 };
	struct children children = { .count = 0 };
	int top = w->depth == 0;
	gear_up(w, &gear);
	if (top && !options.no_uring)
		uring_open(w, &ring);
	u64 half = w->ops_left / 2;
	for (; w->ops_left > 0; w->ops_left--) {
		if (options.sabotage && top && w->thread == 0 && w->ops_left == half)
			spoil(w);
		enum op op = choose(w);
		w->steps++;
		if (options.skip[op])
			continue;
		w->done[op]++;
		if (op == OP_FORK) {
			if (!options.no_fork && w->depth < DEPTH_MAX && (top || below(w, 2)))
				op_fork(w, &children);
			continue;
		}
		if (op == OP_REST) {
			usleep(500 + below(w, 4000));
			continue;
		}
		if (op == OP_BRK) {
			if (top && w->thread == 0) {
				pthread_rwlock_wrlock(&quiet);
				op_brk(w);
				pthread_rwlock_unlock(&quiet);
			}
			continue;
		}
		if (top)
			pthread_rwlock_rdlock(&quiet);
		switch (op) {
		case OP_WRITE: op_write(w); break;
		case OP_WRITE_PART: op_write_part(w); break;
		case OP_PATCH: op_patch(w); break;
		case OP_VERIFY: op_verify(w); break;
		case OP_PEEK: op_peek(w); break;
		case OP_OUT: op_syscall_out(w, &gear); break;
		case OP_IN: op_syscall_in(w, &gear); break;
		case OP_MMAP: op_mmap(w); break;
		case OP_MUNMAP: op_munmap(w); break;
		case OP_MAP_FIXED: op_map_fixed(w); break;
		case OP_MOVE: op_move(w); break;
		case OP_RESIZE: op_resize(w); break;
		case OP_DONTNEED: op_dontneed(w); break;
		case OP_FREE: op_free(w); break;
		case OP_FORK_ADVICE: op_fork_advice(w); break;
		case OP_PROTECT: op_protect(w); break;
		case OP_PROBE: op_probe(w, &gear); break;
		case OP_POPULATE: op_populate(w); break;
		case OP_HINT: options.no_hints ? (void)0 : op_hint(w); break;
		case OP_LOCK: options.no_lock ? (void)0 : op_lock(w); break;
		case OP_GUARD: op_guard(w); break;
		case OP_PEER: top ? op_peer(w) : (void)0; break;
		case OP_VFORK: op_vfork(w); break;
		case OP_URING: op_uring(w, &gear, &ring); break;
		default: break;
		}
		if (top)
			pthread_rwlock_unlock(&quiet);
		if (top && options.verbose && w->steps % 1000 == 0)
			say("asfuzz: thread %lu step %lu live %u pages\n", w->thread, w->steps, w->live);
	}
	reap(w, &children, 0);
	if (ring.fd >= 0)
		close(ring.fd);
	gear_down(&gear);
}

static void *worker(void *argument)
{
	struct world *w = argument;
	ready_for_signals(w->thread % 2 == 0);
	while (w->live < w->pages * 7 / 10) {
		pthread_rwlock_rdlock(&quiet);
		op_mmap(w);
		pthread_rwlock_unlock(&quiet);
	}
	run(w);
	verify_span(w, "the end", (struct span){ 0, w->pages });
	return NULL;
}

static u64 number(int argc, char **argv, int *at)
{
	char *end;
	if (++*at >= argc)
		exit(2);
	u64 value = strtoull(argv[*at], &end, 0);
	if (*end || end == argv[*at]) {
		fprintf(stderr, "asfuzz: `%s` is not a number\n", argv[*at]);
		exit(2);
	}
	return value;
}

static void parse(int argc, char **argv)
{
	static const struct {
		const char *name;
		int *flag;
	} flags[] = {
		{ "--no-fork", &options.no_fork },     { "--no-side", &options.no_side }, { "--no-uring", &options.no_uring },
		{ "--no-hints", &options.no_hints },   { "--no-lock", &options.no_lock }, { "--verbose", &options.verbose },
		{ "--no-signals", &options.no_signals }, { "--guards", &options.guards },
		{ "--no-peer", &options.no_peer },     { "--realtime", &options.realtime },
	};
	for (int i = 1; i < argc; i++) {
		u32 known = 0;
		for (u32 f = 0; f < sizeof flags / sizeof *flags; f++)
			if (!strcmp(argv[i], flags[f].name))
				known = *flags[f].flag = 1;
		if (known)
			continue;
		if (!strcmp(argv[i], "--seed"))
			options.seed = number(argc, argv, &i);
		else if (!strcmp(argv[i], "--ops"))
			options.ops = number(argc, argv, &i);
		else if (!strcmp(argv[i], "--threads"))
			options.threads = number(argc, argv, &i);
		else if (!strcmp(argv[i], "--footprint-mib"))
			options.mib = number(argc, argv, &i);
		else if (!strcmp(argv[i], "--dir") && i + 1 < argc)
			direct_folder = argv[++i];
		else if (!strcmp(argv[i], "--freezer") && i + 1 < argc)
			options.freezer = argv[++i];
		else if (!strcmp(argv[i], "--skip") && i + 1 < argc) {
			u32 op = 0;
			while (op < OP_COUNT && strcmp(argv[i + 1], table[op].name))
				op++;
			if (op == OP_COUNT) {
				fprintf(stderr, "asfuzz: no operation `%s`\n", argv[i + 1]);
				exit(2);
			}
			options.skip[op] = 1, i++;
		} else if (!strcmp(argv[i], "--sabotage") && i + 1 < argc)
			options.sabotage = argv[++i];
		else {
			fprintf(stderr, "asfuzz: unknown option `%s`\n", argv[i]);
			exit(2);
		}
	}
	if (options.guards)
		table[OP_GUARD].weight = 60;
	if (options.threads < 1 || options.threads > THREADS_MAX || options.mib < 4 || options.mib > 4096) {
		fprintf(stderr, "asfuzz: --threads 1..%d, --footprint-mib 4..4096\n", THREADS_MAX);
		exit(2);
	}
}

static void start(pthread_t *thread, void *(*body)(void *), void *argument)
{
	if (pthread_create(thread, NULL, body, argument)) {
		say("asfuzz: BROKEN pthread_create\n");
		_exit(EXIT_BROKEN);
	}
}

int main(int argc, char **argv)
{
	parse(argc, argv);
	u64 nonce = 0;
	struct timespec begin, end;
	clock_gettime(CLOCK_MONOTONIC, &begin);
	if (getrandom(&nonce, sizeof nonce, 0) != sizeof nonce)
		nonce = getpid(); // so that another run's leftovers do not look right
	side = shared_bytes(sizeof *side);
	brk_area = shared_bytes(sizeof *brk_area);
	direct_skipped = &side->direct_skipped;
	side->processes = 1;
	side->realtime = options.realtime;
	if (!options.no_peer)
		peer_start(options.freezer);
	if (prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0))
		say("asfuzz: not a subreaper: %s\n", strerror(errno));
	if (low_map() == 0)
		say("asfuzz: SKIPPED: vm.mmap_min_addr leaves no low pages\n");
	counters = private_pages(COUNTER_PAGES);
	futexes = private_pages(FUTEX_PAGES);
	alarm_pages = private_pages(ALARM_PAGES);

	pthread_rwlockattr_t attr;
	pthread_rwlockattr_init(&attr);
	pthread_rwlockattr_setkind_np(&attr, PTHREAD_RWLOCK_PREFER_WRITER_NONRECURSIVE_NP);
	pthread_rwlock_init(&quiet, &attr);

	struct sigaction action = { .sa_sigaction = on_fault, .sa_flags = SA_SIGINFO | SA_ONSTACK | SA_NODEFER };
	sigaction(SIGSEGV, &action, NULL);
	sigaction(SIGBUS, &action, NULL);
	action = (struct sigaction){ .sa_handler = on_alarm, .sa_flags = SA_RESTART | SA_ONSTACK };
	sigaction(SIGALRM, &action, NULL);
	sigset_t set;
	sigemptyset(&set);
	sigaddset(&set, SIGALRM);
	pthread_sigmask(SIG_BLOCK, &set, NULL); // the main thread only waits; the others unblock it

	u32 pages = options.mib * 256;
	pthread_t workers[THREADS_MAX], beside[COUNTER_THREADS + 6];
	u32 beside_count = 0;
	for (u64 t = 0; t < options.threads; t++) {
		struct world *w = worlds[t] = shared_bytes(world_bytes(pages));
		w->seed = options.seed, w->thread = t, w->pages = pages, w->process = 1;
		w->rng = mix64(options.seed * 1000 + t), w->content_seed = mix64(options.seed ^ nonce);
		w->ops_left = options.ops / options.threads;
		// Low fixed addresses. The kernel chooses addresses from the top down, so a hole in
		// an arena stays a hole.
		w->base = (u8 *)(0x100000000000ull + t * 0x1000000000ull);
	}
	if (!options.no_side) {
		for (u64 t = 0; t < COUNTER_THREADS; t++)
			start(&beside[beside_count++], count_up, (void *)t);
		start(&beside[beside_count++], ping_pong, (void *)0);
		start(&beside[beside_count++], ping_pong, (void *)1);
		start(&beside[beside_count++], storm, (void *)options.seed);
		start(&beside[beside_count++], spawner, NULL);
		over_fill();
		start(&beside[beside_count++], over_touch, NULL);
		start(&beside[beside_count++], move_over, NULL);
	}
	for (u64 t = 0; t < options.threads; t++)
		start(&workers[t], worker, worlds[t]);
	if (!options.no_signals) {
		struct itimerval every = { { 0, 7000 }, { 0, 7000 } };
		setitimer(ITIMER_REAL, &every, NULL);
	}
	for (u64 t = 0; t < options.threads; t++)
		pthread_join(workers[t], NULL);
	__atomic_store_n(&side->stop, 1, __ATOMIC_RELAXED);
	for (u32 i = 0; i < beside_count; i++)
		pthread_join(beside[i], NULL);
	setitimer(ITIMER_REAL, &(struct itimerval){ 0 }, NULL);
	if (!options.no_side)
		check_counters();
	await_heirs(worlds[0]);
	check_low("the lowest pages, at the end");

	clock_gettime(CLOCK_MONOTONIC, &end);
	u64 done[OP_COUNT] = { 0 }, steps = 0, checked = 0, refused = 0, segv = 0, freed_zero = 0, freed_old = 0;
	for (u64 t = 0; t < options.threads; t++) {
		struct world *w = worlds[t];
		steps += w->steps, checked += w->checked_pages, refused += w->refused, segv += w->segv_seen;
		freed_zero += w->freed_zero, freed_old += w->freed_old;
		for (u32 i = 0; i < OP_COUNT; i++)
			done[i] += w->done[i];
	}
	printf("seed %lu\nthreads %lu\nops %lu\nchild_ops %lu\npages_checked %lu\nseconds %.2f\n", options.seed,
	       options.threads, steps, side->child_ops, checked,
	       end.tv_sec - begin.tv_sec + (end.tv_nsec - begin.tv_nsec) / 1e9);
	printf("forks %lu (quiet %lu)\nsegv_seen %lu\nrefused %lu\nfreed_pages_read old %lu zero %lu\n", side->forks,
	       side->quiet_forks, segv, refused, freed_old, freed_zero);
	printf("increments %lu\nfutex_rounds %lu\nstorm_threads %lu\nspawned %lu\nalarms %lu\ndirect_io_skipped %lu\n",
	       side->increments, side->futex_rounds, side->storm_threads, side->spawned, side->alarms, side->direct_skipped);
	printf("vforks %lu\nclones %lu\nguards %lu\npins %lu\nbreaks %lu\nrealtime_threads %lu\n", side->vforks, side->clones,
	       side->guards, side->pins, side->breaks, side->realtime_threads);
	printf("sharers_done %lu\nsharers_lost %lu\novers %lu\n", side->sharers_done, side->sharers_lost, side->overs);
	for (u32 i = 0; i < CHILD_KINDS; i++)
		printf("children %s %lu\n", child_kinds[i], side->children[i]);
	for (u32 i = 0; i < PEER_WAYS && peer; i++)
		printf("peer %s: %lu refused %lu\n", peer_ways[i], peer->asked[i], peer->refused[i]);
	for (u32 i = 0; i < OP_COUNT; i++)
		printf("op %s %lu\n", table[i].name, done[i]);
	printf("mismatches 0\n");
	return 0;
}
