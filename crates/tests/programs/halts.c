// halts: its only thread ends by the system call `exit`, as in programs without a C library. So its
// status is 7.
#include <sys/syscall.h>
#include <unistd.h>

int main(void) { syscall(SYS_exit, 7); }
