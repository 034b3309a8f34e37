// neighbours WAY MIB ROUNDS: two processes that use more memory than they may. Now and then one of
// them cannot run. Measures how long the other one's accesses take meanwhile. Checks every byte of
// both. Prints the median, the 99th percentile and the longest access undisturbed, the same
// disturbed, and the accesses of the disturbed process. Exit 3: other bytes came back. Exit 4: the
// disturbed process did not go on.
//
// WAY is one of:
// - none: no disturbance;
// - stop (SIGSTOP), freezer (cgroup version 1), freeze (cgroup version 2);
// - trace: a debugger stops all threads of the process;
// - quota: the process has a hundredth of a processor, and the lowest priority;
// - nice: the process has the lowest priority, beside two processes that spin;
// - scribble, from half the time on and to the end: the process says of its own agent that it moves
//   pages, and that its commands are not done;
// - garbage, from half the time on and to the end: the process overwrites its command page again
//   and again.
#define _GNU_SOURCE
#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <linux/kcmp.h>
#include <pthread.h>
#include <sched.h>
#include <signal.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/ptrace.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

enum { PAGE = 4096, WORDS = PAGE / 8, BUCKETS = 40 * 16 };

static uint64_t pages;
static volatile struct shared {
	int stop, scribble;
	uint64_t done; // accesses of the other process
} *shared;
static char group[256];
static int lies; // the disturbance, once begun, never ends

static uint64_t next(uint64_t *state)
{
	*state ^= *state << 13, *state ^= *state >> 7, *state ^= *state << 17;
	return *state;
}

static uint64_t word(uint64_t page, uint64_t version, uint64_t at)
{
	return ((page + 1) * 0x9e3779b97f4a7c15 + version) ^ at / 16; // a RAM tier makes it smaller
}

static uint64_t now(void)
{
	struct timespec time;
	clock_gettime(CLOCK_MONOTONIC, &time);
	return time.tv_sec * 1000000000ull + time.tv_nsec;
}

static void *map(uint64_t bytes, int kind)
{
	void *at = mmap(NULL, bytes, PROT_READ | PROT_WRITE, kind | MAP_ANONYMOUS, -1, 0);
	if (at == MAP_FAILED)
		exit(2);
	return at;
}

// Memory, and which version of each page was written. The versions are in shared memory, which is
// not managed.
struct space {
	volatile uint64_t *memory;
	uint32_t *version;
	const char *whose;
};

static struct space make(const char *whose)
{
	return (struct space){map(pages * PAGE, MAP_PRIVATE), map(pages * 4, MAP_SHARED), whose};
}

static void fill(struct space *space, uint64_t page)
{
	uint32_t version = ++space->version[page];
	for (uint64_t at = 0; at < WORDS; at++)
		space->memory[page * WORDS + at] = word(page, version, at);
}

static void verify(struct space *space, uint64_t page)
{
	for (uint64_t at = 0; at < WORDS; at++)
		if (space->memory[page * WORDS + at] != word(page, space->version[page], at)) {
			fprintf(stderr, "%s page %lu word %lu: %lx\n", space->whose, page, at, space->memory[page * WORDS + at]);
			_exit(3);
		}
}

static void verify_all(struct space *space)
{
	for (uint64_t page = 0; page < pages; page++)
		verify(space, page);
}

// The command page of this process, where its shim has mapped it.
static volatile uint32_t *command;

static void find_command_page(void)
{
	char line[512];
	FILE *maps = fopen("/proc/self/maps", "r");
	while (maps && fgets(line, sizeof line, maps))
		if (strstr(line, "uc-command"))
			command = (volatile uint32_t *)strtoul(line, NULL, 16);
	if (maps)
		fclose(maps);
}

// Undisturbed, it writes to memory of its own, so that it takes as much of a processor as later.
static void *write_garbage(void *none)
{
	static volatile uint32_t own[64];
	(void)none;
	for (uint64_t state = 362436069;;) {
		volatile uint32_t *to = shared->scribble && command ? command : own;
		to[next(&state) % 64] = next(&state) & 1 ? next(&state) : next(&state) & 3;
	}
	return NULL;
}

static void other_process(const char *way)
{
	prctl(PR_SET_PDEATHSIG, SIGKILL);
	struct space space = make("the other's");
	uint64_t state = 88172645463325252;
	for (uint64_t page = 0; page < pages; page++)
		fill(&space, page);
	find_command_page();
	pthread_t thread;
	if (!strcmp(way, "garbage") && pthread_create(&thread, NULL, write_garbage, NULL))
		_exit(2);
	shared->done = 1;
	while (!shared->stop) {
		uint64_t page = next(&state) % pages;
		verify(&space, page);
		if (next(&state) & 1)
			fill(&space, page);
		if (shared->scribble && command && !strcmp(way, "scribble")) {
			command[1] = 0x80000000; // done
			command[3] = 1;          // busy
		}
		shared->done++;
	}
	if (!command || !shared->scribble)
		verify_all(&space);
	_exit(0);
}

// The agent of a process: another process in its memory. 0: it has none.
static int agent_of(int pid)
{
	int found = 0;
	DIR *all = opendir("/proc");
	for (struct dirent *entry; !found && all && (entry = readdir(all));) {
		char path[64], name[32] = "";
		int other = atoi(entry->d_name);
		snprintf(path, sizeof path, "/proc/%d/comm", other);
		FILE *comm = other ? fopen(path, "r") : NULL;
		if (comm && fgets(name, sizeof name, comm) && !strcmp(name, "uc-agent\n") &&
		    syscall(SYS_kcmp, pid, other, KCMP_VM, 0, 0) == 0)
			found = other;
		if (comm)
			fclose(comm);
	}
	if (all)
		closedir(all);
	return found;
}

static int put(const char *folder, const char *file, const char *what)
{
	char path[512];
	snprintf(path, sizeof path, "%s/%s", folder, file);
	int to = open(path, O_WRONLY);
	int good = to >= 0 && write(to, what, strlen(what)) == (ssize_t)strlen(what);
	if (to >= 0)
		close(to);
	return good;
}

static void bind(int tid, int cpu)
{
	cpu_set_t set;
	CPU_ZERO(&set);
	CPU_SET(cpu, &set);
	sched_setaffinity(tid, sizeof set, &set);
}

static int traced[64], traced_count;

static void trace_one(int tid)
{
	if (tid && traced_count < 64 && !ptrace(PTRACE_SEIZE, tid, 0, 0)) {
		ptrace(PTRACE_INTERRUPT, tid, 0, 0);
		waitpid(tid, NULL, __WALL);
		traced[traced_count++] = tid;
	}
}

// Stops all threads of a process, or lets them continue.
static void trace(int pid, int on)
{
	char path[64];
	snprintf(path, sizeof path, "/proc/%d/task", pid);
	DIR *tasks = on ? opendir(path) : NULL;
	for (struct dirent *task; tasks && (task = readdir(tasks));)
		trace_one(atoi(task->d_name));
	if (tasks)
		closedir(tasks);
	while (!on && traced_count)
		ptrace(PTRACE_DETACH, traced[--traced_count], 0, 0);
}

// Gives every thread of a process the lowest priority.
static void be_nice(int pid, int on)
{
	char path[64];
	snprintf(path, sizeof path, "/proc/%d/task", pid);
	DIR *tasks = opendir(path);
	for (struct dirent *task; tasks && (task = readdir(tasks));)
		if (atoi(task->d_name))
			setpriority(PRIO_PROCESS, atoi(task->d_name), on ? 19 : 0);
	if (tasks)
		closedir(tasks);
}

static int hog(int cpu)
{
	int pid = fork();
	if (pid)
		return pid;
	prctl(PR_SET_PDEATHSIG, SIGKILL);
	bind(0, cpu);
	for (;;)
		;
}

// Disturbs a process or an agent.
static void disturb_one(const char *way, int pid, int on)
{
	if (!strcmp(way, "stop"))
		kill(pid, on ? SIGSTOP : SIGCONT);
	else if (!strcmp(way, "freezer"))
		put(group, "freezer.state", on ? "FROZEN" : "THAWED");
	else if (!strcmp(way, "freeze"))
		put(group, "cgroup.freeze", on ? "1" : "0");
	else if (!strcmp(way, "quota"))
		put(group, "cpu.cfs_quota_us", on ? "1000" : "-1"), be_nice(pid, on);
	else if (!strcmp(way, "trace"))
		trace(pid, on);
	else if (!strcmp(way, "nice"))
		be_nice(pid, on);
	else if (lies)
		shared->scribble |= on;
}

// Disturbs a process, and its agent first: in the middle of a command, if it has one.
static void disturb(const char *way, int pid, int agent, int on)
{
	if (agent)
		disturb_one(way, agent, on);
	disturb_one(way, pid, on);
}

// Whether a process can run, and has had no processor since the last question. Linux 6.18 leaves a
// group without one for seconds after its quota is gone, also where no memory is managed.
static int starves(int pid, uint64_t *ran)
{
	char path[64], state = 0;
	uint64_t now = 0;
	snprintf(path, sizeof path, "/proc/%d/stat", pid);
	FILE *file = fopen(path, "r");
	if (file && fscanf(file, "%*d (%*[^)]) %c", &state) != 1)
		state = 0;
	if (file)
		fclose(file);
	snprintf(path, sizeof path, "/proc/%d/schedstat", pid);
	file = fopen(path, "r");
	if (file && fscanf(file, "%lu", &now) != 1)
		now = *ran + 1;
	if (file)
		fclose(file);
	int same = now == *ran;
	*ran = now;
	return state == 'R' && same;
}

// As starves(): the disturbed process, or its agent.
static int starve(int pid, int agent)
{
	static uint64_t ran[2];
	int one = starves(pid, &ran[0]), other = agent && starves(agent, &ran[1]);
	return one || other;
}

static int bucket(uint64_t ns)
{
	int high = 63 - __builtin_clzll(ns | 16);
	return (high - 4) * 16 + (ns >> (high - 4) & 15);
}

static double quantile(uint64_t *counts, double part)
{
	uint64_t all = 0, seen = 0;
	for (int at = 0; at < BUCKETS; at++)
		all += counts[at];
	for (int at = 0; at < BUCKETS; at++)
		if ((seen += counts[at]) >= all * part)
			return (double)((16ull + at % 16) << (at / 16)) / 1000;
	return 0;
}

static void remove_group(void)
{
	for (int tries = 0; group[0] && rmdir(group) && errno != ENOENT && tries < 100; tries++)
		usleep(10000);
}

int main(int count, char **arguments)
{
	if (count != 4)
		return 2;
	const char *way = arguments[1];
	pages = strtoul(arguments[2], NULL, 0) << 8;
	int rounds = atoi(arguments[3]), hogging[2] = {0};
	lies = !strcmp(way, "scribble") || !strcmp(way, "garbage");
	uint64_t state = 1234567, worst[2] = {0}, *counts[2];
	shared = map(PAGE, MAP_SHARED);
	counts[0] = map(BUCKETS * 8, MAP_SHARED), counts[1] = map(BUCKETS * 8, MAP_SHARED);
	int other = fork();
	if (!other)
		other_process(way);
	const char *parent = !strcmp(way, "freezer")  ? "/sys/fs/cgroup/freezer"
	                     : !strcmp(way, "quota")  ? "/sys/fs/cgroup/cpu"
	                     : !strcmp(way, "freeze") ? getenv("CGROUP2")
	                                              : NULL;
	if (parent) {
		char text[32];
		snprintf(group, sizeof group, "%s/undercroft-neighbours-%d", parent, getpid());
		snprintf(text, sizeof text, "%d", other);
		if (mkdir(group, 0755) || !put(group, "cgroup.procs", text)) {
			kill(other, SIGKILL), waitpid(other, NULL, 0), remove_group();
			return 77;
		}
	}
	for (int cpu = 0; cpu < 2 && !strcmp(way, "nice"); cpu++)
		hogging[cpu] = hog(cpu);
	struct space space = make("own");
	for (uint64_t page = 0; page < pages; page++)
		fill(&space, page);
	while (!shared->done)
		usleep(1000);
	int bad = 0, agent = agent_of(other);
	if (parent && agent) {
		char text[32];
		snprintf(text, sizeof text, "%d", agent);
		put(group, "cgroup.procs", text);
	}
	for (int round = 0; round < 2 * rounds && !bad; round++) {
		int on = lies ? round >= rounds : round & 1;
		uint64_t before = shared->done;
		disturb(way, other, agent, on);
		for (uint64_t began = now(), at = began; at < began + 40000000;) {
			uint64_t page = next(&state) % pages;
			uint64_t start = now();
			verify(&space, page);
			if (next(&state) & 1)
				fill(&space, page);
			at = now();
			counts[on][bucket(at - start)]++;
			worst[on] = at - start > worst[on] ? at - start : worst[on];
		}
		// The disturbed process must go on, though it may be late.
		int tries = 0;
		while (!on && !shared->scribble && shared->done == before && !(bad = tries == 5000)) {
			usleep(1000);
			tries += !starve(other, agent);
		}
	}
	disturb(way, other, agent, 0);
	verify_all(&space);
	shared->stop = 1;
	int status = 0;
	for (int tries = 0; waitpid(other, &status, WNOHANG) == 0;) {
		if (tries == (shared->scribble ? 200 : 20000))
			kill(other, SIGKILL), bad = 1;
		usleep(1000);
		tries += !starve(other, agent);
	}
	for (int cpu = 0; cpu < 2 && hogging[cpu]; cpu++)
		kill(hogging[cpu], SIGKILL), waitpid(hogging[cpu], NULL, 0);
	remove_group();
	printf("%.1f %.1f %.1f %.1f %.1f %.1f %lu\n", quantile(counts[0], 0.5), quantile(counts[0], 0.99), worst[0] / 1000.0,
	       quantile(counts[1], 0.5), quantile(counts[1], 0.99), worst[1] / 1000.0, shared->done);
	if (lies)
		return 0; // it hurt only itself
	if (bad)
		return 4;
	return WIFEXITED(status) ? WEXITSTATUS(status) : 5;
}
