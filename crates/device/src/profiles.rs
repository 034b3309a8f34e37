//! Every constant of every device, with its source. Nothing else in the tree holds one.
//!
//! Three kinds of source, and each note says which: *paper*, read in the text of one of the five
//! papers, with its section; *not checked*, from memory of another publication or a data sheet that
//! was not at hand when it was written down; *assumed*, no source. Vary the last two
//! (`pcm,read=..`) before believing a conclusion that depends on one.
//!
//! The five papers. **PCM** Park and Bahn, "Efficient Management of PCM-based Swap Systems with a
//! Small Page Size": the law (§III-1); no number of its devices is printed, T_access and T_transfer
//! are those of its reference 24 (Yoon et al., SAFARI 2013-002), which was not at hand; §I has PCM
//! reads take 2 to 5 times and writes 8 to 50 times as long as DRAM's, and 10^7 to 10^8 writes. No
//! energy is printed (§III-5). **RapidSwap** §4: Optane 905P 960 GB, Optane persistent memory 200,
//! 128 GB; §2.1: 10 us to read or write Optane; §1: DRAM 45 times the price of SSD (EC2, June
//! 2021). **NVSwap** §VI-A: PM883 240 GB, Barracuda 7200.12 1 TB, two Optane modules of 128 GB; §V:
//! 7,900 paging requests a second on the PM883, 215,000 into Optane. **FlexSwap** §6: D7-P5510 4 TB
//! behind PCIe 3; §6.1: at most 2.6 GB/s; a fault of Linux 6 us beside the device, 7.8 % of it all.
//! **HybridSwap** §3.1: a disk of 7200 turns with 4.17 ms for half a turn, 11 ms to seek, 150 MB/s;
//! table 5.1: 4 KB requests to two SSDs of 2010 and a disk; the slower SSD is modelled.
//!
//! Not checked: **Lee09** Lee, Ipek, Mutlu, Burger, "Architecting phase change memory as a scalable
//! DRAM alternative", ISCA 2009. **Izr19** Izraelevitz et al., "Basic performance measurements of
//! the Intel Optane DC persistent memory module", arXiv 1903.05714. **TPP** Maruf et al.,
//! ASPLOS 2023. **JEDEC** DDR4-2666: 21.3 GB/s a channel. Data sheets: Micron 1 Gb DDR3-1333, Intel
//! Optane 200, Optane 905P, D7-P5510, Samsung PM883, Seagate Barracuda 7200.12. Prices: round
//! street prices of 2021 in dollars, the year of RapidSwap's; only their ratios mean anything.

use crate::disk::Disk;
use crate::{Attach, Law};

/// Energy of one device.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Energy {
    /// Joules a byte read.
    pub read_j_per_byte: f64,
    /// Joules a byte written.
    pub write_j_per_byte: f64,
    /// Watts while a channel is busy, above idle; a disk's seek and a controller's work are in it.
    pub busy_watts: f64,
    /// Watts of the whole device doing nothing.
    pub idle_watts: f64,
}

/// A kind of device.
#[derive(Clone, Debug, PartialEq)]
pub struct Profile {
    /// The name the user knows it by.
    pub name: &'static str,
    /// A line for listings, with the source.
    pub about: &'static str,
    /// How it is attached.
    pub attach: Attach,
    /// Reads.
    pub read: Law,
    /// Writes.
    pub write: Law,
    /// Requests served at once.
    pub channels: u32,
    /// Bytes moved at least, and in multiples of.
    pub unit_bytes: u64,
    /// Head and platter, where there are any.
    pub disk: Option<Disk>,
    /// Factor on a read that starts while a write is under way; 1 = none.
    pub read_beside_write: f64,
    /// How often each byte may be written, with perfect levelling; `None`: no limit that matters.
    pub endurance_writes: Option<f64>,
    /// Energy.
    pub energy: Energy,
    /// Size of one device: what its idle power and price are spread over.
    pub capacity_bytes: u64,
    /// Dollars a GiB.
    pub dollars_per_gib: f64,
}

/// DRAM as main memory: what it costs to keep and to use.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct DramEnergy {
    /// Watts a GiB for refresh and standby.
    pub static_watts_per_gib: f64,
    /// Joules a byte read.
    pub read_j_per_byte: f64,
    /// Joules a byte written.
    pub write_j_per_byte: f64,
    /// Bytes moved by one memory reference: a cache line.
    pub line_bytes: u64,
}

/// Static: eight 1 Gb DDR3-1333 chips make a GiB; each draws 45 mA standby (IDD2N) and, for 110 of
/// each 7800 ns, 155 mA more for refresh (IDD5B), at 1.5 V (Micron data sheet): 0.57 W. Dynamic:
/// array plus row buffer, Lee09 table 2: read 1.17 + 0.93, write 0.39 + 1.02 pJ a bit. Neither
/// checked; the PCM paper prints no energy (§III-5).
pub const DRAM_ENERGY: DramEnergy = DramEnergy {
    static_watts_per_gib: 0.57,
    read_j_per_byte: 8.0 * 2.10e-12,
    write_j_per_byte: 8.0 * 1.41e-12,
    line_bytes: 64,
};

/// Dollars a GiB of DRAM: a round price of 2021, not checked.
pub const DRAM_DOLLARS_PER_GIB: f64 = 4.5;

/// Path of one fault through the kernel's swap code and block layer, ns. *Assumed*: the 4 us that
/// Linux takes for a fault from zram. FlexSwap §6.1 measures 6 us for it under KVM, the exit from
/// the guest included, and 22 us with user space in it.
pub const SOFTWARE_NS: f64 = 4_000.0;

/// Two context switches, away and back, with their cache misses, ns. *Assumed*: the usual 1 to 3 us
/// each way.
pub const CONTEXT_SWITCH_NS: f64 = 4_000.0;

/// Compressed pool: LZ4 one 4 KiB page, ns a byte, as `tier/benches/tier_cost.rs` measures on a
/// 2020s x86-64.
pub const COMPRESS_NS_PER_BYTE: f64 = 0.5;

/// Compressed pool: decompression, ns a byte.
pub const DECOMPRESS_NS_PER_BYTE: f64 = 0.2;

/// The profiles a user can name.
pub const NAMES: [&str; 10] = [
    "pcm",
    "optane-dimm",
    "optane-ssd",
    "nvme",
    "sata-ssd",
    "ssd-2010",
    "hdd-7200",
    "cxl-dram",
    "dram",
    "redis-lan",
];

const GIB: u64 = 1 << 30;
const GB: u64 = 1_000_000_000;

/// The profile of that name.
pub fn by_name(name: &str) -> Option<Profile> {
    Some(match name {
        "pcm" => pcm(),
        "optane-dimm" => optane_dimm(),
        "optane-ssd" => optane_ssd(),
        "nvme" => nvme(),
        "redis-lan" => redis_lan(),
        "sata-ssd" => sata_ssd(),
        "ssd-2010" => ssd_2010(),
        "hdd-7200" => hdd_7200(),
        "cxl-dram" => cxl_dram(),
        "dram" => dram(),
        _ => return None,
    })
}

/// Time: Lee09 (not checked): a 64-byte line takes 55 ns to read (tRCD) and 150 ns to write (tWR);
/// a page is moved line by line from one bank (the PCM paper leaves banks and bus open; more of
/// either shrinks T_transfer and with it the gain of small pages), after one more such access to
/// begin with. A write takes 2.7 reads; by PCM §I it would be 1.6 (8 over 5) to 25 (50 over 2), 4
/// to 10 if low goes with low, so ours is at the cheap end for writes. Energy: Lee09 table 2 (not
/// checked): array 2.47 and 16.82 pJ a bit, row buffer 0.93 and 1.02. Idle: no refresh; *assumed* a
/// tenth of DRAM's standby. Endurance: the lower of the 10^7 to 10^8 of PCM §I. Price: a quarter of
/// DRAM's, as four times the density suggests (Qureshi et al., ISCA 2009, not checked). Such memory
/// was never sold.
fn pcm() -> Profile {
    Profile {
        name: "pcm",
        about: "phase-change memory on the memory bus (Lee et al. 2009, PCM swap)",
        attach: Attach::Memory,
        read: Law {
            access_ns: 55.0,
            per_byte_ns: 55.0 / 64.0,
        },
        write: Law {
            access_ns: 150.0,
            per_byte_ns: 150.0 / 64.0,
        },
        channels: 1,
        unit_bytes: 64,
        disk: None,
        read_beside_write: 1.0,
        endurance_writes: Some(1e7),
        energy: Energy {
            read_j_per_byte: 8.0 * 3.40e-12,
            write_j_per_byte: 8.0 * 17.84e-12,
            busy_watts: 0.0,
            idle_watts: 0.057 * 16.0,
        },
        capacity_bytes: 16 * GIB,
        dollars_per_gib: DRAM_DOLLARS_PER_GIB / 4.0,
    }
}

/// Time: Izr19 (not checked): random load 305 ns, write to the persistence domain 94 ns, 6.6 and
/// 2.3 GB/s a module, 256-byte units. A page of 4 KB written takes 1.9 us, the module's share;
/// NVSwap §V copies 215,000 a second, 4.7 us each, kernel included. Capacity: NVSwap §VI-A,
/// RapidSwap §4. Energy: 15 W, the module's usual power limit, at full speed (not checked).
/// Endurance: 292 PB written for the 128 GB module of the 200 series (data sheet, not checked).
/// Idle power and price *assumed*.
fn optane_dimm() -> Profile {
    Profile {
        name: "optane-dimm",
        about: "one Intel Optane persistent memory module, 128 GB (Izraelevitz et al. 2019)",
        attach: Attach::Memory,
        read: Law {
            access_ns: 305.0,
            per_byte_ns: 1.0 / 6.6,
        },
        write: Law {
            access_ns: 94.0,
            per_byte_ns: 1.0 / 2.3,
        },
        channels: 1,
        unit_bytes: 256,
        disk: None,
        read_beside_write: 1.0,
        endurance_writes: Some(292e15 / 128e9),
        energy: Energy {
            read_j_per_byte: 15.0 / 6.6e9,
            write_j_per_byte: 15.0 / 2.3e9,
            busy_watts: 0.0,
            idle_watts: 3.0,
        },
        capacity_bytes: 128 * GB,
        dollars_per_gib: DRAM_DOLLARS_PER_GIB / 2.0,
    }
}

/// Time: 10 us either way (RapidSwap §2.1, which does not say of how many bytes; here 4 KB).
/// Capacity: RapidSwap §4. Data sheet, not checked: 575,000 reads a second, which need six at once;
/// 2.6 and 2.2 GB/s; power; 10 drive writes a day for 5 years. A read beside a write and the price
/// *assumed*.
fn optane_ssd() -> Profile {
    Profile {
        name: "optane-ssd",
        about: "Intel Optane 905P, 960 GB (data sheet, RapidSwap)",
        attach: Attach::Block,
        read: Law {
            access_ns: 8_400.0,
            per_byte_ns: 1.0 / 2.6,
        },
        write: Law {
            access_ns: 8_100.0,
            per_byte_ns: 1.0 / 2.2,
        },
        channels: 6,
        unit_bytes: 512,
        disk: None,
        read_beside_write: 1.1,
        endurance_writes: Some(10.0 * 365.0 * 5.0),
        energy: Energy {
            read_j_per_byte: 0.0,
            write_j_per_byte: 0.0,
            busy_watts: 10.0 / 6.0,
            idle_watts: 6.0,
        },
        capacity_bytes: 960 * GB,
        dollars_per_gib: 1.2,
    }
}

/// Time: data sheet, not checked: 82 us to read, 15 us to write at queue depth 1; 930,000 reads a
/// second, which need 76 at once; 190,000 writes: three. FlexSwap §6.1 agrees for reads: 6 us are
/// 7.8 % of a fault of Linux, so 71 us are left for the device, and 12 us more are 13 %, so 86. 2.6
/// GB/s: FlexSwap §6.1, its PCIe 3. A read is slower beside writes (NVSwap §II-A and Fig. 1 show it
/// on SATA; here *assumed* half more). Writes take a channel for 400 us so that the whole device
/// makes its 190,000 a second: the 15 us are those of its buffer, which a stream of evictions
/// fills. Endurance, not checked: 1 drive write a day for 5 years. Price: a 45th of DRAM's
/// (RapidSwap §1).
fn nvme() -> Profile {
    Profile {
        name: "nvme",
        about: "Intel D7-P5510, 3.84 TB (data sheet, FlexSwap)",
        attach: Attach::Block,
        read: Law {
            access_ns: 80_400.0,
            per_byte_ns: 1.0 / 2.6,
        },
        write: Law {
            access_ns: 398_000.0,
            per_byte_ns: 1.0 / 2.0,
        },
        channels: 76,
        unit_bytes: 4096,
        disk: None,
        read_beside_write: 1.5,
        endurance_writes: Some(365.0 * 5.0),
        energy: Energy {
            read_j_per_byte: 0.0,
            write_j_per_byte: 0.0,
            busy_watts: 13.0 / 76.0,
            idle_watts: 5.0,
        },
        capacity_bytes: 3840 * GB,
        dollars_per_gib: DRAM_DOLLARS_PER_GIB / 45.0,
    }
}

/// A model, not measured on such a network. GET of a page over loopback takes 15 us (p50,
/// measured). The tier's two thread switches take 50 us on a virtual machine (measured), and a
/// switched network of 10 Gbit/s takes 50 us (assumed). A write sends two copies. Price: two
/// copies, compressed to 40 %.
fn redis_lan() -> Profile {
    Profile {
        name: "redis-lan",
        about: "a Redis cluster in the same network (a model, assumed)",
        attach: Attach::Block,
        read: Law {
            access_ns: 115_000.0,
            per_byte_ns: 0.8,
        },
        write: Law {
            access_ns: 115_000.0,
            per_byte_ns: 1.6,
        },
        channels: 64,
        unit_bytes: 4096,
        disk: None,
        read_beside_write: 1.0,
        endurance_writes: None,
        energy: Energy {
            read_j_per_byte: 0.0,
            write_j_per_byte: 0.0,
            busy_watts: 0.0,
            idle_watts: 0.0,
        },
        capacity_bytes: 256 * GIB,
        dollars_per_gib: DRAM_DOLLARS_PER_GIB * 0.8,
    }
}

/// Capacity: NVSwap §VI-A. Time: data sheet, not checked: 550 and 320 MB/s, 98,000 random reads a
/// second at depth 32; a single read takes some 90 us, so 9 at once; 14,000 random writes a second,
/// 640 us of a channel each. NVSwap §V measures 7,900 random paging requests a second on it (the
/// mix is not stated), so these rates are the device at its best. A read beside a write takes twice
/// as long (*assumed*; NVSwap §II-A has reads wait for page-outs and gives latencies, not the law).
/// Endurance, not checked: 1.3 drive writes a day for 3 years. Price: RapidSwap §1.
fn sata_ssd() -> Profile {
    Profile {
        name: "sata-ssd",
        about: "Samsung PM883, 240 GB (data sheet, NVSwap)",
        attach: Attach::Block,
        read: Law {
            access_ns: 82_500.0,
            per_byte_ns: 1.0 / 0.55,
        },
        write: Law {
            access_ns: 627_000.0,
            per_byte_ns: 1.0 / 0.32,
        },
        channels: 9,
        unit_bytes: 4096,
        disk: None,
        read_beside_write: 2.0,
        endurance_writes: Some(1.3 * 365.0 * 3.0),
        energy: Energy {
            read_j_per_byte: 0.0,
            write_j_per_byte: 0.0,
            busy_watts: 2.3 / 9.0,
            idle_watts: 1.3,
        },
        capacity_bytes: 240 * GB,
        dollars_per_gib: DRAM_DOLLARS_PER_GIB / 45.0,
    }
}

/// HybridSwap table 5.1, OCZ Onyx: requests of 4 KB at 34 MB/s at random and 140 MB/s in sequence
/// read, 4 and 110 MB/s written. A page of a log is written in sequence, so a write has no access
/// time here: 37 us for 4 KB, where one at random takes 1 ms. One channel: *assumed*. Endurance and
/// power: *assumed*, those of the PM883.
fn ssd_2010() -> Profile {
    Profile {
        name: "ssd-2010",
        about: "OCZ Onyx, 32 GB (HybridSwap table 5.1)",
        read: Law {
            access_ns: 4096.0 / 0.034 - 4096.0 / 0.14,
            per_byte_ns: 1.0 / 0.14,
        },
        write: Law {
            access_ns: 0.0,
            per_byte_ns: 1.0 / 0.11,
        },
        channels: 1,
        capacity_bytes: 32 * GB,
        ..sata_ssd()
    }
}

/// Named in NVSwap §VI-A. Time: 7200 turns a minute (HybridSwap §3.1: half a turn 4.17 ms); data
/// sheet, not checked: 8.5 ms average read seek, 9.5 ms write, 1 ms to the next track, 125 MB/s
/// sustained (HybridSwap §3.1 has 11 ms and 150 MB/s for a disk of 500 GB). Power, not checked: 5 W
/// idle, 6.6 W seeking. The controller's own time is inside the average seek.
fn hdd_7200() -> Profile {
    let turn_ns = 60e9 / 7200.0;
    let bytes_per_second = 125e6;
    let law = Law {
        access_ns: 0.0,
        per_byte_ns: 1e9 / bytes_per_second,
    };
    Profile {
        name: "hdd-7200",
        about: "Seagate Barracuda 7200.12, 1 TB (data sheet, NVSwap)",
        attach: Attach::Block,
        read: law,
        write: law,
        channels: 1,
        unit_bytes: 512,
        disk: Some(Disk {
            capacity_bytes: 1000 * GB,
            track_bytes: (bytes_per_second * turn_ns / 1e9) as u64,
            turn_ns,
            settle_ns: 1e6,
            seek_read_ns: 8.5e6,
            seek_write_ns: 9.5e6,
        }),
        read_beside_write: 1.0,
        endurance_writes: None,
        energy: Energy {
            read_j_per_byte: 0.0,
            write_j_per_byte: 0.0,
            busy_watts: 1.6,
            idle_watts: 5.0,
        },
        capacity_bytes: 1000 * GB,
        dollars_per_gib: 0.025,
    }
}

/// Time, not checked: 200 ns, within the 170 to 250 ns of TPP §2; a PCIe 5.0 x8 link of 25 GB/s in
/// use. Energy: DRAM's, and *assumed* as much again for link and controller. Price: DRAM's.
fn cxl_dram() -> Profile {
    let law = Law {
        access_ns: 200.0,
        per_byte_ns: 1.0 / 25.0,
    };
    Profile {
        name: "cxl-dram",
        about: "DRAM behind a CXL link (Maruf et al. 2023)",
        attach: Attach::Memory,
        read: law,
        write: law,
        channels: 1,
        unit_bytes: 64,
        energy: Energy {
            read_j_per_byte: 2.0 * DRAM_ENERGY.read_j_per_byte,
            write_j_per_byte: 2.0 * DRAM_ENERGY.write_j_per_byte,
            busy_watts: 0.0,
            idle_watts: 2.0 * DRAM_ENERGY.static_watts_per_gib * 128.0,
        },
        capacity_bytes: 128 * GIB,
        ..dram()
    }
}

/// Time, not checked: Izr19: random load 101 ns; JEDEC 21.3 GB/s.
fn dram() -> Profile {
    let law = Law {
        access_ns: 101.0,
        per_byte_ns: 1.0 / 21.3,
    };
    Profile {
        name: "dram",
        about: "another bank of DRAM, as an upper bound (JEDEC DDR4-2666)",
        attach: Attach::Memory,
        read: law,
        write: law,
        channels: 1,
        unit_bytes: 64,
        disk: None,
        read_beside_write: 1.0,
        endurance_writes: None,
        energy: Energy {
            read_j_per_byte: DRAM_ENERGY.read_j_per_byte,
            write_j_per_byte: DRAM_ENERGY.write_j_per_byte,
            busy_watts: 0.0,
            idle_watts: DRAM_ENERGY.static_watts_per_gib * 16.0,
        },
        capacity_bytes: 16 * GIB,
        dollars_per_gib: DRAM_DOLLARS_PER_GIB,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_name_has_a_profile_that_makes_sense() {
        for name in NAMES {
            let profile = by_name(name).expect(name);
            assert_eq!(profile.name, name);
            assert!(profile.channels > 0 && profile.unit_bytes.is_power_of_two());
            assert!(profile.read.per_byte_ns > 0.0 && profile.write.per_byte_ns > 0.0);
            assert!(profile.dollars_per_gib <= DRAM_DOLLARS_PER_GIB);
            assert!(profile.read_beside_write >= 1.0);
        }
        assert_eq!(by_name("floppy"), None);
    }

    #[test]
    fn profiles_reach_the_data_sheets_rates() {
        // Requests a second at full depth: channels / time of 4 KiB.
        for (name, reads, writes) in [
            ("nvme", 930e3, 190e3),
            ("sata-ssd", 98e3, 14e3),
            ("optane-ssd", 575e3, 550e3),
        ] {
            let profile = by_name(name).expect(name);
            let rate = |law: Law| f64::from(profile.channels) / law.time(4096).seconds();
            assert!(
                (rate(profile.read) / reads - 1.0).abs() < 0.1,
                "{name} reads"
            );
            let writes_made = rate(profile.write);
            assert!(
                (writes_made / writes - 1.0).abs() < 0.12,
                "{name}: {writes_made}"
            );
        }
    }
}
