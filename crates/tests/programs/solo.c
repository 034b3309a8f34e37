// solo WHAT MIB: touches MIB of memory, then does WHAT, which a program may do that has one thread
// and no child. Status 1: it was refused, or a byte is wrong. Status 77: refused to any program here.
#define _GNU_SOURCE
#include <dirent.h>
#include <errno.h>
#include <linux/filter.h>
#include <linux/seccomp.h>
#include <pthread.h>
#include <sched.h>
#include <signal.h>
#include <stddef.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/prctl.h>
#include <sys/resource.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <unistd.h>

static long bytes, rounds;
static unsigned char *memory;
static pthread_t first;

// Changes one byte a page; true if all have the value of the round before.
static int is_right(void)
{
	int right = 1;
	for (long at = 0; at < bytes; at += 4096)
		right &= memory[at]++ == (unsigned char)rounds;
	rounds++;
	return right;
}

static void check(int good, const char *what)
{
	if (!good) {
		printf("%s: %s\n", what, strerror(errno));
		_exit(1);
	}
}

static int tasks(void)
{
	DIR *folder = opendir("/proc/self/task");
	int count = 0;
	for (struct dirent *entry; (entry = readdir(folder));)
		count += entry->d_name[0] != '.';
	closedir(folder);
	return count;
}

static long number(const char *file, const char *key)
{
	char line[256];
	long found = -1;
	FILE *lines = fopen(file, "r");
	while (fgets(line, sizeof line, lines))
		if (strncmp(line, key, strlen(key)) == 0)
			found = atol(line + strlen(key));
	fclose(lines);
	return found;
}

static int filter(unsigned call, unsigned action, unsigned flags)
{
	struct sock_filter code[] = {
		BPF_STMT(BPF_LD | BPF_W | BPF_ABS, offsetof(struct seccomp_data, nr)),
		BPF_JUMP(BPF_JMP | BPF_JEQ | BPF_K, call, 0, 1),
		BPF_STMT(BPF_RET | BPF_K, action),
		BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_ALLOW),
	};
	struct sock_fprog program = { 4, code };
	prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0);
	return syscall(SYS_seccomp, SECCOMP_SET_MODE_FILTER, flags, &program);
}

// Whether the first thread has not ended.
static int is_there(void)
{
	char file[64], line[256] = "";
	sprintf(file, "/proc/self/task/%d/stat", getpid());
	FILE *stat = fopen(file, "r");
	int there = stat && fgets(line, sizeof line, stat) && !strstr(line, ") Z ");
	if (stat)
		fclose(stat);
	return there;
}

static void *goes_on(void *joins)
{
	if (joins) {
		check(pthread_join(first, NULL) == 0, "join");
	} else {
		while (is_there())
			usleep(1000);
	}
	for (int round = 0; round < 6; round++)
		check(is_right(), "after the first thread");
	puts("went on");
	exit(0);
}

static void alone(const char *what)
{
	if (strcmp(what, "threads") == 0) {
		check(tasks() == 1, "tasks");
		check(number("/proc/self/status", "Threads:") == 1, "Threads");
	} else if (strcmp(what, "unshare") == 0) {
		if (unshare(CLONE_NEWUSER) != 0) {
			if (errno != EINVAL)
				exit(77);
			check(0, "unshare");
		}
	} else if (strcmp(what, "children") == 0) {
		char file[64], line[64] = "";
		sprintf(file, "/proc/self/task/%d/children", getpid());
		FILE *children = fopen(file, "r");
		check(!children || !fgets(line, sizeof line, children), "children");
		check(waitpid(-1, NULL, WNOHANG | __WALL) == -1 && errno == ECHILD, "wait");
	} else if (strcmp(what, "priority") == 0) {
		check(setuid(65534) == 0, "setuid");
		setpgid(0, 0);
		check(setpriority(PRIO_PGRP, 0, 6) == 0, "priority");
	} else if (strcmp(what, "tsync") == 0) {
		unsigned refused = SECCOMP_RET_ERRNO | EPERM;
		check(filter(SYS_acct, refused, SECCOMP_FILTER_FLAG_TSYNC) == 0, "filter");
	} else if (strcmp(what, "exit") == 0) {
		syscall(SYS_exit, 7);
	} else if (strcmp(what, "strict") == 0) {
		prctl(PR_SET_SECCOMP, SECCOMP_MODE_STRICT);
		syscall(SYS_exit, 7);
	} else if (strcmp(what, "killed") == 0) {
		check(filter(SYS_getppid, SECCOMP_RET_KILL_THREAD, 0) == 0, "filter");
		getppid();
	} else if (strcmp(what, "leaves") == 0 || strcmp(what, "is_joined") == 0) {
		pthread_t other;
		first = pthread_self();
		pthread_create(&other, NULL, goes_on, strcmp(what, "leaves") ? &first : NULL);
		pthread_exit(NULL);
	}
}

int main(int count, char **arguments)
{
	bytes = (count > 2 ? atol(arguments[2]) : 48) << 20;
	memory = calloc(1, bytes);
	for (int round = 0; round < 3; round++)
		check(is_right(), "before");
	alone(arguments[1]);
	for (int round = 0; round < 3; round++)
		check(is_right(), "after");
	return 0;
}
