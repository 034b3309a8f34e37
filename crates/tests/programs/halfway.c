// A binary that says what undercroft can continue, and cannot do it: for `undercroft upgrade`.
//
//   halfway versions   as undercroft, which is the process that started it
//   halfway ...        ends with status 3
#include <stdio.h>
#include <string.h>
#include <unistd.h>

int main(int count, char **words)
{
	char parent[64];
	if (count != 2 || strcmp(words[1], "versions"))
		return 3;
	snprintf(parent, sizeof parent, "/proc/%d/exe", getppid());
	execl(parent, "undercroft", "versions", (char *)0);
	return 4;
}
