// Has the kernel pin memory for AF_XDP after pages of it have left, for tests.
//
//   umem MIB PRESSURE_MIB
//
// Prints "right"; status 86: a byte is wrong; 77: there is no AF_XDP here; 3: it was refused.
#include <linux/if_xdp.h>
#include <string.h>
#include <sys/socket.h>

#include "pages.h"

int main(int argc, char **argv)
{
	if (argc < 3)
		return 2;
	int socket_of = socket(44, SOCK_RAW, 0); // AF_XDP
	if (socket_of < 0)
		return 77;
	uint64_t mib = strtoull(argv[1], NULL, 10), *umem;
	random_data = 1;
	uint32_t *version = filled_pages(mib);
	umem = (uint64_t *)memory;
	uint64_t umem_pages = pages;
	uint32_t *pressed = filled_pages(strtoull(argv[2], NULL, 10));
	struct xdp_umem_reg area = {.addr = (uint64_t)umem, .len = mib << 20, .chunk_size = PAGE};
	if (!version || !pressed || setsockopt(socket_of, 283, XDP_UMEM_REG, &area, sizeof area)) {
		perror("XDP_UMEM_REG");
		return 3;
	}
	for (uint64_t page = 0; page < pages; page++)
		check(page, pressed[page]);
	memory = umem;
	for (uint64_t page = 0; page < umem_pages; page++)
		check(page, version[page]);
	puts("right");
	return 0;
}
