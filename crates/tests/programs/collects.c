// Keeps a tree under Boehm's collector in its incremental mode, which write-protects memory to learn
// of writes. Two threads make trees and drop them; the main thread changes nodes of the one that
// stays, and has the kernel write into objects. Prints sums; status 86: a byte is wrong.
#define GC_THREADS
#include <fcntl.h>
#include <gc.h>
#include <pthread.h>
#include <stdio.h>
#include <string.h>
#include <unistd.h>

enum { DEPTH = 18, SMALL = 12, TREES = 8, BYTES = 180, WRONG = 86 };

struct node {
	struct node *child[2];
	unsigned value;
	unsigned char bytes[BYTES];
};

static struct node *tree(int depth, unsigned value)
{
	struct node *node = GC_MALLOC(sizeof *node);
	node->value = value;
	memset(node->bytes, (int)(value % 251), BYTES);
	for (unsigned side = 0; depth && side < 2; side++)
		node->child[side] = tree(depth - 1, 2 * value + 1 + side);
	return node;
}

// The sum of all values; ends the program if a byte is not that of its node's value.
static unsigned sum(const struct node *node)
{
	if (!node)
		return 0;
	for (int i = 0; i < BYTES; i++)
		if (node->bytes[i] != node->value % 251)
			_exit(WRONG);
	return node->value + sum(node->child[0]) + sum(node->child[1]);
}

static void *make_and_drop(void *result)
{
	for (unsigned n = 0; n < TREES; n++)
		*(unsigned *)result += sum(tree(SMALL, n));
	return NULL;
}

// The node at a path of bits from the root.
static struct node *at(struct node *root, unsigned path)
{
	for (int depth = 0; depth < DEPTH; depth++, path >>= 1)
		root = root->child[path & 1];
	return root;
}

int main(void)
{
	unsigned made[2] = {0, 0};
	pthread_t threads[2];
	GC_INIT();
	GC_allow_register_threads();
	GC_enable_incremental();
	struct node *kept = tree(DEPTH, 0);
	printf("%u\n", sum(kept));
	for (int i = 0; i < 2; i++)
		if (pthread_create(&threads[i], NULL, make_and_drop, &made[i]))
			return 2;
	int zero = open("/dev/zero", O_RDONLY);
	for (unsigned n = 0; n < 20000; n++) {
		struct node *node = at(kept, n * 2654435761u);
		node->value += n;
		memset(node->bytes, (int)(node->value % 251), BYTES);
		if (n % 500)
			continue;
		// The collector's stand-in for read() opens protected memory for the kernel.
		unsigned char *into = GC_MALLOC_ATOMIC(100000);
		memset(into, 1, 100000);
		if (read(zero, into, 100000) != 100000 || into[0] || into[99999])
			return WRONG;
	}
	close(zero);
	for (int i = 0; i < 2; i++)
		pthread_join(threads[i], NULL);
	GC_gcollect();
	printf("%u %u %u\n", sum(kept), made[0], made[1]);
	return 0;
}
