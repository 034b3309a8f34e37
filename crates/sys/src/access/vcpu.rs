//! The registers of a guest's virtual CPU under KVM, while its thread waits in a page fault: which
//! instruction of the guest faults, and by which page tables. A BPF program reads them in the
//! kernel's structure of the virtual CPU (`bpf/vcpu.bpf.c`). The guest has no part in it.
//!
//! Limits: kernels whose own types, or those of their module `kvm`, say where things are; CAP_BPF
//! and CAP_PERFMON. On Intel the CPU keeps some registers to itself until KVM asks for them: those
//! are not known. Cost of a look: some microseconds, more with many descriptors
//! (`docs/design/0058-addresses-of-guests.md`).

use std::sync::atomic::Ordering;

use super::{AccessError, bpf, btf, object};
use crate::mapping::SharedMemory;

static OBJECT: &[u8] = include_bytes!("../../bpf/vcpu.bpf.o");

/// Words of `struct registers` of bpf/vcpu.bpf.c.
const WORDS: usize = 6;

// Bits of the registers that KVM has (`enum kvm_reg`).
const HAS_IP: u64 = 1 << 16;
const HAS_CR3: u64 = 1 << 19;

// Of CR4: five levels of page tables. Of EFER: long mode.
const FIVE_LEVELS: u64 = 1 << 12;
const LONG_MODE: u64 = 1 << 10;

/// Registers of a virtual CPU. 0: it is not known.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Registers {
    /// The address of the instruction, in the guest.
    pub ip: u64,
    /// The address of the top page table in the guest's memory. Known only of a guest that has four
    /// levels of them.
    pub cr3: u64,
}

impl Registers {
    /// Of the words of the program. `None`: it has found no virtual CPU.
    fn of([is_found, ip, cr3, cr4, efer, available]: [u64; WORDS]) -> Option<Registers> {
        let has = |bit| available & bit != 0;
        let walks = efer & LONG_MODE != 0 && cr4 & FIVE_LEVELS == 0;
        (is_found == 1).then(|| Registers {
            ip: if has(HAS_IP) { ip } else { 0 },
            cr3: if has(HAS_CR3) && walks { cr3 } else { 0 },
        })
    }
}

/// The loaded program.
#[derive(Debug)]
pub struct VirtualCpus {
    program: bpf::Program,
    _offsets: SharedMemory,
}

/// A thread whose registers may be looked at.
pub struct Thread(bpf::Link);

impl VirtualCpus {
    /// Loads the program. Cost: as of [`super::AccessScanner::open`].
    pub fn open() -> Result<VirtualCpus, AccessError> {
        let types = btf::Types::read().map_err(AccessError::NoTypes)?;
        let module = btf::Types::of_module("kvm");
        let unknown = AccessError::UnknownKernel;
        let target = types.function("bpf_iter_task_file");
        let target = target.ok_or(unknown("bpf_iter_task_file"))?;
        let member = |structure: &'static str, name: &str| {
            let own = types.member(structure, name);
            let found = own.or_else(|| module.as_ref()?.member_with(&types, structure, name));
            found.ok_or(unknown(structure))
        };
        let arch = member("kvm_vcpu", "arch")?;
        let offsets = [
            member("file", "private_data")?,
            member("file", "f_path")? + member("path", "dentry")?,
            member("dentry", "d_name")? + member("qstr", "name")?,
            member("dentry", "d_sb")?,
            member("super_block", "s_magic")?,
            member("task_struct", "thread_pid")?,
            member("kvm_vcpu", "pid")?,
            arch + member("kvm_vcpu_arch", "regs")?,
            arch + member("kvm_vcpu_arch", "cr3")?,
            arch + member("kvm_vcpu_arch", "cr4")?,
            arch + member("kvm_vcpu_arch", "efer")?,
            arch + member("kvm_vcpu_arch", "regs_avail")?,
        ];
        drop((types, module));
        let map = bpf::array(c"uc_offsets", size_of_val(&offsets) * 2, 1)?;
        for (word, offset) in map.words().iter().zip(offsets) {
            word.store(offset.into(), Ordering::Relaxed);
        }
        let code = object::link(OBJECT, "iter/task_file", &[("offsets", &map)])
            .ok_or_else(|| unknown("the program this was built with"))?;
        let program = bpf::Program::load_iterator(&code, target)?;
        Ok(VirtualCpus {
            program,
            _offsets: map,
        })
    }

    /// A thread, which may run a virtual CPU.
    pub fn thread(&self, id: u32) -> Result<Thread, AccessError> {
        self.program.on_thread(id).map(Thread)
    }
}

impl Thread {
    /// The registers of the virtual CPU that it ran last. `None`: it runs none. They are those of
    /// an instruction only while it waits in a fault.
    pub fn registers(&self) -> Result<Option<Registers>, AccessError> {
        let mut record = [0u8; WORDS * 8];
        if !self.0.read_record(&mut record)? {
            return Ok(None);
        }
        let (words, _) = record.as_chunks::<8>();
        let word = |at: usize| u64::from_ne_bytes(words[at]);
        Ok(Registers::of(std::array::from_fn(word)))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn registers_that_kvm_has_not_and_tables_of_another_form_are_not_known() {
        let all = [1, 0x40_1000, 0x9000, 0x620, 0x500, u64::MAX];
        let of = |at: usize, word| {
            let mut words = all;
            words[at] = word;
            Registers::of(words).map(|found| [found.ip, found.cr3])
        };
        assert_eq!(of(0, 1), Some([0x40_1000, 0x9000]));
        assert_eq!(of(0, 0), None);
        assert_eq!(of(3, 0x620 | 1 << 12), Some([0x40_1000, 0]), "five levels");
        assert_eq!(of(4, 0x100), Some([0x40_1000, 0]), "no long mode");
        assert_eq!(of(5, 1 << 16), Some([0x40_1000, 0]));
        assert_eq!(of(5, 1 << 19), Some([0, 0x9000]));
    }
}
