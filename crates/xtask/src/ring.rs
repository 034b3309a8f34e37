//! Two rings of live tests. A change runs the first, `cargo xtask test --all` both.
//!
//! The second ring has what is judged by time or by luck, and what takes long. Random runs of the
//! address space and long programs take turns: a change runs a few of them, the next one others.
//! Some tests do more rounds in the second ring, or have more memory: they ask `rounds`
//! (`crates/tests/src/lib.rs`).

/// Set to 1 where both rings run, and read by `rounds`.
pub(crate) const ALL: &str = "UNDERCROFT_TEST_ALL";

/// Names begin so, below `crates/tests/tests/live`: live against simulated, bounds of time,
/// decisions of policies, a build and a system of their own, minutes of a random program.
const SECOND: [&str; 44] = [
    "access_bits::a_hot_set_stays_in_memory",
    "access_bits::by_default_a_run_scans",
    "access_bits::by_default_idle_programs",
    "cloud_hypervisor::a_hostile_cloud_hypervisor",
    "cloud_hypervisor::machines_that_are_restored_keep",
    "flexswap::a_working_set_comes_back",
    "flexswap::sys_r_as_a_file",
    "flexswap::what_a_past_phase_used",
    "flexswap::what_is_cold_leaves_by_the_dt_reclaimer",
    "handed_over::many_machines_read_their_snapshot_once",
    "lab::experiments_with_tiers_have_all_their_rows",
    "lab::machines_of_flexswap",
    "latency::a_bound_that_no_page_in_can_keep",
    "latency::a_bound_that_the_device_misses",
    "latency::a_generous_bound_is_kept",
    "live_and_simulated::",
    "miss_ratio_curve::curve_of_one_run_is_near",
    "one_device::one_control_keeps_the_bounds",
    "one_device::programs_of_a_daemon_slow_each_other",
    "packaging::image_of_the_binary_of_musl",
    "packaging::image_of_the_static_binary",
    "packaging::package_in_a_clean_debian",
    "placed_by_file::",
    "plugins::a_linear_prefetch_as_a_policy_file",
    "plugins::a_policy_file_that_lets_a_walk",
    "plugins::the_template_of_the_command_saves",
    "policies::defaults_never_fault_far_more_often",
    "real_time::a_thread_that_spins_in_turns",
    "real_time::a_thread_that_spins_where_another_faults",
    "real_time::a_thread_that_spins_where_reclaim_works",
    "real_time::threads_that_spin_on_two_cpus",
    "reclaim_by_file::",
    "takeover::address_spaces_are_right_whenever_the_manager",
    "tiers::a_shape_makes_every_kind_of_tier_as_slow",
    "vm::memory_that_a_machine_gives_back",
    "vm::redis_in_a_machine_in_two_fifths",
    "vm_access::",
    "vm_back_ends::a_disk_that_another",
    "vm_inside::",
    "vm_kvm::a_running_guest_outlives",
    "vm_kvm::pages_that_a_running_guest_gives_back",
    "vm_large::",
    "vm_locks::",
    "vm_views::",
];

/// Groups of tests that take turns: a change runs one line of each. The lines of a group take about
/// the same time.
const TURNS: [&[&[&str]]; 2] = [ADDRESS_SPACE, PROGRAMS];

/// Random runs of the address space.
const ADDRESS_SPACE: &[&[&str]] = &[
    &["address_space::address_space_survives_each_policy"],
    &["address_space::address_space_survives_on_the_ram_tier_alone"],
    &[
        "address_space::address_space_survives_on_one_cpu",
        "address_space::address_space_survives_with_one_thread",
    ],
    &[
        "address_space::address_space_survives_guard_pages",
        "address_space::address_space_survives_on_a_small_pool",
    ],
    &[
        "address_space::address_space_survives_on_ram_over_file",
        "address_space::address_space_survives_scans_of_access_bits",
    ],
    &[
        "address_space::address_space_survives_on_the_file_tier",
        "address_space::address_space_survives_groups_that_overlap",
    ],
];

/// Programs that take long, and packages. One is as good as another to find what is broken for
/// programs; what is broken for one of them alone, one of three changes finds.
const PROGRAMS: &[&[&str]] = &[
    &[
        "documents::every_command_of_readme_and_guide_runs",
        "handed_over::machines_that_are_handed_over_keep",
        "real_programs::numpy_product_and_sort",
        "real_programs::sqlite_in_memory",
        "remote::remote_under_a_real_program",
    ],
    &[
        "packaging::package_of_fedora",
        "packaging::packages_of_both_kinds",
        "real_programs::jvm_program",
        "servers::redis_keeps_every_value_and_snapshots",
        "slabs::a_run_has_what_others_do_not_use",
        "tiers::packed_copies_are_right",
        "tiers::packed_files_keep_every_byte",
    ],
    &[
        "browser::chromium_with_its_sandbox",
        "handed_over::hostile_monitors_are_refused",
        "real_programs::gcc_makes_the_same",
        "real_programs::stress_ng_finds_no_wrong",
        "servers::memcached_keeps_every_value",
        "soak::ten_clients_come_and_go",
        "trees::pages_that_a_move_forgot",
        "trees::python_workers_made_by_fork",
        "vm_kvm::increments_are_lost_if",
    ],
];

/// Tests that a change does not run.
///
/// * `commit`: its name, in hexadecimal digits. It says whose turn it is.
pub(crate) fn later(commit: &str) -> Vec<&'static str> {
    let digits = commit.get(..8).unwrap_or("0");
    let number = u32::from_str_radix(digits, 16).unwrap_or(0) as usize;
    let others = TURNS.iter().flat_map(|group| {
        let lines = group.iter().enumerate();
        lines.filter(|(at, _)| *at != number % group.len())
    });
    let others = others.flat_map(|(_, names)| names.iter().copied());
    SECOND.into_iter().chain(others).collect()
}

/// Names of the tables that no test of `list` (what `--list` prints) has: the tables are stale.
pub(crate) fn unknown(list: &str) -> Vec<&'static str> {
    let all = SECOND.into_iter().chain(in_turns());
    all.filter(|name| !list.lines().any(|line| line.starts_with(name)))
        .collect()
}

/// All tests that take turns.
fn in_turns() -> impl Iterator<Item = &'static str> {
    TURNS.into_iter().flatten().copied().flatten().copied()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_turn_comes_and_leaves_the_others_for_later() {
        for group in TURNS {
            for turn in 0..group.len() {
                let later = later(&format!("{turn:08x}aaaa"));
                for (at, names) in group.iter().enumerate() {
                    let are_later = names.iter().all(|name| later.contains(name));
                    let none_is = !names.iter().any(|name| later.contains(name));
                    assert!(if at == turn { none_is } else { are_later });
                }
                assert!(SECOND.iter().all(|name| later.contains(name)));
            }
        }
        assert_eq!(later("no commit"), later("00000000"));
    }

    #[test]
    fn a_name_that_no_test_has_is_told() {
        let all: Vec<&str> = (SECOND.into_iter().chain(in_turns())).collect();
        let list = all.join("_and_more: test\n");
        assert!(unknown(&list).is_empty());
        let without = list.replace("live_and_simulated::", "gone::");
        assert_eq!(unknown(&without), ["live_and_simulated::"]);
    }
}
