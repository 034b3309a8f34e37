//! The inside of a virtual machine, as a policy file sees it: which instruction faults, by which
//! page tables, and where pages of a program in the guest are in its memory.

use std::path::Path;

use rustix::process::Signal;
use undercroft_tests::{MIB, Outcome, Running, has_access_bits, policy_alone, say, turn};

use crate::flexswap::{parameter, policy, set, text};
use crate::vm::guest;
use crate::vm_kvm::has_kvm;

/// Of the guest: its pages are 512 times those of the set, which are anywhere among them.
const BYTES: u64 = 4096 * MIB;
const SET_MIB: u64 = 8;
const ROUNDS: u64 = 3;

/// A virtual CPU that walks through a set of pages in the order of its addresses, three quarters of
/// which are in memory.
fn walk(policy: &str, folder: &Path) -> Running {
    let words = [4096, 1, 1, SET_MIB, ROUNDS, 500].map(|word| word.to_string());
    let words: Vec<&str> = (["linear"].into_iter())
        .chain(words.iter().map(String::as_str))
        .collect();
    let spill = folder.join("spill").display().to_string();
    let job = guest("kvm_guest", BYTES, &words).limit(LIMIT);
    let job = job.tier(&format!("file:{spill},size=1G")).timeout(100);
    let mut run = job.options(policy_alone(policy)).start();
    filled(&mut run);
    run
}

/// Three quarters of the set, and what the monitor and the page tables have.
const LIMIT: u64 = 6 * MIB;

fn filled(run: &mut Running) {
    run.until("memory that is filled", 60, |run| {
        let said = std::fs::read_to_string(run.scratch().join("output")).ok()?;
        said.contains("filled").then_some(())
    });
}

/// Has the virtual CPU walk, and waits for the end. Returns its seconds, and how often it waited
/// for a page.
fn walked(run: Running, what: &str) -> (f64, f64, Outcome) {
    run.signal(Signal::TERM);
    let outcome = run.wait().expect(0);
    let said = outcome.text();
    let mut words = said.split_whitespace().skip(1).map(str::parse::<f64>);
    let mut number = || words.next().expect("a number").expect("a number");
    let (seconds, wrong) = (number(), number());
    assert_eq!(wrong, 0.0, "{outcome}");
    let of = |what| outcome.number(what).expect("a number");
    let waits = of("faults.total") - of("faults.first_touch");
    let ahead = of("pages.prefetched");
    say(&format!(
        "{what}: {waits} waits, {ahead} pages came before, {seconds} s"
    ));
    (seconds, waits, outcome)
}

/// FlexSwap's LinearPF: what follows in the order of a guest's addresses is what is needed next,
/// and what follows in its memory is not.
#[test]
fn a_linear_prefetch_in_the_order_of_a_guests_addresses_comes_in_time() {
    turn!(one_at_a_time, "a plain run has no policy");
    let folder = tempfile::tempdir().expect("a scratch folder");
    let file = policy("linear_pf", folder.path()).filter(|_| has_access_bits());
    let Some(file) = file.filter(|_| has_kvm()) else {
        return;
    };
    let [none, gva, hva] = ["ahead=0", "gva=1", "gva=0"].map(|how| {
        let mut run = walk(text(&file), folder.path());
        run.until("the policy", 30, |run| parameter(&run.status()?, "gva"));
        set(&run, &format!("policy.{how}"));
        walked(run, how)
    });
    let (base_seconds, base, _) = none;
    let in_time = |(_, waits, _): &(f64, f64, Outcome)| (1.0 - waits / base) * 100.0;
    say(&format!(
        "in time: {:.1} % in the order of the guest's addresses, {:.1} % in that of its memory; \
         {:.1} % and {:.1} % less time",
        in_time(&gva),
        in_time(&hva),
        (1.0 - gva.0 / base_seconds) * 100.0,
        (1.0 - hva.0 / base_seconds) * 100.0
    ));
    assert!(base > (ROUNDS * SET_MIB * 256) as f64 / 2.0, "{base}");
    assert!(in_time(&gva) > 80.0, "{}", gva.2);
    assert!(in_time(&hva) < 20.0, "{}", hva.2);
}

/// Shows the tables and the instruction of the last fault of which both are known, how many these
/// were, and how many pages were the same there and back.
const TELLS: &str = r#"(module
    (import "undercroft" "get_fault_cr3" (func $cr3 (result i64)))
    (import "undercroft" "get_fault_ip" (func $ip (result i64)))
    (import "undercroft" "gva_to_hva" (func $hva (param i32 i64 i64) (result i64)))
    (import "undercroft" "hva_to_gva" (func $gva (param i32 i64 i64) (result i64)))
    (import "undercroft" "register_parameter"
        (func $register (param i32 i32 i64) (result i32)))
    (import "undercroft" "get_parameter" (func $get (param i32) (result i64)))
    (import "undercroft" "set_parameter" (func $set (param i32 i64) (result i32)))
    (memory (export "memory") 1)
    (data (i32.const 0) "cr3ipfaultssame")
    (func (export "abi_version") (result i32) (i32.const 1))
    (func (export "init")
        (drop (call $register (i32.const 0) (i32.const 3) (i64.const 0)))
        (drop (call $register (i32.const 3) (i32.const 2) (i64.const 0)))
        (drop (call $register (i32.const 5) (i32.const 6) (i64.const 0)))
        (drop (call $register (i32.const 11) (i32.const 4) (i64.const 0))))
    (func $one_more (param $of i32)
        (drop (call $set (local.get $of)
            (i64.add (call $get (local.get $of)) (i64.const 1)))))
    (func (export "on_event")
        (param $kind i32) (param $space i32) (param $page i64) (param $pages i64)
        (param $detail i64) (local $gva i64)
        (if (i32.ne (local.get $kind) (i32.const 1)) (then (return)))
        (if (i64.eqz (call $cr3)) (then (return)))
        (drop (call $set (i32.const 0) (call $cr3)))
        (drop (call $set (i32.const 1) (call $ip)))
        (call $one_more (i32.const 2))
        (local.set $gva (call $gva (local.get $space) (call $cr3) (local.get $page)))
        (if (i64.lt_u (local.get $gva) (i64.const 268435456)) (then (return)))
        (if (i64.eq (local.get $page)
                (call $hva (local.get $space) (call $cr3) (local.get $gva)))
            (then (call $one_more (i32.const 3))))))"#;

#[test]
fn a_policy_file_hears_which_instruction_of_a_guest_faults_and_by_which_tables() {
    turn!(one_at_a_time, "a plain run has no policy");
    if !has_access_bits() || !has_kvm() {
        return;
    }
    let folder = tempfile::tempdir().expect("a scratch folder");
    let file = folder.path().join("tells.wasm");
    std::fs::write(&file, wat::parse_str(TELLS).expect("right text")).expect("a scratch file");
    let mut run = walk(text(&file), folder.path());
    run.until("the policy", 30, |run| parameter(&run.status()?, "faults"));
    run.signal(Signal::TERM);
    let of = run.until("faults of the guest", 60, |run| {
        let status = run.status()?;
        let of = ["cr3", "ip", "faults", "same"].map(|name| parameter(&status, name));
        (of[3]? > 1000).then_some(of.map(Option::unwrap_or_default))
    });
    say(&format!(
        "of a guest: cr3, ip, faults, pages there and back: {of:x?}"
    ));
    let [cr3, ip, faults, same] = of;
    assert_eq!(cr3, 0x20_0000, "its tables begin at 2 MiB");
    assert!((0x4_0000..0x4_2000).contains(&ip), "its code is at 256 KiB");
    assert!(same * 10 > faults * 8, "{same} of {faults}");
    run.wait().expect(0);
}
