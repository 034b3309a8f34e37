// Guard pages of a program, told by the signal that a touch raises.
#include <setjmp.h>
#include <signal.h>
#include <stddef.h>

enum { GUARD_INSTALL = 102, GUARD_REMOVE = 103 }; // MADV_GUARD_INSTALL and _REMOVE

static sigjmp_buf jump;

static void on_fault(int number)
{
	(void)number;
	siglongjmp(jump, 1);
}

static void watch_guards(void)
{
	sigaction(SIGSEGV, &(struct sigaction){ .sa_handler = on_fault, .sa_flags = SA_NODEFER }, NULL);
}

// True if a write to the page fails.
static int is_guarded(volatile char *page)
{
	if (sigsetjmp(jump, 1))
		return 1;
	*page = 1;
	return 0;
}
