// remaps MIB SECONDS [raw]: half of the memory makes way, piece by piece, for System V shared memory
// (SHM_REMAP), of which a userfaultfd hears nothing, and is then mapped and written anew. Some pages
// are on their way out at that moment. Meanwhile every byte of the other half is verified. No page
// can be made smaller. At the end the program forks, which waits for pages on their way out. raw: by
// a system call of its own, and no piece is used again. Prints the pieces. Exit 86: other bytes came
// back. Exit 77: no System V shared memory.
#define _GNU_SOURCE
#include "pages.h"
#include <pthread.h>
#include <stdlib.h>
#include <sys/shm.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <time.h>

enum { PIECE = 16 };

static volatile int stop;
static int raw;
static uint64_t pieces;

static char *attach(int id, char *at)
{
	return raw ? (char *)syscall(SYS_shmat, id, at, SHM_REMAP) : shmat(id, at, SHM_REMAP);
}

static void read_zeros(uint64_t page)
{
	for (uint64_t i = 0; i < WORDS; i++)
		if (memory[page * WORDS + i]) {
			fprintf(stderr, "page %lu word %lu is not zero\n", page, i);
			_exit(WRONG);
		}
}

static void *make_way(void *argument)
{
	uint64_t half = pages / 2 / PIECE;
	for (; !stop && !(raw && pieces == half); pieces++) {
		uint64_t piece = raw ? pieces : mix64(pieces) % half;
		uint64_t page = pages / 2 + piece * PIECE;
		char *at = (char *)(memory + page * WORDS);
		int id = shmget(IPC_PRIVATE, PIECE * PAGE, IPC_CREAT | 0600);
		if (id < 0)
			_exit(77);
		if (attach(id, at) != at)
			_exit(3);
		shmctl(id, IPC_RMID, NULL);
		*(volatile char *)at = 1;
		usleep(500);
		if (raw)
			continue;
		if (mmap(at, PIECE * PAGE, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_FIXED, -1, 0) != at)
			_exit(2);
		for (uint64_t of = 0; of < PIECE; of++) {
			read_zeros(page + of);
			fill(page + of, pieces);
		}
	}
	return argument;
}

int main(int count, char **arguments)
{
	if (count < 3)
		return 2;
	raw = count > 3;
	random_data = 1;
	uint32_t *version = filled_pages(strtoul(arguments[1], NULL, 0));
	pthread_t beside;
	if (!version || pthread_create(&beside, NULL, make_way, NULL))
		return 2;
	uint64_t turn = 0, own = pages / 2;
	for (time_t end = time(NULL) + atoi(arguments[2]); time(NULL) < end;) {
		uint64_t page = mix64(++turn) % own;
		check(page, version[page]);
		if (turn & 1)
			fill(page, ++version[page]);
	}
	stop = 1;
	pthread_join(beside, NULL);
	for (uint64_t page = 0; page < own; page++)
		check(page, version[page]);
	int child = fork(), status;
	if (child == 0)
		_exit(0);
	if (waitpid(child, &status, 0) != child || status)
		return 2;
	printf("%lu\n", pieces);
	return 0;
}
