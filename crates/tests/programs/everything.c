// everything HOW MIB: locks (mlockall now, mlockall for ever, mlock) or reads (read) every mapping
// of the process. After that its memory, and that of fork children, must be unchanged. An alarm
// ends a hang.
#define _GNU_SOURCE
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/wait.h>
#include <unistd.h>

enum { PAGE = 4096, LINES = 2000 };

static long check(const char *held, long bytes)
{
	for (long at = 0; at < bytes; at += PAGE)
		if (*(const long *)(held + at) != at)
			return 1;
	return 0;
}

// Locks or reads every readable mapping except the kernel's own. Returns how many calls were
// refused.
static int each_mapping(int lock)
{
	static unsigned long list[LINES][2];
	char line[512], rights[5];
	int count = 0, refused = 0;
	FILE *file = fopen("/proc/self/maps", "r");
	while (file && count < LINES && fgets(line, sizeof line, file))
		if (sscanf(line, "%lx-%lx %4s", &list[count][0], &list[count][1], rights) == 3)
			count += rights[0] == 'r' && !strstr(line, "[v");
	if (file)
		fclose(file);
	for (int at = 0; at < count; at++) {
		if (lock)
			refused += mlock((void *)list[at][0], list[at][1] - list[at][0]) != 0;
		for (unsigned long page = list[at][0]; page < list[at][1]; page += PAGE)
			(void)*(volatile char *)page;
	}
	return refused;
}

int main(int count, char **arguments)
{
	const char *how = count > 1 ? arguments[1] : "now";
	long bytes = (count > 2 ? atol(arguments[2]) : 40) << 20;
	alarm(120);
	char *held = malloc(bytes);
	for (long at = 0; at < bytes; at += PAGE)
		*(long *)(held + at) = at;
	int refused = 0;
	if (!strcmp(how, "now") || !strcmp(how, "ever"))
		refused = mlockall(MCL_CURRENT | (*how == 'e' ? MCL_FUTURE : 0));
	else
		refused = each_mapping(!strcmp(how, "mlock"));
	int wrong = check(held, bytes);
	munlockall();
	for (int round = 0; round < 3; round++)
		wrong += check(held, bytes);
	for (int round = 0; round < 3; round++) {
		pid_t pid = fork();
		if (pid == 0)
			_exit(check(held, bytes) ? 1 : 7);
		int status;
		waitpid(pid, &status, 0);
		wrong += !WIFEXITED(status) || WEXITSTATUS(status) != 7;
	}
	printf("refused %d wrong %d\n", refused, wrong);
	return refused || wrong;
}
