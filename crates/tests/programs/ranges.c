// ranges THREADS MIB ROUNDS SEED: each thread has a region of MIB MiB and does ROUNDS random
// operations on large ranges of it. It writes and checks here and there, drops, unmaps, maps anew,
// moves away and back, and forks a child that checks. Every byte must be what was last written, or
// zero; otherwise the status is 86. An operation takes some 2 ms.
#define _GNU_SOURCE
#include <pthread.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/wait.h>
#include <unistd.h>

enum { PAGE = 4096, WORDS = PAGE / 8, WRONG = 86, TOUCHES = 600 };
static long pages, rounds, seed;
// Nothing is mapped for a thread once one of them unmaps: it would lie in the gap, and be mapped over.
static pthread_barrier_t all_there;

struct region {
	uint64_t *at, *spare; // spare: address space for moves
	uint32_t *version;    // of each page; 0: zeros
	uint32_t next;
	unsigned random;
};

static long below(struct region *r, long most) { return (rand_r(&r->random) * 32768L + rand_r(&r->random)) % most; }

static uint64_t value(long page, uint32_t version) { return version ? (uint64_t)version << 32 | (page * 2654435761u & 0xffffffff) : 0; }

static void check_page(struct region *r, uint64_t *base, long page)
{
	uint64_t wanted = value(page, r->version[page]), *words = base + page * WORDS;
	if (words[0] == wanted && words[WORDS - 1] == wanted)
		return;
	fprintf(stderr, "ranges: page %ld of %p: %lx and %lx, not %lx\n", page, (void *)base, (long)words[0],
	        (long)words[WORDS - 1], (long)wanted);
	_exit(WRONG);
}

static void check_some(struct region *r, long from, long count)
{
	for (long page = from; page < from + count; page += 1 + below(r, 1 + count / TOUCHES * 2))
		check_page(r, r->at, page);
}

static void write_some(struct region *r, long from, long count)
{
	for (long page = from; page < from + count; page += 1 + below(r, 1 + count / TOUCHES * 2)) {
		r->version[page] = ++r->next;
		r->at[page * WORDS] = r->at[page * WORDS + WORDS - 1] = value(page, r->version[page]);
	}
}

static void *map(void *at, long count, int protection)
{
	int flags = MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE | (at ? MAP_FIXED : 0);
	void *got = mmap(at, count * PAGE, protection, flags, -1, 0);
	if (got == MAP_FAILED) {
		perror("ranges: mmap");
		_exit(2);
	}
	return got;
}

static void move(struct region *r, long from, long count)
{
	// Half of the time to another offset within 2 MiB.
	char *old = (char *)(r->at + from * WORDS), *to = (char *)(r->spare + from * WORDS) + PAGE * below(r, 2);
	for (int back = 0; back < 2; back++) {
		char *source = back ? to : old, *target = back ? old : to;
		if (mremap(source, count * PAGE, count * PAGE, MREMAP_MAYMOVE | MREMAP_FIXED, target) != target) {
			perror("ranges: mremap");
			_exit(2);
		}
		uint64_t *base = (uint64_t *)target - from * WORDS;
		for (int i = 0; i < 20; i++)
			check_page(r, base, from + below(r, count));
	}
	map(to, count, PROT_NONE);
}

static void child(struct region *r)
{
	pid_t pid = fork();
	if (pid == 0) {
		check_some(r, 0, pages);
		munmap(r->at, pages / 2 * PAGE);
		map(r->at, pages / 2, PROT_READ | PROT_WRITE);
		memset(r->version, 0, pages / 2 * sizeof *r->version);
		write_some(r, 0, pages);
		check_some(r, 0, pages);
		_exit(0);
	}
	int status;
	if (pid < 0 || waitpid(pid, &status, 0) < 0 || status) {
		fprintf(stderr, "ranges: a child ended with %x\n", status);
		_exit(pid < 0 ? 2 : WRONG);
	}
}

static void *work(void *of)
{
	struct region *r = of;
	pthread_barrier_wait(&all_there);
	for (long round = 0; round < rounds; round++) {
		long from = below(r, pages - 1), count = 1 + below(r, pages - from - 1);
		void *start = r->at + from * WORDS;
		switch (below(r, 12)) {
		case 0:
			madvise(start, count * PAGE, MADV_DONTNEED);
			break;
		case 1:
			munmap(start, count * PAGE);
			map(start, count, PROT_READ | PROT_WRITE);
			break;
		case 2:
			map(start, count, PROT_READ | PROT_WRITE);
			break;
		case 3:
			move(r, from, count);
			continue;
		case 4:
			if (round % 4 == 0)
				child(r);
			continue;
		case 5:
		case 6:
		case 7:
			check_some(r, from, count);
			continue;
		default:
			write_some(r, from, count);
			continue;
		}
		memset(r->version + from, 0, count * sizeof *r->version);
		// Old bytes that come back do so at once.
		for (int i = 0; i < 50; i++)
			check_page(r, r->at, from + below(r, count));
	}
	check_some(r, 0, pages);
	return NULL;
}

int main(int count, char **words)
{
	if (count != 5)
		return 2;
	long threads = atol(words[1]);
	pages = atol(words[2]) * 256, rounds = atol(words[3]), seed = atol(words[4]);
	pthread_t thread[16];
	struct region region[16];
	threads = threads < 16 ? threads : 16;
	pthread_barrier_init(&all_there, NULL, threads);
	for (long i = 0; i < threads; i++) {
		struct region *r = &region[i];
		r->at = map(NULL, pages, PROT_READ | PROT_WRITE);
		r->spare = map(NULL, pages + 1, PROT_NONE);
		r->version = calloc(pages, sizeof *r->version);
		r->next = 0, r->random = seed * 16 + i;
		if (pthread_create(&thread[i], NULL, work, r))
			return 2;
	}
	for (long i = 0; i < threads; i++)
		pthread_join(thread[i], NULL);
	return 0;
}
