// What a fork child of asfuzz may become before it goes on: without descriptors, filtered, another
// user; or it ends by an exec of another thread. Also the child that shares the memory: vfork.
#ifndef ASFUZZ_CHILD_H
#define ASFUZZ_CHILD_H

#include "asfuzz_ops.h"
#include "asfuzz_side.h"
#include <linux/filter.h>
#include <linux/seccomp.h>
#include <pthread.h>
#include <stddef.h>
#include <sys/prctl.h>
#include <sys/wait.h>

enum child_kind { PLAIN, CLOSEFROM, FILTERED, OTHER_USER, EXEC_BY_THREAD, CHILD_KINDS };
static const char *const child_kinds[] = { "plain", "closefrom", "seccomp", "setuid", "exec_by_thread" };

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
