// Reads the registers of the virtual CPU that a thread runs, for `src/access/vcpu.rs`. Reads only.
//
// One run goes through the descriptors of a thread's process. That of the virtual CPU which the thread ran last is a
// file of the kernel's own, made by KVM: of no other file the memory behind it is taken for a virtual CPU. The thread
// waits in a page fault of the guest, so the registers are those of the guest's instruction. `./build` compiles it.

typedef unsigned int u32;
typedef unsigned long long u64;

#define SEC(name) __attribute__((section(name), used))

static void *(*const bpf_map_lookup_elem)(void *map, const void *key) = (void *)1;
static long (*const bpf_probe_read_kernel)(void *to, u32 size, const void *from) = (void *)113;
static long (*const bpf_seq_write)(void *seq, const void *bytes, u32 size) = (void *)127;

/* `struct bpf_iter_meta` and `struct bpf_iter__task_file`: what the kernel calls the program with. */
struct meta {
	void *seq;
	u64 session;
	u64 number; /* of this file among those of the run */
};

struct context {
	struct meta *meta;
	u64 task;
	u64 fd;
	u64 file;
};

/* A process may have a million files, and its thread waits. */
#define FILES_MAX 4096

/* `ANON_INODE_FS_MAGIC`, and the beginning of the name that KVM gives. */
#define ANONYMOUS 0x09041934
#define NAME 0x757063762d6d766bull /* "kvm-vcpu" */

/* Where things are in this kernel's structures. Shared with `src/access/vcpu.rs`. */
struct offsets {
	u64 file_private;
	u64 file_dentry;
	u64 dentry_name;
	u64 dentry_super;
	u64 super_magic;
	u64 task_pid;
	u64 vcpu_pid;
	u64 regs;
	u64 cr3;
	u64 cr4;
	u64 efer;
	u64 available;
};

/* The record that a run writes, if any. */
struct registers {
	u64 is_found;
	u64 ip;
	u64 cr3;
	u64 cr4;
	u64 efer;
	u64 available; /* a bit for each register that the kernel has now; others are still in the CPU */
};

/* The map: made by the loader, which knows it by this name. */
struct {
	u32 unused;
} offsets SEC(".maps");

/* The word at kernel address `address`; 0 when it cannot be read. */
static __attribute__((always_inline)) u64 word(u64 address)
{
	u64 w = 0;
	if (bpf_probe_read_kernel(&w, 8, (void *)address))
		return 0;
	return w;
}

char LICENSE[] SEC("license") = "Dual MIT/GPL";

SEC("iter/task_file")
int look(struct context *context)
{
	u32 zero = 0;
	struct registers found = {};
	struct offsets *o = bpf_map_lookup_elem(&offsets, &zero);
	u64 file = word((u64)&context->file);
	u64 task = word((u64)&context->task);
	struct meta *meta = context->meta;
	if (!o || !file || !task)
		return 0;
	if (meta->number > FILES_MAX) {
		bpf_seq_write(meta->seq, &found, sizeof(found)); /* ends the run */
		return 0;
	}
	u64 dentry = word(file + o->file_dentry);
	if (word(word(dentry + o->dentry_name)) != NAME)
		return 0;
	if (word(word(dentry + o->dentry_super) + o->super_magic) != ANONYMOUS)
		return 0;
	u64 vcpu = word(file + o->file_private);
	if (!vcpu || word(vcpu + o->vcpu_pid) != word(task + o->task_pid))
		return 0;
	found.is_found = 1;
	found.ip = word(vcpu + o->regs + 16 * 8);
	found.cr3 = word(vcpu + o->cr3);
	found.cr4 = word(vcpu + o->cr4);
	found.efer = word(vcpu + o->efer);
	found.available = word(vcpu + o->available);
	bpf_seq_write(meta->seq, &found, sizeof(found));
	return 0;
}
