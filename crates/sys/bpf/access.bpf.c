// Walks the page tables of one process and copies their lowest level out, for `src/access/`. Reads
// only.
//
// One run (a `read` of the iterator) looks up to BLOCKS blocks of 2 MiB up, named by
// `control.block`. For each block the answer is in `control.state`, and for TABLE its 512 entries
// are in `tables`. The page tables change, and may be freed, under the walk.
// `bpf_probe_read_kernel` survives that, the address of every table is checked to be in memory
// (`phys_max`), every loop has a constant bound, and the answer is a hint. 4-level paging of
// x86-64. `./build` compiles it.

typedef unsigned int u32;
typedef unsigned long long u64;

#define SEC(name) __attribute__((section(name), used))

static void *(*const bpf_map_lookup_elem)(void *map, const void *key) = (void *)1;
static long (*const bpf_probe_read_kernel)(void *to, u32 size, const void *from) = (void *)113;

/* `struct bpf_iter__task`: what the kernel calls the program with. */
struct context {
	u64 meta;
	u64 task;
};

#define BLOCKS 128
#define CANDIDATES 32

enum state { ABSENT, TABLE, HUGE, HUGE_ACCESSED };

/* Shared with `src/access`. */
struct control {
	u64 phys_max;   /* first physical address behind the memory */
	u64 base;       /* where the kernel maps physical address 0 */
	u64 candidate;  /* 0, or calibrating: try CANDIDATES bases, this less 1 GiB below the top table and down */
	u64 found;      /* calibrating: a base under which the tables' own address translates to itself; `candidate` then names it */
	u64 done;       /* set when a thread with an address space was seen */
	u64 count;      /* blocks wanted */
	u64 task_mm;    /* where `mm` is in the kernel's `struct task_struct` */
	u64 mm_pgd;     /* where `pgd` is in its `struct mm_struct` */
	u64 block[BLOCKS];
	u64 state[BLOCKS];
};

struct table {
	u64 entry[512];
};

/* The maps: made by the loader, which knows them by these names. One `struct control`; BLOCKS `struct table`s. */
struct {
	u32 unused;
} control SEC(".maps"), tables SEC(".maps");

#define PRESENT 1ull
#define ACCESSED 0x20ull
#define LEAF 0x80ull
#define FRAME 0x000ffffffffff000ull
#define GIB (1ull << 30)

/* The entry of `va` in the table at kernel address `table`; 0 when there is none. */
static __attribute__((always_inline)) u64 entry(u64 table, u64 va, int shift)
{
	u64 e = 0;
	if (bpf_probe_read_kernel(&e, 8, (void *)(table + ((va >> shift) & 511) * 8)) || !(e & PRESENT))
		return 0;
	return e;
}

/* The same in the table that the entry `above` names, under `base`; 0 when that is not in memory. */
static __attribute__((always_inline)) u64 below(u64 above, u64 base, u64 phys_max, u64 va, int shift)
{
	u64 frame = above & FRAME;
	if (!above || frame >= phys_max)
		return 0;
	return entry(base + frame, va, shift);
}

/* Whether the kernel address `va` translates to itself if `base` is right. */
static __attribute__((always_inline)) int fits(u64 pgd, u64 base, u64 phys_max, u64 va)
{
	u64 e = entry(pgd, va, 39);
	e = below(e, base, phys_max, va, 30);
	if (e & LEAF)
		return base + (e & FRAME & ~(GIB - 1)) + (va & (GIB - 1)) == va;
	e = below(e, base, phys_max, va, 21);
	if (e & LEAF)
		return base + (e & FRAME & ~0x1fffffull) + (va & 0x1fffff) == va;
	e = below(e, base, phys_max, va, 12);
	return e && base + (e & FRAME) + (va & 0xfff) == va;
}

/* The word at kernel address `address`; 0 when it cannot be read. */
static __attribute__((always_inline)) u64 word(u64 address)
{
	u64 w = 0;
	if (bpf_probe_read_kernel(&w, 8, (void *)address))
		return 0;
	return w;
}

char LICENSE[] SEC("license") = "Dual MIT/GPL";

SEC("iter/task")
int walk(struct context *context)
{
	u32 zero = 0;
	struct control *c = bpf_map_lookup_elem(&control, &zero);
	/* The threads of a process come one after the other; the first that has not ended is enough. */
	if (!c || c->done)
		return 0;
	u64 task = word((u64)&context->task);
	if (!task)
		return 0;
	u64 mm = word(task + c->task_mm);
	if (!mm)
		return 0;
	u64 pgd = word(mm + c->mm_pgd);
	if (!pgd)
		return 0;
	u64 phys_max = c->phys_max;
	c->done = 1;
	if (c->candidate) {
#pragma clang loop unroll(disable)
		for (u32 i = 0; i < CANDIDATES; i++) {
			u64 base = (pgd & ~(GIB - 1)) - (c->candidate - 1 + i) * GIB;
			if (fits(pgd, base, phys_max, pgd)) {
				c->found = base;
				c->candidate += i;
				break;
			}
		}
		return 0;
	}
	u64 base = c->base;
#pragma clang loop unroll(disable)
	for (u32 i = 0; i < BLOCKS; i++) {
		if (i >= c->count)
			break;
		u64 va = c->block[i];
		u64 state = ABSENT;
		u64 e = entry(pgd, va, 39);
		e = below(e, base, phys_max, va, 30);
		if (!(e & LEAF))
			e = below(e, base, phys_max, va, 21);
		if (e & LEAF) {
			state = e & ACCESSED ? HUGE_ACCESSED : HUGE;
		} else if (e && (e & FRAME) < phys_max) {
			struct table *t = bpf_map_lookup_elem(&tables, &i);
			if (t && !bpf_probe_read_kernel(t, sizeof(*t), (void *)(base + (e & FRAME))))
				state = TABLE;
		}
		c->state[i] = state;
	}
	return 0;
}
