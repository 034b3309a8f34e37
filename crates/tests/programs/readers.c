// readers MIB ROUNDS [brothers|orphans]: children made by a raw system call wait, and touch nothing. Another process,
// which is no relative, reads their memory first. Then each child verifies its own: what was shared
// with it, what the parent wants wiped in children, and that what the parent does not want in
// children is missing. `brothers`: the children are made with CLONE_PARENT, so the parent is not their
// parent. `orphans`: a child's parent is a fork child that ends before anybody reads. Exit 86: other bytes came back. Exit 4: a child or the reader failed.
//
// readers read MIB ADDRESS: the reader. Gets process ids on its input, and answers each with a byte.
#define _GNU_SOURCE
#include "pages.h"
#include <fcntl.h>
#include <poll.h>
#include <sched.h>
#include <signal.h>
#include <spawn.h>
#include <stdlib.h>
#include <string.h>
#include <sys/syscall.h>
#include <sys/uio.h>
#include <sys/wait.h>

enum { ASIDE = 256, READS = 64 };

static volatile char *wiped, *absent;

static void read_others(uint64_t address)
{
	static uint64_t bytes[WORDS];
	uint64_t count = 0;
	for (int pid; read(0, &pid, sizeof pid) == sizeof pid;) {
		for (int at = 0; at < READS; at++) {
			uint64_t page = mix64(++count) % pages;
			struct iovec here = {bytes, PAGE}, there = {(void *)(address + page * PAGE), PAGE};
			if (process_vm_readv(pid, &here, 1, &there, 1, 0) != PAGE)
				_exit(4);
			for (uint64_t word = 0; word < WORDS; word++)
				if (bytes[word] != word_of(page, 0, word))
					_exit(WRONG);
		}
		if (write(1, "", 1) != 1)
			_exit(4);
	}
	_exit(0);
}

static void child(int go, int told)
{
	char byte;
	if (read(go, &byte, 1) != 1)
		_exit(4);
	for (uint64_t page = 0; page < pages; page += 7)
		check(page, 0);
	for (int at = 0; at < ASIDE * PAGE; at += 512)
		if (wiped[at])
			_exit(WRONG);
	// Whatever is mapped there now must be fresh.
	volatile char *fresh = mmap((void *)absent, ASIDE * PAGE, PROT_READ | PROT_WRITE,
	                            MAP_PRIVATE | MAP_ANONYMOUS | MAP_FIXED, -1, 0);
	for (int at = 0; at < ASIDE * PAGE; at += 512)
		if (fresh[at])
			_exit(WRONG);
	if (told >= 0 && write(told, "", 1) != 1)
		_exit(4);
	_exit(0);
}

static char *aside(int advice)
{
	char *at = mmap(NULL, ASIDE * PAGE, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
	if (at == MAP_FAILED || madvise(at, ASIDE * PAGE, advice))
		_exit(2);
	memset(at, 0x5a, ASIDE * PAGE);
	return at;
}

// The first failure of all children, those made by a child with CLONE_PARENT among them.
static int all_children(void)
{
	int status, bad = 0;
	while (wait(&status) > 0)
		if (status && !bad)
			bad = WIFEXITED(status) ? WEXITSTATUS(status) : 4;
	return bad;
}

// Waits for the end of a process that is no child; its parent hears of its status.
static int wait_for_brother(int pid)
{
	struct pollfd end = {.fd = syscall(SYS_pidfd_open, pid, 0), .events = POLLIN};
	int good = end.fd >= 0 && poll(&end, 1, 20000) == 1;
	close(end.fd);
	return good ? 0 : 4;
}

static int wait_for_orphan(int pid, int told)
{
	char byte;
	fcntl(told, F_SETFL, O_NONBLOCK);
	return wait_for_brother(pid) || read(told, &byte, 1) != 1 ? 4 : 0;
}

// A child whose parent has ended. It writes a byte to `told` if all was right.
static int orphan(int go, int told)
{
	int number[2], pid = 0, status;
	if (pipe2(number, O_CLOEXEC))
		_exit(2);
	int parent = fork();
	if (!parent) {
		int pid = syscall(SYS_clone, SIGCHLD, 0, 0, 0, 0);
		if (!pid)
			child(go, told);
		_exit(write(number[1], &pid, sizeof pid) != sizeof pid);
	}
	if (waitpid(parent, &status, 0) != parent || status || read(number[0], &pid, sizeof pid) != sizeof pid)
		_exit(4);
	close(number[0]), close(number[1]);
	return pid;
}

int main(int count, char **arguments)
{
	int brothers = count == 4 && !strcmp(arguments[3], "brothers");
	int orphans = count == 4 && !strcmp(arguments[3], "orphans");
	if (brothers) {
		if (fork())
			return all_children();
	} else if (count == 4 && !orphans) {
		pages = strtoul(arguments[2], NULL, 0) * 256;
		read_others(strtoul(arguments[3], NULL, 0));
	}
	int to[2], from[2], go[2], told[2], status, reader, bad = 0;
	char address[32], byte;
	if (count != 3 + brothers + orphans || !map_pages(strtoul(arguments[1], NULL, 0)) || pipe2(to, O_CLOEXEC) || pipe2(from, O_CLOEXEC) ||
	    pipe2(go, O_CLOEXEC) || pipe2(told, O_CLOEXEC))
		return 2;
	wiped = aside(MADV_WIPEONFORK), absent = aside(MADV_DONTFORK);
	for (uint64_t page = 0; page < pages; page++)
		fill(page, 0);
	snprintf(address, sizeof address, "%#lx", (uint64_t)memory);
	char *words[] = {"readers", "read", arguments[1], address, NULL}, *none[] = {NULL};
	posix_spawn_file_actions_t files;
	posix_spawn_file_actions_init(&files);
	posix_spawn_file_actions_adddup2(&files, to[0], 0);
	posix_spawn_file_actions_adddup2(&files, from[1], 1);
	// Without environment: no shim.
	if (posix_spawn(&reader, "/proc/self/exe", &files, NULL, words, none))
		return 2;
	for (int round = atoi(arguments[2]); round > 0 && !bad; round--) {
		int pid = orphans ? orphan(go[0], told[1]) : syscall(SYS_clone, brothers ? CLONE_PARENT : SIGCHLD, 0, 0, 0, 0);
		if (pid == 0)
			child(go[0], -1);
		if (write(to[1], &pid, sizeof pid) != sizeof pid)
			bad = 4;
		close(round == 1 ? to[1] : -1);
		// A reader that has failed gives no answer.
		fcntl(from[0], F_SETFL, O_NONBLOCK);
		for (int tries = 0; read(from[0], &byte, 1) != 1 && !bad; tries++) {
			if (tries == 20000 || waitpid(reader, &status, WNOHANG) == reader)
				bad = tries < 20000 && WIFEXITED(status) ? WEXITSTATUS(status) : 4;
			usleep(1000);
		}
		if (write(go[1], "", 1) != 1)
			bad = 4;
		else if (brothers)
			bad = bad ? bad : wait_for_brother(pid);
		else if (orphans)
			bad = bad ? bad : wait_for_orphan(pid, told[0]);
		else if (waitpid(pid, &status, 0) != pid)
			bad = 4;
		else if (status)
			bad = WIFEXITED(status) ? WEXITSTATUS(status) : 4;
	}
	for (uint64_t page = 0; page < pages; page++)
		check(page, 0);
	return bad;
}
