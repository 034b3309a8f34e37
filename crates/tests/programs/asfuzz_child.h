// What a fork child of asfuzz may become before it goes on: without descriptors, filtered, another
// user; or it ends by an exec of another thread. Also the child that shares the memory: vfork.
#ifndef ASFUZZ_CHILD_H
#define ASFUZZ_CHILD_H

#include "asfuzz_ops.h"
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

// A child that shares the memory reads and writes pages of this worker, which waits for it.
static void op_vfork(struct world *w)
{
	struct span s = pick(w, 8, WANT_WRITE);
	if (!s.count)
		return;
	u64 version = new_version(w);
	remember(w, "write by a vfork child", s.start, s.count, 0);
	pid_t pid = vfork();
	if (pid == 0) {
		for (u32 i = 0; i < s.count; i++)
			write_blocks(w, s.start + i, 0, BLOCKS, version);
		_exit(0);
	}
	if (pid < 0)
		broken(w, "vfork");
	int status;
	while (waitpid(pid, &status, 0) < 0)
		if (errno != EINTR)
			broken(w, "waitpid of a vfork child");
	if (status)
		broken(w, "a vfork child ended with status %x", status);
	verify_span(w, "after a vfork child", s);
}
#endif
