// What a fork child of asfuzz may become before it goes on: without descriptors, filtered, another
// user; or it ends by an exec of another thread, or before a process that shares its memory. Also
// the child that shares the memory: vfork.
#ifndef ASFUZZ_CHILD_H
#define ASFUZZ_CHILD_H

#include "asfuzz_layout.h"
#include "asfuzz_ops.h"
#include "asfuzz_side.h"
#include <linux/filter.h>
#include <linux/seccomp.h>
#include <pthread.h>
#include <stddef.h>
#include <sys/prctl.h>
#include <sys/wait.h>

enum child_kind { PLAIN, CLOSEFROM, FILTERED, OTHER_USER, EXEC_BY_THREAD, OUTLIVED, CHILD_KINDS };
static const char *const child_kinds[] = { "plain", "closefrom", "seccomp", "setuid", "exec_by_thread", "outlived" };

static void close_everything(struct world *w)
{
	if (syscall(SYS_close_range, 3u, ~0u, 0u))
		broken(w, "close_range");
}

// Installs a filter that refuses one call, which is never made, and lets every other through.
static void filter_calls(struct world *w)
{
	struct sock_filter code[] = {
		BPF_STMT(BPF_LD | BPF_W | BPF_ABS, offsetof(struct seccomp_data, nr)),
		BPF_JUMP(BPF_JMP | BPF_JEQ | BPF_K, SYS_swapon, 0, 1),
		BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_KILL_PROCESS),
		BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_ALLOW),
	};
	struct sock_fprog program = { sizeof code / sizeof *code, code };
	if (prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) || prctl(PR_SET_SECCOMP, SECCOMP_MODE_FILTER, &program))
		broken(w, "seccomp");
}

static void become_other_user(struct world *w)
{
	if (getuid() != 0)
		return;
	if (setgid(65534) || setuid(65534))
		broken(w, "setuid");
	prctl(PR_SET_PDEATHSIG, SIGKILL); // the change of user has cleared it
}

static void become(struct world *w, enum child_kind kind)
{
	switch (kind) {
	case CLOSEFROM: close_everything(w); break;
	case FILTERED: filter_calls(w); break;
	case OTHER_USER: become_other_user(w); break;
	default: break;
	}
}

static void *exec_true(void *world)
{
	execl("/bin/true", "true", (char *)NULL);
	broken((struct world *)world, "execl of /bin/true");
}

// The whole process is replaced while its first thread waits.
static void end_by_exec_of_a_thread(struct world *w)
{
	pthread_t thread;
	if (pthread_create(&thread, NULL, exec_true, w))
		broken(w, "pthread_create in a fork child");
	pthread_join(thread, NULL);
	broken(w, "the process outlived its exec");
}

// Shares the memory of a process that ends, and verifies it from then on. A page that was on its
// way out may be lost: SIGBUS.
static int verify_as_heir(void *world)
{
	struct world *w = world;
	while (getppid() == w->leader)
		usleep(100);
	outlives = 1;
	for (u32 round = 0; round < 40; round++) {
		for (uintptr_t page = low_start; page < LOW_END; page += LOW_PAGE)
			if (low_is_mapped(page) && !faults((u8 *)page, 0) && low_wrong_word(page) < LOW_WORDS)
				low_is_wrong("the lowest pages, after the end of the process", page);
		for (u32 i = 0; i < 16; i++) {
			struct span s = pick(w, 1, WANT_READ);
			if (s.count && !faults(address_of(w, s.start), 0))
				verify_page(w, "after the end of the process", s.start);
			else if (s.count)
				__atomic_add_fetch(&side->sharers_lost, 1, __ATOMIC_RELAXED);
		}
		usleep(5000);
	}
	__atomic_add_fetch(&side->sharers_done, 1, __ATOMIC_RELAXED);
	_exit(0);
}

// The process ends at once, while pages of it may be on their way out.
static void end_before_a_sharer(struct world *w)
{
	static u8 stack[256 << 10] __attribute__((aligned(16)));
	w->leader = getpid();
	__atomic_add_fetch(&side->outlived, 1, __ATOMIC_RELAXED);
	if (clone(verify_as_heir, stack + sizeof stack, CLONE_VM | SIGCHLD, w) < 0)
		broken(w, "clone");
	_exit(0);
}

// In the process that the orphans come to: waits for the sharers that outlived a process.
static void await_heirs(struct world *w)
{
	for (u32 tries = 0; __atomic_load_n(&side->sharers_done, __ATOMIC_RELAXED) < side->outlived; tries++) {
		int status = 0;
		pid_t pid = waitpid(-1, &status, WNOHANG);
		if (pid > 0 && WIFEXITED(status) && WEXITSTATUS(status) == EXIT_MISMATCH)
			_exit(EXIT_MISMATCH); // the check has printed why
		if ((pid > 0 && (WIFSIGNALED(status) || WEXITSTATUS(status) == EXIT_BROKEN)) || tries > 30000)
			broken(w, "a sharer of memory ended with status %x", status);
		if (pid <= 0)
			usleep(1000);
	}
}

struct sharing {
	struct world *w;
	struct span s;
	u64 version;
};

// In a child that shares the memory, and the thread-local storage of its parent. It writes pages,
// and nothing else.
static int write_as_sharer(void *argument)
{
	const struct sharing *sharing = argument;
	for (u32 i = 0; i < sharing->s.count; i++)
		write_blocks(sharing->w, sharing->s.start + i, 0, BLOCKS, sharing->version);
	return 0;
}

// A child that shares the memory writes pages of this worker, which waits for it: by vfork, or by a
// clone whose parent runs on meanwhile.
static void op_vfork(struct world *w)
{
	static __thread u8 stack[64 << 10] __attribute__((aligned(16)));
	struct span s = pick(w, 8, WANT_WRITE);
	if (!s.count)
		return;
	u64 version = new_version(w);
	int clones = below(w, 2);
	struct sharing sharing = { w, s, version };
	remember(w, clones ? "write by a CLONE_VM child" : "write by a vfork child", s.start, s.count, 0);
	pid_t pid = clones ? clone(write_as_sharer, stack + sizeof stack, CLONE_VM | SIGCHLD, &sharing) : vfork();
	if (pid == 0) {
		write_as_sharer(&sharing);
		_exit(0);
	}
	if (pid < 0)
		broken(w, clones ? "clone" : "vfork");
	int status;
	while (waitpid(pid, &status, 0) < 0)
		if (errno != EINTR)
			broken(w, "waitpid of a child that shares the memory");
	if (status)
		broken(w, "a child that shares the memory ended with status %x", status);
	verify_span(w, "after a child that shares the memory", s);
	__atomic_add_fetch(clones ? &side->clones : &side->vforks, 1, __ATOMIC_RELAXED);
}
#endif
