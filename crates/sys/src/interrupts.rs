//! On which CPU a disk's interrupts arrive, from sysfs.

use std::fs;
use std::os::fd::AsFd;
use std::path::{Path, PathBuf};

/// The only CPU that gets completions of the device under `file`: a block device, or the one that
/// its file system is on.
///
/// `None`: the device has a queue for each CPU, or several, or does not say (a stacked or network
/// device). A thread on that CPU waits for a read without a second CPU being woken (figures:
/// docs/design/0002). Cost: a dozen small files read.
pub fn completion_cpu(file: impl AsFd) -> Option<usize> {
    let stat = rustix::fs::fstat(file).ok()?;
    let number = match stat.st_mode & libc::S_IFMT {
        libc::S_IFBLK => stat.st_rdev,
        _ => stat.st_dev,
    };
    let (major, minor) = (rustix::fs::major(number), rustix::fs::minor(number));
    let node = fs::canonicalize(format!("/sys/dev/block/{major}:{minor}")).ok()?;
    disk_cpu(&node, Path::new("/"))
}

/// As `completion_cpu`, for the disk or partition at `node`; `root` holds `proc` and `sys`.
fn disk_cpu(node: &Path, root: &Path) -> Option<usize> {
    let disk = if node.join("partition").exists() {
        node.parent()?
    } else {
        node
    };
    if fs::read_dir(disk.join("mq")).ok()?.count() != 1 {
        return None;
    }
    let device = fs::canonicalize(disk.join("device")).ok()?;
    let vectors = [device.join("msi_irqs"), device.parent()?.join("msi_irqs")];
    let busiest = vectors
        .iter()
        .filter_map(|directory| fs::read_dir(directory).ok())
        .flatten()
        .filter_map(|entry| entry.ok()?.file_name().to_str()?.parse::<u32>().ok())
        .max_by_key(|irq| interrupts(root, *irq))?;
    let path: PathBuf = root.join(format!("proc/irq/{busiest}/effective_affinity_list"));
    // A list of several CPUs does not parse.
    fs::read_to_string(path).ok()?.trim().parse().ok()
}

/// How often the interrupt has arrived, on all CPUs.
fn interrupts(root: &Path, irq: u32) -> u64 {
    let path = root.join(format!("sys/kernel/irq/{irq}/per_cpu_count"));
    let text = fs::read_to_string(path).unwrap_or_default();
    text.trim()
        .split(',')
        .filter_map(|count| count.parse::<u64>().ok())
        .sum()
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A disk with `queues` queues and interrupts 35 (rare) and 36 (busy, on CPU 1), and a
    /// partition of it.
    fn tree(root: &Path, queues: usize) -> PathBuf {
        let device = root.join("sys/devices/pci0/virtio1");
        let disk = device.join("block/vda");
        for queue in 0..queues {
            fs::create_dir_all(disk.join(format!("mq/{queue}"))).unwrap();
        }
        fs::create_dir_all(disk.join("vda1")).unwrap();
        fs::write(disk.join("vda1/partition"), "1\n").unwrap();
        std::os::unix::fs::symlink(&device, disk.join("device")).unwrap();
        for (irq, counts, cpu) in [(35, "1,0\n", "0\n"), (36, "7,900\n", "1\n")] {
            let vectors = root.join("sys/devices/pci0/msi_irqs");
            fs::create_dir_all(&vectors).unwrap();
            fs::write(vectors.join(irq.to_string()), "msix\n").unwrap();
            let kernel = root.join(format!("sys/kernel/irq/{irq}"));
            fs::create_dir_all(&kernel).unwrap();
            fs::write(kernel.join("per_cpu_count"), counts).unwrap();
            let proc = root.join(format!("proc/irq/{irq}"));
            fs::create_dir_all(&proc).unwrap();
            fs::write(proc.join("effective_affinity_list"), cpu).unwrap();
        }
        disk
    }

    #[test]
    fn one_queue_names_the_cpu_of_the_busy_interrupt() {
        let root = tempfile::tempdir().unwrap();
        let disk = tree(root.path(), 1);
        assert_eq!(disk_cpu(&disk, root.path()), Some(1));
        assert_eq!(disk_cpu(&disk.join("vda1"), root.path()), Some(1));
    }

    #[test]
    fn several_queues_or_several_cpus_name_none() {
        let root = tempfile::tempdir().unwrap();
        assert_eq!(disk_cpu(&tree(root.path(), 2), root.path()), None);
        let root = tempfile::tempdir().unwrap();
        let disk = tree(root.path(), 1);
        fs::write(
            root.path().join("proc/irq/36/effective_affinity_list"),
            "0-1\n",
        )
        .unwrap();
        assert_eq!(disk_cpu(&disk, root.path()), None);
    }

    #[test]
    fn a_file_in_memory_has_no_disk() {
        let memory = rustix::fs::memfd_create("none", rustix::fs::MemfdFlags::CLOEXEC).unwrap();
        assert_eq!(completion_cpu(memory), None);
    }
}
